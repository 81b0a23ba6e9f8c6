"""``--adapt-selftest``: items of the judge's own trial, collected in place of the suites.

One item is a fault in one precision, a wrong comparator, or one value scaled until it is seen. What was done is kept
below ``.adapt/selftest/`` and not done again while the sources stay the same.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt import __version__
from pytest_adapt.documents import named
from pytest_adapt.faults.matrix import LIMIT, MUTANT, ROW, KillMatrix, MatrixError, load
from pytest_adapt.faults.registry import Fault, catalogue
from pytest_adapt.faults.waiting import waits
from pytest_adapt.options import Settings, unwritable
from pytest_adapt.oracle import Oracle
from pytest_adapt.selftest.comparators import World, make_world
from pytest_adapt.selftest.healthy import Specimen
from pytest_adapt.selftest.kept import Kept, KeptError, digest_of_sources
from pytest_adapt.selftest.limits import SCALED, measure_limit
from pytest_adapt.selftest.mutants import MUTANTS, seen_by
from pytest_adapt.selftest.nested import Bench
from pytest_adapt.selftest.page import summary_lines, write_page
from pytest_adapt.selftest.trial import COLUMNS, RedControl, Row, Trial, run_trial, trial_of

__all__ = ["Selftest", "start"]

_FOLDER = Path(".adapt") / "selftest"
_COMPARED = "qwen3-moe-odd"
"""The model on which comparators are tried."""
_PRECISIONS = ("bf16", "fp32")
"""In the order in which they are run: what is hardest to judge comes first."""


class Survived(Exception):
    """A selftest item whose fault, comparator or scale was not seen."""


@dataclass(frozen=True)
class Task:
    """What one item does: ``run`` raises Survived, RedControl or an outcome of pytest's."""

    name: str
    run: Callable[[], None]
    done: Callable[[], bool]
    """Whether an earlier run has kept the result."""


def start(config: pytest.Config, settings: Settings) -> None:
    """Register the selftest in place of the suites. Raises pytest.UsageError."""
    if settings.target.partition("[")[0] != "builtin":
        raise pytest.UsageError(
            f"--adapt-selftest puts faults into the built-in engine; it needs --adapt-target=builtin, not "
            f"{settings.target}"
        )
    if problem := unwritable(config.rootpath / _FOLDER):
        raise pytest.UsageError(f"--adapt-selftest keeps what is done in {_FOLDER}: {problem}; make room for it there")
    config.pluginmanager.register(Selftest(config, settings), "adapt-selftest")


