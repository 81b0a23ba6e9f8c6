"""What every comparator must notice: small errors planted into the answers of a healthy target, one kind a check.

A check passes (returns) while the comparing code is right. `pytest_adapt.selftest.mutants` makes that code wrong, one
place at a time, and some check must fail then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pytest_adapt.selftest.healthy import Specimen, respond
from pytest_adapt.selftest.healthy import healthy as fused
from pytest_adapt.target.protocol import Response, Sampling, TopK
from pytest_adapt.verdict import discrete, localise, sampling
from pytest_adapt.verdict.judge import Judge

__all__ = ["CHECKS", "World", "make_world"]

TOKENS = 40
World = Mapping[str, Any]


def make_world(model: Specimen) -> World:
    """A model, a prompt, its record and the answer of a healthy target in float32."""
    tokens = model.tokens(TOKENS)
    return {
        "model": model,
        "tokens": tokens,
        "record": model.record(tokens, "fp32"),
        "answer": model.answer(tokens, "fp32"),
    }


def against(world: World, **changes: Any) -> Judge:
    found = Judge("fp32")
    found.against_record("p", replace(world["answer"], **changes), world["record"])
    return found


def sites(world: World, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Judge:
    model, tokens = world["model"], world["tokens"]
    value = change(world["answer"].taps[name].copy())
    found = Judge("fp32")
    found.against_sites("p", model.answer(tokens, "fp32", forced={name: value}), model.oracle, tokens)
    return found


def healthy(world: World) -> None:
    assert not against(world).failures()
    assert not sites(world, "embed", lambda x: x).failures()


def every_row_counts(world: World) -> None:
    for row in (0, 1, TOKENS - 1):
        for sign in (1.0, -1.0):
            logits = world["answer"].logits.copy()
            logits[row, world["record"].topk_ids[row, 2]] += sign
            failed = {one.metric: one for one in against(world, logits=logits, topk=None, scores=None).failures()}
            assert failed["logprob.max"].position == row
            before = {0: "wrong from the first row on", 1: "only the row before this one agrees"}
            assert before.get(row, f"the {row} rows before this one agree") in failed["logprob.max"].detail
            assert {"logprob.rms", "kl", "cosine"} <= failed.keys()


def every_listed_token_counts(world: World) -> None:
    for column in (0, 7, 19):
        logprobs = world["answer"].topk.logprobs.copy()
        logprobs[5, column] += 0.01
        wrong = TopK(world["answer"].topk.ids, logprobs)
        failed = {one.metric: one for one in against(world, topk=wrong, logits=None, scores=None).failures()}
        assert failed["logprob.max"].position == 5


def a_token_left_out_counts(world: World) -> None:
    ids = world["answer"].topk.ids.copy()
    stranger = int(np.setdiff1d(np.arange(world["record"].vocab), ids[5])[0])
    ids[5, 1] = stranger
    wrong = TopK(ids, world["answer"].topk.logprobs)
    failed = {one.metric for one in against(world, topk=wrong, logits=None, scores=None).failures()}
    assert "logprob.max" in failed
    longer = world["answer"].topk
    ids = np.concatenate([longer.ids, np.full((TOKENS, 1), -1)], axis=1)
    logprobs = np.concatenate([longer.logprobs, np.full((TOKENS, 1), np.nan)], axis=1)
    ids[5, 20], logprobs[5, 20] = stranger, longer.logprobs[5, 19] + 1e-3
    failed = {one.metric for one in against(world, topk=TopK(ids, logprobs), logits=None, scores=None).failures()}
    assert "logprob.max" in failed
    for column in (0, 1):
        ids = world["answer"].topk.ids.copy()
        ids[5, column] = stranger
        logprobs = world["answer"].topk.logprobs.copy()
        logprobs[5, column] = logprobs[5, 19] - 1e-3
        wrong = TopK(ids, logprobs)
        failed = {one.metric for one in against(world, topk=wrong, logits=None, scores=None).failures()}
        assert "logprob.max" in failed


def every_score_counts(world: World) -> None:
    for row in (0, TOKENS - 2):
        scores = world["answer"].scores.copy()
        scores[row] -= 0.01
        failed = {one.metric: one for one in against(world, scores=scores, logits=None, topk=None).failures()}
        assert failed["logprob.max"].position == row


def the_first_choice_counts(world: World) -> None:
    logits = world["answer"].logits.copy()
    best, other = world["record"].topk_ids[7, [0, 15]]
    logits[7, [best, other]] = logits[7, [other, best]]
    (failed,) = (one for one in against(world, logits=logits).failures() if one.metric == "token_match")
    assert failed.position == 7
    assert f"token {other} instead of {best}" in failed.detail


def every_element_of_a_site_counts(world: World) -> None:
    """One element beyond its budget is red and named; within what is left of the budget it is not."""
    name = "layer.2.attn.context"
    for index in ((0, 0, 0), (TOKENS - 1, 5, 19), (13, 2, 7)):

        def judged(error: float, index: Any = index) -> Judge:
            """With ``error`` added to one element, in units of the rms of its row (an outlier: of its own part)."""

            def change(value: np.ndarray) -> np.ndarray:
                row = np.asarray(value[index[:-1]], np.float64)
                value[index] += error * max(np.sqrt(np.mean(row**2)), abs(row[index[-1]]) / localise.OUTLIER)
                return value

            return sites(world, name, change)

        (large,) = (one for one in judged(1e-3).failures() if one.metric == "site.max")
        assert math.isclose(large.value, 1e-3, rel_tol=0.01)
        for sign in (1.0, -1.0):
            judge = judged(sign * 1.6 * large.budget)
            assert {one.metric for one in judge.failures()} == {"site.max"}, "no other statistic sees one element"
            found = judge.divergence
            assert found is not None
            assert (found.site, found.position, found.layer) == (name, index[0], 2)
            assert str(list(index[1:])) in found.note
            assert not judged(sign * 0.4 * large.budget).failures()


def small_rows_count(world: World) -> None:
    """An error that is small beside the largest row but not beside its own."""
    rng = np.random.default_rng(0)
    own = rng.normal(size=(50, 30))
    own[0] *= 1e4
    value, emulated = (own * (1.0 + 1e-6 * rng.normal(size=own.shape)) for _ in range(2))
    value[7] *= 1.001
    results = localise.SiteView("p", "layer.0.attn.out", value, own, emulated, "fp32", None, 50).judge(1.0)
    assert all(found is not None and found.position == 7 for _, found in results)


def a_site_that_is_wrong_everywhere(world: World) -> None:
    for factor in (1.0 + 4e-7, 1.0 - 4e-7):
        failed = sites(world, "layer.3.moe.routed", partial(np.multiply, factor)).failures()
        assert "site.rms" in {one.metric for one in failed}
    sign = np.random.default_rng(3).choice([-1e-3, 1e-3], size=20)  # a head's width
    own = world["answer"].taps["layer.3.attn.context"].astype(np.float64)
    scale = np.maximum(np.sqrt(np.mean(own**2, axis=-1, keepdims=True)), np.abs(own) / localise.OUTLIER)
    failed = sites(world, "layer.3.attn.context", lambda x: (own + sign * scale).astype(np.float32)).failures()
    assert math.isclose(next(one.value for one in failed if one.metric == "site.rms"), 1e-3, rel_tol=0.01)


def the_first_site_is_named(world: World) -> None:
    model, tokens = world["model"], world["tokens"]
    names = ("layer.3.ffn.norm", "layer.0.attn.v", "layer.2.attn.q")
    forced = {name: world["answer"].taps[name] * 1.01 for name in names}
    found = Judge("fp32")
    found.against_sites("p", model.answer(tokens, "fp32", forced=forced), model.oracle, tokens)
    assert found.divergence is not None and found.divergence.site == "layer.0.attn.v"
    assert {one.site for one in found.failures()} == set(names)


def an_intruder_is_named(world: World) -> None:
    model, tokens, answer = world["model"], world["tokens"], world["answer"]
    ids = answer.taps["layer.2.moe.router.ids"].copy()
    selection = answer.taps["layer.2.moe.router.selection"]
    for row in (0, 21):
        wrong = ids.copy()
        intruder = int(selection[row].argmin())
        runner_up = int(max(set(range(13)) - set(ids[row].tolist()), key=lambda e: selection[row, e]))
        wrong[row] = np.sort(np.append(ids[row, :-2], [intruder, runner_up]))
        found = Judge("fp32")
        found.against_sites("p", model.answer(tokens, "fp32", replay={2: wrong}), model.oracle, tokens)
        assert found.divergence is not None
        assert (found.divergence.site, found.divergence.position) == ("layer.2.moe.router.ids", row)
        assert found.divergence.expert == intruder


def certainty_has_a_margin(world: World) -> None:
    ratio, nothing = np.array([0.3, 0.49, 0.51, 0.1]), np.zeros(4)
    assert discrete.certified_positions(ratio, nothing).tolist() == [True, True, False, False]
    assert discrete.certified_positions(nothing, ratio).tolist() == [True, True, False, True]
    bound = discrete.row_error(np.array([[0.0, -4.0], [0.0, 0.0]]))
    assert np.allclose(bound, [4.0, 8**0.5], rtol=1e-6, atol=0)
    exact = world["record"].emulation("fp32")
    assert exact.certified.all() and (exact.score > 0).any()


def records_say_what_the_oracle_says(world: World) -> None:
    model, tokens = world["model"], world["tokens"]
    record = model.record(tokens, "fp32")
    logits = model.oracle.run(tokens).logits
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    assert np.array_equal(record.topk_ids, order)
    assert np.allclose(record.topk_logprobs, np.take_along_axis(logprobs, order, axis=1), rtol=0, atol=1e-12)
    assert np.allclose(record.next_logprob[:-1], logprobs[np.arange(TOKENS - 1), tokens[1:]], rtol=0, atol=1e-12)
    assert np.isnan(record.next_logprob[-1])
    centred = logits - logits.mean(axis=1, keepdims=True)
    assert np.allclose(record.norm, np.sqrt((centred**2).mean(axis=1)), rtol=1e-6)
    distances = np.sqrt((record.projections.astype(float) ** 2).mean()) / record.norm.mean()
    assert 0.8 < distances < 1.2, "projections keep lengths"


def hidden_choices_may_be_near_ties(world: World) -> None:
    """Without the experts' ids, rows that a near-tie may have changed are left out, and no others."""
    model = world["model"]
    rounding = fused("bf16").with_eager_router(model.oracle.spec.architecture)
    left_out = 0.0
    for seed in (0, 1):
        tokens = model.tokens(150, seed)
        answer = respond(tokens, model.oracle.run(tokens, rounding=rounding, record=("*",)))
        answer.taps = {name: value for name, value in answer.taps.items() if ".moe." not in name}
        found = Judge("bf16", router="eager")
        found.against_sites("p", answer, model.oracle, tokens)
        assert not found.failures()
        left_out += sum(one.value for one in found.measurements if one.metric == "site.unsure")
        answer.taps["layer.2.ffn.out"] = answer.taps["layer.2.ffn.out"] * np.float32(1.1)
        found = Judge("bf16", router="eager")
        found.against_sites("p", answer, model.oracle, tokens)
        assert found.divergence is not None and found.divergence.site == "layer.2.ffn.out"
    assert left_out


