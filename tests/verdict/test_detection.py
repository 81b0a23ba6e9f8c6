"""What the budgets of sites and of records can and cannot see: errors like the yardstick's pass, ones a few times as
large never.

The widening of `verdict.localise` (hidden roundings, few rows) and the allowance for rows in which the emulation errs
more cost sensitivity where they apply; this is the bound on what they cost, at every site of every family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_adapt.verdict.power import RecordCell, site_budgets, weaknesses

FAMILIES = ("qwen3-moe-odd", "mixtral-odd", "deepseek-v3-odd-pos", "llama-odd")
TOKENS = 40


@pytest.mark.requirement(114, 116)
@pytest.mark.parametrize("rounds", ["eager", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_like_the_yardsticks_passes_and_one_a_few_times_as_large_does_not(
    bench: Any, family: str, precision: str, rounds: str
) -> None:
    model, draw = bench(family), np.random.default_rng(7)
    sites = site_budgets(model.oracle, model.tokens(TOKENS), precision, rounds)
    assert len(sites) > 20
    assert [line for site in sites for line in weaknesses(site, draw)] == []


def test_a_budget_that_nobody_can_meet_and_one_that_everybody_does_are_refused(bench: Any) -> None:
    """The bound itself has an edge on either side."""
    model, draw = bench("qwen3-moe-odd"), np.random.default_rng(7)
    sites = site_budgets(model.oracle, model.tokens(TOKENS), "fp32")
    site = next(one for one in sites if one.name == "layer.0.attn.q")
    assert weaknesses(site, draw) == []
    (tight,) = [line for line in weaknesses(replace(site, widen=0.1), draw) if "cannot meet" in line]
    assert tight.startswith(site.name) and "site.rms" in tight
    wide = weaknesses(replace(site, widen=20.0), draw)
    assert any("everywhere, passes" in line for line in wide) and any("16 times" in line for line in wide)


@pytest.mark.requirement(62, 113)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pooled_comparison_sees_what_it_must_and_few_rows_do_not(bench: Any, precision: str) -> None:
    model = bench("llama-odd")
    whole = model.record(model.tokens(120), precision)
    cell = RecordCell.of([whole], precision)
    assert cell.rows == 120
    assert cell.weaknesses(20) == []
    assert cell.share(1.0, 50) == cell.share(1.0, 50, agree=True) == 0.0
    assert cell.share(2.0, 50) == cell.share(4.0, 50, agree=True) == 1.0
    few = RecordCell.of([whole.prefix(3)], precision)
    assert few.rows == 3
    (why,) = few.weaknesses(20)
    assert "4 times the control's error passes" in why
    assert "passes in 100.0%" in RecordCell.of([], precision).weaknesses(5)[0]
