"""What a rank shares with others while it computes: the collectives of a layer, each in one place.

On one rank every method is the plain operation, bit for bit; model code does not ask how many ranks there are.
"""

from __future__ import annotations

import torch

from ..comm import Communicator
from ..kernels import Ops
from ..kernels.packed import PackedMatrix, Parameter
from ..layout import span
from ..mesh import Group
from ..weights.shards import ShardPlan

__all__ = ["Parallel"]


class Parallel:
    """One rank's groups. Rows of a step lie on the dp x sp ranks; tp ranks hold the same rows."""

    def __init__(self, plan: ShardPlan, comm: Communicator) -> None:
        mesh, rank = plan.mesh, comm.rank
        self.plan = plan
        self.comm = comm
        self.layout = mesh.layout
        self.place = mesh.places[rank]
        self.tp = mesh.group("tp", rank)
        self.sp = mesh.group("sp", rank)
        self.pp = mesh.group("pp", rank)
        self.expert = mesh.group("expert", rank)
        self.etp = mesh.group("etp", rank)

    @property
    def first_stage(self) -> bool:
        return self.place.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.place.pp == self.layout.pp - 1

    # Tensor parallel ------------------------------------------------------------------------------------------------

    def linear_rows(self, ops: Ops, x: torch.Tensor, weight: Parameter, bias: Parameter | None) -> torch.Tensor:
        """x [T, in] of which this rank has some columns, times its columns of weight [out, in]: the whole sum [T, out].

        The bias, which every rank holds, enters the sum once.
        """
        if self.tp.size == 1:
            return ops.linear(x, weight, bias)
        tree = weight.tree if isinstance(weight, PackedMatrix) else None
        if tree is not None:
            largest = self.largest(x, weight, self.tp)
            sums = ops.linear_sums(x, weight, tree.ranges[self.place.tp], largest)
            return ops.linear_finish(self.comm.all_reduce_along(sums, self.tp, tree), weight, bias, largest, x.dtype)
        partial = ops.linear_partial(x, weight, bias if self.place.tp == 0 else None)
        return self.comm.all_reduce(partial, self.tp, x.dtype)

    def largest(self, x: torch.Tensor, weight: Parameter, group: Group) -> torch.Tensor | None:
        """Of each row of which members of ``group`` have some columns each, x [T, n] those of this rank: the largest
        magnitude, float32 [T], by which int8 products scale the row. None where ``weight`` is not int8."""
        if not (isinstance(weight, PackedMatrix) and weight.quantised):
            return None
        own = x.abs().amax(-1).float()
        return torch.stack(self.comm.all_gather(own, group)).amax(0)

    def embedding(self, ops: Ops, table: Parameter, ids: torch.Tensor, vocab: int) -> torch.Tensor:
        """Rows [T, h] for ``ids`` [T], each from the tp rank whose part of the table has it.

        Gathered, not summed over zero-filled parts: a sum would turn -0.0 into 0.0.
        """
        if self.tp.size == 1:
            return ops.embedding(table, ids)
        starts = [span(vocab, self.tp.size, index)[0] for index in range(self.tp.size)]
        owner = torch.bucketize(ids, torch.tensor(starts[1:]), right=True)
        counts = torch.bincount(owner, minlength=self.tp.size).tolist()
        mine = ids[owner == self.place.tp] - starts[self.place.tp]
        parts = self.comm.all_gather(ops.embedding(table, mine), self.tp, counts)
        rows = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype)
        rows[owner.sort(stable=True).indices] = torch.cat(parts)
        return rows

    def head(self, ops: Ops, x: torch.Tensor, weight: Parameter, vocab: int) -> torch.Tensor:
        """Logits float32 [T, V], of which each tp rank computes its vocabulary rows."""
        logits = ops.lm_head(x, weight)
        if self.tp.size == 1:
            return logits
        spans = [span(vocab, self.tp.size, index) for index in range(self.tp.size)]
        parts = self.comm.all_gather(logits.t().contiguous(), self.tp, [stop - start for start, stop in spans])
        return torch.cat(parts).t().contiguous()

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, ...] that this tp rank owns as tokens: the others route the rest."""
        start, stop = span(x.shape[0], self.tp.size, self.place.tp)
        return x[start:stop]

    def collect(self, own: torch.Tensor, rows: int) -> torch.Tensor:
        """All ``rows`` of which every tp rank has its `share`."""
        if self.tp.size == 1:
            return own
        spans = [span(rows, self.tp.size, index) for index in range(self.tp.size)]
        return torch.cat(self.comm.all_gather(own, self.tp, [stop - start for start, stop in spans]))

    # Pipeline -------------------------------------------------------------------------------------------------------

    def receive(self, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """Hidden rows [T, h] from the stage before."""
        return self.comm.recv(self.pp, self.place.pp - 1, (rows, hidden), dtype)

    def hand_on(self, x: torch.Tensor) -> None:
        """Give hidden rows to the next stage."""
        self.comm.send(x, self.pp, self.place.pp + 1)
