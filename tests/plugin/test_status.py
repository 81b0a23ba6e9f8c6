"""The table of statuses, the requirements of each kind, and the ladder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pytest_adapt.shipped import suites_dir
from pytest_adapt.strategies import planned
from pytest_adapt.verdict.ladder import SMALLEST_PROFILES, SUITE_RUNGS, climb, clusters, is_red, rung_of
from pytest_adapt.verdict.result import RUNGS, CaseResult, Divergence, Measurement, Status
from pytest_adapt.verdict.status import (
    GREEN,
    OUTCOMES,
    REQUIREMENTS,
    Verdict,
    need_not_show,
    outcome,
    required,
    verdict_of,
)

# The table of the design: status, outcome when required, outcome when not.
TABLE = """
pass          passed   passed
fail          failed   failed
error         failed   failed
xfail         xfailed  xfailed
waived        xfailed  xfailed
unsupported   skipped  skipped
unknown       failed   skipped
unchecked     failed   skipped
inconclusive  failed   skipped
deferred      failed   skipped
blocked       failed   skipped
stale         failed   failed
mismatch      failed   failed
new           failed   failed
gone          failed   failed
regression    failed   failed
improvement   passed   passed
same          passed   passed
invalid_machine failed failed
"""


def test_every_status_has_its_outcome() -> None:
    expected = {line.split()[0].replace("_", " "): tuple(line.split()[1:]) for line in TABLE.split("\n") if line}
    assert {status.value for status in Status} == set(expected)
    for status in Status:
        assert (outcome(status, True), outcome(status, False)) == expected[status]
    assert set(OUTCOMES) == set(Status)
    assert {status for status in Status if outcome(status, True) != "failed"} == GREEN


def test_the_page_has_every_status() -> None:
    """With the outcomes of the table above; several in one row share them, or have one each."""
    page = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    rows = page.partition("\n## Statuses\n")[2].partition("\n\nWhat is required")[0].strip().splitlines()[2:]
    told: dict[str, tuple[str, str]] = {}
    for row in rows:
        names, _, *outcomes = (cell.strip() for cell in row.strip("|").split("|"))
        groups = [re.findall("`([^`]+)`", group) for group in names.split(";")]
        said = [cell.split("; ") for cell in outcomes]
        for number, group in enumerate(groups):
            told |= dict.fromkeys(group, (said[0][number], said[1][number]))
    assert told == {status.value: (outcome(status, True), outcome(status, False)) for status in Status}


@pytest.mark.parametrize("kind", sorted(REQUIREMENTS))
def test_what_a_kind_must_show(kind: str) -> None:
    def needs(*names: str, **more: object) -> bool:
        return required(kind, rung="correct", needs=names, **more)  # type: ignore[arg-type]

    assert needs("text")
    assert needs("logits", "text")
    assert needs()
    assert needs("taps") == (kind != "endpoint")
    assert needs("logits") == (kind != "endpoint")
    assert needs("text", suite="serving", must_pass=("loading",)) == (kind == "release")
    assert needs("text", suite="loading", must_pass=("loading",))
    assert needs("text", suite="", must_pass=("loading",))  # a user's own test
    assert needs("text", serial=True) == (kind == "release")
    assert needs("text", serial=True, profile="full")


def test_any_exception_can_carry_a_status() -> None:
    assert verdict_of(Verdict(Status.UNKNOWN, "why")) == (Status.UNKNOWN, "why")
    assert verdict_of(ValueError("no")) is None
    error = RuntimeError("old")
    error.adapt_status = "stale"  # type: ignore[attr-defined]
    assert verdict_of(error) == (Status.STALE, "old")


def case(rung: str, status: str, name: str = "a", **more: object) -> CaseResult:
    return CaseResult(f"{rung}/{name}", Status(status), suite=rung, rung=rung, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cases", "trusted", "state"),
    [
        ([], 0, "empty"),
        ([case("loads", "pass")], 1, "empty"),
        ([case("loads", "pass"), case("correct", "fail")], 1, "red"),
        ([case("loads", "fail"), case("correct", "pass")], 0, "red"),
        ([case("loads", "pass"), case("correct", "unsupported")], 1, "empty"),
        ([case("loads", "pass"), case("correct", "unknown", required=False), case("correct", "pass", "b")], 2, "empty"),
        ([case("loads", "pass"), case("correct", "unknown"), case("correct", "pass", "b")], 1, "red"),
        ([case("correct", "pass")], 0, "empty"),  # nothing is trusted above a rung that was not judged
        ([case(rung, "pass") for rung in RUNGS], 8, None),
        ([case("loads", "waived")], 0, "empty"),
    ],
)
def test_ladder(cases: list[CaseResult], trusted: int, state: str | None) -> None:
    ladder = climb(cases)
    assert ladder.trusted == trusted
    assert (ladder.next.state if ladder.next else None) == state
    assert (f"rung {trusted} of 8" in str(ladder)) == bool(trusted)


@pytest.mark.parametrize(
    ("rungs", "profile", "absent", "said"),
    [
        (
            ["loads", "correct", "consistent"],
            "smoke",
            (),
            "trusted up to rung 3 of 8: consistent; this profile asks no more",
        ),
        (RUNGS[:4], "day0", (), "trusted up to rung 4 of 8: layouts; rung 6 (long_context) was not judged"),
        (
            [name for name in RUNGS if name not in ("precision", "layouts")],
            "day0",
            ("layouts",),
            "trusted up to rung 8 of 8: performance (no test: layouts, precision)",
        ),
        (
            [name for name in RUNGS if name not in ("precision", "layouts")],
            "day0",
            (),
            "trusted up to rung 3 of 8: consistent; rung 4 (layouts) was not judged",
        ),
        (RUNGS, "day0", (), "trusted up to rung 8 of 8: performance"),
    ],
)
def test_a_rung_without_a_test_in_the_profile_is_passed_over(
    rungs: list[str], profile: str, absent: tuple[str, ...], said: str
) -> None:
    assert str(climb([case(name, "pass") for name in rungs], profile, absent)) == said


def test_a_deferred_rung_is_said_to_be() -> None:
    green = [case(name, "pass") for name in RUNGS if name not in ("precision", "performance")]
    ladder = climb([*green, case("performance", "deferred", required=False)], "day0")
    assert str(ladder) == "trusted up to rung 7 of 8: stress (no test: precision); rung 8 (performance) is deferred"


def test_every_rung_of_the_shipped_suites_has_its_smallest_profile() -> None:
    """What the table says is what the marks of the suites say (layouts: and what the profiles plan)."""
    sizes = ("smoke", "day0", "full")
    found: dict[str, int] = {}
    for file in sorted(suites_dir().rglob("test_*.py")):
        marks = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        for mark in marks:
            if ast.unparse(mark.func) != "pytest.mark.adapt":
                continue
            given = {
                word.arg: ast.literal_eval(word.value) for word in mark.keywords if word.arg in ("rung", "profile")
            }
            if not given["rung"]:  # beside the ladder
                continue
            size = sizes.index(given.get("profile", "smoke"))
            if given["rung"] == "layouts":
                size = max(size, min(number for number, name in enumerate(sizes) if planned(name)))
            found[given["rung"]] = min(size, found.get(given["rung"], size))
    assert {rung: sizes[size] for rung, size in found.items()} == SMALLEST_PROFILES


@pytest.mark.parametrize(
    ("kind", "needs", "declared", "shown", "free"),
    [
        ("endpoint", ("score",), (), ("text",), True),
        ("endpoint", ("score",), (), ("taps",), False),  # nothing that an endpoint is asked for
        ("endpoint", ("score",), ("score",), ("text",), False),  # declared, so owed
        ("endpoint", ("logits", "score"), ("score",), ("text",), False),
        ("endpoint", ("score",), ("topk",), ("text",), True),
        ("engine", ("score",), (), ("text",), False),
    ],
)
def test_who_owes_an_observable(
    kind: str, needs: tuple[str, ...], declared: tuple[str, ...], shown: tuple[str, ...], free: bool
) -> None:
    assert need_not_show(kind, needs, declared, shown) is free


def test_the_case_to_look_at_is_the_one_that_shows_sites() -> None:
    where = Divergence("layer.0.attn.k", 1, "1", "2", 1.0, 0.1, layer=0)
    one = case("correct", "fail", "predictions", observable="logits", divergence=where)
    two = case("correct", "fail", "sites", observable="taps+logits", divergence=where)
    (cluster,) = clusters([one, two])
    assert cluster.first is two
    (cluster,) = clusters([case("layouts", "fail", "a", observable="taps", divergence=where), one])
    assert cluster.first is one


def test_a_run_that_left_the_lowest_rung_out_says_nothing_about_trust() -> None:
    said = "narrowed run: rung 2 (correct) green; says nothing about trust"
    assert str(climb([case("correct", "pass")])) == said
    assert str(climb([case("correct", "fail"), case("layouts", "pass")])) == (
        "narrowed run: rung 2 (correct) is red, rung 4 (layouts) green; says nothing about trust"
    )
    assert str(climb([case("correct", "unknown", required=False)])) == (
        "narrowed run: no rung was judged; says nothing about trust"
    )
    everything = [case(name, "pass") for name in RUNGS]
    counted = climb([*everything, everything[0], case(RUNGS[0], "unknown", required=False)]).rungs
    assert [dict(rung.counts) for rung in counted[:2]] == [{"pass": 2, "unknown": 1}, {"pass": 1}]
    assert climb(everything).trusted == 8 and climb(everything, narrowed=True).trusted == 0
    assert str(climb(everything[:2], narrowed=True)) == (
        "narrowed run: rung 1 (loads) green, rung 2 (correct) green; says nothing about trust"
    )
    assert str(climb([case("loads", "waived")])) == "trust begins with rung 1 (loads), where nothing passed"
    assert str(climb([case("loads", "fail")])) == "not trusted on any rung; rung 1 (loads) is red"


def test_rungs_of_suites() -> None:
    assert set(SUITE_RUNGS.values()) <= {*RUNGS, ""}
    assert rung_of("determinism", None) == "consistent"
    assert rung_of("determinism", "loads") == "loads"
    assert rung_of("", None) == ""


def test_cases_with_one_cause_make_one_cluster() -> None:
    def diverged(layer: int, position: int) -> Divergence:
        return Divergence(f"layer.{layer}.attn.k_rope", position, "1", "2", 1.0, 0.1, layer=layer)

    over = [Measurement("kl", 2.0, 1.0, False, compared=3)]
    found = clusters(
        [
            case("consistent", "fail", "z", divergence=diverged(0, 1)),
            case("correct", "fail", "a", divergence=diverged(2, 9)),
            case("correct", "fail", "b", measurements=over, model="m1"),
            case("correct", "fail", "c", measurements=over, model="m2"),
            case("correct", "unknown", "d", reason="needs taps"),
            case("correct", "unknown", "e", reason="needs taps", required=False),
            case("loads", "pass"),
        ]
    )
    assert [(cluster.cause, len(cluster.cases)) for cluster in found] == [
        ("kl beyond its budget (correct)", 2),
        ("first divergence in attn.k_rope", 2),
        ("needs taps", 1),
    ]
    assert found[1].first.case == "correct/a"
    assert found[0].values("model") == ["m1", "m2"]
    assert not is_red(case("correct", "unknown", required=False))


def test_what_is_undecided_is_no_cause_beside_what_failed() -> None:
    undecided = Measurement("sample.kl", 5.0, 1.0, False, compared=3, settled=False)
    failed = Measurement("sample.nll", 2.0, 1.0, False, compared=3)
    (both,) = clusters([case("correct", "fail", measurements=[undecided, failed])])
    (alone,) = clusters([case("correct", "inconclusive", measurements=[undecided])])
    assert both.cause == "sample.nll beyond its budget (correct)"
    assert alone.cause == "sample.kl undecided: too few samples (correct)"
