"""One site by itself: its scale, how far it may err, and what its divergence says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pytest_adapt.verdict.localise import SiteView, error_scale, widening
from pytest_adapt.verdict.result import Divergence


def test_a_divergence_says_expert_and_ranks_where_there_are_any() -> None:
    where = Divergence("layer.1.moe.experts.gate", 3, "1", "2", 2.0, 1.0, "p", 1)
    assert str(where).startswith("layer.1.moe.experts.gate, position 3: got 1, expected 2 (error 2, budget 1)")
    many = dataclasses.replace(where, ranks=tuple(f"rank {number}" for number in range(9)))
    assert "rank 0 or rank 1 or rank 2 or rank 3 or ...: got 1" in str(many)
    whole = dataclasses.replace(where, expert=0, ranks=("rank 1 (ep1)",), step="decode")
    assert str(whole).startswith("layer.1.moe.experts.gate, position 3, expert 0, rank 1 (ep1), decode: got 1")


def test_a_divergence_says_which_error_it_is() -> None:
    own = np.linspace(1.0, 2.0, 24).reshape(6, 4)
    view = SiteView("p", "layer.0.attn.out", own * 1.5, own, own * (1 + 1e-6), "fp32", None, 6)
    (rms, one), (largest, two) = view.judge(1.0)
    assert (rms.metric, largest.metric) == ("site.rms", "site.max") and one is not None and two is not None
    assert "rms of all rows, each relative to the row" in one.note and "largest error, relative to the row" in two.note


@pytest.mark.parametrize(("position", "step"), [(5, "prefill"), (6, "decode"), (7, "decode")])
def test_the_row_after_the_prompt_is_the_first_of_decode(position: int, step: str) -> None:
    own = np.linspace(1.0, 2.0, 32).reshape(8, 4)
    value = own.copy()
    value[position] *= 2
    found = SiteView("p", "layer.0.attn.out", value, own, own * (1 + 1e-6), "fp32", None, 6).judge(1.0)
    assert [(one.position, one.step) for _, one in found if one is not None] == [(position, step)] * 2


def test_by_how_much_roundings_that_nobody_emulates_widen() -> None:
    """One for a fused operation, which shows a rounded copy; one for what attention passes through."""
    found = {
        (site, precision, rounds): widening(f"layer.1.{site}", precision, rounds) ** 2
        for site in ("attn.context", "attn.out")
        for precision in ("fp32", "bf16")
        for rounds in ("eager", "fused")
    }
    extra = {key: round(value - 1) for key, value in found.items()}
    assert [extra["attn.context", one, two] for one in ("fp32", "bf16") for two in ("eager", "fused")] == [1, 1, 1, 2]
    assert [extra["attn.out", one, two] for one in ("fp32", "bf16") for two in ("eager", "fused")] == [0, 0, 0, 1]


def test_rows_of_zeros_have_a_scale_of_one() -> None:
    """Whatever their terms are: nothing is usual where no row has a value."""
    assert error_scale(np.zeros((3, 4)), np.ones((3, 4))).tolist() == np.ones((3, 4)).tolist()
