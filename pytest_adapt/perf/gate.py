"""The gate of one run: rounds of paired times, their verdicts, and what is said about them.

All benchmarks of a run are measured together when the first of them is asked for: a round over all, then a confirming
round over those that the first one suspects. A verdict is given where it is asked for, inside the test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_adapt.perf.attribution import Share, attribute
from pytest_adapt.perf.clocks import machine, steal_since
from pytest_adapt.perf.paired import CONFIRMING, LEAST, PAIRS, Estimate, Finding, decide, suspicion
from pytest_adapt.perf.rounds import Benchmark, Round, Seen, measure_round
from pytest_adapt.perf.sides import Side

__all__ = ["Comparison", "Gate"]

_SHOWN = 3
_TOLD = 0.1
"""Share of a change that the profiles must show: what they name below that is their noise."""
_MOST = 0.5
"""Below this share of it they are said not to show most."""
_POWER = 1.645
"""Standard errors below which 19 of 20 estimates of a change stay above what is suspected."""


@dataclass(frozen=True)
class Comparison:
    """One benchmark against the baseline: a status of the gate (regression, improvement, same, inconclusive, invalid
    machine, new, gone, unsupported, fail), and why."""

    case: str
    status: str
    why: str
    clock: str = ""
    """cpu or wall; "" where nothing was compared."""
    clock_why: str = ""
    first: Estimate | None = None
    confirming: Estimate | None = None
    wall: Estimate | None = None
    """By wall time, whatever gates."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """Of one run of the load, on the baseline and on the target."""
    shares: tuple[Share, ...] = ()
    """Where the change went, the largest first."""
    notes: tuple[str, ...] = ()

    @property
    def op(self) -> str:
        """The operation that the change is put down to; "" where the profiles do not tell."""
        return self.shares[0].op if self.shares else ""

    @property
    def estimate(self) -> Estimate | None:
        """The one that decided: the confirming round where there was one."""
        return self.confirming or self.first

    def lines(self) -> list[str]:
        """What a reader is told, the verdict first."""
        said = [self.why]
        if self.shares:
            total = sum(one.change for one in self.shares)
            said.append(f"where: {'; '.join(map(str, self.shares[:_SHOWN]))}; all together {1e3 * total:+.3g} ms a run")
        if self.clock:
            said.append(f"clock: {self.clock} time ({self.clock_why})")
        return [*said, *self.notes]


@dataclass
class Gate:
    """Compares ``target`` with ``baseline``. ``planned`` gives all of the run when the first is asked for."""

    baseline: Side
    target: Side
    logs: Path
    planned: Callable[[], Sequence[Benchmark]]
    timeout: float = 600.0
    seed: int = 0
    """Of the order of slices and of the hash seeds; 0 draws one, which is kept in the report."""
    tell: Callable[[str], None] = lambda line: None
    control: Estimate | None = None
    """The baseline against itself, in this run."""
    control_case: str = ""
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    machine: str = ""
    """How busy it was, in words."""
    suspected: list[str] = field(default_factory=list)
    """Cases that the first round suspected."""

    def __post_init__(self) -> None:
        self.seed = self.seed or random.SystemRandom().randrange(1, 1 << 31)
        self._dice = random.Random(self.seed)

    def times(self, asked: Benchmark) -> Comparison:
        """The verdict on a benchmark. The first call measures all that are planned."""
        if asked.case not in self.comparisons:
            planned = [one for one in self.planned() if one.case not in self.comparisons]
            self._measure(planned if asked in planned else [asked])
        return self.comparisons[asked.case]

    def _measure(self, benchmarks: Sequence[Benchmark]) -> None:
        before = machine()
        ordered = _by_deployment(benchmarks)
        first = self._round(ordered, PAIRS, control=True)
        kept = first.control
        self.control, self.control_case = _gating(kept), first.control_case
        suspects = [one for one in ordered if self._suspicion(first.seen[one.case])]
        self.suspected += [one.case for one in suspects]
        confirming = self._round(suspects, CONFIRMING, profile=True).seen if suspects else {}
        self.machine = f"{machine()}, {steal_since(before, machine()):.1%} of its time taken by the host"
        for one in ordered:
            self.comparisons[one.case] = self._judged(one, first.seen[one.case], confirming.get(one.case), kept)

    def _round(
        self, benchmarks: Sequence[Benchmark], pairs: int, *, control: bool = False, profile: bool = False
    ) -> Round:
        return measure_round(
            self.baseline,
            self.target,
            benchmarks,
            pairs,
            dice=self._dice,
            logs=self.logs,
            timeout=self.timeout,
            control=control,
            profile=profile,
            tell=self.tell,
        )

    def _suspicion(self, seen: Seen) -> str:
        if seen.problem is not None or seen.clock is None:
            return ""
        return suspicion(seen.estimates, seen.clock.name)

    def _judged(self, one: Benchmark, first: Seen, confirming: Seen | None, control: Seen) -> Comparison:
        problem = first.problem or (confirming.problem if confirming is not None else None)
        if problem is not None:
            return Comparison(one.case, problem[0], problem[1])
        if first.clock is None or self.control is None:
            why = control.problem[1] if control.problem else "no pair of processes ran it"
            return Comparison(one.case, "inconclusive", f"the control of this run could not be measured: {why}")
        clock = first.clock
        floor = self.control.noise if clock.name == "wall" else 0.0
        found = decide(first.estimates, confirming.estimates if confirming else None, clock.name, floor=floor)
        if invalid := self._invalid():
            found = Finding("invalid machine", clock.name, f"{invalid}; measured: {found.verdict}, {found.why}")
        last = confirming or first
        sign = _CHANGED.get(found.verdict, 0)
        shares = tuple(attribute(confirming.profiles, sign)) if confirming and sign else ()
        seconds = (_mean(last.seconds["A"]), _mean(last.seconds["B"]))
        part = _accounted(shares, seconds)
        notes = [f"the machine: {self.machine}"] if found.verdict not in ("same", "improvement") else []
        if first.tokens.get("A") != first.tokens.get("B"):
            notes.append("the sides do not write the same tokens: the times are of different answers")
        if shares and part < _MOST:
            notes.append(
                f"of the {1e3 * (seconds[1] - seconds[0]):+.3g} ms a run the profiles show {max(0.0, part):.0%}: under "
                "one, operations run one by one, also those that a target otherwise computes in one call"
            )
        if found.verdict in _CHANGED and (not shares or part < _TOLD):
            reason = "the profiles do not show it" if shares else last.no_profile or "no profile was taken"
            notes.append(f"where the time went is not told: {reason}")
            shares = ()
        return Comparison(
            case=one.case,
            status=found.verdict,
            why=f"{found.verdict}: {found.why}, {found.clock}",
            clock=found.clock,
            clock_why=clock.why if found.clock == clock.name else "waiting or lost threads: CPU time alone misses them",
            first=first.estimates.get(found.clock),
            confirming=confirming.estimates.get(found.clock) if confirming else None,
            wall=last.estimates.get("wall"),
            seconds=seconds,
            shares=shares,
            notes=tuple(notes),
        )

    def _invalid(self) -> str:
        """Why nothing that this run measured counts; "" where it does."""
        if self.control is None or abs(self.control.median) <= LEAST:
            return ""
        return f"the baseline against itself came to {self.control} on {self.control_case}: {self.machine}"

    @property
    def power(self) -> str:
        """What the first round of this run would have suspected, on the benchmark that it told least of."""
        found = {case: one.first for case, one in self.comparisons.items() if one.first is not None}
        if not found:
            return ""
        worst = max(found, key=lambda case: found[case].error)
        least = LEAST + _POWER * found[worst].error
        return (
            f"a slowdown of {math.expm1(least):.0%} would have been suspected in 19 of 20 runs, {worst} being the worst"
        )

    def summary(self) -> list[str]:
        """Three lines for the end of a run."""
        counts: dict[str, int] = {}
        for one in self.comparisons.values():
            counts[one.status] = counts.get(one.status, 0) + 1
        if not counts:
            return []
        said = ", ".join(f"{number} {status}" for status, number in counts.items())
        clocks = sorted({f"{one.clock} time" for one in self.comparisons.values() if one.clock}) or ["no clock"]
        control = f"control {self.control}" if self.control else "no control"
        alarms = len([case for case in self.suspected if self.comparisons[case].status == "same"])
        return [
            f"gate: {self.target.label} against {self.baseline.label}: {said}; {control}; {' and '.join(clocks)}",
            f"gate: {len(self.suspected)} suspected by the first round, of these {alarms} false alarms; {self.machine}",
            *([f"gate: {self.power}"] if self.power else []),
        ]


_CHANGED = {"regression": 1, "improvement": -1}


def _by_deployment(benchmarks: Iterable[Benchmark]) -> list[Benchmark]:
    """Those of one deployment one after the other, in the order of their first."""
    found: dict[object, list[Benchmark]] = {}
    for one in benchmarks:
        found.setdefault(one.deployment, []).append(one)
    return [one for those in found.values() for one in those]


def _gating(seen: Seen) -> Estimate | None:
    """The estimate by the clock that gates."""
    return None if seen.clock is None or seen.problem is not None else seen.estimates.get(seen.clock.name)


def _accounted(shares: Sequence[Share], seconds: tuple[float, float]) -> float:
    """Share of the change of a run's seconds that the profiles show."""
    change = seconds[1] - seconds[0]
    return sum(share.change for share in shares) / change if change else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
