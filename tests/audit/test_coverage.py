"""Requirement coverage: read from the source, and silent about nothing that is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.audit.coverage import cover, main, read_kills, read_outcomes
from pytest_adapt.audit.marks import Claim, MarkError, claims, named_tests, requirement_titles, sources
from pytest_adapt.documents import DocumentError

MODULE = """
import pytest
pytestmark = [pytest.mark.requirement(3)]

@pytest.mark.requirement(5, 7)
def test_plain(): pass

@pytest.mark.requirement(9)
class TestMany:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.requirement(11))])
    def test_inside(self, x): pass

def helper(): pass
def test_bare(): raise SystemExit("never imported")
"""


def case(name: str, status: str, **more: Any) -> dict[str, Any]:
    return {"case": name, "status": status, "required": True, **more}


def write(report: Path, *cases: dict[str, Any]) -> None:
    report.write_text(json.dumps({"schema": 1, "cases": cases}))


def row_of(fault: str, **more: Any) -> dict[str, Any]:
    row = {"fault": fault, "precision": "bf16", "observable": "taps", "layout": "single", "differs": True}
    return row | {"killed": True, "owner": True, "located": None, "seconds": 1.0, "red": [], "green": {}} | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "promise").mkdir()
    (tmp_path / "promise" / "test_it.py").write_text(MODULE)
    return tmp_path


def test_marks_are_read_from_function_class_module_and_parameters(folder: Path) -> None:
    every = claims([("", folder)])
    assert {one.test.partition("::")[2]: one.numbers for one in every} == {
        "test_plain": (3, 5, 7),
        "TestMany::test_inside": (3, 9, 11),
        "test_bare": (3,),
    }
    assert every[0].test == "promise/test_it.py::test_plain" and every[0].suite == "promise"
    assert named_tests(every)[9] == ["promise/test_it.py::TestMany::test_inside"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("@pytest.mark.requirement(*ALL)\ndef test_it(): pass", r"test_bad.py:1: requirement\(\*ALL\) is no literal"),
        ("@pytest.mark.requirement('5')\ndef test_it(): pass", "'5'"),
        ("@pytest.mark.requirement(True)\ndef test_it(): pass", "True"),
        ("def test_it(:", "cannot be read as Python"),
    ],
)
def test_a_mark_that_cannot_be_read_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "test_bad.py").write_text(text)
    with pytest.raises(MarkError, match=says):
        claims([("", tmp_path)])


def test_what_is_missing_is_said() -> None:
    every = [Claim("a/test_x.py::test_1", (1, 2), 1), Claim("a/test_x.py::test_2", (2, 3), 9)]
    titles = {1: "one", 2: "two", 3: "three", 4: "four"}
    faults = {"AA01": 1, "AA02": 2, "AA03": 2}
    outcomes = {"a/test_x.py::test_1": "pass", "a/test_x.py::test_2": "fail"}
    rows = {row.number: row for row in cover(every, titles, faults, {"AA01": "killed", "AA02": "survived"}, outcomes)}
    assert rows[1].missing == () and rows[1].status == "pass" and rows[1].faults == {"AA01": "killed"}
    assert rows[2].missing == ("fault AA02 survived", "fault AA03 not run", "last run is red")
    assert rows[3].missing == ("no fault", "last run is red")
    assert rows[4].missing == ("no test", "no fault") and rows[4].status == "not run"
    rows = {row.number: row for row in cover(every, titles, faults, None, {})}
    assert rows[1].missing == ("not in the last run",), "without a kill matrix no kill is denied"


def test_outcomes_come_from_the_report_and_from_junit(folder: Path, tmp_path: Path) -> None:
    every = claims([("", folder)])
    plain, inside, bare = (one.test for one in every)
    report = tmp_path / "report.json"
    write(report, case(f"{plain}[a]", "pass"), case(f"{plain}[b]", "fail"))
    junit = tmp_path / "junit.xml"
    junit.write_text(
        '<testsuites><testsuite><testcase classname="promise.test_it.TestMany" name="test_inside[1]"/>'
        '<testcase classname="promise.test_it" name="test_bare"><skipped/></testcase></testsuite></testsuites>'
    )
    found = read_outcomes(every, report, [junit], tmp_path / "no")
    assert found.by_test == {plain: "fail", inside: "pass", bare: "skip"}
    write(report, case(plain, "unsupported"), case(inside, "unknown", required=False))
    assert read_outcomes(every, report, [], tmp_path / "no").by_test == {plain: "skip", inside: "skip"}
    write(report, case(plain, "unknown"), case(inside, "waived"))
    cache = tmp_path / "lastfailed"
    cache.write_text(json.dumps({f"{bare}[x]": True, "other.py::test_y": True}))
    assert read_outcomes(every, report, [], cache).by_test == {plain: "fail", inside: "pass", bare: "fail"}
    found = read_outcomes(every, tmp_path / "absent.json", [], tmp_path / "no")
    assert found.by_test == {} and "--adapt-target" in found.notes[0] and "--junitxml" in found.notes[1]
    report.unlink()
    junit.write_text("<a")
    with pytest.raises(DocumentError, match=f"{junit}: no JUnit file"):
        read_outcomes(every, report, [junit], cache)


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("flag", "content", "says"),
    [
        ("--report", None, "--report FILE: there is no such file"),
        ("--report", "[]", "FILE: schema None, this version reads 1"),
        ("--report", '{"schema": 2, "cases": []}', "FILE: schema 2, this version reads 1"),
        ("--report", '{"schema": 1, "cases": [{"case": "x", "status": ["fail"]}]}', "FILE: cases[0].status is"),
        ("--report", DEEP, "FILE: cannot be read as JSON (it is nested too deeply)"),
        ("--junit", None, "FILE: no JUnit file (No such file or directory)"),
        ("--junit", "<a", "FILE: no JUnit file"),
        ("--junit", '<?xml version="1.0" encoding="never"?><a/>', "FILE: no JUnit file"),
        ("--cache", None, "--cache FILE: there is no such file"),
        ("--cache", "7", "FILE: is 7; it must be an object"),
        ("--cache", '{"a": tr', "FILE: cannot be read as JSON"),
        ("--cache", DEEP, "FILE: cannot be read as JSON"),
        ("--kill-matrix", DEEP, "FILE: cannot be read as JSON"),
        ("--kill-matrix", '{"schema": 1, "rows": [{"fault": "A"}]}', "FILE: rows[0] has no 'layout'"),
    ],
)
def test_a_file_that_cannot_be_used_is_wrong_usage(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    content: str | None,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    assert main(["11", flag, str(file)]) == 2
    message = capsys.readouterr().err
    assert says.replace("FILE", str(file)) in message and message.count("\n") == 1
    assert main(["11", "--junit", "."]) == 2
    assert ".: no JUnit file (Is a directory)" in capsys.readouterr().err


def test_a_fault_is_killed_when_taps_show_it_everywhere(tmp_path: Path) -> None:
    def row(fault: str, killed: bool, observable: str = "taps", differs: bool = True) -> dict[str, Any]:
        return row_of(fault, killed=killed, observable=observable, differs=differs)

    path = tmp_path / "kill_matrix.json"
    assert read_kills(path) is None
    rows = [row("AA01", True), row("AA01", False, "topk"), row("AA02", True), row("AA02", False)]
    rows += [row("AA03", False, differs=False), row("AA04", True, "text")]
    path.write_text(json.dumps({"schema": 1, "rows": rows}))
    assert read_kills(path) == {"AA01": "killed", "AA02": "survived", "AA04": "killed"}


def test_every_requirement_has_a_title_and_every_mark_is_one_of_them() -> None:
    titles = requirement_titles()
    assert list(titles) == list(range(1, 131)) and all(titles.values())
    assert len(set(titles.values())) == 130
    every = claims(sources())
    assert {one.suite for one in every} >= {"", "correctness", "consistency", "loading"}
    assert {number for one in every for number in one.numbers} <= titles.keys()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    absent = ["--kill-matrix", str(tmp_path / "no")]
    assert main(["34", *absent]) == 1
    out = capsys.readouterr().out
    assert "Tensor parallelism" in out and "correctness/test_layouts.py::test_predictions" in out
    assert "not in the last run" in out and "no kill matrix" in out and "1 requirement: 1 have tests" in out
    assert main(["--json", "34", "126", *absent]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["number"] for one in found["requirements"]] == [34, 126]
    assert "fault" not in found["requirements"][0]["missing"]

    numbers = ["34", "--kill-matrix", str(tmp_path / "kills.json"), "--report", str(tmp_path / "report.json")]
    tests, faults = found["requirements"][0]["tests"], found["requirements"][0]["faults"]
    rows = [row_of(name) for name in faults]
    (tmp_path / "kills.json").write_text(json.dumps({"schema": 1, "rows": rows}))
    write(tmp_path / "report.json", *(case(f"{test}[x]", "pass") for test in tests))
    assert main(numbers) == 0
    assert "1 miss nothing" in capsys.readouterr().out
    rows[0]["killed"] = False
    (tmp_path / "kills.json").write_text(json.dumps({"schema": 1, "rows": rows}))
    assert main(numbers) == 1
    assert "survived" in capsys.readouterr().out
    assert main(["131"]) == 2
    assert "they are 1 to 130" in capsys.readouterr().err
