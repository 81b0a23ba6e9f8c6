"""--adapt-plan: what a run would ask of the target, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_adapt.matrix import declined
from pytest_adapt.stash import STATE
from pytest_adapt.timebox import estimated

if TYPE_CHECKING:
    from pytest_adapt.items import ItemState
    from pytest_adapt.runner import Runner

__all__ = ["demand", "plan_lines"]

_PLAIN_LIMIT = 96
"""Longest prompt of a test that has no context axis and does not say otherwise."""


def plan_lines(runner: Runner, items: Iterable[pytest.Item]) -> list[str]:
    """The table that --adapt-plan prints: one line per deployment, then totals and estimated minutes."""
    table: dict[str, list[int]] = {}
    left_out: dict[str, int] = {}
    planned: list[pytest.Item] = []
    for item in items:
        state = item.stash.get(STATE, None)
        if state is None:
            continue
        if reason := _declined(runner, state):
            left_out[reason] = left_out.get(reason, 0) + 1
            continue
        planned.append(item)
        row = table.setdefault(str(state.cell) if state.cell else "no deployment", [0, 0, 0])
        requests, tokens = demand(runner, state)
        for place, value in enumerate((1, requests, tokens)):
            row[place] += value
    opened = [name for name in table if name != "no deployment"]
    requests, tokens = (sum(row[place] for row in table.values()) for place in (1, 2))
    seconds, opening, source = estimated(runner, planned)
    minutes = (len(opened) * opening + sum(seconds)) / 60
    width = max(map(len, table), default=10)
    lines = [f"adapt plan: target {runner.settings.target}, profile {runner.settings.profile}", ""]
    lines += [f"{'deployment':{width}}  {'cases':>6} {'requests':>9} {'tokens':>10}"] if table else []
    lines += [f"{name:{width}}  {row[0]:6d} {row[1]:9d} {row[2]:10d}" for name, row in table.items()]
    lines += [f"unsupported: {number} cases: {reason}" for reason, number in left_out.items()]
    total = (
        f"total: {len(planned)} cases, {len(opened)} deployments, about {requests} requests, {tokens} tokens, "
        f"{minutes:.1f} minutes"
    )
    box = runner.collection.time_box
    return [*lines, "", total, *(box.lines() if box else [f"costs {source}"])]


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
