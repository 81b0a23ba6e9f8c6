"""The built-in target on many ranks: what it declines, and what it says when ranks fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_adapt.inspect import analyse
from pytest_adapt.inspect.memory import Load, budget
from pytest_adapt.layout import parse
from pytest_adapt.models import materialise
from pytest_adapt.target.protocol import Deployment, Request, Response, TargetError, UnsupportedDeployment
from pytest_adapt.target.registry import resolve


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(materialise("qwen3-moe-wide", tmp_path_factory.mktemp("models")))


def run(
    model: str, layout: str, seam: str = "", wrapper: Callable[[Any], Any] | None = None, spec: str = "builtin"
) -> list[Response]:
    """One short prompt on a layout (a second replica has nothing to do), with one seam replaced."""
    target = resolve(spec).create()
    if wrapper is not None:
        target.seams.wrap(seam, wrapper)
    try:
        target.open(Deployment(model, layout, max_context=64, taps=("layer.*.residual",)))
        return list(target.run([Request("0", tuple(range(3, 23)), 3, want=frozenset({"taps", "logits"}))]))
    finally:
        target.close()


@pytest.mark.requirement(39)
def test_a_layout_that_the_model_cannot_take_is_declined_with_the_nearest_ones(wide: str) -> None:
    with pytest.raises(UnsupportedDeployment, match="8 query heads do not divide by 3; nearest legal: tp2, tp4"):
        run(wide, "tp3")


@pytest.mark.requirement(44)
def test_ranks_in_processes_answer_like_virtual_ones(wide: str) -> None:
    (virtual,), (gloo,) = run(wide, "tp2"), run(wide, "tp2", spec="builtin[communicator=gloo]")
    assert gloo.tokens == virtual.tokens
    assert gloo.logits is not None and gloo.taps is not None and virtual.taps is not None
    assert (gloo.logits == virtual.logits).all()
    assert {site: (rows == virtual.taps[site]).all() for site, rows in gloo.taps.items()} == dict.fromkeys(
        virtual.taps, True
    )


@pytest.mark.requirement(44)
def test_ranks_in_processes_say_what_they_cannot_do(wide: str) -> None:
    with pytest.raises(UnsupportedDeployment, match="faults are put into this process; use virtual ranks"):
        run(wide, "tp2", "comm.send", losing, spec="builtin[communicator=gloo]")
    with pytest.raises(TargetError, match="communicator 'nccl' is not one of virtual, gloo"):
        run(wide, "tp2", spec="builtin[communicator=nccl]")


def skipping_when_idle(original: Any) -> Any:
    """The replica without work leaves the experts' exchanges out."""

    def all_to_all(self: Any, parts: Any, group: Any, counts: Any) -> Any:
        if self.rank == 1:
            return [parts[0].new_zeros((count, *parts[0].shape[1:])) for count in counts]
        return original(self, parts, group, counts)

    return all_to_all


def dying(original: Any) -> Any:
    def all_reduce(self: Any, *arguments: Any) -> Any:
        if self.rank == 1:
            raise MemoryError("no memory left on this rank")
        return original(self, *arguments)

    return all_reduce


def losing(original: Any) -> Any:
    return lambda self, tensor, group, to: None


def garbling(original: Any) -> Any:
    def all_gather(self: Any, tensor: Any, group: Any, counts: Any = None) -> Any:
        return original(self, tensor.half() if self.rank == 1 else tensor, group, counts)

    return all_gather


DRILLS: dict[str, tuple[str, str, Any, str]] = {
    "an idle replica skips": ("ep2", "comm.all_to_all", skipping_when_idle, r"waits for ever in all_to_all.*rank 1"),
    "a rank dies": ("tp2", "comm.all_reduce", dying, r"rank 1 \(tp1\): MemoryError: no memory left"),
    "a message is lost": ("pp2", "comm.send", losing, r"rank 1 \(pp1\) waits for ever in recv.*rank 0 \(pp0\) has fin"),
    "a message is of another type": ("tp2", "comm.all_gather", garbling, r"rank 1 \(tp1\) calls all_gather.*float16"),
}


@pytest.mark.requirement(105)
@pytest.mark.parametrize("drill", DRILLS)
def test_ranks_that_fail_end_the_run_with_rank_collective_and_ledgers(wide: str, drill: str) -> None:
    layout, seam, wrapper, message = DRILLS[drill]
    with pytest.raises(TargetError, match=message) as caught:
        run(wide, layout, seam, wrapper)
    ledgers = str(caught.value).splitlines()[1:]
    assert len(ledgers) == parse(layout).world
    assert all(line.strip().startswith("rank ") for line in ledgers)
    assert len(run(wide, layout)) == 1, "and nothing of it stays behind"


@pytest.mark.requirement(23)
@pytest.mark.parametrize("layout", ["single", "tp2", "tp4", "ep4", "pp2", "sp2", "tp2.ep2.etp2", "tp2.pp2.ep2.dp2"])
@pytest.mark.parametrize("name", ["qwen3-moe-wide", "deepseek-v3-wide"])
def test_weights_and_cache_of_the_fullest_rank_are_what_inspect_predicts(
    name: str, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Within 5 %: the prediction is made from config.json alone and rounds what does not divide evenly."""
    directory = materialise(name, tmp_path_factory.getbasetemp() / "models")
    target = resolve("builtin").create()
    try:
        target.open(Deployment(str(directory), layout, "fp32", max_context=256, kv_tokens=512))
        ranks = target.engine.memory()
    finally:
        target.close()
    shape = parse(layout)
    predicted = budget(analyse(directory), shape, Load(512, shape.dp, "fp32", "fp32"))
    fullest = max(ranks, key=lambda rank: rank.weights + rank.kv)
    assert fullest.weights == pytest.approx(predicted.weights, rel=0.05)
    assert fullest.kv == pytest.approx(predicted.kv, rel=0.05)
