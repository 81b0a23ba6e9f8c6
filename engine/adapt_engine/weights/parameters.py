"""What a model needs: every parameter in logical coordinates, with the checkpoint tensor it comes from.

A parameter has the shape of the whole model; what one rank holds of it is a ShardSlice. On one rank the
slice is everything. Experts are separate parameters stacked into one buffer, because kernels want
[experts, out, in] while checkpoints and placements deal with single experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import AttentionSpec, DenseSpec, ModelSpec, MoESpec

__all__ = ["ParameterSpec", "ShardSlice", "expected_parameters", "ignored_source"]


@dataclass(frozen=True)
class ShardSlice:
    """The part of a parameter that one rank holds: [start, stop) of each axis."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> ShardSlice:
        return cls(tuple((0, length) for length in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)

    def index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.ranges)


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: logical name, unsharded shape, checkpoint tensor, and where it is kept."""

    name: str
    shape: tuple[int, ...]
    source: str
    buffer: str
    """Name of the tensor that holds it (its own, or the stack of its layer's experts)."""
    slot: int = -1
    """Row of the stack; -1 where the buffer is the parameter itself."""
    stack: int = 0
    """Length of the stack."""
    fp32: bool = False
    """Kept in float32 whatever the precision: router matrix and selection bias decide discrete choices."""


def _plain(name: str, shape: tuple[int, ...], source: str, *, fp32: bool = False) -> ParameterSpec:
    return ParameterSpec(name, shape, source, name, fp32=fp32)


def expected_parameters(spec: ModelSpec) -> Iterator[ParameterSpec]:
    """Every parameter of the model, in dataflow order."""
    yield _plain("embed", (spec.vocab, spec.hidden), "model.embed_tokens.weight")
    for index, layer in enumerate(spec.layers):
        name, source = f"layer.{index}", f"model.layers.{index}"
        yield _plain(f"{name}.attn.norm", (spec.hidden,), f"{source}.input_layernorm.weight")
        yield from _attention(f"{name}.attn", f"{source}.self_attn", spec.hidden, layer.attention)
        yield _plain(f"{name}.ffn.norm", (spec.hidden,), f"{source}.post_attention_layernorm.weight")
        if isinstance(layer.ffn, MoESpec):
            yield from _moe(f"{name}.moe", f"{source}.{layer.ffn.module}", spec.hidden, layer.ffn)
        else:
            yield from _dense(f"{name}.ffn", f"{source}.mlp", spec.hidden, layer.ffn)
    yield _plain("final.norm", (spec.hidden,), "model.norm.weight")
    if not spec.tied:
        yield _plain("head", (spec.vocab, spec.hidden), "lm_head.weight")


def _linear(name: str, source: str, out: int, width: int, bias: bool) -> Iterator[ParameterSpec]:
    yield _plain(f"{name}.weight", (out, width), f"{source}.weight")
    if bias:
        yield _plain(f"{name}.bias", (out,), f"{source}.bias")


def _attention(name: str, source: str, hidden: int, spec: AttentionSpec) -> Iterator[ParameterSpec]:
    bias = spec.qkv_bias
    if spec.kind == "mla":
        width = spec.heads * spec.head_dim
        if spec.q_lora:
            yield from _linear(f"{name}.q_a", f"{source}.q_a_proj", spec.q_lora, hidden, bias)
            yield _plain(f"{name}.q_a_norm", (spec.q_lora,), f"{source}.q_a_layernorm.weight")
            yield from _linear(f"{name}.q", f"{source}.q_b_proj", width, spec.q_lora, False)
        else:
            yield from _linear(f"{name}.q", f"{source}.q_proj", width, hidden, False)
        rows = spec.kv_lora + spec.rope_dim
        yield from _linear(f"{name}.kv_a", f"{source}.kv_a_proj_with_mqa", rows, hidden, bias)
        yield _plain(f"{name}.kv_a_norm", (spec.kv_lora,), f"{source}.kv_a_layernorm.weight")
        rows = spec.heads * (spec.nope_dim + spec.value_dim)
        yield from _linear(f"{name}.kv_b", f"{source}.kv_b_proj", rows, spec.kv_lora, False)
    else:
        yield from _linear(f"{name}.q", f"{source}.q_proj", spec.heads * spec.head_dim, hidden, bias)
        yield from _linear(f"{name}.k", f"{source}.k_proj", spec.kv_heads * spec.head_dim, hidden, bias)
        yield from _linear(f"{name}.v", f"{source}.v_proj", spec.kv_heads * spec.value_dim, hidden, bias)
        if spec.qk_norm:
            yield _plain(f"{name}.q_norm", (spec.head_dim,), f"{source}.q_norm.weight")
            yield _plain(f"{name}.k_norm", (spec.head_dim,), f"{source}.k_norm.weight")
    yield from _linear(f"{name}.out", f"{source}.o_proj", hidden, spec.heads * spec.value_dim, spec.out_bias)


def _dense(name: str, source: str, hidden: int, spec: DenseSpec) -> Iterator[ParameterSpec]:
    yield from _linear(f"{name}.gate", f"{source}.gate_proj", spec.inter, hidden, spec.bias)
    yield from _linear(f"{name}.up", f"{source}.up_proj", spec.inter, hidden, spec.bias)
    yield from _linear(f"{name}.down", f"{source}.down_proj", hidden, spec.inter, spec.bias)


def _moe(name: str, source: str, hidden: int, spec: MoESpec) -> Iterator[ParameterSpec]:
    yield _plain(f"{name}.router.weight", (spec.experts, hidden), f"{source}.gate.weight", fp32=True)
    if spec.selection_bias:
        yield _plain(f"{name}.router.bias", (spec.experts,), f"{source}.gate.e_score_correction_bias", fp32=True)
    shapes = {"gate": (spec.inter, hidden), "up": (spec.inter, hidden), "down": (hidden, spec.inter)}
    for (part, shape), stored in zip(shapes.items(), spec.projections, strict=True):
        for expert in range(spec.experts):
            yield ParameterSpec(
                name=f"{name}.experts.{expert}.{part}",
                shape=shape,
                source=f"{source}.experts.{expert}.{stored}.weight",
                buffer=f"{name}.experts.{part}",
                slot=expert,
                stack=spec.experts,
            )
    if spec.shared_inter:
        dense = DenseSpec(spec.shared_inter)
        yield from _dense(f"{name}.shared", f"{source}.shared_experts", hidden, dense)


def ignored_source(spec: ModelSpec, tensor: str) -> str | None:
    """Why a checkpoint tensor may be left unread, or None where it may not."""
    if tensor.endswith(".rotary_emb.inv_freq"):
        return "frequencies are computed from config.json"
    count = len(spec.layers)
    for index in range(count, count + spec.draft_layers):
        if tensor.startswith(f"model.layers.{index}."):
            return "multi-token-prediction layer, not part of this model's output"
    return None
