"""--adapt-inject: a fault that was never put to the test is no proof, and is never green."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pytest_adapt.faults import catalogue
from pytest_adapt.faults.cli import fault_rows, main, markdown
from pytest_adapt.faults.slowness import SLOWDOWNS
from pytest_adapt.options import Settings
from pytest_adapt.report.collector import Collector
from pytest_adapt.verdict.result import CaseResult, Status

if TYPE_CHECKING:
    from conftest import Folder

pytest.importorskip("torch")
pytest.importorskip("adapt_engine")
RUN = ("--adapt-target=builtin", "--adapt-precisions=fp32", "loading", "-k", "loads_and_answers")


@pytest.mark.parametrize("spread", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["alone", "xdist"])
def test_a_fault_without_effect_on_the_models_of_a_run_is_not_green(folder: Folder, spread: tuple[str, ...]) -> None:
    if spread:
        pytest.importorskip("xdist")
    result = folder.run_subprocess("--adapt-inject=RT04", "--adapt-models=qwen3-moe-odd", *RUN, *spread)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["passed"] == 1
    assert "failed" not in result.parseoutcomes()
    line = next(line for line in result.outlines if "RT04 was" in line)
    assert line.startswith(
        "fault RT04 was never exercised: it needs model deepseek-v3-odd-pos (layout single, fp32 and bf16): "
    )
    assert "-m pytest --adapt-target=builtin --adapt-inject=RT04 --adapt-models=deepseek-v3-odd-pos" in line
    assert folder.report()["exit"] == 1


def test_a_fault_that_was_exercised_and_not_seen_is_named(folder: Folder) -> None:
    result = folder.run_subprocess("--adapt-inject=RT04", "--adapt-models=deepseek-v3-odd-pos", *RUN)
    assert result.ret == 0
    assert "fault RT04 was exercised and nothing was red" in result.stdout.str()


def test_nothing_is_proposed_with_a_fault(folder: Folder) -> None:
    wrong = ("--adapt-inject=RP12", "--adapt-models=qwen3-moe-odd", "--adapt-profile=smoke", "--adapt-precisions=fp32")
    test = "correctness/test_predictions.py"
    result = folder.run_subprocess("--adapt-target=builtin", *wrong, test, "-k", "predictions_match")
    assert result.ret == 1 and "fail" in folder.statuses().values()
    assert not list((folder.path / ".adapt").glob("pending/*"))


class Run:
    """What a collector asks of its run."""

    program = ("pytest",)
    config = SimpleNamespace(rootpath=Path("nowhere"))

    def __init__(self, inject: str) -> None:
        self.settings = Settings("builtin", inject=inject)


@pytest.mark.parametrize(
    ("inject", "exercised", "status", "said"),
    [
        ("", set(), "pass", ""),
        ("RT04", set(), "pass", "never exercised"),
        ("RT04", set(), "fail", "never exercised"),  # what is red has another cause
        ("RT04", {("qwen3-moe-odd", "single")}, "pass", "never exercised"),
        ("RT04", {("mine", "single")}, "fail", ""),
        (
            "RT04",
            {("mine", "single")},
            "waived",
            "exercised; all that was red is a known failure (1 waived)",
        ),
        ("RT04", {("mine", "single")}, "xfail", "a known failure (1 xfail)"),
        ("RT04", set(), "waived", "never exercised"),
        ("RT04", {("deepseek-v3-odd-pos", "tp2")}, "pass", "exercised and nothing was red"),
        ("EX08", {("qwen3-moe-wide", "single")}, "pass", "never exercised"),
        ("EX08", {("qwen3-moe-wide", "ep4")}, "pass", "exercised and nothing was red"),
        ("EX08", {("qwen3-moe-wide", "ep4")}, "fail", ""),
    ],
)
def test_what_is_said_of_a_fault(inject: str, exercised: set[tuple[str, str]], status: str, said: str) -> None:
    collector = Collector(Run(inject))  # type: ignore[arg-type]
    collector.exercised = exercised
    collector.cases = [CaseResult("a", Status(status), "", "")]
    proved, line = collector.fault_report()
    assert proved == ("never" not in said)
    assert said in line
    assert bool(said) == bool(line)


def test_every_fault_has_a_command_that_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--commands"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(catalogue())
    for line, fault in zip(lines, catalogue().values(), strict=True):
        words = shlex.split(line)
        assert words[:3] == ["pytest", "--adapt-target=builtin", f"--adapt-inject={fault.id}"]
        assert f"--adapt-models={fault.models[0]}" in words


def test_the_page_of_faults_names_every_one() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\b[A-Z]{2}\d\d\b", page)) == set(catalogue()) | set(SLOWDOWNS)
    assert markdown(fault_rows()) in page, "python -m pytest_adapt faults list --markdown"
    by_hand = re.search(
        r"^    (pytest --adapt-target=builtin --adapt-inject=(\w+) .*?)(?:  +#.*)?$", page, re.MULTILINE
    )
    assert by_hand is not None
    assert by_hand[1] == catalogue()[by_hand[2]].command
