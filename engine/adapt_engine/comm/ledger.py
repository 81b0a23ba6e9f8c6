"""What a rank communicated: the last calls one by one, all calls as sums."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Entry", "Ledger", "Traffic"]

_KEPT = 64


@dataclass(frozen=True)
class Entry:
    """One collective, as one rank saw it."""

    step: int
    op: str
    group: str
    """Axis and members: ``tp[0,1]``."""
    dtype: str
    sent: int
    """Bytes that this rank sent to others."""
    seconds: float
    """From the call to its answer."""

    def __str__(self) -> str:
        return f"{self.op} {self.group} {self.dtype} {self.sent} B"


@dataclass(frozen=True)
class Traffic:
    """Sums over calls of one op on one axis."""

    calls: int = 0
    sent: int = 0
    """Bytes."""
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.sent + other.sent, self.seconds + other.seconds)


class Ledger:
    """Collectives of one rank."""

    def __init__(self) -> None:
        self.step = 0
        """Number of the step that new entries belong to; set by the worker."""
        self.pending = ""
        """The call that is waiting for others; empty between calls."""
        self.entries: deque[Entry] = deque(maxlen=_KEPT)
        self._sums: dict[tuple[str, str], Traffic] = {}

    def add(self, axis: str, entry: Entry) -> None:
        """Record a completed call on a group of ``axis``."""
        self.entries.append(entry)
        key = entry.op, axis
        self._sums[key] = self._sums.get(key, Traffic()) + Traffic(1, entry.sent, entry.seconds)

    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """(op, axis) -> sums since the rank was opened."""
        return dict(self._sums)

    def tail(self, count: int = 3) -> str:
        """The last calls and the one that is waiting, in one line."""
        last = [str(entry) for entry in list(self.entries)[-count:]]
        if self.pending:
            last.append(f"now in {self.pending}")
        return "; ".join(last) or "no collective yet"
