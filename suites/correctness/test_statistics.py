"""Promise: over many prompts the target is as good as the reference, and how much worse it could be is known."""

import pytest

from pytest_adapt.verdict.sampling import LOOKS

PROMPTS, LENGTH = 24, 12
MOST = PROMPTS << (LOOKS - 1)


@pytest.mark.requirement(113, 114, 117)
@pytest.mark.adapt(
    rung="correct",
    needs=("logits", "score", "topk"),
    classes=("odd", "wide", "aligned", ""),
    profile="day0",
    requests=4,
    tokens=48,
)
def test_many_short_prompts_are_predicted_alike(target, model, precision, reference, judge):
    """Likelihood, divergence and most probable tokens of fresh random prompts, where routing may flip too; more prompts
    until the gates are settled."""
    everything = list(model.load(MOST * (judge.attempt + 1), LENGTH).items())[MOST * judge.attempt :]
    for look in range(LOOKS):
        prompts = dict(everything[PROMPTS << look >> 1 if look else 0 : PROMPTS << look])
        answers = target.score_all(prompts)
        for name, tokens in prompts.items():
            judge.sample(name, answers[name], reference.record(name, tokens), reference.oracle)
        if judge.settled:
            break


@pytest.mark.requirement(90, 113)
@pytest.mark.adapt(
    rung="correct",
    needs=("text",),
    classes=("odd", "wide", "aligned", ""),
    profile="day0",
    requests=4,
    tokens=48,
)
def test_many_short_outputs_are_written_alike(target, model, precision, reference, judge):
    """Greedy output by text alone: each token against the reference's choice after what the target wrote before it."""
    everything = list(model.load(MOST * (judge.attempt + 1), LENGTH).items())[MOST * judge.attempt :]
    for look in range(LOOKS):
        prompts = dict(everything[PROMPTS << look >> 1 if look else 0 : PROMPTS << look])
        answers = target.generate_all(prompts, 8, want=("text",))
        for name, tokens in prompts.items():
            fed = tokens + answers[name].tokens[:-1]
            judge.sample(name, answers[name], reference.record(name, fed), reference.oracle)
        if judge.settled:
            break


@pytest.mark.requirement(113, 117)
@pytest.mark.adapt(rung="correct", needs=("text",), classes="needle")
def test_many_short_tasks_are_solved(target, model, precision, judge):
    """Walks through permutations that the prompt alone knows: every step is a question with one right answer."""
    for look in range(LOOKS):
        walks = model.walks(16, shortest=64, longest=160, seed=judge.attempt * LOOKS + look)
        answers = target.generate_all({walk.name: walk.tokens for walk in walks}, 8, want=("text",))
        for walk in walks:
            said, right = answers[walk.name].tokens, walk.expected(8)
            wrong = [token != said[place] if place < len(said) else True for place, token in enumerate(right)]
            judge.answered(f"{walk.name}.{judge.attempt}.{look}", wrong)
        if judge.settled:
            break
