"""Two answers of one target: equal but for rounding, or equal in every bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_adapt.oracle import Rounding
from pytest_adapt.target.protocol import Response, TopK
from pytest_adapt.verdict.judge import Judge
from pytest_adapt.verdict.views import common_rows


def only(response: Response, *names: str) -> Response:
    fields = {"logits": "logits", "score": "scores", "topk": "topk"}
    return replace(response, taps={}, **{field: None for name, field in fields.items() if name not in names})


@pytest.fixture
def pair(bench: Any, answer: Any) -> Any:
    """(tokens, record, two answers with independent errors) at a precision."""

    def get(precision: str) -> Any:
        model = bench("llama-odd")
        tokens = model.tokens(60)
        eager = model.oracle.run(tokens, rounding=Rounding.of(precision), record=("*",))
        return tokens, model.record(tokens, precision), model.answer(tokens, precision), answer(tokens, eager)

    return get


@pytest.mark.requirement(114)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("observable", ["logits", "score", "topk"])
def test_independent_rounding_agrees(pair: Any, precision: str, observable: str) -> None:
    _, record, one, two = pair(precision)
    judge = Judge(precision)
    judge.agree("one against two", only(one, observable), only(two, observable), record)
    assert not judge.failures(), judge.message()
    assert {one.metric for one in judge.measurements} == {"agree.rms", "agree.max"}
    assert all(one.compared for one in judge.measurements)
    assert judge.observables == {observable}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("observable", ["logits", "score", "topk"])
def test_one_row_of_another_sequence_does_not(pair: Any, precision: str, observable: str) -> None:
    _, record, one, two = pair(precision)
    wrong = only(two, observable)
    if observable == "logits":
        wrong.logits = two.logits.copy()
        wrong.logits[33] = two.logits[34]
    elif observable == "score":
        wrong.scores = two.scores.copy()
        wrong.scores[33] -= 2.0
    else:
        logprobs = two.topk.logprobs.copy()
        logprobs[33] -= 2.0
        wrong.topk = TopK(two.topk.ids, logprobs)
    judge = Judge(precision)
    judge.agree("one against two", only(one, observable), wrong, record)
    (largest,) = (one for one in judge.failures() if one.metric == "agree.max")
    assert largest.position == 33
    assert "one against two" in judge.message()


def test_rows_are_matched_by_token_index(pair: Any) -> None:
    _, record, one, two = pair("fp32")
    late = replace(only(two, "logits"), logits=two.logits[20:], first_row=20)
    judge = Judge("fp32")
    judge.agree("late", only(one, "logits"), late, record)
    assert not judge.failures(), judge.message()
    shifted = replace(late, first_row=19)
    judge.agree("shifted", only(one, "logits"), shifted, record)
    assert judge.failures()


def test_tokens_that_differ_at_once_after_a_possible_flip_are_compared(pair: Any) -> None:
    _, record, one, _ = pair("bf16")
    emulation = record.emulation("bf16")
    unsure = replace(record, errors={"bf16": replace(emulation, certified=np.zeros_like(emulation.certified))})
    answers = [Response(name, 20, tokens=(token, 1)) for name, token in (("a", 3), ("b", 4))]
    judge = Judge("bf16")
    judge.agree("tokens", *answers, unsure)
    (found,) = judge.measurements
    assert found.ok and found.compared == 1 and "after a possible routing flip" in found.detail


def test_an_answer_that_shows_no_rows_has_none_in_common(pair: Any) -> None:
    _, record, one, two = pair("fp32")
    assert common_rows(record, one, two).tolist() == list(range(60))
    assert common_rows(record, one, only(two)).tolist() == []


def test_generated_tokens_agree_or_are_near_ties(pair: Any) -> None:
    _, record, one, two = pair("bf16")
    gaps = record.topk_logprobs[:, 0] - record.topk_logprobs[:, 1]
    for row, legal in ((int(gaps.argmin()), True), (int(gaps.argmax()), False)):
        first, second = (int(t) for t in record.topk_ids[row, :2])
        answers = [Response("a", row + 1, tokens=(first,)), Response("b", row + 1, tokens=(second,))]
        judge = Judge("bf16")
        judge.agree("tokens", *answers, record)
        assert bool(judge.failures()) is not legal, judge.message()
        (found,) = judge.measurements
        assert (found.position, found.value) == (row, 0.0 if legal else 1.0)
        judge = Judge("bf16")
        judge.agree("tokens", answers[0], answers[0], record)
        assert not judge.failures()


def test_nothing_in_common_fails(pair: Any) -> None:
    _, record, one, two = pair("fp32")
    judge = Judge("fp32")
    judge.agree("what", only(one, "logits"), only(two, "topk"), record)
    assert judge.failures()[0].metric == "shown"
    for bad in (replace(one, error="refused"), None):
        judge = Judge("fp32")
        judge.agree("what", one, bad, record) if bad else judge.agree("what", one, two, None)
        assert judge.failures(), "without a record only the same bits agree"


def changed(response: Response, what: str) -> Response:
    if what == "logits":
        logits = response.logits.copy()
        logits[12, 3] = np.nextafter(logits[12, 3], np.float32(np.inf))
        return replace(response, logits=logits)
    if what == "zero sign":
        value = response.taps["layer.1.attn.out"].copy()
        value[12, 0] = -0.0
        return replace(response, taps={**response.taps, "layer.1.attn.out": value})
    if what == "taps":
        value = response.taps["layer.1.attn.out"].copy()
        value[12, 5] += 1e-6
        return replace(response, taps={**response.taps, "layer.1.attn.out": value})
    if what == "score":
        scores = response.scores.copy()
        scores[12] = np.nextafter(scores[12], 0.0)
        return replace(response, scores=scores)
    if what == "topk":
        ids = response.topk.ids.copy()
        ids[12, [3, 4]] = ids[12, [4, 3]]
        return replace(response, topk=TopK(ids, response.topk.logprobs))
    return replace(
        response, **{"tokens": {"tokens": (5, 7)}, "text": {"text": "b"}, "finish": {"finish": "stop"}}[what]
    )


@pytest.mark.requirement(98)
@pytest.mark.parametrize("what", ["logits", "taps", "zero sign", "score", "topk", "tokens", "text", "finish"])
def test_any_bit_counts(pair: Any, what: str) -> None:
    _, _, one, _ = pair("fp32")
    one = replace(one, tokens=(5, 6), text="some text", taps=dict(one.taps))
    one.taps["layer.1.attn.out"][12, 0] = 0.0
    judge = Judge("fp32")
    judge.identical("twice", one, replace(one, tokens=(*one.tokens[:1], 6), text="".join(["some ", "text"])))
    assert not judge.failures() and judge.measurements[0].compared > 1000
    assert judge.measurements[0].budget == 0.0
    judge.identical("twice", one, changed(one, what))
    (failed,) = judge.failures()
    assert (failed.metric, failed.value) == ("identical", 1.0)
    if what in ("logits", "taps", "zero sign", "score", "topk"):
        assert failed.position == 12


@pytest.mark.requirement(99)
def test_of_sites_whose_bits_differ_the_first_is_the_divergence(pair: Any) -> None:
    """In dataflow order, before what comes of them, with the element that left first."""
    _, _, one, _ = pair("bf16")
    other = changed(one, "logits")
    other.taps = {name: value.copy() for name, value in one.taps.items()}
    for name in ("layer.2.attn.out", "layer.1.ffn.norm", "final.norm"):
        other.taps[name][7:, 3] = np.nextafter(other.taps[name][7:, 3], np.inf)
    judge = Judge("bf16")
    judge.identical("p: tp2 against one rank", replace(other, origin=lambda *where: ("rank 1",)), one)
    found = judge.divergence
    assert found is not None
    assert (found.site, found.layer, found.position, found.element) == ("layer.1.ffn.norm", 1, 7, (3,))
    assert found.ranks == ("rank 1",) and found.got != found.expected and found.error > found.budget == 0.0
    assert "layer.1.ffn.norm: 53 of 60 rows differ in their bits, the first at token 7" in judge.message()


def test_nan_is_identical_to_itself_and_nothing_is_not(pair: Any) -> None:
    _, _, one, two = pair("fp32")
    same = replace(one, scores=np.full(60, np.nan))
    judge = Judge("fp32")
    judge.identical("nan", same, replace(same, scores=same.scores.copy()))
    assert not judge.failures()
    judge.identical("less", one, only(one, "logits"))
    assert "only one of the two" in judge.message() and judge.failures()[0].value == 1.0
    judge = Judge("fp32")
    judge.identical("nothing", Response("a", 3), Response("b", 3))
    assert judge.failures()[0].metric == "shown"


def test_a_promise_is_kept_or_not() -> None:
    judge = Judge("fp32")
    judge.promise("memory", True, "12 of 20 MiB", value=12.0, budget=20.0)
    assert not judge.failures()
    judge.promise("memory", False, "32 of 20 MiB", value=32.0, budget=20.0, prompt="p", observable="text")
    assert "memory [text]: 32, budget 20 (160% of budget) at p: 32 of 20 MiB" in judge.message()


def test_another_type_or_shape_is_no_other_bit(pair: Any) -> None:
    _, _, one, _ = pair("fp32")
    for other, said in ((one.logits.astype(np.float64), "float64 (60, 313)"), (one.logits[:, :9], "float32 (60, 9)")):
        judge = Judge("fp32")
        judge.identical("twice", one, replace(one, logits=other))
        (failed,) = judge.failures()
        assert f"logits: float32 (60, 313) from token 0 and {said} from token 0" in failed.detail
