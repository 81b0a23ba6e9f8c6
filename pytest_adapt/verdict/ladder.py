"""How far a target can be trusted: rungs, the first cause, and clusters of red items that share one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_adapt.sites import layer_of
from pytest_adapt.verdict.causes import Cause, causes_of, dataflow, failed
from pytest_adapt.verdict.result import RUNGS, CaseResult
from pytest_adapt.verdict.status import PASSED, outcome

__all__ = [
    "SMALLEST_PROFILES",
    "SUITE_RUNGS",
    "Cluster",
    "Ladder",
    "Rung",
    "climb",
    "clusters",
    "is_red",
    "rung_of",
]

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


SMALLEST_PROFILES: Mapping[str, str] = {
    "loads": "smoke",
    "correct": "smoke",
    "consistent": "smoke",
    "layouts": "day0",
    "long_context": "day0",
    "stress": "day0",
    "performance": "day0",
}
"""Rung -> the smallest profile in which a shipped test stands on it. "precision" has none: each of its questions (what
fp32, bf16 and fp16 may be off by) is asked on the other rungs in every precision; it is there for tests of a user's."""
_PROFILES = ("smoke", "day0", "full")


@dataclass(frozen=True)
class Rung:
    """One rung: green (something required passed, nothing is red), red, empty (nothing was judged), or absent: nothing
    was judged, and this profile has no test of it."""

    name: str
    state: str
    counts: Mapping[str, int]
    """Status -> number of cases."""


@dataclass(frozen=True)
class Ladder:
    """All rungs in order; ``trusted`` is the number of the highest one up to which all that have tests are green (0:
    none, or a narrowed run, which left cases out and so says nothing about trust)."""

    rungs: tuple[Rung, ...]
    trusted: int
    narrowed: bool = False

    @property
    def next(self) -> Rung | None:
        """The rung that ended the climb."""
        return next((rung for rung in self.rungs[self.trusted :] if rung.state != "absent"), None)

    def __str__(self) -> str:
        if self.narrowed:
            return self._judged()
        if not self.trusted and self.rungs[0].state == "empty":
            return f"trust begins with rung 1 ({self.rungs[0].name}), where nothing passed"
        if not self.trusted:
            head = "not trusted on any rung"
        else:
            head = f"trusted up to rung {self.trusted} of {len(self.rungs)}: {self.rungs[self.trusted - 1].name}"
            passed_over = [rung.name for rung in self.rungs[: self.trusted] if rung.state == "absent"]
            head += f" (no test: {', '.join(passed_over)})" if passed_over else ""
        if self.next is None:
            left = len(self.rungs) > self.trusted
            return f"{head}; this profile asks no more" if left else head
        named = f"rung {self.rungs.index(self.next) + 1} ({self.next.name})"
        if self.next.state == "red":
            return f"{head}; {named} is red"
        if set(self.next.counts) == {"deferred"}:
            return f"{head}; {named} is deferred"
        return f"{head}; {named} was not judged"

    def _judged(self) -> str:
        """What a narrowed run says: its rungs, one by one."""
        judged = [
            f"rung {number} ({rung.name}) {'green' if rung.state == 'green' else 'is red'}"
            for number, rung in enumerate(self.rungs, start=1)
            if rung.state in ("green", "red")
        ]
        return f"narrowed run: {', '.join(judged) or 'no rung was judged'}; says nothing about trust"


