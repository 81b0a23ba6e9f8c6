"""The built-in engine's operators: all of them right in each precision, and red with a fault in them."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_adapt.operators import NAMES, catalogue
from pytest_adapt.operators.check import examine
from pytest_adapt.operators.draw import Arena, Draw
from pytest_adapt.operators.gradient import examine_gradient
from pytest_adapt.target.protocol import TargetError
from pytest_adapt.target.torch_arrays import from_torch, to_torch

# Fault -> operator that must show it.
FAULTS = {
    "NM01": "rms_norm",
    "NM02": "rms_norm",
    "NM05": "rms_norm",
    "NM07": "add_rms_norm",
    "NM90": "rms_norm",
    "RP04": "rotary",
    "RP12": "rotary",
    "RT01": "route",
    "RT03": "route",
    "RT04": "route",
    "RT11": "route",
    "RT15": "route",
    "RT16": "route",
    "RT17": "route",
    "RT19": "router_logits",
    "RT90": "route",
    "AT05": "attention",
    "AT18": "attention",
    "AT25": "attention",
    "AT26": "latent_attention",
    "AT90": "attention",
    "PR03": "experts",
    "PR04": "linear",
    "PR06": "attention",
    "PR21": "swiglu",
    "PR90": "add_rms_norm",
}
# An epsilon moves less than bf16 rounds, where values are of the order of one.
HIDDEN = {("NM01", "bf16"), ("NM02", "bf16")}


def failures(target, info, name, precision):
    op = catalogue()[name]
    used = info.ops[name]
    return [one for case in op.grid(precision) for one in examine(op, case, target.run_op, used).failures]


@pytest.mark.requirement(50, 51, 52, 54, 56, 57, 58, 60)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_operator_matches_its_definition(bench, precision):
    """Native, reference and other ways through the engine; the gradients of the reference."""
    target, info = bench.opened(precision)
    assert set(info.ops) == set(NAMES)
    try:
        for name, op in catalogue().items():
            assert not failures(target, info, name, precision), name
            if name in info.gradients and precision != "fp16":
                case = op.case(precision, **op.gradient, seed=1)
                measured = examine_gradient(op, case, target.run_op)
                assert len(measured) == 2 * len(op.wrt)
                assert all(one.ok for one in measured), measured
    finally:
        target.close()


@pytest.mark.requirement(51, 52, 54, 56)
@pytest.mark.parametrize(
    ("fault", "precision"),
    [(fault, precision) for fault in FAULTS for precision in ("fp32", "bf16") if (fault, precision) not in HIDDEN],
)
def test_a_fault_is_red_in_its_operator(bench, fault, precision):
    target, info = bench.opened(precision, fault)
    try:
        assert failures(target, info, FAULTS[fault], precision), f"{fault} passed {FAULTS[fault]} in {precision}"
    finally:
        target.close()


@pytest.mark.requirement(60)
def test_the_reference_beside_a_native_kernel_is_another_implementation(bench):
    """A fault in the registry in use does not reach it, so that the two disagree."""
    target, info = bench.opened("fp32", "NM05")
    op = catalogue()["rms_norm"]
    case = op.case("fp32", **op.base)
    try:
        plain = examine(op, case, target.run_op, ("reference",) if info.ops["rms_norm"][0] != "reference" else ())
        used = examine(op, case, target.run_op, info.ops["rms_norm"][:1])
    finally:
        target.close()
    assert used.failures and not plain.failures


def test_an_unknown_implementation_is_named(bench):
    target, info = bench.opened("fp32")
    try:
        with pytest.raises(TargetError, match="operator rms_norm has no implementation 'fast'; it has"):
            target.run_op("rms_norm", {}, {"implementation": "fast"})
        with pytest.raises(TargetError, match="operator convolution has no implementation"):
            target.run_op("convolution", {}, {})
    finally:
        target.close()
    with pytest.raises(TargetError, match="not open"):
        target.run_op("rms_norm", {}, {})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("memory", ["dense", "offset", "padded", "strided"])
def test_tensors_lie_where_the_arrays_do(precision, memory):
    case = catalogue()["swiglu"].case(precision, rows=3, width=5, memory=memory)
    view = Arena(memory).place("x", catalogue()["swiglu"].inputs(Draw(case))["gate"])
    tensor = to_torch(view)
    assert tensor.data_ptr() == view.ctypes.data
    assert tensor.stride() == tuple(stride // view.itemsize for stride in view.strides)
    assert np.array_equal(from_torch(tensor), view)


@pytest.mark.parametrize("scale", [1.001, -1.0])
def test_a_wrong_gradient_is_seen(bench, scale):
    target, _ = bench.opened("fp32")
    op = catalogue()["swiglu"]

    def run(name, inputs, attributes):
        found = target.run_op(name, inputs, attributes)
        return {**found, "grad.up": found["grad.up"] * np.float32(scale)}

    try:
        measured = examine_gradient(op, op.case("fp32", **op.gradient, seed=1), run)
        lacking = examine_gradient(op, op.case("fp32", **op.gradient), lambda *given: {})
    finally:
        target.close()
    assert {one.metric for one in measured if not one.ok} == {"op.gradient.rms", "op.gradient.max"}
    assert all("grad.up" in one.detail for one in measured if not one.ok)
    assert [one.ok for one in lacking] == [False, False]
