"""Which ranks made an element of a site: from logical coordinates back to the mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..config import DenseSpec, MoESpec
from ..mesh import Place
from ..weights.parameters import Axis
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
    cut = _cut(plan, layer, local) if element else None
    if cut is None:
        return tuple(place.rank for place in owners)
    return tuple(place.rank for place in owners if _holds(plan, cut, place.tp, element[0]))


def _cut(plan: ShardPlan, layer: int, local: str) -> Axis | None:
    """What tp ranks divide along the first index of a row; None where each has the whole row."""
    spec = plan.spec
    if local == "logits":
        return Axis("vocab", spec.vocab)
    if layer < 0:
        return None
    attention, ffn = spec.layers[layer].attention, spec.layers[layer].ffn
    if local in HEADS:
        return Axis("heads", attention.heads)
    if local in KV_HEADS and attention.kind != "mla":
        return Axis("kv_heads", attention.kv_heads)
    if local in INTER and isinstance(ffn, DenseSpec):
        return Axis("inter", ffn.inter)
    return None


def _holds(plan: ShardPlan, cut: Axis, index: int, unit: int) -> bool:
    start, stop = plan.range_of(cut, cut.units, index)
    return start <= unit < stop


def _experts(
    plan: ShardPlan, layer: int, owners: Sequence[Place], expert: int, local: str, element: Sequence[int]
) -> Iterator[Place]:
    """Ranks that hold an expert for tokens of ``owners``; of divided experts the part that has the element."""
    ffn = plan.spec.layers[layer].ffn
    assert isinstance(ffn, MoESpec)
    ep = plan.owners(ffn.experts)[expert]
    copies = {owner.edp for owner in owners}
    divided = local != "moe.experts.down" and len(element) > 1
    for place in plan.mesh.places:
        here = place.pp == owners[0].pp and place.edp in copies and place.ep == ep
        if here and (not divided or _holds(plan, Axis("expert_inter", ffn.inter), place.etp, element[1])):
            yield place
