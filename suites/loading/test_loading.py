"""Promise: the checkpoint that was named is the one that runs, and a damaged one does not."""

import pytest

from pytest_adapt.models import damage


@pytest.mark.requirement(11, 90)
@pytest.mark.adapt(rung="loads", needs=("text",), classes="any", blocks=True)
def test_the_model_loads_and_answers(target, model, precision, judge):
    """Tokenise, generate, decode: the token counts are exact and the output has the length asked for."""
    for name, tokens in model.prompts(32).items():
        response = target.generate(tokens, 4)
        judge.prompt_tokens(name, response, tokens)
        judge.promise("output_tokens", len(response.tokens) == 4, f"asked for 4 tokens, got {len(response.tokens)}")


@pytest.mark.requirement(11, 15, 17)
@pytest.mark.adapt(rung="loads", needs=("text",), features={"load_audit": (1,)})
def test_every_tensor_is_read_once_and_the_load_is_reported(target, model, precision, judge):
    report = target.info.load
    expected = len(model.tensor_names())
    judge.promise(
        "tensors", report["tensors"] == expected, f"{report['tensors']} tensors consumed, the index names {expected}"
    )
    judge.promise("seconds", report["seconds"] > 0, f"load time {report['seconds']} s")
    judge.promise("bytes", report["bytes"] > 0, f"{report['bytes']} bytes read")


@pytest.mark.requirement(21)
@pytest.mark.adapt(rung="loads", needs=("text",))
def test_the_source_is_left_unchanged(target, model, precision, judge):
    """Adaptation is not retraining: the checkpoint's tensors and configuration hash the same after a run."""
    before = model.digests()
    target.generate(next(iter(model.prompts(32).values())), 2)
    judge.promise("digests", model.digests() == before, "the checkpoint changed on disk while the target ran it")


@pytest.mark.requirement(15, 102)
@pytest.mark.adapt(rung="loads", needs=("text",), features={"load_audit": (1,)})
@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_checkpoint_is_refused(target, model, kind, judge, tmp_path):
    """Truncated, missing, duplicate, stale, misshapen or non-finite: refused, with file and tensor named."""
    with damage.applied(kind, model.directory, tmp_path / "checkpoint") as broken:
        message = target.refusal(broken.directory)
    judge.promise("refused", message is not None, f"{kind}: the target loaded it ({broken.what})")
    judge.promise(
        "named", broken.names_in(message or ""), f"{kind}: the refusal does not name {broken.named}: {message}"
    )


@pytest.mark.requirement(102)
@pytest.mark.adapt(rung="loads", needs=("text",))
def test_abnormal_input_is_refused_and_the_target_stays_healthy(target, model, judge):
    """An empty prompt, unknown ids and an over-long prompt each get an error; then a normal request works."""
    tokens = next(iter(model.prompts(32).values()))
    before = target.generate(tokens, 4)
    limit = target.deployment.max_context
    for what, prompt in {
        "an empty prompt": (),
        "an id past the vocabulary": (*tokens, model.vocab_size),
        "a negative id": (*tokens, -1),
        f"{limit + 1} tokens for a context of {limit}": (tokens * (limit // len(tokens) + 1))[: limit + 1],
    }.items():
        response = target.generate(prompt, 1)
        judge.promise("refused", response.error is not None, f"{what} was accepted")
    judge.identical("a normal request after abnormal ones", target.generate(tokens, 4, want=("text",)), before)


@pytest.mark.requirement(60, 63)
@pytest.mark.adapt(rung="loads", needs=("text",), profile="day0", models=("qwen3-moe-odd", "qwen3-moe-aligned"))
def test_the_target_shows_what_it_declares_and_declares_what_it_shows(target, model, precision, judge):
    """A claim that is not kept makes verdicts worthless; one that is not made hides what could be judged."""
    problems = target.claims().problems
    judge.promise("claims", not problems, "; ".join(problems))
