"""Loads are timed round by round, every sample is kept, and nothing is judged by a clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.inspect import analyse, count
from pytest_adapt.models import materialise
from pytest_adapt.perf.roofline import Peaks, Work, declared_peaks, measured_peaks, work
from pytest_adapt.perf.timing import Round, Stopwatch, figures
from pytest_adapt.target.protocol import Response


class FakeTarget:
    """Counts what it is asked."""

    shows_memory = True

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.resets = 0

    def generate_all(self, prompts: Any, n: int, want: Any, **request: Any) -> dict[str, Response]:
        self.asked.append({"prompts": dict(prompts), "n": n, "want": want, **request})
        return {name: Response(name, 3, tuple(range(n)), seconds=1.0, first_token_seconds=0.25) for name in prompts}

    def peak_memory(self, reset: bool = False) -> int:
        self.resets += reset
        return 1000


class FakeBenchmark:
    """pytest-benchmark's fixture, as far as it is used."""

    def __init__(self) -> None:
        self.called: dict[str, int] = {}

    def pedantic(self, function: Any, **options: int) -> None:
        self.called = options
        for _ in range(options["rounds"] + options["warmup_rounds"]):
            function()


@pytest.mark.requirement(105)
@pytest.mark.parametrize("benchmark_fixture", [None, FakeBenchmark()], ids=["alone", "pytest-benchmark"])
def test_a_load_has_one_warm_up_and_its_rounds(benchmark_fixture: Any) -> None:
    target: Any = FakeTarget()
    rounds = Stopwatch(benchmark_fixture).load(target, {"a": (1, 2, 3), "b": (4, 5, 6)}, 5, rounds=3)
    assert len(rounds) == 3 and len(target.asked) == 4 and target.resets == 4
    assert all(one["timed"] and one["n"] == 5 and set(one["prompts"]) == {"a", "b"} for one in target.asked)
    assert all(set(one.answers) == {"a", "b"} and one.peak == 1000 and one.seconds > 0 for one in rounds)
    if benchmark_fixture is not None:
        assert benchmark_fixture.called == {"rounds": 3, "warmup_rounds": 1, "iterations": 1}


@pytest.mark.requirement(105)
def test_every_sample_is_kept_and_its_unit_said() -> None:
    answers = {
        "a": Response("a", 3, (1, 2, 3, 4, 5), seconds=1.0, first_token_seconds=0.2),
        "b": Response("b", 3, (1, 2, 3, 4, 5), seconds=2.0, first_token_seconds=0.4),
    }
    rounds = [Round(2.0, answers, 100), Round(4.0, answers, 300)]
    found = {one.name: one for one in figures("load", rounds, Work(1e9, 8e9), Peaks(1e10, 1e11, "declared"))}
    assert found["time to first token"].samples == (0.2, 0.4, 0.2, 0.4)
    assert found["time per output token"].samples == pytest.approx((0.2, 0.4, 0.2, 0.4))
    assert found["latency"].samples == (1.0, 2.0, 1.0, 2.0)
    assert found["throughput"].samples == (5.0, 2.5)
    assert found["peak memory"].value == 200
    # 1 GB a step at 10 GB/s takes 0.1 s of 0.3; 8 GFLOP at 100 GFLOP/s take 0.08 s of 0.4.
    assert found["bandwidth used in decode, of declared"].value == pytest.approx(1 / 3)
    assert found["operations used in prefill, of declared"].value == pytest.approx(0.2)
    assert {one.load for one in found.values()} == {"load"}


def test_what_is_not_shown_has_no_figure() -> None:
    answers = {"a": Response("a", 3, (1,), seconds=None)}
    assert [one.name for one in figures("load", [Round(1.0, answers)])] == ["throughput"]


@pytest.mark.requirement(106)
@pytest.mark.parametrize("name", ["needle-llama", "qwen3-moe-odd"])
def test_work_follows_from_the_structure(name: str, tmp_path: Path) -> None:
    directory = materialise(name, tmp_path)
    structure = analyse(directory)
    found = count(structure)
    one, many = work(directory, "bf16", 64, 1), work(directory, "bf16", 64, 64)
    kept = sum(
        layer.attention.kv_heads * (layer.attention.head_dim + layer.attention.value_dim)  # type: ignore[union-attr]
        for layer in structure.layers
    )
    # One sequence reads what one token uses; a large batch nearly everything. The embedding is looked up, not read.
    embedding = structure.vocab * structure.hidden
    assert one.decode_bytes == pytest.approx(2 * (found.active + 64 * kept), rel=0.01)
    assert many.decode_bytes == pytest.approx(2 * (found.total - embedding + 64 * 64 * kept), rel=0.02)
    assert many.prefill_operations == pytest.approx(64 * one.prefill_operations)
    # The head is asked for the last token alone; a token sees itself and what came before.
    inner, pairs = found.active - embedding - structure.hidden, 64 * 65 / 2
    products = sum(
        2 * layer.attention.heads * (layer.attention.head_dim + layer.attention.value_dim) * pairs  # type: ignore[union-attr]
        for layer in structure.layers
    )
    assert one.prefill_operations == pytest.approx(2 * (64 * inner + embedding) + products, rel=1e-3)


def test_peaks_are_declared_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADAPT_PEAK_GBS", raising=False)
    assert declared_peaks() is None
    monkeypatch.setenv("ADAPT_PEAK_GBS", "3350")
    assert declared_peaks() is None
    monkeypatch.setenv("ADAPT_PEAK_GFLOPS", "989000")
    peaks = declared_peaks()
    assert peaks is not None and peaks.bandwidth == 3.35e12 and peaks.operations == 9.89e14
    monkeypatch.setenv("ADAPT_PEAK_GFLOPS", "many")
    assert declared_peaks() is None
    assert measured_peaks().bandwidth > 1e8 and measured_peaks().operations > 1e8
