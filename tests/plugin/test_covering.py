"""Covering arrays as pure functions, and time boxes in runs."""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_adapt.covering import Candidate, interactions, read_duration, select, shown_duration

if TYPE_CHECKING:
    from conftest import Folder


def product(levels, seconds=1.0):
    """Every combination of factors with so many levels each."""
    names = [f"f{index}" for index in range(len(levels))]
    return [
        Candidate("-".join(map(str, values)), dict(zip(names, map(str, values), strict=True)), seconds)
        for values in itertools.product(*map(range, levels))
    ]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("levels", [(2, 2, 2, 2), (3, 3, 3), (4, 3, 2, 2), (6, 2, 2, 3)])
def test_every_interaction_is_covered_by_few_cases(levels, strength):
    """Never fewer than the product of the largest levels, never more than the greedy bound over it."""
    candidates = product(levels)
    # A budget at which covering alone fits: the cases after it are the second round's.
    found = select(candidates, 1e9, strength=strength)
    needed, seen = 0, set()
    sets = {one.key: interactions(one, strength) for one in candidates}
    for key in found.chosen:
        if len(seen) == found.interactions:
            break
        assert sets[key] - seen, "a case that adds nothing was taken before all is covered"
        seen |= sets[key]
        needed += 1
    least = math.prod(sorted(levels)[-strength:])
    richest = math.comb(len(levels), strength)
    assert found.untested == () and len(found.chosen) == len(candidates)
    assert least <= needed <= math.ceil(least * (1 + math.log(richest)))


def small():
    factor = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("012"), min_size=1)
    case = st.tuples(factor, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from(["", "x", "y"]))
    return st.lists(case, min_size=1, max_size=9).map(
        lambda found: [Candidate(f"case{i}", *one) for i, one in enumerate(found)]
    )


@settings(max_examples=150, deadline=None, database=None)
@given(small(), st.sampled_from([1.0, 3.0, 9.0, 99.0]), st.sampled_from([1, 2, 3]), st.randoms(use_true_random=False))
def test_a_selection_keeps_its_promises(candidates, budget, strength, random):
    found = select(candidates, budget, strength=strength, opening=2.0)
    costs = {one.key: one.seconds for one in candidates}
    cells = {one.key: one.cell for one in candidates}
    opened = {cells[key] for key in found.chosen} - {""}
    assert found.seconds == pytest.approx(sum(costs[key] for key in found.chosen) + 2.0 * len(opened))
    assert found.chosen and (found.seconds <= budget or len(found.chosen) == 1)
    assert len(set(found.chosen)) == len(found.chosen)
    if budget == 99.0:
        assert set(found.chosen) == set(costs) and not found.untested
    # The order in which cases are collected does not matter.
    shuffled = random.sample(candidates, len(candidates))
    assert select(shuffled, budget, strength=strength, opening=2.0) == found


@settings(max_examples=60, deadline=None, database=None)
@given(small(), st.sampled_from([1, 2]))
def test_the_cover_is_near_the_cheapest_one(candidates, strength):
    """Against all subsets: at most 1 + ln(n) times the least number of cases, all of one cost."""
    equal = [Candidate(one.key, one.factors, 1.0) for one in candidates]
    whole = select(equal, 1e9, strength=strength)
    count = next(n for n in range(1, len(equal) + 1) if not select(equal, float(n), strength=strength).untested)
    levels = {factor: {one.factors.get(factor) for one in equal} - {None} for factor in "abcd"}
    sets = [
        interactions(Candidate("", {k: v for k, v in one.factors.items() if len(levels[k]) > 1}, 1.0), strength)
        for one in equal
    ]
    union = frozenset().union(*sets)
    least = next(
        n
        for n in range(1, len(sets) + 1)
        if any(frozenset().union(*some) == union for some in itertools.combinations(sets, n))
    )
    assert whole.interactions == len(union)
    assert least <= count <= max(1, math.ceil(least * (1 + math.log(max(1, *map(len, sets))))))


