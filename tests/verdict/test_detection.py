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

from pytest_adapt.sites import CHOICES
from pytest_adapt.verdict.power import RecordCell, SiteBudget, site_budgets, weaknesses

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
    assert not [site.name for site in sites if site.name.endswith(tuple(CHOICES))], "chosen experts are no numbers"
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


def test_a_cell_that_a_healthy_control_cannot_meet_is_refused(bench: Any) -> None:
    """Where one position errs a thousand times as much as the others, the luck of two such ones breaks the rms."""
    model = bench("llama-odd")
    record = model.record(model.tokens(120), "fp32")
    errors = record.emulation("fp32")
    size = np.where(np.arange(120) == 60, 1000.0, 1.0)
    volatile = replace(errors, rms=errors.rms * size, largest=errors.largest * size)
    cell = RecordCell.of([replace(record, errors={"fp32": volatile})], "fp32")
    assert any(line.startswith("a healthy control is red in ") for line in cell.weaknesses(20))


def test_a_cell_says_how_often_an_error_passes(bench: Any) -> None:
    """Of a few rows, some draws of the error are large enough."""
    model = bench("llama-odd")
    few = RecordCell.of([model.record(model.tokens(120), "fp32").prefix(7)], "fp32")
    seen = few.share(4.0, 20)
    assert 0.0 < seen < 1.0
    assert few.weaknesses(20) == [f"4 times the control's error passes in {1 - seen:.1%} of 20 draws"]


def test_the_yardstick_of_a_site_is_the_emulations_error_and_at_least_one_rounding() -> None:
    own, wrong = np.ones((4, 8)), np.zeros((4, 8))
    wrong[1] = 1e-3
    of_row, rms, largest = SiteBudget("s", "fp32", own, own + wrong, 1.0, None).yardstick()
    assert of_row == pytest.approx([0.0, 1e-3, 0.0, 0.0]) and (rms, largest) == pytest.approx((5e-4, 1e-3))
    of_row, rms, largest = SiteBudget("s", "fp32", own, own, 1.0, None).yardstick()
    assert not of_row.any() and (rms, largest) == pytest.approx((2.0**-23 / np.sqrt(12), 2.0**-23))


def test_the_floor_of_a_cell_is_one_ulp_of_its_logits(bench: Any) -> None:
    model = bench("llama-odd")
    record = model.record(model.tokens(12), "fp32")
    (((numbers, _),),) = [RecordCell.of([record], "fp32").parts]
    logits = (record.topk_logprobs + record.lse[:, None]).astype(np.float32)
    assert numbers.floor == pytest.approx(np.spacing(np.abs(logits)).max(axis=1))
    alone = RecordCell.of([record.prefix(1)], "fp32")
    assert alone.rows == 1 and alone.share(1.0, 5) == 0.0
