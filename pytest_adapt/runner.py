"""The hooks of an active run: rows for tests, one deployment after the other, verdicts into pytest's outcomes."""

from __future__ import annotations

import fnmatch
import os
import shlex
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt import shipped
from pytest_adapt.gating import Gating, baseline_of
from pytest_adapt.handle import ModelHandle
from pytest_adapt.heartbeat import Heartbeat
from pytest_adapt.items import CASE, ItemState, case_to_json, is_ours, replaced_fixture, uses_fixtures
from pytest_adapt.matrix import (
    AXES,
    PRECISIONS,
    PROFILES,
    Cell,
    Mark,
    Matrix,
    declined,
    github_jobs,
    make_matrix,
    read_mark,
)
from pytest_adapt.open_target import OpenTarget
from pytest_adapt.options import Settings, read_settings
from pytest_adapt.references import References
from pytest_adapt.report.collector import SHARED_QUOTAS, Collector
from pytest_adapt.session import Fatal, Host
from pytest_adapt.stash import RUN, STATE, WHOLE
from pytest_adapt.target.protocol import Deployment, TargetError
from pytest_adapt.verdict.ladder import rung_of
from pytest_adapt.verdict.result import RUNGS, CaseResult, Measurement, Status
from pytest_adapt.verdict.status import EXCUSES, TIMED, Verdict, outcome, required, verdict_of

if TYPE_CHECKING:
    from pytest_adapt.matrix import Model
    from pytest_adapt.perf.baseline import Baseline
    from pytest_adapt.target.protocol import Info
    from pytest_adapt.target.registry import TargetSpec
    from pytest_adapt.timebox import TimeBox
    from pytest_adapt.verdict.judge import Judge

__all__ = ["Runner", "print_matrix", "start"]

_NARROWING = ("models", "layouts", "precisions", "contexts", "observables")


def start(config: pytest.Config) -> None:
    """Resolve options and target, and register the active hooks. Raises pytest.UsageError."""
    settings, spec, matrix, baseline = _resolve(config)
    _share_cores()
    if settings.selftest:
        from pytest_adapt.selftest.runner import start as start_selftest

        start_selftest(config, settings)
        return
    runner = Runner(config, settings, spec, matrix, baseline)
    config.stash[RUN] = runner
    config.pluginmanager.register(runner, "adapt-runner")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(runner.collector, "adapt-collector")
    if settings.plan:
        config.option.dist = "no"
        config.option.tx = []


