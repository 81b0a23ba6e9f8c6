"""Covering arrays: which cases to run when there is no time for all, so that every few settings meet somewhere.

An interaction is a set of ``strength`` settings that some case has together (tp=2 and precision=bf16). A greedy cover
takes the case that adds most interactions for its time (Chvatal 1979, "A greedy heuristic for the set-covering
problem": at most 1 + ln(n) times the least cost of a full cover, n being the interactions of the richest case). Pure
functions; standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

__all__ = ["Candidate", "Interaction", "Selection", "interactions", "read_duration", "select", "shown_duration"]

Setting = tuple[str, str]
Interaction = tuple[Setting, ...]
"""Settings (factor, value), sorted by factor."""

_LEAST = 1e-3
"""Seconds that a case costs at least."""
_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True)
class Candidate:
    """A case that may be run."""

    key: str
    """Unique; ties are broken by it, so that the order of the candidates does not matter."""
    factors: Mapping[str, str] = field(hash=False)
    """Factor -> value; a factor that a case does not have takes no part in its interactions."""
    seconds: float
    """Its own time, without opening its deployment."""
    cell: str = ""
    """Deployment that it needs; cases of one share its opening."""
    alone: str = ""
    """A setting that counts by itself: each of them is to be run at least once."""


@dataclass(frozen=True)
class Selection:
    """What `select` chose."""

    chosen: tuple[str, ...]
    """Keys, in the order in which they were taken."""
    seconds: float
    """Estimated time of the chosen cases, openings included."""
    interactions: int
    untested: tuple[Interaction, ...]
    """Interactions of some candidate and of no chosen one, sorted."""

    @property
    def covered(self) -> int:
        return self.interactions - len(self.untested)


def interactions(candidate: Candidate, strength: int) -> frozenset[Interaction]:
    """The interactions of a case: every ``strength`` of its settings (all of them where it has fewer), and `alone`."""
    settings = sorted(candidate.factors.items())
    found = set(combinations(settings, min(strength, len(settings)))) if settings else set()
    if candidate.alone:
        found.add((("case", candidate.alone),))
    return frozenset(found)


def select(candidates: Sequence[Candidate], budget: float, *, strength: int = 2, opening: float = 0.0) -> Selection:
    """Cases for ``budget`` seconds, where the first case of each cell costs ``opening`` more.

    First whatever adds most new interactions for its time; once none is left, the same again among the remaining cases.
    The estimate never exceeds the budget, except that the cheapest case for its interactions is chosen where none fits.
    Factors with one value only say nothing and are left out. Raises ValueError for a strength below 1 or equal keys.
    """
    if strength < 1:
        raise ValueError(f"strength {strength}: interactions have at least one setting")
    if len({one.key for one in candidates}) < len(candidates):
        raise ValueError("two candidates share a key")
    ordered = sorted(_informative(candidates), key=lambda one: one.key)
    sets = [interactions(one, strength) for one in ordered]
    universe = frozenset().union(*sets)
    run = _Run(ordered, sets, opening, budget)
    while run.cover():
        pass
    run.fill()
    if not run.chosen and ordered:
        run.take(max(range(len(ordered)), key=lambda i: ((len(sets[i]) or 1) / run.cost(i), -i)))
    seen = frozenset().union(*(sets[i] for i in run.chosen))
    return Selection(
        tuple(ordered[i].key for i in run.chosen), budget - run.left, len(universe), tuple(sorted(universe - seen))
    )


class _Run:
    """The state of one selection."""

    def __init__(
        self, candidates: Sequence[Candidate], sets: Sequence[frozenset[Interaction]], opening: float, budget: float
    ) -> None:
        self._candidates, self._sets, self._opening = candidates, sets, opening
        self._opened: set[str] = {""}
        self._remaining = dict.fromkeys(range(len(candidates)))
        self.left = budget
        self.chosen: list[int] = []

    def cost(self, index: int) -> float:
        """Seconds that a candidate costs now."""
        one = self._candidates[index]
        return max(one.seconds, _LEAST) + (0.0 if one.cell in self._opened else self._opening)

    def take(self, index: int) -> None:
        self.left -= self.cost(index)
        self._opened.add(self._candidates[index].cell)
        self._remaining.pop(index)
        self.chosen.append(index)

    def fill(self) -> None:
        """Take what still fits, the cheapest first: cases that have no interaction at all."""
        for index in sorted(self._remaining, key=lambda i: (self.cost(i), i)):
            if self.cost(index) <= self.left:
                self.take(index)

    def cover(self) -> bool:
        """Take candidates until those left add nothing or do not fit; whether any was taken."""
        holders: dict[Interaction, list[int]] = {}
        gains = {}
        for index in self._remaining:
            gains[index] = len(self._sets[index])
            for one in self._sets[index]:
                holders.setdefault(one, []).append(index)
        before = len(self.chosen)
        while True:
            best, value = -1, 0.0
            for index in self._remaining:
                if gains[index] and (cost := self.cost(index)) <= self.left and gains[index] / cost > value:
                    best, value = index, gains[index] / cost
            if best < 0:
                return len(self.chosen) > before
            self.take(best)
            for one in self._sets[best]:
                for index in holders.pop(one, ()):
                    gains[index] -= 1


def read_duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m``, ``1h`` or ``1h30m``. Raises ValueError for anything else, and for none."""
    found = _DURATION.fullmatch(text.strip().lower())
    parts = {unit: value for unit, value in found.groupdict().items() if value} if found else {}
    seconds = sum(float(value) * _UNITS[unit] for unit, value in parts.items())
    if not seconds:
        raise ValueError(f"{text!r} is no time; write 90s, 10m or 1h")
    return seconds


def shown_duration(seconds: float) -> str:
    """``90s``, ``10m``, ``1h30m``: what `read_duration` reads."""
    whole = round(seconds)
    if whole < 1 or whole != seconds:
        return f"{seconds:g}s"
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if (hours or minutes > 1) and not rest:
        return "".join(f"{value}{unit}" for value, unit in ((hours, "h"), (minutes, "m")) if value)
    return f"{whole}s"


def _informative(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates without the factors that have one value over all of them."""
    listed = list(candidates)
    values: dict[str, set[str]] = {}
    for one in listed:
        for factor, value in one.factors.items():
            values.setdefault(factor, set()).add(value)
    return [
        Candidate(
            one.key,
            {factor: value for factor, value in one.factors.items() if len(values[factor]) > 1},
            one.seconds,
            one.cell,
            one.alone,
        )
        for one in listed
    ]
