"""Budgets in numbers: what passes, what does not, and that no statistic can be fooled by shape or sign."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_adapt.verdict.budget import MAX_FACTOR, RMS_FACTOR, Comparison, Rows, spread, ulp
from pytest_adapt.verdict.discrete import certified_positions, near_tie, row_error


def rows(errors: np.ndarray, yard: np.ndarray, prompt: str = "p", floor: float = 0.0) -> Rows:
    return Rows.of_elements(prompt, np.arange(len(errors)), errors, yard, np.full(errors.shape, floor))


def noise(seed: int, count: int = 400, width: int = 20) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width))


@pytest.mark.parametrize(
    ("precision", "value", "expected"),
    [
        ("fp32", 1.0, 2.0**-23),
        ("bf16", 8.0, 2.0**-4),
        ("bf16", -9.7, 2.0**-4),
        ("fp16", 1.0, 2.0**-10),
        ("fp16", 0.0, 2.0**-24),
        ("fp32", 0.0, 2.0**-149),
        ("bf16", 0.0, 2.0**-133),
        ("fp64", 0.0, 2.0**-1074),
        ("fp64", 1.0, 2.0**-52),
        ("fp32", math.inf, 0.0),
    ],
)
def test_ulp_of_known_values(precision: str, value: float, expected: float) -> None:
    assert float(ulp(value, precision)) == expected


@given(st.floats(allow_nan=False, allow_infinity=False, width=32).filter(lambda value: abs(value) < 3e38))
def test_ulp_of_float32_is_numpys(value: float) -> None:
    assert float(ulp(value, "fp32")) == float(np.spacing(np.abs(np.float32(value))))


def test_ulp_refuses_an_unknown_precision() -> None:
    with pytest.raises(ValueError, match="int8"):
        ulp(1.0, "int8")


@pytest.mark.parametrize(("factor", "ok"), [(1.0, True), (1.2, True), (1.5, False), (-1.5, False), (10.0, False)])
def test_rms_and_largest_of_scaled_noise(factor: float, ok: bool) -> None:
    comparison = Comparison(rows=[rows(noise(1) * factor, noise(2))])
    value, budget = comparison.rms()
    assert (value <= budget) is ok
    largest, limit, _, _ = comparison.largest()
    assert (largest <= limit) is (abs(factor) < MAX_FACTOR)


def test_rms_budget_is_the_factor_times_the_yardstick() -> None:
    comparison = Comparison(rows=[rows(noise(1), np.full((400, 20), 0.5))])
    assert comparison.rms()[1] == pytest.approx(RMS_FACTOR * 0.5)
    comparison.widen = math.sqrt(2.0)
    assert comparison.rms()[1] == pytest.approx(RMS_FACTOR * 0.5 * math.sqrt(2.0))


def test_rows_of_different_length_are_weighted_by_what_they_hold() -> None:
    one, two = rows(np.full((400, 1), 3.0), np.ones((400, 1))), rows(np.full((400, 9), 1.0), np.ones((400, 9)))
    assert Comparison(rows=[one, two]).rms()[0] == pytest.approx(math.sqrt((9 + 9) / 10))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_value_among_thousands(sign: float) -> None:
    errors = noise(1)
    errors[123, 7] = 20.0 * sign
    comparison = Comparison(rows=[rows(errors, noise(2))])
    assert comparison.rms()[0] <= comparison.rms()[1], "too small for the mean"
    largest, limit, _, position = comparison.largest()
    assert (largest > limit, position) == (True, 123)


def test_one_ulp_is_always_allowed_and_two_are_not() -> None:
    errors = np.zeros((400, 4))
    errors[5, 1] = 0.1
    nothing = np.zeros((400, 4))
    value, limit, _, _ = Comparison(rows=[rows(errors, nothing, floor=0.1)]).largest()
    assert value <= limit
    value, limit, _, position = Comparison(rows=[rows(errors * 2.01, nothing, floor=0.1)]).largest()
    assert (value > limit, position) == (True, 5)
    rms, budget = Comparison(rows=[rows(np.full((400, 4), 0.1), nothing, floor=0.1)]).rms()
    assert rms > budget, "every value one ulp off is not rounding"


def test_a_volatile_row_may_err_more() -> None:
    yard = noise(2)
    yard[50] *= 10.0
    errors = noise(1)
    errors[50] *= 20.0
    comparison = Comparison(rows=[rows(errors, yard)])
    assert comparison.largest()[0] <= comparison.largest()[1]
    errors[51] *= 20.0
    assert Comparison(rows=[rows(errors, yard)]).largest()[3] == 51


def test_the_budget_of_a_row_that_stands_out_grows_with_it_and_with_luck() -> None:
    """Of values like 2, 0, 0, 0 the largest is twice the rms; a row alone is judged as one of nine."""
    yard = np.zeros((100, 4))
    yard[:, 0] = 2e-3
    yard[50] *= 10.0
    (found,) = Comparison(rows=[rows(np.zeros((100, 4)), yard)]).row_budgets()
    assert found[50] == pytest.approx(spread(9) * 2e-2)
    assert np.delete(found, 50) == pytest.approx(MAX_FACTOR * 2e-2)


def test_an_emulation_whose_largest_error_is_small_by_luck() -> None:
    """The largest of 76 normal errors is 2.6 standard deviations in the median; here it is 1.5, and counts as 2.6."""
    lucky = noise(5, 76, 1)
    lucky = np.clip(lucky, -1.2, 1.2)
    root = math.sqrt(float(np.mean(lucky**2)))
    comparison = Comparison(rows=[rows(noise(6, 76, 1), lucky)])
    limits = comparison.row_budgets()[0]
    assert limits.min() == pytest.approx(MAX_FACTOR * 2.61 * root, rel=0.01)
    assert limits.min() > 1.5 * MAX_FACTOR * np.abs(lucky).max()
    # An emulation that errs as such a one does is not touched.
    usual = np.concatenate([lucky[:75], [[3.0]]])
    assert Comparison(rows=[rows(usual, usual)]).row_budgets()[0].min() == pytest.approx(MAX_FACTOR * 3.0)


def test_few_values_decide_little() -> None:
    assert spread(0) == math.inf
    assert spread(1) > spread(10) > spread(100) > 1.0
    assert spread(200) == pytest.approx(RMS_FACTOR, rel=0.01)
    rng = np.random.default_rng(0)
    for count in (10, 50, 400):
        ratios = [
            math.sqrt(np.mean(rng.normal(size=count) ** 2) / np.mean(rng.normal(size=count) ** 2)) for _ in range(200)
        ]
        assert max(ratios) < max(spread(count), RMS_FACTOR)


def test_the_interval_is_clustered_by_prompt() -> None:
    """Errors that whole prompts share make the interval wider than their number of values suggests."""
    rng = np.random.default_rng(3)
    yard = [noise(seed, 50) for seed in range(8)]
    alike = Comparison(rows=[rows(noise(100 + i, 50), one, f"p{i}") for i, one in enumerate(yard)])
    shared = [noise(100 + i, 50) * math.exp(rng.normal()) for i in range(8)]
    apart = Comparison(
        rows=[rows(errors, one, f"p{i}") for i, (errors, one) in enumerate(zip(shared, yard, strict=True))]
    )
    narrow, wide = alike.interval(), apart.interval()
    assert narrow is not None and wide is not None
    assert narrow[0] < 1.0 < narrow[1]
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])
    assert Comparison(rows=alike.rows[:2]).interval() is None


def test_the_interval_is_the_jackknifes() -> None:
    sizes = [1.0, 2.0, 3.0, 4.0]
    found = Comparison(rows=[rows(np.full((1, 1), one), np.ones((1, 1)), f"p{one}") for one in sizes]).interval()
    without = [0.5 * math.log(np.mean([two**2 for two in sizes if two != one])) for one in sizes]
    error, whole = math.sqrt(3 * np.var(without)), math.sqrt(np.mean(np.square(sizes)))
    assert found == pytest.approx((whole * math.exp(-2 * error), whole * math.exp(2 * error)))


def test_the_worst_row_is_found_in_the_right_prompt() -> None:
    errors = noise(1, 30)
    errors[17] *= 9
    parts = [rows(noise(2, 30), noise(3, 30), "calm"), rows(errors, noise(4, 30), "wild")]
    for comparison in (Comparison(rows=parts), Comparison(rows=parts[::-1])):
        assert comparison.worst_row() == ("wild", 17)
        assert comparison.largest()[2:] == ("wild", 17)


def test_empty_rows_are_not_taken() -> None:
    comparison = Comparison()
    comparison.add(rows(np.zeros((0, 3)), np.zeros((0, 3))))
    assert (comparison.rows, comparison.compared, comparison.positions) == ([], 0, 0)


def test_a_lucky_row_is_no_bound() -> None:
    bound = row_error(np.array([[0.0, 0.0], [1.0, -3.0], [2.0, 1.0]]))
    pooled = math.sqrt((0 + 9 + 4) / 3)
    assert bound.tolist() == pytest.approx([pooled, 3.0, pooled])


def test_a_flip_is_possible_from_the_first_narrow_margin_on() -> None:
    nothing = np.zeros(6)
    ratio = np.array([0.1, 0.49, 0.2, 0.51, 0.1, 0.0])
    assert certified_positions(ratio, nothing).tolist() == [True, True, True, False, False, False]
    assert certified_positions(nothing, ratio).tolist() == [True, True, True, False, True, True], "the last layer"
    assert certified_positions(np.array([math.inf]), np.zeros(1)).tolist() == [False]
    assert certified_positions(np.array([math.nan]), np.zeros(1)).tolist() == [False]


def test_a_near_tie_is_within_what_healthy_targets_err() -> None:
    assert near_tie(0.39, 0.1) and not near_tie(0.41, 0.1)
