"""One case on a target: answers against float64 under a budget, memory left alone, implementations that agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pytest_adapt.operators.case import Case
from pytest_adapt.operators.definition import EXACT, Op, Values
from pytest_adapt.operators.draw import Arena, Draw, Operand, decode
from pytest_adapt.target.protocol import UnsupportedOp
from pytest_adapt.verdict.budget import MAX_FACTOR, RMS_FACTOR, SITE_QUANTILE, Comparison, Rows, ulp
from pytest_adapt.verdict.localise import error_scale
from pytest_adapt.verdict.result import Measurement

__all__ = ["Examined", "Run", "examine"]

Run = Callable[[str, Mapping[str, np.ndarray], Mapping[str, Any]], Mapping[str, np.ndarray]]
"""``run_op`` of a target: (operator, arrays, attributes) -> arrays."""
_IMPLEMENTATION = "implementation"
_DRAWS = 16


@dataclass
class Examined:
    """What one case came to."""

    measurements: list[Measurement] = field(default_factory=list)
    rows: list[tuple[str, Rows]] = field(default_factory=list)
    """(metric, rows), to be pooled over cases."""
    declined: str = ""
    """Why the target does not compute this case; "" where it does."""

    @property
    def failures(self) -> list[Measurement]:
        return [one for one in self.measurements if not one.ok]


def examine(op: Op, case: Case, run: Run, implementations: tuple[str, ...] = ("",)) -> Examined:
    """Run a case on each implementation ("" is the one in use) and hold every answer against the reference, and the
    first two against each other."""
    found = Examined()
    operands = op.inputs(Draw(case))
    own = _Expected(op, case, operands)
    answers: dict[str, Values] = {}
    for name in implementations:
        try:
            got = _answer(op, case, operands, run, name, found)
        except UnsupportedOp as reason:
            found.declined = found.declined or str(reason)
            continue
        if got is not None:
            answers[name] = got
            found.measurements += [_named(one, case, name) for one in own.judge(got, found.rows)]
    if len(answers) > 1 and not found.failures:
        first, *others = answers
        for other in others:
            measured = own.agree(answers[first], answers[other])
            found.measurements += [_named(one, case, f"{first} and {other}") for one in measured]
    return found


def _answer(
    op: Op, case: Case, operands: Mapping[str, Operand], run: Run, implementation: str, found: Examined
) -> Values | None:
    """What a target answers; None where that already is the failure."""
    arena = Arena(case.memory)
    arrays = {name: arena.place(name, operand) for name, operand in operands.items()}
    attributes = op.attributes(case) | ({_IMPLEMENTATION: implementation} if implementation else {})
    try:
        got = {name: decode(value) for name, value in run(op.name, arrays, attributes).items()}
    except UnsupportedOp:
        raise
    except Exception as error:  # the target's code may raise anything
        if hasattr(error, "adapt_status"):
            raise
        detail = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        found.measurements.append(_named(Measurement("op.error", 1.0, 0.0, False, detail=detail), case, implementation))
        return None
    damage = arena.damage()
    count = sum(array.size for array in arrays.values())
    kept = Measurement("op.memory", float(bool(damage)), 0.0, not damage, compared=max(count, 1), detail=damage)
    found.measurements.append(_named(kept, case, implementation))
    return got


class _Expected:
    """Reference and yardstick of one case."""

    def __init__(self, op: Op, case: Case, operands: Mapping[str, Operand]) -> None:
        self.op, self.case, self.operands = op, case, operands
        self.exact, self.yard = self._both({})
        self.terms = op.terms(case, operands)
        self._drawn: list[_Expected] = []

    def judge(self, got: Values, pooled: list[tuple[str, Rows]]) -> Iterator[Measurement]:
        op, case = self.op, self.case
        followed = {name: got[name] for name in op.follows if self._sound(name, got)}
        exact, yard = self._both(followed) if followed else (self.exact, self.yard)
        for name, held in op.outputs.items():
            problem = _shape_problem(name, got, exact[name])
            if problem:
                yield Measurement("op.shape", 1.0, 0.0, False, compared=1, detail=problem)
                continue
            if held == EXACT:
                wrong = np.flatnonzero((got[name] != exact[name]).reshape(-1))
                detail = f"{name}: {len(wrong)} elements are no copies" if len(wrong) else ""
                yield Measurement(
                    "op.exact", float(len(wrong)), 0.0, not len(wrong), compared=max(exact[name].size, 1), detail=detail
                )
                continue
            yield from self._numbers(name, held or case.precision, got[name], exact[name], yard[name], pooled)
        inputs = {name: operand.values for name, operand in self.operands.items()}
        yield from op.judge(case, inputs, got, self.exact, self.yard)

    def agree(self, first: Values, second: Values) -> Iterator[Measurement]:
        """Two implementations, each with an error of its own."""
        for name, held in self.op.outputs.items():
            exact, yard = self.exact[name], self.yard[name]
            if held == EXACT or not exact.size or any(first[k].tolist() != second[k].tolist() for k in self.op.follows):
                continue
            both = np.isfinite(first[name]) & np.isfinite(second[name])
            difference = np.subtract(first[name], second[name], out=np.zeros(exact.shape), where=both)
            rows, _ = self._rows(name, held or self.case.precision, exact + difference, exact, yard)
            comparison = Comparison(widen=self.op.widen * math.sqrt(2.0), quantile=SITE_QUANTILE, rows=[rows])
            at = _worst(np.abs(difference))
            detail = f"{name}{list(at)}: {first[name][at]:.9g} and {second[name][at]:.9g}"
            for metric, value, budget in self._budgets(comparison, name, held or self.case.precision):
                yield Measurement(
                    f"op.agree.{metric}", value, budget, value <= budget, compared=exact.size, detail=detail
                )

    def _both(self, given: Values) -> tuple[Values, Values]:
        exact = self.op.evaluate(self.case, self.operands, None, given)
        yard: Values = self.op.evaluate(self.case, self.operands, self.op.rounding(self.case.precision), given)
        if self.case.values == "tiny":
            yard = self._flushed(exact, yard, given)
        return exact, yard

    def _flushed(self, exact: Values, yard: Values, given: Values) -> Values:
        """Hardware may take subnormal numbers for zero: whichever emulation errs more is the yardstick."""
        zeros = {
            name: operand if operand.weight or operand.format == "int" else replace(operand, values=operand.values * 0)
            for name, operand in self.operands.items()
        }
        flushed = self.op.evaluate(self.case, zeros, self.op.rounding(self.case.precision), given)
        return {
            name: np.where(np.abs(flushed[name] - exact[name]) > np.abs(yard[name] - exact[name]), flushed[name], value)
            if value.dtype.kind == "f"
            else value
            for name, value in yard.items()
        }

    def _sound(self, name: str, got: Values) -> bool:
        """Whether a choice can be followed at all."""
        value, own = got.get(name), self.exact[name]
        if value is None or value.shape != own.shape or value.dtype.kind not in "iu":
            return False
        limit = self.exact["selection"].shape[-1]
        return bool(((value >= 0) & (value < limit)).all())

    def _numbers(
        self, name: str, held: str, got: np.ndarray, exact: np.ndarray, yard: np.ndarray, pooled: list[tuple[str, Rows]]
    ) -> Iterator[Measurement]:
        if not exact.size:
            yield Measurement("op.shape", 0.0, 0.0, True, compared=1)
            return
        rows, comparable = self._rows(name, held, got, exact, yard)
        lost = np.argwhere(~np.isfinite(got) & comparable)
        if len(lost):
            at = tuple(lost[0].tolist())
            detail = f"{name}{list(at)}: {got[at]}, expected {exact[at]:.6g}; {len(lost)} of {exact.size} not finite"
            yield Measurement("op.finite", float(len(lost)), 0.0, False, compared=exact.size, detail=detail)
            return
        compared = int(comparable.sum())
        if not compared:
            yield Measurement("op.overflow", 0.0, 0.0, True, compared=exact.size, detail="the emulation overflows too")
            return
        comparison = Comparison(widen=self.op.widen, quantile=SITE_QUANTILE, rows=[rows])
        at = _worst(np.abs(np.subtract(got, exact, out=np.zeros(exact.shape), where=comparable)))
        detail = f"{name}{list(at)}: {got[at]:.9g}, expected {exact[at]:.9g}"
        for metric, value, budget in self._budgets(comparison, name, held):
            label = "op.max" if metric == "max" else "op.case.rms"
            yield Measurement(label, value, budget, value <= budget, compared=compared, detail=detail)
        if self.case.values not in ("tiny", "huge"):
            pooled.append((f"op.rms {name}", rows))

    def _budgets(self, comparison: Comparison, name: str, held: str) -> Iterator[tuple[str, float, float]]:
        """(statistic, value, budget). A case has few numbers, and the emulation may have had luck with them: what is
        over its budget is held against the emulation's worst errors over other draws of the same case too."""
        for metric, (value, budget), factor in (
            ("rms", comparison.rms(), RMS_FACTOR),
            ("max", comparison.largest()[:2], MAX_FACTOR),
        ):
            if value > budget:
                budget = max(budget, factor * comparison.widen * self._worst_draw(metric, name, held))
            yield metric, value, budget

    def _worst_draw(self, metric: str, name: str, held: str) -> float:
        """The emulation's largest error, or largest rms error, over other draws of this case."""
        if not self._drawn:
            for number in range(1, _DRAWS + 1):
                case = replace(self.case, seed=self.case.seed + number)
                self._drawn.append(_Expected(self.op, case, self.op.inputs(Draw(case))))
        found = [one._rows(name, held, one.yard[name], one.exact[name], one.yard[name])[0] for one in self._drawn]
        if metric == "max":
            return max(float(rows.largest.max()) for rows in found)
        return max(math.sqrt(float(np.average(rows.square, weights=rows.count))) for rows in found)

    def _rows(
        self, name: str, held: str, got: np.ndarray, exact: np.ndarray, yard: np.ndarray
    ) -> tuple[Rows, np.ndarray]:
        """Errors as rows, relative to what they can be expected to be proportional to (`error_scale`), and which
        elements are comparable: where even the emulation overflows, anything may be."""
        comparable = np.isfinite(exact) & np.isfinite(yard)
        shape = (-1, exact.shape[-1])
        own = np.where(comparable, exact, 0.0)
        terms = self.terms.get(name)
        if self.op.relative:
            scale = np.abs(own).reshape(shape)
        else:
            scale = error_scale(own.reshape(shape), None if terms is None else terms.reshape(shape))
        scale = np.maximum(scale, ulp(0.0, held))  # below it nothing is a number of the format
        errors = np.subtract(got, exact, out=np.zeros(exact.shape), where=comparable).reshape(shape) / scale
        yards = np.subtract(yard, exact, out=np.zeros(exact.shape), where=comparable).reshape(shape) / scale
        floor = ulp(own, held)
        if terms is not None:
            floor = np.maximum(floor, ulp(terms, "fp32"))
        floor = floor.reshape(shape) / scale
        if self.op.independent:
            errors, yards, floor = (array.reshape(-1, 1) for array in (errors, yards, floor))
        return Rows.of_elements(str(self.case), np.arange(len(errors)), errors, yards, floor), comparable


def _worst(errors: np.ndarray) -> tuple[int, ...]:
    """Index of the largest error."""
    return tuple(int(index) for index in np.unravel_index(int(np.argmax(errors)), errors.shape))


def _shape_problem(name: str, got: Values, exact: np.ndarray) -> str:
    if name not in got:
        return f"{name} is absent from the answer ({', '.join(sorted(got)) or 'which is empty'})"
    if got[name].shape != exact.shape:
        return f"{name} has shape {got[name].shape}, expected {exact.shape}"
    return ""


def _named(one: Measurement, case: Case, implementation: str) -> Measurement:
    detail = f"{implementation}: {one.detail}" if implementation and one.detail else one.detail
    return replace(one, prompt=str(case), detail=detail)
