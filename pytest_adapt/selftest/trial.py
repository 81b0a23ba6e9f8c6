"""One fault in one precision: the suites run without it and with it, once for each observable, and what that shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pytest_adapt.documents import each, fields, named, real, text
from pytest_adapt.faults.matrix import KillMatrix
from pytest_adapt.faults.registry import Fault, Seams
from pytest_adapt.models import catalogue as models
from pytest_adapt.selftest.kept import Kept
from pytest_adapt.selftest.memo import Memory
from pytest_adapt.selftest.nested import Bench, Found, Setting
from pytest_adapt.sites import layer_of
from pytest_adapt.verdict.pattern import function_of
from pytest_adapt.verdict.result import CaseResult, Measurement, Status

__all__ = ["COLUMNS", "RedControl", "Row", "Trial", "control_of", "run_trial", "trial_of"]

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "taps": (),
    "topk": ("topk", "text"),
    "logits": ("logits", "text"),
    "score": ("score", "text"),
    "text": ("text",),
}
"""Observable -> what the target is masked to: a white box shows everything, and whatever else shows numbers writes
text as well."""
_MOST_MEASURED = 8
_LONGEST = 160
"""Characters of a text that is kept."""
_NEEDLE_CONTEXT = 1024
_OPERATORS = "operators"
_REPEAT = "determinism/test_repeat.py"
_CONTROL = fields({"statuses": named(text), "answers": named(text), "red": each(text), "seconds": real})

Row = dict[str, Any]


class RedControl(Exception):
    """The suites are red without any fault, so that red cases with one would prove nothing."""


@dataclass(frozen=True)
class Trial:
    """A fault on the model, layout and lengths on which it is in contract."""

    fault: Fault
    precision: str
    setting: Setting
    install: Callable[[Seams], None] | None = None
    """In place of the registered fault: the same one with smaller numbers."""

    @property
    def name(self) -> str:
        return f"{self.fault.id}[{self.precision}]"

    @property
    def declared(self) -> bool:
        """Whether the registry says that the fault shows in this precision."""
        return self.precision in self.fault.precisions


def trial_of(fault: Fault, precision: str) -> Trial:
    """The reduced case set of a fault: its first model, its layout, its lengths, the suites that judge such a model."""
    model = fault.models[0]
    contexts, install = fault.contexts, None
    suites: tuple[str, ...]
    if fault.reduced is not None:
        install, contexts = fault.reduced
    if models()[model].kind == "needle":
        suites = ("long_context", "stress") if fault.suite != "long_context" else ("long_context",)
        contexts = contexts or (_NEEDLE_CONTEXT,)
    else:
        # Bits over batches, cuts and ranks are asked for in a mode of their own: of the faults that live there alone.
        suites = ("correctness", "consistency", _REPEAT) if fault.layout == "single" else ("correctness",)
    if fault.suite not in suites:
        suites = (fault.suite, *suites)
    setting = Setting(model, fault.layout, precision, contexts, suites, fault="" if install else fault.id)
    return Trial(fault, precision, setting, install)


def run_trial(trial: Trial, bench: Bench, controls: Kept, columns: Iterable[str] = COLUMNS) -> dict[str, Row]:
    """Observable -> row of the kill matrix. Where no answer differs though everything is shown, or a sound engine has
    the same change, there is that row only. What no suite sees there, the operators alone are asked about: their
    values are not a model's, so they reach what a model's own values hide.

    Raises RedControl where a case is red without the fault.
    """
    rows: dict[str, Row] = {}
    healthy, faulty = Memory(), Memory()
    for column in columns:
        setting = replace(trial.setting, observables=COLUMNS[column], suites=_suites(trial.setting.suites, column))
        control = control_of(replace(setting, fault=""), bench, controls, healthy)
        found = bench.run(setting, faulty, trial.install)
        rows[column] = _row(trial, column, control, found)
        if column != "taps":
            continue
        if not KillMatrix.counts(rows[column]):
            break
        if not rows[column]["killed"]:
            alone = replace(setting, suites=(_OPERATORS,))
            control_of(replace(alone, fault=""), bench, controls, healthy)
            found.cases += (apart := bench.run(alone, faulty, trial.install)).cases
            found.seconds += apart.seconds
            rows[column] = _row(trial, column, control, found)
    return rows


def _suites(suites: tuple[str, ...], column: str) -> tuple[str, ...]:
    """Bits are compared once: a weaker observable shows fewer of them."""
    kept = tuple(suite for suite in suites if suite != _REPEAT or column == "taps")
    return kept or suites


def control_of(setting: Setting, bench: Bench, controls: Kept, memory: Memory) -> Mapping[str, Any]:
    """Statuses and digests of the same cases without a fault: measured once, then kept. Raises RedControl."""
    name = "control " + " ".join([*setting.arguments()[1:], *setting.suites])
    known = controls.read(name, _CONTROL)
    if known is None:
        found = bench.run(setting, memory)
        known = {
            "statuses": {case.case: case.status.value for case in found.cases},
            "answers": found.answers,
            "red": [case.case for case in found.red],
            "seconds": found.seconds,
        }
        controls.write(name, known)
    if known["red"]:
        raise RedControl(f"red without any fault: {', '.join(known['red'][:3])} ({' '.join(setting.arguments())})")
    return known


def _row(trial: Trial, column: str, control: Mapping[str, Any], found: Found) -> Row:
    fault = trial.fault
    red = found.red
    own = [case for case in red if case.suite == fault.suite]
    before = control["statuses"]
    differs = found.answers != control["answers"] or any(
        before.get(case.case) != case.status.value for case in found.cases if case.suite != _OPERATORS
    )
    green = Counter(function_of(case.case) for case in found.cases if case.status is Status.PASS)
    return {
        "fault": fault.id,
        "precision": trial.precision,
        "observable": column,
        "model": trial.setting.model,
        "layout": trial.setting.layout,
        "differs": differs,
        "healthy": "" if trial.declared else fault.healthy,
        "killed": bool(red),
        "owner": bool(own),
        "alone": any(one.observable == column for case in red for one in case.measurements if not one.ok),
        "located": _located(fault, own) if column == "taps" else None,
        "said": _said(fault, own),
        "seconds": round(found.seconds, 2),
        "red": [_trimmed(case) for case in _one_of_each_test(sorted(red, key=lambda one: one.suite != fault.suite))],
        "green": dict(sorted(green.items())),
    }


def _located(fault: Fault, own: list[CaseResult]) -> bool | None:
    """Whether the owning suite's first divergence is where the fault is; None where that is in no layer."""
    if not fault.white_box or fault.layer is None:
        return None
    sites = [case.divergence.site for case in own if case.divergence is not None]
    return bool(sites) and layer_of(sites[0]) == (fault.layer, fault.site)


