"""Promise: each operator alone computes its definition, at published shapes, at borders and on hostile values."""

import pytest

from pytest_adapt.operators import NAMES
from pytest_adapt.operators.suite import judge_operator, judge_support, time_operators


@pytest.mark.requirement(51, 52, 53, 54, 56, 57, 58, 60)
@pytest.mark.adapt(rung="correct", profile="day0", first=True, requests=0)
@pytest.mark.parametrize("op", NAMES)
def test_an_operator_matches_its_definition(target, model, precision, op, judge):
    """Every implementation against float64 and against the others, gradients, ties, memory that is not its own."""
    judge_operator(target, judge, op, precision)


@pytest.mark.requirement(50)
@pytest.mark.adapt(rung="correct", profile="day0", first=True, requests=0)
def test_what_each_operator_runs_on_is_known(target, model, precision, judge):
    """A kernel of its own, composed of basic operations, or missing: for the report."""
    judge_support(target, judge)


@pytest.mark.requirement(51, 60, 106)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="performance", profile="day0", first=True, requests=0)
def test_the_time_of_each_operator_is_known(target, model, precision, judge):
    """At a published shape, each implementation: engineering references, no limit; the answers are judged."""
    time_operators(target, judge, precision)
