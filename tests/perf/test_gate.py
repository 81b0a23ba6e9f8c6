"""What the gate makes of what its rounds saw: control, confirmation, attribution; nothing is silently green."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.perf.attribution import HOST, attribute
from pytest_adapt.perf.clocks import (
    Clock,
    Facts,
    Machine,
    choose_clock,
    idle_ticks,
    machine,
    quietest_core,
    steal_since,
)
from pytest_adapt.perf.gate import Gate
from pytest_adapt.perf.rounds import Benchmark, Profile, Round, Seen
from pytest_adapt.perf.sides import Side
from pytest_adapt.target.protocol import Deployment
from pytest_adapt.target.registry import resolve
from pytest_adapt.verdict.result import Status

CPU = Clock("cpu", "one thread of the measuring process computes")


def benchmark(case: str, model: str = "/m") -> Benchmark:
    return Benchmark(case, Deployment(model), "decode", ((1, 2, 3),), 4)


def seen(*ratios: float, profiles: Sequence[Profile] = (), tokens: str = "same", problem: Any = None) -> Seen:
    logs = [math.log(ratio) for ratio in ratios]
    return Seen(
        ratios={"cpu": list(logs), "wall": list(logs)},
        clocks=[CPU] * len(ratios),
        profiles=list(profiles),
        seconds={"A": [0.01], "B": [0.01 * (ratios or (1.0,))[0]]},
        tokens={"A": "same", "B": tokens},
        problem=problem,
    )


class Scripted(Gate):
    """A gate whose rounds are written down."""

    def __init__(self, first: dict[str, Seen], confirming: dict[str, Seen] | None = None, control: Any = None) -> None:
        benchmarks = [benchmark(case, f"/{index % 2}") for index, case in enumerate(first)]
        spec = resolve("openai:http://127.0.0.1:1/v1")
        super().__init__(Side("old", spec, ()), Side("new", spec, ()), Path("logs"), lambda: benchmarks, seed=7)
        self.script = [(first, control or seen(1.0, 1.001, 0.999, 1.0, 1.0)), (confirming or {}, Seen())]
        self.rounds: list[tuple[list[str], int, bool, bool]] = []

    def _round(
        self, benchmarks: Sequence[Benchmark], pairs: int, *, control: bool = False, profile: bool = False
    ) -> Round:
        self.rounds.append(([one.case for one in benchmarks], pairs, control, profile))
        found, kept = self.script[len(self.rounds) - 1]
        cases = {one.case: found[one.case] for one in benchmarks}
        ran = [case for case, one in cases.items() if one.problem is None]
        return Round(cases, kept, ran[0] if ran and control else "")


FLAT, SLOW, FAST = (1.0, 1.002, 0.998, 1.0, 1.001), (1.1,) * 5, (0.9,) * 5


@pytest.mark.requirement(105)
def test_all_benchmarks_are_measured_once_and_only_suspects_again() -> None:
    gate = Scripted(
        {"a": seen(*FLAT), "b": seen(*SLOW), "c": seen(*FAST), "d": seen(*SLOW)},
        {"b": seen(*(1.1,) * 7), "c": seen(*(0.9,) * 7), "d": seen(*(1.001,) * 7)},
    )
    found = {case: gate.times(benchmark(case, f"/{index % 2}")) for index, case in enumerate("abcd")}
    assert {case: one.status for case, one in found.items()} == {
        "a": "same",
        "b": "regression",
        "c": "improvement",
        "d": "same",
    }
    # Grouped by deployment, a control in the first round, profiles in the second.
    assert gate.rounds == [(["a", "c", "b", "d"], 5, True, False), (["c", "b", "d"], 7, False, True)]
    assert "a false alarm" in found["d"].why and found["b"].estimate is found["b"].confirming
    assert "x1.100" in found["b"].why and "7 pairs, cpu" in found["b"].why
    lines = "\n".join(gate.summary())
    assert "gate: new against old: 2 same, 1 improvement, 1 regression" in lines
    assert "3 suspected by the first round, of these 1 false alarms" in lines
    assert "a slowdown of 5% would have been suspected in 19 of 20 runs" in lines
    assert all(one.status in set(Status) for one in found.values())


@pytest.mark.requirement(105)
def test_where_the_baseline_differs_from_itself_nothing_counts() -> None:
    gate = Scripted({"a": seen(*FLAT), "b": seen(*SLOW)}, {"b": seen(*(1.1,) * 7)}, control=seen(*(1.08,) * 5))
    for case in "ab":
        one = gate.times(gate.planned()["ab".index(case)])
        assert one.status == "invalid machine"
        assert "the baseline against itself came to x1.080" in one.why
    assert "load average" in gate.times(gate.planned()[0]).why


@pytest.mark.parametrize("problem", [("fail", "the baseline died"), None])
def test_without_a_control_nothing_is_green(problem: Any) -> None:
    gate = Scripted({"a": seen(*FLAT)}, control=Seen(problem=problem))
    found = gate.times(gate.planned()[0])
    assert found.status == "inconclusive" and "control of this run could not be measured" in found.why


@pytest.mark.parametrize("kind", ["new", "gone", "unsupported", "fail"])
def test_a_benchmark_of_one_side_alone_is_named(kind: str) -> None:
    gate = Scripted({"a": seen(problem=(kind, "because")), "b": seen(*FLAT)})
    assert (gate.times(gate.planned()[0]).status, gate.times(gate.planned()[0]).why) == (kind, "because")
    assert gate.times(gate.planned()[1]).status == "same"


def test_a_side_that_breaks_while_it_confirms_is_no_false_alarm() -> None:
    gate = Scripted({"a": seen(*SLOW)}, {"a": seen(problem=("gone", "it died"))})
    assert gate.times(gate.planned()[0]).status == "gone"


def test_noise_that_hides_a_change_is_said() -> None:
    gate = Scripted({"a": seen(1.0, 1.12, 0.89, 1.1, 0.9)})
    found = gate.times(gate.planned()[0])
    assert found.status == "inconclusive" and "scatters by" in found.why
    assert any("the machine" in line for line in found.lines())


@pytest.mark.requirement(110)
def test_a_change_is_put_down_to_the_operation_that_changed() -> None:
    def profile(extra: float, host: float = 0.002) -> Profile:
        ops = {"linear": (48.0, 0.003), "attention": (6.0, 0.001)}
        after = {**ops, "linear": (60.0, 0.003 + extra), "norm": (2.0, 0.0001)}
        return Profile({"A": ops, "B": after}, {"A": 0.006, "B": 0.0041 + extra + host})

    shares = attribute([profile(0.0006), profile(0.0005), profile(0.0009)])
    assert [one.op for one in shares[:2]] == ["linear", "norm"]
    assert str(shares[0]) == "linear 3 -> 3.6 ms (+0.6 ms, 48 -> 60 calls)"
    assert attribute([profile(0.0, host=0.004)] * 3)[0].op == HOST
    assert attribute([]) == []
    quicker = Profile(
        {"A": {"a": (1.0, 0.5), "b": (1.0, 0.2)}, "B": {"a": (1.0, 0.1), "b": (1.0, 0.3)}}, {"A": 1.0, "B": 0.7}
    )
    assert [attribute([quicker], sign)[0].op for sign in (1, -1)] == ["b", "a"]
    gate = Scripted({"a": seen(*SLOW)}, {"a": seen(*(1.1,) * 7, profiles=[profile(0.0006)] * 7)})
    found = gate.times(gate.planned()[0])
    assert found.op == "linear" and any(line.startswith("where: linear 3 -> 3.6 ms") for line in found.lines())
    assert not any("the profiles" in line for line in found.lines())
    # What is computed in one call is taken apart under a profile, and may be as fast as ever there.
    for extra, told in (
        (0.0006, "of the +2.5 ms a run the profiles show 28%"),
        (-0.002, "the profiles do not show it"),
    ):
        slower = seen(*(1.1,) * 7, profiles=[profile(extra)] * 7)
        slower.seconds = {"A": [0.01], "B": [0.0125]}
        fused = Scripted({"a": seen(*SLOW)}, {"a": slower}).times(benchmark("a"))
        assert fused.status == "regression" and fused.op == ("linear" if extra > 0 else "")
        assert any(told in line for line in fused.lines())
    bare = Scripted({"a": seen(*SLOW)}, {"a": seen(*(1.1,) * 7)})
    assert any("where the time went is not told" in line for line in bare.times(bare.planned()[0]).lines())


def test_sides_that_write_different_text_are_told_apart() -> None:
    gate = Scripted({"a": seen(*FLAT, tokens="other")})
    assert any("do not write the same tokens" in line for line in gate.times(gate.planned()[0]).lines())


ENGINE = Facts("engine", "cpu", children=0, cpu=1000, thread=1000, waits=2, runs=3)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (Facts("endpoint", "cpu", 0, 1000, 1000, 0, 3), "it is a server"),
        (Facts("engine", "cuda:0", 0, 1000, 1000, 0, 3), "it computes on cuda:0"),
        (Facts("engine", "cpu", 2, 1000, 1000, 0, 3), "it has 2 processes of its own"),
        (Facts("engine", "cpu", 0, 2000, 1000, 0, 3), "several threads compute"),
        (Facts("engine", "cpu", 0, 1000, 1000, 3, 3), "it waits for others (3 times in 3 runs)"),
    ],
)
def test_cpu_time_counts_only_where_it_tells_the_cost(facts: Facts, why: str) -> None:
    assert choose_clock(ENGINE, ENGINE).name == "cpu"
    assert (choose_clock(ENGINE, facts).name, choose_clock(ENGINE, facts).why) == ("wall", f"the target: {why}")
    assert choose_clock(facts, ENGINE).why == f"the baseline: {why}"


def test_one_pair_that_waited_does_not_make_a_server() -> None:
    wall = Clock("wall", "the target: it waits for others (3 times in 3 runs)")
    assert Seen().clock is None
    assert [Seen(clocks=one).clock for one in ([CPU], [wall], [CPU, wall], [CPU, wall, CPU])] == [CPU, wall, wall, CPU]


def test_the_machine_is_told(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 700 0 0 0 100 0 0\ncpu0 1\n")
    before = machine(stat)
    stat.write_text("cpu  150 0 150 700 0 0 0 200 0 0\ncpu0 1\n")
    assert steal_since(before, machine(stat)) == pytest.approx(0.5)
    assert idle_ticks(tmp_path / "absent") == {}
    stat.write_text("cpu 1 1 1 9\ncpu0 5 0 5 100 0\ncpu1 5 0 5 300 0\nintr 1\n")
    assert idle_ticks(stat) == {0: 100, 1: 300}
    assert quietest_core([0, 1], {0: 100, 1: 300}, {0: 110, 1: 305}, 1) == 0
    assert [quietest_core([0, 1], {}, {}, turn) for turn in (0, 1, 2)] == [0, 1, 0]
    assert quietest_core([], {}, {}, 0) is None
    assert machine(tmp_path / "absent").total == 0 and steal_since(before, before) == 0.0
    assert "load average 1.5 on 2 cores" in str(Machine(1.5, 2, 0, 0))
