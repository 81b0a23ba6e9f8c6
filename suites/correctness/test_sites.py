"""Promise: every operation of every layer computes its definition, given the inputs that it really had."""

import pytest


@pytest.mark.requirement(54, 56, 116)
@pytest.mark.adapt(rung="correct", needs=("taps",))
def test_each_operation_matches_its_definition(target, model, precision, reference, judge):
    """Prefill and decode: the oracle follows the target site by site, so an error is charged where it arises."""
    for name, tokens in model.prompts(160).items():
        response = target.generate(tokens, 8, want={"taps"})
        judge.prompt_tokens(name, response, tokens)
        judge.against_sites(name, response, reference.oracle, tokens + response.tokens[:-1])


@pytest.mark.requirement(69, 75, 116)
@pytest.mark.adapt(rung="correct", needs=("taps",), features={"prefill_chunk": 7})
def test_each_operation_matches_its_definition_when_prefill_is_chunked(target, model, precision, reference, judge):
    for name, tokens in model.prompts(160).items():
        response = target.score(tokens, want={"taps"})
        judge.against_sites(name, response, reference.oracle, tokens)
