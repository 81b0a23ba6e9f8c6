"""Drawn tokens against a known distribution: right samplers pass, wrong ones fail, and the power is what is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_adapt.golden.reference import OracleReference
from pytest_adapt.models import catalogue, prompts
from pytest_adapt.target.protocol import Response, Sampling
from pytest_adapt.verdict import sampling
from pytest_adapt.verdict.budget import RMS_FACTOR
from pytest_adapt.verdict.judge import Judge
from pytest_adapt.verdict.result import Measurement
from pytest_adapt.verdict.sampling import (
    CONCERN,
    LOOKS,
    Draws,
    Place,
    Plan,
    _border_risk,
    _more_than,
    distribution,
    drawable,
    plan,
    surely_kept,
)
from pytest_adapt.verdict.statistics import permutation_test
from pytest_adapt.verdict.status import Verdict

VOCAB = 64


def place(number: int, error: float = 0.01) -> Place:
    logits = np.random.default_rng(number).normal(0, 2.5, VOCAB)
    return Place(f"p{number}", (number, 1, 2), logits, error, error / 3, (error / 3) ** 2 / 2)


@pytest.fixture
def planned() -> Plan:
    return Plan(tuple(place(number) for number in range(8)), 1.4, 3, end=VOCAB - 1)


Change = Callable[[Sampling], Sampling]


def ask(planned: Plan, setting: Sampling, change: Change, looks: int = 1, seed: int = 0, draws: int = 128) -> Draws:
    """Draws of a target that takes ``change(setting)`` for what it was asked."""
    rng = np.random.default_rng(seed)
    drawn = Draws(setting, "asked")
    for look in range(looks):
        requests = planned.requests(setting, look, draws)
        answers = {}
        for one in planned.places:
            asked = [request.id for request in requests if request.prompt == one.tokens]
            tokens = rng.choice(VOCAB, len(asked), p=distribution(one, change(setting)))
            answers.update({name: Response(name, 3, (int(token),)) for name, token in zip(asked, tokens, strict=True)})
        drawn.add(planned, requests, answers)
    return drawn


def by_name(drawn: Draws) -> dict[str, Measurement]:
    return {one.metric: one for one in drawn.measurements()}


def hotter(factor: float) -> Change:
    return lambda setting: replace(setting, temperature=setting.temperature * factor)


@pytest.mark.requirement(113)
def test_a_right_sampler_passes_and_says_what_it_would_have_seen(planned: Plan) -> None:
    found = by_name(ask(planned, planned.plain, lambda setting: setting))
    assert all(one.ok for one in found.values()), found
    assert found["sample.temperature"].budget == math.log(CONCERN)
    assert "with power 0.8 at alpha 2.5e-05" in found["sample.temperature"].detail
    for setting in planned.filtered.values():
        found = by_name(ask(planned, setting, lambda setting: setting, draws=64))
        assert all(one.ok for one in found.values()), found
        assert "without the filter one would be with probability 1" in found["sample.support"].detail


@pytest.mark.requirement(113)
@pytest.mark.parametrize("factor", [1.1, 1 / 1.1])
def test_a_temperature_off_by_a_tenth_fails_at_the_last_look(planned: Plan, factor: float) -> None:
    found = by_name(ask(planned, planned.plain, hotter(factor), looks=LOOKS))
    assert not found["sample.distribution"].ok
    assert found["sample.distribution"].settled
    assert ("rarer" if factor > 1 else "more probable") in found["sample.distribution"].detail


def test_the_stated_temperature_is_seen_with_the_stated_power(planned: Plan) -> None:
    """Over 200 targets that are off by just as much as one look is said to see with power 0.8."""
    detail = by_name(ask(planned, planned.plain, lambda setting: setting))["sample.temperature"].detail
    factor = float(detail.partition("sees times ")[2].split()[0])
    critical = NormalDist().inv_cdf(1 - 1e-4 / LOOKS / 2)
    scores = []
    for seed in range(200):
        drawn = ask(planned, planned.plain, hotter(factor), seed=seed)
        found = drawn._temperature().detail
        estimate = math.log(float(found.partition("times ")[2].split(",")[0]))
        information = drawn._information()
        scores.append((estimate - drawn._slack()) * math.sqrt(information / (1 + 1 / 8)))
    assert np.mean(np.array(scores) > critical) == pytest.approx(0.8, abs=0.12)


def test_no_two_draws_share_a_seed(planned: Plan) -> None:
    """Over places, draws and looks, and over the attempts of an item that is run again: evidence adds up."""
    seeds = [
        request.sampling.seed
        for attempt in (0, 1, 2, 9)
        for look in (0, 1)
        for request in replace(planned, attempt=attempt).requests(planned.plain, look, draws=16)
    ]
    assert len(set(seeds)) == len(seeds) and min(seeds) > 0


def test_too_few_draws_decide_nothing(planned: Plan) -> None:
    few = replace(planned, places=planned.places[:1])
    found = by_name(ask(few, few.plain, lambda setting: setting, draws=16))
    assert not found["sample.temperature"].ok
    assert not found["sample.temperature"].settled
    assert "draws would settle it" in found["sample.temperature"].detail
    judge = Judge("fp32")
    requests = few.requests(few.plain, draws=16)
    assert len(requests) == len(planned.requests(planned.plain, draws=16)) == 128
    judge.drawn(
        few,
        "temperature",
        requests,
        {one.id: Response(one.id, 3, (int(np.argmax(few.places[0].logits)),)) for one in requests},
    )
    assert judge.settled  # a constant answer is wrong for certain
    assert not judge.inconclusive


WRONG: dict[str, tuple[str, Change]] = {
    "top_k is ignored": ("top_k", lambda setting: replace(setting, top_k=0)),
    "top_k keeps one too many": ("top_k", lambda setting: replace(setting, top_k=setting.top_k + 1)),
    "top_k keeps one too few": ("top_k", lambda setting: replace(setting, top_k=setting.top_k - 1)),
    "top_p is ignored": ("top_p", lambda setting: replace(setting, top_p=1.0)),
    "top_p is 0.6": ("top_p", lambda setting: replace(setting, top_p=0.6)),
    "top_p after top_k is ignored": ("top_k and top_p", lambda setting: replace(setting, top_p=1.0)),
    "top_k before top_p is ignored": ("top_k and top_p", lambda setting: replace(setting, top_k=0)),
}


@pytest.mark.requirement(113)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_filters_fail(planned: Plan, what: str) -> None:
    label, change = WRONG[what]
    found = by_name(ask(planned, planned.filtered[label], change, draws=64))
    failed = [one for one in found.values() if not one.ok]
    assert failed and all(one.settled for one in failed), found
    if what == "top_k keeps one too many":
        assert "(rank 4) is not among those kept" in found["sample.support"].detail


def test_a_token_at_the_border_needs_a_certificate() -> None:
    """Two tokens nearly as good as the third: either may be drawn; the fourth may not."""
    logits = np.array([3.0, 2.0, 1.0, 0.99, 0.5, -4.0])
    near = Place("p", (1,), logits, 0.01, 0.003, 1e-6)
    setting = Sampling(1.0, top_k=3)
    assert drawable(near, setting).tolist() == [True, True, True, True, False, False]
    assert drawable(replace(near, error=1e-6), setting).tolist() == [True, True, True, False, False, False]
    p = distribution(near, Sampling(1.0))
    reached = float(p[:2].sum())
    for top_p, third in ((reached - 1e-9, True), (reached + 1e-9, True), (reached - 0.05, False)):
        assert drawable(near, Sampling(1.0, top_p=top_p))[2] == third
    assert distribution(near, Sampling(1.0, top_p=reached - 1e-9))[2] == 0
    assert distribution(near, Sampling(1.0, top_p=reached + 1e-9))[2] > 0


def test_a_token_is_surely_kept_while_no_error_brings_those_before_it_to_top_p() -> None:
    logits = np.log([0.5, 0.299, 0.15, 0.051])
    for error, third in ((0.01, False), (1e-6, True)):
        place = Place("p", (1,), logits, error, error, error)
        assert surely_kept(place, Sampling(1.0, top_p=0.8)).tolist() == [True, True, third, False]
        assert distribution(place, Sampling(1.0, top_p=0.8))[2] > 0


@pytest.mark.requirement(113)
@pytest.mark.parametrize("filtered", [Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.8), Sampling(1.0, 3, 0.8)])
def test_what_rounding_may_let_in_or_out_is_no_difference(filtered: Sampling) -> None:
    """At each place one token is at the border: targets that keep it and targets that do not are both right."""
    places = []
    for number in range(8):
        logits = np.random.default_rng(number).normal(0, 0.3, VOCAB)
        logits[:5] += 3.0
        logits = np.sort(logits)[::-1].copy()
        if filtered.top_k:
            logits[3] = logits[2] - 1e-4  # as good as the third
        if filtered.top_p < 1:  # the best ones reach top_p by a hair: is the next one still wanted?
            kept = 2 if filtered.top_k else 5
            rest = np.exp(logits[kept : 3 if filtered.top_k else None])
            mass = np.exp(logits[:kept])
            logits[:kept] += np.log(filtered.top_p * rest.sum() / (1 - filtered.top_p) / mass.sum()) + 1e-4
        places.append(Place(f"p{number}", (number, 1, 2), logits, 0.01, 0.003, 5e-6))
    near = Plan(tuple(places), 1.0, 3, end=-1)

    def moved(amount: float) -> Plan:
        """The same places with the tokens from the border on better by ``amount``, or worse."""
        first = 2 if filtered.top_k else 5
        step = (
            np.where(np.arange(VOCAB) == 3, amount, 0.0)
            if filtered.top_p == 1
            else amount * (np.arange(VOCAB) >= first)
        )
        return replace(near, places=tuple(replace(one, logits=one.logits + step) for one in places))

    kept = []
    for amount in (-1e-3, 1e-3):
        target = moved(amount)
        kept.append([set(np.flatnonzero(distribution(one, filtered))) for one in target.places])
        requests = near.requests(filtered, draws=128)
        rng = np.random.default_rng(1)
        by_tokens = {one.tokens: distribution(one, filtered) for one in target.places}
        drawn = Draws(filtered, "asked")
        answers = {one.id: Response(one.id, 3, (int(rng.choice(VOCAB, p=by_tokens[one.prompt])),)) for one in requests}
        drawn.add(near, requests, answers)
        found = by_name(drawn)
        assert found["sample.distribution"].ok, found
        assert "0 of" in found["sample.support"].detail, found
    assert all(one != other for one, other in zip(*kept, strict=True)), "the case is about sets that differ"


def test_where_no_token_is_surely_kept_nothing_is_decided() -> None:
    level = Place("p", (1, 2, 3), np.array([1.0, 1.0, 1.0, 1.0]), 0.1, 0.03, 5e-4)
    alone = Plan((level,), 1.0, 2, end=-1)
    setting = Sampling(1.0, top_k=2)
    requests = alone.requests(setting, draws=16)
    drawn = Draws(setting, "asked")
    drawn.add(alone, requests, {one.id: Response(one.id, 3, (0,)) for one in requests})
    found = by_name(drawn)["sample.distribution"]
    assert not found.ok and not found.settled and "no matter of certainty" in found.detail


def test_filters_follow_one_another() -> None:
    """Of 4/8, 2/8, 1/8, 1/8 top_k 3 leaves 4/7, 2/7, 1/7, of which top_p 0.8 keeps two."""
    halves = Place("p", (1,), np.log([0.5, 0.25, 0.125, 0.125]), 1e-6, 1e-6, 1e-12)
    assert distribution(halves, Sampling(1.0, top_k=3, top_p=0.8)) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert distribution(halves, Sampling(2.0))[0] == pytest.approx(1 / (1 + math.sqrt(0.5) + 1))


def test_an_end_token_that_is_left_out_still_counts(planned: Plan) -> None:
    drawn = Draws(planned.plain, "asked")
    requests = planned.requests(planned.plain)[:3]
    stopped = Response(requests[0].id, 3, (), finish="stop")
    nothing, refused = Response(requests[1].id, 3), Response(requests[2].id, 3, error="no such field")
    drawn.add(planned, requests[:1], {stopped.id: stopped})
    assert drawn.drawn == {"p0": [planned.end]}
    drawn.add(planned, requests[1:], {nothing.id: nothing, refused.id: refused})
    (found,) = drawn.measurements()
    assert (found.metric, found.ok, found.settled) == ("sample.drawn", False, True)
    assert "2 of the draws did not come: no generated token id came back" in found.detail


@pytest.mark.requirement(98)
def test_one_seed_differs_by_rounding_only(planned: Plan) -> None:
    """Walks through the same random numbers: errors of the size that is assumed stay within, other seeds do not."""
    requests = planned.requests(planned.plain)[:64]
    places = {one.tokens: one for one in planned.places}

    def answers(seed: int, salt: int = 0) -> dict[str, Response]:
        rng = np.random.default_rng(seed)
        noise = {one.tokens: rng.normal(0, one.rms, VOCAB) for one in planned.places}
        found = {}
        for request in requests:
            one = places[request.prompt]
            order = np.argsort(-one.logits, kind="stable")
            total = np.cumsum(distribution(replace(one, logits=one.logits + noise[one.tokens]), planned.plain)[order])
            uniform = np.random.Generator(np.random.Philox(key=request.sampling.seed + salt)).random()
            found[request.id] = Response(request.id, 3, (int(order[np.searchsorted(total, uniform * total[-1])]),))
        return found

    first = answers(0)
    for seed in range(1, 20):
        differ, allowed = planned.differing(requests, first, answers(seed))
        assert differ <= allowed < 16
    differ, allowed = planned.differing(requests, first, answers(1, salt=1 << 20))
    assert differ > 2 * allowed


def test_borders_between_tokens_move_as_far_as_two_runs_do(planned: Plan) -> None:
    """The sum over borders of how far each lies from its place in the other run, as two errors of that size move it."""
    rng, one = np.random.default_rng(0), planned.places[0]
    order = np.argsort(-one.logits)

    def borders() -> np.ndarray:
        noise = rng.normal(0, RMS_FACTOR * one.rms, VOCAB)
        return np.cumsum(distribution(replace(one, logits=one.logits + noise), planned.plain)[order])

    moved = np.mean([np.abs(borders() - borders()).sum() for _ in range(1500)])
    assert _border_risk(one, planned.plain) == pytest.approx(moved, rel=0.05)


@pytest.mark.parametrize(
    ("count", "rate", "p"), [(0, 0.0, 0.0), (0, 3.0, 0.9502129), (2, 3.0, 0.5768099), (1, 0.5, 0.0902040)]
)
def test_more_events_than_a_poisson_number_allows(count: int, rate: float, p: float) -> None:
    assert _more_than(count, rate) == pytest.approx(p, abs=1e-7)


def test_looks_add_up_and_every_seed_is_new(planned: Plan) -> None:
    seeds = [
        (request.prompt, request.sampling.seed)
        for look in range(LOOKS)
        for request in planned.requests(planned.plain, look)
    ]
    again = [(request.prompt, request.sampling.seed) for request in replace(planned, attempt=1).requests(planned.plain)]
    assert len(set(seeds)) == len(seeds) == 8 * 128 * 2 ** (LOOKS - 1)
    assert not set(seeds) & set(again)
    assert max(seed for _, seed in seeds + again) < 2**31


@pytest.mark.parametrize("name", ["llama-odd", "qwen3-moe-odd"])
def test_places_are_certified_and_known(bench: Any, name: str) -> None:
    model = bench(name)
    known = prompts(catalogue()[name], model.directory)
    handle = SimpleNamespace(
        all_prompts=known,
        prompts=lambda limit: {name: ids for name, ids in known.items() if len(ids) <= limit},
        config={"eos_token_id": 7},
    )
    reference = OracleReference(model.directory, ("fp32", "bf16"), name)
    found = plan(handle, reference, "bf16")
    assert found.end == 7
    assert found.places
    for one in found.places:
        assert reference.record("p", one.tokens).certified("bf16")[-1]
        assert one.logits == pytest.approx(np.asarray(model.oracle.run(one.tokens).logits)[-1], abs=1e-9)
    with pytest.raises(Verdict, match="the oracle does not know this model"):
        plan(handle, SimpleNamespace(oracle=None), "bf16")


def test_eight_draws_of_the_reference_stand_against_each_of_the_target(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stated power counts on, and what healthy divergences may add to the frequencies of so many."""
    compared: dict[str, tuple[int, int]] = {}

    def test(target: Any, reference: Any, *given: Any, **settings: Any) -> Any:
        compared.update({name: (len(target[name]), len(reference[name])) for name in target})
        healthy = sum(16 * 8 / 9 * 2 * 1.3**2 * one.kl / 1.4**2 for one in planned.places)
        assert settings["frequency_margin"] == pytest.approx(healthy)
        return permutation_test(target, reference, *given, **settings)

    monkeypatch.setattr(sampling, "permutation_test", test)
    assert by_name(ask(planned, planned.plain, lambda setting: setting, draws=16))["sample.distribution"].ok
    assert compared == {one.name: (16, 128) for one in planned.places}


