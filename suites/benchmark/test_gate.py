"""No slower than a baseline that was measured in the same minutes: only with --adapt-gate.

Times are compared in pairs of fresh processes, the slices of both sides alternating; instructions are counted on both
sides in one job. Both ways: what became quicker is said, too.
"""

import pytest

CLASSES = ("odd", "wide", "aligned", "")


@pytest.mark.requirement(105, 106, 108)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="performance", classes=CLASSES, profile="day0", needs=("text",), tier="times")
@pytest.mark.parametrize("load", ("prefill", "decode"))
def test_no_slower_than_the_baseline(deployment, model, precision, load, judge, gate):
    gate.times(deployment, model, load, judge)


@pytest.mark.requirement(105, 109)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="performance", classes=CLASSES, profile="full", needs=("text",), tier="times")
@pytest.mark.parametrize("load", ("batch", "mixed"))
def test_no_slower_than_the_baseline_in_company(deployment, model, precision, load, judge, gate):
    gate.times(deployment, model, load, judge)


@pytest.mark.requirement(105, 106)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="performance", classes=("real",), profile="full", needs=("text",), tier="times")
@pytest.mark.parametrize("load", ("prefill", "decode"))
def test_real_weights_are_no_slower_than_the_baseline(deployment, model, precision, load, judge, gate):
    gate.times(deployment, model, load, judge)


@pytest.mark.requirement(105, 108)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="performance", classes=CLASSES, profile="day0", needs=("text",), tier="instructions")
@pytest.mark.parametrize("load", ("prefill", "decode"))
def test_no_more_instructions_than_the_baseline(deployment, model, precision, load, judge, gate):
    gate.instructions(deployment, model, load, judge)
