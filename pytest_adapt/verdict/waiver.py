"""Known failures: who owns them, where they are discussed, how far they reach and when they end.

A waiver file is TOML in the user's repository (ini ``adapt_waivers``)::

    [[waiver]]
    cases = "correctness/*[deepseek-v3-aligned-single-bf16-*]"
    owner = "ana"
    link = "https://example.org/issues/12"
    expires = 2027-01-31
    quota = 4

An entry that has expired, and one that no case needed, fail the run: a list of known failures is worth something only
while each of them is one.
"""

from __future__ import annotations

import datetime
import difflib
import fnmatch
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.verdict.result import CaseResult, Status
from pytest_adapt.verdict.status import PASSED, outcome

__all__ = ["FAILING", "MENDED", "Use", "Waiver", "Waivers", "parse_waivers", "patch", "read_waivers", "uses"]

_KEYS = {"cases": str, "owner": str, "link": str, "expires": datetime.date, "quota": int}
_FORMS = {str: "text", datetime.date: "a date", int: "a whole number"}
FAILING = ("expired", "unused")
"""States of an entry that fail a run."""
MENDED = (*FAILING, "loose")
"""States that a patch of the file ends."""


@dataclass(frozen=True)
class Waiver:
    """One entry. ``cases`` is a shell pattern over case ids in which brackets are literal."""

    cases: str
    owner: str
    link: str
    expires: datetime.date
    quota: int
    number: int = 1
    """Place in the file, from 1."""

    @property
    def known(self) -> tuple[str, str, str]:
        """Which failure it is about: two entries that say the same of it are one too many."""
        return self.cases, self.owner, self.link

    def covers(self, case: str) -> bool:
        """Whether its pattern matches a case id."""
        return fnmatch.fnmatchcase(case, re.sub(r"\[", "[[]", self.cases))

    def __str__(self) -> str:
        return f"owner {self.owner}, {self.link}, until {self.expires.isoformat()}"