@pytest.mark.parametrize("k", range(3, 9))
def test_the_filter_is_asked_for_where_one_token_too_many_shows_most(k: int) -> None:
    """The best ``k`` tokens are equal, so that fewer would be near-ties, and behind the next one comes nothing."""
    tokens = tuple(range(20))
    logits = np.full(VOCAB, -5.0)
    logits[:k], logits[k] = 3.0, 2.5
    emulation = SimpleNamespace(certified=np.ones(20, bool), largest=np.full(20, 1e-3), rms=np.ones(20), kl=np.ones(20))
    record = SimpleNamespace(positions=np.arange(20), emulation=lambda precision: emulation)
    run = SimpleNamespace(run=lambda tokens, rows: SimpleNamespace(logits=np.tile(logits, (len(rows), 1))))
    model = SimpleNamespace(all_prompts={"searched-0": tokens}, config={})
    found = plan(model, SimpleNamespace(oracle=run, record=lambda name, tokens: record), "bf16")
    assert (found.top_k, found.end, len(found.places)) == (k, -1, 8)


def test_an_estimate_of_the_temperature_comes_with_twice_its_error_and_the_draws_that_would_settle_it(
    planned: Plan,
) -> None:
    drawn = ask(planned, planned.plain, lambda setting: setting, draws=8)
    detail = by_name(drawn)["sample.temperature"].detail
    times, low, high = (float(word.strip(",;")) for word in np.array(detail.split())[[2, 3, 5]])
    error = 1 / math.sqrt(drawn._information())
    assert (low, high) == pytest.approx((times * math.exp(-2 * error), times * math.exp(2 * error)), abs=2e-3)
    gap = (
        math.log(CONCERN) - abs(sum(drawn._moved(one, signed=True) for one in drawn.drawn)) * error**2 - drawn._slack()
    )
    assert f"about {math.ceil((1.6448536 / gap * error) ** 2 * drawn.count)} draws would settle it" in detail
