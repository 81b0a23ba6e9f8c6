"""Named places in a model: the one vocabulary of taps, rounding tables, faults and localisation.

A site is a value that a real engine may round or choose. The oracle passes each of them through
``site(name, x)``, the built-in engine offers the same names as taps, and a failure is reported as the
first site whose value differs. Row ``t`` of a site is what the model computed for token ``t``.

Shapes use T tokens, hidden h, H query heads, G key-value heads, d head width, E experts, k chosen
experts, V vocabulary.

===============================  ===========  ====================================================
site                             shape        value
===============================  ===========  ====================================================
embed                            T, h         token embedding
layer.N.attn.norm                T, h         normalised input of attention
layer.N.attn.q / k / v           T, H or G, d after projection and bias, before norm and rotation
layer.N.attn.q_norm / k_norm     T, H or G, d after the per-head norm (where the family has one)
layer.N.attn.q_rope / k_rope     T, H or G, d after rotation; MLA: only the rotated part, k has G = 1
layer.N.attn.q_a / q_a_norm      T, q_lora    MLA low-rank query, before and after its norm
layer.N.attn.kv_a                T, lora+rope MLA compressed key-value row before norm and rotation
layer.N.attn.kv_a_norm           T, kv_lora   MLA latent after its norm
layer.N.attn.kv_b                T, H, nope+v MLA expanded keys (no position) and values
layer.N.attn.scores / probs      H, T, T      scaled logits and weights; passed in row blocks, never recorded
layer.N.attn.context             T, H, d_v    weighted values, before the output projection
layer.N.attn.out                 T, h         after the output projection
layer.N.attn.residual            T, h         residual stream after attention
layer.N.ffn.norm                 T, h         normalised input of the feed-forward part
layer.N.ffn.gate / up / act      T, inter     dense feed-forward: projections and silu(gate) * up
layer.N.moe.router.logits        T, E         router projection
layer.N.moe.router.scores        T, E         softmax or sigmoid of the logits (weights come from these)
layer.N.moe.router.selection     T, E         scores + selection bias: what top-k looks at
layer.N.moe.router.ids           T, k         chosen experts, ascending id (int64)
layer.N.moe.router.weights       T, k         combine weights, in the order of ids, routed scale included
layer.N.moe.experts.gate/up/act  T, k, inter  per chosen expert, in the order of ids
layer.N.moe.experts.down         T, k, h      per chosen expert, before weighting
layer.N.moe.routed               T, h         weighted sum over chosen experts
layer.N.moe.shared               T, h         shared experts (where the family has them)
layer.N.ffn.out                  T, h         what the feed-forward part adds to the residual stream
layer.N.residual                 T, h         residual stream after the layer
final.norm                       T, h         normalised input of the head
logits                           T, V         output of the head
===============================  ===========  ====================================================
"""

from __future__ import annotations

import fnmatch
import re

__all__ = ["CHOICES", "LAYER_SITES", "UNRECORDED", "layer_of", "matches", "order_key", "site"]

# Dataflow order inside one layer; a divergence is named by the first of these that differs.
LAYER_SITES: tuple[str, ...] = (
    "attn.norm",
    "attn.q_a",
    "attn.q_a_norm",
    "attn.q",
    "attn.kv_a",
    "attn.kv_a_norm",
    "attn.kv_b",
    "attn.k",
    "attn.v",
    "attn.q_norm",
    "attn.k_norm",
    "attn.q_rope",
    "attn.k_rope",
    "attn.scores",
    "attn.probs",
    "attn.context",
    "attn.out",
    "attn.residual",
    "ffn.norm",
    "ffn.gate",
    "ffn.up",
    "ffn.act",
    "moe.router.logits",
    "moe.router.scores",
    "moe.router.selection",
    "moe.router.ids",
    "moe.router.weights",
    "moe.experts.gate",
    "moe.experts.up",
    "moe.experts.act",
    "moe.experts.down",
    "moe.routed",
    "moe.shared",
    "ffn.out",
    "residual",
)
# Integer sites: compared as sets under a certificate, never as numbers.
CHOICES = frozenset({"moe.router.ids"})
# Rounded by emulations, too large to record: S x S per head.
UNRECORDED = frozenset({"attn.scores", "attn.probs"})

_RANK = {name: rank for rank, name in enumerate(LAYER_SITES)}
_LAYER = re.compile(r"layer\.(\d+)\.(.+)")
_LAST = 1 << 30


def site(layer: int, name: str) -> str:
    """Full name of a site inside ``layer`` (``site(3, "attn.q") == "layer.3.attn.q"``)."""
    return f"layer.{layer}.{name}"


def layer_of(name: str) -> tuple[int | None, str]:
    """Split a full name into (layer, site); the layer is None for embed, final.norm and logits."""
    found = _LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


def order_key(name: str) -> tuple[int, int]:
    """Sort key that puts full site names in dataflow order. Raises ValueError for an unknown site."""
    layer, local = layer_of(name)
    if layer is None:
        outer = {"embed": (-1, 0), "final.norm": (_LAST, 0), "logits": (_LAST, 1)}
        if name not in outer:
            raise ValueError(f"unknown site {name!r}; sites are listed in pytest_adapt.sites")
        return outer[name]
    if local not in _RANK:
        raise ValueError(f"unknown site {name!r}; sites of a layer are {', '.join(LAYER_SITES)}")
    return layer, _RANK[local]


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a full name matches one of the shell patterns (``layer.*.moe.router.*``)."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
