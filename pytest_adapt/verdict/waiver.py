"""Known failures: who owns them, where they are discussed, how far they reach and when they end.

A waiver file is TOML in the user's repository (ini ``adapt_waivers``)::

    [[waiver]]
    cases = "correctness/*[deepseek-v3-aligned-single-bf16-*]"
    owner = "ana"
    link = "https://example.org/issues/12"
    expires = 2027-01-31
    quota = 4
"""

from __future__ import annotations

import datetime
import fnmatch
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

__all__ = ["Waiver", "Waivers", "read_waivers"]

_KEYS = {"cases": str, "owner": str, "link": str, "expires": datetime.date, "quota": int}


@dataclass(frozen=True)
class Waiver:
    """One entry. ``cases`` is a shell pattern over case ids in which brackets are literal."""

    cases: str
    owner: str
    link: str
    expires: datetime.date
    quota: int

    def __str__(self) -> str:
        return f"owner {self.owner}, {self.link}, until {self.expires.isoformat()}"


@dataclass
class Waivers:
    """The entries of a file, and how often each was used in this process."""

    entries: tuple[Waiver, ...]
    today: datetime.date
    used: dict[Waiver, int] = field(default_factory=dict)

    def find(self, case: str) -> Waiver | None:
        """The waiver that covers a red case. An expired one covers nothing, nor does one whose quota is spent."""
        for waiver in self.entries:
            pattern = re.sub(r"\[", "[[]", waiver.cases)
            if (
                waiver.expires >= self.today
                and fnmatch.fnmatchcase(case, pattern)
                and self.used.get(waiver, 0) < waiver.quota
            ):
                self.used[waiver] = self.used.get(waiver, 0) + 1
                return waiver
        return None


def read_waivers(path: Path) -> Waivers:
    """Read a waiver file. Raises pytest.UsageError naming the file, the entry and the key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise pytest.UsageError(f"adapt_waivers: {path}: {error}") from None
    entries = []
    listed = raw.get("waiver", [])
    if set(raw) - {"waiver"} or not isinstance(listed, list):
        raise pytest.UsageError(f"adapt_waivers: {path}: expected [[waiver]] tables only")
    for number, entry in enumerate(listed, start=1):
        for key, kind in _KEYS.items():
            if not isinstance(entry.get(key), kind) or isinstance(entry.get(key), datetime.datetime):
                raise pytest.UsageError(f"adapt_waivers: {path}: waiver {number}: {key} must be a {kind.__name__}")
        if unknown := sorted(set(entry) - set(_KEYS)):
            raise pytest.UsageError(
                f"adapt_waivers: {path}: waiver {number}: unknown key {unknown[0]}; keys: {', '.join(_KEYS)}"
            )
        entries.append(Waiver(**entry))
    return Waivers(tuple(entries), datetime.date.today())
