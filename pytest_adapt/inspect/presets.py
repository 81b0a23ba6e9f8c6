"""Published shapes of real models, by name: what `inspect` can be asked about without a config.json.

``data/presets.json`` holds the facts (from the models' own config.json files and reports, totals as published)
and, for comparison, totals computed independently of this package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from pytest_adapt.inspect.structure import Attention, FeedForward, InspectError, Layer, Linear, Structure

__all__ = ["preset", "presets"]

# Which layers have softmax attention over the whole context, for each published pattern: (index, count) -> bool.
_FULL: dict[str, Callable[[int, int], bool]] = {
    "3 gdn : 1 gqa": lambda i, n: i % 4 == 3,
    "3 kda : 1 mla": lambda i, n: i % 4 == 3 or i == n - 1,
    "mla at 1-based 4,8,...,92,93; rest kda": lambda i, n: i % 4 == 3 or i == n - 1,
    "swa128, full alternating (even layers SWA)": lambda i, n: i % 2 == 1,
    "3 chunked-rope : 1 full-NoPE": lambda i, n: i % 4 == 3,
    "3 chunked-rope : 1 full-NoPE; MoE every 2nd layer": lambda i, n: i % 4 == 3,
}
_SCORES = ("softmax", "sigmoid")


def presets() -> Mapping[str, Mapping[str, Any]]:
    """Raw presets by name."""
    file = resources.files("pytest_adapt.inspect") / "data" / "presets.json"
    raw: Mapping[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return raw


def preset(name: str) -> Structure:
    """Structure of a published model. Raises InspectError (unknown name, missing field, unknown attention)."""
    known = presets()
    if name not in known:
        raise InspectError(f"unknown preset {name!r}; presets are {', '.join(known)}")
    raw = known[name]
    for key in ("layers", "hidden", "vocab", "ctx", "attn", "moe"):
        if key not in raw:
            raise InspectError(f"preset {name}: field {key} is not published")
    count = raw["layers"]
    full = _full_layers(name, raw)
    softmax, other = _attention(name, raw)
    dense = FeedForward(raw.get("dense_inter", 0))
    mixture = _mixture(raw)
    layers = []
    for index in range(count):
        attention = softmax if full is None or index in full else other
        feed_forward = mixture if _sparse(raw, index) else dense
        layers.append(Layer(attention, feed_forward))
    return Structure(
        name=name,
        architecture=f"preset {name}",
        hidden=raw["hidden"],
        vocab=raw["vocab"],
        context=raw.get("ctx_long", raw["ctx"]),
        layers=tuple(layers),
        gaps=tuple(_gaps(raw)),
        notes=tuple(_notes(raw)),
    )


def _full_layers(name: str, raw: Mapping[str, Any]) -> set[int] | None:
    """Indices of layers with full attention; None where all layers are alike."""
    pattern = raw.get("pattern")
    if pattern is None:
        return None
    if pattern not in _FULL:
        raise InspectError(f"preset {name}: unknown layer pattern {pattern!r}")
    found = {i for i in range(raw["layers"]) if _FULL[pattern](i, raw["layers"])}
    if len(found) != raw["full_layers"]:
        raise InspectError(
            f"preset {name}: pattern {pattern!r} gives {len(found)} full layers, not {raw['full_layers']}"
        )
    return found


def _sparse(raw: Mapping[str, Any], index: int) -> bool:
    if "MoE every 2nd layer" in raw.get("pattern", ""):
        return index % 2 == 1
    return bool(index >= raw.get("dense_layers", 0))


def _attention(name: str, raw: Mapping[str, Any]) -> tuple[Attention, Attention | Linear]:
    """(attention of full layers, attention of the others)."""
    a = raw["attn"]
    if a["kind"] == "mla":
        index = a.get("dsa")
        softmax = Attention(
            a["heads"],
            a["heads"],
            a["nope"] + a["rope"],
            a["v"],
            scheme="sparse" if index else "full",
            reach=index["topk"] if index else 0,
            q_lora=a["q_lora"],
            kv_lora=a["kv_lora"],
            rope=a["rope"],
            out_gate=bool(a.get("out_gate")),
            index_heads=index["heads"] if index else 0,
            index_dim=index["dim"] if index else 0,
        )
    elif a["kind"] == "gqa":
        heads, kv_heads, width = a["heads"], a["kv_heads"], a["head_dim"]
        norms = {"head": 2 * width, "per_layer": (heads + kv_heads) * width}.get(a.get("qk_norm", ""), 0)
        softmax = Attention(
            heads,
            kv_heads,
            width,
            width,
            qkv_bias=bool(a.get("bias") or a.get("qkv_bias")),
            out_bias=bool(a.get("bias")),
            norm_params=norms,
            sinks=bool(a.get("sinks")),
            out_gate=bool(a.get("out_gate")),
        )
    else:
        raise InspectError(
            f"preset {name}: attention kind {a['kind']!r} has no model here; its sizes cannot be computed"
        )
    reach = a.get("window", a.get("chunk", 0))
    scheme = "window" if "window" in a else "chunked"
    other: Attention | Linear = replace(softmax, scheme=scheme, reach=reach) if reach else softmax
    linear = raw.get("linear_attn")
    if linear:
        heads = linear.get("heads", 0)
        other = Linear(
            linear["kind"],
            linear.get("k_heads", heads),
            linear.get("v_heads", heads),
            linear["head_dim"],
            linear["conv"],
            bool(linear.get("full_gate")),
            heads=linear.get("v_heads", heads),
        )
    return softmax, other


def _mixture(raw: Mapping[str, Any]) -> FeedForward:
    m = raw["moe"]
    return FeedForward(
        m["inter"],
        m["experts"],
        m["topk"],
        m.get("shared", 0) * m.get("shared_inter", 0),
        shared_gate=bool(m.get("shared_gate")),
        selection_bias=bool(m.get("bias_correction")),
        router_bias=bool(m.get("router_bias")),
        bias=bool(m.get("expert_bias")),
        latent=m.get("latent", 0),
        groups=m.get("n_group", 1),
        groups_kept=m.get("topk_group", 1),
    )


def _gaps(raw: Mapping[str, Any]) -> list[str]:
    """Operators and options of this model that pytest-adapt has no reference for."""
    a, m, rope = raw["attn"], raw["moe"], raw.get("rope", {})
    linear = raw.get("linear_attn")
    found = [
        (linear, f"linear attention {linear['kind'] if linear else ''}"),
        (a.get("out_gate"), "gated attention output"),
        (a.get("sinks"), "attention sinks"),
        (a.get("dsa"), "top-k sparse attention with an index"),
        (a.get("chunk"), "chunked attention"),
        (a.get("nope_mode") or a.get("nope_every"), "attention without positions"),
        (a.get("qk_norm") not in (None, "head"), f"query and key norm {a.get('qk_norm')!r}"),
        (a.get("temp_tuning"), "attention temperature by position"),
        (rope.get("partial") or a.get("rotary_dim"), "partial rotary embedding"),
        (rope.get("mrope"), "multimodal rotary embedding"),
        (m["score"] not in _SCORES, f"router scoring {m['score']!r}"),
        (m.get("act"), f"activation {m.get('act')!r}"),
        (m.get("latent"), "experts in a latent width"),
        (m.get("shared_gate"), "gated shared expert"),
        (m.get("scale_input"), "router weight on the expert's input"),
        (m.get("router_bias") or m.get("expert_bias"), "biases of router and experts"),
        (raw.get("attn_res"), "attention over residuals"),
        (raw.get("vision"), "vision encoder (not in the totals)"),
    ]
    return [f"{text}: no reference" for present, text in found if present]


def _notes(raw: Mapping[str, Any]) -> list[str]:
    stored = raw["moe"].get("weights")
    return [f"published weights are stored as {stored}"] if stored else []
