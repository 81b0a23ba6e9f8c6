"""Requests that carry a secret, and requests that nobody may answer."""

from __future__ import annotations

import math

import pytest

from pytest_adapt.golden.closed_form import ClosedForm
from pytest_adapt.models import catalogue
from pytest_adapt.models.walks import abnormal_requests, walks, whose
from pytest_adapt.target.protocol import Response
from pytest_adapt.verdict.judge import Judge

ENTRY = catalogue()["needle-llama"]
WALKS = walks(ENTRY, 8, shortest=48, longest=200)


@pytest.mark.requirement(77, 102)
@pytest.mark.parametrize("name", ["needle-llama", "needle-mixtral"])
def test_the_model_walks_as_the_needles_say(name: str) -> None:
    """Every output token is the next question: the closed form finds each of them, far from a tie."""
    entry = catalogue()[name]
    form = ClosedForm(entry)
    for walk in walks(entry, 5, shortest=48, longest=900, seed=3):
        output = walk.expected(20)
        fed = walk.tokens + output[:-1]
        rows = range(len(walk.tokens) - 1, len(fed))
        for row, token in zip(form.logits(fed, rows), output, strict=True):
            assert int(row.argmax()) == token
            assert sorted(row)[-1] - sorted(row)[-2] > 2.0


def test_a_seed_changes_the_secrets_and_nothing_else() -> None:
    other = walks(ENTRY, 8, shortest=48, longest=200, seed=1)
    assert [walk.name for walk in other] == [walk.name for walk in WALKS]
    for one, two in zip(WALKS, other, strict=True):
        different = [place for place, pair in enumerate(zip(one.tokens, two.tokens, strict=True)) if len(set(pair)) > 1]
        assert 0 < len(different) <= 16 and one.leads != two.leads
    assert walks(ENTRY, 8, shortest=48, longest=200) == WALKS
    assert (len(WALKS[0].tokens), len(WALKS[-1].tokens)) == (48, 200)
    assert len({walk.tokens[:24] for walk in WALKS}) == 1
    assert len({walk.expected(6) for walk in WALKS}) == len(WALKS)


def test_every_walk_visits_all_keys() -> None:
    for walk in WALKS:
        assert sorted(walk.expected(16)) == list(range(16))


@pytest.mark.requirement(77)
def test_a_leaked_secret_is_traced_to_its_owner() -> None:
    walk, owner = WALKS[2], WALKS[5]
    start, output = walk.tokens[-1], []
    for step in range(10):
        leads = owner.leads if step >= 4 else walk.leads
        start = leads[start]
        output.append(start)
    wrong, name = whose(walk, output, WALKS)
    assert wrong and name == owner.name
    judge = Judge("fp32")
    judge.walked(Response("0", len(walk.tokens), tokens=tuple(output)), walk, WALKS, 10)
    assert f": {wrong} of 10 tokens are not its own: they are the secret of {owner.name}, which" in judge.message()
    first = next(place for place, token in enumerate(walk.expected(10)) if token != output[place])
    words = f"; output token {first}, the first, is {output[first]}, where {walk.expected(10)[first]} is its own"
    assert words in judge.message()
    assert whose(walk, walk.expected(10), WALKS) == (0, "")


def test_garbage_is_nobodys_secret() -> None:
    assert whose(WALKS[0], (600, 601, 602), WALKS) == (3, "")


@pytest.mark.parametrize(
    ("tokens", "finish", "asked", "ok"),
    [
        (6, "length", False, True),
        (6, "length", True, True),
        (4, "length", True, False),
        (4, "abort", True, True),
        (4, "abort", False, False),
        (0, "abort", False, False),
    ],
)
def test_a_short_answer_is_a_fault_unless_it_was_asked_to_end(tokens: int, finish: str, asked: bool, ok: bool) -> None:
    """A target that aborts the neighbour of the request it was told to abort is red."""
    judge = Judge("fp32")
    walk = WALKS[0]
    judge.walked(Response("0", len(walk.tokens), walk.expected(tokens), finish=finish), walk, WALKS, 6, asked)
    assert bool(judge.failures()) is not ok
    assert ok or f"{tokens} tokens came, 6 were asked for ({finish}); 0 of {tokens} tokens" in judge.message()


def test_a_block_that_does_not_come_back_is_named() -> None:
    judge = Judge("fp32")
    judge.returned({"kv_blocks_available": 64.0, "running": 0.0}, {"kv_blocks_available": 61.0, "running": 1.0})
    assert "returned.kv_blocks_available: 3, budget 0: 61 when all is done, 64 expected" in judge.message()
    assert "returned.running: 1, budget 0: 1 when all is done, 0 expected" in judge.message()
    judge = Judge("fp32")
    judge.returned({"kv_blocks_available": 64.0}, {"kv_blocks_available": 64.0})
    assert judge.measurements and not judge.failures()


@pytest.mark.requirement(102)
def test_each_abnormal_request_is_wrong_in_one_way() -> None:
    found = abnormal_requests(WALKS[0].tokens, 640, 512)
    assert len({request.id for request in found.values()}) == len(found) == 11
    for what, request in found.items():
        sampling = request.sampling
        faults = [
            not request.prompt,
            any(not 0 <= token < 640 for token in request.prompt),
            len(request.prompt) + max(0, request.max_new_tokens) > 512,
            request.max_new_tokens < 0,
            not 0 <= sampling.temperature < math.inf,
            not 0 < sampling.top_p <= 1,
        ]
        assert sum(faults) == 1, what