def _share_cores() -> None:
    """Give each xdist worker its share of the cores and let idle OpenMP threads sleep: this must be said before a
    framework is imported. What the user has set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


def print_matrix(config: pytest.Config) -> int:
    """Write the CI matrix to standard output; the exit code."""
    print(github_jobs(_resolve(config)[2]))
    return 0


def _resolve(config: pytest.Config) -> tuple[Settings, TargetSpec, Matrix, Baseline | None]:
    from pytest_adapt.target.registry import builtin_registry

    settings = read_settings(config)
    registry = builtin_registry()
    config.hook.pytest_adapt_register_targets(registry=registry)
    try:
        spec = registry.resolve(settings.target, rootdir=config.rootpath, mode=settings.mode)
        if settings.reference:
            registry.resolve(settings.reference, rootdir=config.rootpath)
    except TargetError as error:
        raise pytest.UsageError(str(error)) from None
    if settings.inject:
        from pytest_adapt.faults.registry import UnknownFault, get

        try:
            get(settings.inject)
        except UnknownFault as error:
            raise pytest.UsageError(f"--adapt-inject: {error}") from None
    if settings.op:
        from pytest_adapt.operators import CaseError, parse_case

        try:
            case = parse_case(settings.op)
        except CaseError as error:
            raise pytest.UsageError(f"--adapt-op: {error}") from None
        settings = replace(settings, precisions=(case.precision,))
    return settings, spec, make_matrix(settings, spec), baseline_of(config, settings, spec, registry)


class Runner:
    """State and hooks of one active run (on each xdist worker and on the controller)."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        spec: TargetSpec,
        matrix: Matrix,
        baseline: Baseline | None = None,
    ) -> None:
        from pytest_adapt.verdict.waiver import read_waivers

        self.config = config
        self.settings = settings
        self.spec = spec
        self.matrix = matrix
        self.host = Host(spec, settings)
        self.kind = settings.require or spec.kind
        shared = getattr(config, "workerinput", {}).get(SHARED_QUOTAS)
        waivers = config.rootpath / settings.waivers
        self.waivers = read_waivers(waivers, Path(shared) if shared else None) if settings.waivers else None
        self.collector = Collector(self)
        self.heartbeat = Heartbeat(lambda: self.host.doing, silent=getattr(config.option, "verbose", -2) <= -2)
        self.references = References(self)
        self.gating = Gating(self, baseline)
        self.make_handle: Callable[[Model, Path], ModelHandle] = ModelHandle
        self.under_xdist = hasattr(config, "workerinput")
        started: dict[str, Any] = getattr(config, "workerinput", {})
        self.program = shipped.program(
            started.get("mainargv", sys.argv)[0], sys.executable, Path(config.invocation_params.dir)
        )
        self._handles: dict[str, ModelHandle] = {}
        self._marks: dict[int, tuple[pytest.Mark, Mark]] = {}
        self._cells: list[Cell] = []
        self._shown_cell: Cell | None = None
        self._blocked: dict[tuple[str, str, str], str] = {}
        self._opened_before = 0.0
        self.time_box: TimeBox | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing is left out of what the repository's own settings hold: no path, no selection, whole axes."""
        option = self.config.option
        selected = [getattr(option, name, None) for name in ("keyword", "markexpr", "deselect", "lf", "stepwise")]
        narrowed = [name for name in _NARROWING if self.settings.sources.get(name) in ("command line", "environment")]
        return self.config.stash.get(WHOLE, False) and not any(selected) and not narrowed

    # collection

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        return shipped.SuiteModule.make(module_path, parent) if shipped.is_suite_file(module_path) else None

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        patterns = self.config.getini("python_files")
        usual = parent.session.isinitpath(file_path) or any(fnmatch.fnmatch(file_path.name, one) for one in patterns)
        return None if usual or not shipped.is_suite_file(file_path) else shipped.SuiteModule.make(file_path, parent)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = metafunc.fixturenames
        if self.under_xdist and shipped.suite_of(metafunc.definition.path):
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
        items[:] = [*others, *kept]
        self.gating.items = kept
        self._cells = sorted(cells, key=lambda cell: _cell_key(cell, order))

    def _boxed(self, items: list[pytest.Item], gone: list[pytest.Item]) -> list[pytest.Item]:
        """The items that --adapt-time has room for; the others are added to ``gone``."""
        from pytest_adapt.timebox import open_box

        kept, self.time_box = open_box(self, items)
        chosen = set(kept)
        gone += [item for item in items if item not in chosen]
        return kept

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        count = sum(STATE in item.stash for item in items)
        cells = {item.stash[STATE].cell for item in items if STATE in item.stash} - {None}
        lines = [f"adapt: {count} cases on {len(cells)} deployments"] if count else []
        return lines + [f"adapt: {line}" for line in self.time_box.lines()] if self.time_box else lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if not self.settings.plan or session.config.option.collectonly:
            return None
        if session.testsfailed:
            return None
        from pytest_adapt.report.plan import plan_lines

        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        for line in plan_lines(self, session.items):
            terminal.write_line(line) if terminal else print(line)
        return True

    # one item

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        state = item.stash.get(STATE, None)
        if state is None:
            return (yield)
        self._opened_before = self.host.usage.open_seconds
        state.serial = item.get_closest_marker("adapt_serial") is not None
        state.required = self._required(state)
        state.requirements = tuple(
            sorted({int(number) for mark in item.iter_markers("requirement") for number in mark.args})
        )
        self._announce(state.cell)
        reached = self.host.reached
        self.heartbeat.begin(state.case)
        try:
            result = yield
        finally:
            self.heartbeat.end()
        if self.host.reached > reached and state.cell is not None:
            self.collector.exercised.add((state.cell.model, state.cell.layout))
        item.stash[STATE] = replace(item.stash[STATE], evidence=None, last=None, first=None)
        following = nextitem.stash.get(STATE, None) if nextitem is not None else None
        if following is None or following.cell != state.cell:
            self.host.close()
        if self.host.fatal:
            cause, name = self.host.fatal.partition("\n")[0], f"target {self.spec.text}: "
            item.session.shouldstop = name + cause.removeprefix(name)
            self.collector.fatal = self.host.fatal
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        state = item.stash.get(STATE, None)
        if state is None:
            return (yield)
        state.begin()
        self.host.deadline = time.monotonic() + self.settings.timeout
        # Our fixtures raise what is pending; it becomes a verdict in the call phase.
        state.pending = self._gate(state)
        try:
            yield
        except Exception as error:
            if verdict_of(error) is None:
                raise
            state.pending = error
        return None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        state = pyfuncitem.stash.get(STATE, None)
        if state is None:
            return (yield)
        try:
            if state.pending is not None:
                raise state.pending
            if state.target is not None:
                state.target.check()
            result = yield
            self._conclude(state)
            if state.standing() is None:
                return result
            verdict: tuple[Status, str] | None = None
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            verdict = self._kept_from_hiding(state, error) or _verdict(error)
            if isinstance(error, pytest.skip.Exception) and verdict is None and state.first is None:
                raise
            waiver = self.waivers.find(state.case) if verdict is None and self.waivers else None
            if verdict is None and waiver is None and state.first is None:
                raise
            state.required &= not getattr(error, "optional", False) or self.kind == "release"
            if verdict is None and waiver is not None:
                verdict = (Status.WAIVED, f"{type(error).__name__}: {error} ({waiver})")
                state.waiver = waiver.number
            elif verdict is None:
                verdict = (Status.FAIL, f"{type(error).__name__}: {error}")
        # Outside the handler, so that pytest shows no chain of exceptions.
        verdict = state.standing() or verdict
        assert verdict is not None
        self._end(state, *verdict)
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        state = item.stash.get(STATE, None)
        if state is None:
            return report
        state.observe(report)
        if report.when == "teardown":
            state.open_seconds = self.host.usage.open_seconds - self._opened_before
            case = state.result()
            report.__dict__[CASE] = case_to_json(case)
            report.user_properties.extend(_properties(case))
            item.stash[STATE] = replace(state, judge=None, target=None, model=None, reference=None, last=case)
            if state.mark.blocks and state.cell is not None and case.status in (Status.FAIL, Status.ERROR):
                self._blocked.setdefault((case.model, case.layout, case.precision), case.case)
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.host.close()
        self.references.close()
        self.gating.close()
        if self.under_xdist:
            self.config.workeroutput["adapt"] = self.collector.outgoing()  # type: ignore[attr-defined]

    def pytest_unconfigure(self) -> None:
        self.heartbeat.close()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if config.getvalue("dist") != "load":
            return None
        from pytest_adapt.scheduler import DeploymentScheduling

        return DeploymentScheduling(config, log)

    # what the fixtures ask for

    def model(self, item: pytest.Item, name: str) -> ModelHandle:
        state = item.stash[STATE]
        if state.pending is not None:
            raise state.pending
        if name not in self._handles:
            made = self.matrix.models.get(name)
            if made is None:  # parametrised by the test itself
                alone = replace(self.settings, models=(name,), contexts=())
                made = next(iter(make_matrix(alone, self.spec).models.values()))
            self._handles[name] = self.make_handle(made, self.config.rootpath / ".adapt" / "models")
        handle = self._handles[name]
        handle.context = state.context or None
        handle.most = self.matrix.prompts.get(name, 0)
        handle.only = self.settings.prompt
        handle.floor = self.matrix.floor(name, state.context) if state.context else 0
        state.model = handle
        return handle

    def deployment(self, item: pytest.Item, model: ModelHandle, layout: str, precision: str) -> Deployment:
        named = self.matrix.models.get(model.name)
        if named is not None and (reason := declined(named, layout, self.spec)):
            raise Verdict(Status.UNSUPPORTED, reason)
        model.refuse_illegal(layout)
        mark = item.stash[STATE].mark
        return Deployment(
            model=str(model.directory),
            layout=layout,
            precision=precision,
            max_context=self.matrix.max_context(model.name),
            taps=mark.taps,
            features=mark.settings,
        )

    def target(self, item: pytest.Item, deployment: Deployment) -> OpenTarget:
        state = item.stash[STATE]
        info = self.host.info
        for name, _ in state.mark.features:
            if info is not None and name not in info.features:
                raise Verdict(Status.UNSUPPORTED, f"feature {name}: not declared by the target")
        made = OpenTarget(self.host, deployment, state.mark)
        made.check()
        state.target = made
        return made

    def reference(self, item: pytest.Item, model: ModelHandle) -> Any:
        state = item.stash[STATE]
        made = self.references.get(model, state.cell.precision if state.cell else "fp32", state.case)
        state.reference = made
        state.proposed = len(getattr(made, "proposed", ()))
        return made

    def judge(self, item: pytest.Item, precision: str, info: Info | None) -> Any:
        from pytest_adapt.verdict.judge import Judge

        state = item.stash[STATE]
        rounds, router = ("eager", "fp32") if info is None else (info.rounds, info.router)
        made = Judge(precision, rounds=rounds, router=router, evidence=state.evidence)
        state.judge, state.evidence = made, made.evidence
        return made

    # verdicts

    def _gate(self, state: ItemState) -> Verdict | Fatal | None:
        """Why an item is not run at all."""
        if self.host.fatal:
            return Verdict(Status.BLOCKED, f"the target cannot be used: {self.host.fatal.partition(chr(10))[0]}")
        if state.serial and self.under_xdist:
            return Verdict(Status.DEFERRED, f"{TIMED}: {self.command_of(state)}")
        if left := self.gating.left_for_later(state.mark.tier):
            return Verdict(Status.DEFERRED, left, optional=True)
        cell = state.cell
        cause = self._blocked.get((cell.model, cell.layout, cell.precision)) if cell is not None else None
        return Verdict(Status.BLOCKED, f"not run after {cause}") if cause else None

    def _conclude(self, state: ItemState) -> None:
        """The judge's verdict on an item whose test function returned. Raises Verdict."""
        judge = state.judge
        proposed = getattr(state.reference, "proposed", [])[state.proposed :]
        self.references.observe(state)
        if judge is not None and judge.undecided:
            raise Verdict(Status.UNKNOWN, judge.message())
        if judge is not None and judge.inconclusive:
            raise Verdict(Status.INCONCLUSIVE, judge.message())
        if judge is not None and judge.failures():
            raise Verdict(*self._failed(state, judge))
        if proposed:
            raise Verdict(Status.NEW, f"proposed {len(proposed)} records ({proposed[0]} ...): review them")
        if judge is None and state.suite:
            raise Verdict(Status.ERROR, "the test compared nothing: it has no judge")
        if judge is not None and not sum(one.compared for one in judge.measurements):
            raise Verdict(
                Status.ERROR,
                "the test compared nothing: the judge was not asked, or no prompt fitted, or no row was certain",
            )

    def _failed(self, state: ItemState, judge: Judge) -> tuple[Status, str]:
        self._localise(state)
        self.references.keep_observed(state)
        return Status.FAIL, judge.message()

    def _kept_from_hiding(self, state: ItemState, error: BaseException) -> tuple[Status, str] | None:
        """The failure of an item that ended otherwise after its judge had found one: a feature that is missing, or a
        skip, excuses nothing that was compared before."""
        judge, verdict = state.judge, verdict_of(error)
        excuse = isinstance(error, pytest.skip.Exception) or (verdict is not None and verdict[0] in EXCUSES)
        if judge is None or not excuse or judge.undecided or judge.inconclusive or not judge.failures():
            return None
        status, message = self._failed(state, judge)
        return status, f"{message}\nthe item would have ended {verdict[0].value if verdict else 'skipped'}: {error}"

    def _localise(self, state: ItemState) -> None:
        failures = state.judge.failures()
        if getattr(state.judge, "divergence", None) is not None or not any(one.observable for one in failures):
            return
        from pytest_adapt.localisation import first_divergence
        from pytest_adapt.shortest import shortest_prefix

        state.divergence = first_divergence(state)
        state.prefix = shortest_prefix(state)

    def _end(self, state: ItemState, status: Status, reason: str) -> None:
        """Give pytest the outcome of a status."""
        state.status, state.reason = status, reason.partition("\n")[0]
        shown = outcome(status, state.required)
        if shown == "failed":
            waiver = self.waivers.find(state.case) if self.waivers else None
            if waiver is not None:
                state.status, state.reason = Status.WAIVED, f"{state.reason} ({waiver})"
                state.waiver = waiver.number
                pytest.xfail(f"waived: {waiver}")
            self._dump(state)
            pytest.fail(self._message(state, status, reason), pytrace=False)
        if shown == "skipped":
            pytest.skip(f"{status}: {reason.partition(chr(10))[0]}")
        if shown == "xfailed":
            pytest.xfail(f"{status}: {state.reason}")

    def _message(self, state: ItemState, status: Status, reason: str) -> str:
        lines = [state.case if status is Status.FAIL else f"{status}: {state.case}", reason]
        if state.divergence is not None:
            lines.append(f"first divergence: {state.divergence}")
        if state.prefix is not None:
            lines.append(f"shortest: {state.prefix}")
        lines.append(f"repeat: {self.command_of(state)}")
        return "\n".join(lines)

    def _dump(self, state: ItemState) -> None:
        if self.settings.dump and state.target is not None and state.target.responses:
            from pytest_adapt.report.dump import dump_responses

            directory = self.config.invocation_params.dir / self.settings.dump
            dump_responses(directory, state.case, state.target.responses)

    def command_of(self, case: CaseResult | ItemState) -> str:
        """The command line that repeats one case."""
        file, _, rest = case.nodeid.partition("::")
        here = Path(self.config.invocation_params.dir)
        path = case.case.partition("::")[0] if case.suite else shipped.relative(self.config.rootpath / file, here)
        narrowed = () if case.prefix is None else (case.prefix.argument,)
        given = self.settings.arguments(without=("time", "strength", *(("prompt",) if narrowed else ())))
        return shlex.join([*self.program, *given, *narrowed, f"{path}::{rest}"])

    @property
    def timing_command(self) -> str:
        """The command line that runs what measures time, and nothing else."""
        return shlex.join([*self.program, *self.settings.arguments(), "-m", "adapt_serial"])

    def _required(self, state: ItemState) -> bool:
        model = self.matrix.models.get(state.cell.model) if state.cell else None
        if not state.mark.required:
            return False
        if self.settings.gate and state.mark.tier:
            return True
        entry = model.entry if model else None
        return required(
            self.kind,
            rung=state.rung,
            needs=state.mark.needs,
            serial=state.serial,
            profile=self.settings.profile,
            suite=state.suite,
            must_pass=entry.must_pass if entry else None,
        )

    def _announce(self, cell: Cell | None) -> None:
        """One line when the next deployment begins."""
        if cell is None or cell == self._shown_cell or self.under_xdist:
            return
        self._shown_cell = cell
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if terminal is None or self.config.option.verbose < 0:
            return
        number = self._cells.index(cell) + 1 if cell in self._cells else 0
        terminal.ensure_newline()
        terminal.write_line(f"[{number}/{len(self._cells)}] {cell}", bold=True)

    def _mark(self, node: pytest.Item, where: str) -> Mark:
        return self._read(node.get_closest_marker("adapt"), where)

    def _read(self, marker: pytest.Mark | None, where: str) -> Mark:
        if marker is None:
            return _PLAIN
        if id(marker) not in self._marks:
            self._marks[id(marker)] = (marker, read_mark([marker], where))
        return self._marks[id(marker)][1]

    def _left_out(self, mark: Mark) -> bool:
        """Whether the profile is too small for a test, or this run is the gate's and the test is not, or the other way
        round. Counters are part of both."""
        if mark.tier in ("times", "instructions") and not self.settings.gate or self.settings.gate and not mark.tier:
            return True
        sizes = list(PROFILES)
        return sizes.index(mark.profile) > sizes.index(self.settings.profile)


_PLAIN = Mark()


def _verdict(error: BaseException) -> tuple[Status, str] | None:
    """Status and reason of an exception that is no ordinary failure of the test function."""
    if isinstance(error, TargetError):
        return Status.FAIL, str(error)
    if type(error).__name__ == "OracleError":  # not imported: it may never be needed
        return Status.UNKNOWN, f"the oracle cannot judge this model: {error}"
    return verdict_of(error)


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


def _properties(case: CaseResult) -> list[tuple[str, object]]:
    """What JUnit's own option writes: case, status, and how much of each budget was used at most."""
    found: list[tuple[str, object]] = [("adapt_case", case.case), ("adapt_status", case.status.value)]
    if case.reason:
        found.append(("adapt_reason", case.reason))
    if case.divergence is not None:
        found.append(("adapt_divergence", str(case.divergence)))
    worst: dict[str, Measurement] = {}
    for one in case.measurements:
        if one.metric not in worst or one.use > worst[one.metric].use:
            worst[one.metric] = one
    found += [(f"adapt_metric.{name}", f"{one.value:.6g} of {one.budget:.6g}") for name, one in sorted(worst.items())]
    return found
