"""Which ranks made an element of a site: from logical coordinates back to the mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..config import DenseSpec, MoESpec
from ..layout import span
from ..mesh import Place
from ..weights.shards import ShardPlan
from .assemble import HEADS, INTER, KV_HEADS

__all__ = ["locate"]

_LAYER = re.compile(r"layer\.(\d+)\.(.+)")


def locate(
    plan: ShardPlan,
    page_size: int,
    site: str,
    position: int,
    element: Sequence[int] = (),
    expert: int | None = None,
    replica: int = 0,
) -> tuple[int, ...]:
    """Ranks on which an element of ``site`` came about, for a sequence that dp place ``replica`` served.

    ``element``: index of it within the row of its position ([head, i], [slot, i] or [i]; () for the whole row);
    ``expert``: the one that computed it, where experts did. Ranks that hold copies are all named, and so are those
    of which one was the token's owner.
    """
    found = _LAYER.fullmatch(site)
    layer, local = (int(found[1]), found[2]) if found else (-1, site)
    mesh, layout = plan.mesh, plan.mesh.layout
    last = layout.pp - 1
    stage = next((pp for pp in range(layout.pp) if layer in plan.layers(pp)), 0 if site == "embed" else last)
    sp = position // page_size % layout.sp
    owners = [mesh.at(pp=stage, dp=replica, sp=sp, tp=tp) for tp in range(layout.tp)]
    if layer >= 0 and expert is not None and local.startswith("moe.experts."):
        return tuple(place.rank for place in _experts(plan, layer, owners, expert, local, element))
    units = _units(plan, layer, local) if element else 0
    if not units:
        return tuple(place.rank for place in owners)
    return tuple(place.rank for place in owners if _holds(units, layout.tp, place.tp, element[0]))


def _units(plan: ShardPlan, layer: int, local: str) -> int:
    """How many units along the first index of a row tp ranks divide; 0 where each has the whole row."""
    spec = plan.spec
    if local == "logits":
        return spec.vocab
    if layer < 0:
        return 0
    attention, ffn = spec.layers[layer].attention, spec.layers[layer].ffn
    if local in HEADS:
        return attention.heads
    if local in KV_HEADS and attention.kind != "mla":
        return attention.kv_heads
    if local in INTER and isinstance(ffn, DenseSpec):
        return ffn.inter
    return 0


def _holds(units: int, parts: int, index: int, unit: int) -> bool:
    if units < parts:
        return index * units // parts == unit
    start, stop = span(units, parts, index)
    return start <= unit < stop


def _experts(
    plan: ShardPlan, layer: int, owners: Sequence[Place], expert: int, local: str, element: Sequence[int]
) -> Iterator[Place]:
    """Ranks that hold an expert for tokens of ``owners``; of divided experts the part that has the element."""
    ffn, layout = plan.spec.layers[layer].ffn, plan.mesh.layout
    assert isinstance(ffn, MoESpec)
    ep = plan.owners(ffn.experts)[expert]
    copies = {owner.edp for owner in owners}
    divided = local != "moe.experts.down" and len(element) > 1
    for place in plan.mesh.places:
        here = place.pp == owners[0].pp and place.edp in copies and place.ep == ep
        if here and (not divided or _holds(ffn.inter, layout.etp, place.etp, element[1])):
            yield place
