"""Names and shapes of a model's weights, as Hugging Face checkpoints spell them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from .checkpoint import Checkpoint
from .errors import OracleError
from .spec import GroupedQuery, Latent, MixtureSpec, ModelSpec

__all__ = ["audit", "expected", "expert_projections", "mixture_prefix"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def mixture_prefix(spec: ModelSpec, layer: int) -> str:
    """Where the router and experts of a layer lie."""
    return f"model.layers.{layer}.{'block_sparse_moe' if _mixtral(spec) else 'mlp'}"


def expert_projections(spec: ModelSpec) -> tuple[str, str, str]:
    """Names of an expert's gate, up and down projections."""
    return ("w1", "w3", "w2") if _mixtral(spec) else ("gate_proj", "up_proj", "down_proj")


def expected(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight that the model reads; projections are [out, in]."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    found["model.norm.weight"] = (spec.hidden,)
    if not spec.tied:
        found["lm_head.weight"] = (spec.vocab, spec.hidden)
    for number, layer in enumerate(spec.layers):
        prefix = f"model.layers.{number}"
        found[f"{prefix}.input_layernorm.weight"] = (spec.hidden,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (spec.hidden,)
        attention = (
            _latent(spec.attention, spec) if isinstance(spec.attention, Latent) else _grouped(spec.attention, spec)
        )
        found |= {f"{prefix}.self_attn.{name}": shape for name, shape in attention}
        if layer.mixture and spec.mixture is not None:
            found |= dict(_mixture(spec, spec.mixture, mixture_prefix(spec, number)))
        else:
            found |= dict(_feed_forward(spec, f"{prefix}.mlp", spec.intermediate, spec.mlp_bias))
    return found


def audit(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise OracleError for a missing weight, a wrong shape, or a tensor that the model would leave unread.

    Rotary tables of old files, layers behind the last one (multi-token prediction) and a head equal to the tied
    embedding may lie there unread.
    """
    wanted = expected(spec)
    for name, shape in wanted.items():
        if name not in checkpoint:
            raise OracleError(f"{checkpoint.directory}: {name} is missing; {spec.architecture} as configured needs it")
        if checkpoint.shape(name) != shape:
            raise OracleError(f"{checkpoint.directory}: {name} has shape {checkpoint.shape(name)}; expected {shape}")
    for name in checkpoint.names():
        if name in wanted or name.endswith("rotary_emb.inv_freq"):
            continue
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= len(spec.layers):
            continue
        if name == "lm_head.weight":
            if np.array_equal(checkpoint.tensor(name), checkpoint.tensor("model.embed_tokens.weight")):
                continue
            raise OracleError(f"{checkpoint.directory}: lm_head.weight differs from the embedding that ties it")
        raise OracleError(f"{checkpoint.directory}: {name} is read by no part of {spec.architecture} as configured")


def _mixtral(spec: ModelSpec) -> bool:
    return spec.architecture == "MixtralForCausalLM"


def _grouped(attention: GroupedQuery, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = attention.head_dim
    for part, heads in (("q", attention.heads), ("k", attention.kv_heads), ("v", attention.kv_heads)):
        yield f"{part}_proj.weight", (heads * width, spec.hidden)
        if attention.bias:
            yield f"{part}_proj.bias", (heads * width,)
    yield "o_proj.weight", (spec.hidden, attention.heads * width)
    if attention.bias:
        yield "o_proj.bias", (spec.hidden,)
    if attention.qk_norm:
        yield "q_norm.weight", (width,)
        yield "k_norm.weight", (width,)


def _latent(attention: Latent, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    query = attention.heads * (attention.nope + attention.rope)
    biased = [("kv_a_proj_with_mqa", attention.kv_lora + attention.rope, spec.hidden)]
    biased.append(("o_proj", spec.hidden, attention.heads * attention.value))
    plain = [("kv_b_proj", attention.heads * (attention.nope + attention.value), attention.kv_lora)]
    if attention.q_lora:
        biased.append(("q_a_proj", attention.q_lora, spec.hidden))
        plain.append(("q_b_proj", query, attention.q_lora))
        yield "q_a_layernorm.weight", (attention.q_lora,)
    else:
        plain.append(("q_proj", query, spec.hidden))
    yield "kv_a_layernorm.weight", (attention.kv_lora,)
    for name, rows, columns in biased + plain:
        yield f"{name}.weight", (rows, columns)
    if attention.bias:
        for name, rows, _ in biased:
            yield f"{name}.bias", (rows,)


def _feed_forward(spec: ModelSpec, prefix: str, width: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows, columns in (
        ("gate_proj", width, spec.hidden),
        ("up_proj", width, spec.hidden),
        ("down_proj", spec.hidden, width),
    ):
        yield f"{prefix}.{name}.weight", (rows, columns)
        if bias:
            yield f"{prefix}.{name}.bias", (rows,)


def _mixture(spec: ModelSpec, mixture: MixtureSpec, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts, width = mixture.router.experts, mixture.intermediate
    yield f"{prefix}.gate.weight", (experts, spec.hidden)
    if mixture.router.selection_bias:
        yield f"{prefix}.gate.e_score_correction_bias", (experts,)
    gate, up, down = expert_projections(spec)
    for expert in range(experts):
        yield f"{prefix}.experts.{expert}.{gate}.weight", (width, spec.hidden)
        yield f"{prefix}.experts.{expert}.{up}.weight", (width, spec.hidden)
        yield f"{prefix}.experts.{expert}.{down}.weight", (spec.hidden, width)
    if mixture.shared:
        yield from _feed_forward(spec, f"{prefix}.shared_experts", mixture.shared, False)