class Selftest:
    """Hooks of a selftest, in the only process, on an xdist controller and on its workers."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.root = config.rootpath / ".adapt"
        self.bench = Bench(config.rootpath)
        self._began = time.monotonic()
        self._columns = settings.observables or tuple(COLUMNS)
        self._tasks = tuple(self._chosen())

    # collection

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool | None:
        config = self.config
        if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
            return None  # xdist: its workers collect
        session.items = [
            SelftestItem.from_parent(session, name=task.name, nodeid=f"selftest/{task.name}", task=task)
            for task in self._tasks
        ]
        config.hook.pytest_collection_modifyitems(session=session, config=config, items=session.items)
        config.hook.pytest_collection_finish(session=session)
        session.testscollected = len(session.items)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Neighbours in the order share checkpoints and oracles, and no worker waits for the other at the end."""
        if config.getvalue("dist") != "load":
            return None
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)

    def pytest_report_collectionfinish(self) -> str:
        known = sum(task.done() for task in self._tasks)
        return f"adapt selftest: {len(self._tasks)} items, {known} known from an earlier run (.adapt/selftest)"

    def pytest_report_header(self) -> str:
        box = f", at most {self.settings.time:g} s" if self.settings.time else ""
        return f"adapt selftest {__version__}: observables {', '.join(self._columns)}{box}"

    # the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.option.collectonly:
            return
        found = self.matrix()
        terminalreporter.section("adapt selftest", bold=True)
        for line in summary_lines(found):
            terminalreporter.write_line(line)
        left = sum(not task.done() for task in self._tasks)
        if left:
            terminalreporter.write_line(f"{left} of {len(self._tasks)} items are left: the same command goes on")
        for line in self._written(found):
            terminalreporter.write_line(line)

    def _written(self, found: KillMatrix) -> Iterator[str]:
        """Write matrix and page, and say where. One of more rows, which earlier sources left, is not written over."""
        place = self.config.rootpath / _FOLDER / "kill_matrix.json"
        try:
            before = load(place).size
        except MatrixError:
            before = 0
        page = "kill-matrix.md"
        if before > found.size:
            yield f"kept: {place.name} of earlier sources, which knows {before} rows; {found.size} are known of these"
            place, page = place.with_name("kill_matrix.part.json"), "kill-matrix.part.md"
        where = os.path.relpath(place, self.config.invocation_params.dir)
        try:
            found.save(place)
            write_page(found, place.with_name(page))
            yield f"written: {where}, and {page} beside it"
        except OSError as error:
            yield f"not written: {where}: {error.strerror or error}"

    def matrix(self) -> KillMatrix:
        """All that is kept of the present sources."""
        rows: list[Row] = []
        for fault in catalogue().values():
            for precision in ("fp32", "bf16", "fp16"):
                known = self._kept(fault).read(f"{fault.id}[{precision}]", named(ROW)) or {}
                rows += [known[column] for column in COLUMNS if column in known]
        mutants = [self._judges().read(f"mutant {name}", MUTANT) for name in MUTANTS]
        limits = [
            self._judges().read(f"limit {name} {precision}", LIMIT) for precision in _PRECISIONS for name in SCALED
        ]
        made = {
            "version": __version__,
            "python": platform.python_version(),
            "seconds": round(sum(row["seconds"] for row in rows), 1),
            "cores": os.cpu_count(),
        }
        return KillMatrix(tuple(rows), tuple(filter(None, mutants)), tuple(filter(None, limits)), made)

    # tasks

    def _chosen(self) -> Iterator[Task]:
        words = [word.strip().upper() for word in self.settings.selftest.split(",") if word.strip()]
        names = [*catalogue(), "MUTANTS", "LIMITS"]
        for word in words:
            if not any(_wanted(name, [word]) for name in names):
                if reason := waits(word):
                    raise pytest.UsageError(f"--adapt-selftest: {reason}")
                kinds = ", ".join(sorted({fault.kind for fault in catalogue().values()}))
                raise pytest.UsageError(
                    f"--adapt-selftest: nothing is called {word}; write ids of faults, patterns of them (RT*; kinds "
                    f"are {kinds}), mutants or limits"
                )
        precisions = self.settings.precisions or _PRECISIONS
        faults = [fault for fault in catalogue().values() if _wanted(fault.id, words)]
        trials = [trial_of(fault, precision) for precision in precisions for fault in faults]
        order = {name: place for place, name in enumerate(precisions)}
        mutants = [self._mutant_task(name) for name in MUTANTS] if _wanted("MUTANTS", words) else []
        limits = [self._limit_task(name, one) for one in precisions for name in SCALED if _wanted("LIMITS", words)]
        trials.sort(key=lambda one: (order[one.precision], one.setting.model, one.setting.layout, one.fault.id))
        middle = [self._trial_task(trial) for trial in trials]
        # The longest first, so that workers end together; where time is short, what costs least.
        yield from (*mutants, *middle, *limits) if self.settings.time else (*limits, *middle, *mutants)

    def _trial_task(self, trial: Trial) -> Task:
        kept = self._kept(trial.fault)

        def known() -> dict[str, Row]:
            return kept.read(trial.name, named(ROW)) or {}

        def missing() -> list[str]:
            rows = known()
            if "taps" in rows and not KillMatrix.counts(rows["taps"]):
                return []
            return [column for column in self._columns if column not in rows]

        def run() -> None:
            if missing():
                self._in_time()
                controls = Kept(self.root / "selftest", digest_of_sources())
                kept.write(trial.name, known() | run_trial(trial, self.bench, controls, missing()))
            _conclude(trial, known())

        return Task(trial.name, run, lambda: not missing())

    def _mutant_task(self, name: str) -> Task:
        kept, mutant = self._judges(), MUTANTS[name]
        key = f"mutant {name}"

        def run() -> None:
            if kept.read(key, MUTANT) is None:
                self._in_time()
                by = seen_by(mutant, self._world)
                kept.write(key, {"name": name, "what": mutant.what, "killed": bool(by), "by": by})
            if not (kept.read(key, MUTANT) or {}).get("killed"):
                raise Survived(f"{name} ({mutant.what}): no check notices")

        return Task(f"mutant[{name}]", run, lambda: kept.read(key, MUTANT) is not None)

    def _limit_task(self, name: str, precision: str) -> Task:
        kept = self._judges()
        key = f"limit {name} {precision}"

        def run() -> None:
            if kept.read(key, LIMIT) is None:
                self._in_time()
                controls = Kept(self.root / "selftest", digest_of_sources())
                kept.write(key, measure_limit(name, precision, self.bench, controls))
            row = kept.read(key, LIMIT) or {}
            seen, token = row["detected"]["taps"], row["token"]
            if token is not None and (seen is None or seen > token):
                raise Survived(
                    f"{row['value']} in {precision}: a wrong token comes at d = {token:g}, and taps show {seen}"
                )

        return Task(f"limit[{name}-{precision}]", run, lambda: kept.read(key, LIMIT) is not None)

    @cached_property
    def _world(self) -> World:
        model = self.bench.catalogued(_COMPARED)
        return make_world(Specimen(model.directory, Oracle(model.directory)))

    def _judges(self) -> Kept:
        return Kept(self.root / "selftest", digest_of_sources())

    def _kept(self, fault: Fault) -> Kept:
        module = fault.install.__module__
        return Kept(self.root / "selftest", digest_of_sources(f"{module.rpartition('.')[2]}.py"))

    def _in_time(self) -> None:
        box = self.settings.time
        if box and time.monotonic() - self._began > box:
            pytest.skip("not begun: --adapt-time is up; the same command goes on")


class SelftestItem(pytest.Item):
    """One task as pytest sees it."""

    def __init__(self, *, task: Task, **named: Any) -> None:
        super().__init__(**named)
        self._task = task

    def runtest(self) -> None:
        self._task.run()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Survived | RedControl | KeptError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"selftest {self.name}"


def _wanted(identifier: str, words: list[str]) -> bool:
    return "ALL" in words or any(fnmatch.fnmatchcase(identifier.upper(), word) for word in words)


def _conclude(trial: Trial, rows: dict[str, Row]) -> None:
    """The item's outcome: what counts is whether anybody sees the fault where everything is shown."""
    first = rows.get("taps") or next(iter(rows.values()))
    what = f"{trial.fault.id} ({trial.fault.title})"
    if not first["differs"]:
        pytest.skip(f"equivalent: {what} changes no answer on {trial.setting.model} in {trial.precision}")
    if first.get("healthy"):
        pytest.skip(f"equivalent: {what} is no fault in {trial.precision}: {first['healthy']}")
    if first["killed"]:
        return
    raise Survived(f"{what} differs on {trial.setting.model} in {trial.precision}, and no suite is red")
