"""What a waiver covers, how often, and the patch that keeps the file true."""

from __future__ import annotations

import datetime
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_adapt.verdict.result import CaseResult, Status
from pytest_adapt.verdict.waiver import Use, Waiver, Waivers, parse_waivers, patch, read_waivers, uses

TODAY = datetime.date(2026, 5, 1)
LATER, BEFORE = datetime.date(2026, 6, 1), datetime.date(2026, 4, 30)
TEXT = """# ours

# of the first
[[waiver]]
cases = "a/*[x-*]"
owner = "ana"
link = "https://example.org/1"
expires = 2026-06-01
quota = 4

# of the second
[[waiver]]
cases = "b/*"
owner = "bo"
link = "https://example.org/2"
expires = 2026-06-01
quota = 1
"""


def waiver(cases: str = "a/*[x-*]", expires: datetime.date = LATER, quota: int = 2, number: int = 1) -> Waiver:
    return Waiver(cases, "ana", "https://example.org/1", expires, quota, number)


def case(name: str, status: str = "pass", number: int = 0) -> CaseResult:
    return CaseResult(name, Status(status), "a", "correct", waiver=number)


def test_brackets_are_literal_and_the_quota_ends() -> None:
    found = Waivers((waiver(),), TODAY)
    assert found.find("a/t.py::test[y-1]") is None
    assert found.find("a/t.py::test[x-1]") == found.find("a/t.py::test[x-2]") == waiver()
    assert found.find("a/t.py::test[x-3]") is None
    assert Waivers((waiver(expires=BEFORE),), TODAY).find("a/t.py::test[x-1]") is None
    assert Waivers((waiver(expires=TODAY),), TODAY).find("a/t.py::test[x-1]") is not None


def test_processes_of_one_run_share_a_quota(tmp_path: Path) -> None:
    """Each worker has entries of its own; the folder counts."""
    workers = [Waivers((waiver(quota=3), waiver("*", quota=1, number=2)), TODAY, tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda worker: worker.find("a/t.py::test[x-1]"), workers))
    numbers = sorted(one.number for one in found if one is not None)
    assert numbers == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("cases", "expires", "whole", "state"),
    [
        ([], LATER, True, "absent"),
        ([case("b/t.py::test[x-1]")], LATER, True, "absent"),
        ([], BEFORE, False, "expired"),
        ([case("a/t[x-1]", "waived", 1)], LATER, True, "used"),
        ([case("a/t[x-1]")], LATER, True, "unused"),
        ([case("a/t[x-1]")], LATER, False, "used"),  # the case that needs it may be elsewhere
        ([case("a/t[x-1]"), case("a/t[x-2]")], LATER, False, "unused"),  # as many as it lets through
        ([case("a/t[x-1]"), case("a/t[x-2]", "blocked")], LATER, True, "used"),
        ([case("a/t[x-1]"), case("a/t[x-2]", "waived", 2)], LATER, True, "unused"),  # by another entry
        ([case("a/t[x-1]"), case("a/t[x-2]", "waived", 1)], LATER, True, "loose"),
        ([case("a/t[x-1]"), case("a/t[x-2]", "waived", 1)], LATER, False, "used"),
        ([case(f"a/t[x-{n}]", "waived", 1) for n in "12"] + [case("a/t[x-3]", "fail")], LATER, False, "spent"),
        ([case(f"a/t[x-{n}]", "waived", 1) for n in "12"] + [case("a/t[x-3]", "unsupported")], LATER, True, "used"),
        ([case("a/t[x-1]", "fail")], LATER, True, "used"),  # by the quota of a worker that died
    ],
)
def test_what_an_entry_came_to(cases: list[CaseResult], expires: datetime.date, whole: bool, state: str) -> None:
    (found,) = uses([waiver(expires=expires)], TODAY, cases, whole=whole)
    assert found.state == state
    assert str(found).startswith("waiver 1 (a/*[x-*]; owner ana, https://example.org/1): ")


