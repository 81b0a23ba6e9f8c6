"""Promise: at every certified position the target predicts what the model predicts."""

import pytest


@pytest.mark.requirement(62, 113, 114)
@pytest.mark.adapt(rung="correct", needs=("logits", "score", "topk"))
def test_predictions_match_the_reference(target, model, precision, context_length, reference, judge):
    """Teacher-forced predictions over every prompt of the model that fits the context."""
    for name, tokens in model.prompts(context_length).items():
        response = target.score(tokens)
        judge.prompt_tokens(name, response, tokens)
        judge.against_record(name, response, reference.record(name, tokens))


@pytest.mark.requirement(90, 113)
@pytest.mark.adapt(rung="correct", needs=("text",))
def test_greedy_output_follows_the_reference(target, model, precision, reference, judge):
    """Each generated token is the reference's first choice, or a near-tie within the measured error."""
    for name, tokens in model.prompts(64).items():
        response = target.generate(tokens, 24)
        judge.prompt_tokens(name, response, tokens)
        judge.generated(name, response, reference.record(name, tokens + response.tokens[:-1]), tokens)
        judge.told(name, response, model.readings(response.tokens))
