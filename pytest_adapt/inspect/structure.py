"""The structure of a model, layer by layer: what `pytest_adapt.inspect` computes everything else from.

Plain data, filled by `config` (a Hugging Face config.json) or by `presets` (published shapes).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["Attention", "FeedForward", "InspectError", "Layer", "Linear", "Structure"]


class InspectError(ValueError):
    """A configuration that cannot be analysed; one line that names the field and what is wrong with it."""


@dataclass(frozen=True)
class Attention:
    """Softmax attention of one layer, grouped-query or latent (MLA).

    ``head_dim`` is the width of queries and keys, ``value_dim`` that of values. Latent attention keeps one row of
    ``kv_lora + rope`` numbers per token for all heads; grouped-query keeps keys and values of ``kv_heads`` heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scheme: str = "full"
    """full, window (of ``reach`` tokens), chunked (by ``reach``) or sparse (``reach`` keys found by an index)."""
    reach: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    rope: int = 0
    """Rotated part of a latent head; 0 for grouped-query attention."""
    qkv_bias: bool = False
    out_bias: bool = False
    norm_params: int = 0
    """Parameters of query and key norms in this layer."""
    sinks: bool = False
    out_gate: bool = False
    index_heads: int = 0
    index_dim: int = 0

    @property
    def latent(self) -> bool:
        return self.kv_lora > 0

    @property
    def kind(self) -> str:
        return "mla" if self.latent else "gqa" if self.kv_heads < self.heads else "mha"


@dataclass(frozen=True)
class Linear:
    """Recurrent (linear) attention of one layer: state of constant size instead of keys and values."""

    kind: str
    """gdn (gated delta net) or kda (Kimi delta attention)."""
    k_heads: int
    v_heads: int
    head_dim: int
    conv: int
    full_gate: bool = False
    scheme: str = "state"
    heads: int = 0


@dataclass(frozen=True)
class FeedForward:
    """Dense where ``experts`` is 0. ``inter`` is the width of the dense layer or of one expert."""

    inter: int
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    """Width of all shared experts together."""
    shared_gate: bool = False
    selection_bias: bool = False
    router_bias: bool = False
    bias: bool = False
    latent: int = 0
    """Width in which routed experts work where that is not the hidden size (down- and up-projection around them)."""
    groups: int = 1
    groups_kept: int = 1


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention: Attention | Linear
    feed_forward: FeedForward

    @property
    def sparse(self) -> bool:
        return self.feed_forward.experts > 0

    @property
    def long_context(self) -> str:
        """How this layer handles long context, in words."""
        attention = self.attention
        if isinstance(attention, Linear):
            return f"state compression ({attention.kind}, constant size)"
        return {
            "full": "full",
            "window": f"sliding window of {attention.reach}",
            "chunked": f"chunks of {attention.reach}",
            "sparse": f"block-sparse, top {attention.reach} by an index",
        }[attention.scheme]

    @property
    def kv_layout(self) -> str:
        """What is cached per token, in words."""
        attention = self.attention
        if isinstance(attention, Linear):
            return f"recurrent state {attention.v_heads} x {attention.head_dim} x {attention.head_dim}"
        if attention.latent:
            return f"latent {attention.kv_lora} + rotary {attention.rope}"
        return f"K {attention.kv_heads} x {attention.head_dim}, V {attention.kv_heads} x {attention.value_dim}"


@dataclass(frozen=True)
class Structure:
    """A whole model. ``gaps`` are operators and options that pytest-adapt has no reference for."""

    name: str
    architecture: str
    hidden: int
    vocab: int
    context: int
    layers: tuple[Layer, ...]
    tied: bool = False
    gaps: tuple[str, ...] = ()
    weight_bits: float = 16.0
    """Bits per weight as stored, where the configuration tells."""
    extra_params: int = 0
    """Parameters outside decoder layers, embedding, final norm and head."""
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def distinct(self) -> tuple[Layer, ...]:
        """The different layers there are, in order of appearance."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each layer, its place in ``distinct``."""
        place = {layer: i for i, layer in enumerate(self.distinct)}
        return tuple(place[layer] for layer in self.layers)

    @cached_property
    def heads(self) -> int:
        """Query heads of the softmax-attention layers (of the linear ones where there are no others)."""
        softmax = [layer.attention for layer in self.distinct if isinstance(layer.attention, Attention)]
        return max((a.heads for a in softmax), default=self.layers[0].attention.heads)

    @cached_property
    def kv_heads(self) -> int:
        """Key-value heads; latent attention has as many as query heads, all made from one row."""
        softmax = [layer.attention for layer in self.distinct if isinstance(layer.attention, Attention)]
        return max((a.kv_heads for a in softmax), default=self.heads)

    @cached_property
    def experts(self) -> int:
        return max(layer.feed_forward.experts for layer in self.distinct)

    @cached_property
    def chosen(self) -> int:
        return max(layer.feed_forward.chosen for layer in self.distinct)

    @property
    def softmax_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer.attention, Attention))

    def runs(self) -> list[tuple[str, str]]:
        """Layers in the order of the model, equal neighbours joined: [("0-2", "dense, full"), ...]."""
        labels = [("sparse" if layer.sparse else "dense") + ", " + layer.long_context for layer in self.layers]
        if len(set(labels)) < len(labels) and _alternating(labels):
            counts = Counter(labels)
            return [
                (f"{count} of {len(labels)}", f"{label} ({_where(labels, label)})") for label, count in counts.items()
            ]
        joined: list[list[int]] = []
        for index, label in enumerate(labels):
            if joined and labels[joined[-1][0]] == label:
                joined[-1][1] = index
            else:
                joined.append([index, index])
        return [(f"{a}" if a == b else f"{a}-{b}", labels[a]) for a, b in joined]


def _alternating(labels: list[str]) -> bool:
    return sum(a != b for a, b in zip(labels, labels[1:], strict=False)) > 6


def _where(labels: list[str], label: str) -> str:
    """Positions of a label: a stride where there is one, else the first few."""
    places = [i for i, other in enumerate(labels) if other == label]
    steps = {b - a for a, b in zip(places, places[1:], strict=False)}
    if len(steps) == 1:
        return f"every {steps.pop()} from layer {places[0]}"
    shown = ", ".join(map(str, places[:4]))
    return f"layers {shown} ..." if len(places) > 4 else f"layers {shown}"
