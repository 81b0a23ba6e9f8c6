"""Gradients against central differences of the float64 reference: no derivative is written down a second time.

The yardstick is backward stability: a healthy gradient is the exact one of inputs that are off by the rounding of
their format, rounded to its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pytest_adapt.operators.case import Case
from pytest_adapt.operators.check import Run
from pytest_adapt.operators.definition import Op
from pytest_adapt.operators.draw import Draw, Operand, decode, encode, on_grid
from pytest_adapt.verdict.budget import SITE_QUANTILE, Comparison, Rows, ulp
from pytest_adapt.verdict.result import Measurement

__all__ = ["examine_gradient"]

_STEP = 2.0**-16
"""Truncation errs by its square, rounding by float64's unit over it: both far below float32's."""
_SAMPLES = 4
_UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
_OUTPUT = "out"


def examine_gradient(op: Op, case: Case, run: Run) -> list[Measurement]:
    """The gradient of ``sum(out * g)`` with respect to each of ``op.wrt``, for a random g; [] where there is none."""
    draw = Draw(case)
    operands = op.inputs(draw)
    shape = op.evaluate(case, operands, None)[_OUTPUT].shape
    held = op.outputs[_OUTPUT] or case.precision
    given = on_grid(draw.rng.standard_normal(shape), held)
    arrays = {name: encode(operand.values, operand.format) for name, operand in operands.items()}
    arrays[f"grad.{_OUTPUT}"] = encode(given, held)
    got = {name: decode(value) for name, value in run(op.name, arrays, _attributes(op, case)).items()}
    exact = _differences(op, case, operands, given)
    samples = [_differences(op, case, _off(operands, draw.rng), given) for _ in range(_SAMPLES)]
    found = []
    for name in op.wrt:
        value, expected, format = got.get(f"grad.{name}"), exact[name], operands[name].format
        if value is None or value.shape != expected.shape:
            shown = "absent" if value is None else f"of shape {value.shape}, expected {expected.shape}"
            found.append(
                Measurement("op.gradient", 1.0, 0.0, False, prompt=str(case), detail=f"grad.{name} is {shown}")
            )
            continue
        errors = np.nan_to_num(value - expected, nan=np.inf)
        yard = np.max([np.abs(on_grid(sample[name], format) - expected) for sample in samples], axis=0)
        count = expected.size
        rows = Rows.of_elements(
            name,
            np.arange(count),
            errors.reshape(count, 1),
            yard.reshape(count, 1),
            ulp(expected, format).reshape(count, 1),
        )
        comparison = Comparison(quantile=SITE_QUANTILE, rows=[rows])
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.abs(errors))), errors.shape))
        detail = f"grad.{name}{list(at)}: {value[at]:.6g}, expected {expected[at]:.6g}"
        for metric, (number, budget) in (("rms", comparison.rms()), ("max", comparison.largest()[:2])):
            found.append(
                Measurement(
                    f"op.gradient.{metric}", number, budget, number <= budget, prompt=str(case), compared=count,
                    detail=detail,
                )
            )  # fmt: skip
    return found


def _attributes(op: Op, case: Case) -> dict[str, object]:
    return {**op.attributes(case), "gradient": op.wrt}


def _differences(op: Op, case: Case, operands: Mapping[str, Operand], given: np.ndarray) -> dict[str, np.ndarray]:
    """Central differences of ``sum(out * given)``, element by element of each input."""

    def total() -> float:
        return float(np.sum(op.evaluate(case, own, None)[_OUTPUT] * given))

    own = {name: Operand(operand.values.copy(), operand.format, operand.weight) for name, operand in operands.items()}
    found = {}
    for name in op.wrt:
        values = own[name].values
        slopes = np.empty(values.shape)
        for at in np.ndindex(values.shape):
            middle, totals = values[at], []
            for step in (_STEP, -_STEP):
                values[at] = middle + step
                totals.append(total())
            values[at] = middle
            slopes[at] = (totals[0] - totals[1]) / (2 * _STEP)
        found[name] = slopes
    return found


def _off(operands: Mapping[str, Operand], rng: np.random.Generator) -> dict[str, Operand]:
    """Inputs off by half a unit of their formats, with random signs."""
    return {
        name: operand
        if operand.format == "int"
        else Operand(
            operand.values * (1 + _UNITS[operand.format] * rng.choice([-1.0, 1.0], operand.values.shape)),
            operand.format,
            operand.weight,
        )
        for name, operand in operands.items()
    }
