"""Another plugin runs an item again: its first verdict stands, and what it samples adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

Write = Callable[..., object]
FP32 = "--adapt-precisions=fp32"

# What pytest-rerunfailures does: run the protocol again while a phase fails, and log only the last outcome as it is.
RERUNS = """
    import pytest
    from _pytest.runner import runtestprotocol

    class Again:
        def pytest_runtest_protocol(self, item, nextitem):
            for attempt in range(3):
                item._initrequest()
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
                failed = any(report.failed for report in reports)
                for report in reports:
                    if report.failed and attempt < 2:
                        report.outcome = "rerun"
                        item.ihook.pytest_runtest_logreport(report=report)
                        break
                    item.ihook.pytest_runtest_logreport(report=report)
                if not failed:
                    break
            return True

        def pytest_report_teststatus(self, report):
            return ("rerun", "R", "RERUN") if report.outcome == "rerun" else None

    def pytest_configure(config):
        config.pluginmanager.register(Again())
"""

FLAKY = """
    import pytest
    seen = []

    def test_assertion(target):
        seen.append("assertion")
        assert seen.count("assertion") > 1, "wrong at first"

    def test_judged(target, model, precision, judge):
        seen.append("judged")
        judge.promise("kept", seen.count("judged") > 1, "broken at first")

    def test_skipped_then(target):
        seen.append("skipped")
        assert seen.count("skipped") > 1, "wrong at first"
        pytest.skip("no longer")

    @pytest.fixture
    def shaky():
        seen.append("shaky")
        assert seen.count("shaky") > 1, "no fixture at first"

    def test_fixture(target, shaky): pass

    def test_good(target): pass
"""


@pytest.mark.requirement(98)
def test_a_rerun_forgives_nothing(folder: Folder, write: Write) -> None:
    folder.pytester.makeconftest(RERUNS)
    write(test_mine=FLAKY)
    result = folder.run("Echo", FP32, "test_mine.py")
    text = result.stdout.str()
    assert result.ret == 1
    cases = {case["case"].partition("::")[2].partition("[")[0]: case for case in folder.report()["cases"]}
    assert len(folder.report()["cases"]) == 5
    assert {name: case["status"] for name, case in cases.items()} == {
        "test_assertion": "fail",
        "test_judged": "fail",
        "test_skipped_then": "fail",
        "test_fixture": "error",
        "test_good": "pass",
    }
    assert {name: case["attempts"] for name, case in cases.items()} == {
        name: 1 if name == "test_good" else 3 for name in cases
    }
    assert "wrong at first" in cases["test_assertion"]["reason"]
    assert "run 3 times by another plugin: a rerun adds evidence, it forgives nothing" in cases["test_judged"]["reason"]
    (broken,) = cases["test_judged"]["measurements"]
    assert (broken["metric"], broken["ok"]) == ("kept", False)
    assert "run again by another plugin: 4; reruns add evidence, an earlier verdict stands" in text
    assert result.parseoutcomes() == {"failed": 4, "passed": 1, "rerun": 8}


SAMPLES = """
    from pytest_adapt.verdict.statistics import ALPHA

    def test_tasks(target, model, precision, judge):
        # Twelve questions right in every attempt: too few to show that one in 25 is not wrong.
        for number in range({prompts}):
            judge.answered(f"task-{{judge.attempt}}-{{number}}", [False] * 2 + [{wrong}] * 2)
        judge.promise("attempt", True, str(judge.attempt))
"""


@pytest.mark.requirement(98, 113)
def test_samples_of_reruns_add_up(folder: Folder, write: Write) -> None:
    """Each attempt alone is undecided: half of the answers are wrong, of two prompts."""
    folder.pytester.makeconftest(RERUNS)
    write(test_mine=SAMPLES.format(prompts=6, wrong="True"))
    result = folder.run("Echo", FP32, "test_mine.py")
    (case,) = folder.report()["cases"]
    assert result.ret == 1
    gate = next(one for one in case["measurements"] if one["metric"] == "sample.task")
    assert (case["status"], case["attempts"], gate["compared"]) == (
        "fail",
        3,
        2 * 6 * 4,
    )  # decided at the second attempt
    assert "24 of 48 answers are wrong" in gate["detail"]


@pytest.mark.requirement(98, 113)
def test_an_undecided_item_is_inconclusive_and_says_what_would_settle_it(folder: Folder, write: Write) -> None:
    write(test_mine=SAMPLES.format(prompts=2, wrong="number == 1"))
    result = folder.run("Echo", FP32, "test_mine.py")
    (case,) = folder.report()["cases"]
    assert result.ret == 1
    assert case["status"] == "inconclusive"
    assert "prompts would settle it" in case["reason"]
    assert "inconclusive: test_mine.py::test_tasks" in result.stdout.str()