def test_a_rare_setting_is_run_before_a_cheap_repeat():
    common = [Candidate(f"a{i}", {"layout": "single", "precision": "fp32"}, 1.0) for i in range(5)]
    rare = Candidate("z", {"layout": "tp2", "precision": "bf16"}, 3.0)
    found = select([*common, rare], 4.5)
    assert set(found.chosen) == {"a0", "z"} and not found.untested


def test_untested_interactions_are_listed():
    cases = product((2, 2))
    found = select(cases, 2.0)
    assert len(found.untested) == 2 and found.covered == 2
    assert all(dict(one).keys() == {"f0", "f1"} for one in found.untested)


def test_opening_a_deployment_is_paid_once():
    cases = [Candidate(f"{cell}{i}", {"cell": cell, "n": str(i)}, 1.0, cell) for cell in "xy" for i in range(3)]
    found = select(cases, 13.0, opening=10.0)
    assert {key[0] for key in found.chosen} == {found.chosen[0][0]} and len(found.chosen) == 3
    assert found.seconds == 13.0


def test_something_is_run_even_when_nothing_fits():
    assert len(select(product((2, 2), seconds=50.0), 1.0).chosen) == 1
    assert select([], 1.0).chosen == ()


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="strength 0"):
        select(product((2,)), 1.0, strength=0)
    with pytest.raises(ValueError, match="share a key"):
        select([Candidate("a", {}, 1.0), Candidate("a", {}, 1.0)], 1.0)


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [("90", 90, "90s"), ("90s", 90, "90s"), ("10m", 600, "10m"), ("1h", 3600, "1h"), ("1h30m", 5400, "1h30m"),
     ("1.5m", 90, "90s"), ("0.25", 0.25, "0.25s"), (" 2M ", 120, "2m"), ("1h1s", 3601, "3601s")],
)  # fmt: skip
def test_durations(text, seconds, shown):
    assert read_duration(text) == seconds
    assert shown_duration(seconds) == shown and read_duration(shown) == seconds


