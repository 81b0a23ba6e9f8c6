"""Routing: basic operations, ties, groups, weights, margins, and certificates of another's choice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_adapt.oracle import OracleError, routing
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.oracle.spec import RouterSpec

SOFTMAX = RouterSpec(7, 3, "softmax", False, 1, 1, True, 0.0, 1.0)
GROUPED = RouterSpec(12, 3, "sigmoid", True, 4, 2, True, 1e-20, 2.5)


def exact() -> Numerics:
    return Numerics({}.__getitem__, "DeepseekV3ForCausalLM")


def check_softmax_of_all_experts() -> None:
    """Scores are a softmax over all experts, by the definition, and survive large logits."""
    row = [0.3, -1.0, 2.0, 2.0, -5.0, 0.0, 1.0]
    powers = [math.exp(value) for value in row]
    expected = np.array(powers) / sum(powers)
    got = routing.scores_of(exact(), SOFTMAX, np.array([row, [value + 800 for value in row]]))
    assert np.abs(got - expected).max() < 1e-14


def check_ties_take_the_lower_id() -> None:
    """Equal scores: the lower id first, inside the choice and across its edge."""
    selection = np.array(
        [[0.1, 0.5, 0.5, 0.5, 0.5, 0.2, 0.5], [0.0] * 7, [1.0, 0.9, 0.1, 0.2, 0.9, 0.9, 0.3], [0.0, -0.0] * 3 + [0.0]]
    )
    assert routing.choose(SOFTMAX, selection).ids.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 4], [0, 1, 2]]


def check_masked_groups_take_no_part() -> None:
    """Groups are kept by the sum of their two best scores; others give no expert even where all scores are negative."""
    for sign in (7.0, -7.0):
        selection = sign + np.array([[0.0, 0.30, 0.05] + [0.20, 0.19, 0.0] + [0.25, 0.0, 0.0] + [0.16, 0.16, 0.15]])
        # Sums of two: 0.35, 0.39, 0.25, 0.32. Kept: groups 0 and 1, though expert 6 is the second best of all.
        assert routing.kept_groups(GROUPED, selection).tolist() == [[True, True, False, False]]
        assert routing.choose(GROUPED, selection).ids.tolist() == [[1, 3, 4]]


def check_weights_come_from_plain_scores() -> None:
    """Weights are the unbiased scores of the chosen, made to sum to one, times the routed scale, in order of ids."""
    scores = np.array([[0.9, 0.1, 0.2, 0.4, 0.8, 0.3, 0.6, 0.1, 0.5, 0.7, 0.2, 0.9]])
    ids = np.array([[1, 3, 4]])
    got = routing.weights_of(exact(), GROUPED, scores, ids)
    assert np.abs(got - 2.5 * np.array([0.1, 0.4, 0.8]) / 1.3).max() < 1e-14
    plain = routing.weights_of(exact(), replace(GROUPED, renormalise=False), scores, ids)
    assert np.abs(plain - 2.5 * np.array([0.1, 0.4, 0.8])).max() < 1e-14


def check_margin() -> None:
    """No error of the scores below half the margin changes a choice; one just above does."""
    source = np.random.default_rng(5)
    for router in (SOFTMAX, GROUPED):
        selection = source.normal(size=(40, router.experts))
        choice = routing.choose(router, selection)
        signs = source.choice([-1.0, 1.0], size=(200, 1, router.experts))
        for sign in signs:
            moved = routing.choose(router, selection + sign * (0.499 * choice.margin[:, None]))
            assert (moved.ids == choice.ids).all()
        # The worst error pushes the own choice down and everything else up.
        own = np.zeros_like(selection)
        np.put_along_axis(own, choice.ids, 1.0, axis=-1)
        kept = np.repeat(routing.kept_groups(router, selection), router.experts // router.groups, axis=-1)
        against = np.where(own > 0, -1.0, 1.0)
        by_group = np.where(kept, -1.0, 1.0)
        fallen = [
            routing.choose(router, selection + push * 0.501 * choice.margin[:, None]).ids != choice.ids
            for push in (against, by_group)
        ]
        assert (fallen[0].any(-1) | fallen[1].any(-1)).all()


def best_excuse(router: RouterSpec, selection: np.ndarray, given: np.ndarray) -> float:
    """Smallest margin over all sets of kept groups that hold the given experts, by enumeration."""
    size = router.experts // router.groups
    sums = np.sort(selection.reshape(router.groups, size), axis=-1)[:, -2:].sum(-1)
    found = []
    for kept in itertools.combinations(range(router.groups), router.groups_kept):
        if not set(given // size) <= set(kept):
            continue
        outside = [sums[group] for group in range(router.groups) if group not in kept]
        groups = max([0.0, (max(outside) - min(sums[group] for group in kept)) / 2]) if outside else 0.0
        others = [selection[e] for e in range(router.experts) if e // size in kept and e not in given]
        found.append(max([groups, *([max(others) - selection[given].min()] if others else [])]))
    return min(found)


def check_certificates() -> None:
    """The margin of a replay is the least that excuses it; nothing excuses a third group or a double expert."""
    source = np.random.default_rng(6)
    selection = source.normal(size=(60, 12))
    own = routing.choose(GROUPED, selection).ids
    given = np.stack([np.sort(source.choice(12, 3, replace=False)) for _ in range(60)])
    given[0] = own[0]
    found = routing.judge_replay(GROUPED, selection, own, given)
    assert found["row"].tolist() == [row for row in range(60) if (own[row] != given[row]).any()]
    for row, margin, illegal in found:
        assert illegal == (len(set(given[row] // 3)) > 2)
        if not illegal:
            assert abs(margin - best_excuse(GROUPED, selection[row], given[row])) < 1e-14
    twice = routing.judge_replay(GROUPED, selection[:1], own[:1], np.sort(own[:1] * 0 + own[0, 0]))
    assert twice["illegal"].all()


@pytest.mark.requirement(54)
def test_softmax_from_basic_operations() -> None:
    check_softmax_of_all_experts()


@pytest.mark.requirement(54)
def test_ties_take_the_lower_id() -> None:
    check_ties_take_the_lower_id()


@pytest.mark.requirement(54)
def test_choice_equals_sorting_by_hand() -> None:
    """Selection from basic operations: sort (-score, id) pairs in Python; scores on a coarse grid, full of ties."""
    selection = np.random.default_rng(8).integers(0, 4, size=(500, 7)) / 4
    ids = routing.choose(SOFTMAX, selection).ids
    for row, chosen in zip(selection, ids, strict=True):
        ranked = sorted(range(7), key=lambda expert: (-row[expert], expert))
        assert chosen.tolist() == sorted(ranked[:3])


@pytest.mark.requirement(54)
def test_masked_groups_take_no_part_whatever_the_sign() -> None:
    check_masked_groups_take_no_part()


@pytest.mark.requirement(54)
def test_weights_come_from_plain_scores() -> None:
    check_weights_come_from_plain_scores()


def test_margin_is_what_an_error_must_reach() -> None:
    check_margin()


def test_replay_certificates() -> None:
    check_certificates()


@pytest.mark.parametrize(
    ("ids", "message"),
    [(np.zeros((2, 2), np.int64), "shape"), (np.full((1, 3), 12), "0..11"), (np.zeros((1, 3)), "float64")],
)
def test_impossible_replays_are_refused(ids: np.ndarray, message: str) -> None:
    with pytest.raises(OracleError, match=message):
        routing.check_ids(GROUPED, "layer.1.moe.router.ids", ids, 1)


def _sigmoid_scores(n: Numerics, router: RouterSpec, logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def _no_shift(n: Numerics, router: RouterSpec, logits: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def _higher_id(scores: np.ndarray) -> np.ndarray:
    return scores.shape[-1] - 1 - np.argsort(-scores[..., ::-1], axis=-1, kind="stable")


def _zero_filled(original: Callable[..., Any]) -> Callable[..., Any]:
    def choose(router: RouterSpec, selection: np.ndarray) -> Any:
        kept = np.repeat(routing.kept_groups(router, selection), router.experts // router.groups, axis=-1)
        return original(replace(router, groups=1, groups_kept=1), np.where(kept, selection, 0.0))

    return choose


def _groups_ignored(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda router, selection: original(replace(router, groups=1, groups_kept=1), selection)


def _best_of_group(router: RouterSpec, selection: np.ndarray) -> np.ndarray:
    return selection.reshape(len(selection), router.groups, -1).max(-1)


def _scale_lost(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, router, scores, ids: original(n, replace(router, scale=1.0), scores, ids)


def _renormalise_always(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, router, scores, ids: original(n, replace(router, renormalise=True), scores, ids)


def _over_all(n: Numerics, router: RouterSpec, scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    weights = np.take_along_axis(scores, ids, axis=-1)
    return router.scale * (weights / scores.sum(-1, keepdims=True) if router.renormalise else weights)


def _margin_without_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    def choose(router: RouterSpec, selection: np.ndarray) -> Any:
        kept = np.repeat(routing.kept_groups(router, selection), router.experts // router.groups, axis=-1)
        return original(replace(router, groups=1, groups_kept=1), np.where(kept, selection, -1e9))

    return choose


def _excuse_all(router: RouterSpec, selection: np.ndarray, given: np.ndarray) -> tuple[float, bool]:
    return 0.0, False


FAULTS: dict[str, tuple[str, Callable[..., Any], Callable[[], None]]] = {
    "sigmoid for softmax": ("scores_of", lambda original: _sigmoid_scores, check_softmax_of_all_experts),
    "softmax without its shift": ("scores_of", lambda original: _no_shift, check_softmax_of_all_experts),
    "ties to the higher id": ("_order", lambda original: _higher_id, check_ties_take_the_lower_id),
    "masked groups filled with zero": ("choose", _zero_filled, check_masked_groups_take_no_part),
    "groups ignored": ("choose", _groups_ignored, check_masked_groups_take_no_part),
    "group by its best alone": ("_group_scores", lambda original: _best_of_group, check_masked_groups_take_no_part),
    "routed scale lost": ("weights_of", _scale_lost, check_weights_come_from_plain_scores),
    "renormalised against the rule": ("weights_of", _renormalise_always, check_weights_come_from_plain_scores),
    "renormalised over all": ("weights_of", lambda original: _over_all, check_weights_come_from_plain_scores),
    "margin forgets groups": ("choose", _margin_without_groups, check_margin),
    "every replay excused": ("_certificate", lambda original: _excuse_all, check_certificates),
}


@pytest.mark.requirement(54)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, check = FAULTS[fault]
    monkeypatch.setattr(routing, name, plant(getattr(routing, name)))
    with pytest.raises(AssertionError):
        check()


@pytest.mark.requirement(113)
@pytest.mark.parametrize("router", [SOFTMAX, replace(SOFTMAX, scoring="sigmoid")], ids=["softmax", "sigmoid"])
def test_every_form_of_the_scores_is_the_same_but_for_rounding(router: RouterSpec) -> None:
    logits = (np.random.default_rng(0).normal(size=(400, SOFTMAX.experts)) * 3).astype(np.float32)
    right = routing.scores_of(exact(), router, logits.astype(np.float64))
    forms = routing.score_forms(router, logits)
    unit = np.spacing(right.max(axis=1, keepdims=True).astype(np.float32))
    errors = [np.abs(form - right) / unit for form in forms]
    for form, error in zip(forms, errors, strict=True):
        assert form.dtype == np.float32 and np.isfinite(form).all()
        assert 0 < error.max() < 6
    assert all((one != other).any() for place, one in enumerate(forms) for other in forms[:place])
    # What one form hits by luck, another misses.
    alone, together = errors[0].max(axis=1), np.max([error.max(axis=1) for error in errors], axis=0)
    assert together.min() > alone.min() and together.mean() > 1.02 * alone.mean()
    far = np.float32([[200.0, -200.0, *[0.0] * (SOFTMAX.experts - 2)]])
    assert all(np.isfinite(form).all() for form in routing.score_forms(router, far))
