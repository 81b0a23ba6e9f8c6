"""The hooks of an active run: rows for tests, one deployment after the other, verdicts into pytest's outcomes."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt import shipped
from pytest_adapt.collection import Collection
from pytest_adapt.gating import Gating
from pytest_adapt.handle import ModelHandle
from pytest_adapt.heartbeat import Heartbeat
from pytest_adapt.items import CASE, ItemState, case_to_json
from pytest_adapt.matrix import (
    Cell,
    Matrix,
    declined,
    make_matrix,
)
from pytest_adapt.open_target import OpenTarget
from pytest_adapt.options import Settings
from pytest_adapt.references import References
from pytest_adapt.report.collector import SHARED_QUOTAS, Collector
from pytest_adapt.session import Fatal, Host
from pytest_adapt.stash import STATE, WHOLE
from pytest_adapt.target.protocol import Deployment, TargetError
from pytest_adapt.verdict.result import CaseResult, Measurement, Status
from pytest_adapt.verdict.status import EXCUSES, TIMED, Verdict, outcome, required, verdict_of

if TYPE_CHECKING:
    from pytest_adapt.localisation import Known
    from pytest_adapt.matrix import Model
    from pytest_adapt.perf.baseline import Baseline
    from pytest_adapt.target.protocol import Info
    from pytest_adapt.target.registry import TargetSpec
    from pytest_adapt.verdict.judge import Judge

__all__ = ["Runner"]

_NARROWING = ("models", "layouts", "precisions", "contexts", "observables")


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
        self.kind = self.host.kind
        shared = getattr(config, "workerinput", {}).get(SHARED_QUOTAS)
        waivers = config.rootpath / settings.waivers
        self.waivers = read_waivers(waivers, Path(shared) if shared else None) if settings.waivers else None
        self.collection = Collection(self)
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
        self._shown_cell: Cell | None = None
        self._blocked: dict[tuple[str, str, str], str] = {}
        self._divergences: Known = {}
        self._opened_before = 0.0

    @property
    def whole(self) -> bool:
        """Whether nothing is left out of what the repository's own settings hold: no path, no selection, whole axes."""
        narrowed = [name for name in _NARROWING if self.settings.sources.get(name) in ("command line", "environment")]
        return self.config.stash.get(WHOLE, False) and not self.selected and not narrowed

    @property
    def selected(self) -> bool:
        """Whether single cases were picked, by an option of pytest's or by a case id."""
        option = self.config.option
        picked = [getattr(option, name, None) for name in ("keyword", "markexpr", "deselect", "lf", "stepwise")]
        return any(picked) or any("::" in word for word in self.config.args)

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
        standing = judge.standing() if judge is not None else Status.PASS
        if standing is Status.FAIL:
            raise Verdict(*self._failed(state, judge))
        if standing is not Status.PASS:
            raise Verdict(standing, judge.message())
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
        if judge is None or not excuse or judge.standing() is not Status.FAIL:
            return None
        status, message = self._failed(state, judge)
        return status, f"{message}\nthe item would have ended {verdict[0].value if verdict else 'skipped'}: {error}"

    def _localise(self, state: ItemState) -> None:
        failures = state.judge.failures()
        if getattr(state.judge, "divergence", None) is not None or not any(one.observable for one in failures):
            return
        from pytest_adapt.localisation import first_divergence
        from pytest_adapt.shortest import shortest_prefix

        state.divergence = first_divergence(state, self._divergences)
        found = shortest_prefix(state)
        state.prefix, state.no_prefix = (None, found) if isinstance(found, str) else (found, "")

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
        if shortest := state.prefix or state.no_prefix:
            lines.append(f"shortest: {shortest}")
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
        number = self.collection.cells.index(cell) + 1 if cell in self.collection.cells else 0
        terminal.ensure_newline()
        terminal.write_line(f"[{number}/{len(self.collection.cells)}] {cell}", bold=True)


def _verdict(error: BaseException) -> tuple[Status, str] | None:
    """Status and reason of an exception that is no ordinary failure of the test function."""
    if isinstance(error, TargetError):
        return Status.FAIL, str(error)
    if type(error).__name__ == "OracleError":  # not imported: it may never be needed
        return Status.UNKNOWN, f"the oracle cannot judge this model: {error}"
    return verdict_of(error)


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