@pytest.mark.parametrize("text", ["", "0", "ten", "m", "5d", "-3", "1m2h"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="write 90s, 10m or 1h"):
        read_duration(text)


SUITE = """
    import pytest
    @pytest.mark.adapt(rung="loads")
    @pytest.mark.parametrize("path", ["a", "b"])
    def test_it(target, model, layout, precision, context_length, path): pass
"""
ARGS = ("--adapt-models=qwen3-moe-odd,llama-odd", "--adapt-precisions=fp32,bf16", "--adapt-contexts=16,64", "-s")


@pytest.mark.requirement(119)
def test_a_time_box_runs_some_cases_and_counts_the_rest(folder: Folder, write) -> None:
    write(SUITE)
    full = folder.run("Echo", *ARGS, "test_a_time_box_runs_some_cases_and_counts_the_rest.py")
    assert full.parseoutcomes()["passed"] == 16
    costs = folder.path / ".adapt" / "costs.json"
    known = json.loads(costs.read_text())
    learned = known["targets"]["py:targets:Echo"]
    assert len(learned["cases"]) == 16 and learned["open_seconds"] > 0
    # Costs that a test can count with.
    learned["open_seconds"], learned["cases"] = 1.0, dict.fromkeys(learned["cases"], 2.0)
    costs.write_text(json.dumps(known))
    boxed = folder.run("Echo", "--adapt-time=14s", *ARGS, "test_a_time_box_runs_some_cases_and_counts_the_rest.py")
    report = folder.report()
    box = report["time_box"]
    assert boxed.parseoutcomes() == {"passed": box["chosen"], "deselected": box["not_run"]}
    assert box["chosen"] + box["not_run"] == 16 and box["estimated_seconds"] <= 14
    assert box["covered"] + len(box["untested"]) == box["interactions"] > 0
    assert all(" x " in one for one in box["untested"])
    boxed.stdout.fnmatch_lines(
        [f"adapt: time box 14s: {box['chosen']} of 16 cases, {box['not_run']} not run for time; *"]
    )
    boxed.stdout.fnmatch_lines([f"time box 14s: *{len(box['untested'])} untested (time_box in the report)*measured*"])
    # Green, and yet no word of trust: cases are missing.
    assert boxed.ret == 0 and report["ladder"]["trusted"] == 0
    assert report["ladder"]["text"].startswith("narrowed run: rung 1 (loads) green")
    assert report["ladder"]["text"].endswith("says nothing about trust")
    assert len(json.loads(costs.read_text())["targets"]["py:targets:Echo"]["cases"]) == 16, "what did not run is kept"


@pytest.mark.requirement(119)
def test_workers_and_plan_choose_alike(folder: Folder, write) -> None:
    pytest.importorskip("xdist")
    write(SUITE)
    (folder.path / ".adapt" / "costs.json").write_text(
        json.dumps({"schema": 1, "targets": {"py:targets:Echo": {"open_seconds": 1.0, "cases": {
            "test_workers_and_plan_choose_alike.py::test_it[other]": 2.0}}}})
    )  # fmt: skip
    args = ("--adapt-target=py:targets:Echo", *ARGS, ".")
    plan = folder.run_bare("--adapt-plan", "--adapt-time=20s", *args)
    chosen = plan.parseoutcomes()
    minutes = next(re.search(r"([\d.]+) minutes", line) for line in plan.outlines if line.startswith("total: "))
    seconds = next(re.search(r"estimated (\d+) s", line) for line in plan.outlines if line.startswith("time box"))
    assert minutes and seconds and abs(60 * float(minutes[1]) - float(seconds[1])) <= 3.5, "one estimate, said twice"
    result = folder.run_subprocess("-p", "xdist.plugin", "-n", "2", "--adapt-time=10s", *args)
    box = folder.report()["time_box"]
    assert result.ret == 0 and box["workers"] == 2
    assert len(folder.report()["cases"]) == box["chosen"]
    plan.stdout.fnmatch_lines([f"time box 20s: {box['chosen']} of 16 cases, {box['not_run']} not run for time; *"])
    assert chosen["deselected"] == box["not_run"]


def test_layouts_that_a_model_cannot_take_are_no_interactions(folder: Folder, write) -> None:
    write(SUITE)
    folder.run("Echo", "--adapt-time=1h", "--adapt-layouts=single,tp5", *ARGS, ".")
    box = folder.report()["time_box"]
    assert {case["status"] for case in folder.report()["cases"] if case["layout"] == "tp5"} == {"unsupported"}
    assert box["chosen"] == 16 and box["not_run"] == 0 and not box["untested"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--adapt-time=soon", "--adapt-time: 'soon' is no time; write 90s, 10m or 1h"),
        ("--adapt-strength=5", "allowed: 2, 3"),
    ],
)
def test_wrong_values_are_wrong_usage(folder: Folder, write, option: str, said: str) -> None:
    write(SUITE)
    result = folder.run("Echo", option, ".")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*{said}*"])


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 200_000,
        '{"schema": 1, "targets": {"py:targets:Echo": {"open_seconds": 1' + "0" * 400 + ', "cases": {}}}}',
    ],
    ids=["torn", "brackets", "400 digits"],
)
def test_a_damaged_file_of_costs_is_no_obstacle(folder: Folder, write, content: str) -> None:
    write(SUITE)
    (folder.path / ".adapt" / "costs.json").write_text(content)
    result = folder.run("Echo", "--adapt-time=1h", "--adapt-strength=3", *ARGS, ".")
    assert result.parseoutcomes() == {"passed": 16}
    assert folder.report()["time_box"]["strength"] == 3
