"""Faults that engines shipped and that nothing here can be made to show yet: what each one waits for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

__all__ = ["Waiting", "waiting", "waits"]


@dataclass(frozen=True)
class Waiting:
    """One known fault: its id and public report, what goes wrong, and the machinery that is missing."""

    id: str
    report: str
    title: str
    needs: str


def waits(identifier: str) -> str:
    """Why a known fault cannot be put in yet; "" where none that waits has this id."""
    one = next((one for one in waiting() if one.id == identifier.upper()), None)
    if one is None:
        return ""
    return (
        f"fault {one.id} waits for {one.needs}: it cannot be put in yet (python -m pytest_adapt faults list --waiting)"
    )


def waiting() -> Sequence[Waiting]:
    """All of them, in the order of their ids."""
    raw = json.loads((resources.files("pytest_adapt.faults") / "waiting.json").read_text(encoding="utf-8"))
    return [Waiting(**one) for one in sorted(raw, key=lambda one: str(one["id"]))]
