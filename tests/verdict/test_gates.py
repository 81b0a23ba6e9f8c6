"""Sample gates over many short prompts: healthy targets pass, wrong ones fail, few prompts decide nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_adapt.target.protocol import Response, TopK
from pytest_adapt.verdict.gates import Evidence, most_likely_rate
from pytest_adapt.verdict.judge import Judge
from pytest_adapt.verdict.result import Measurement
from pytest_adapt.verdict.sampling import LOOKS
from pytest_adapt.verdict.statistics import coarse_divergence, student_quantile

NUMBER, LENGTH = 24, 12
CELLS = [(name, precision) for name in ("llama-odd", "qwen3-moe-odd") for precision in ("fp32", "bf16")]


def judged(model: Any, precision: str, make: Any = None, number: int = NUMBER, show: str = "score+topk") -> Judge:
    """A judge that was given ``number`` prompts, answered by ``make(tokens)`` (default: a healthy target)."""
    judge = Judge(precision)
    for seed in range(number):
        tokens = model.tokens(LENGTH, seed)
        answer = make(tokens) if make else model.answer(tokens, precision)
        shown = show.split("+")
        answer = replace(
            answer,
            taps={},
            logits=answer.logits if "logits" in shown else None,
            scores=answer.scores if "score" in shown else None,
            topk=answer.topk if "topk" in shown else None,
        )
        judge.sample(f"prompt-{seed}", answer, model.record(tokens, precision), model.oracle)
    return judge


def settled(model: Any, precision: str, make: Any = None) -> Judge:
    """As the suite does: twice as many prompts until the gates are settled."""
    for look in range(LOOKS):
        judge = judged(model, precision, make, NUMBER << look)
        if judge.settled:
            break
    return judge


def by_name(judge: Judge) -> dict[str, Measurement]:
    return {one.metric: one for one in judge.measurements}


@pytest.mark.requirement(113, 114)
@pytest.mark.parametrize(("name", "precision"), CELLS)
def test_a_healthy_target_passes(bench: Any, name: str, precision: str) -> None:
    judge = settled(bench(name), precision)
    assert not judge.failures(), judge.message()
    assert set(by_name(judge)) == {"sample.nll", "sample.kl", "sample.token_match"}
    assert judge.observables == {"score", "topk"}
    assert all("with power 0.8 at alpha 2.5e-05" in one.detail for one in judge.measurements)


@pytest.mark.requirement(113, 117)
@pytest.mark.parametrize(("name", "precision"), CELLS)
def test_a_wrong_scale_fails(bench: Any, damaged: Any, name: str, precision: str) -> None:
    """The last norm a twentieth too large: every distribution a little too sharp."""
    model = bench(name)
    directory = damaged(model.directory, {"model.norm.weight": lambda old: old["model.norm.weight"] * 1.05})
    judge = settled(model, precision, lambda tokens: model.answer(tokens, precision, directory))
    failed = {one.metric: one for one in judge.failures()}
    assert failed["sample.kl"].settled, judge.message()
    assert "times the emulation's" in failed["sample.kl"].detail
    assert not judge.inconclusive


@pytest.mark.requirement(113)
def test_tokens_that_differ_fail_where_nothing_else_is_shown(bench: Any) -> None:
    """Text alone: one generated token in five is the second best."""
    model = bench("llama-odd")
    judge, right = Judge("fp32"), Judge("fp32")
    for seed in range(NUMBER):
        tokens = model.tokens(LENGTH, seed)
        record = model.record(tokens, "fp32")
        said = record.topk_ids[4:, 0].copy()
        right.sample(f"prompt-{seed}", Response("r", 5, tuple(map(int, said))), record, model.oracle)
        said[seed % 5 :: 5] = record.topk_ids[4:, 1][seed % 5 :: 5]
        response = Response("r", 5, tuple(int(token) for token in said))
        judge.sample(f"prompt-{seed}", response, record, model.oracle)
    (failed,) = judge.failures()
    assert (failed.metric, failed.observable) == ("sample.token_match", "text")
    assert failed.prompt.startswith("prompt-")
    assert "0 of the reference's own" in failed.detail
    assert right.settled and not right.failures()


def test_a_flip_that_the_reference_makes_too_is_noise(bench: Any) -> None:
    """Where routing may flip, the emulation's own differing tokens are subtracted, and stated."""
    model = bench("qwen3-moe-odd")
    judge = judged(model, "bf16", number=4 * NUMBER, show="topk")
    alone = Judge("bf16")
    for seed in range(NUMBER):
        tokens = model.tokens(LENGTH, seed)
        alone.sample(f"prompt-{seed}", replace(model.answer(tokens, "bf16"), taps={}), model.record(tokens, "bf16"))
    everywhere, certain = by_name(judge)["sample.token_match"], by_name(alone)["sample.token_match"]
    assert everywhere.compared == 4 * NUMBER * LENGTH
    assert certain.compared < NUMBER * LENGTH
    assert everywhere.ok, everywhere.detail
    assert " 0 of the reference's own" not in everywhere.detail


def test_few_prompts_decide_nothing(bench: Any) -> None:
    judge = judged(bench("llama-odd"), "bf16", number=2)
    assert judge.inconclusive
    assert not judge.settled
    assert any("prompts would settle it" in one.detail for one in judge.failures())


