"""The built-in engine's profile by operation: exact counts, seconds that add up, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.faults.slowness import SLOWDOWNS, single_ops, slow_op
from pytest_adapt.models import materialise
from pytest_adapt.target.protocol import Deployment, Request, TargetError
from pytest_adapt.target.registry import resolve

PROMPT = tuple(range(5, 29))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialise("qwen3-moe-odd", tmp_path_factory.getbasetemp() / "models")


@pytest.fixture
def target(directory: Path) -> Iterator[Any]:
    made: Any = resolve("builtin").create()
    made.open(deployed(directory))
    yield made
    made.close()


def deployed(directory: Path, layout: str = "single") -> Deployment:
    """On reference kernels: there every operation of the model is one of the registry."""
    return Deployment(str(directory), layout, features=(("native", 0),))


def run(target: Any, new: int = 4) -> dict[str, float]:
    """What the counters rose by."""
    before = target.stats()
    (answer,) = target.run([Request("0", PROMPT, new)])
    assert answer.error is None and len(answer.tokens) == new
    return {name: value - before.get(name, 0.0) for name, value in target.stats().items()}


@pytest.mark.requirement(30)
def test_counts_are_the_same_every_time(target: Any) -> None:
    plain = run(target)
    assert not any(name.startswith(("op.", "framework.")) for name in plain)
    target.profile("counts")
    first, second = run(target), run(target)
    assert {name: value for name, value in first.items() if "share" not in name} == {
        name: value for name, value in second.items() if "share" not in name
    }
    # 4 tokens drawn of the last row of each step; three layers and one more norm; one table lookup a step.
    assert first["op.embedding.calls"] == first["op.lm_head.calls"] == first["op.sample.calls"] == first["steps"] == 4
    assert first["op.embedding.bytes"] > 4 * 90 and first["framework.allocations"] > 100
    assert first["framework.allocated_bytes"] > first["framework.allocations"]
    more = run(target, 5)
    assert more["op.lm_head.calls"] == 5 and more["framework.calls"] > first["framework.calls"]


@pytest.mark.requirement(30)
def test_packed_matrices_are_counted_as_they_lie(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacking one to see its size would itself be counted."""
    from adapt_engine.kernels import native
    from adapt_engine.kernels.packed import PackedMatrix

    if native.load() is None:
        pytest.skip("the native kernels are not built")
    monkeypatch.setattr(PackedMatrix, "dense", lambda self: pytest.fail("a matrix was unpacked"))
    found = []
    for features in ((), (("native", 0),)):
        target: Any = resolve("builtin").create()
        target.open(Deployment(str(directory), features=features))
        target.profile("counts")
        found.append(run(target))
        target.close()
    packed, plain = found
    assert (
        packed["op.linear.bytes"] == plain["op.linear.bytes"] and packed["op.linear.calls"] == plain["op.linear.calls"]
    )
    assert packed["op.lm_head.bytes"] == plain["op.lm_head.bytes"] > 0


@pytest.mark.requirement(110)
@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_seconds_of_operations_are_their_own(target: Any, clock: str) -> None:
    target.profile("time", clock)
    found = run(target, 8)
    spent = {name: value for name, value in found.items() if name.endswith(".seconds")}
    assert all(value >= 0 for value in spent.values()) and spent["op.linear.seconds"] > 0
    # The experts are made of linear layers: what those take is not counted twice.
    (answer,) = target.run([Request("1", PROMPT, 8)])
    assert sum(spent.values()) < 2 * (answer.seconds or 0.0)


def test_off_is_off_and_what_was_summed_stays(target: Any) -> None:
    call = target.engine.kernels_registry.ops.linear
    target.profile("counts")
    run(target)
    assert target.engine.kernels_registry.ops.linear is not call
    target.profile("off")
    assert target.engine.kernels_registry.ops.linear is call
    assert run(target)["op.linear.calls"] == 0 and target.stats()["op.linear.calls"] > 0
    target.profile("off")


