"""What each operator runs on: native, fallback or missing, from what the suite ``operators`` measured."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_adapt.verdict.causes import OPERATORS, operator_of
from pytest_adapt.verdict.result import CaseResult, Status

__all__ = ["METRIC", "STATES", "alone", "coverage", "coverage_line"]

METRIC = "op.support"
STATES = ("native", "fallback", "missing")
"""native: a kernel of its own; fallback: composed of basic operations; missing: the target shows none."""


def alone(cases: Iterable[CaseResult], kind: str, precision: str) -> str:
    """What the suite ``operators`` says in one precision of the operators behind red sites of a kind: which of them is
    wrong by itself, or that they are wrong only in their place in the model; "" where none was judged."""
    states = [
        (operator_of(one), one.status)
        for one in cases
        if operator_of(one) in OPERATORS.get(kind, ()) and one.precision == precision and one.rung == "correct"
    ]
    red = [name for name, status in states if status in (Status.FAIL, Status.REGRESSION)]
    if red:
        return f"operator {red[0]} alone is red as well: the kernel itself is wrong, or what it is given there too"
    green = list(dict.fromkeys(name for name, status in states if status == Status.PASS))
    if green and all(status in (Status.PASS, Status.UNSUPPORTED) for _, status in states):
        names = " and ".join(green)
        return f"operator {names} alone is green: what it is given is wrong (weights, arguments, ranks), or its caller"
    return ""


def coverage(cases: Iterable[CaseResult]) -> dict[str, dict[str, str]]:
    """Operator -> precision -> ``native: native-avx512, reference``: state and implementations, the used one first."""
    found: dict[str, dict[str, str]] = {}
    for case in cases:
        for one in case.measurements:
            if one.metric == METRIC:
                found.setdefault(one.prompt, {})[case.precision] = one.detail
    return found


def coverage_line(cases: Iterable[CaseResult]) -> str:
    """``operators: 3 native (attention, rms_norm, swiglu), 13 fallback, 0 missing``; "" where none was looked at. An
    operator that differs between precisions counts with its worse state."""
    worst = {
        name: max(STATES.index(text.partition(":")[0]) for text in states.values())
        for name, states in coverage(cases).items()
    }
    if not worst:
        return ""
    parts = []
    for index, state in enumerate(STATES):
        names = [name for name, place in worst.items() if place == index]
        shown = f" ({', '.join(names)})" if names and state != "fallback" else ""
        parts.append(f"{len(names)} {state}{shown}")
    return f"operators: {', '.join(parts)}"
