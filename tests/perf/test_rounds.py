"""A round: fresh processes a pair, slices in turns, a control; a side that breaks ends one benchmark."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.perf.paired import BLOCKS
from pytest_adapt.perf.rounds import Benchmark, Round, measure_round
from pytest_adapt.perf.sides import Declined, Measuring, Side, search_path
from pytest_adapt.target.protocol import Deployment, TargetError
from pytest_adapt.target.registry import resolve

SPEC = resolve("openai:http://127.0.0.1:1/v1")
OLD, NEW = Side("old", SPEC, ()), Side("new", SPEC, ())


class Fake:
    """A process of a side that tells what it was asked, and whose slices last as long as they are told to."""

    log: list[tuple[str, int, str, Any]]

    def __init__(
        self, script: Mapping[str, Any], log: list[Any], number: int, side: Side, seed: int, name: str
    ) -> None:
        self.script, self.log, self.number, self.side, self.seed, self.name = script, log, number, side, seed, name
        self.ended = False
        self._asked: list[Deployment] = []

    def create(self) -> None:
        self.log.append((self.name, self.number, "create", self.seed))

    def open(self, deployment: Deployment) -> None:
        self._asked.append(deployment)

    def opened(self) -> Mapping[str, Any]:
        deployment = self._asked.pop()
        self.log.append((self.name, self.number, "open", deployment.model))
        if deployment.model in self.script.get(f"declines {self.side.label}", ()):
            raise Declined("no such kernel")
        return {}

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        self.log.append((self.name, self.number, do, given))
        if do == "slice" and given["load"] in self.script.get(f"dies {self.side.label}", ()):
            self.ended = True
            raise TargetError("it died")
        if do == "warm":
            taken = int(self.script.get("once", 0.005) * 1e9)
            facts = {
                "cpu": taken,
                "thread": taken,
                "once": taken,
                "waits": 0,
                "runs": 3,
                "children": 0,
                "device": "cpu",
            }
            return {**facts, "kind": self.script.get("kind", "engine"), "tokens": "t"}
        if do == "slice":
            factor = self.script.get("factor", {}).get(self.side.label, 1.0)
            taken = int(given["repeats"] * self.script.get("once", 0.005) * factor * 1e9)
            return {"cpu": 0 if self.script.get("kind") == "endpoint" else taken, "wall": taken}
        if do == "profile":
            if self.script.get("bare"):
                raise Declined("it has no profile")
            return {"ops": {"linear": [3.0, 0.002]}, "seconds": 0.004}
        return {}

    def stop(self) -> None:
        self.ended = True
        self.log.append((self.name, self.number, "stop", None))


def run(
    script: Mapping[str, Any], benchmarks: list[Benchmark], pairs: int = 2, **more: Any
) -> tuple[Round, list[tuple[str, int, str, Any]]]:
    log: list[tuple[str, int, str, Any]] = []
    numbers = iter(range(1000))

    def start(side: Side, seed: int, logs: Path, timeout: float, *, name: str) -> Any:
        return Fake(script, log, next(numbers), side, seed, name.removeprefix("gate-"))

    found = measure_round(OLD, NEW, benchmarks, pairs, dice=random.Random(4), logs=Path("logs"), start=start, **more)
    return found, log


def benchmark(load: str, model: str = "/m") -> Benchmark:
    return Benchmark(f"{model}:{load}", Deployment(model), load, ((1, 2, 3),), 4)


@pytest.mark.requirement(105)
def test_each_pair_is_two_fresh_processes_of_one_hash_seed() -> None:
    found, log = run({"factor": {"new": 1.1}}, [benchmark("a"), benchmark("b"), benchmark("a", "/n")], pairs=3)
    made = [(name, number, given) for name, number, what, given in log if what == "create"]
    assert len(made) == 6 and len({number for _, number, _ in made}) == 6
    seeds = [{given for _, _, given in made[place : place + 2]} for place in (0, 2, 4)]
    assert [len(one) for one in seeds] == [1, 1, 1] and len(set.union(*seeds)) == 3
    assert sum(what == "stop" for _, _, what, _ in log) == 6
    for one in found.seen.values():
        assert one.problem is None and one.clock is not None and one.clock.name == "cpu"
        assert one.ratios["cpu"] == pytest.approx([math.log(1.1)] * 3)
        assert one.seconds["B"][0] / one.seconds["A"][0] == pytest.approx(1.1)
    assert found.control_case == "" and found.control.clock is None


@pytest.mark.requirement(105)
def test_slices_take_turns_and_every_side_is_warm() -> None:
    _, log = run({}, [benchmark("a")], pairs=1)
    slices = "".join(name for name, _, what, _ in log if what == "slice")
    blocks = [slices[place : place + 4] for place in range(0, len(slices), 4)]
    assert len(blocks) == BLOCKS and set(blocks) == {"ABBA", "BAAB"}
    assert {given["repeats"] for _, _, what, given in log if what == "slice"} == {4}  # 20 ms of 5 ms
    for side in "AB":
        mine = [what for name, _, what, _ in log if name == side]
        assert mine[: mine.index("slice")] == ["create", "open", "load", "warm", "pin"]


def test_a_run_that_is_longer_than_a_slice_has_fewer_blocks() -> None:
    for once, blocks in ((0.08, 8), (0.2, 3), (5.0, 2)):
        _, log = run({"once": once}, [benchmark("a")], pairs=1)
        assert sum(what == "slice" for _, _, what, _ in log) == 4 * blocks, once


@pytest.mark.requirement(105)
def test_the_baseline_stands_against_itself_in_the_first_case_that_runs() -> None:
    script = {"declines old": ("/m",), "factor": {"new": 1.2}}
    found, log = run(script, [benchmark("a"), benchmark("a", "/n"), benchmark("b", "/n")], control=True)
    assert found.control_case == "/n:a" and found.control.problem is None
    assert found.control.ratios["cpu"] == pytest.approx([0.0, 0.0])
    assert found.seen["/n:a"].ratios["cpu"] == pytest.approx([math.log(1.2)] * 2)
    assert found.seen["/m:a"].problem == ("new", "the baseline does not run it: no such kernel")
    loads = {given["load"] for name, _, what, given in log if name == "C" and what == "slice"}
    assert loads == {"a"}
    # What cannot be compared is not tried again in the next pair.
    assert sum(what == "open" and given == "/m" for name, _, what, given in log if name == "A") == 1


@pytest.mark.parametrize(("side", "kind"), [("new", "gone"), ("old", "new")])
def test_a_side_that_dies_ends_its_benchmark_alone(side: str, kind: str) -> None:
    found, log = run({f"dies {side}": ("a",)}, [benchmark("a"), benchmark("b")])
    problem = found.seen["/m:a"].problem
    assert problem is not None and problem[0] == kind and "it died" in problem[1]
    assert found.seen["/m:b"].problem is None and len(found.seen["/m:b"].ratios["cpu"]) == 2
    assert sum(what == "create" for _, _, what, _ in log) == 5  # one process had to be started again


def test_a_control_that_breaks_takes_nothing_with_it() -> None:
    script = {"dies old": ("a",), "dies new": ("a",)}
    found, _ = run(script, [benchmark("a"), benchmark("b")], control=True)
    assert (found.seen["/m:a"].problem or ("",))[0] in ("new", "gone", "fail")
    assert found.control_case == "/m:b" and found.control.problem is None
    assert found.seen["/m:b"].problem is None and len(found.seen["/m:b"].ratios["cpu"]) == 2


def test_what_both_decline_and_what_neither_runs() -> None:
    both = {"declines old": ("/m",), "declines new": ("/m",)}
    assert run(both, [benchmark("a")])[0].seen["/m:a"].problem == ("unsupported", "no such kernel")
    mixed = {"declines old": ("/m",), "dies new": ("a",)}
    assert (run(mixed, [benchmark("a")])[0].seen["/m:a"].problem or ("",))[0] == "new"


@pytest.mark.requirement(105)
def test_a_server_is_timed_by_the_wall_on_all_cores() -> None:
    found, log = run({"kind": "endpoint", "factor": {"new": 1.5}}, [benchmark("a")])
    one = found.seen["/m:a"]
    assert one.clock is not None and one.clock.name == "wall" and one.ratios["cpu"] == []
    assert one.ratios["wall"] == pytest.approx([math.log(1.5)] * 2) and set(one.estimates) == {"wall"}
    pinned = [given["cores"] for _, _, what, given in log if what == "pin"]
    engine = [given["cores"] for _, _, what, given in run({}, [benchmark("a")])[1] if what == "pin"]
    assert all(len(cores) == 1 for cores in engine) and all(len(cores) >= len(engine[0]) for cores in pinned)


@pytest.mark.requirement(110)
def test_profiles_are_taken_of_both_sides_in_every_pair() -> None:
    found, log = run({}, [benchmark("a")], pairs=3, profile=True)
    assert "".join(name for name, _, what, _ in log if what == "profile") == "ABBA" * 3
    assert len(found.seen["/m:a"].profiles) == 3
    assert found.seen["/m:a"].profiles[0].ops["B"] == {"linear": (3.0, 0.002)}
    bare, log = run({"bare": True}, [benchmark("a")], pairs=3, profile=True)
    assert bare.seen["/m:a"].no_profile == "old: it has no profile" and bare.seen["/m:a"].profiles == []
    assert sum(what == "profile" for _, _, what, _ in log) == 1


def test_a_real_process_that_cannot_import_its_adapter_says_so(tmp_path: Path) -> None:
    from dataclasses import replace

    side = Side("gone", replace(SPEC, adapter="absent_module:Target"), search_path())
    with Measuring(side, 1, tmp_path, 60.0) as process:
        process.create()
        process.open(Deployment("/m"))
        with pytest.raises(TargetError, match="gone: ModuleNotFoundError: No module named 'absent_module'"):
            process.opened()
    assert process.ended
