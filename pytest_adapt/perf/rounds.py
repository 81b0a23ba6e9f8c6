"""A round of the gate: pairs of fresh processes, one a side, that run all benchmarks in alternating slices.

One pair of processes serves many benchmarks, so that imports and loading are paid once a pair. A third process, of the
baseline once more, stands against it in one benchmark: the control of the run.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_adapt.perf.clocks import Clock, Facts, choose_clock, idle_ticks, own_cores, quietest_core
from pytest_adapt.perf.paired import BLOCKS, Estimate, block_orders, block_ratio, pair_estimate
from pytest_adapt.perf.sides import Declined, Measuring, Side
from pytest_adapt.target.protocol import Deployment, TargetError

__all__ = ["Benchmark", "Profile", "Round", "Seen", "measure_round"]

SLICE = 0.02
"""Seconds of one slice: long beside the clock's grain and a message, short beside a neighbour's bursts."""
WARM = 3
"""Runs of a load that are not measured."""
_LEAST_BLOCKS = 2
_MOST_SECONDS = BLOCKS * 4 * 4 * SLICE
"""Of one benchmark in one pair: where a single run takes longer than a slice, there are fewer blocks."""
_PROFILED = "ABBA"
_LOOK = 0.1
"""Seconds for which it is looked which core is quiet."""


@dataclass(frozen=True)
class Benchmark:
    """One load on one deployment. ``prompts`` are token ids, ``new`` the tokens of each answer."""

    case: str
    deployment: Deployment
    load: str
    prompts: tuple[tuple[int, ...], ...]
    new: int


@dataclass(frozen=True)
class Profile:
    """Where the time of one run of a load went, on each side: operation -> (calls, seconds), and all seconds."""

    ops: Mapping[str, Mapping[str, tuple[float, float]]]
    """By side, A or B."""
    seconds: Mapping[str, float]


@dataclass
class Seen:
    """What a round saw of one benchmark."""

    ratios: dict[str, list[float]] = field(default_factory=lambda: {"cpu": [], "wall": []})
    """Clock -> logarithms of B over A, one a pair."""
    clocks: list[Clock] = field(default_factory=list)
    """The one that each pair asks for."""
    profiles: list[Profile] = field(default_factory=list)
    no_profile: str = ""
    """Why there is none."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"A": [], "B": []})
    """Seconds of one run by the clock that gates, one a pair."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Side -> digest of the first answers: different ones mean that the sides wrote different text."""
    problem: tuple[str, str] | None = None
    """(new, gone, unsupported or fail; why) where there is nothing to compare."""

    @property
    def clock(self) -> Clock | None:
        """The one that gates: the wall where half of the pairs ask for it (to wait once does not make a server).
        None where nothing was compared."""
        walls = [one for one in self.clocks if one.name == "wall"]
        if 2 * len(walls) >= len(self.clocks):
            return walls[0] if walls else None
        return next(one for one in self.clocks if one.name == "cpu")

    @property
    def estimates(self) -> dict[str, Estimate]:
        """By clock."""
        return {name: Estimate(tuple(pairs)) for name, pairs in self.ratios.items() if pairs}


@dataclass
class Round:
    """What a round saw: of each case, and of the baseline against itself in one of them."""

    seen: dict[str, Seen]
    control: Seen = field(default_factory=Seen)
    control_case: str = ""
    """The first that both sides run; "" where none, or where no control was asked for."""


def measure_round(
    a: Side,
    b: Side,
    benchmarks: Sequence[Benchmark],
    pairs: int,
    *,
    dice: random.Random,
    logs: Path,
    timeout: float = 600.0,
    control: bool = False,
    profile: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    start: Callable[..., Measuring] = Measuring,
) -> Round:
    """What ``pairs`` fresh pairs of processes saw.

    With ``control`` the baseline also stands against itself, in the first case that both sides run; with ``profile``
    both sides are asked where their time went. ``tell`` hears what is done, ``start`` makes a process. A side that
    fails ends its benchmark, never the round.
    """
    result = Round({one.case: Seen() for one in benchmarks})
    groups = [(key, list(those)) for key, those in itertools.groupby(benchmarks, key=lambda one: one.deployment)]
    sides = {"A": a, "B": b, **({"C": a} if control else {})}
    for number in range(pairs):
        # Both processes of a pair have one hash seed, and each pair another one.
        with _Pair(sides, dice.randrange(1, 1 << 31), number, dice, logs, timeout, start) as pair:
            for deployment, group in groups:
                todo = [one for one in group if result.seen[one.case].problem is None]
                if todo:
                    tell(f"pair {number + 1} of {pairs}, {todo[0].case}")
                    pair.group(deployment, todo, result, profile)
    return result


