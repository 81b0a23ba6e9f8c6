"""Promise: under pressure every request gets its own answer, and nobody else's."""

import random

import pytest

from pytest_adapt.target.protocol import Request

TOKENS = 24
"""More than a page: what was let in outgrows the cache."""


@pytest.mark.requirement(77, 102, 114)
@pytest.mark.adapt(rung="stress", classes="needle", profile="day0", needs=("text",))
def test_each_of_32_requests_keeps_its_secret(target, model, precision, judge):
    """Bursts of mixed lengths on a cache that holds a few of them; from burst to burst only the secrets change."""
    crowded = target.with_pool(1024)
    before = crowded.stats()
    for burst in range(3):
        walks = model.walks(32, shortest=48, longest=448, seed=burst)
        order = random.Random(burst).sample(walks, len(walks))
        answers = crowded.generate_all({walk.name: walk.tokens for walk in order}, TOKENS, ("text",))
        for walk in walks:
            judge.walked(answers[walk.name], walk, walks, TOKENS)
    judge.returned(before, crowded.stats())


@pytest.mark.requirement(77, 102, 114)
@pytest.mark.adapt(rung="stress", classes="needle", profile="day0", needs=("text",), features={"prefix_cache": (0, 1)})
def test_a_shared_beginning_shares_no_secret(target, model, precision, judge):
    """The same with a prefix cache: all prompts begin alike, and those of one name differ in their needles alone."""
    cached = target.with_features(prefix_cache=1).with_pool(1024)
    for burst in range(3):
        walks = model.walks(16, shortest=48, longest=448, seed=burst % 2)
        answers = cached.generate_all({walk.name: walk.tokens for walk in walks}, TOKENS, ("text",))
        for walk in walks:
            judge.walked(answers[walk.name], walk, walks, TOKENS)


@pytest.mark.requirement(77, 102)
@pytest.mark.adapt(rung="stress", classes="needle", profile="day0", needs=("text",))
def test_aborted_requests_leave_the_others_alone(target, model, precision, judge):
    """Half of the requests are aborted in the middle of their output; then all of the cache is free again."""
    crowded = target.with_pool(1024)
    before = crowded.stats()
    aborted = 0
    for burst in range(2):
        walks = model.walks(24, shortest=48, longest=256, seed=burst)
        chosen = random.Random(burst)
        victims = chosen.sample(walks, 12)
        length = {walk.name: 160 if walk in victims else chosen.randrange(1, TOKENS) for walk in walks}
        requests = [Request(f"{walk.name}#{burst}", walk.tokens, length[walk.name]) for walk in walks]
        answers = crowded.aborted(requests, [f"{walk.name}#{burst}" for walk in victims])
        for walk in walks:
            response = answers[f"{walk.name}#{burst}"]
            judge.walked(response, walk, walks, length[walk.name], may_end=walk in victims)
            aborted += response.finish == "abort"
    judge.promise("aborted", aborted > 0, f"{aborted} of 24 requests were ended early")
    judge.returned(before, crowded.stats())
