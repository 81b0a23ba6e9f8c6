"""Growth with length is told from its exponent, in one run, whatever the units."""

from __future__ import annotations

import math

import pytest

from pytest_adapt.verdict.growth import exponent
from pytest_adapt.verdict.judge import Judge

LENGTHS = (1024, 2048, 4096, 8192)


@pytest.mark.requirement(104, 105)
@pytest.mark.parametrize(("power", "level"), [(1, 0.0), (1, 5.0), (2, 0.0), (2, 5.0), (3, 1.0)])
def test_the_exponent_of_a_power_law_is_found(power: int, level: float) -> None:
    for unit in (1e-9, 1.0, 1e9):
        values = [unit * (level + (n / 1024) ** power) for n in LENGTHS]
        assert exponent(LENGTHS, values) == pytest.approx(power, abs=0.1)


def test_a_cost_has_no_negative_part_and_a_logarithm_next_to_no_exponent() -> None:
    """A line that starts below 0 is no cost: of those that are, the next one is steeper."""
    assert exponent(LENGTHS, [n / 1024 - 0.9 for n in LENGTHS]) > 1.2
    assert exponent(LENGTHS, [100 + math.log(n) for n in LENGTHS]) < 0.03


def test_what_does_not_grow_has_exponent_0() -> None:
    assert exponent(LENGTHS, [3.0, 3.0, 3.0, 3.0]) == 0.0
    assert exponent(LENGTHS, [4.0, 3.0, 3.0, 2.0]) == 0.0
    with pytest.raises(ValueError, match="three or more"):
        exponent((1, 2), (1.0, 2.0))


@pytest.mark.requirement(104)
def test_a_matrix_of_all_pairs_fails_and_a_cache_does_not() -> None:
    pairs = [1.5 * length**2 for length in LENGTHS]
    for values, red in (
        ([4e7 + 2 * length**2 for length in LENGTHS], True),  # one head's scores in 16 bits
        ([4e7 + 1e5 * length for length in LENGTHS], False),
        ([0.0, 0.0, 0.0, 9e7], False),  # what an allocator hid until it could not
        ([1e6, 2e6, 2e6, 7e6], False),
    ):
        judge = Judge("fp32")
        judge.growth("memory.exponent", LENGTHS, values, most=1, least=pairs)
        assert bool(judge.failures()) is red, values
        assert judge.measurements[0].compared == 4


def test_steep_growth_must_repeat_itself() -> None:
    """What a busy allocator does once is no growth; nor is what stands out by less than equal measurements differ."""
    pairs = [1.5 * length**2 for length in LENGTHS]
    steep = [4e7 + 2 * length**2 for length in LENGTHS]
    flat = [4e7] * 4
    shaken = [[value + shift for value in steep] for shift in (0.0, 1e6, 2e6)]
    for rounds, red in (
        ([steep, steep, steep], True),
        (shaken, True),
        ([steep, flat, steep], False),
        ([steep, steep, [value * 4 for value in steep]], False),
    ):
        judge, later = Judge("fp32"), iter(rounds[1:])
        judge.growth("memory.exponent", LENGTHS, rounds[0], most=1, least=pairs, again=lambda later=later: next(later))
        assert bool(judge.failures()) is red, rounds
        assert judge.measurements[0].compared == 12 and judge.measurements[0].detail.count("again") == 2
    calm = Judge("fp32")
    calm.growth("memory.exponent", LENGTHS, flat, most=1, least=pairs, again=lambda: pytest.fail("not steep"))
    assert not calm.failures()


def test_growth_that_shows_at_small_lengths_only_is_none() -> None:
    """A cost of all pairs that stands out at one length does so at every larger one."""
    judge = Judge("bf16")
    values, lengths = [2.662e5, 7.578e5, 5.202e5, 2.699e6], (144, 288, 576, 1151)  # measured: an allocator's noise
    judge.growth("memory.exponent", lengths, values, most=1, least=[1.5 * length**2 for length in lengths])
    assert not judge.failures()
