"""What a model needs: every parameter in logical coordinates, with the checkpoint tensor it comes from.

A parameter has the shape of the whole model and says which of its axes may be cut, in what units; which rank
holds which part follows from that and from the layout (`adapt_engine.weights.shards`). Experts are separate
parameters stacked into one buffer, because kernels want [experts, out, in] while checkpoints and placements deal
with single experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..config import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec

__all__ = [
    "SEGMENT",
    "Axis",
    "ParameterSpec",
    "ShardSlice",
    "expected_parameters",
    "ignored_source",
    "segment_along",
    "segment_of",
]

SEGMENT = 512
"""Depth elements of a segment along an axis that no layout cuts."""
_PARTS = 8
_UNIT = 8


@dataclass(frozen=True)
class Axis:
    """A dimension that ranks may divide among themselves, never inside a unit."""

    name: str
    """heads, kv_heads, inter, expert_inter or vocab."""
    units: int
    """How many there are; a head of width d is one unit of d rows."""


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

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

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
    cut: Axis | None = None
    """The axis that ranks divide; None where every rank of a stage holds the whole."""
    dimension: int = 0
    """Dimension of ``shape`` that ``cut`` describes."""
    layer: int = -1
    """-1 outside the layers."""
    expert: int = -1
    """Expert that it belongs to; -1 where the buffer is the parameter itself."""
    experts: int = 0
    """Experts of the layer."""
    fp32: bool = False
    """Kept in float32 whatever the precision: router matrix and selection bias decide discrete choices."""


def segment_along(cut: Axis, length: int) -> int:
    """Elements of a canonical segment of an axis of ``length`` elements that ranks may divide and products add up.

    A head is a segment of what an output projection adds up; the axis of a feed-forward layer has about eight.
    """
    if cut.units < length:
        return length // cut.units
    return max(_UNIT, -(-length // (_PARTS * _UNIT)) * _UNIT)


def segment_of(parameter: ParameterSpec) -> int:
    """Elements of a canonical segment of the depth axis, of the unsharded tensor."""
    if parameter.cut is None or parameter.dimension != len(parameter.shape) - 1:
        return SEGMENT
    return segment_along(parameter.cut, parameter.shape[-1])


def _plain(
    name: str, shape: tuple[int, ...], source: str, cut: Axis | None = None, dimension: int = 0, *, fp32: bool = False
) -> ParameterSpec:
    return ParameterSpec(name, shape, source, name, cut, dimension, fp32=fp32)


def expected_parameters(spec: ModelSpec) -> Iterator[ParameterSpec]:
    """Every parameter of the model, in dataflow order."""
    vocab = Axis("vocab", spec.vocab)
    yield _plain("embed", (spec.vocab, spec.hidden), "model.embed_tokens.weight", vocab)
    for index, layer in enumerate(spec.layers):
        for parameter in _layer(f"layer.{index}", f"model.layers.{index}", spec.hidden, layer):
            yield replace(parameter, layer=index)
    yield _plain("final.norm", (spec.hidden,), "model.norm.weight")
    if not spec.tied:
        yield _plain("head", (spec.vocab, spec.hidden), "lm_head.weight", vocab)


def _layer(name: str, source: str, hidden: int, layer: LayerSpec) -> Iterator[ParameterSpec]:
    yield _plain(f"{name}.attn.norm", (hidden,), f"{source}.input_layernorm.weight")
    yield from _attention(f"{name}.attn", f"{source}.self_attn", hidden, layer.attention)
    yield _plain(f"{name}.ffn.norm", (hidden,), f"{source}.post_attention_layernorm.weight")
    if isinstance(layer.ffn, MoESpec):
        yield from _moe(f"{name}.moe", f"{source}.{layer.ffn.module}", hidden, layer.ffn)
    else:
        yield from _dense(f"{name}.ffn", f"{source}.mlp", hidden, layer.ffn)


def _linear(
    name: str, source: str, out: int, width: int, bias: bool, *, rows: Axis | None = None, columns: Axis | None = None
) -> Iterator[ParameterSpec]:
    """Matrix [out, width] and bias [out]. A cut of its columns leaves the bias whole: it is added once."""
    yield _plain(f"{name}.weight", (out, width), f"{source}.weight", rows or columns, int(rows is None))
    if bias:
        yield _plain(f"{name}.bias", (out,), f"{source}.bias", rows)


def _attention(name: str, source: str, hidden: int, spec: AttentionSpec) -> Iterator[ParameterSpec]:
    bias = spec.qkv_bias
    heads, kv_heads = Axis("heads", spec.heads), Axis("kv_heads", spec.kv_heads)
    width = spec.heads * spec.head_dim
    if spec.kind == "mla":
        if spec.q_lora:
            yield from _linear(f"{name}.q_a", f"{source}.q_a_proj", spec.q_lora, hidden, bias)
            yield _plain(f"{name}.q_a_norm", (spec.q_lora,), f"{source}.q_a_layernorm.weight")
            yield from _linear(f"{name}.q", f"{source}.q_b_proj", width, spec.q_lora, False, rows=heads)
        else:
            yield from _linear(f"{name}.q", f"{source}.q_proj", width, hidden, False, rows=heads)
        rows = spec.kv_lora + spec.rope_dim
        yield from _linear(f"{name}.kv_a", f"{source}.kv_a_proj_with_mqa", rows, hidden, bias)
        yield _plain(f"{name}.kv_a_norm", (spec.kv_lora,), f"{source}.kv_a_layernorm.weight")
        rows = spec.heads * (spec.nope_dim + spec.value_dim)
        yield from _linear(f"{name}.kv_b", f"{source}.kv_b_proj", rows, spec.kv_lora, False, rows=heads)
    else:
        yield from _linear(f"{name}.q", f"{source}.q_proj", width, hidden, bias, rows=heads)
        rows = spec.kv_heads * spec.head_dim
        yield from _linear(f"{name}.k", f"{source}.k_proj", rows, hidden, bias, rows=kv_heads)
        rows = spec.kv_heads * spec.value_dim
        yield from _linear(f"{name}.v", f"{source}.v_proj", rows, hidden, bias, rows=kv_heads)
        if spec.qk_norm:
            yield _plain(f"{name}.q_norm", (spec.head_dim,), f"{source}.q_norm.weight")
            yield _plain(f"{name}.k_norm", (spec.head_dim,), f"{source}.k_norm.weight")
    width = spec.heads * spec.value_dim
    yield from _linear(f"{name}.out", f"{source}.o_proj", hidden, width, spec.out_bias, columns=heads)


def _dense(name: str, source: str, hidden: int, spec: DenseSpec) -> Iterator[ParameterSpec]:
    inter = Axis("inter", spec.inter)
    yield from _linear(f"{name}.gate", f"{source}.gate_proj", spec.inter, hidden, spec.bias, rows=inter)
    yield from _linear(f"{name}.up", f"{source}.up_proj", spec.inter, hidden, spec.bias, rows=inter)
    yield from _linear(f"{name}.down", f"{source}.down_proj", hidden, spec.inter, spec.bias, columns=inter)


def _moe(name: str, source: str, hidden: int, spec: MoESpec) -> Iterator[ParameterSpec]:
    yield _plain(f"{name}.router.weight", (spec.experts, hidden), f"{source}.gate.weight", fp32=True)
    if spec.selection_bias:
        yield _plain(f"{name}.router.bias", (spec.experts,), f"{source}.gate.e_score_correction_bias", fp32=True)
    inter = Axis("expert_inter", spec.inter)
    parts = {"gate": (spec.inter, hidden), "up": (spec.inter, hidden), "down": (hidden, spec.inter)}
    for (part, shape), stored in zip(parts.items(), spec.projections, strict=True):
        for expert in range(spec.experts):
            yield ParameterSpec(
                name=f"{name}.experts.{expert}.{part}",
                shape=shape,
                source=f"{source}.experts.{expert}.{stored}.weight",
                buffer=f"{name}.experts.{part}",
                cut=inter,
                dimension=int(part == "down"),
                expert=expert,
                experts=spec.experts,
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
