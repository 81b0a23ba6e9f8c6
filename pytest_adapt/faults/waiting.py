"""Faults that engines shipped and that nothing here can be made to show yet: what each one waits for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

__all__ = ["Waiting", "waiting"]


@dataclass(frozen=True)
class Waiting:
    """One known fault: its id and public report, what goes wrong, and the machinery that is missing."""

    id: str
    report: str
    title: str
    needs: str


def waiting() -> Sequence[Waiting]:
    """All of them, in the order of their ids."""
    raw = json.loads((resources.files("pytest_adapt.faults") / "waiting.json").read_text(encoding="utf-8"))
    return [Waiting(**one) for one in sorted(raw, key=lambda one: str(one["id"]))]