def _said(fault: Fault, own: list[CaseResult]) -> bool | None:
    """Whether the owning suite says the words that lead to a cause without a site; None where a site is named."""
    if fault.white_box:
        return None
    lines = [case.reason for case in own]
    lines += [f"{one.metric} {one.prompt}: {one.detail}" for case in own for one in case.measurements if not one.ok]
    return any(fault.says in line for line in lines)


def _one_of_each_test(cases: Iterable[CaseResult]) -> list[CaseResult]:
    first: dict[str, CaseResult] = {}
    for case in cases:
        first.setdefault(function_of(case.case), case)
    return list(first.values())


def _trimmed(case: CaseResult) -> dict[str, Any]:
    """The part of a report's case that a diagnosis reads."""
    kinds: dict[tuple[str, str, str], Measurement] = {}
    for one in case.measurements:
        if not one.ok:  # the same operation is off in many layers and prompts: the first of each kind stands for them
            kinds.setdefault((one.metric, one.observable, layer_of(one.site)[1]), one)
    return {
        "case": case.case,
        "status": case.status.value,
        "suite": case.suite,
        "rung": case.rung,
        "model": case.model,
        "layout": case.layout,
        "precision": case.precision,
        "context": case.context,
        "observable": case.observable,
        "reason": "" if kinds else case.reason[:_LONGEST],
        "divergence": None if case.divergence is None else _plain(asdict(replace(case.divergence, looks=""))),
        "measurements": [_measured(one) for one in list(kinds.values())[:_MOST_MEASURED]],
    }


def _measured(one: Measurement) -> dict[str, Any]:
    """What a diagnosis reads of it: of a site no words."""
    shown = {"metric": one.metric, "value": one.value, "ok": one.ok, "prompt": one.prompt, "position": one.position}
    return _plain({**shown, "site": one.site, "detail": "" if one.site else one.detail})


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON has, with as many digits as matter; names that say nothing are left out."""
    found = {}
    for name, value in values.items():
        if value is None or value == "" or value == ():
            continue
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, float):
            value = float(f"{value:.5g}") if math.isfinite(value) else str(value)
        if isinstance(value, str):
            value = value[:_LONGEST]
        found[name] = list(value) if isinstance(value, tuple) else value
    return found
