"""A healthy implementation passes everything, and each way of being wrong is seen, in each precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pytest_adapt.operators import NAMES, Case, catalogue, parse_case
from pytest_adapt.operators.check import examine
from pytest_adapt.operators.draw import Operand, decode, encode
from pytest_adapt.operators.explore import explore
from pytest_adapt.operators.suite import support
from pytest_adapt.target.protocol import UnsupportedOp

PRECISIONS = ("fp32", "bf16", "fp16")


class Emulated:
    """Rounds as eager code does; ``change(name, arrays, answer)`` makes it wrong."""

    def __init__(self, case: Case, change: Any = None) -> None:
        self.case, self.change = case, change

    def run_op(self, name: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> dict[str, Any]:
        op = catalogue()[name]
        operands = {
            key: Operand(decode(array), "int" if array.dtype.kind == "i" else "fp32") for key, array in inputs.items()
        }
        found = op.evaluate(self.case, operands, op.rounding(self.case.precision))
        if name == "sample":
            drawn = np.random.default_rng(self.case.seed).choice(
                len(found["share"]), len(inputs["positions"]), p=found["share"]
            )
            found = {"ids": drawn}
        answer = {
            key: encode(value, "int" if value.dtype.kind in "iu" else op.outputs.get(key) or self.case.precision)
            if op.outputs.get(key) != "exact"
            else encode(value, self.case.precision)
            for key, value in found.items()
        }
        return answer if self.change is None else self.change(inputs, answer)


def failed(case, change=None):
    """Metrics that failed, of an emulation made wrong."""
    found = examine(catalogue()[case.op], case, Emulated(case, change).run_op)
    return {one.metric for one in found.failures}


@pytest.mark.requirement(56, 57)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_code_that_rounds_as_eager_code_does_passes(name, precision):
    for case in catalogue()[name].grid(precision):
        found = examine(catalogue()[name], case, Emulated(case).run_op)
        assert found.measurements and not found.failures, found.failures
        assert all(one.compared for one in found.measurements)
        assert all(one.use < 0.9 for one in found.measurements), str(case)


def outputs(op):
    return [name for name, held in catalogue()[op].outputs.items() if held != "exact"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "output"), [(name, output) for name in NAMES for output in outputs(name)])
def test_one_wrong_element_is_seen(name, output, precision):
    """Off by a fiftieth of the largest value: 6 units of bf16, thousands of float32."""
    case = catalogue()[name].case(precision, **catalogue()[name].base, seed=3)

    def change(inputs, answer):
        held = catalogue()[name].outputs[output] or precision
        values = decode(answer[output]).copy()
        values.flat[values.size // 2] += np.abs(values).max() / 20
        return answer | {output: encode(values, held)}

    assert "op.max" in failed(case, change)


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        (lambda inputs, answer: {}, "op.shape"),
        (lambda inputs, answer: {"out": answer["out"][:-1]}, "op.shape"),
        (lambda inputs, answer: {"out": answer["out"] * np.float32(np.nan)}, "op.finite"),
        (lambda inputs, answer: inputs["x"].__setitem__((0, 0), 1.0) or answer, "op.memory"),
    ],
)
def test_broken_answers_are_failures_of_their_own(change, metric):
    assert failed(parse_case("linear(rows=3,width=4,columns=2)"), change) == {metric}


@pytest.mark.parametrize("memory", ["padded", "offset", "strided"])
def test_a_read_beside_a_row_shows(memory):
    """A kernel that walks the rows with the wrong stride, or one element too far, meets poison."""

    def change(inputs, answer):
        x = inputs["x"]
        flat = np.lib.stride_tricks.as_strided(x, (x.shape[0], x.shape[1] + 1), x.strides)
        beside = np.lib.stride_tricks.as_strided(x, (x.size,), (x.itemsize,)) if memory == "strided" else flat
        return {"out": answer["out"] + np.float32(0) * beside.reshape(-1)[-1]}

    assert failed(parse_case(f"linear(rows=3,width=4,columns=2,memory={memory})"), change)


def test_an_exception_is_the_failure_of_its_case():
    def change(inputs, answer):
        raise ValueError("no kernel for an empty batch\nmore")

    case = parse_case("linear(rows=0)")
    (one,) = examine(catalogue()["linear"], case, Emulated(case, change).run_op).failures
    assert one.metric == "op.error" and one.detail == "ValueError: no kernel for an empty batch"
    assert one.prompt == str(case)


def test_a_declined_shape_is_no_failure():
    def change(inputs, answer):
        raise UnsupportedOp("rows must be a multiple of 16")

    case = parse_case("linear(rows=3)")
    found = examine(catalogue()["linear"], case, Emulated(case, change).run_op)
    assert not found.measurements and found.declined == "rows must be a multiple of 16"


@pytest.mark.requirement(54)
def test_ties_go_to_the_lower_expert():
    """The right scores, and among equal ones another expert: wrong only by the declared order."""
    case = parse_case("route(rows=24,groups=1,size=13,chosen=4,scoring=softmax,values=tied,seed=1)")

    def change(inputs, answer):
        later = np.argsort(-answer["selection"][:, ::-1], axis=1, kind="stable")[:, : case["chosen"]]
        ids = np.sort(answer["selection"].shape[1] - 1 - later, axis=1)
        # Equal scores have equal weights.
        return answer | {"ids": ids}

    assert not failed(case)
    assert "op.choice" in failed(case, change)


@pytest.mark.requirement(54)
def test_an_expert_out_of_a_dropped_group_is_no_near_tie():
    case = parse_case("route(rows=24,groups=4,size=5,kept=2,chosen=4,scoring=sigmoid,bias=negative,seed=1)")

    def change(inputs, answer):
        best = np.argsort(-answer["selection"], axis=1, kind="stable")[:, : case["chosen"]]
        return answer | {"ids": np.sort(best, axis=1)}

    assert {"op.choice", "op.flips"} <= failed(case, change)


def test_a_repeated_expert_is_no_choice():
    case = parse_case("route(rows=3,groups=1,size=5,chosen=2)")
    found = examine(
        catalogue()["route"],
        case,
        Emulated(case, lambda _, answer: answer | {"ids": answer["ids"][:, :1] + [0, 0]}).run_op,
    )
    (wrong,) = [one for one in found.failures if one.metric == "op.choice"]
    assert "chosen twice" in wrong.detail


@pytest.mark.parametrize(
    ("words", "draw"),
    [
        ("temperature=0.0", lambda logits, count: np.full(count, np.argmin(logits))),
        ("temperature=1.0,top_k=3", lambda logits, count: np.full(count, np.argsort(-logits)[3])),
        ("temperature=1.0,top_p=0.5", lambda logits, count: np.full(count, np.argmin(logits))),
        ("temperature=1.0", lambda logits, count: np.full(count, np.argmax(logits))),
        ("temperature=1.6", lambda logits, count: np.random.default_rng(0).integers(0, len(logits), count)),
    ],
)
def test_a_wrong_draw_is_seen(words, draw):
    case = parse_case(f"sample(vocabulary=31,{words},seed=2)")

    def change(inputs, answer):
        return {"ids": draw(decode(inputs["logits"]), len(inputs["positions"])).astype(np.int64)}

    assert failed(case, change) & {"op.choice", "op.drawn"}


@pytest.mark.requirement(58)
def test_two_implementations_are_held_against_each_other():
    """Each within its own budget of the reference, on either side of it: together they are not the same."""
    case = parse_case("linear(rows=40,width=40,columns=40,seed=1)")
    op = catalogue()["linear"]

    def run(name, inputs, attributes):
        def change(given, answer):
            exact = decode(inputs["x"]) @ decode(inputs["weight"]).T
            error = decode(answer["out"]) - exact
            sign = 1 if attributes["implementation"] == "fused" else -1
            return {"out": (exact + sign * 1.2 * np.abs(error)).astype(np.float32)}

        return Emulated(case, change).run_op(name, inputs, attributes)

    found = examine(op, case, run, ("fused", "unfused"))
    assert {one.metric for one in found.failures} == {"op.agree.rms"}
    assert "fused and unfused" in found.failures[0].detail
    twin = examine(op, case, Emulated(case).run_op, ("fused", "unfused"))
    assert {one.value for one in twin.measurements if one.metric.startswith("op.agree")} == {0.0}


@pytest.mark.parametrize(
    ("names", "state"), [((), "missing"), (("reference",), "fallback"), (("native-x", "reference"), "native")]
)
def test_support_follows_from_the_implementation_in_use(names, state):
    assert support(names) == state


def test_the_simplest_failing_case_is_found_again_and_again(monkeypatch, tmp_path):
    """Whole vectors of eight lanes only: the narrowest row that is no whole vector, in one row, of plain values."""
    monkeypatch.chdir(tmp_path)
    op = catalogue()["rms_norm"]

    def fails(case):
        return case["rows"] > 0 and case["width"] > 8 and case["width"] % 8 != 0

    found = {explore(op, "bf16", fails, examples=100, seconds=20.0) for _ in range(2)}
    assert found == {op.case("bf16", rows=1, width=9)}
    assert explore(op, "bf16", lambda case: False, examples=20, seconds=5.0) is None
    assert list(tmp_path.iterdir()) == []
