"""Gathers the cases of a run where reports are written: in the only process, or on the xdist controller."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.items import CASE, case_from_json, peak_bytes
from pytest_adapt.options import shown_variables
from pytest_adapt.verdict.result import CaseResult, Status
from pytest_adapt.verdict.status import PASSED

if TYPE_CHECKING:
    from pytest_adapt.runner import Runner
    from pytest_adapt.verdict.ladder import Ladder
    from pytest_adapt.verdict.waiver import Use

__all__ = ["SHARED_QUOTAS", "Collector"]

SHARED_QUOTAS = "adapt_waivers"
"""Key of an xdist worker's input: the folder in which the workers of one run count the use of waivers together."""

_FATAL = 4


class Collector:
    """Cases in order of arrival, and the hooks that write the header, the summary and the files."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.cases: list[CaseResult] = []
        self.fatal = ""
        self.target: dict[str, Any] = {}
        self.usage: dict[str, float] = {}
        self.peak_bytes = 0
        self.time_box: dict[str, Any] = {}
        """What was chosen for --adapt-time: ``lines`` of the terminal, and what report.json holds."""
        self.written = ""
        self.waived: list[Use] = []
        """What each waiver came to; empty while the run goes on."""
        self._quotas: tempfile.TemporaryDirectory[str] | None = None
        self.exercised: set[tuple[str, str]] = set()
        """(model, layout) on which what the fault of this run replaced was called."""
        self.document: dict[str, Any] = {}
        """What was written to report.json."""
        self._started = time.monotonic()
        self._pending = {note.name: note.stat().st_mtime_ns for note in self._pending_folder.glob("*.json")}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def useless_waivers(self) -> bool:
        """Whether a waiver fails the run: it has expired, or no case needed it."""
        from pytest_adapt.verdict.waiver import FAILING

        return any(one.state in FAILING for one in self.waived)

    @property
    def ladder(self) -> Ladder:
        """How far the target can be trusted, by the cases so far."""
        from pytest_adapt.verdict.ladder import climb

        absent = () if self.runner.spec.axes else ("layouts",)
        narrowed = self.runner.selected or bool(self.time_box.get("not_run"))
        return climb(self.cases, self.runner.settings.profile, absent, narrowed=narrowed)

    def outgoing(self) -> dict[str, Any]:
        """What a worker sends to the controller: plain values only."""
        self._take_own()
        return {
            "fatal": self.fatal,
            "target": self.target,
            "usage": self.usage,
            "peak_bytes": self.peak_bytes,
            "exercised": sorted(self.exercised),
            "time_box": self.time_box,
        }

    def pytest_report_header(self) -> list[str]:
        settings = self.runner.settings
        given = [
            f"{name}={_short(getattr(settings, name))}"
            for name in sorted(settings.sources)
            if name not in ("target", "profile", "plan")
        ]
        from pytest_adapt import __version__

        head = f"adapt {__version__}: target {settings.target}, profile {settings.profile}, requires {self.runner.kind}"
        variables = shown_variables(os.environ)
        second = "; ".join(filter(None, [", ".join(given), " ".join(variables)]))
        return [head, *([f"adapt: {second}"] if second else []), *self.runner.gating.header()]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = getattr(report, CASE, None)
        if text is not None:
            self._finished(case_from_json(text))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """An xdist worker died: the item that it ran has no verdict of its own."""
        from pytest_adapt.scheduler import scope_of
        from pytest_adapt.verdict.ladder import rung_of

        model, *cell = scope_of(crashitem).rsplit("-", 2)
        if len(cell) == 2:  # else it is no test of a deployment
            suite = crashitem.partition("/")[0]
            self._finished(
                CaseResult(
                    case=crashitem,
                    status=Status.ERROR,
                    suite=suite,
                    rung=rung_of(suite, None),
                    model=model,
                    layout=cell[0],
                    precision=cell[1],
                    reason=f"the process that ran it died: {report.longrepr}",
                    nodeid=crashitem,
                )
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if self.runner.waivers is None:
            return
        if self._quotas is None:
            self._quotas = tempfile.TemporaryDirectory(prefix="adapt-waivers-")
        node.workerinput[SHARED_QUOTAS] = self._quotas.name

    def pytest_unconfigure(self) -> None:
        if self._quotas is not None:
            self._quotas.cleanup()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {}).get("adapt", {})
        self.fatal = self.fatal or sent.get("fatal", "")
        self.target = self.target or sent.get("target", {})
        self.peak_bytes = max(self.peak_bytes, sent.get("peak_bytes", 0))
        self.exercised.update((model, layout) for model, layout in sent.get("exercised", ()))
        self.time_box = self.time_box or sent.get("time_box", {})
        for name, value in sent.get("usage", {}).items():
            self.usage[name] = self.usage.get(name, 0) + value

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._take_own()
        if self.fatal:
            session.exitstatus = _FATAL
        elif (
            self.cases
            and session.exitstatus == pytest.ExitCode.OK
            and (not any(case.status in PASSED for case in self.cases) or not self.fault_report()[0])
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._judge_waivers(session)
        if self.cases:
            from pytest_adapt.report.json import write_report

            self.written = write_report(self, int(session.exitstatus))
            self._keep_headroom()
            self._keep_trend()
            self._distrust_pending(session)
            self._learn()

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from pytest_adapt.report.terminal import write_summary

        if self.cases or self.fatal:
            write_summary(terminalreporter, self)

    def fault_report(self) -> tuple[bool, str]:
        """Whether the fault of this run was exercised, and a line about it where nothing is red.

        Exercised: what it replaced was called, on a model and a layout on which it is no rewording of the original.
        True and "" without a fault.
        """
        if not self.runner.settings.inject:
            return True, ""
        from pytest_adapt.faults.registry import get
        from pytest_adapt.verdict.ladder import is_red

        fault = get(self.runner.settings.inject)
        command = shlex.join([*self.runner.program, *shlex.split(fault.command)[1:]])
        red = any(map(is_red, self.cases))
        forgiven = [case for case in self.cases if case.status in (Status.WAIVED, Status.XFAIL)]
        known = any(model in fault.models and fault.layout in ("single", layout) for model, layout in self.exercised)
        # Elsewhere it may show as well: then something is red.
        if not self.exercised or not (red or forgiven or known):
            return False, f"fault {fault.id} was never exercised: it needs {fault.shows_on}: {command}"
        if red:
            return True, ""
        if forgiven:
            counts = " and ".join(
                f"{number} {status}"
                for status in (Status.WAIVED, Status.XFAIL)
                if (number := sum(case.status is status for case in forgiven))
            )
            return (
                True,
                f"fault {fault.id} was exercised; all that was red is a known failure ({counts})",
            )
        return (
            True,
            f"fault {fault.id} was exercised and nothing was red; it shows on {fault.shows_on}: {command}",
        )

    def _finished(self, case: CaseResult) -> None:
        if case.attempts > 1:  # the last attempt holds what the earlier ones came to
            self.cases = [one for one in self.cases if one.case != case.case]
        self.cases.append(case)
        self.runner.config.hook.pytest_adapt_case_finished(case=case)

    def _keep_headroom(self) -> None:
        """What each cell used of its budget, for `python -m pytest_adapt headroom`; a planted fault is no history."""
        from pytest_adapt.audit.headroom import FILE, append, uses_of

        settings, config = self.runner.settings, self.runner.config
        if settings.inject:
            return
        try:
            append(config.rootpath / FILE, settings.target, uses_of(self.cases))
        except OSError as error:
            warning = pytest.PytestWarning(f"adapt: cannot write {FILE}: {error}")
            config.issue_config_time_warning(warning, stacklevel=2)

    def _keep_trend(self) -> None:
        """What the gate compared, for `python -m pytest_adapt trend`."""
        try:
            self.runner.gating.keep_trend()
        except OSError as error:
            warning = pytest.PytestWarning(f"adapt: the trend of the gate cannot be written: {error}")
            self.runner.config.issue_config_time_warning(warning, stacklevel=2)

    @property
    def _pending_folder(self) -> Path:
        return self.runner.config.rootpath / ".adapt" / "pending"

    def _distrust_pending(self, session: pytest.Session) -> None:
        """What a run with errors proposes as golden records is not taken in: it may be half of the truth."""
        broken = session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self._pending_folder.is_dir() and (broken or any(case.status is Status.ERROR for case in self.cases)):
            from pytest_adapt.golden.record import RecordError
            from pytest_adapt.golden.review import distrust

            # A note that cannot be read, or that somebody rejects meanwhile, is not accepted either.
            with contextlib.suppress(RecordError, OSError):
                distrust(self._pending_folder, self._pending)

    def _judge_waivers(self, session: pytest.Session) -> None:
        """An entry that has expired, or that no case needed, fails the run."""
        from pytest_adapt.verdict.waiver import uses

        waivers = self.runner.waivers
        if waivers is None or not self.cases:
            return
        stopped = session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or session.shouldfail
        whole = self.runner.whole and not (stopped or session.shouldstop)
        self.waived = uses(waivers.entries, waivers.today, self.cases, whole=whole)
        if session.exitstatus == pytest.ExitCode.OK and self.useless_waivers:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _learn(self) -> None:
        """What this run cost, for the time boxes of later ones."""
        from pytest_adapt.timebox import costs_path, learn

        opens, tokens = self.usage.get("opens", 0), self.usage.get("tokens", 0)
        opening = self.usage["open_seconds"] / opens if opens else 0.0
        token = self.usage["run_seconds"] / tokens if tokens else 0.0
        learn(costs_path(self.runner), self.runner.settings.target, self.cases, opening, token)

    def _take_own(self) -> None:
        """Facts of this process (on an xdist controller there are none)."""
        host, box = self.runner.host, self.runner.collection.time_box
        if box is not None:
            self.time_box = {"lines": box.lines(), **box.to_json()}
        self.fatal = self.fatal or host.fatal
        self.peak_bytes = max(self.peak_bytes, peak_bytes() if host.usage.opens else 0)
        if host.usage.opens:
            self.usage = {name: float(value) for name, value in vars(host.usage).items()}
        if host.info is not None:
            info = host.info
            self.target = {
                "name": info.name,
                "version": info.version,
                "kind": info.kind,
                "observables": sorted(info.observables),
                "features": {name: list(levels) for name, levels in sorted(info.features.items())},
                "environment": {str(name): str(value) for name, value in info.environment.items()},
            }


def _short(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
