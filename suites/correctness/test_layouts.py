"""Promise: spread over any ranks, a model is the same model. Every layout is held against the record of one."""

import pytest


@pytest.mark.requirement(34, 35, 36, 37, 38, 39, 43, 62)
@pytest.mark.adapt(rung="layouts", needs=("logits", "score", "topk"), tokens=256)
def test_predictions_match_the_reference(target, model, layout, precision, reference, judge):
    """All prompts in flight together: replicas, stages and sequence borders have work of unequal size."""
    prompts = model.prompts(256)
    answers = target.score_all(prompts)
    for name, tokens in prompts.items():
        judge.prompt_tokens(name, answers[name], tokens)
        judge.against_record(name, answers[name], reference.record(name, tokens))
    found = target.stats()
    if "comm_share" in found:
        share, detail = found["comm_share"], f"{found['comm_bytes']:.0f} bytes in {found['comm_calls']:.0f} calls"
        judge.promise("communication", 0 <= share < 1, detail, value=share, budget=1.0)


@pytest.mark.requirement(34, 35, 36, 37, 38, 39, 54, 116)
@pytest.mark.adapt(rung="layouts", needs=("taps",), tokens=160)
def test_each_operation_matches_its_definition(target, model, layout, precision, reference, judge):
    """Prefill and decode, in logical coordinates: heads, experts, rows and layers of all ranks put together again."""
    prompts = model.prompts(160)
    answers = target.generate_all(prompts, 8, want={"taps"})
    for name, tokens in prompts.items():
        judge.prompt_tokens(name, answers[name], tokens)
        judge.against_sites(name, answers[name], reference.oracle, tokens + answers[name].tokens[:-1])
