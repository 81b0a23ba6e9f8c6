"""What the plugin knows about one item: its cell before it runs, its status while it runs, its CaseResult after."""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.matrix import Cell, Mark
from pytest_adapt.verdict.result import CaseResult, Divergence, Figure, Flips, Measurement, Prefix, Status
from pytest_adapt.verdict.status import GREEN

if TYPE_CHECKING:
    from pytest_adapt.handle import ModelHandle
    from pytest_adapt.open_target import OpenTarget

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

FIXTURES = (
    "model",
    "layout",
    "precision",
    "context_length",
    "deployment",
    "target",
    "reference",
    "judge",
    "stopwatch",
    "gate",
)


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
    waiver: int = 0
    """Number of the waiver that let it through."""
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
    no_prefix: str = ""
    """Why there is none, where one was sought."""
    seconds: float = 0.0
    open_seconds: float = 0.0
    phases: dict[str, str] = field(default_factory=dict)
    attempts: int = 0
    """How often the item began: more than once where another plugin reruns it."""
    last: CaseResult | None = None
    """What the attempt before this one came to."""
    first: CaseResult | None = None
    """Of a rerun item, the earliest result that was not green; it stands."""
    evidence: Any = None
    """What its attempts have sampled so far."""

    def begin(self) -> None:
        """A new attempt. What an earlier one came to stays if that was not green, unless it only lacked samples: those
        may be added."""
        self.attempts += 1
        if self.last is None:
            return
        if self.first is None and self.last.status not in GREEN and self.last.status is not Status.INCONCLUSIVE:
            self.first = self.last
        if self.evidence is not None:
            self.evidence.attempts = self.attempts - 1
        self.status, self.reason, self.pending, self.divergence = None, "", None, None
        self.phases = {}

    def standing(self) -> tuple[Status, str] | None:
        """The verdict of an earlier attempt, which stands whatever this one came to."""
        if self.first is None:
            return None
        how = f"run {self.attempts} times by another plugin: a rerun adds evidence, it forgives nothing"
        return self.first.status, f"{self.first.reason} ({how})"

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
        """What the item came to; of a rerun one, what the attempt whose verdict stands had measured."""
        standing = self.standing()
        if self.first is not None and standing is not None:
            status, reason = standing
            return replace(self.first, status=status, reason=reason, attempts=self.attempts, seconds=self.seconds)
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
            waiver=self.waiver,
            measurements=list(getattr(judge, "measurements", ())),
            figures=list(getattr(judge, "figures", ())),
            flips=list(getattr(judge, "flips", ())),
            divergence=divergence,
            attempts=max(1, self.attempts),
            prefix=self.prefix,
            no_prefix=self.no_prefix,
            requirements=self.requirements,
            seconds=self.seconds,
            open_seconds=self.open_seconds,
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
    raw["flips"] = [Flips(**one) for one in raw["flips"]]
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
