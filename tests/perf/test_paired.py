"""The statistics of the gate, on noise of the kind and size that was measured (docs/gate.md)."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest

from pytest_adapt.perf.paired import (
    BLOCKS,
    CONFIRMING,
    LEAST,
    LEAST_WALL,
    PAIRS,
    Estimate,
    block_orders,
    block_ratio,
    decide,
    pair_estimate,
    suspicion,
)

# Standard deviation of one pair of processes between equal code, CPU time; the last one has pairs far off (4.3 % with
# one in twenty beyond 11 %), as a pure Python loop has.
LAYOUTS = {"gemm": 0.0065, "lora": 0.009, "np_small": 0.011, "mem": 0.033}
SLICE_NOISE, DRIFT = 0.02, 0.15


def pair(dice: random.Random, layout: float, change: float, heavy: bool = False) -> float:
    """One pair of fresh processes: what is constant in each, what drifts over both, what is random in each slice."""
    wide = layout * (4.0 if heavy and dice.random() < 0.1 else 1.0)
    a, b = dice.gauss(0, wide / math.sqrt(2)), dice.gauss(0, wide / math.sqrt(2))
    level, blocks = dice.uniform(-DRIFT, DRIFT), []
    for order in block_orders(BLOCKS, dice):
        times = []
        for side in order:
            level += dice.gauss(0, 0.01)
            burst = 0.3 if dice.random() < 0.02 else 0.0
            constant = a if side == "A" else b + change
            times.append(0.02 * math.exp(level + constant + dice.gauss(0, SLICE_NOISE) + burst))
        blocks.append(block_ratio(order, times))
    return pair_estimate(blocks)


def verdict(dice: random.Random, layout: float, change: float, heavy: bool = False) -> tuple[bool, str]:
    """(whether the first round suspects, the verdict) of one benchmark."""

    def rounds(count: int) -> dict[str, Estimate]:
        return {"cpu": Estimate(tuple(pair(dice, layout, change, heavy) for _ in range(count)))}

    first = rounds(PAIRS)
    suspect = bool(suspicion(first, "cpu"))
    return suspect, decide(first, rounds(CONFIRMING) if suspect else None, "cpu").verdict


def shares(layout: float, change: float, count: int, heavy: bool = False) -> tuple[float, dict[str, float]]:
    dice = random.Random(f"{layout}{change}{heavy}")
    found = [verdict(dice, layout, change, heavy) for _ in range(count)]
    names = ("regression", "improvement", "same", "inconclusive")
    return sum(one for one, _ in found) / count, {name: sum(v == name for _, v in found) / count for name in names}


@pytest.mark.requirement(105)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_code_is_rarely_suspected_and_never_confirmed(name: str) -> None:
    suspected, found = shares(LAYOUTS[name], 0.0, 600)
    assert suspected <= 8 / 480 or name == "mem" and suspected <= 0.05, suspected
    assert found["regression"] == found["improvement"] == 0
    assert found["same"] >= (0.75 if name == "mem" else 0.99)


@pytest.mark.requirement(105)
def test_pairs_that_are_far_off_now_and_then_do_not_make_a_verdict() -> None:
    _, found = shares(0.023, 0.0, 600, heavy=True)
    assert found["regression"] == found["improvement"] == 0


@pytest.mark.requirement(105)
@pytest.mark.parametrize("name", ["gemm", "lora", "np_small"])
@pytest.mark.parametrize("slower", [1.10, 1.15])
def test_slowdowns_are_found_after_confirmation(name: str, slower: float) -> None:
    assert shares(LAYOUTS[name], math.log(slower), 200)[1]["regression"] >= 0.98


@pytest.mark.requirement(105)
def test_noise_costs_power_and_is_said() -> None:
    ten = shares(LAYOUTS["mem"], math.log(1.10), 300)[1]
    fifteen = shares(LAYOUTS["mem"], math.log(1.15), 300)[1]
    assert ten["regression"] >= 0.75 and fifteen["regression"] >= 0.95
    # What is not found is not called the same either, in most cases.
    assert ten["same"] <= 0.1 and fifteen["same"] <= 0.01


@pytest.mark.requirement(105)
@pytest.mark.parametrize("quicker", [0.9, 0.85])
def test_it_looks_both_ways(quicker: float) -> None:
    found = shares(LAYOUTS["lora"], math.log(quicker), 100)[1]
    assert found["improvement"] >= 0.98 and found["regression"] == 0


def test_a_rate_of_false_alarms_is_that_of_pairs_not_of_rounds() -> None:
    """With the layout constant in a process, more blocks help nothing: the gate counts pairs."""
    dice = random.Random(3)
    spread = statistics.stdev(pair(dice, 0.033, 0.0) for _ in range(400))
    assert spread == pytest.approx(0.033, rel=0.25)


@pytest.mark.parametrize("order", ["ABBA", "BAAB"])
def test_drift_falls_on_both_sides(order: str) -> None:
    steady = [1.0 + 0.1 * place for place in range(4)]
    assert block_ratio(order, steady) == pytest.approx(0.0, abs=1e-12)
    slower = [time * (1.25 if side == "B" else 1.0) for side, time in zip(order, steady, strict=True)]
    assert block_ratio(order, slower) == pytest.approx(math.log(1.25))
    with pytest.raises(ValueError, match="one positive time for each slice"):
        block_ratio(order, [1.0, 0.0, 1.0, 1.0])


def test_each_side_goes_first_and_the_tails_of_blocks_do_not_count() -> None:
    orders = block_orders(200, random.Random(1))
    assert set(orders) == {"ABBA", "BAAB"} and 60 < orders.count("ABBA") < 140
    assert pair_estimate([0.0, 9.0, 0.02, -7.0, 0.01, 0.03, 8.0, -9.0]) == pytest.approx(0.015)


def test_the_interval_resamples_pairs() -> None:
    """Its bounds are quantiles of the bootstrap distribution of the median, here by going through all samples."""
    pairs = (0.02, -0.01, 0.05, 0.03, 0.10)
    drawn = sorted(statistics.median(sample) for sample in itertools.product(pairs, repeat=5))
    low, high = Estimate(pairs).interval
    assert math.log(low) == pytest.approx(drawn[int(0.025 * len(drawn))])
    assert math.log(high) == pytest.approx(drawn[int(0.975 * len(drawn))])
    assert str(Estimate((0.0, 0.0, 0.0))) == "x1.000 [1.000, 1.000], 3 pairs"


@pytest.mark.parametrize(
    ("first", "confirming", "expected"),
    [
        ((0.1,) * 5, (0.1,) * 7, "regression"),
        ((-0.1,) * 5, (-0.1,) * 7, "improvement"),
        ((0.1,) * 5, (0.0,) * 7, "same"),  # a false alarm
        ((0.1,) * 5, (-0.1,) * 7, "inconclusive"),  # the rounds contradict each other
        ((0.1,) * 5, (0.1, 0.1, 0.1, 0.1, 0.1, -0.1, -0.1), "inconclusive"),  # five of seven agree
        ((0.1,) * 5, (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, -0.1), "regression"),
        ((0.1, 0.5, -0.3, 0.06, 0.4), (0.06, 0.9, 0.5, 0.06, 0.06, 0.7, 0.01), "inconclusive"),  # too wild to tell
        ((0.0,) * 5, None, "same"),
        ((0.0, 0.12, -0.12, 0.1, -0.1), None, "inconclusive"),  # it could not have seen 5 %
    ],
)
def test_verdicts(first: tuple[float, ...], confirming: tuple[float, ...] | None, expected: str) -> None:
    two = None if confirming is None else {"cpu": Estimate(confirming)}
    assert decide({"cpu": Estimate(first)}, two, "cpu").verdict == expected


def test_a_suspicion_must_be_confirmed() -> None:
    with pytest.raises(ValueError, match="measure the confirming one"):
        decide({"cpu": Estimate((0.1,) * 5)}, None, "cpu")


@pytest.mark.parametrize("change", [1, -1])
def test_waiting_shows_in_wall_time_alone(change: int) -> None:
    quiet = Estimate((0.0,) * 5)
    for size, expected in ((1.1 * LEAST_WALL, "wall"), (0.9 * LEAST_WALL, "")):
        assert suspicion({"cpu": quiet, "wall": Estimate((change * size,) * 5)}, "cpu") == expected
    waits: Callable[[int], dict[str, Estimate]] = lambda count: {  # noqa: E731
        "cpu": Estimate((0.0,) * count),
        "wall": Estimate((change * 0.5,) * count),
    }
    found = decide(waits(5), waits(7), "cpu")
    assert (found.verdict, found.clock) == ("regression" if change > 0 else "improvement", "wall")
    # By wall time the ordinary limit counts where wall time gates.
    assert suspicion({"wall": Estimate((2 * LEAST,) * 5)}, "wall") == "wall"


def test_the_control_sets_the_floor_of_the_noise() -> None:
    quiet = {"wall": Estimate((0.0,) * 5)}
    assert decide(quiet, None, "wall", floor=0.0).verdict == "same"
    assert decide(quiet, None, "wall", floor=2 * LEAST).verdict == "inconclusive"
