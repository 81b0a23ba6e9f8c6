"""What a step must communicate, by arithmetic alone: calls and bytes of every rank, to hold against the ledgers.

Counts follow from shapes and from where rows lie; the expert traffic also needs the routing, which the model decides.
Bytes are what a rank sends to others; a gather to n members sends n - 1 copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from ..comm import Traffic
from ..config import AttentionSpec, DenseSpec, ModelSpec, MoESpec
from ..layout import Layout, span
from ..mesh import Mesh, Place
from ..moe.dispatch import Route
from ..weights.parameters import expected_parameters
from ..weights.shards import ShardPlan
from .plan import StepPlan, owners_of, pack

__all__ = ["predict_traffic"]

Sums = dict[tuple[str, str], Traffic]
_Add = Callable[[str, str, int], None]
_FLOAT, _INT = 4, 8


def predict_traffic(
    spec: ModelSpec,
    layout: Layout,
    step: StepPlan,
    routing: Mapping[int, Sequence[torch.Tensor]],
    *,
    element: int = _FLOAT,
    page_size: int = 16,
    placement: Sequence[int] = (),
    strict: bool = False,
    quantised: bool = False,
) -> list[Sums]:
    """For each rank, (op, axis) -> calls and bytes sent by one step without taps.

    ``routing[layer][dp]``: expert ids int64 [T, k] of all rows of a replica's step, in the order of its sequences
    (site ``moe.router.ids``). ``element``: bytes of an activation. ``strict``: of mode strict; ``quantised``: of
    precision int8, which makes a difference there. ``seconds`` are not predicted: 0.
    """
    plan = ShardPlan(spec, Mesh(layout), placement, whole_segments=strict)
    batches = [_Batch(plan, step, index, routing, element, page_size, quantised) for index in range(step.micro_batches)]
    found: list[Sums] = []
    for place in plan.mesh.places:
        sums: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)
        for batch in batches:
            batch.count(place, sums)
        found.append(dict(sums))
    return found


class _Batch:
    """One micro-batch of all replicas."""

    def __init__(
        self,
        plan: ShardPlan,
        step: StepPlan,
        index: int,
        routing: Mapping[int, Sequence[torch.Tensor]],
        element: int,
        page_size: int,
        quantised: bool,
    ) -> None:
        self.plan = plan
        self.quantised = quantised
        self.layout = plan.mesh.layout
        self.element = element
        self.ids: dict[tuple[int, int], torch.Tensor] = {}
        """(dp, sp) -> token ids of the rows there."""
        self.heads: dict[tuple[int, int], int] = {}
        """(dp, sp) -> rows there whose logits are wanted."""
        self.held: dict[tuple[int, int], list[int]] = {}
        """(dp, sp) -> for each sequence, positions stored there."""
        self._nodes: dict[tuple[int, str], tuple[int, ...]] = {}
        for one in expected_parameters(plan.spec):
            if (tree := plan.tree(one)) is not None:
                name = one.name.rsplit(".", 2)[-2] if one.expert < 0 else "experts"
                self._nodes[one.layer, name] = tuple(map(len, tree.nodes))
        self._routing: dict[tuple[int, int, int], torch.Tensor] = {}
        for dp in range(self.layout.dp):
            packed = pack(step.batch(dp, index))
            before = sum(len(pack(step.batch(dp, earlier)).ids) for earlier in range(index))
            owners = owners_of(packed.positions, page_size, self.layout.sp)
            for sp in range(self.layout.sp):
                rows = (owners == sp).nonzero().flatten()
                self.ids[dp, sp] = packed.ids[rows]
                self.heads[dp, sp] = int(packed.head[rows].sum())
                self.held[dp, sp] = [
                    int((owners_of(torch.arange(one.last), page_size, self.layout.sp) == sp).sum())
                    for one in step.batch(dp, index)
                ]
                for layer, chosen in routing.items():
                    self._routing[layer, dp, sp] = chosen[dp][before + rows] if len(rows) else chosen[dp][:0]

    def count(self, place: Place, sums: defaultdict[tuple[str, str], Traffic]) -> None:
        """Add what the rank at ``place`` sends."""
        spec, layout = self.plan.spec, self.layout
        rows = len(self.ids[place.dp, place.sp])
        hidden = rows * spec.hidden
        others = layout.tp - 1

        def add(op: str, axis: str, sent: int) -> None:
            sums[op, axis] += Traffic(1, sent)

        if place.pp > 0:
            add("recv", "pp", 0)
        elif layout.tp > 1:
            start, stop = span(spec.vocab, layout.tp, place.tp)
            ids = self.ids[place.dp, place.sp]
            add("all_gather", "tp", int(((ids >= start) & (ids < stop)).sum()) * spec.hidden * self.element * others)
        for index in self.plan.layers(place.pp):
            layer = spec.layers[index]
            self._sequence(place, layer.attention, add)
            if layout.tp > 1:
                self._sum(place, index, "out", rows, add)
            if isinstance(layer.ffn, MoESpec):
                self._experts(place, index, layer.ffn, add)
            if layout.tp > 1 and (isinstance(layer.ffn, DenseSpec) or layer.ffn.shared_inter):
                self._sum(place, index, "down", rows, add)
        if place.pp < layout.pp - 1:
            add("send", "pp", hidden * self.element)
        elif layout.tp > 1 and self.heads[place.dp, place.sp]:
            start, stop = span(spec.vocab, layout.tp, place.tp)
            add("all_gather", "tp", (stop - start) * self.heads[place.dp, place.sp] * _FLOAT * others)

    def _sum(self, place: Place, index: int, name: str, rows: int, add: _Add) -> None:
        """Partial sums over tp: one, or those of whole subtrees, and the rows' largest magnitudes for int8."""
        nodes = self._nodes.get((index, name))
        others = self.layout.tp - 1
        if nodes is not None and self.quantised:
            add("all_gather", "tp", rows * _FLOAT * others)
        add("all_reduce", "tp", rows * self.plan.spec.hidden * _FLOAT * others * (nodes[place.tp] if nodes else 1))

    def _sequence(self, place: Place, spec: AttentionSpec, add: _Add) -> None:
        """Queries to every rank that has keys, partial contexts with their weight back to the rows' owners; in mode
        strict keys and values instead, to every rank that has queries."""
        layout = self.layout
        if layout.sp == 1:
            return
        if self.plan.whole_segments:
            width = spec.kv_lora + spec.rope_dim
            if spec.kind != "mla":
                width = max(1, spec.kv_heads // layout.tp) * (spec.head_dim + spec.value_dim)
            for held in self.held[place.dp, place.sp]:
                add("all_gather", "sp", held * width * self.element * (layout.sp - 1))
            return
        heads = spec.heads // layout.tp
        counts = [len(self.ids[place.dp, sp]) for sp in range(layout.sp)]
        mine = counts[place.sp]
        add("all_gather", "sp", mine * heads * spec.head_dim * self.element * (layout.sp - 1))
        add("all_to_all", "sp", (sum(counts) - mine) * heads * (spec.value_dim + 1) * _FLOAT)

    def _experts(self, place: Place, index: int, spec: MoESpec, add: _Add) -> None:
        layout, hidden = self.layout, self.plan.spec.hidden
        group = self.plan.mesh.group("expert", place.rank)
        if group.size > 1:
            route = self._route(place, index, spec)
            members = [self.plan.mesh.places[rank] for rank in group.ranks if rank != place.rank]
            add("all_to_all", "expert", sum(len(route.counts[member.ep]) for member in members) * _INT)
            add("all_to_all", "expert", sum(route.totals[member.ep] for member in members) * hidden * self.element)
            returned = sum(self._route(member, index, spec).totals[place.ep] for member in members)
            nodes = self._nodes.get((index, "experts"))
            if nodes is None:
                add("all_to_all", "expert", returned * hidden * (_FLOAT if layout.etp > 1 else self.element))
            else:
                here = returned + route.totals[place.ep]
                if self.quantised:
                    add("all_gather", "etp", here * _FLOAT * (layout.etp - 1))
                add("all_reduce", "etp", here * hidden * _FLOAT * (layout.etp - 1) * nodes[place.etp])
                add("all_to_all", "expert", 0 if place.etp else returned * hidden * self.element)
        if layout.tp > 1:
            start, stop = span(len(self.ids[place.dp, place.sp]), layout.tp, place.tp)
            add("all_gather", "tp", (stop - start) * hidden * self.element * (layout.tp - 1))

    def _route(self, place: Place, index: int, spec: MoESpec) -> Route:
        chosen = self._routing[index, place.dp, place.sp]
        start, stop = span(len(chosen), self.layout.tp, place.tp)
        return Route.of(chosen[start:stop], self.plan.owners(spec.experts), self.layout.ep)
