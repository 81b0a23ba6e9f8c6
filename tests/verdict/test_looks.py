"""What wrong values look like: each kind of fault in the words that lead to it, and no words where nothing explains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from pytest_adapt.verdict.looks import among, coarseness, likeness, listed, reach, together, which

ALLOWED = 1e-6
OWN = np.random.default_rng(0).normal(size=48)
OTHER = np.random.default_rng(1).normal(size=48)
NOISE = np.random.default_rng(2).uniform(-0.3, 0.3, size=48) * ALLOWED


def said(value: np.ndarray, own: np.ndarray = OWN, others: Iterable[tuple[str, np.ndarray]] = ()) -> str:
    return likeness(value, own, np.full(len(own), ALLOWED), others)


def _changed(change: Callable[[np.ndarray], None]) -> np.ndarray:
    value = OWN.copy()
    change(value)
    return value + NOISE * (value != 0)


def _zero(value: np.ndarray) -> None:
    value[24:] = 0.0


def _last(value: np.ndarray) -> None:
    value[-1] = 0.0


def _negated(value: np.ndarray) -> None:
    value[1::4] *= -1


def _raised(value: np.ndarray) -> None:
    value += 0.5


def _swapped(value: np.ndarray) -> None:
    value[:] = value.reshape(2, 24).T.ravel()


@pytest.mark.requirement(121)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_zero, "values 24 to 47 of 48: 0"),
        (_last, "value 47, the last, alone of 48: 0"),
        (_negated, "one value in 4, 1 to 45, of 48: -1 times the expected"),
        (_raised, "all 48 values: the expected +0.5"),
        (_swapped, "values 1 to 46 of 48: the expected ones in another order"),
    ],
)
def test_a_simple_change_is_named(change: Callable[[np.ndarray], None], words: str) -> None:
    assert said(_changed(change)) == words


def test_values_of_another_place_are_named_by_it() -> None:
    value = OTHER + NOISE
    assert said(value, others=[("position 3", -OTHER), ("head 2", OTHER)]) == "all 48 values: those of head 2"
    assert "no simple change (cosine" in said(value, others=[("position 3", -OTHER)])


def test_a_multiple_that_was_rounded_on_the_way_is_about_one() -> None:
    value = OWN * 1.0625 * (1 + 1e-3 * NOISE / ALLOWED)
    assert said(value).startswith("all 48 values: about 1.06") and "(cosine 1.0000" in said(value)
    assert "about" not in said(OWN + 0.3 * OTHER)


def test_a_healthy_error_is_no_explanation() -> None:
    """Values that are all a little off are nearly one times the expected, and nearly those of a row beside it."""
    value = OWN + 1.5 * ALLOWED * np.sign(NOISE)
    words = said(value, others=[("position 3", OWN + 1e-8)])
    assert "times the expected" not in words and "those of" not in words
    rows = np.tile(OWN, (4, 1))
    assert together(rows + NOISE, rows, np.full(rows.shape, ALLOWED)) == "no value stands out: all err too much"
    words = together(rows * 1.05 + 0.01 * NOISE, rows, np.full(rows.shape, 0.2))
    assert words == "no value stands out; all of them together: 1.05 times the expected"


def test_coarse_values_are_told_from_those_of_the_format() -> None:
    scale = 2.0 ** np.floor(np.log2(np.abs(OWN)))
    four = np.round(OWN / scale * 8) / 8 * scale  # float8 e4m3 has 4 significant bits
    assert said(four) == "all 48 values: rounded to 4 significant bits"
    assert coarseness(four) == 4 and coarseness(np.array([1.0, -2.0, 0.5, 0.0])) == 1 and coarseness(OWN) > 40
    bf16 = np.round(OWN / scale * 128) / 128 * scale
    assert "significant bits" not in likeness(bf16 + 0.1 * scale, OWN, np.full(48, 1e-6), (), "bf16")


def test_what_is_clipped_is_not_called_rounded() -> None:
    words = said(np.clip(OWN, -0.25, 0.25))
    assert "all of magnitude 0.25, with the signs that they should have (clipped)" in words
    stored = np.round(OWN * 16) / 16  # of few bits themselves, as the rows of an embedding are
    assert "significant bits" not in said(np.roll(stored, 5)[:40], stored[:40])


def test_a_factor_near_one_is_told_from_one() -> None:
    allowed = np.full(48, 1e-9)
    assert likeness(OWN * 1.0000044, OWN, allowed, ()).endswith("1.0000044 times the expected")


def test_few_values_are_explained_by_nothing() -> None:
    """Two are near a multiple, and near those of one of many rows, by chance; some that were disturbed are no order."""
    rng = np.random.default_rng(3)
    rows = [(f"position {at}", rng.normal(size=64)) for at in range(511)]
    for wrong in (1, 2, 3, 4, 6):
        for _ in range(40):
            own = rng.normal(size=64)
            value = own.copy()
            value[:wrong] += rng.normal(size=wrong)
            words = likeness(value, own, np.full(64, 0.02), rows)
            assert "no simple change" in words or "about" in words, words


def test_constants_are_called_so() -> None:
    assert said(np.full(48, 0.5)) == "all 48 values: all 0.5"
    assert said(np.where(np.arange(48) % 2, 1.0, -1.0)) == "all 48 values: all of magnitude 1"


def test_all_rows_of_a_large_site_are_looked_at_in_a_moment() -> None:
    own = np.random.default_rng(0).normal(size=(512, 32000)).astype(np.float32)
    started = time.process_time()
    assert "1.5 times" in together(own * 1.5, own, np.full_like(own, 1.0))
    assert time.process_time() - started < 1.0


def test_a_short_row_is_shown_whole() -> None:
    words = said(np.array([0.3, 0.45, 0.25]), np.array([0.2, 0.3, 0.5 / 3]))
    assert words.endswith("the row is [0.3, 0.45, 0.25], expected [0.2, 0.3, 0.1667], sum 1 instead of 0.6667")
    assert words.startswith("all 3 values: 1.5 times the expected")
    assert "sum" not in said(np.array([1.0, -1.0]), np.array([2.0, -3.0]))
    assert said(np.array([2.0]), np.array([1.0])) == "the one value: no simple change; the row is [2], expected [1]"


def test_values_that_are_not_everywhere_are_counted() -> None:
    off = np.zeros(10, bool)
    off[[0, 1, 5, 9]] = True
    assert which(off, "value") == "4 of 10 values (0-1, 5, 9)"
    assert which(np.ones(3, bool), "head") == "all 3 heads"
    assert listed([0, 1, 2, 4, 6, 8, 10, 12, 14]) == "0-2, 4, 6, 8, 10, 12 ..."


def _reach(rows: list[int], per: int = 1, length: int = 8, prompt: int = 8, experts: np.ndarray | None = None) -> str:
    over = np.zeros(length * per, bool)
    over[rows] = True
    return reach(over, np.arange(length), per, prompt, experts)


@pytest.mark.parametrize(
    ("rows", "prompt", "words"),
    [
        ([], 8, ""),
        (list(range(8)), 5, "at all 8 positions"),
        ([3], 8, "at position 3 alone of 8"),
        ([3], 5, "at position 3 alone of 8 (in prefill alone)"),
        ([4, 5, 6, 7], 4, "at all positions from 4 on (in decode alone)"),
        ([4, 5, 6, 7], 6, "at all positions from 4 on"),
        ([1, 4, 6], 8, "at 3 of 8 positions, 1 the first"),
    ],
)
def test_positions_and_stages_are_told(rows: list[int], prompt: int, words: str) -> None:
    assert _reach(rows, prompt=prompt) == words


def test_heads_and_experts_are_told_where_not_all_are_off() -> None:
    assert _reach([2, 5, 8, 11], per=3, length=4) == "at all 4 positions, head 2, the last, alone of 3"
    assert _reach(list(range(12)), per=3, length=4) == "at all 4 positions"
    ids = np.array([[0, 4], [1, 4], [0, 1], [2, 4]])
    four = [1, 3, 7]
    assert _reach(four, 2, 4, 4, ids) == "at 3 of 4 positions, 0 the first, in expert 4 alone (4 were chosen)"


def test_layers_are_told() -> None:
    assert among([0, 1, 2], [0, 1, 2]) == "in all 3 layers"
    assert among([2], [0, 1, 2]) == "in layer 2 of 0-2"
    assert among([0, 2], [0, 1, 2]) == "in layers 0, 2 of 0-2"
    assert among([0], [0]) == ""