@dataclass
class Waivers:
    """The entries of a file, and how often each was used in this run."""

    entries: tuple[Waiver, ...]
    today: datetime.date
    shared: Path | None = None
    """Folder in which the processes of one run count together; None where there is only this one."""
    used: dict[Waiver, int] = field(default_factory=dict)

    def find(self, case: str) -> Waiver | None:
        """The waiver that covers a red case. An expired one covers nothing, nor does one whose quota is spent."""
        for waiver in self.entries:
            if waiver.expires >= self.today and waiver.covers(case) and self._take(waiver):
                return waiver
        return None

    def _take(self, waiver: Waiver) -> bool:
        """Use the quota once; False where it is spent."""
        if self.shared is None:
            if self.used.get(waiver, 0) >= waiver.quota:
                return False
            self.used[waiver] = self.used.get(waiver, 0) + 1
            return True
        for place in range(waiver.quota):
            try:  # a file is made by exactly one process
                os.close(os.open(self.shared / f"{waiver.number}.{place}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False


@dataclass(frozen=True)
class Use:
    """What one entry came to in a run.

    ``state``: expired; unused (its cases were judged and none needed it); loose (fewer needed it than its quota);
    spent (more needed it than its quota); used; or absent (none of its cases was in the run).
    """

    waiver: Waiver
    state: str
    waived: int
    passed: int
    """Cases that it covers and that passed."""
    red: int = 0
    """Cases that it covers and that failed all the same."""

    def __str__(self) -> str:
        waiver = self.waiver
        said = {
            "expired": f"expired on {waiver.expires.isoformat()} and covers nothing; renew or remove it",
            "unused": f"unused: {self.passed} of its cases passed, none needed it; remove it",
            "loose": f"wider than needed: {self.waived} cases of a quota of {waiver.quota}, {self.passed} passed",
            "spent": f"its quota of {waiver.quota} is spent; {self.red} more of its cases failed",
            "used": f"used by {self.waived} cases of a quota of {waiver.quota}",
            "absent": "none of its cases was in this run",
        }[self.state]
        return f"waiver {waiver.number} ({waiver.cases}; owner {waiver.owner}, {waiver.link}): {said}"


def uses(entries: Iterable[Waiver], today: datetime.date, cases: Sequence[CaseResult], *, whole: bool) -> list[Use]:
    """What each entry came to. ``whole`` says that the run left nothing out that its settings hold.

    In a narrowed run an entry counts as unused only where as many of its cases passed as its quota lets through: the
    case that needs it may be one that was left out.
    """
    found = []
    for waiver in entries:
        mine = [case for case in cases if waiver.covers(case.case)]
        waived = sum(case.waiver == waiver.number for case in mine)
        passed = sum(case.status in PASSED for case in mine)
        red = sum(outcome(case.status, case.required) == "failed" for case in mine)
        decided = all(case.status in PASSED | {Status.WAIVED} for case in mine)
        if waiver.expires < today:
            state = "expired"
        elif not mine:
            state = "absent"
        elif not waived and decided and (whole or passed >= waiver.quota):
            state = "unused"
        elif waived and waived < waiver.quota and passed and decided and whole:
            state = "loose"
        elif red and waived >= waiver.quota:
            state = "spent"
        else:
            state = "used"
        found.append(Use(waiver, state, waived, passed, red))
    return found


def patch(path: Path, found: Iterable[Use], shown: str = "") -> str:
    """A unified diff of the waiver file that removes entries nobody needs and shrinks quotas; "" where nothing changes.

    ``shown`` is the file's name in the diff. "" too where the file is not written as [[waiver]] tables line by line.
    What the file begins with is its heading, and stays.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if re.match(r"\s*\[\[\s*waiver\s*\]\]", line)]
    by_number = {one.waiver.number: one for one in found}
    expected = []
    changed = list(lines)
    heading = next((index for index, line in enumerate(lines) if not line.lstrip().startswith("#")), 0)
    for number, start in enumerate(starts, start=1):
        one = by_number.get(number)
        end = starts[number] if number < len(starts) else len(lines)
        if one is None or one.state not in MENDED:
            if one is not None:
                expected.append(one.waiver.quota)
            continue
        if one.state == "loose":
            expected.append(one.waived)
            for index in range(start, end):
                changed[index] = re.sub(r"^(\s*quota\s*=\s*)[\d_]+", rf"\g<1>{one.waived}", lines[index])
            continue
        # Comments directly above an entry speak of it; those above the next one stay.
        while start > heading and lines[start - 1].lstrip().startswith("#"):
            start -= 1
        while number < len(starts) and end > start and lines[end - 1].lstrip().startswith("#"):
            end -= 1
        changed[start:end] = [""] * (end - start)
    after = "".join(changed)
    try:
        left = [int(entry["quota"]) for entry in tomllib.loads(after).get("waiver", [])]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError):
        return ""
    if left != expected or len(starts) != len(by_number):
        return ""
    name = shown or path.name
    # Of a file outside the folder that diffs start from there is no a/ and b/.
    before, behind = (name, name) if Path(name).is_absolute() else (f"a/{name}", f"b/{name}")
    return "".join(difflib.unified_diff(lines, after.splitlines(keepends=True), before, behind))


def parse_waivers(path: Path) -> tuple[list[Waiver], list[str]]:
    """(entries, what is wrong with the file, one line each)."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        return [], [f"{path}: {error}"]
    listed = raw.get("waiver", [])
    if set(raw) - {"waiver"} or not isinstance(listed, list):
        return [], [f"{path}: expected [[waiver]] tables only"]
    entries: list[Waiver] = []
    problems: list[str] = []
    for number, entry in enumerate(listed, start=1):
        wrong = _problems(entry)
        if not wrong:
            entries.append(Waiver(**entry, number=number))
            same = next(one for one in entries if one.known == entries[-1].known)
            if same.number != number:
                wrong = [f"says the same as waiver {same.number}; remove one, quota says how many it lets through"]
        problems += [f"{path}: waiver {number}: {problem}" for problem in wrong]
    return entries, problems


def read_waivers(path: Path, shared: Path | None = None) -> Waivers:
    """Read a waiver file. Raises pytest.UsageError naming the file, and of each entry that is wrong every key."""
    entries, problems = parse_waivers(path)
    if problems:
        raise pytest.UsageError(f"adapt_waivers: {'; '.join(problems)}")
    return Waivers(tuple(entries), datetime.date.today(), shared)


def _problems(entry: Any) -> list[str]:
    """What is wrong with one entry."""
    if not isinstance(entry, dict):
        return ["must be a table"]
    found = []
    for key, kind in _KEYS.items():
        value: Any = entry.get(key)
        # datetime is a date and bool an int, to Python alone.
        if key not in entry:
            found.append(f"{key} is missing")
        elif not isinstance(value, kind) or isinstance(value, datetime.datetime | bool):
            found.append(f"{key} must be {_FORMS[kind]}")
        elif isinstance(value, str) and not value.strip():
            found.append(f"{key} is empty; say {'which cases' if key == 'cases' else 'who or where'}")
        elif isinstance(value, int) and value < 1:
            found.append(f"quota {value} lets nothing through; write 1 or more")
    if unknown := sorted(set(entry) - set(_KEYS)):
        found.append(f"unknown key {' and '.join(unknown)}; keys: {', '.join(_KEYS)}")
    return found
