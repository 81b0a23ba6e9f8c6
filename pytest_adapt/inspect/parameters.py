"""How many parameters a model has: in all, per layer, and active per token.

Counted part by part from the structure, so that the same parts also say how a layout divides them. Sources:
transformers' modules of each family; gated delta net and Kimi delta attention after arXiv 2412.06464 and
2510.26692; the sparse-attention index after DeepSeek-V3.2's published code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_adapt.inspect.structure import Attention, FeedForward, Layer, Linear, Structure

__all__ = ["Part", "Parameters", "count", "layer_parts", "outer_parts"]


@dataclass(frozen=True)
class Part:
    """Some parameters that a layout divides in one way.

    ``split``: heads (over tp), kv (over tp, replicated where there are fewer heads), width (over tp),
    experts (over ep x etp), vocab (over tp) or copy (on every rank).
    """

    name: str
    params: int
    split: str
    active: int = -1
    """Parameters that one token uses; -1: all of them."""

    @property
    def used(self) -> int:
        return self.params if self.active < 0 else self.active


@dataclass(frozen=True)
class Parameters:
    """``layers`` holds the count of each decoder layer, ``outer`` of everything else."""

    total: int
    active: int
    layers: tuple[int, ...]
    outer: int

    @property
    def ratio(self) -> float:
        """Active share."""
        return self.active / self.total


def count(structure: Structure) -> Parameters:
    """Parameters of a model. A token looks one row of the embedding up, so the table is active only as a tied head."""
    layers = [layer_parts(structure, layer) for layer in structure.layers]
    outer = outer_parts(structure)
    sums = tuple(sum(part.params for part in parts) for parts in layers)
    used = sum(part.used for parts in [*layers, outer] for part in parts)
    outside = sum(part.params for part in outer)
    return Parameters(sum(sums) + outside, used, sums, outside)


def outer_parts(structure: Structure) -> list[Part]:
    """Embedding, final norm, head and what else lies outside the decoder layers."""
    table = structure.vocab * structure.hidden
    parts = [Part("final norm", structure.hidden, "copy")]
    if structure.tied:
        parts.append(Part("embedding = head", table, "vocab"))
    else:
        parts += [Part("embedding", table, "vocab", active=0), Part("head", table, "vocab")]
    if structure.extra_params:
        parts.append(Part("other", structure.extra_params, "copy", active=0))
    return parts


def layer_parts(structure: Structure, layer: Layer) -> list[Part]:
    """Everything in one decoder layer."""
    hidden = structure.hidden
    attention = layer.attention
    if isinstance(attention, Linear):
        found = [*_linear(attention, hidden)]
    else:
        found = [*(_latent(attention, hidden) if attention.latent else _grouped(attention, hidden))]
    return [Part("norms", 2 * hidden, "copy"), *found, *_feed_forward(layer.feed_forward, hidden)]


def _grouped(a: Attention, hidden: int) -> Iterator[Part]:
    wide, narrow = a.heads * a.head_dim, a.kv_heads * (a.head_dim + a.value_dim)
    bias = 1 if a.qkv_bias else 0
    yield Part("q", (hidden + bias) * wide, "heads")
    yield Part("k, v", (hidden + bias) * narrow, "kv")
    yield Part("o", a.heads * a.value_dim * hidden + (hidden if a.out_bias else 0), "heads")
    if a.out_gate:
        yield Part("output gate", hidden * a.heads * a.value_dim, "heads")
    small = a.norm_params + (a.heads if a.sinks else 0)
    if small:
        yield Part("q/k norms, sinks", small, "copy")


def _latent(a: Attention, hidden: int) -> Iterator[Part]:
    bias = 1 if a.qkv_bias else 0
    wide = a.heads * a.head_dim
    if a.q_lora:
        yield Part("q down", (hidden + bias) * a.q_lora + a.q_lora, "copy")
        yield Part("q up", a.q_lora * wide, "heads")
    else:
        yield Part("q", hidden * wide, "heads")
    yield Part("kv down", (hidden + bias) * (a.kv_lora + a.rope) + a.kv_lora, "copy")
    yield Part("kv up", a.kv_lora * a.heads * (a.head_dim - a.rope + a.value_dim), "heads")
    yield Part("o", a.heads * a.value_dim * hidden + (hidden if a.out_bias else 0), "heads")
    if a.out_gate:
        yield Part("output gate", hidden * a.heads * a.value_dim, "heads")
    if a.index_heads:
        queries = a.q_lora * a.index_heads * a.index_dim
        yield Part("index", queries + hidden * (a.index_dim + a.index_heads) + 2 * a.index_dim, "copy")


def _linear(a: Linear, hidden: int) -> Iterator[Part]:
    keys, values = a.k_heads * a.head_dim, a.v_heads * a.head_dim
    yield Part("o", values * hidden + a.head_dim, "heads")
    yield Part("convolution", a.conv * (2 * keys + values), "heads")
    if a.kind == "gdn":
        yield Part("q, k, v, gate", hidden * (2 * keys + 2 * values), "heads")
        yield Part("decay, beta", hidden * 2 * a.v_heads + 2 * a.v_heads, "heads")
        return
    low_rank = hidden * a.head_dim + a.head_dim * values
    yield Part("q, k, v", hidden * (2 * keys + values), "heads")
    yield Part("decay, beta", low_rank + values + a.v_heads + hidden * a.v_heads, "heads")
    yield Part("output gate", hidden * values if a.full_gate else low_rank, "heads")


def _feed_forward(f: FeedForward, hidden: int) -> Iterator[Part]:
    if not f.experts:
        yield Part("dense ffn", 3 * hidden * f.inter + (2 * f.inter + hidden if f.bias else 0), "width")
        return
    width = f.latent or hidden
    one = 3 * width * f.inter + (2 * f.inter + width if f.bias else 0)
    yield Part("experts", f.experts * one, "experts", active=f.chosen * one)
    extra = (f.experts if f.router_bias else 0) + (f.experts if f.selection_bias else 0)
    yield Part("router", hidden * f.experts + extra, "copy")
    if f.shared:
        yield Part("shared experts", 3 * hidden * f.shared + (hidden if f.shared_gate else 0), "width")
    if f.latent:
        yield Part("latent projections", 2 * hidden * f.latent, "copy")
