"""What a run leaves: summary, report.json, JUnit."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

Write = Callable[..., object]
ROOT = Path(__file__).resolve().parents[2]
MIXED = """
    import pytest
    from pytest_adapt.verdict.result import Status
    from pytest_adapt.verdict.status import Verdict

    @pytest.mark.requirement(11, 90)
    @pytest.mark.adapt(rung="loads")
    def test_loads(target): pass

    @pytest.mark.adapt(rung="correct", needs=("logits", "text"))
    def test_judged(target, precision, judge):
        judge.promise("shape", True, "as it should be")
        judge.promise("colour", precision == "fp32", "it is the wrong colour")

    @pytest.mark.adapt(rung="consistent", required=False)
    def test_unknown(target): raise Verdict(Status.UNKNOWN, "cannot be seen")
"""


def test_summary_leads_with_rung_cause_and_next_command(folder: Folder, write: Write) -> None:
    write(test_mine=MIXED)
    result = folder.run("Echo", "test_mine.py")
    assert result.ret == 1
    at = next(i for i, line in enumerate(result.outlines) if " adapt =" in line)
    lines = result.outlines[at + 1 :]
    assert lines[0] == "trusted up to rung 1 of 8: loads; rung 2 (correct) is red"
    assert lines[1] == "6 cases: 3 pass, 2 unknown, 1 fail (2 not required)"
    assert lines[2] == "1. colour beyond its budget (own tests): 1 case (qwen3-moe-odd; bf16; single)"
    case = "test_mine.py::test_judged[qwen3-moe-odd-single-bf16]"
    command = f"pytest --adapt-target=py:targets:Echo --adapt-profile=smoke '{case}'"
    assert f"   next command: {command}" in lines
    assert "not judged: 2 x unknown: cannot be seen" in lines
    last = next(line for line in lines if "report" in line and " s, " in line)
    assert "peak memory" in last
    assert ".adapt/report/report.json" in last
    assert at + 25 > result.outlines.index(last)  # one screen
    # and in the failure itself
    text = result.stdout.str()
    assert "it is the wrong colour" in text
    assert f"repeat: {command}" in text


def test_json_has_what_the_schema_page_says(folder: Folder, write: Write) -> None:
    write(test_mine=MIXED)
    folder.run("Echo", "--adapt-report=out", "test_mine.py")
    report = json.loads((folder.path / "out" / "report.json").read_text())
    assert not (folder.path / ".adapt" / "report").exists()
    assert report["schema"] == 1
    assert report["exit"] == 1
    assert report["target"]["name"] == "echo"
    assert report["sources"] == {"target": "command line", "profile": "command line", "report": "command line"}
    assert report["ladder"]["trusted"] == 1
    states = [rung["state"] for rung in report["ladder"]["rungs"]]
    assert states == ["green", "red", "empty"] + ["absent"] * 5  # the profile is smoke
    assert report["usage"]["opens"] == 2
    assert report["seconds"] > 0 and report["peak_bytes"] > 1e6
    case = report["cases"][0]
    assert case["case"] == "test_mine.py::test_judged[qwen3-moe-odd-single-bf16]"
    assert (case["status"], case["rung"], case["model"], case["layout"], case["precision"]) == (
        "fail",
        "correct",
        "qwen3-moe-odd",
        "single",
        "bf16",
    )
    assert [one["metric"] for one in case["measurements"]] == ["shape", "colour"]
    loads = next(case for case in report["cases"] if "test_loads" in case["case"])
    assert loads["requirements"] == [11, 90]
    documented = (ROOT / "docs" / "report-schema.md").read_text()
    for name in [*report, *case, *case["measurements"][0], *report["clusters"][0], *report["ladder"]["rungs"][0]]:
        assert f"`{name}`" in documented, name


@pytest.mark.requirement(111)
def test_times_and_memory_are_marked_as_engineering_references(folder: Folder, write: Write) -> None:
    write(test_mine="def test_it(target): pass")
    result = folder.run("Echo", "test_mine.py")
    report = json.loads((folder.path / ".adapt" / "report" / "report.json").read_text())
    assert "engineering references" in report["performance_note"]
    assert "not marketing metrics" in report["performance_note"]
    last = next(line for line in result.outlines if "report" in line and " s, " in line)
    assert last.startswith("engineering reference: ")


def test_infinite_numbers_stay_readable(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        from pytest_adapt.verdict.result import Measurement
        def test_it(target, precision, judge):
            judge._done.append(Measurement("kl", float("inf"), 0.0, False, compared=1))
        """
    )
    folder.run("Echo", "--adapt-precisions=fp32", "test_mine.py")
    assert folder.report()["cases"][0]["measurements"][0]["value"] == "inf"


