"""A whole pass in one native call: the bits of the single ops, and never where somebody looks in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adapt_engine import Engine, SequenceRequest, SequenceResult
from adapt_engine.kernels import native
from adapt_engine.kv.cache import PagedCache
from adapt_engine.model.fused import FusedLayers
from adapt_engine.runtime.plan import SequencePlan

from .conftest import FAMILIES
from .test_kernels import BUILT

pytestmark = pytest.mark.skipif(not BUILT, reason="adapt_engine._native is not built: pip install ./engine")
FUSED = [family for family in FAMILIES if family != "deepseek_v3"]
"""Latent attention is computed op by op."""


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every fused pass."""
    seen: list[int] = []
    run, step = FusedLayers.run, FusedLayers.step

    def counted_run(self: FusedLayers, pass_: Any, x: torch.Tensor) -> torch.Tensor | None:
        seen.append(len(x))
        return run(self, pass_, x)

    def counted_step(self: FusedLayers, sequences: Any) -> torch.Tensor:
        seen.append(sum(sequence.last - sequence.first for sequence in sequences))
        return step(self, sequences)

    monkeypatch.setattr(FusedLayers, "run", counted_run)
    monkeypatch.setattr(FusedLayers, "step", counted_step)
    return seen


def apart(engine: Engine) -> Engine:
    """The same engine, op by op: an op is wrapped by nothing."""
    for registry in engine.executor.registries:
        registry.wrap("add", lambda call: call)
    return engine


def crowd(engine: Engine, prompt: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of three sequences of different lengths that run together."""
    requests = [
        SequenceRequest(str(index), prompt[index : index + length], max_new_tokens=5, want_logits=True)
        for index, length in enumerate((40, 3, 23))
    ]
    results = {result.id: result for result in engine.run(requests)}
    found = [results[str(index)].logits for index in range(3)]
    assert all(logits is not None for logits in found)
    return [logits for logits in found if logits is not None]


@pytest.mark.requirement(46, 51)
@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("family", FUSED)
def test_a_pass_has_the_bits_of_the_single_ops(
    family: str, precision: str, chunk: int, opened: Any, prompt: tuple[int, ...], passes: list[int]
) -> None:
    """Several sequences together, prefill in chunks and decode."""
    settings = {"precision": precision, "prefill_chunk": chunk, "page_size": 4}
    found = crowd(opened(family, **settings), prompt)
    used = len(passes)
    assert used
    expected = crowd(apart(opened(family, **settings)), prompt)
    assert len(passes) == used
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.requirement(46)
@pytest.mark.parametrize("level", native.load().supported_isas() if BUILT else ())
def test_every_instruction_set_computes_whole_passes(
    level: str, opened: Any, prompt: tuple[int, ...], passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, level)
    found = crowd(opened("qwen3_moe", precision="bf16"), prompt)
    assert passes
    expected = crowd(apart(opened("qwen3_moe", precision="bf16")), prompt)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.requirement(46)
@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_stages_and_replicas_compute_whole_passes(
    layout: str, opened: Any, prompt: tuple[int, ...], passes: list[int]
) -> None:
    found = crowd(opened("qwen3_moe", layout=layout), prompt)
    assert passes
    expected = crowd(opened("qwen3_moe"), prompt)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.requirement(51)
@pytest.mark.parametrize("family", FUSED)
def test_tapped_passes_are_computed_op_by_op_with_the_same_bits(
    family: str, opened: Any, prompt: tuple[int, ...], answer: Callable[..., SequenceResult], passes: list[int]
) -> None:
    tapped = answer(opened(family, taps=("*",)), prompt, max_new_tokens=3, want_logits=True)
    assert not passes and tapped.taps
    plain = answer(opened(family), prompt, max_new_tokens=3, want_logits=True)
    assert passes and torch.equal(tapped.logits, plain.logits)


@pytest.fixture
def watched() -> Iterator[list[str]]:
    """Calls of a method of the cache that somebody has replaced."""
    seen: list[str] = []
    original = PagedCache.gather

    def gather(self: PagedCache, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append("gather")
        return original(self, layer, slots)

    PagedCache.gather = gather  # type: ignore[method-assign]
    yield seen
    PagedCache.gather = original  # type: ignore[method-assign]


def test_a_replaced_method_of_the_cache_is_called(
    opened: Any, prompt: tuple[int, ...], answer: Callable[..., SequenceResult], passes: list[int], watched: list[str]
) -> None:
    answer(opened("qwen3"), prompt, max_new_tokens=2)
    assert watched and not passes


@pytest.mark.requirement(57)
def test_what_does_not_fit_together_is_refused(opened: Any, prompt: tuple[int, ...]) -> None:
    engine = opened("qwen3_moe")
    worker = engine.executor.workers[0]
    decoder = worker.transformer._fused._decoder
    table, one = torch.arange(4), torch.ones(4, 5)
    given = {
        "x": torch.zeros(4, 48),
        "positions": torch.arange(4),
        "slots": table,
        "cos": one,
        "sin": one,
        "spans": torch.tensor([[0, 4, 4, table.data_ptr()]]),
        "head_rows": torch.tensor([3]),
        "logits": torch.empty(1, 97),
    }
    decoder.run(*given.values())
    cases: list[tuple[type[Exception], str, dict[str, torch.Tensor]]] = [
        (ValueError, "x: must be dense rows", {"x": torch.zeros(4, 47)}),
        (ValueError, "x: must be dense rows", {"x": torch.zeros(4, 48).bfloat16()}),
        (ValueError, "positions: must be one dense row", {"positions": torch.arange(5)}),
        (ValueError, "positions: rows of a sequence", {"positions": torch.arange(4) + 1}),
        (IndexError, "slots: one that is not there", {"slots": table + (1 << 40)}),
        (IndexError, "slots: one that is not there", {"head_rows": torch.tensor([4])}),
        (ValueError, "spans: must cover all rows", {"spans": torch.empty((0, 4), dtype=torch.int64)}),
        (ValueError, "cos: shape must be", {"cos": torch.ones(4, 6)}),
        (ValueError, "logits: shape must be", {"logits": torch.empty(1, 96)}),
    ]
    for kind, message, changed in cases:
        with pytest.raises(kind, match=message):
            decoder.run(*{**given, **changed}.values())


@pytest.mark.requirement(57)
def test_a_step_that_cannot_be_is_refused(opened: Any) -> None:
    fused = opened("qwen3_moe").executor.workers[0].transformer._fused
    table = torch.arange(3)
    fused.step((SequencePlan((5, 6, 7), 0, 3, table, 2),))
    decoder, span, logits = fused._decoder, (0, 3, table.data_ptr(), 2), torch.empty(1, 97)
    wild = torch.tensor([0, 1, 1 << 40])
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (IndexError, "ids: a token that is not there", ([5, 6, 97], [span], logits)),
        (IndexError, "slots: one that is not there", ([5, 6, 7], [(0, 3, wild.data_ptr(), 2)], logits)),
        (ValueError, "spans: must be ranges", ([5, 6], [span], logits)),
        (ValueError, "spans: must be ranges", ([5, 6, 7, 8], [span], logits)),
        (ValueError, "spans: must be ranges", ([5, 6, 7], [(3, 3, table.data_ptr(), 3)], logits)),
        (ValueError, "angles: must reach", ([5] * 999, [(0, 999, table.data_ptr(), 999)], logits)),
        (ValueError, "logits: shape must be", ([5, 6, 7], [span], torch.empty(2, 97))),
    ]
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            decoder.step(*arguments)
