"""--adapt-plan: what a run would ask of the target, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.matrix import declined
from pytest_adapt.stash import STATE

if TYPE_CHECKING:
    from pytest_adapt.items import ItemState
    from pytest_adapt.runner import Runner

__all__ = ["Costs", "demand", "known_costs", "plan_lines"]

_PLAIN_LIMIT = 96
"""Longest prompt of a test that has no context axis and does not say otherwise."""


@dataclass(frozen=True)
class Costs:
    """Seconds per opened deployment and per token, and where the figures come from."""

    open_seconds: float = 5.0
    token_seconds: float = 0.002
    source: str = "assumed: 5 s a deployment, 2 ms a token; a finished run of this target replaces them"


def plan_lines(runner: Runner, items: Iterable[pytest.Item]) -> list[str]:
    """The table that --adapt-plan prints: one line per deployment, then totals and estimated minutes."""
    table: dict[str, list[int]] = {}
    left_out: dict[str, int] = {}
    cases = 0
    for item in items:
        state = item.stash.get(STATE, None)
        if state is None:
            continue
        if reason := _declined(runner, state):
            left_out[reason] = left_out.get(reason, 0) + 1
            continue
        cases += 1
        row = table.setdefault(str(state.cell) if state.cell else "no deployment", [0, 0, 0])
        requests, tokens = demand(runner, state)
        for place, value in enumerate((1, requests, tokens)):
            row[place] += value
    opened = [name for name in table if name != "no deployment"]
    requests, tokens = (sum(row[place] for row in table.values()) for place in (1, 2))
    costs = known_costs(runner)
    minutes = (len(opened) * costs.open_seconds + tokens * costs.token_seconds) / 60
    width = max(map(len, table), default=10)
    lines = [f"adapt plan: target {runner.settings.target}, profile {runner.settings.profile}", ""]
    lines += [f"{'deployment':{width}}  {'cases':>6} {'requests':>9} {'tokens':>10}"] if table else []
    lines += [f"{name:{width}}  {row[0]:6d} {row[1]:9d} {row[2]:10d}" for name, row in table.items()]
    lines += [f"unsupported: {number} cases: {reason}" for reason, number in left_out.items()]
    total = (
        f"total: {cases} cases, {len(opened)} deployments, about {requests} requests, {tokens} tokens, "
        f"{minutes:.1f} minutes"
    )
    box = runner.collection.time_box.lines() if runner.collection.time_box else []
    return [*lines, "", total, f"costs {costs.source}", *box]


def _declined(runner: Runner, state: ItemState) -> str:
    cell = state.cell
    model = runner.matrix.models.get(cell.model) if cell else None
    return declined(model, cell.layout, runner.spec) if cell is not None and model is not None else ""


def demand(runner: Runner, state: ItemState) -> tuple[int, int]:
    """(requests, tokens) of one item."""
    model = runner.matrix.models.get(state.cell.model) if state.cell else None
    if model is None:
        return 0, 0
    if state.context and model.entry is not None and model.shape_class in state.mark.classes:
        from pytest_adapt.models.recall import recalls

        asked = [len(recall.tokens) for recall in recalls(model.entry, state.context)]
        return len(asked) * state.mark.requests, sum(asked) * state.mark.requests
    from pytest_adapt.models.prompts import lengths_of

    known = lengths_of(model.described)
    if only := runner.settings.prompt:
        length = known.get(only[0], 0)
        return state.mark.requests * (length > 0), state.mark.requests * (only[1] or length) * (length > 0)
    limit = state.mark.tokens or state.context or _PLAIN_LIMIT
    floor = runner.matrix.floor(model.name, state.context) if state.context and not state.mark.tokens else 0
    lengths = [length for length in sorted(known.values()) if floor < length <= limit][
        : runner.matrix.prompts.get(model.name) or None
    ]
    return len(lengths) * state.mark.requests, sum(lengths) * state.mark.requests


def known_costs(runner: Runner) -> Costs:
    """Costs of the last finished run of the same target, else assumed ones."""
    from pytest_adapt.report.json import report_path

    path = report_path(runner.collector)
    try:
        last: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        usage = last["usage"]
        if last["settings"]["target"] != runner.settings.target or not usage["opens"] or not usage["tokens"]:
            return Costs()
        return Costs(
            usage["open_seconds"] / usage["opens"],
            usage["run_seconds"] / usage["tokens"],
            f"measured by the run in {path}",
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Costs()
