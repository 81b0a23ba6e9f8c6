"""How far a target can be trusted: rungs, the first cause, and clusters of red items that share one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_adapt.sites import layer_of
from pytest_adapt.verdict.result import RUNGS, CaseResult, Measurement
from pytest_adapt.verdict.status import outcome

__all__ = ["SUITE_RUNGS", "Cluster", "Ladder", "Rung", "climb", "clusters", "is_red", "rung_of", "worst"]

SUITE_RUNGS: Mapping[str, str] = {
    "loading": "loads",
    "operators": "correct",
    "correctness": "correct",
    "consistency": "consistent",
    "determinism": "consistent",
    "layouts": "layouts",
    "precision": "precision",
    "long_context": "long_context",
    "stress": "stress",
    "serving": "stress",
    "benchmark": "performance",
    "training": "",
}
"""Rung of each shipped suite; training stands beside the ladder."""


@dataclass(frozen=True)
class Rung:
    """One rung: green (something required passed, nothing is red), red, or empty (nothing was judged)."""

    name: str
    state: str
    counts: Mapping[str, int]
    """Status -> number of cases."""


@dataclass(frozen=True)
class Ladder:
    """All rungs in order; ``trusted`` is how many of them, from the bottom, are green."""

    rungs: tuple[Rung, ...]
    trusted: int

    @property
    def next(self) -> Rung | None:
        """The rung that ended the climb."""
        return self.rungs[self.trusted] if self.trusted < len(self.rungs) else None

    def __str__(self) -> str:
        if not self.trusted and self.rungs[0].state == "empty":
            return f"trust begins with rung 1 ({self.rungs[0].name}), where nothing was judged"
        if not self.trusted:
            head = "not trusted on any rung"
        else:
            head = f"trusted up to rung {self.trusted} of {len(self.rungs)}: {self.rungs[self.trusted - 1].name}"
        if self.next is None:
            return head
        if self.next.state == "red":
            return f"{head}; rung {self.trusted + 1} ({self.next.name}) is red"
        return f"{head}; rung {self.trusted + 1} ({self.next.name}) was not judged"


@dataclass
class Cluster:
    """Red cases that share one cause, in the order in which they ran."""

    key: tuple[str, ...]
    cause: str
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def first(self) -> CaseResult:
        return min(self.cases, key=_rung_index)

    def values(self, name: str) -> list[str]:
        """Distinct values of a field of the cases (model, precision, suite ...), sorted."""
        return sorted({str(value) for case in self.cases if (value := getattr(case, name))})


def is_red(case: CaseResult) -> bool:
    """Whether a case fails the run."""
    return outcome(case.status, case.required) == "failed"


def rung_of(suite: str, marked: str | None) -> str:
    """Rung of an item: what its marker says, else what its suite says; "" where it has none."""
    return marked if marked is not None else SUITE_RUNGS.get(suite, "")


def climb(cases: Iterable[CaseResult]) -> Ladder:
    """The ladder of a run. A rung on which nothing was judged ends the climb, as a red one does."""
    by_rung: dict[str, list[CaseResult]] = {name: [] for name in RUNGS}
    for case in cases:
        if case.rung in by_rung:
            by_rung[case.rung].append(case)
    rungs = tuple(Rung(name, _state(members), _counts(members)) for name, members in by_rung.items())
    trusted = next((index for index, rung in enumerate(rungs) if rung.state != "green"), len(rungs))
    return Ladder(rungs, trusted)


def clusters(cases: Sequence[CaseResult]) -> list[Cluster]:
    """Red cases by cause, the lowest rung first, then the largest cluster."""
    found: dict[tuple[str, ...], Cluster] = {}
    red = [case for case in cases if is_red(case)]
    # What a red item blocked is no cause of its own.
    for case in [case for case in red if case.status != "blocked"] or red:
        key, cause = _cause(case)
        found.setdefault(key, Cluster(key, cause)).cases.append(case)
    return sorted(found.values(), key=lambda cluster: (_rung_index(cluster.first), -len(cluster.cases), cluster.key))


def worst(case: CaseResult) -> Measurement | None:
    """The measurement that used most of its budget, a failed one first."""
    return max(case.measurements, key=lambda one: (not one.ok, one.use), default=None)


def _cause(case: CaseResult) -> tuple[tuple[str, ...], str]:
    """(key, one line). Site without layer and position where there is a divergence; else metric; else reason."""
    if case.divergence is not None:
        local = layer_of(case.divergence.site)[1]
        return ("site", local), f"first divergence in {local}"
    failed = worst(case)
    if failed is not None and not failed.ok:
        return (
            "metric",
            case.rung,
            case.suite,
            failed.metric,
        ), f"{failed.metric} beyond its budget ({case.suite or 'own tests'})"
    reason = case.reason.partition("\n")[0]
    return ("reason", case.status, reason), reason or str(case.status)


def _state(cases: Sequence[CaseResult]) -> str:
    if any(is_red(case) for case in cases):
        return "red"
    return "green" if any(case.status == "pass" for case in cases) else "empty"


def _counts(cases: Iterable[CaseResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.status.value] = counts.get(case.status.value, 0) + 1
    return counts


def _rung_index(case: CaseResult) -> int:
    return RUNGS.index(case.rung) if case.rung in RUNGS else len(RUNGS)
