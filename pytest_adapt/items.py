"""What the plugin knows about one item: its cell before it runs, its status while it runs, its CaseResult after."""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.matrix import Cell, Mark
from pytest_adapt.verdict.result import CaseResult, Divergence, Figure, Measurement, Prefix, Status

if TYPE_CHECKING:
    from pytest_adapt.handle import ModelHandle
    from pytest_adapt.session import OpenTarget

__all__ = [
    "CASE",
    "FIXTURES",
    "ItemState",
    "case_from_json",
    "case_to_json",
    "is_ours",
    "peak_bytes",
    "replaced_fixture",
    "uses_fixtures",
]

FIXTURES = ("model", "layout", "precision", "context_length", "deployment", "target", "reference", "judge", "stopwatch")


CASE = "adapt_case"
"""Attribute of a teardown report under which a case travels from an xdist worker."""


@dataclass
class ItemState:
    """One item of the run. ``status`` stays None until something other than pytest decides it."""

    case: str
    nodeid: str
    suite: str
    rung: str
    mark: Mark
    cell: Cell | None
    context: int
    required: bool
    serial: bool
    requirements: tuple[int, ...]
    status: Status | None = None
    reason: str = ""
    pending: BaseException | None = None
    """What ended the set-up; raised in the call phase, where an outcome of pytest's is a verdict."""
    judge: Any = None
    target: OpenTarget | None = None
    model: ModelHandle | None = None
    reference: Any = None
    proposed: int = 0
    """Records that the reference had proposed before this item."""
    divergence: Divergence | None = None
    prefix: Prefix | None = None
    seconds: float = 0.0
    phases: dict[str, str] = field(default_factory=dict)

    def observe(self, report: pytest.TestReport) -> None:
        """Take note of one phase's outcome, as pytest saw it."""
        self.seconds += report.duration
        self.phases[str(report.when)] = report.outcome
        known = hasattr(report, "wasxfail")
        if known and report.skipped and self.status is not Status.WAIVED:
            self.status = Status.XFAIL
            self.reason = self.reason or str(getattr(report, "wasxfail", ""))
        elif report.failed and report.when != "call" and self.status is None:
            self.status, self.reason = Status.ERROR, _last_line(report)
        elif report.failed and self.status is None:
            self.status, self.reason = Status.FAIL, _last_line(report)
        elif report.skipped and self.status is None:
            self.status, self.reason = Status.UNSUPPORTED, _last_line(report)

    def result(self) -> CaseResult:
        """What the item came to."""
        judge = self.judge
        divergence = self.divergence or getattr(judge, "divergence", None)
        used = set(getattr(judge, "observables", ()) or ()) or (self.target.observables_used if self.target else set())
        cell = self.cell
        return CaseResult(
            case=self.case,
            status=self.status or Status.PASS,
            suite=self.suite,
            rung=self.rung,
            required=self.required,
            model=cell.model if cell else "",
            layout=cell.layout if cell else "",
            precision=cell.precision if cell else "",
            context=self.context,
            observable="+".join(name for name in ("taps", "logits", "score", "topk", "text") if name in used),
            reason=self.reason,
            measurements=list(getattr(judge, "measurements", ())),
            figures=list(getattr(judge, "figures", ())),
            divergence=divergence,
            prefix=self.prefix,
            requirements=self.requirements,
            seconds=self.seconds,
            peak_bytes=peak_bytes(),
            nodeid=self.nodeid,
        )


def uses_fixtures(names: Iterable[str], definitions: Mapping[str, Any]) -> bool:
    """Whether a test asks for one of our fixtures (a user's own fixture of the same name does not count)."""
    return any(name in definitions and is_ours(definitions[name]) for name in names if name in FIXTURES)


def is_ours(definitions: Any) -> bool:
    """Whether the fixture that wins among these definitions is the plugin's."""
    return bool(definitions) and getattr(definitions[-1].func, "__module__", "") == "pytest_adapt.fixtures"


def replaced_fixture(definitions: Mapping[str, Any], start: str) -> str:
    """One line that says where one of our fixtures was replaced for a shipped test, with paths from ``start``; ""
    where none was. What takes its place would be believed: a judge that compares nothing makes every case green."""
    for name in FIXTURES:
        found = definitions.get(name)
        if not found or is_ours(found):
            continue
        function = inspect.unwrap(found[-1].func)
        code = getattr(function, "__code__", None)
        if code is None or function.__module__.startswith("_pytest."):  # a value given by parametrize
            where = "a pytest_generate_tests hook"
        else:
            where = f"{os.path.relpath(code.co_filename, start)}:{code.co_firstlineno}"
        return f"{where} redefines fixture {name!r}, which the shipped suites use; rename it"
    return ""


def peak_bytes() -> int:
    """Largest resident size of this process so far, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def case_to_json(case: CaseResult) -> str:
    """Text that survives the way from an xdist worker (numpy scalars become numbers)."""
    return json.dumps(asdict(case), default=lambda value: value.item() if hasattr(value, "item") else str(value))


def case_from_json(text: str) -> CaseResult:
    """The inverse of `case_to_json`."""
    raw = json.loads(text)
    raw["status"] = Status(raw["status"])
    raw["measurements"] = [Measurement(**one) for one in raw["measurements"]]
    raw["figures"] = [Figure(**{**one, "samples": tuple(one["samples"])}) for one in raw["figures"]]
    if found := raw["divergence"]:
        lists = {name: tuple(found[name]) for name in ("element", "ranks")}
        raw["divergence"] = Divergence(**{**found, **lists})
    if found := raw["prefix"]:
        raw["prefix"] = Prefix(**found)
    raw["requirements"] = tuple(raw["requirements"])
    return CaseResult(**{name.name: raw[name.name] for name in fields(CaseResult)})


def _last_line(report: pytest.TestReport) -> str:
    """The line of a report that says what went wrong."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    text = str(getattr(crash, "message", None) or longrepr or "")
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
