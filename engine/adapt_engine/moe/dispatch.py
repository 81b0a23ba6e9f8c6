"""Expert parallelism: rows travel to the ranks that hold their experts, and results back to the tokens' owner.

A chosen slot (row, expert) goes to every rank of the expert's ep place; where an expert is cut over etp ranks, each of
them gives a partial sum. Rows travel sorted by expert, so that their number per expert, sent ahead, says all that
the receiver needs. Nothing but the owner ever weights or adds results (dispatch and combine as in the DeepSeek-V3
report, section 3.2.2, with no expert capacity: no row is ever dropped).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..comm import Tree
from ..config import MoESpec
from ..kernels import Routing
from ..kernels.packed import PackedMatrix
from ..model.parallel import Parallel
from ..model.step import Step
from ..model.weights import Weights
from ..runtime.taps import LayerTap

__all__ = ["Route", "run_remote"]


@dataclass(frozen=True)
class Route:
    """How one owner's chosen slots are sorted for travel."""

    order: torch.Tensor
    """int64 [T * k]: slots (row * k + place) by ep rank, then expert, then slot."""
    counts: tuple[torch.Tensor, ...]
    """int64 for each ep rank: slots for each of its experts, ascending."""

    @classmethod
    def of(cls, ids: torch.Tensor, owners: tuple[int, ...], ep: int) -> Route:
        """Route of expert ids [T, k], where expert e lies on ep rank ``owners[e]``."""
        held = [[expert for expert, owner in enumerate(owners) if owner == rank] for rank in range(ep)]
        sequence = torch.tensor([expert for experts in held for expert in experts])
        rank_of = torch.empty_like(sequence)
        rank_of[sequence] = torch.arange(len(sequence))
        keys = rank_of[ids.reshape(-1)]
        counts = torch.bincount(keys, minlength=len(owners))
        return cls(keys.sort(stable=True).indices, torch.split(counts, [len(experts) for experts in held]))

    @cached_property
    def totals(self) -> list[int]:
        """Slots for each ep rank."""
        return [int(one.sum()) for one in self.counts]


def run_remote(step: Step, spec: MoESpec, weights: Weights, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Outputs of the chosen experts [T, k, h], not yet weighted, for the rows x [T, h] that this rank owns."""
    ops, parallel, tap = step.ops, step.parallel, step.tap
    comm, group, layout = parallel.comm, parallel.expert, parallel.layout
    route = Route.of(routing.ids, parallel.plan.owners(spec.experts), layout.ep)
    slots = routing.ids.shape[1]
    rows = torch.split(x[route.order // slots], route.totals)
    place_of = [place // layout.etp for place in range(group.size)]
    own = route.counts[parallel.place.ep].shape[0]
    counts = comm.all_to_all([route.counts[ep] for ep in place_of], group, [own] * group.size)
    totals = [int(one.sum()) for one in counts]
    received = torch.cat(comm.all_to_all([rows[ep] for ep in place_of], group, totals))
    experts = torch.cat([torch.arange(own).repeat_interleave(one) for one in counts])
    tapped = tap if tap and tap.wants("moe.experts.") else None
    down_w = weights["moe.experts.down"]
    tree = down_w.tree if isinstance(down_w, PackedMatrix) else None
    if tree is None:
        done = ops.expert_rows(
            received, experts, weights["moe.experts.gate"], weights["moe.experts.up"], down_w, layout.etp > 1, tapped
        )
        speaks = [True] * group.size
    else:
        # Every etp rank has the whole sum; the first one sends it.
        done = _along_tree(step, weights, received, experts, tree, tapped)
        speaks = [place % layout.etp == 0 for place in range(group.size)]
    if not speaks[group.index(comm.rank)]:
        done, totals = done[:0], [0] * group.size
    awaited = [route.totals[ep] if speaks[place] else 0 for place, ep in enumerate(place_of)]
    back = comm.all_to_all(torch.split(done, totals), group, awaited)
    down = torch.empty((x.shape[0] * slots, x.shape[1]), dtype=x.dtype)
    down[route.order] = torch.cat([_summed(back, ep, parallel, x.dtype) for ep in range(layout.ep)])
    return down.view(x.shape[0], slots, x.shape[1])


def _along_tree(
    step: Step, weights: Weights, x: torch.Tensor, ids: torch.Tensor, tree: Tree, tap: LayerTap | None
) -> torch.Tensor:
    """Rows x [n, h], each through its own expert, of which every etp rank has some inner rows: whole results [n, h],
    added up in the order of one rank."""
    ops, parallel = step.ops, step.parallel
    gate_w, up_w, down_w = (weights[f"moe.experts.{name}"] for name in ("gate", "up", "down"))
    order = ids.sort(stable=True).indices
    counts = torch.bincount(ids, minlength=gate_w.shape[0]).tolist()
    runs = [(expert, rows) for expert, rows in enumerate(torch.split(order, counts)) if len(rows)]
    gate, up, act = (torch.empty((x.shape[0], gate_w.shape[1]), dtype=x.dtype) for _ in range(3))
    for expert, rows in runs:
        chosen = x[rows]
        gate[rows], up[rows] = ops.linear(chosen, gate_w[expert], None), ops.linear(chosen, up_w[expert], None)
        act[rows] = ops.swiglu(gate[rows], up[rows])
    if tap is not None:
        for name, value in (("gate", gate), ("up", up), ("act", act)):
            tap(f"moe.experts.{name}", value)
    largest = parallel.largest(act, down_w, parallel.etp)
    ranges = tree.ranges[parallel.place.etp]
    sums = torch.empty((ranges.shape[0], *x.shape))
    for expert, rows in runs:
        sums[:, rows] = ops.linear_sums(act[rows], down_w[expert], ranges, None if largest is None else largest[rows])
    total = parallel.comm.all_reduce_along(sums, parallel.etp, tree)
    done = torch.empty(x.shape, dtype=x.dtype)
    for expert, rows in runs:
        own = None if largest is None else largest[rows]
        done[rows] = ops.linear_finish(total[rows], down_w[expert], None, own, x.dtype)
    return done


def _summed(back: list[torch.Tensor], ep: int, parallel: Parallel, dtype: torch.dtype) -> torch.Tensor:
    """Partial sums of the etp ranks of one ep place, in their order; whole ones where one rank sent them for all."""
    first = ep * parallel.layout.etp
    total = back[first]
    for part in back[first + 1 : first + parallel.layout.etp]:
        total = total + part if len(part) else total
    return total.to(dtype)
