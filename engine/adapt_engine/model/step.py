"""Everything that one forward pass over packed rows needs besides weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..config import RopeSpec
from ..kernels import Ops
from ..kv.cache import PagedCache
from ..runtime.taps import LayerTap, TapRecorder

__all__ = ["Span", "Step"]


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a step belong to one sequence, which by then has ``len(slots)`` tokens in the cache."""

    start: int
    stop: int
    slots: torch.Tensor
    """int64 [n]: slot of each position 0 .. n - 1."""
    positions: torch.Tensor
    """int64 [n]: 0 .. n - 1."""


@dataclass
class Step:
    """One forward pass: T rows of any number of sequences, packed in order of ``spans``."""

    ops: Ops
    cache: PagedCache
    ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]: where each row's keys and values are stored."""
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

    @staticmethod
    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        """Rows of all sequences, packed again."""
        return parts[0] if len(parts) == 1 else torch.cat(parts)
