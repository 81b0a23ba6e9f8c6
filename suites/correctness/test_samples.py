"""Promise: at a temperature above 0 tokens come with the probabilities that model and request give them."""

import pytest

from pytest_adapt.target.protocol import Sampling
from pytest_adapt.verdict.result import Status
from pytest_adapt.verdict.sampling import LOOKS, plan
from pytest_adapt.verdict.status import Verdict

CLASSES = ("odd", "wide", "aligned", "")
GREEDY = {
    "temperature 0": Sampling(0.0, seed=1),
    "temperature 0, another seed": Sampling(0.0, seed=2),
    "top_k 1": Sampling(1.0, top_k=1, seed=3),
}


@pytest.mark.requirement(50, 113, 119)
@pytest.mark.adapt(rung="correct", needs=("text",), classes=CLASSES, profile="day0", requests=150, tokens=48)
def test_samples_follow_the_distribution(target, model, precision, reference, judge):
    """One token after each of a few prompts, with many seeds, until it is certain that the temperature is right."""
    planned = plan(model, reference, precision, judge.attempt)
    for look in range(LOOKS):
        requests = planned.requests(planned.plain, look)
        judge.drawn(planned, "temperature", requests, target.run(requests))
        if judge.settled:
            break


@pytest.mark.requirement(50, 113)
@pytest.mark.adapt(rung="correct", needs=("text",), classes=CLASSES, profile="day0", requests=230, tokens=48)
def test_filters_keep_the_tokens_that_they_name(target, model, precision, reference, judge):
    """top_k, top_p, and top_p of what top_k has left: nothing else is drawn, and what is left keeps its odds."""
    planned = plan(model, reference, precision, judge.attempt)
    without = []
    for label, setting in planned.filtered.items():
        requests = planned.requests(setting, draws=64)
        answers = target.run(requests)
        refused = [answer.error for answer in answers.values() if answer.error is not None]
        if len(refused) == len(requests) and target.kind == "endpoint":
            without.append(f"{label} is refused: {refused[0]}")
        else:
            judge.drawn(planned, label, requests, answers)
    if without:
        raise Verdict(Status.UNSUPPORTED, without[0])


@pytest.mark.requirement(98, 119)
@pytest.mark.adapt(rung="correct", needs=("text",), classes=CLASSES, requests=20, tokens=48)
def test_a_seed_decides_the_sample(target, model, precision, reference, judge):
    """Whatever runs beside it, and at whichever place of a batch; other seeds give other samples."""
    planned = plan(model, reference, precision, judge.attempt)
    requests = planned.requests(planned.plain, draws=6)
    alone = {request.id: target.run([request])[request.id] for request in requests}
    runs = {
        "each alone again": {request.id: target.run([request])[request.id] for request in requests},
        "all together": target.run(requests),
        "all together, in reverse": target.run(requests[::-1]),
    }
    for what, answers in runs.items():
        found, allowed = planned.differing(requests, alone, answers)
        if found > allowed and what == "each alone again" and target.kind == "endpoint":
            raise Verdict(Status.UNSUPPORTED, f"{target.info.name} does not repeat a sample by its seed")
        detail = (
            f"{found} of {len(requests)} draws differ from those of the same seeds alone; rounding explains {allowed}"
        )
        judge.promise(
            "seed",
            found <= allowed,
            detail,
            value=found,
            budget=allowed,
            prompt=what,
            observable="text",
            compared=len(alone),
        )
    several = sum(
        len({alone[request.id].tokens for request in requests if request.prompt == place.tokens}) > 1
        for place in planned.places
    )
    detail = f"{several} of {len(planned.places)} prompts got more than one token from 6 seeds"
    detail += "" if several else ": it looks as if temperature or seed had no effect"
    judge.promise("seeds", several > 0, detail, observable="text", compared=len(alone))


@pytest.mark.requirement(90, 98)
@pytest.mark.adapt(rung="correct", needs=("text",), classes=CLASSES)
def test_no_temperature_and_one_candidate_are_greedy(target, model, precision, reference, judge):
    """Temperature 0 whatever the seed, and top_k 1 at any temperature: the reference's first choice."""
    without = []
    if reference.oracle is None:
        prompts = sorted(model.prompts(64).items(), key=lambda one: -len(one[1]))
    else:  # those at whose ends routing is certain
        places = plan(model, reference, precision, judge.attempt).places
        prompts = [(place.name, place.tokens) for place in reversed(places)]
    for name, tokens in prompts[:2]:
        for what, setting in GREEDY.items():
            response = target.generate(tokens, 8, want=("text",), sampling=setting)
            if response.error is not None and setting.top_k and target.kind == "endpoint":
                without.append(f"{what} is refused: {response.error}")  # plain OpenAI has no such field
                continue
            record = reference.record(name, tokens + response.tokens[:-1])
            judge.generated(f"{name}: {what}", response, record, tokens)
    if without:
        raise Verdict(Status.UNSUPPORTED, without[0])