class _Pair:
    """The processes of one pair; the third, C, starts when the control needs it."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        seed: int,
        number: int,
        dice: random.Random,
        logs: Path,
        timeout: float,
        start: Callable[..., Measuring],
    ) -> None:
        self._sides, self._seed, self._dice = sides, seed, dice
        self._logs, self._timeout, self._start = logs, timeout, start
        self._cores = list(own_cores())
        self._number = number
        self._core: list[int] = []
        self._processes: dict[str, Measuring] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Pair:
        names = list(self._sides)
        self._dice.shuffle(names)  # the order of starting is an order too
        for name in names:
            self._begin(name)
        return self

    def __exit__(self, *what: object) -> None:
        self._stack.close()

    def _begin(self, name: str) -> None:
        """Start a process; it says with the first deployment whether it could."""
        made = self._start(self._sides[name], self._seed, self._logs, self._timeout, name=f"gate-{name}")
        self._processes[name] = made
        self._stack.callback(made.stop)
        made.create()

    def group(self, deployment: Deployment, benchmarks: Sequence[Benchmark], result: Round, profile: bool) -> None:
        """Open a deployment on both sides and run its benchmarks."""
        seen = result.seen
        here = not result.control_case or result.control_case in [one.case for one in benchmarks]
        named = [name for name in self._sides if name != "C" or here]
        problems = self._opened(named, deployment)
        for one in benchmarks:
            found = dict(problems)
            for name in ("A", "B"):
                found[name] = found[name] or self._given(name, one)
            if any(found.values()):
                seen[one.case].problem = _problem(found["A"], found["B"])
                continue
            try:
                self._compare(one, ("A", "B"), seen[one.case], profile)
            except _SideFailed as error:
                other = "B" if error.name == "A" else "A"
                broken = {error.name: ("fail", error.why), other: self._runs(other, one)}
                seen[one.case].problem = _problem(broken["A"], broken["B"])
            if "C" in named and seen[one.case].problem is None and result.control_case in ("", one.case):
                result.control_case = one.case
                why = result.control.problem or problems["C"] or self._given("C", one)
                result.control.problem = why or self._control(one, result.control)
            if ended := [name for name in ("A", "B") if self._processes[name].ended]:
                problems |= self._opened(ended, deployment)
        for name in named:
            self._closed(name)

    def _opened(self, names: Sequence[str], deployment: Deployment) -> dict[str, tuple[str, str] | None]:
        """Open a deployment on some sides together; by side, what kept it from opening."""
        for name in names:
            if self._processes[name].ended:
                self._begin(name)
            self._processes[name].open(deployment)
        found: dict[str, tuple[str, str] | None] = {}
        for name in names:
            try:
                self._processes[name].opened()
                found[name] = None
            except Declined as error:
                found[name] = "unsupported", str(error)
            except TargetError as error:
                found[name] = "fail", str(error)
        return found

    def _given(self, name: str, one: Benchmark) -> tuple[str, str] | None:
        try:
            self._processes[name].ask("load", name=one.load, prompts=one.prompts, new=one.new)
        except TargetError as error:
            return "fail", str(error)
        return None

    def _runs(self, name: str, one: Benchmark) -> tuple[str, str] | None:
        """What keeps one side from running a load, whatever the other does."""
        try:
            self._ask(name, "warm", load=one.load, repeats=1)
        except _SideFailed as error:
            return "fail", error.why
        return None

    def _closed(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and not process.ended:
            try:
                process.ask("close")
            except (TargetError, Declined):
                process.stop()

    def _control(self, one: Benchmark, seen: Seen) -> tuple[str, str] | None:
        """The baseline against itself; what went wrong with that."""
        try:
            self._compare(one, ("A", "C"), seen, profile=False)
        except _SideFailed as error:
            return "fail", error.why
        return None

    def _compare(self, one: Benchmark, names: tuple[str, str], seen: Seen, profile: bool) -> None:
        """The blocks of one benchmark in this pair."""
        places = dict(zip("AB", names, strict=True))
        warm = {side: self._ask(name, "warm", load=one.load, repeats=WARM) for side, name in places.items()}
        seen.tokens = {side: str(found["tokens"]) for side, found in warm.items()}
        clock = choose_clock(Facts.of(warm["A"]), Facts.of(warm["B"]))
        seen.clocks.append(clock)
        cores = self._quiet_core() if clock.name == "cpu" else self._cores
        for name in names:
            self._ask(name, "pin", cores=cores)
        once = max(found["once"] for found in warm.values()) / 1e9
        repeats = max(1, round(SLICE / once))
        blocks = max(_LEAST_BLOCKS, min(BLOCKS, int(_MOST_SECONDS / (4 * repeats * once))))
        found: dict[str, list[float]] = {"cpu": [], "wall": []}
        spent = {"A": 0.0, "B": 0.0}
        for order in block_orders(blocks, self._dice):
            slices = [self._ask(places[side], "slice", load=one.load, repeats=repeats) for side in order]
            for name, ratios in found.items():
                times = [float(piece[name]) for piece in slices]
                if min(times) > 0:  # a server's client may use no CPU time at all
                    ratios.append(block_ratio(order, times))
            for side, piece in zip(order, slices, strict=True):
                spent[side] += piece[clock.name] / 1e9
        for name, ratios in found.items():
            if ratios:
                seen.ratios[name].append(pair_estimate(ratios))
        for side, total in spent.items():
            seen.seconds[side].append(total / (2 * blocks * repeats))
        if profile and not seen.no_profile:
            self._profile(one, places, clock, repeats, seen)

    def _quiet_core(self) -> list[int]:
        """The core of this pair, looked for once, while its processes wait: the one with the fewest neighbours."""
        if not self._core and self._cores:
            before = idle_ticks()
            time.sleep(_LOOK)
            core = quietest_core(self._cores, before, idle_ticks(), self._number)
            self._core = [] if core is None else [core]
        return self._core

    def _profile(self, one: Benchmark, places: Mapping[str, str], clock: Clock, repeats: int, seen: Seen) -> None:
        taken: dict[str, list[dict[str, Any]]] = {"A": [], "B": []}
        for side in _PROFILED:
            try:
                got = self._ask(places[side], "profile", load=one.load, repeats=repeats, clock=clock.name)
            except Declined as error:
                seen.no_profile = f"{self._sides[places[side]].label}: {error}"
                return
            taken[side].append(got)
        ops = {
            side: {
                op: tuple(sum(got["ops"].get(op, (0.0, 0.0))[place] for got in those) / len(those) for place in (0, 1))
                for op in sorted({op for got in those for op in got["ops"]})
            }
            for side, those in taken.items()
        }
        seconds = {side: sum(got["seconds"] for got in those) / len(those) for side, those in taken.items()}
        seen.profiles.append(Profile(ops, seconds))

    def _ask(self, name: str, do: str, **given: Any) -> dict[str, Any]:
        try:
            return self._processes[name].ask(do, **given)
        except TargetError as error:
            raise _SideFailed(name, str(error)) from error


class _SideFailed(Exception):
    """One side broke while it was measured."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name, self.why = name, why


def _problem(a: tuple[str, str] | None, b: tuple[str, str] | None) -> tuple[str, str]:
    """What it means that a side does not run a benchmark: (status, why)."""
    if b is None and a is not None:
        return "new", f"the baseline does not run it: {a[1]}"
    if a is None and b is not None:
        return "gone", f"the baseline runs it, the target does not: {b[1]}"
    if a is not None and b is not None and a[0] == b[0] == "unsupported":
        return "unsupported", b[1]
    return "fail", f"neither side runs it; the target: {b[1] if b else ''}"
