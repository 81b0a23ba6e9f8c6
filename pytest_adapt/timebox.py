"""What a run will cost, from what earlier runs cost, and which cases are run in ``--adapt-time``.

Every process of a run reads the same costs and collects the same cases, so each xdist worker chooses the same ones.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.covering import Candidate, Selection, select, shown_duration
from pytest_adapt.documents import DocumentError, both, fields, named, of_schema, read, real, write
from pytest_adapt.layout import AXES, parse
from pytest_adapt.matrix import declined
from pytest_adapt.stash import STATE
from pytest_adapt.verdict.status import PASSED

if TYPE_CHECKING:
    from pytest_adapt.items import ItemState
    from pytest_adapt.runner import Runner
    from pytest_adapt.verdict.result import CaseResult

__all__ = ["Learned", "TimeBox", "costs_path", "estimated", "learn", "open_box", "remembered"]

_SCHEMA = 1
_COSTS = fields({"targets": named(fields({"open_seconds": real, "cases": named(real)}, {"token_seconds": real}))})
_LEAST = 0.05
"""Seconds of a case of which nothing is known but that it asks for no token."""
_OPEN_SECONDS, _TOKEN_SECONDS = 5.0, 0.002
"""Assumed of a target of which no run has finished."""


@dataclass(frozen=True)
class Learned:
    """What earlier runs of one target cost."""

    open_seconds: float = 0.0
    token_seconds: float = 0.0
    cases: Mapping[str, float] = field(default_factory=dict)
    """Case id -> seconds, without opening its deployment."""

    def of_test(self) -> dict[str, float]:
        """Test -> median over its cases."""
        found: dict[str, list[float]] = {}
        for case, seconds in self.cases.items():
            found.setdefault(case.partition("[")[0], []).append(seconds)
        return {test: statistics.median(values) for test, values in found.items()}


@dataclass(frozen=True)
class TimeBox:
    """What was chosen for the time that was given."""

    seconds: float
    workers: int
    strength: int
    selection: Selection
    candidates: int
    source: str

    @property
    def not_run(self) -> int:
        """Cases that are left out for time."""
        return self.candidates - len(self.selection.chosen)

    def lines(self) -> list[str]:
        """What the terminal says: one line, and what is known of the costs."""
        chosen, found = len(self.selection.chosen), self.selection
        missing = f", {len(found.untested)} untested (time_box in the report)" if found.untested else ""
        box = f"time box {shown_duration(self.seconds)}: {chosen} of {self.candidates} cases"
        parts = [
            f"{box}, {self.not_run} not run for time",
            f"{found.covered} of {found.interactions} interactions of {self.strength} settings covered{missing}",
            f"estimated {found.seconds / self.workers:.0f} s, costs {self.source}",
        ]
        return ["; ".join(parts)]

    def to_json(self) -> dict[str, Any]:
        """For report.json."""
        found = self.selection
        return {
            "seconds": self.seconds,
            "strength": self.strength,
            "workers": self.workers,
            "estimated_seconds": round(found.seconds, 3),
            "chosen": len(found.chosen),
            "not_run": self.not_run,
            "interactions": found.interactions,
            "covered": found.covered,
            "untested": [" x ".join(f"{name}={value}" for name, value in one) for one in found.untested],
        }


def open_box(runner: Runner, items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], TimeBox]:
    """The items to run, in their order, and the box. Items that cost nothing (a layout that is not legal for the model,
    timing under xdist) are always kept; they are no candidates."""
    free = {item for item in items if _costs_nothing(runner, item)}
    judged = [item for item in items if item not in free]
    seconds, opening, source = estimated(runner, judged)
    cells = [item.stash[STATE].cell for item in judged]
    features = {name: "0" for cell in cells if cell for name, _ in cell.features}
    candidates = [_candidate(item, features, cost) for item, cost in zip(judged, seconds, strict=True)]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) if runner.under_xdist else 1
    found = select(
        candidates,
        runner.settings.time * workers,
        strength=runner.settings.strength,
        opening=opening,
    )
    box = TimeBox(
        seconds=runner.settings.time,
        workers=workers,
        strength=runner.settings.strength,
        selection=found,
        candidates=len(candidates),
        source=source,
    )
    chosen = set(found.chosen)
    return [item for item in items if item in free or item.stash[STATE].case in chosen], box


def estimated(runner: Runner, items: Sequence[pytest.Item]) -> tuple[list[float], float, str]:
    """(seconds of each item, seconds that one deployment takes to open, where these come from)."""
    from pytest_adapt.report.plan import demand

    path = costs_path(runner)
    learned = remembered(path, runner.settings.target)
    tests, found, known = learned.of_test(), [], 0
    for item in items:
        state = item.stash[STATE]
        known += state.case in learned.cases
        seconds = learned.cases.get(state.case, tests.get(state.case.partition("[")[0]))
        if seconds is None:
            tokens = demand(runner, state)[1]
            seconds = max(_LEAST, tokens * (learned.token_seconds or _TOKEN_SECONDS))
        found.append(seconds)
    source = f"of {known} of {len(found)} cases measured ({os.path.relpath(path, runner.config.rootpath)})"
    if not learned.cases:
        source = "assumed: 5 s a deployment, 2 ms a token; a finished run of this target replaces them"
    elif known < len(found):
        source += ", the rest estimated"
    return found, learned.open_seconds or _OPEN_SECONDS, source


def costs_path(runner: Runner) -> Path:
    """Where costs are kept."""
    path: Path = runner.config.rootpath / ".adapt" / "costs.json"
    return path


def remembered(path: Path, target: str) -> Learned:
    """What earlier runs of a target cost; nothing where there is no such file, or it cannot be read."""
    found = _read(path).get(target)
    if not found:
        return Learned()
    return Learned(found["open_seconds"], found.get("token_seconds", 0.0), found["cases"])


def learn(path: Path, target: str, cases: Iterable[CaseResult], open_seconds: float, token_seconds: float) -> None:
    """Add what a finished run cost to the file at ``path``, in one step; a file that cannot be written is let be.

    ``open_seconds`` is the mean time that a deployment took to open, ``token_seconds`` that of a token; 0 where there
    was none.
    """
    known = _read(path)
    before = remembered(path, target)
    measured = {
        case.case: round(max(0.0, case.seconds - case.open_seconds), 4)
        for case in cases
        if case.status in PASSED or case.status == "fail"
    }
    if not measured:
        return
    known[target] = {
        "open_seconds": round(open_seconds or before.open_seconds, 4),
        "token_seconds": round(token_seconds or before.token_seconds, 7),
        "cases": dict(sorted({**before.cases, **measured}.items())),
    }
    try:
        write(path, json.dumps({"schema": _SCHEMA, "targets": known}, indent=1) + "\n")
    except OSError:
        return  # the report of the same run says so, where it could not be written either


def _read(path: Path) -> dict[str, Any]:
    """Target -> its costs."""
    try:
        found: dict[str, Any] = read(path, both(of_schema(_SCHEMA), _COSTS))["targets"]
    except DocumentError:
        return {}
    return found


def _costs_nothing(runner: Runner, item: pytest.Item) -> bool:
    state = item.stash[STATE]
    if runner.under_xdist and item.get_closest_marker("adapt_serial") is not None:
        return True
    model = runner.matrix.models.get(state.cell.model) if state.cell else None
    return model is not None and state.cell is not None and bool(declined(model, state.cell.layout, runner.spec))


def _candidate(item: pytest.Item, features: Mapping[str, str], seconds: float) -> Candidate:
    state: ItemState = item.stash[STATE]
    test = state.case.partition("[")[0]
    return Candidate(state.case, _factors(state, features), seconds, str(state.cell) if state.cell else "", test)


def _factors(state: ItemState, features: Mapping[str, str]) -> dict[str, str]:
    """Settings of a case: suite, model, precision, length, each axis of the layout, each feature (``features``: of the
    run, switched off)."""
    found = {"suite": state.suite or state.nodeid.partition("::")[0]}
    if state.cell is not None:
        layout = parse(state.cell.layout)
        found |= {axis: str(getattr(layout, axis)) for axis in AXES}
        found |= {"model": state.cell.model, "precision": state.cell.precision}
        own = {name: str(value) for name, value in state.cell.features}
        found |= {f"feature {name}": value for name, value in {**features, **own}.items()}
    return found | ({"length": str(state.context)} if state.context else {})
