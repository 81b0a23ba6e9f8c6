"""What an active run collects: rows for tests, which cases there are, in which order deployments come."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt import shipped
from pytest_adapt.items import ItemState, is_ours, replaced_fixture, uses_fixtures
from pytest_adapt.matrix import AXES, PRECISIONS, PROFILES, Cell, Mark, read_mark
from pytest_adapt.stash import STATE
from pytest_adapt.verdict.ladder import rung_of
from pytest_adapt.verdict.result import RUNGS

if TYPE_CHECKING:
    from pytest_adapt.runner import Runner
    from pytest_adapt.timebox import TimeBox

__all__ = ["Collection"]


class Collection:
    """Hooks of collection, in every process of an active run."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.matrix = runner.matrix
        self.settings = runner.settings
        self.cells: list[Cell] = []
        """Deployments of the collected cases, in the order in which they are opened."""
        self.time_box: TimeBox | None = None
        self.nothing = ""
        """Why nothing is left to run; "" where something is."""
        self._marks: dict[int, tuple[pytest.Mark, Mark]] = {}

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        return shipped.SuiteModule.make(module_path, parent) if shipped.is_suite_file(module_path) else None

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        patterns = self.runner.config.getini("python_files")
        usual = parent.session.isinitpath(file_path) or any(fnmatch.fnmatch(file_path.name, one) for one in patterns)
        return None if usual or not shipped.is_suite_file(file_path) else shipped.SuiteModule.make(file_path, parent)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = metafunc.fixturenames
        if self.runner.under_xdist and shipped.suite_of(metafunc.definition.path):
            # Wrong usage, as below; but the controller understands no other error of a worker than one of collection.
            definitions = metafunc.definition._fixtureinfo.name2fixturedefs
            if problem := replaced_fixture(definitions, os.getcwd()):
                raise pytest.Collector.CollectError(problem)
        axes = [axis for axis in AXES if axis in names and is_ours(_definitions(metafunc.definition, axis))]
        if not axes:
            return
        given = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _argnames(mark)}
        axes = [axis for axis in axes if axis not in given]
        mark = self._mark(metafunc.definition, metafunc.definition.nodeid)
        values, ids = self.matrix.project(tuple(axes), mark) if axes else ([], [])
        if self._left_out(mark):
            values, ids = [], []
        if axes and not values:
            # No row: the item is deselected below (pytest would show an empty parameter set as a skip).
            values, ids = [_nothing(axes)], ["none"]
        if axes:
            metafunc.parametrize(",".join(axes), values, ids=ids, indirect=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        ours: list[tuple[Any, pytest.Item]] = []
        others: list[pytest.Item] = []
        gone: list[pytest.Item] = []
        order = {name: index for index, name in enumerate(self.matrix.models)}
        seen: dict[int, bool] = {}
        cells: dict[Cell, None] = {}
        for index, item in enumerate(items):
            info = getattr(item, "_fixtureinfo", None)
            if id(info) not in seen:
                definitions = getattr(info, "name2fixturedefs", {})
                seen[id(info)] = bool(definitions) and uses_fixtures(definitions, definitions)
                if shipped.suite_of(item.path) and (problem := replaced_fixture(definitions, os.getcwd())):
                    raise pytest.UsageError(problem)
            marker = item.get_closest_marker("adapt")
            if not seen[id(info)] and marker is None:
                others.append(item)
                continue
            mark = self._read(marker, item.nodeid)
            params = item.callspec.params if hasattr(item, "callspec") else {}
            other = bool(self.settings.op) and params.get("op") != self.settings.op.partition("(")[0].strip()
            if other or self._left_out(mark) or any(params.get(axis) == "" for axis in AXES):
                gone.append(item)
                continue
            cell = _cell(params, mark)
            suite = shipped.suite_of(item.path)
            state = ItemState(
                case=shipped.case_id(item.path, item.nodeid),
                nodeid=item.nodeid,
                suite=suite,
                rung=rung_of(suite, mark.rung),
                mark=mark,
                cell=cell,
                context=int(params.get("context_length", 0)),
                required=True,
                serial=False,
                requirements=(),
            )
            item.stash[STATE] = state
            if cell is not None:
                cells[cell] = None
            place = RUNGS.index(state.rung) if state.rung in RUNGS else len(RUNGS)
            ours.append(((_cell_key(cell, order) if cell else (), place, index), item))
        ours.sort(key=lambda pair: pair[0])
        kept = [item for _, item in ours]
        if self.settings.time and kept:
            kept = self._boxed(kept, gone)
            cells = dict.fromkeys(cell for item in kept if (cell := item.stash[STATE].cell) is not None)
        if gone:
            config.hook.pytest_deselected(items=gone)
            if not kept:
                self.nothing = self._why_nothing(gone)
        items[:] = [*others, *kept]
        self.runner.gating.items = kept
        self.cells = sorted(cells, key=lambda cell: _cell_key(cell, order))

    def _boxed(self, items: list[pytest.Item], gone: list[pytest.Item]) -> list[pytest.Item]:
        """The items that --adapt-time has room for; the others are added to ``gone``."""
        from pytest_adapt.timebox import open_box

        kept, self.time_box = open_box(self.runner, items)
        chosen = set(kept)
        gone += [item for item in items if item not in chosen]
        return kept

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        count = sum(STATE in item.stash for item in items)
        cells = {item.stash[STATE].cell for item in items if STATE in item.stash} - {None}
        if self.nothing:
            return [f"adapt: nothing to run: {self.nothing}"]
        lines = [f"adapt: {_number(count, 'case')} on {_number(len(cells), 'deployment')}"] if count else []
        return lines + [f"adapt: {line}" for line in self.time_box.lines()] if self.time_box else lines

    def _mark(self, node: pytest.Item, where: str) -> Mark:
        return self._read(node.get_closest_marker("adapt"), where)

    def _read(self, marker: pytest.Mark | None, where: str) -> Mark:
        if marker is None:
            return _PLAIN
        if id(marker) not in self._marks:
            self._marks[id(marker)] = (marker, read_mark([marker], where))
        return self._marks[id(marker)][1]

    def _why_nothing(self, gone: Sequence[pytest.Item]) -> str:
        """Why every item of the plugin's that was collected is left out."""
        marks = [self._read(item.get_closest_marker("adapt"), item.nodeid) for item in gone]
        later = sum(self._left_out(mark) for mark in marks)
        classes = sorted(
            {one for mark in marks if not self._left_out(mark) for one in mark.classes or ("any but needle",)}
        )
        parts = [f"{_number(later, 'test')} of a larger --adapt-profile, or of the gate"] if later else []
        if classes:
            kinds = ", ".join(classes)
            parts.append(
                f"{_number(len(gone) - later, 'test')} of other models, layouts, contexts or operators than were named "
                f"(models of class {kinds}: python -m pytest_adapt models)"
            )
        return "; ".join(parts)

    def _left_out(self, mark: Mark) -> bool:
        """Whether the profile is too small for a test, or this run is the gate's and the test is not, or the other way
        round. Counters are part of both."""
        if mark.tier in ("times", "instructions") and not self.settings.gate or self.settings.gate and not mark.tier:
            return True
        sizes = list(PROFILES)
        return sizes.index(mark.profile) > sizes.index(self.settings.profile)


_PLAIN = Mark()


def _nothing(axes: list[str]) -> Any:
    return "" if len(axes) == 1 else ("",) * len(axes)


def _cell(params: Mapping[str, Any], mark: Mark) -> Cell | None:
    if "model" not in params:
        return None
    layout, precision = str(params.get("layout", "single")), str(params.get("precision", "fp32"))
    return Cell(str(params["model"]), layout, precision, mark.taps, mark.settings)


def _cell_key(cell: Cell, order: Mapping[str, int]) -> tuple[Any, ...]:
    place = PRECISIONS.index(cell.precision) if cell.precision in PRECISIONS else len(PRECISIONS)
    return (
        order.get(cell.model, len(order)),
        cell.model,
        cell.layout != "single",
        cell.layout,
        place,
        cell.taps,
        cell.features,
    )


def _definitions(definition: Any, name: str) -> Any:
    return definition._fixtureinfo.name2fixturedefs.get(name, ())


def _argnames(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
