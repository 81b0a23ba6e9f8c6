"""How quick a target is while it is right: engineering references, every sample kept, no limit on any time.

The timed answers themselves are judged, so that a quick target that answers wrongly fails.
"""

import pytest

LADDER = ((128, 32, 1), (1024, 32, 1), (1024, 32, 4), (1024, 32, 16), (4096, 32, 1), (4096, 32, 4))


@pytest.mark.requirement(105, 106)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="performance", classes="needle", profile="day0", needs=("text",))
def test_a_thousand_in_and_a_hundred_out(target, model, precision, judge, stopwatch):
    """1024 tokens in, 128 out, four requests together."""
    walks = model.walks(4, shortest=1024, longest=1024)
    rounds = stopwatch.load(target, {walk.name: walk.tokens for walk in walks}, 128)
    for one in rounds:
        for walk in walks:
            judge.walked(one.answers[walk.name], walk, walks, 128)
    judge.timed("1024 in / 128 out / batch 4", rounds, model.directory if target.in_process else None)


@pytest.mark.requirement(105, 106)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="performance", classes="needle", profile="full", needs=("text",))
@pytest.mark.parametrize(("length", "new", "batch"), LADDER, ids=lambda value: str(value))
def test_a_ladder_of_lengths_and_batches(target, model, precision, length, new, batch, judge, stopwatch):
    walks = model.walks(batch, shortest=length, longest=length)
    rounds = stopwatch.load(target, {walk.name: walk.tokens for walk in walks}, new, rounds=3)
    for one in rounds:
        for walk in walks:
            judge.walked(one.answers[walk.name], walk, walks, new)
    judge.timed(f"{length} in / {new} out / batch {batch}", rounds, model.directory if target.in_process else None)


@pytest.mark.requirement(105, 106)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="performance", classes=("real", ""), profile="full", needs=("text",))
def test_the_speed_of_real_weights(target, model, precision, reference, judge, stopwatch):
    """1024 tokens in, or what the deployment has room for, 128 out, four requests together; the first answer is
    followed by the reference."""
    length = min(1024, target.deployment.max_context - 128)
    prompts = model.load(4, length)
    rounds = stopwatch.load(target, prompts, 128, rounds=3)
    for one in rounds:
        for name, answer in one.answers.items():
            judge.prompt_tokens(name, answer, prompts[name])
            judge.promise("output_tokens", len(answer.tokens) == 128, f"{len(answer.tokens)} of 128 tokens came")
    name, tokens = next(iter(prompts.items()))
    answer = rounds[-1].answers[name]
    judge.generated(name, answer, reference.record(name, tokens + answer.tokens[:-1]), tokens)
    judge.timed(f"{length} in / 128 out / batch 4", rounds, model.directory if target.in_process else None)
