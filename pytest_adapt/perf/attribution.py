"""Which operation a change of time belongs to, from profiles of both sides."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_adapt.perf.rounds import Profile

__all__ = ["HOST", "Share", "attribute"]

HOST = "outside the operations"
"""What no operation of the profile took: scheduling, sampling, the adapter."""


@dataclass(frozen=True)
class Share:
    """What one operation takes in one run of a load, on the baseline and on the target; medians over pairs."""

    op: str
    before: float
    after: float
    change: float
    """Median over pairs of the difference within a pair. All in seconds."""
    calls: tuple[float, float]

    def __str__(self) -> str:
        counted = f", {self.calls[0]:g} -> {self.calls[1]:g} calls" if self.calls[0] != self.calls[1] else ""
        return f"{self.op} {1e3 * self.before:.3g} -> {1e3 * self.after:.3g} ms ({1e3 * self.change:+.3g} ms{counted})"


def attribute(profiles: Sequence[Profile], sign: int = 1) -> list[Share]:
    """Every operation, and what lies outside them. First what lost most time where ``sign`` is 1 (a regression), what
    won most where it is -1."""
    if not profiles:
        return []
    taken = [{side: _with_rest(one, side) for side in ("A", "B")} for one in profiles]
    found = []
    for op in sorted({op for one in taken for ops in one.values() for op in ops}):
        rows = [(one["A"].get(op, (0.0, 0.0)), one["B"].get(op, (0.0, 0.0))) for one in taken]
        found.append(
            Share(
                op,
                statistics.median(a[1] for a, _ in rows),
                statistics.median(b[1] for _, b in rows),
                statistics.median(b[1] - a[1] for a, b in rows),
                (statistics.median(a[0] for a, _ in rows), statistics.median(b[0] for _, b in rows)),
            )
        )
    return sorted(found, key=lambda one: -sign * one.change)


def _with_rest(one: Profile, side: str) -> dict[str, tuple[float, float]]:
    """(calls, seconds) of each operation of one side, and of the rest."""
    ops = dict(one.ops[side])
    return {**ops, HOST: (0.0, one.seconds[side] - sum(seconds for _, seconds in ops.values()))}
