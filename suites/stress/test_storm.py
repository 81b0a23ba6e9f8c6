"""Promise: what nobody can serve is refused, and leaves no trace."""

import pytest

from pytest_adapt.models.walks import abnormal_requests
from pytest_adapt.target.protocol import Request

TOKENS = 8
SHOWN = ("logits", "score", "topk", "text")


@pytest.mark.requirement(98, 102)
@pytest.mark.adapt(rung="stress", classes="needle", profile="day0", needs=("text",))
def test_abnormal_requests_between_good_ones_are_refused(target, model, precision, judge):
    """Each abnormal request gets an error, its neighbours their own answers."""
    crowded = target.with_pool(1024)
    before = crowded.stats()
    walks = model.walks(22, shortest=48, longest=448)
    abnormal = abnormal_requests(walks[0].tokens, model.vocab_size, crowded.limit)
    good = [Request(walk.name, walk.tokens, TOKENS) for walk in walks]
    mixed = [request for pair in zip(good[::2], abnormal.values(), good[1::2], strict=True) for request in pair]
    answers = crowded.run(mixed)
    for what, request in abnormal.items():
        judge.promise("refused", answers[request.id].error is not None, f"{what} was accepted")
    for walk in walks:
        judge.walked(answers[walk.name], walk, walks, TOKENS)
    judge.returned(before, crowded.stats())


@pytest.mark.requirement(98, 102, 114)
@pytest.mark.adapt(rung="stress", classes="needle", profile="day0", needs=SHOWN)
def test_answers_are_the_same_before_and_after_a_storm(target, model, precision, reference, judge):
    """A few requests alone, then crowds with abnormal ones among them, then the few again."""
    crowded = target.with_pool(2048)
    own = model.walks(4, shortest=64, longest=400, seed=9)
    few = {walk.name: walk.tokens for walk in own}
    first = crowded.generate_all(few, TOKENS, SHOWN)
    for burst in range(2):
        walks = model.walks(24, shortest=48, longest=448, seed=burst)
        abnormal = abnormal_requests(walks[0].tokens, model.vocab_size, crowded.limit)
        crowded.run([*abnormal.values(), *(Request(walk.name, walk.tokens, TOKENS) for walk in walks)])
    after = crowded.generate_all(few, TOKENS, SHOWN)
    for walk in own:
        judge.walked(first[walk.name], walk, own, TOKENS)
    for name, tokens in few.items():
        record = reference.record(name, tokens + first[name].tokens[:-1])
        if any(value is not None for value in (first[name].logits, first[name].scores, first[name].topk)):
            judge.against_record(f"{name}: before", first[name], record)
        judge.agree(f"{name}: after against before", after[name], first[name], record)
