"""Everything that one forward pass over packed rows needs besides weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..config import RopeSpec
from ..kernels import Ops
from ..kv.cache import PagedCache
from ..runtime.taps import LayerTap, TapRecorder
from .parallel import Parallel

__all__ = ["Rows", "Span", "Step"]


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of all packed rows belong to one sequence, which by then has ``known`` tokens cached."""

    start: int
    stop: int
    slots: torch.Tensor
    """int64 [n]: slot of each position that this rank stores, in order."""
    positions: torch.Tensor
    """int64 [n]: those positions; 0 .. known - 1 where the rank stores all."""
    known: int
    held: tuple[torch.Tensor, ...] = ()
    """int64: the positions that each rank of the sp group stores; empty where one rank stores all."""


@dataclass(frozen=True)
class Rows:
    """Packed rows of a step on the ranks of an sp group."""

    positions: torch.Tensor
    """int64 [T]: position of every row of the group."""
    owned: tuple[torch.Tensor, ...]
    """int64: which of the T rows each rank of the group computes; empty where one rank computes all."""

    def gather(self, own: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        """All rows [T, ...] in packed order, of which each rank brings its own."""
        parts = parallel.comm.all_gather(own, parallel.sp, [len(rows) for rows in self.owned])
        whole = torch.empty((len(self.positions), *own.shape[1:]), dtype=own.dtype)
        for rows, part in zip(self.owned, parts, strict=True):
            whole[rows] = part
        return whole

    def scatter(self, whole: torch.Tensor, parallel: Parallel) -> list[torch.Tensor]:
        """Every rank's value [n, ...] of the rows that this rank owns, each having one of all rows [T, ...]."""
        mine = len(self.owned[parallel.place.sp])
        return parallel.comm.all_to_all([whole[rows] for rows in self.owned], parallel.sp, [mine] * len(self.owned))


@dataclass
class Step:
    """One forward pass of one rank: its T rows of any number of sequences, packed in order of ``spans``."""

    ops: Ops
    cache: PagedCache
    parallel: Parallel
    ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]: where each row's keys and values are stored."""
    rows: Rows
    spans: tuple[Span, ...]
    head_rows: torch.Tensor
    """int64 [R]: rows whose logits are wanted."""
    record: TapRecorder | None = None
    """Receives wanted sites; None costs nothing."""
    tap: LayerTap | None = None
    """``record`` as seen from the current layer; set by the transformer."""
    _tables: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def rope(self, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the step's rows; computed once, shared by layers with the same spec."""
        if spec not in self._tables:
            self._tables[spec] = self.ops.rope_tables(spec, self.positions)
        return self._tables[spec]

    @property
    def gathers(self) -> bool:
        """Whether ranks gather keys and values and attend to all of them, rather than merge what each makes of its
        own: mode strict, where a row is to be summed in the order of one rank."""
        return self.ops.strict and self.parallel.sp.size > 1

    def own(self, span: Span) -> slice:
        """Which of this rank's rows belong to ``span``."""
        if not self.rows.owned:
            return slice(span.start, span.stop)
        edges = torch.tensor([span.start, span.stop])
        first, last = torch.searchsorted(self.rows.owned[self.parallel.place.sp], edges).tolist()
        return slice(first, last)

    def past(self, layer: int, span: Span) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Cached rows of ``span`` that its queries are to be held against, and their positions int64 [n]."""
        rows = self.cache.gather(layer, span.slots)
        if not self.gathers:
            return rows, span.positions
        packed = torch.cat([part.flatten(1) for part in rows], dim=1)
        parts = self.parallel.comm.all_gather(packed, self.parallel.sp, [len(held) for held in span.held])
        whole = torch.empty((span.known, packed.shape[1]), dtype=packed.dtype)
        for held, part in zip(span.held, parts, strict=True):
            whole[held] = part
        widths = [math.prod(part.shape[1:]) for part in rows]
        found = zip(torch.split(whole, widths, 1), rows, strict=True)
        return tuple(one.reshape(-1, *part.shape[1:]) for one, part in found), torch.arange(span.known)

    @staticmethod
    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        """Rows of all sequences, packed again."""
        return parts[0] if len(parts) == 1 else torch.cat(parts)
