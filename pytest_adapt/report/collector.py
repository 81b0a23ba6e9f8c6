"""Gathers the cases of a run where reports are written: in the only process, or on the xdist controller."""

from __future__ import annotations

import os
import shlex
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.items import CASE, case_from_json, peak_bytes
from pytest_adapt.options import shown_variables
from pytest_adapt.verdict.result import CaseResult, Status

if TYPE_CHECKING:
    from pytest_adapt.runner import Runner
    from pytest_adapt.verdict.ladder import Ladder

__all__ = ["Collector"]

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
        self.written = ""
        self.document: dict[str, Any] = {}
        """What was written to report.json."""
        self.exercised: set[tuple[str, str]] = set()
        """(model, layout) on which what the fault of this run replaced was called."""
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def ladder(self) -> Ladder:
        """How far the target can be trusted, by the cases so far."""
        from pytest_adapt.verdict.ladder import climb

        one_rank = not self.runner.spec.axes
        return climb(self.cases, self.runner.settings.profile, ("layouts",) if one_rank else ())

    def outgoing(self) -> dict[str, Any]:
        """What a worker sends to the controller: plain values only."""
        self._take_own()
        return {
            "fatal": self.fatal,
            "target": self.target,
            "usage": self.usage,
            "peak_bytes": self.peak_bytes,
            "exercised": sorted(self.exercised),
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
        return [head, f"adapt: {second}"] if second else [head]

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
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {}).get("adapt", {})
        self.fatal = self.fatal or sent.get("fatal", "")
        self.target = self.target or sent.get("target", {})
        self.peak_bytes = max(self.peak_bytes, sent.get("peak_bytes", 0))
        self.exercised.update((model, layout) for model, layout in sent.get("exercised", ()))
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
            and (not any(case.status == "pass" for case in self.cases) or not self.fault_report()[0])
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.cases:
            from pytest_adapt.report.json import write_report

            self.written = write_report(self, int(session.exitstatus))

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from pytest_adapt.report.terminal import write_summary

        if self.cases or self.fatal:
            write_summary(terminalreporter, self)

    def fault_report(self) -> tuple[bool, str]:
        """Whether the fault of this run was exercised, and a line about it where nothing was red.

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
        known = any(model in fault.models and fault.layout in ("single", layout) for model, layout in self.exercised)
        # Elsewhere it may show as well: then something is red.
        if not self.exercised or not (red or known):
            return False, f"fault {fault.id} was never exercised: it needs {fault.shows_on}: {command}"
        if red:
            return True, ""
        return (
            True,
            f"fault {fault.id} was exercised and nothing was red; it shows on {fault.shows_on}: {command}",
        )

    def _finished(self, case: CaseResult) -> None:
        self.cases.append(case)
        self.runner.config.hook.pytest_adapt_case_finished(case=case)

    def _take_own(self) -> None:
        """Facts of this process (on an xdist controller there are none)."""
        host = self.runner.host
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
