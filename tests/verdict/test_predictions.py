"""Black box: log-probabilities, top-k lists and tokens against a record, at certified positions."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_adapt.golden.record import Record
from pytest_adapt.models import catalogue, prompts
from pytest_adapt.target.protocol import Response, TopK
from pytest_adapt.verdict.budget import Comparison, Rows
from pytest_adapt.verdict.judge import Judge
from pytest_adapt.verdict.pooling import cosine_gap, describe, judge_assumption, rows_of
from pytest_adapt.verdict.result import Measurement

PRECISIONS = ("fp32", "bf16", "fp16")
OBSERVABLES = ("logits", "score", "topk")


def searched(bench: Any, name: str, count: int, which: int = 0) -> tuple[int, ...]:
    return tuple(prompts(catalogue()[name], bench(name).directory)[f"searched-{which}"][:count])


def only(response: Response, observable: str) -> Response:
    return Response(
        id="r",
        prompt_tokens=response.prompt_tokens,
        logits=response.logits if observable == "logits" else None,
        scores=response.scores if observable == "score" else None,
        topk=response.topk if observable == "topk" else None,
    )


def judged(precision: str, record: Record, *responses: Response) -> Judge:
    judge = Judge(precision)
    for number, response in enumerate(responses):
        judge.against_record(f"prompt-{number}", response, record)
    return judge


@pytest.fixture(scope="module")
def case(bench: Any) -> Any:
    """(model, tokens, record, a healthy answer) by name and precision."""
    made: dict[tuple[str, str], Any] = {}

    def get(name: str, precision: str) -> Any:
        if (name, precision) not in made:
            model = bench(name)
            tokens = model.tokens(90) if name == "llama-odd" else searched(bench, name, 90)
            made[name, precision] = model, tokens, model.record(tokens, precision), model.answer(tokens, precision)
        return made[name, precision]

    return get


@pytest.mark.requirement(62, 113, 114)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["qwen3-moe-odd", "mixtral-odd", "deepseek-v3-odd-neg", "llama-odd"])
def test_a_healthy_target_passes(case: Any, name: str, precision: str) -> None:
    _, _, record, answer = case(name, precision)
    for observable in OBSERVABLES:
        judge = judged(precision, record, only(answer, observable))
        assert not judge.failures(), judge.message()
        assert judge.observables == {observable}
        metrics = {one.metric for one in judge.measurements}
        assert {"logprob.rms", "logprob.max"} <= metrics
        assert ("cosine" in metrics) == (observable == "logits")
        assert ("kl" in metrics) == ("token_match" in metrics) == (observable != "score")
        assert all(one.compared for one in judge.measurements)


SWAP = {
    f"model.layers.3.mlp.experts.{one}.{part}_proj.weight": (two, part)
    for one, two in ((4, 9), (9, 4))
    for part in ("gate", "up", "down")
}


def taken(source: str) -> Any:
    return lambda values: values[source]


def times(name: str, factor: float) -> Any:
    return lambda values: values[name] * factor


DAMAGE: dict[str, dict[str, Any]] = {
    "experts swapped": {
        name: taken(f"model.layers.3.mlp.experts.{two}.{part}_proj.weight") for name, (two, part) in SWAP.items()
    },
    "one norm x 1.05": {
        "model.layers.1.input_layernorm.weight": times("model.layers.1.input_layernorm.weight", 1.05),
        "model.layers.2.post_attention_layernorm.weight": times("model.layers.2.post_attention_layernorm.weight", 1.05),
    },
    "one projection x 1.05": {
        "model.layers.0.self_attn.v_proj.weight": times("model.layers.0.self_attn.v_proj.weight", 1.05)
    },
    "attention of a layer dropped": {
        "model.layers.2.self_attn.o_proj.weight": times("model.layers.2.self_attn.o_proj.weight", 0.0)
    },
}


@pytest.mark.requirement(62, 113)
@pytest.mark.parametrize("observable", OBSERVABLES)
@pytest.mark.parametrize("what", [*DAMAGE, "rotary base x 1.5"])
def test_a_wrong_model_fails_in_float32(case: Any, damaged: Any, what: str, observable: str) -> None:
    model, tokens, record, _ = case("qwen3-moe-odd", "fp32")
    base = {"rope_theta": 1.5e6, "rope_parameters": {"rope_theta": 1.5e6, "rope_type": "default"}}
    wrong = damaged(model.directory, DAMAGE.get(what), **({} if what in DAMAGE else base))
    judge = judged("fp32", record, only(model.answer(tokens, "fp32", wrong), observable))
    failed = {one.metric: one for one in judge.failures()}
    assert failed["logprob.rms"].use > 50, judge.message()
    assert failed["logprob.max"].use > 50


@pytest.mark.requirement(62, 113)
@pytest.mark.parametrize("what", ["experts swapped", "attention of a layer dropped"])
@pytest.mark.parametrize("observable", OBSERVABLES)
def test_a_wrong_model_fails_in_bfloat16(case: Any, damaged: Any, what: str, observable: str) -> None:
    model, tokens, record, _ = case("qwen3-moe-odd", "bf16")
    judge = judged(
        "bf16", record, only(model.answer(tokens, "bf16", damaged(model.directory, DAMAGE[what])), observable)
    )
    assert judge.failures()


def test_a_wrong_norm_fails_in_bfloat16_over_a_whole_item(bench: Any, damaged: Any) -> None:
    """The smallest fault of the list: the pooled rms over some hundred positions finds it."""
    model = bench("llama-odd")
    name = "model.layers.1.input_layernorm.weight"
    wrong = damaged(model.directory, {name: times(name, 1.1)})
    healthy, judge = Judge("bf16"), Judge("bf16")
    for seed in range(4):
        tokens = model.tokens(80, seed)
        record = model.record(tokens, "bf16")
        healthy.against_record(f"p{seed}", model.answer(tokens, "bf16"), record)
        judge.against_record(f"p{seed}", model.answer(tokens, "bf16", wrong), record)
    assert not healthy.failures(), healthy.message()
    (rms,) = (one for one in judge.measurements if one.metric == "logprob.rms" and one.observable == "logits")
    assert not rms.ok
    assert "times the emulation's" in rms.detail, "the interval clustered by prompt"


def test_one_wrong_position_fails(case: Any) -> None:
    """A fault of one row hides in the mean of many; the largest error names its position."""
    _, _, record, answer = case("llama-odd", "bf16")
    logits = answer.logits.copy()
    logits[41, record.topk_ids[41, 3]] += 1.5
    wrong = only(answer, "logits")
    wrong.logits = logits
    (largest,) = (one for one in judged("bf16", record, wrong).failures() if one.metric == "logprob.max")
    assert (largest.position, largest.prompt) == (41, "prompt-0")
    assert "; the 41 rows before this one agree" in largest.detail


@pytest.mark.parametrize(
    ("row", "said"), [(0, "wrong from the first row on"), (1, "only the row before this one agrees")]
)
def test_where_an_error_begins_is_said(case: Any, row: int, said: str) -> None:
    _, _, record, answer = case("llama-odd", "bf16")
    wrong = only(answer, "logits")
    wrong.logits = answer.logits.copy()
    wrong.logits[row:, record.topk_ids[row, 3]] += 1.5
    (largest,) = (one for one in judged("bf16", record, wrong).failures() if one.metric == "logprob.max")
    assert (largest.position, largest.detail) == (row, f"largest error, nats; {said}")


@pytest.mark.parametrize("observable", ["logits", "topk"])
def test_a_token_that_the_reference_does_not_list(case: Any, observable: str) -> None:
    """An unlikely token made likely, and a likely one left out of the list."""
    _, _, record, answer = case("llama-odd", "fp32")
    wrong = only(answer, observable)
    stranger = int(np.setdiff1d(np.arange(record.vocab), record.topk_ids[20])[0])
    if observable == "logits":
        wrong.logits = answer.logits.copy()
        wrong.logits[20, stranger] = answer.logits[20].max() + 1e-3
    else:
        ids, logprobs = answer.topk.ids.copy(), answer.topk.logprobs.copy()
        ids[20, 0] = stranger
        wrong.topk = TopK(ids, logprobs)
    failed = {one.metric: one for one in judged("fp32", record, wrong).failures()}
    assert failed["logprob.max"].position == 20
    assert failed["token_match"].position == 20
    assert f"token {stranger} instead of" in failed["token_match"].detail


def test_fewer_entries_in_a_list_are_compared_as_they_are(case: Any) -> None:
    _, _, record, answer = case("llama-odd", "bf16")
    short = only(answer, "topk")
    short.topk = TopK(answer.topk.ids[:, :5], answer.topk.logprobs[:, :5])
    judge = judged("bf16", record, short)
    assert not judge.failures(), judge.message()
    compared = next(one.compared for one in judge.measurements if one.metric == "logprob.max")
    assert compared < 6 * len(record.positions)
    padded = only(answer, "topk")
    ids, logprobs = answer.topk.ids.copy(), answer.topk.logprobs.copy()
    ids[:, 7:], logprobs[:, 7:] = -1, np.nan
    padded.topk = TopK(ids, logprobs)
    assert not judged("bf16", record, padded).failures()


def test_near_ties_may_swap_and_clear_choices_may_not(case: Any) -> None:
    _, _, record, answer = case("llama-odd", "bf16")
    gaps = record.topk_logprobs[:, 0] - record.topk_logprobs[:, 1]
    for row, legal in ((int(gaps.argmin()), True), (int(gaps.argmax()), False)):
        logits = answer.logits.copy()
        first, second = record.topk_ids[row, :2]
        logits[row, [first, second]] = logits[row, [second, first]]
        if logits[row, first] >= logits[row, second]:
            logits[row, second] = logits[row, first] + 1e-3
        wrong = only(answer, "logits")
        wrong.logits = logits
        failed = [one for one in judged("bf16", record, wrong).failures() if one.metric == "token_match"]
        assert bool(failed) is not legal
        assert legal or failed[0].position == row


BROKEN = {
    "nan": ("finite", 7),
    "inf": ("finite", 7),
    "columns": ("shape", None),
    "rows": ("rows", 88),
    "nothing": ("shown", None),
    "precision": ("record", None),
    "refused": ("response", None),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_compared_fails(case: Any, what: str) -> None:
    _, _, record, answer = case("llama-odd", "fp32")
    wrong = only(answer, "logits")
    logits = answer.logits.copy()
    if what in ("nan", "inf"):
        logits[7, 100] = np.nan if what == "nan" else np.inf
    elif what == "columns":
        logits = np.concatenate([logits, logits[:, :3]], axis=1)
    elif what == "rows":
        logits = logits[:-2]
    wrong.logits = None if what == "nothing" else logits
    if what == "refused":
        wrong.error = "context too long"
    judge = Judge("fp16" if what == "precision" else "fp32")
    judge.against_record("p", wrong, record)
    metric, position = BROKEN[what]
    (failed,) = judge.failures()
    assert (failed.metric, failed.position) == (metric, position)
    assert failed.detail and metric in judge.message()
    assert not judge.undecided


@pytest.mark.parametrize("what", ["twice", "outside", "empty", "nan", "score"])
def test_a_list_that_cannot_be_compared_fails(case: Any, what: str) -> None:
    _, _, record, answer = case("llama-odd", "fp32")
    wrong = only(answer, "score" if what == "score" else "topk")
    ids, logprobs, scores = answer.topk.ids.copy(), answer.topk.logprobs.copy(), answer.scores.copy()
    if what == "twice":
        ids[9, 3] = ids[9, 2]
    elif what == "outside":
        ids[9, 3] = record.vocab
    elif what == "empty":
        ids[9], logprobs[9] = -1, np.nan
    elif what == "nan":
        logprobs[9, 3] = np.nan
    if what == "score":
        scores[9] = np.nan
        wrong.scores = scores
    else:
        wrong.topk = TopK(ids, logprobs)
    (failed,) = judged("fp32", record, wrong).failures()
    assert failed.position == 9
    assert failed.metric in ("shape", "rows", "finite")


def test_shifted_scores_fail(case: Any) -> None:
    """Log-probabilities that belong to the neighbouring token."""
    _, _, record, answer = case("llama-odd", "bf16")
    wrong = only(answer, "score")
    wrong.scores = np.append(answer.scores[1:], np.nan)
    wrong.scores[-2] = -5.0
    assert {one.metric for one in judged("bf16", record, wrong).failures()} == {"logprob.rms", "logprob.max"}


def test_nothing_certain_is_undecided_and_never_a_pass(bench: Any) -> None:
    model = bench("mixtral-odd")
    tokens = next(
        tokens
        for seed in range(50)
        if not model.record(tokens := model.tokens(12, seed), "bf16").certified("bf16").any()
    )
    judge = judged("bf16", model.record(tokens, "bf16"), model.answer(tokens, "bf16"))
    assert judge.undecided
    assert [one.metric for one in judge.failures()] == ["certified"]
    assert "routing flip" in judge.message()
    judge.promise("loads", False, "did not load")
    assert not judge.undecided


def test_uncertain_positions_are_not_judged(bench: Any) -> None:
    """After a possible flip anything may follow; before it nothing may."""
    model = bench("mixtral-odd")
    record, tokens = next(
        (record, tokens)
        for seed in range(50)
        for tokens in (model.tokens(30, seed),)
        for record in (model.record(tokens, "bf16"),)
        if 2 <= record.certified("bf16").sum() <= 25
    )
    answer = only(model.answer(tokens, "bf16"), "logits")
    certain = np.flatnonzero(record.certified("bf16"))
    for row, seen in ((int(np.flatnonzero(~record.certified("bf16"))[-1]), False), (int(certain[-1]), True)):
        wrong = only(answer, "logits")
        wrong.logits = answer.logits.copy()
        wrong.logits[row] = -wrong.logits[row]
        assert bool(judged("bf16", record, wrong).failures()) is seen


def test_the_prompt_is_counted_first(case: Any) -> None:
    _, tokens, _, answer = case("llama-odd", "fp32")
    judge = Judge("fp32")
    judge.prompt_tokens("p", answer, tokens)
    assert not judge.failures()
    judge.prompt_tokens("p", answer, (*tokens, 1))
    assert "90 prompt tokens, 91 were sent" in judge.message()


def test_greedy_tokens_follow_the_reference(bench: Any) -> None:
    model = bench("llama-odd")
    prompt = model.tokens(20)
    sequence = list(prompt)
    for _ in range(6):
        sequence.append(int(model.oracle.run(tuple(sequence), rows=[len(sequence) - 1]).logits[0].argmax()))
    right = Response("g", prompt_tokens=20, tokens=tuple(sequence[20:]))
    record = model.record(tuple(sequence[:-1]), "fp32", "bf16")
    for reference in (record, model.oracle):
        judge = Judge("fp32")
        judge.generated("p", right, reference, prompt)
        assert not judge.failures(), judge.message()
        assert judge.observables == {"text"}
        (found,) = judge.measurements
        assert found.compared == 6
    wrong = [*right.tokens[:-1], int(record.topk_ids[-1, 1])]
    judge = Judge("fp32")
    judge.generated("p", Response("g", 20, tuple(wrong)), record, prompt)
    (failed,) = judge.failures()
    assert (failed.metric, failed.position) == ("token_match", 24)
    for bad, metric in (((), "shown"), (right.tokens[:-2], "record")):
        judge = Judge("fp32")
        judge.generated("p", Response("g", 20, tuple(bad)), record, prompt)
        assert [one.metric for one in judge.failures()] == [metric]


def test_a_message_fits_one_screen_and_names_everything(case: Any) -> None:
    _, _, record, answer = case("llama-odd", "fp32")
    wrong = only(answer, "logits")
    wrong.logits = answer.logits * 1.5
    judge = judged("fp32", record, *[wrong] * 30)
    for number in range(30):
        judge.promise(f"promise-{number}", False, "broken")
    lines = judge.message().splitlines()
    assert len(lines) <= 14
    assert any("logprob.max [logits]" in line and "budget" in line and "position" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (Measurement("m", 0.0, 0.0, True), "m: 0, budget 0"),
        (Measurement("m", 2.0, 0.0, False), "m: 2, budget 0"),
        (Measurement("m", 0.1, 0.5, True, "text"), "m [text]: 0.1, budget 0.5 (20% of budget)"),
        (Measurement("m", 30.0, 0.5, False), "m: 30, budget 0.5 (60 x budget)"),
        (Measurement("m", math.inf, 0.5, False), "m: inf, budget 0.5"),
        (
            Measurement("m", 1.0, 2.0, True, "", "p", 0, "s", 1, "why"),
            "m: 1, budget 2 (50% of budget) at p, s, position 0: why",
        ),
    ],
)
def test_a_measurement_is_one_line(given: Measurement, line: str) -> None:
    assert describe(given) == line


def test_failures_of_one_kind_are_one_line() -> None:
    judge = Judge("fp32")
    for number in range(2):
        judge.promise("loads", False, f"reason {number}")
    assert judge.message() == "loads: 1, budget 0: reason 0; and 1 more like it"


def test_rows_hold_what_was_compared_and_the_error_of_rounding_the_answer() -> None:
    error = np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, np.nan], [0.0, 2.0, 0.0]])
    values = np.full((3, 3), -1.5)
    record = SimpleNamespace(tokens=np.arange(8), positions=np.arange(8))
    part = np.array([4, 5, 6])
    found = rows_of("p", record, part, error, np.full(3, 0.5), np.full(3, 2.0), np.full((3, 3), 0.25), values)
    assert found.positions.tolist() == [4, 6] and found.count.tolist() == [2, 3]
    assert found.square == pytest.approx([5.0, 4.0 / 3]) and found.largest.tolist() == [3.0, 2.0]
    assert found.yard_square.tolist() == [0.25, 0.25] and found.floor.tolist() == [0.25, 0.25]
    assert found.floor_square == pytest.approx(2.0**-46 / 12, abs=0.0)


@pytest.mark.parametrize(("times", "holds"), [(1.0, 2), (0.5, 2), (2.0, 1)])
def test_positions_stay_certified_while_scores_err_no_more_than_the_margin_allows(times: float, holds: int) -> None:
    """A score of 0.3 holds while errors are at most 1.67 times the emulation's."""
    yard = np.full(400, 1e-3)
    comparison = Comparison(
        rows=[
            Rows(
                "p",
                np.arange(400),
                np.ones(400, int),
                (times * yard) ** 2,
                times * yard,
                yard**2,
                yard,
                0 * yard,
                0 * yard,
            )
        ]
    )
    found = judge_assumption(comparison, [np.array([0.1, 0.3]), np.array([0.6])])
    assert found.value == pytest.approx(times)
    assert f"; {holds} of 3 positions stay certified" in found.detail