def test_a_report_that_cannot_be_written_is_a_warning(folder: Folder, write: Write) -> None:
    write(test_mine="def test_it(target): pass")
    (folder.path / ".adapt").mkdir(exist_ok=True)
    (folder.path / ".adapt" / "report").write_text("a file")
    result = folder.run("Echo", "test_mine.py")
    assert result.ret == 0
    assert "adapt: cannot write" in result.stdout.str()


def test_junit_carries_case_status_and_metrics(folder: Folder, write: Write) -> None:
    write(test_mine=MIXED)
    folder.run("Echo", "--junitxml=junit.xml", "test_mine.py")
    root = ElementTree.parse(folder.path / "junit.xml").getroot()
    cases = {
        properties["adapt_case"]: properties
        for case in root.iter("testcase")
        for properties in [{one.get("name"): one.get("value") for one in case.iter("property")}]
    }
    bad = cases["test_mine.py::test_judged[qwen3-moe-odd-single-bf16]"]
    assert bad["adapt_status"] == "fail"
    assert str(bad["adapt_metric.colour"]).endswith(" of 0")
    assert cases["test_mine.py::test_unknown[qwen3-moe-odd-single-fp32]"]["adapt_reason"] == "cannot be seen"


def test_measured_costs_feed_the_next_plan(folder: Folder, write: Write) -> None:
    write(test_mine="def test_it(target): target.generate((1, 2, 3), 4)")
    assert folder.run("Echo", "test_mine.py").ret == 0
    result = folder.run("Echo", "--adapt-plan", "test_mine.py")
    assert "costs of 2 of 2 cases measured (.adapt/costs.json)" in result.outlines
    # Another model's costs are not this one's, and the line says so.
    other = folder.run("Echo", "--adapt-plan", "--adapt-models=llama-odd", "test_mine.py")
    assert "costs of 0 of 2 cases measured (.adapt/costs.json), the rest estimated" in other.outlines
    unknown = folder.run("Dies", "--adapt-plan", "test_mine.py")
    assert any(line.startswith("costs assumed: 5 s a deployment") for line in unknown.outlines)


def test_hooks_see_each_finished_case(folder: Folder, write: Write) -> None:
    folder.pytester.makeconftest(
        """
        def pytest_adapt_case_finished(case):
            with open("cases.log", "a") as log:
                log.write(f"{case.case} {case.status}\\n")
        """
    )
    write(test_mine="def test_it(target): pass")
    folder.run("Echo", "--adapt-precisions=fp32", "test_mine.py")
    assert (folder.path / "cases.log").read_text() == "test_mine.py::test_it[qwen3-moe-odd-single-fp32] pass\n"


def test_works_with_warnings_as_errors_and_without_a_terminal(folder: Folder, write: Write) -> None:
    write(test_mine=MIXED)
    result = folder.run("Echo", "-W", "error", "-p", "no:terminal", "test_mine.py")
    assert result.ret == 1
    assert len(folder.statuses()) == 6


@pytest.mark.requirement(105)
def test_figures_reach_the_report_with_every_sample(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(precisions="fp32")
        def test_it(target, model, judge, stopwatch):
            rounds = stopwatch.load(target, {"a": (5, 6, 7), "b": (8, 9, 10)}, 4, rounds=2)
            judge.promise("answers", all(len(one.answers) == 2 for one in rounds))
            judge.timed("3 in / 4 out / batch 2", rounds)
        """
    )
    result = folder.run("Echo", "test_mine.py")
    assert result.ret == 0
    report = json.loads((folder.path / ".adapt" / "report" / "report.json").read_text())
    (case,) = report["cases"]
    (figure,) = [one for one in case["figures"] if one["name"] == "throughput"]
    assert (figure["load"], figure["unit"], len(figure["samples"])) == ("3 in / 4 out / batch 2", "tokens/s", 2)
    assert "engineering reference: qwen3-moe-odd single fp32, 3 in / 4 out / batch 2: throughput" in result.stdout.str()