def test_what_is_no_profile_is_refused(target: Any) -> None:
    with pytest.raises(TargetError, match="there are time and counts, cpu and wall"):
        target.profile("speed")
    target.close()
    with pytest.raises(TargetError, match="not profiled"):
        target.profile("time")


@pytest.mark.requirement(46)
def test_ranks_of_one_process_are_counted_together(directory: Path) -> None:
    target: Any = resolve("builtin").create()
    target.open(deployed(directory, "pp2"))
    target.profile("counts")
    found = run(target)
    assert found["op.lm_head.calls"] == 4 and found["comm_calls"] > 0 and found["comm_bytes"] > 0
    target.profile("time", "cpu")
    assert run(target)["op.linear.seconds"] > 0
    target.close()


@pytest.mark.requirement(110)
def test_a_slow_operation_shows_in_its_own_seconds(directory: Path) -> None:
    target: Any = resolve("builtin").create()
    slow_op(target.seams, "attention", 2e-3)
    target.open(deployed(directory))
    target.profile("time", "cpu")
    found = run(target)
    assert found["op.attention.seconds"] >= 2e-3 * found["op.attention.calls"]
    assert found["op.attention.seconds"] > 5 * found["op.linear.seconds"] / 2
    target.close()
    target.seams.restore()


@pytest.mark.requirement(105)
def test_single_operations_are_called_where_kernels_would_fuse_them(directory: Path) -> None:
    target: Any = resolve("builtin").create()
    single_ops(target.seams)
    target.open(Deployment(str(directory)))
    registry = target.engine.kernels_registry
    assert registry.wrapped and registry.names()["experts"] == "reference"
    assert target.engine.executor.workers[0].transformer.whole(target.engine.executor.workers[0].parallel, None) is None
    (answer,) = target.run([Request("0", PROMPT, 4)])
    assert len(answer.tokens) == 4
    target.close()
    target.seams.restore()


@pytest.mark.requirement(105)
@pytest.mark.parametrize("name", SLOWDOWNS)
def test_what_is_slowed_answers_as_before(directory: Path, name: str) -> None:
    answers = []
    for fault in (None, SLOWDOWNS[name]):
        target: Any = resolve("builtin").create()
        if fault is not None:
            fault.install(target.seams)
        target.open(deployed(directory))
        (answer,) = target.run([Request("0", PROMPT, 4)])
        answers.append(answer.tokens)
        target.close()
        target.seams.restore()
    assert answers[0] == answers[1]


@pytest.mark.requirement(110)
def test_transformers_modules_are_profiled_by_class(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("transformers")
    target: Any = resolve("hf:").create()
    target.open(Deployment(str(materialise("llama-odd", tmp_path_factory.getbasetemp() / "models"))))

    def run(new: int) -> tuple[dict[str, float], float]:
        before = target.stats()
        (answer,) = target.run([Request("0", PROMPT, new)])
        return {name: value - before.get(name, 0.0) for name, value in target.stats().items()}, answer.seconds

    assert run(2)[0] == {}
    target.profile("counts")
    first, second = run(3)[0], run(3)[0]
    assert first == second
    # Three forward passes of four layers: two norms each and one at the end, seven linear maps each and the head.
    assert (first["op.LlamaRMSNorm.calls"], first["op.Linear.calls"]) == (3 * 9, 3 * 29)
    assert first["framework.calls"] > first["op.Linear.calls"]
    target.profile("time", "wall")
    found, seconds = run(3)
    spent = {name: value for name, value in found.items() if name.endswith(".seconds")}
    assert 0 < sum(spent.values()) < seconds and spent["op.Linear.seconds"] > 0
    target.profile("off")
    assert run(2)[0]["op.Linear.calls"] == 0
    with pytest.raises(TargetError, match="there are time and counts"):
        target.profile("speed")
    target.close()
    with pytest.raises(TargetError, match="not open"):
        target.profile("time")
