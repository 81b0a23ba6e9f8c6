"""Promise: the same request gives the same answer to the last bit, run after run and after a restart."""

import pytest

SHOWN = ("logits", "text")


@pytest.mark.requirement(98)
@pytest.mark.adapt(rung="consistent", needs=SHOWN)
def test_a_repeated_run_gives_the_same_answer(target, model, precision, judge):
    """Full logits bit for bit where the target shows them, tokens and text everywhere."""
    for name, tokens in model.prompts(64).items():
        first = target.generate(tokens, 16, want=SHOWN)
        for attempt in range(2, 4):
            judge.identical(f"{name}: attempt {attempt}", target.generate(tokens, 16, want=SHOWN), first)


@pytest.mark.requirement(98)
@pytest.mark.adapt(rung="consistent", needs=("logits",))
def test_a_restart_gives_the_same_bits(target, model, precision, judge):
    before = {name: target.generate(tokens, 8, want=("logits",)) for name, tokens in model.prompts(64).items()}
    target.restart()
    for name, tokens in model.prompts(64).items():
        judge.identical(f"{name}: after a restart", target.generate(tokens, 8, want=("logits",)), before[name])
