"""The references of operators agree with code that nobody here wrote: transformers' eager code and torch."""

from __future__ import annotations

import pytest

from pytest_adapt.operators import NAMES, catalogue
from pytest_adapt.operators.check import examine
from pytest_adapt.operators.gradient import examine_gradient
from pytest_adapt.target.hf_ops import HfOps
from pytest_adapt.target.protocol import TargetError

pytest.importorskip("transformers")


@pytest.mark.requirement(51, 52, 53, 56)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_transformers_matches_every_definition_that_it_has(precision):
    ops = HfOps("cpu")
    assert set(ops.offered()) < set(NAMES)
    for name in ops.offered():
        op = catalogue()[name]
        found = [examine(op, case, ops.run) for case in op.grid(precision)]
        failures = [one for each in found for one in each.failures]
        assert not failures, failures[:3]
        assert sum(bool(each.measurements) for each in found) > len(found) / 2
        if op.wrt and precision == "fp32":
            case = op.case(precision, **op.gradient, seed=1)
            assert all(one.ok for one in examine_gradient(op, case, ops.run)), name


def test_scaled_rotary_frequencies_are_declined():
    op = catalogue()["rotary"]
    assert examine(op, op.case("fp32", rows=3, kind="yarn"), HfOps("cpu").run).declined == "rotary scaling yarn"


def test_an_unknown_operator_is_named():
    with pytest.raises(TargetError, match="hf: no operator route; operators are linear"):
        HfOps("cpu").run("route", {}, {})