@pytest.mark.parametrize(
    ("text", "tokens", "readings", "ok"),
    [
        ("ab", (1, 2), ("ab", "x"), True),
        ("  a\n b ", (1, 2), ("a b",), True),
        ("a", (1, 2), ("a\ufffd",), True),
        ("ac", (1, 2), ("ab", "x"), False),
        (None, (1, 2), ("ab",), None),
        ("ab", (), ("ab",), None),
        ("ab", (1, 2), (), None),
    ],
)
def test_text_beside_ids_is_one_of_their_readings(
    text: str | None, tokens: tuple[int, ...], readings: tuple[str, ...], ok: bool | None
) -> None:
    judge = Judge("fp32")
    judge.told("p", Response("0", 3, tokens, text=text), readings)
    assert [one.ok for one in judge.measurements] == ([] if ok is None else [ok])


def test_the_angle_between_rows_is_told_from_their_distance_and_lengths() -> None:
    """Where the projections are the whole of rows of known length and angle, nothing is estimated."""
    one, two = np.zeros((2, 8)), np.zeros((2, 8))
    one[:, 0] = 3.0 * math.sqrt(8)
    two[0, 0], two[1, 1] = 5.0 * math.sqrt(8), 5.0 * math.sqrt(8)
    views = [SimpleNamespace(projections=part, norm=np.full(2, size)) for part, size in ((one, 3.0), (two, 5.0))]
    assert cosine_gap(*views) == pytest.approx([0.0, 1.0])  # type: ignore[arg-type]
