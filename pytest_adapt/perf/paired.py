"""What paired times come to: blocks, pairs of processes, and the verdict on a benchmark. Free of clocks and processes.

Side A is the baseline, side B the target. All estimates are natural logarithms of a ratio B / A: above 0 is slower.
Within a pair of processes slices alternate (ABBA or BAAB at random), so that whatever drifts falls on both sides. What
is constant inside a process (hash seed, addresses, heap) does not average out there: it is as large as the changes that
are looked for, so the unit of evidence is the pair of fresh processes, and rounds within it are none.

The constants were measured on shared two-core virtual machines (docs/gate.md has the table): the median over five pairs
of eight blocks exceeds 5 % between equal code in 0 to 1.1 % of benchmarks by CPU time.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "BLOCKS",
    "CONFIRMING",
    "LEAST",
    "LEAST_WALL",
    "PAIRS",
    "Estimate",
    "Finding",
    "block_orders",
    "block_ratio",
    "decide",
    "pair_estimate",
    "suspicion",
]

PAIRS = 5
"""Pairs of fresh processes in the first round."""
CONFIRMING = 7
"""Pairs of fresh processes that must confirm what the first round suspects."""
AGREEING = 6
"""Of those, how many must have the sign of the suspicion at least."""
BLOCKS = 8
"""Blocks of four slices in one pair."""
LEAST = math.log(1.05)
"""Changes below 5 % are not looked for: the noise of a pair is of that size."""
LEAST_WALL = math.log(1.25)
"""Beside CPU time, wall time counts only from 25 % on: it shows waiting and lost threads, and the neighbours too."""
_TRIM = 0.25
_CONFIDENCE = 0.95
_MAD = 1.4826
"""The standard deviation of a normal variable over its median absolute deviation."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median, over that of a mean."""
_SIGMAS = 2.5


@dataclass(frozen=True)
class Estimate:
    """The ratio B / A of one benchmark by one clock, one logarithm for each pair of processes."""

    pairs: tuple[float, ...]

    @property
    def median(self) -> float:
        """The estimate, a logarithm."""
        return statistics.median(self.pairs)

    @property
    def ratio(self) -> float:
        """The estimate, B over A."""
        return math.exp(self.median)

    @property
    def noise(self) -> float:
        """Standard deviation of one pair, told from the median absolute deviation: one pair in five may be 20 % off."""
        centre = self.median
        return _MAD * statistics.median(abs(one - centre) for one in self.pairs)

    @property
    def error(self) -> float:
        """Standard error of the median."""
        return _MEDIAN_ERROR * self.noise / math.sqrt(len(self.pairs))

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %, as ratios: quantiles of the median of pairs that are drawn again with replacement (pairs, never
        rounds). The distribution is exact, not simulated: the median of n draws is at most the i-th smallest value
        where at least half of the draws are."""
        ordered = sorted(self.pairs)
        n = len(ordered)
        half = n // 2 + 1
        tail = (1 - _CONFIDENCE) / 2
        below = [
            sum(math.comb(n, hits) * (i / n) ** hits * (1 - i / n) ** (n - hits) for hits in range(half, n + 1))
            for i in range(1, n + 1)
        ]
        low = next(value for value, share in zip(ordered, below, strict=True) if share > tail)
        high = next(value for value, share in zip(ordered, below, strict=True) if share >= 1 - tail)
        return math.exp(low), math.exp(high)

    def __str__(self) -> str:
        low, high = self.interval
        return f"x{self.ratio:.3f} [{low:.3f}, {high:.3f}], {len(self.pairs)} pairs"


@dataclass(frozen=True)
class Finding:
    """What a benchmark came to."""

    verdict: str
    """regression, improvement, same or inconclusive."""
    clock: str
    """The clock that decided: cpu or wall."""
    why: str


def block_orders(count: int, dice: random.Random) -> list[str]:
    """``count`` blocks of four slices, ABBA or BAAB at random: each side goes first as often as last."""
    return [dice.choice(("ABBA", "BAAB")) for _ in range(count)]


def block_ratio(order: str, times: Sequence[float]) -> float:
    """Logarithm of the time of B over that of A in one block. Raises ValueError for a time that is not positive."""
    if len(order) != len(times) or min(times) <= 0:
        raise ValueError(f"times {list(times)} of block {order}: one positive time for each slice is needed")
    a = sum(time for side, time in zip(order, times, strict=True) if side == "A")
    return math.log((sum(times) - a) / a)


def pair_estimate(blocks: Sequence[float]) -> float:
    """Mean of the middle half of the blocks of one pair: a slice that a neighbour fell on is in the tails."""
    drop = int(len(blocks) * _TRIM)
    kept = sorted(blocks)[drop : len(blocks) - drop]
    return math.fsum(kept) / len(kept)


def suspicion(first: Mapping[str, Estimate], clock: str) -> str:
    """The clock whose first round must be confirmed; "" where none. ``clock`` is the one that gates."""
    if abs(first[clock].median) > LEAST:
        return clock
    if clock != "wall" and "wall" in first and abs(first["wall"].median) > LEAST_WALL:
        return "wall"
    return ""


def decide(
    first: Mapping[str, Estimate], confirming: Mapping[str, Estimate] | None, clock: str, *, floor: float = 0.0
) -> Finding:
    """The verdict on a benchmark from its first round, and from the confirming one where there was a `suspicion`.

    ``floor`` is the noise that the control of this run showed between equal sides. A change is confirmed where both
    medians are beyond the least change on the same side of 0, at least six of seven fresh pairs have its sign, and the
    median of all pairs is more than 2.5 standard errors from 0. Not confirmed and quiet, it was a false alarm: same.
    """
    suspect = suspicion(first, clock)
    if not suspect:
        return _unsuspected(first[clock], clock, floor)
    if confirming is None:
        raise ValueError(f"the first round suspects a change by {suspect} time; measure the confirming one")
    if suspect not in confirming:
        return Finding("inconclusive", suspect, f"first round {first[suspect]}; the confirmation has no {suspect} time")
    least = LEAST if suspect == clock else LEAST_WALL
    one, two = first[suspect], confirming[suspect]
    sign = 1 if one.median > 0 else -1
    agreeing = sum(sign * pair > 0 for pair in two.pairs)
    together = Estimate(one.pairs + two.pairs)
    # Of pairs from two rounds, the scatter around each round's own median: a change of the machine between them is none
    # of the benchmark.
    noise = max(one.noise, two.noise, floor)
    error = _MEDIAN_ERROR * noise / math.sqrt(len(together.pairs))
    said = f"first round {one}; confirmation {two}"
    if sign * two.median > least and agreeing >= min(AGREEING, len(two.pairs)):
        if sign * together.median > _SIGMAS * error:
            return Finding("regression" if sign > 0 else "improvement", suspect, said)
        return Finding("inconclusive", suspect, f"{said}; one pair scatters by {noise:.1%}, too much to tell")
    if abs(two.median) <= least and two.noise <= LEAST:
        return Finding("same", suspect, f"{said}; a false alarm")
    return Finding("inconclusive", suspect, f"{said}; only {agreeing} of {len(two.pairs)} pairs agree")


def _unsuspected(found: Estimate, clock: str, floor: float) -> Finding:
    noise = max(found.noise, floor)
    if noise > LEAST:
        said = f"{found}; one pair scatters by {noise:.1%}, so that a change of {math.expm1(LEAST):.0%} cannot be told"
        return Finding("inconclusive", clock, said)
    return Finding("same", clock, str(found))
