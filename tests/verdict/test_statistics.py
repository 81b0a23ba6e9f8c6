"""Gates over samples keep their promises: false alarms, power, risk of passing, clusters, and what they say of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from pytest_adapt.verdict import statistics
from pytest_adapt.verdict.statistics import (
    POWER,
    RISK,
    Gate,
    Outcome,
    cluster_mean,
    coarse_divergence,
    gate_mean,
    permutation_test,
    sign_flip,
    student_quantile,
    student_tail,
)

SETS = 2000
Data = dict[str, np.ndarray]
Draw = Callable[[np.random.Generator], Data]


def within(count: int, rate: float, sets: int = SETS) -> bool:
    """Whether ``count`` of ``sets`` is what ``rate`` gives, but for one chance in 10,000."""
    return abs(count - sets * rate) <= 3.9 * math.sqrt(sets * rate * (1 - rate))


def correlated(clusters: int, size: int, effect: float = 0.0, uneven: bool = False) -> Draw:
    """Observations that share half of their variance within a cluster."""

    def draw(rng: np.random.Generator) -> Data:
        sizes = rng.integers(size // 2, 3 * size // 2, clusters) if uneven else np.full(clusters, size)
        return {f"p{i}": effect + rng.normal() + rng.normal(size=n) for i, n in enumerate(sizes)}

    return draw


def outcomes(draw: Draw, margin: float, seed: int = 0, sets: int = SETS, **how: Any) -> list[Gate]:
    rng = np.random.default_rng(seed)
    return [gate_mean(draw(rng), margin, **how) for _ in range(sets)]


def count(gates: list[Gate], outcome: Outcome) -> int:
    return sum(gate.outcome is outcome for gate in gates)


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_a_t_gate_raises_false_alarms_at_its_rate(sides: int, alpha: float) -> None:
    gates = outcomes(correlated(20, 12), 0.0, alpha=alpha, sides=sides)
    assert {gate.method for gate in gates} == {"t"}
    assert within(count(gates, Outcome.FAIL), alpha)


def test_clusters_of_uneven_size_keep_the_rate() -> None:
    """Intervals for uneven clusters are approximate: the rate may be off by a quarter, no more."""
    failed = count(outcomes(correlated(24, 12, uneven=True), 0.0, alpha=0.05), Outcome.FAIL)
    assert within(failed, 0.05) or 0.75 * 0.05 < failed / SETS < 1.25 * 0.05


def test_a_gate_that_ignores_clusters_would_cry_wolf() -> None:
    rng = np.random.default_rng(0)
    draw = correlated(20, 12)
    alone = [
        {str(i): value[None] for i, value in enumerate(np.concatenate(list(draw(rng).values())))} for _ in range(200)
    ]
    naive = sum(gate_mean(data, 0.0, alpha=0.05).outcome is Outcome.FAIL for data in alone)
    assert naive > 5 * 0.05 * 200


def test_few_clusters_are_tested_exactly() -> None:
    """With 8 clusters 2^8 signs allow p-values of whole 128ths: six of them are the largest level below 0.05."""
    gates = outcomes(correlated(8, 5), 0.0, alpha=0.05)
    assert {gate.method for gate in gates} == {"exact sign-flip"}
    assert within(count(gates, Outcome.FAIL), 6 / 128)


def test_at_the_margin_both_errors_have_their_rates() -> None:
    """A true effect of just the margin fails with alpha, and passes with the stated risk."""
    gates = outcomes(correlated(24, 10, effect=0.4), 0.4, alpha=0.01, sides=1)
    assert within(count(gates, Outcome.FAIL), 0.01)
    assert within(count(gates, Outcome.PASS), RISK)
    assert count(gates, Outcome.INCONCLUSIVE) > 0.9 * SETS


@pytest.mark.parametrize("clusters", [12, 24])
def test_the_stated_effect_is_seen_with_the_stated_power(clusters: int) -> None:
    """The error of the mean is known here: sqrt((1 + 1 / 10) / clusters)."""
    margin, alpha = 0.3, 0.01
    error = math.sqrt(1.1 / clusters)
    reach = student_quantile(1 - alpha / 2, clusters - 1) + student_quantile(POWER, clusters - 1)
    effect = margin + reach * error
    gates = outcomes(correlated(clusters, 10, effect), margin, alpha=alpha)
    assert np.mean([gate.detectable for gate in gates]) == pytest.approx(effect, rel=0.03)
    assert count(gates, Outcome.FAIL) / SETS == pytest.approx(POWER, abs=0.05)


def test_an_undecided_gate_knows_how_many_clusters_would_settle_it() -> None:
    undecided = [
        gate for gate in outcomes(correlated(10, 5, 0.2), 0.5, sets=200) if gate.outcome is Outcome.INCONCLUSIVE
    ]
    assert undecided
    checked = 0
    for seed, gate in enumerate(undecided):
        if not 0 < gate.needed <= 400:
            continue
        # The same mean and spread from so many clusters.
        rng = np.random.default_rng(seed)
        for clusters, settled in ((gate.needed, True), (gate.needed * 9 // 10 - 1, False)):
            values = rng.normal(size=clusters)
            values = (values - values.mean()) / values.std(ddof=1)
            values = gate.effect + gate.sample.error * math.sqrt(gate.sample.clusters) * values
            again = gate_mean({str(i): values[i : i + 1] for i in range(clusters)}, 0.5)
            if again.method == "t":
                assert (again.outcome is not Outcome.INCONCLUSIVE) == settled
                checked += 1
    assert checked > 50


def test_a_gate_says_what_it_rests_on() -> None:
    rng = np.random.default_rng(3)
    data = {f"p{i}": rng.normal(0.02, 0.1, 10) for i in range(4)}
    gate = gate_mean(data, 0.03)
    assert gate.outcome is Outcome.INCONCLUSIVE
    assert "undecided, p " in gate.detail
    assert "over 4 prompts (t)" in gate.detail
    assert f"about {gate.needed} prompts would settle it" in gate.detail
    assert f"sees {gate.detectable:.3g} with power 0.8 at alpha 0.0001" in gate.detail
    alone = gate_mean({"p": data["p0"]}, 1.0)
    assert (alone.outcome, alone.needed, alone.detectable) == (Outcome.INCONCLUSIVE, 2, math.inf)
    with pytest.raises(ValueError, match="no observations"):
        gate_mean({}, 1.0)
    with pytest.raises(ValueError, match="margin -1"):
        gate_mean(data, -1.0)


def test_equal_answers_are_not_told_apart_from_a_rare_difference() -> None:
    """No difference among 400 answers: a margin that one more answer would break is not shown to hold."""
    data = {f"p{i}": np.zeros(20) for i in range(20)}
    assert gate_mean(data, 1 / 400, sides=1, resolution=1.0).outcome is Outcome.INCONCLUSIVE
    assert gate_mean(data, 3 / 400, sides=1, resolution=1.0).outcome is Outcome.PASS


def test_sign_flip_goes_through_all_signs() -> None:
    sums = [0.7, -0.1, 0.4, 1.1, 0.2]
    every = [sum(sign * value for sign, value in zip(signs, sums, strict=True)) for signs in product((1, -1), repeat=5)]
    assert sign_flip(sums) == np.mean([value >= sum(sums) - 1e-12 for value in every])
    # McNemar's exact test: 9 pairs got worse, 1 got better, the others stayed.
    assert sign_flip([1.0] * 9 + [-1.0] + [0.0] * 3) == pytest.approx(11 / 1024)


@pytest.mark.parametrize(
    ("p", "dof", "t"),
    [
        (0.975, 1, 12.70620474),
        (0.975, 5, 2.570581836),
        (0.995, 10, 3.169272673),
        (0.95, 30, 1.697260887),
        (0.9, 2.5, 1.73025),
    ],
)
def test_student_quantiles_are_the_tabulated_ones(p: float, dof: float, t: float) -> None:
    assert student_quantile(p, dof) == pytest.approx(t, rel=1e-3 if dof == 2.5 else 1e-8)
    assert student_tail(student_quantile(p, dof), dof) == pytest.approx(1 - p, rel=1e-9)
    assert (student_tail(math.inf, dof), student_tail(-math.inf, dof)) == (0.0, 1.0)
    assert student_quantile(1 - p, dof) == -student_quantile(p, dof)


def test_the_error_of_even_clusters_is_that_of_their_means() -> None:
    rng = np.random.default_rng(1)
    data = {str(i): rng.normal(size=7) for i in range(9)}
    means = np.array([values.mean() for values in data.values()])
    found = cluster_mean(data)
    assert found.mean == pytest.approx(means.mean())
    assert found.error == pytest.approx(means.std(ddof=1) / 3)
    assert found.dof == pytest.approx(8)
    assert (found.clusters, found.observations) == (9, 63)


def test_joining_tokens_never_raises_a_divergence() -> None:
    rng = np.random.default_rng(2)
    p, q = (np.log(rng.dirichlet(np.ones(30), 50)) for _ in range(2))
    whole = np.sum(np.exp(p) * (p - q), axis=1)
    order = np.argsort(-p, axis=1)
    for listed in (1, 5, 29, 30):
        ids = order[:, :listed]
        reference = np.take_along_axis(p, ids, axis=1)
        found = coarse_divergence(reference, np.take_along_axis(q, ids, axis=1) - reference)
        assert (found <= whole + 1e-9).all()
        assert (found > 0).all()
        if listed >= 29:
            assert found == pytest.approx(whole)
    # A token that one side does not list joins the mass outside.
    reference = np.take_along_axis(p, order[:, :5], axis=1)
    hidden = np.take_along_axis(q, order[:, :5], axis=1) - reference
    hidden[:, 4] = np.nan
    assert coarse_divergence(reference, hidden) == pytest.approx(coarse_divergence(reference[:, :4], hidden[:, :4]))
    # Tiny differences do not cancel away.
    tiny = coarse_divergence(reference[:, :4], np.full((50, 4), 1e-9))
    assert (tiny > 0).all() and (tiny < 1e-15).all()


def test_a_divergence_of_tiny_differences_is_exact() -> None:
    """Terms of third order count: p and q are far from symmetrical."""
    for moved in (1e-6, -1e-6, 4e-6):
        p, q = np.array([[0.9, 0.1]]), np.array([[0.9 + moved, 0.1 - moved]])
        difference = np.log1p(np.array([[moved / 0.9, -moved / 0.1]]))
        series = sum(moved**n / n * ((-1) ** n * 0.9 ** (1 - n) + 0.1 ** (1 - n)) for n in range(2, 6))
        assert float(coarse_divergence(np.log(p), difference)[0]) == pytest.approx(series, rel=1e-7, abs=0.0), q


SHAPES = [np.array([0.55, 0.2, 0.1, 0.1, 0.05]), np.full(12, 1 / 12)]


def draws(rng: np.random.Generator, n: int, m: int, change: float = 1.0) -> tuple[Data, Data, Data]:
    """Target (temperature ``change``), reference and surprises of two prompts."""
    hot = [shape ** (1 / change) / np.sum(shape ** (1 / change)) for shape in SHAPES]
    target = {str(i): rng.choice(len(p), n, p=p) for i, p in enumerate(hot)}
    reference = {str(i): rng.choice(len(p), m, p=p) for i, p in enumerate(SHAPES)}
    return target, reference, {str(i): -np.log(p) for i, p in enumerate(SHAPES)}


def test_two_samples_of_one_distribution_raise_false_alarms_at_the_rate() -> None:
    rng = np.random.default_rng(5)
    p = np.array([permutation_test(*draws(rng, 24, 96), alpha=0.05, seed=seed).p for seed in range(SETS)])
    assert within(int(np.sum(p <= 0.05)), 0.05)
    assert within(int(np.sum(p <= 0.3)), 0.3)


def test_a_wrong_temperature_and_a_missing_token_are_seen() -> None:
    rng = np.random.default_rng(6)
    hot = permutation_test(*draws(rng, 400, 3200, change=1.5))
    assert hot.p < 1e-4
    assert hot.surprise > 0.1
    assert hot.surprise_score > 5
    target, reference, values = draws(rng, 400, 3200)
    # Of equal tokens one never comes: no mean surprise tells that.
    target["1"] = np.where(target["1"] == 3, 4, target["1"])
    gone = permutation_test(target, reference, values)
    assert gone.p < 1e-4
    assert gone.frequency_score > 5 > gone.surprise_score


def test_what_a_healthy_target_may_show_is_taken_off() -> None:
    rng = np.random.default_rng(7)
    target, reference, values = draws(rng, 400, 3200, change=1.5)
    seen = permutation_test(target, reference, values, alpha=0.05)
    excused = permutation_test(target, reference, values, alpha=0.05, surprise_margin=0.4, frequency_margin=1e3)
    assert seen.p < 0.01 < 0.5 < excused.p
    nothing = permutation_test(target, reference, values, alpha=0.05, surprise_margin=0.0, frequency_margin=0.0)
    assert seen == nothing, "unless told, nothing is taken off"
    assert excused.surprise == pytest.approx(seen.surprise)
    with pytest.raises(ValueError, match="prompt 0: 0 draws against"):
        permutation_test({"0": np.array([], int)}, reference, values)


def test_the_sample_counts_as_one_of_its_permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of a thousand are as extreme: seven thousand are drawn until twenty were, and then the sample joins."""
    batch = np.tile([5, 5], (1000, 1))
    batch[:3] = 10, 0
    monkeypatch.setattr(statistics._Table, "permuted", lambda *given: batch)
    sample = {"p": np.zeros(10, int)}, {"p": np.ones(10, int)}, {"p": np.array([1.0, 2.0])}
    found = permutation_test(*sample)
    assert (found.p, found.permutations) == (pytest.approx(22 / 7001), 7000)


def test_the_surprise_is_the_difference_of_the_means() -> None:
    rng = np.random.default_rng(8)
    target, reference, values = draws(rng, 4000, 8000, change=1.3)
    found = permutation_test(target, reference, values, alpha=0.05)
    moved = [values[name][target[name]].mean() - values[name][reference[name]].mean() for name in target]
    assert found.surprise == pytest.approx(np.mean(moved), rel=1e-9)


def test_frequencies_of_one_distribution_have_a_standard_score() -> None:
    rng = np.random.default_rng(9)
    scores = [permutation_test(*draws(rng, 200, 600), alpha=1.0).frequency_score for _ in range(300)]
    assert np.mean(scores) == pytest.approx(0.0, abs=0.2)
    assert np.std(scores) == pytest.approx(1.0, abs=0.15)
