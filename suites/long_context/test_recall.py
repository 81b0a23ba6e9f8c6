"""Promise: what was said anywhere in the context is found again, however far back it is."""

import pytest


@pytest.mark.requirement(75, 104)
@pytest.mark.adapt(rung="long_context", classes="needle", profile="day0", needs=("logits", "topk", "text"))
def test_every_needle_is_recalled(target, model, precision, context_length, reference, judge):
    """Needles at every boundary, questions at every boundary; the answer has a closed form at any length."""
    served = target.with_features(prefill_chunk=512) if target.supports("prefill_chunk", 512) else target
    for recall in model.recalls(context_length):
        record = reference.record(recall.name, recall.tokens)
        for name, response in recall.ask(served).items():
            judge.recalled(name, response, recall, record)