def test_the_patch_applies_and_leaves_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(TEXT)
    entries, problems = parse_waivers(path)
    assert problems == [] and [one.number for one in entries] == [1, 2]
    first, second = entries

    def apply(*states: str) -> list[Waiver]:
        path.write_text(TEXT)
        text = patch(path, [Use(one, state, 3, 1) for one, state in zip(entries, states, strict=True)])
        subprocess.run(["git", "apply", "-"], input=text, text=True, cwd=tmp_path, check=True)
        return parse_waivers(path)[0]

    assert [one.cases for one in apply("unused", "used")] == [second.cases]
    assert "of the second" in path.read_text() and "of the first" not in path.read_text()
    assert [one.cases for one in apply("used", "expired")] == [first.cases]
    assert "of the second" not in path.read_text() and path.read_text().startswith("# ours")
    assert [one.quota for one in apply("loose", "absent")] == [3, 1]
    assert apply("expired", "unused") == []
    path.write_text(TEXT)
    assert patch(path, [Use(one, "used", 1, 0) for one in entries]) == ""
    path.write_text('waiver = [{cases = "a/*", owner = "a", link = "l", expires = 2026-06-01, quota = 1}]\n')
    assert patch(path, [Use(one, "unused", 0, 1) for one in parse_waivers(path)[0]]) == "", "not written line by line"


def test_a_file_without_entries_is_well(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text("# nothing is waived\n")
    assert parse_waivers(path) == ([], [])
    assert patch(path, []) == ""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('owner = "ana"\n', "", "waiver 1: owner is missing"),
        ('owner = "ana"', 'owner = ""', "waiver 1: owner is empty; say who or where"),
        ('owner = "ana"', 'owner = "  "', "waiver 1: owner is empty"),
        ('cases = "b/*"', 'cases = ""', "waiver 2: cases is empty; say which cases"),
        ('owner = "ana"', "owner = 7", "waiver 1: owner must be text"),
        ('"https://example.org/2"', '""', "waiver 2: link is empty"),
        ("quota = 4", "quota = 0", "waiver 1: quota 0 lets nothing through"),
        ("quota = 4", "quota = true", "waiver 1: quota must be a whole number"),
        ("quota = 4", "quota = 4\nwhy = 1\nwho = 2", "waiver 1: unknown key who and why; keys: cases, owner"),
        ("expires = 2026-06-01\nquota = 1", "expires = 2026-06-01T00:00:00\nquota = 1", "waiver 2: expires must be"),
        ("# ours", "x = 1", "expected"),
        ("# ours", "[", "known.toml"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "known.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new))
    problems = parse_waivers(path)[1]
    assert len(problems) == 1 and says in problems[0]
    with pytest.raises(pytest.UsageError, match="adapt_waivers: "):
        read_waivers(path)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(TEXT.replace('owner = "ana"\n', "").replace("quota = 4", "quota = 0").replace('"bo"', '""'))
    with pytest.raises(pytest.UsageError) as caught:
        read_waivers(path)
    said = str(caught.value)
    assert "waiver 1: owner is missing; " in said and "waiver 1: quota 0" in said and "waiver 2: owner is" in said
    assert "\n" not in said


def test_two_entries_that_say_the_same_are_one_too_many(tmp_path: Path) -> None:
    path, entry = tmp_path / "known.toml", TEXT[TEXT.index("[[waiver]]") : TEXT.index("# of the second")]
    path.write_text(TEXT + entry.replace("quota = 4", "quota = 1"))
    (problem,) = parse_waivers(path)[1]
    assert "waiver 3: says the same as waiver 1; remove one" in problem
    path.write_text(TEXT + entry.replace("example.org/1", "example.org/3"))
    assert parse_waivers(path)[1] == []


@pytest.mark.parametrize("gap", ["", "\n"])
def test_the_heading_of_a_file_outlives_its_first_entry(tmp_path: Path, gap: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(f"# Known failures of our engine,\n# reviewed on Mondays.\n{gap}{TEXT[TEXT.index('[[waiver]]') :]}")
    first, second = parse_waivers(path)[0]
    diff = patch(path, [Use(first, "unused", 0, 1), Use(second, "spent", 1, 0, 1)], str(path))
    assert diff.startswith(f"--- {path}\n+++ {path}\n") and "\n-# " not in diff and '-owner = "ana"' in diff
    assert '-owner = "bo"' not in diff