@dataclass
class Cluster:
    """Red cases that share one cause, in the order in which they ran."""

    cause: str
    cases: list[CaseResult] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    """What each case is put down to, with its own sites."""

    @property
    def first(self) -> CaseResult:
        """The case to look at: of the lowest rung, and there the one that showed sites itself, or names what is lost,
        if one did."""

        def place(case: CaseResult) -> tuple[object, ...]:
            named = any(one.metric.startswith("needles") for one in failed(case))
            return _rung_index(case), "taps" not in case.observable.split("+"), not named

        return min(self.cases, key=place)

    @property
    def sites(self) -> tuple[str, ...]:
        """Full names of all red sites of this cause, in dataflow order."""
        return tuple(sorted({name for cause in self.causes for name in cause.sites}, key=dataflow))

    def cause_of(self, case: CaseResult) -> Cause:
        """What a case of the cluster is put down to here."""
        return next(cause for one, cause in zip(self.cases, self.causes, strict=True) if one is case)

    def values(self, name: str) -> list[str]:
        """Distinct values of a field of the cases (model, precision, suite ...), sorted."""
        return sorted({str(value) for case in self.cases if (value := getattr(case, name))})


def is_red(case: CaseResult) -> bool:
    """Whether a case fails the run."""
    return outcome(case.status, case.required) == "failed"


def rung_of(suite: str, marked: str | None) -> str:
    """Rung of an item: what its marker says, else what its suite says; "" where it has none."""
    return marked if marked is not None else SUITE_RUNGS.get(suite, "")


def climb(
    cases: Iterable[CaseResult], profile: str = "full", absent: Collection[str] = (), *, narrowed: bool = False
) -> Ladder:
    """The ladder of a run. A rung on which nothing was judged ends the climb, as a red one does; one that has no test
    in this profile is passed over, and so is one of ``absent`` (those that this target has no test of). ``narrowed``
    says that single cases were left out; a run that holds none of the lowest rung is narrowed in any case."""
    by_rung: dict[str, list[CaseResult]] = {name: [] for name in RUNGS}
    for case in cases:
        if case.rung in by_rung:
            by_rung[case.rung].append(case)

    def state(name: str, members: Sequence[CaseResult]) -> str:
        least = SMALLEST_PROFILES.get(name)
        asked = least is not None and _PROFILES.index(least) <= _PROFILES.index(profile) and name not in absent
        return _state(members) if members or asked else "absent"

    rungs = tuple(Rung(name, state(name, members), _counts(members)) for name, members in by_rung.items())
    if narrowed or not by_rung[RUNGS[0]]:
        return Ladder(rungs, 0, narrowed=True)
    trusted = 0
    for number, rung in enumerate(rungs, start=1):
        if rung.state == "green":
            trusted = number
        elif rung.state != "absent":
            break
    return Ladder(rungs, trusted)


def clusters(cases: Sequence[CaseResult]) -> list[Cluster]:
    """Red cases by cause: what was compared and failed before what could not be judged, then the lowest rung first,
    then the largest cluster. A case with several causes is in several."""
    found: dict[tuple[str, ...], Cluster] = {}
    red = [case for case in cases if is_red(case)]
    # What a red item blocked is no cause of its own.
    red = [case for case in red if case.status != "blocked"] or red
    for case, causes in zip(red, causes_of(red), strict=True):
        for cause in causes:
            cluster = found.setdefault(cause.key, Cluster(cause.text))
            cluster.cases.append(case)
            cluster.causes.append(cause)
    for cluster in found.values():
        if cluster.sites:
            cluster.cause = f"first divergence in {layer_of(cluster.sites[0])[1]}"
        else:
            cluster.cause = cluster.cause_of(cluster.first).text

    def place(cluster: Cluster) -> tuple[object, ...]:
        start = dataflow(cluster.sites[0]) if cluster.sites else ()
        open_question = all(outcome(case.status, False) == "skipped" for case in cluster.cases)
        return open_question, _rung_index(cluster.first), -len(cluster.cases), start, cluster.cause

    return sorted(found.values(), key=place)


def _state(cases: Sequence[CaseResult]) -> str:
    if any(is_red(case) for case in cases):
        return "red"
    return "green" if any(case.status in PASSED for case in cases) else "empty"


def _counts(cases: Iterable[CaseResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.status.value] = counts.get(case.status.value, 0) + 1
    return counts


def _rung_index(case: CaseResult) -> int:
    return RUNGS.index(case.rung) if case.rung in RUNGS else len(RUNGS)
