"""What a load costs in whole numbers: operations, bytes, allocations, collectives. The same in every run, so that any
change is one that somebody made; counters on record change by review alone.
"""

from dataclasses import replace

import pytest

from pytest_adapt.perf.loads import LOADS


@pytest.mark.requirement(30, 108)
@pytest.mark.adapt(rung="", classes=("odd", "wide", "aligned", ""), needs=("text",), tier="counters")
@pytest.mark.parametrize("load", LOADS)
def test_work_is_what_is_on_record(target, model, precision, load, judge, gate):
    gate.counters(target, model, load, judge)


@pytest.mark.requirement(46, 108)
@pytest.mark.adapt(
    rung="",
    classes=("odd", "wide", "aligned", ""),
    precisions=("fp32",),
    profile="day0",
    needs=("text",),
    tier="counters",
)
@pytest.mark.parametrize("spread", ("tp2", "pp2", "ep2", "sp2"))
def test_traffic_between_ranks_is_what_is_on_record(target, model, precision, spread, judge, gate):
    """Calls and bytes of collectives, by the target's own ledger."""
    model.refuse_illegal(spread)
    gate.counters(target.variant(replace(target.deployment, layout=spread)), model, "mixed", judge)


@pytest.mark.requirement(108)
@pytest.mark.adapt(rung="", classes=("odd", "wide", "aligned", ""), needs=("text",), tier="counters")
def test_every_load_on_record_is_still_run(target, model, precision, judge, gate):
    gate.registered(target, model, judge)
