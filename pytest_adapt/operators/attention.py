"""Rotary embedding, attention over grouped heads and over a latent, softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pytest_adapt.inspect.presets import presets
from pytest_adapt.operators.case import Case
from pytest_adapt.operators.definition import Op, Values
from pytest_adapt.operators.dense import widths
from pytest_adapt.operators.draw import Draw, Operand
from pytest_adapt.oracle.blocks import attend, rotary_tables, rotate
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.oracle.routing import scores_of
from pytest_adapt.oracle.spec import RopeSpec, RouterSpec

__all__ = ["Attention", "LatentAttention", "Rotary", "Softmax"]

_ATTN = "layer.0.attn"
_SCALINGS = ("default", "yarn", "llama3")
_ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    # DeepSeek-V3 and Llama 3.1 as published.
    "yarn": {"factor": 40.0, "original_max_position": 4096, "scale": 1.25, "beta_fast": 32.0, "beta_slow": 1.0},
    "llama3": {"factor": 8.0, "original_max_position": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


class Rotary(Op):
    """Rotate channel pairs of x [rows, heads, 2 half] at positions first .. first + rows - 1. The result holds the
    first members of all pairs, then the second ones, also where pairs lie interleaved."""

    name = "rotary"
    space = {
        "rows": range(20),
        "heads": range(1, 5),
        "half": range(1, 20),
        "kind": _SCALINGS,
        "interleaved": (False, True),
        "first": (0, 1, 4095, 131072, 1000000),
        "theta": (10000.0, 1000000.0, 500000.0),
    }
    base = {"rows": 40, "heads": 2, "half": 10}
    edges = (
        *({"kind": kind, "interleaved": mixed} for kind in _SCALINGS for mixed in (False, True)),
        *({"kind": kind, "first": first, "rows": 3} for kind in _SCALINGS for first in (1, 4095, 131072, 999990)),
        {"rows": 0},
        {"rows": 1, "first": 1000000},
    )
    wrt = ("x",)
    gradient = {"rows": 3, "heads": 2, "half": 3, "first": 1}

    def published(self) -> Sequence[dict[str, Any]]:
        halves = sorted({width // 2 for width in (*widths("attn", "head_dim"), *widths("attn", "rope"))})
        return [{"rows": 8, "heads": 2, "half": half, "theta": 1000000.0} for half in halves]

    def attributes(self, case: Case) -> dict[str, Any]:
        words = {"kind": case["kind"], "dim": 2 * case["half"], "theta": case["theta"]}
        return {**words, "interleaved": case["interleaved"], **_ROPE[case["kind"]]}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        case = draw.case
        positions = case["first"] + np.arange(case["rows"], dtype=np.int64)
        x = draw.activation(case["rows"], case["heads"], 2 * case["half"])
        return {"x": x, "positions": Operand(positions, "int")}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        spec = RopeSpec(**self.attributes(case))
        tables = rotary_tables(n, spec, x["positions"])
        return {"out": rotate(n, f"{_ATTN}.q_rope", x["x"], tables, spec.interleaved)}


class Attention(Op):
    """Causal softmax attention of one sequence: the last ``rows`` of past + rows positions ask, all are keys.

    q [rows, heads, width], k [past + rows, kv_heads, width], v [..., value_width] -> [rows, heads, value_width]; query
    head i reads key head i // (heads / kv_heads); window 0 sees all keys before, else that many, itself included.
    """

    name = "attention"
    space = {
        "rows": range(1, 20),
        "past": range(40),
        "kv_heads": range(1, 4),
        "repeats": range(1, 5),
        "width": range(1, 20),
        "value_width": range(20),
        "window": (0, 1, 2, 5, 16),
    }
    base = {"rows": 17, "past": 5, "kv_heads": 2, "repeats": 3, "width": 20}
    edges = (
        *({"rows": 1, "past": past} for past in (0, 1, 14, 15, 16, 31, 63)),
        *({"rows": rows, "past": past} for rows, past in ((15, 0), (16, 0), (17, 0), (7, 16), (65, 0), (2, 256))),
        *({"window": window, "rows": 24} for window in (1, 2, 7, 16)),
        {"rows": 1, "past": 40, "window": 16},
        {"value_width": 13},
        {"kv_heads": 1, "repeats": 6, "value_width": 12, "rows": 1, "past": 20},
        {"kv_heads": 3, "repeats": 1},
    )
    wrt = ("q", "k", "v")
    gradient = {"rows": 3, "past": 1, "kv_heads": 1, "repeats": 2, "width": 3}

    def published(self) -> Sequence[dict[str, Any]]:
        found = {(raw["attn"]["heads"], raw["attn"]["kv_heads"], raw["attn"]["head_dim"]): None
                 for raw in presets().values() if raw["attn"]["kind"] == "gqa"}  # fmt: skip
        return [
            {"rows": rows, "past": past, "kv_heads": 1, "repeats": heads // groups, "width": width}
            for heads, groups, width in sorted(found)
            for rows, past in ((9, 8), (1, 33))
        ]

    unseen = 1

    def terms(self, case: Case, operands: Mapping[str, Operand]) -> dict[str, np.ndarray]:
        """Weights are positive: only values can cancel."""
        return self.evaluate(case, {**operands, "v": operands["v"].magnitude()}, None)

    def attributes(self, case: Case) -> dict[str, Any]:
        return {"scale": case["width"] ** -0.5, "window": case["window"]}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        case = draw.case
        keys, groups, width = case["past"] + case["rows"], case["kv_heads"], case["width"]
        # Larger scores than these make a choice of the softmax: a step that no error bound follows.
        shapes = {"q": (case["rows"], groups * case["repeats"], width), "k": (keys, groups, width)}
        found = {name: draw.activation(*shape, huge=2, plain=("spike", "wide")) for name, shape in shapes.items()}
        return found | {"v": draw.activation(keys, groups, case["value_width"] or width)}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        return {"out": _attend_last(n, x["q"], x["k"], x["v"], case["past"], self.attributes(case))}


class LatentAttention(Op):
    """Multi-head latent attention from the compressed rows on.

    q [rows, heads, nope + rope], latent [past + rows, lora], k_rope [past + rows, rope] (rotated), weight
    [heads (nope + value), lora] -> [rows, heads, value].

    Expanding keys and values, or absorbing the weight into queries and output, are the same function.
    """

    name = "latent_attention"
    space = {
        "rows": range(1, 10),
        "past": range(40),
        "heads": range(1, 5),
        "lora": range(1, 20),
        "nope": range(1, 10),
        "rope": (2, 4, 6),
        "value": range(1, 10),
    }
    base = {"rows": 9, "past": 5, "heads": 3, "lora": 24, "nope": 12, "rope": 6, "value": 10}
    edges = (
        *({"rows": 1, "past": past} for past in (0, 1, 15, 16, 31)),
        *({"rows": rows, "past": past} for rows, past in ((16, 0), (17, 0), (5, 16))),
    )
    # Twice a rounded product: spikes and wide ranges make a choice of the softmax.
    kinds = ("normal", "negative", "tied", "zero", "small")
    unseen = 2

    def published(self) -> Sequence[dict[str, Any]]:
        found = {tuple(raw["attn"][key] for key in ("kv_lora", "nope", "rope", "v")): None
                 for raw in presets().values() if raw["attn"]["kind"] == "mla"}  # fmt: skip
        names = ("lora", "nope", "rope", "value")
        return [
            {"rows": rows, "past": past, "heads": 2, **dict(zip(names, shape, strict=True))}
            for shape in sorted(found)
            for rows, past in ((5, 4), (1, 17))
        ]

    def attributes(self, case: Case) -> dict[str, Any]:
        names = ("heads", "nope", "rope", "value")
        return {"scale": (case["nope"] + case["rope"]) ** -0.5, "window": 0, **{name: case[name] for name in names}}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        case = draw.case
        keys, heads, lora = case["past"] + case["rows"], case["heads"], case["lora"]
        return {
            "q": draw.activation(case["rows"], heads, case["nope"] + case["rope"]),
            "latent": draw.activation(keys, lora),
            "k_rope": draw.activation(keys, case["rope"]),
            "weight": draw.weight(heads * (case["nope"] + case["value"]), lora, scale=lora**-0.5),
        }

    def terms(self, case: Case, operands: Mapping[str, Operand]) -> dict[str, np.ndarray]:
        """Of the weighted values, once they are expanded."""
        return self.evaluate(case, operands, None, {"magnitudes": np.ones(1)})

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        keys, heads, nope = len(x["latent"]), case["heads"], case["nope"]
        expanded = n.linear(x["latent"], "weight").reshape(keys, heads, nope + case["value"])
        expanded = n.site(f"{_ATTN}.kv_b", expanded)
        turned = np.repeat(x["k_rope"][:, None], heads, axis=1)
        k = np.concatenate([expanded[..., :nope], turned], axis=-1)
        v = np.abs(expanded[..., nope:]) if "magnitudes" in x else expanded[..., nope:]
        return {"out": _attend_last(n, x["q"], k, v, case["past"], self.attributes(case))}


class Softmax(Op):
    """exp(x) over its sum, along the last axis of float32 x [rows, width]; the result is float32."""

    name = "softmax"
    space = {"rows": range(20), "width": range(1, 70)}
    base = {"rows": 9, "width": 103}
    edges = ({"rows": 0}, {"rows": 1, "width": 1}, {"rows": 64})
    outputs = {"out": "fp32"}
    wrt = ("x",)
    gradient = {"rows": 3, "width": 7}

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"rows": 3, "width": width} for width in widths("moe", "experts")]

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        return {"x": draw.activation(draw.case["rows"], draw.case["width"], format="fp32", huge=6)}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        router = RouterSpec(case["width"], 1, "softmax", False, 1, 1, False, 0.0, 1.0)
        return {"out": n.site("layer.0.moe.router.scores", scores_of(n, router, x["x"]))}


def _attend_last(
    n: Numerics, q: np.ndarray, k: np.ndarray, v: np.ndarray, past: int, attributes: dict[str, Any]
) -> np.ndarray:
    """The oracle's attention over a whole sequence, of which only the last rows ask."""
    whole = np.concatenate([np.zeros((past, *q.shape[1:]), q.dtype), q])
    return attend(n, _ATTN, whole, k, v, attributes["scale"], attributes["window"])[past:]