def repeated_rows_count_once(world: World) -> None:
    """A prompt and its beginning are as much evidence as the prompt."""
    alone, twice = against(world), against(world)
    start = TOKENS - 1
    answer = replace(world["answer"], prompt_tokens=start, logits=world["answer"].logits[:start])
    answer = replace(answer, topk=None, scores=None, taps={})
    twice.against_record("q", answer, world["record"].prefix(start))
    factors = [
        next(one.budget for one in judge.measurements if one.metric == "certified.error") for judge in (alone, twice)
    ]
    assert factors[0] == factors[1] > 1.3


def filters_have_a_border(world: World) -> None:
    """A token at the border of a filter may be drawn or not; one beyond it is red, and so is one that never comes."""
    logits = np.array([2.0, 1.6, 1.3, 1.2999, 0.9, 0.5, -3.0, -3.5])
    place = sampling.Place("p", (1, 2, 3), logits, 1e-3, 3e-4, 5e-8)
    p = sampling.distribution(place, Sampling(1.0))
    reached = float(p[:2].sum())
    for setting, kept, beyond in (
        (Sampling(1.0, top_k=3), (0, 1, 3), 4),
        (Sampling(1.0, top_p=reached - 1e-5), (0, 1, 2), 4),
        (Sampling(1.0, top_p=reached + 1e-5), (0, 1), 4),
        (Sampling(1.0, top_k=5, top_p=0.999), (0, 1, 2, 3, 4), 5),
    ):

        def drawn(ids: Any, setting: Sampling = setting) -> dict[str, bool]:
            planned = sampling.Plan((place,), 1.0, setting.top_k, end=-1)
            found = sampling.Draws(setting, "asked")
            odds = p[list(ids)] / p[list(ids)].sum()
            tokens = np.random.default_rng(0).choice(ids, 1024, p=odds)
            asked = planned.requests(setting)
            answers = {one.id: Response(one.id, 3, (int(token),)) for one, token in zip(asked, tokens, strict=True)}
            found.add(planned, asked, answers)
            return {one.metric: one.ok for one in found.measurements()}

        assert all(drawn(kept).values())
        assert not drawn((*kept, beyond))["sample.support"]
        assert not drawn(kept[:1] + kept[2:])["sample.distribution"]


CHECKS: list[Callable[[World], None]] = [
    healthy,
    every_row_counts,
    every_listed_token_counts,
    a_token_left_out_counts,
    every_score_counts,
    the_first_choice_counts,
    every_element_of_a_site_counts,
    small_rows_count,
    a_site_that_is_wrong_everywhere,
    the_first_site_is_named,
    an_intruder_is_named,
    certainty_has_a_margin,
    records_say_what_the_oracle_says,
    filters_have_a_border,
    repeated_rows_count_once,
    hidden_choices_may_be_near_ties,
]
