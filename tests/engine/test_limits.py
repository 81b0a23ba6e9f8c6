"""Numbers far beyond what a machine or a model has are refused at once, or cost no more than what is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapt_engine import Engine, EngineError, EngineOptions, LayoutError, SequenceRequest
from adapt_engine.layout import Layout, check
from adapt_engine.mesh import Mesh
from adapt_engine.runtime.memory import check_memory, planned
from adapt_engine.weights.shards import ShardPlan

from .test_memory import spec_of

Checkpoints = Callable[[str], Path]


@pytest.mark.requirement(35)
def test_a_step_has_no_more_micro_batches_than_sequences(checkpoints: Checkpoints) -> None:
    with Engine.open(checkpoints("llama"), EngineOptions(max_context=64, layout="pp2", micro_batches=10**5)) as engine:
        step, parts = engine.executor.step, []

        def noted(plan: Any) -> Any:
            parts.append((plan.micro_batches, max(map(len, plan.replicas))))
            return step(plan)

        engine.executor.step = noted  # type: ignore[method-assign]
        asked = [SequenceRequest(str(at), (1, 2, 3), max_new_tokens=1 + at) for at in range(3)]
        assert all(result.error is None for result in engine.run(asked))
    assert parts == [(3, 3), (2, 2), (1, 1)]


@pytest.mark.requirement(17)
@pytest.mark.parametrize("text", ["dp10000", "dp70000", "tp99999", "tp300.dp300", "pp9999.dp9999"])
def test_worlds_beyond_any_machine_are_refused_at_once(text: str) -> None:
    started = time.process_time()
    with pytest.raises(LayoutError, match="65536|1 to 9999"):
        Layout.parse(text)
    assert time.process_time() - started < 1


@pytest.mark.requirement(17)
@pytest.mark.parametrize("text", ["tp9999", "pp9999", "ep9999", "etp9999"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe_wide"])
def test_a_model_refuses_large_axes_at_once(family: str, text: str, checkpoints: Checkpoints) -> None:
    spec = spec_of(checkpoints(family))
    deep = replace(spec, layers=spec.layers * 20)
    started = time.process_time()
    with pytest.raises(LayoutError, match="nearest legal: "):
        check(deep, Layout.parse(text))
    assert time.process_time() - started < 1


@pytest.mark.requirement(70)
def test_a_world_that_does_not_fit_is_refused_by_its_layout(checkpoints: Checkpoints, monkeypatch: Any) -> None:
    plan = ShardPlan(spec_of(checkpoints("llama")), Mesh(Layout.parse("dp9999")))
    options, calls = EngineOptions(max_context=4096, max_batch=1), []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return planned(*given)

    monkeypatch.setattr("adapt_engine.runtime.memory.planned", counted)
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 16)
    one = planned(plan, options, 0)
    with pytest.raises(EngineError) as refused:
        check_memory(plan, options)
    text = str(refused.value)
    assert text.startswith("option layout: the 9999 ranks of dp9999 need ") and "\n" not in text
    for number in (9999 * (one.weights + one.kv), one.weights, one.kv):
        assert f" {number} " in text
    assert len(calls) == 1, "all ranks are of one kind"


@pytest.mark.requirement(70)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "tp2.pp2.dp3"),
        ("qwen3", "tp6"),
        ("qwen3_moe", "ep3"),
        ("qwen3_moe_wide", "tp4.pp2.ep4"),
        ("qwen3_moe_wide", "tp2.ep2.etp2"),
        ("deepseek_v3_wide", "tp8.pp4.ep8.sp2"),
    ],
)
def test_ranks_of_a_kind_take_the_same_memory(family: str, layout: str, checkpoints: Checkpoints) -> None:
    plan = ShardPlan(spec_of(checkpoints(family)), Mesh(Layout.parse(layout)))
    options, alike = EngineOptions(max_context=24), plan.alike()
    sums = [planned(plan, options, rank) for rank in range(plan.mesh.layout.world)]
    counted = sorted((sums[rank].weights, sums[rank].kv) for rank, count in alike.items() for _ in range(count))
    assert counted == sorted((one.weights, one.kv) for one in sums)
