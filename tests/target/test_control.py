"""The built-in target's control over requests in flight, and the scheduling features that a deployment may ask for."""

from pathlib import Path

import pytest

from pytest_adapt.models import materialise
from pytest_adapt.target.protocol import Deployment, Request, TargetError
from pytest_adapt.target.registry import resolve

PROMPT = tuple(range(3, 33))


@pytest.fixture
def opened(tmp_path: Path):
    """``opened(**features)``: the built-in target on a small model, closed when the test ends."""
    directory = materialise("llama-odd", tmp_path)
    targets = []

    def get(kv_tokens: int = 0, **features: int):
        target = resolve("builtin").create()
        targets.append(target)
        target.open(
            Deployment(str(directory), max_context=256, kv_tokens=kv_tokens, features=tuple(sorted(features.items())))
        )
        return target

    yield get
    for target in targets:
        target.close()


def requests(count: int, new: int) -> list[Request]:
    return [Request(str(index), (index, *PROMPT), new, want=frozenset({"logits", "text"})) for index in range(count)]


@pytest.mark.requirement(102)
def test_an_abort_ends_one_request_and_leaves_the_others(opened):
    target = opened()
    alone = {response.id: response.tokens for response in target.run(requests(3, 5))}
    asked = [*requests(3, 5), Request("long", PROMPT, 200, want=frozenset({"logits"}))]
    answers = {}
    for response in target.run(asked):
        answers[response.id] = response
        target.control("abort", id="long")
        target.control("abort", id="never heard of")
    assert answers["long"].finish == "abort" and answers["long"].error is None
    assert 0 < len(answers["long"].tokens) < 200
    assert answers["long"].logits is None, "its rows end anywhere"
    assert {name: answers[name].tokens for name in alone} == alone
    assert target.stats()["running"] == target.stats()["waiting"] == 0
    # What was asked for after the run is over concerns no later one.
    target.control("abort", id="0")
    (later,) = target.run(requests(1, 5))
    assert (later.finish, later.tokens) == ("length", alone["0"])


def test_an_unknown_control_names_what_there_is(opened):
    with pytest.raises(TargetError, match=r"no control pause\(id\); there is abort\(id\)"):
        opened().control("pause", id="0")
    with pytest.raises(TargetError, match="no control abort"):
        opened().control("abort")


@pytest.mark.requirement(76, 85, 102)
def test_features_reach_the_scheduler(opened):
    plain = {response.id: response.tokens for response in opened().run(requests(6, 20))}
    small = opened(kv_tokens=160, step_tokens=7, page_size=5)
    assert {response.id: response.tokens for response in small.run(requests(6, 20))} == plain
    assert small.stats()["preemptions"] > 0 and small.stats()["steps"] > 6 * 31 / 7
    reserved = opened(kv_tokens=160, preemption=0)
    assert {response.id: response.tokens for response in reserved.run(requests(6, 20))} == plain
    assert reserved.stats()["preemptions"] == 0
    refused = [response for response in opened(max_waiting=4).run(requests(6, 20)) if response.error]
    assert [response.id for response in refused] == ["4", "5"] and "max_waiting is 4" in refused[0].error