def test_an_answer_without_anything_to_sample_is_a_failure(bench: Any) -> None:
    model = bench("llama-odd")
    tokens = model.tokens(LENGTH)
    judge = Judge("fp32")
    judge.sample("p", Response("r", LENGTH), model.record(tokens, "fp32"))
    judge.sample("q", Response("r", LENGTH, error="too busy"), model.record(tokens, "fp32"))
    assert [one.metric for one in judge.failures()] == ["shown", "response"]


@pytest.mark.requirement(113)
def test_tasks() -> None:
    right, wrong = Judge("fp32"), Judge("fp32")
    for number in range(NUMBER):
        right.answered(f"walk-{number}", [False] * 8)
        wrong.answered(f"walk-{number}", [step == number % 8 for step in range(8)])
    assert right.settled and not right.failures()
    assert {one.metric for one in wrong.failures()} == {"sample.task"}
    assert "24 of 192 answers are wrong" in wrong.message()


def test_the_noise_floor_of_rare_events_is_their_upper_limit() -> None:
    """Garwood's limits: 2.996 events where none was seen, 4.744 for one, 15.705 for nine."""
    for seen, limit in ((0, 2.9957), (1, 4.7439), (9, 15.7052)):
        noise = {str(cluster): np.zeros(50) for cluster in range(20)}
        for event in range(seen):
            noise[str(event)][0] = 1.0
        assert most_likely_rate(noise) * 1000 == pytest.approx(limit, rel=1e-4)
    # Events that come together say less than their number does.
    together = {str(cluster): np.full(50, float(cluster == 0)) for cluster in range(20)}
    assert most_likely_rate(together) == pytest.approx(0.05 + student_quantile(0.95, 19) * 0.05)


P = np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.1])
"""A distribution of which the first three tokens are listed."""


def listed(model: Any, off: np.ndarray, kl: float, rms: float) -> Measurement:
    """The divergence gate of two prompts whose listed log-probabilities are ``off`` by so much [LENGTH, 3]."""
    evidence, ids = Evidence(), np.tile(np.arange(3), (LENGTH, 1))
    for seed in range(2):
        record = model.record(model.tokens(LENGTH, seed), "fp32")
        errors = replace(record.emulation("fp32"), kl=np.full(LENGTH, kl), rms=np.full(LENGTH, rms))
        record = replace(
            record, topk_ids=ids, topk_logprobs=np.tile(np.log(P[:3]), (LENGTH, 1)), errors={"fp32": errors}
        )
        answer = Response("r", LENGTH, topk=TopK(ids, record.topk_logprobs + off))
        evidence.sample(f"prompt-{seed}", answer, record, "fp32", None)
    return next(one for one in evidence.measurements() if one.metric == "sample.kl")


def test_the_noise_floor_of_a_divergence_counts_the_mass_outside_the_list(bench: Any) -> None:
    """The emulation's divergence is one of listed tokens alone; that of a target has all others as one more token."""
    error = 1e-3
    wrong = np.log(P) + np.random.default_rng(0).normal(0, error, (100_000, len(P)))
    wrong -= np.log(np.exp(wrong).sum(axis=1, keepdims=True)) + np.log(P)
    alone = float(np.mean(np.sum(P[:3] * wrong[:, :3] ** 2, axis=1))) / 2
    stated = listed(bench("llama-odd"), np.zeros((LENGTH, 3)), alone, error).detail.partition("which is ")[2].split()[0]
    expected = float(np.mean(coarse_divergence(np.tile(np.log(P[:3]), (len(wrong), 1)), wrong[:, :3])))
    assert float(stated) == pytest.approx(expected, rel=0.02)
    assert expected > 1.1 * alone


def test_a_divergence_has_the_floor_of_rounding_the_answer_once(bench: Any) -> None:
    rounding = float(np.mean(np.spacing(np.log(P[:3]).astype(np.float32)).astype(np.float64) ** 2)) / 12
    off = np.full((LENGTH, 3), 2e-7)
    found = float(np.mean(coarse_divergence(np.tile(np.log(P[:3]), (LENGTH, 1)), off)))
    assert listed(bench("llama-odd"), off, 0.0, 0.0).value == pytest.approx(math.log(found / rounding + 1), rel=1e-3)
    better = listed(bench("llama-odd"), np.zeros((LENGTH, 3)), 1e-6, 0.0)
    assert better.ok and better.value == pytest.approx(math.log(rounding / 1e-6), rel=1e-3), "no error of its own"


def test_the_noise_of_a_likelihood_is_that_of_one_prompt(bench: Any) -> None:
    """Eleven tokens follow another one; their errors are independent."""
    model, judge = bench("llama-odd"), Judge("bf16")
    for seed in range(3):
        tokens = model.tokens(LENGTH, seed)
        record = model.record(tokens, "bf16")
        errors = replace(record.emulation("bf16"), follow=np.append(np.full(LENGTH - 1, 1e-2), np.nan))
        answer = Response("r", LENGTH, scores=record.next_logprob)
        judge.sample(f"prompt-{seed}", answer, replace(record, errors={"bf16": errors}), model.oracle)
    (found,) = judge.measurements
    assert found.budget == pytest.approx(1.3e-2 / math.sqrt(LENGTH - 1))
    assert f"the noise of one prompt is {1e-2 / math.sqrt(LENGTH - 1):.3g}" in found.detail
