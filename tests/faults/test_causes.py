"""Real faults in the built-in engine: one makes one cause, two make two."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_adapt.faults import catalogue, get
from pytest_adapt.models import catalogue as models
from pytest_adapt.models import materialise, prompts
from pytest_adapt.oracle import Oracle
from pytest_adapt.sites import layer_of
from pytest_adapt.target.protocol import Deployment, Request
from pytest_adapt.target.registry import resolve
from pytest_adapt.verdict.judge import Judge
from pytest_adapt.verdict.ladder import clusters
from pytest_adapt.verdict.result import CaseResult, Status

LENGTH = 80
ALONE = [fault.id for fault in catalogue().values() if fault.white_box and "bf16" in fault.precisions]
TOGETHER = [
    ("RP12", "RT04", "deepseek-v3-odd-pos"),
    ("NM05", "RT03", "deepseek-v3-odd-pos"),
    ("WL09", "WL90", "qwen3-moe-odd"),
    ("AT27", "RT19", "qwen3-moe-odd"),
    ("WL15", "PR21", "mixtral-odd"),
    ("RP04", "PR90", "llama-odd"),
]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def oracles(root: Path) -> dict[str, Oracle]:
    return {}


# Wrong at a second place by what it is: the weight is taken where it does not belong, and missing where it does.
ELSEWHERE = {"RT24": ("moe.routed",)}


def judged(faults: tuple[str, ...], model: str, layout: str, root: Path, oracles: dict[str, Oracle]) -> CaseResult:
    """The white-box case of a run in bfloat16 with these faults."""
    directory = materialise(model, root)
    tokens = prompts(models()[model], directory)["random-150"][:LENGTH]
    if model not in oracles:
        oracles[model] = Oracle(directory)
    target = resolve("builtin").create()
    for name in faults:
        get(name).install(target.seams)  # type: ignore[attr-defined]
    try:
        info = target.open(Deployment(str(directory), layout, "bf16", taps=("*",), features=(("prefill_chunk", 64),)))
        (response,) = target.run([Request("0", tokens, max_new_tokens=4, want=frozenset({"taps", "logits"}))])
    finally:
        target.close()
    judge = Judge("bf16", rounds=info.rounds, router=info.router)
    judge.against_sites("random", response, oracles[model], tokens + response.tokens[:-1])
    return CaseResult(
        "correctness/test_sites.py::test_it",
        Status.FAIL if judge.failures() else Status.PASS,
        "correctness",
        "correct",
        model=model,
        layout=layout,
        measurements=judge.measurements,
        divergence=judge.divergence,
    )


@pytest.mark.requirement(116)
@pytest.mark.parametrize("name", ALONE)
def test_one_fault_has_one_cause(name: str, root: Path, oracles: dict[str, Oracle]) -> None:
    fault = get(name)
    found = clusters([judged((name,), fault.models[0], fault.layout, root, oracles)])
    sites = [fault.site, *ELSEWHERE.get(name, ())]
    assert [cluster.cause for cluster in found] == [f"first divergence in {site}" for site in sites]


@pytest.mark.requirement(116)
@pytest.mark.parametrize(("one", "other", "model"), TOGETHER)
def test_two_faults_have_two_causes(one: str, other: str, model: str, root: Path, oracles: dict[str, Oracle]) -> None:
    found = clusters([judged((one, other), model, "single", root, oracles)])
    assert sorted(layer_of(cluster.sites[0])[1] for cluster in found) == sorted([get(one).site, get(other).site])
