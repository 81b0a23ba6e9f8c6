"""Faults of scheduler and memory: in a crowd a request says what is not its own."""

import random

import pytest

from pytest_adapt.faults import Fault
from pytest_adapt.faults.scheduling import FAULTS
from pytest_adapt.models import catalogue as models
from pytest_adapt.models import materialise
from pytest_adapt.models.walks import walks
from pytest_adapt.target.protocol import Deployment, Request
from pytest_adapt.target.registry import resolve
from pytest_adapt.verdict.judge import Judge

CASES = [(fault, precision) for fault in FAULTS for precision in fault.precisions]
TOKENS = 24


def crowd(root, fault: Fault | None, precision: str, cached: int, victims: int) -> Judge:
    """Three bursts of 20 requests on 50 pages; of each burst the first ``victims`` are aborted on the way."""
    name = "needle-llama"
    directory = materialise(name, root)
    target = resolve("builtin").create()
    if fault is not None:
        fault.install(target.seams)
    judge = Judge(precision)
    try:
        target.open(
            Deployment(
                str(directory),
                precision=precision,
                max_context=512,
                kv_tokens=800,
                features=(("prefix_cache", cached),),
            )
        )
        before = target.stats()
        for burst in range(3):
            everyone = walks(models()[name], 20, shortest=48, longest=320, seed=burst % 2)
            order = random.Random(burst).sample(everyone, len(everyone))
            chosen = {walk.name for walk in order[:victims]}
            left = sorted(chosen)
            length = {walk.name: 100 if walk.name in chosen else TOKENS for walk in order}
            answers = {}
            for response in target.run([Request(walk.name, walk.tokens, length[walk.name]) for walk in order]):
                answers[response.id] = response
                if left:
                    target.control("abort", id=left.pop())
            for walk in everyone:
                judge.walked(answers[walk.name], walk, everyone, length[walk.name], may_end=walk.name in chosen)
        judge.returned(before, target.stats())
        assert fault is not None or target.stats()["preemptions"] > 0, "no pressure"
    finally:
        target.close()
        target.seams.restore()
    return judge


@pytest.mark.requirement(69, 77, 85, 102)
@pytest.mark.parametrize(("fault", "precision"), CASES, ids=lambda value: getattr(value, "id", value))
def test_a_crowd_shows_the_fault(tmp_path_factory, fault, precision):
    judge = crowd(root(tmp_path_factory), fault, precision, 0, 6 if fault.kind == "ME" else 0)
    assert judge.failures(), f"{fault.id} ({fault.title}) passed in {precision}"
    assert fault.says in judge.message()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("cached", "victims"), [(0, 0), (1, 0), (0, 6)])
def test_a_crowd_without_a_fault_is_green(tmp_path_factory, precision, cached, victims):
    judge = crowd(root(tmp_path_factory), None, precision, cached, victims)
    assert judge.measurements and not judge.failures(), judge.message()


def root(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "models"
