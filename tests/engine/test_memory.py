"""Bytes by class: what is predicted is what is allocated, and what would not fit is refused before it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import Engine, EngineError, EngineOptions, SequenceResult
from adapt_engine.config import ModelSpec
from adapt_engine.families import read_config, spec_from_config
from adapt_engine.layout import Layout
from adapt_engine.mesh import Mesh
from adapt_engine.runtime.memory import StepMeter, planned, storage_bytes
from adapt_engine.weights.shards import ShardPlan

from .conftest import FAMILIES
from .test_kernels import needs_native


def spec_of(directory: Path) -> ModelSpec:
    return spec_from_config(read_config(directory))


@pytest.mark.requirement(70)
@pytest.mark.parametrize("layout", ["single", "sp2", "pp2", "dp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("int8", marks=needs_native)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_holds_what_was_planned_for_it(
    family: str, precision: str, layout: str, opened: Any, checkpoints: Callable[[str], Path]
) -> None:
    engine = opened(family, precision=precision, layout=layout, kv_tokens=100)
    plan = ShardPlan(spec_of(checkpoints(family)), Mesh(Layout.parse(layout)))
    for rank in engine.memory():
        assert rank == planned(plan, engine.options, rank.rank)


@pytest.mark.requirement(70)
def test_a_limit_is_kept_or_refused_with_the_way_out(checkpoints: Callable[[str], Path]) -> None:
    options = EngineOptions(max_context=64, kv_tokens=160)
    plan = ShardPlan(spec_of(checkpoints("llama")), Mesh(Layout.parse("single")))
    needed = planned(plan, options, 0)
    total = needed.weights + needed.kv

    def open_with(limit: int, tokens: int = 160) -> None:
        with Engine.open(checkpoints("llama"), EngineOptions(max_context=64, kv_tokens=tokens, memory_limit=limit)):
            pass

    open_with(total)
    with pytest.raises(EngineError) as refused:
        open_with(total - 1)
    assert str(needed.weights) in str(refused.value) and "the limit is" in str(refused.value)
    assert str(refused.value).endswith("kv_tokens=144 would fit")
    open_with(total - 1, 144)
    with pytest.raises(EngineError, match="smaller precision, or raise the limit"):
        open_with(needed.weights)


@pytest.mark.requirement(70)
def test_a_refused_model_is_never_read(checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("adapt_engine.weights.loader.Loader.load", read)
    with pytest.raises(EngineError, match="memory_limit"):
        Engine.open(checkpoints("llama"), EngineOptions(memory_limit=1000))


@pytest.mark.requirement(70)
def test_the_meter_counts_what_is_alive_at_once() -> None:
    known = torch.ones(1000)
    meter = StepMeter([known])
    assert meter.peak is None
    with meter:
        first = known + 1  # 4000
        view = first[:10]  # nothing
        del first
        second = view * 2  # 40
        del view
        third = torch.zeros(500)  # 2000, after the 4000 are gone
        known.add_(1)
    assert meter.peak == 4040
    with meter:
        fourth = torch.zeros(1009)
        del second, third
        fifth = torch.zeros(2)
    assert meter.peak == 4044
    assert storage_bytes([fourth, fourth[3:], fifth]) == 4044


@pytest.mark.requirement(70)
def test_a_chunked_prompt_takes_less_at_once(
    opened: Any, prompt: tuple[int, ...], answer: Callable[..., SequenceResult]
) -> None:
    peaks = []
    for budget in (0, 8):
        engine = opened("qwen3_moe", step_tokens=budget, measure_memory=True)
        assert engine.memory()[0].temporary is None
        answer(engine, prompt, max_new_tokens=2)
        peaks.append(engine.memory()[0].temporary)
        assert engine.stats()["temporary_bytes"] == peaks[-1]
    # The widest rows: 70 of them together hold at least their residual stream, its norm and the queries.
    assert peaks[0] >= 70 * 4 * (48 + 48 + 60)
    assert peaks[1] < peaks[0] / 2
    plain = opened("qwen3_moe")
    answer(plain, prompt, max_new_tokens=2)
    assert plain.memory()[0].temporary is None and "temporary_bytes" not in plain.stats()
