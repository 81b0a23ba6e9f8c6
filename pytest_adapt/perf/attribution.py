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
    """Seconds."""
    calls: tuple[float, float]

    @property
    def change(self) -> float:
        """Seconds."""
        return self.after - self.before

    def __str__(self) -> str:
        counted = f", {self.calls[0]:g} -> {self.calls[1]:g} calls" if self.calls[0] != self.calls[1] else ""
        return f"{self.op} {1e3 * self.before:.3g} -> {1e3 * self.after:.3g} ms ({1e3 * self.change:+.3g} ms{counted})"


def attribute(profiles: Sequence[Profile]) -> list[Share]:
    """Every operation, and what lies outside them, that which changed most first."""
    names = sorted({op for one in profiles for ops in one.ops.values() for op in ops})
    found = []
    for op in names:
        rows = {side: [one.ops[side].get(op, (0.0, 0.0)) for one in profiles] for side in ("A", "B")}
        seconds = {side: statistics.median(row[1] for row in those) for side, those in rows.items()}
        calls = {side: statistics.median(row[0] for row in those) for side, those in rows.items()}
        found.append(Share(op, seconds["A"], seconds["B"], (calls["A"], calls["B"])))
    if profiles:
        rest = {
            side: statistics.median(
                one.seconds[side] - sum(seconds for _, seconds in one.ops[side].values()) for one in profiles
            )
            for side in ("A", "B")
        }
        found.append(Share(HOST, rest["A"], rest["B"], (0.0, 0.0)))
    return sorted(found, key=lambda one: -abs(one.change))
