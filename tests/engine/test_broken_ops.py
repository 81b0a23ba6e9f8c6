"""Ops that raise in the middle of a step: who fails by it, and that the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import Engine, EngineError, EngineOptions, SequenceRequest, SequenceResult

from .tiny import VOCAB, open_tiny, write_tiny

Checkpoints = Callable[[str], Path]
GOOD: dict[str, Any] = {"prompt": (1, 2, 3), "max_new_tokens": 3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with open_tiny(write_tiny(tmp_path_factory.mktemp("tiny")), prefix_cache=True) as engine:
        yield engine


def refuses(token: int) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """An embedding that cannot look up ``token``."""

    def wrap(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            if bool((ids == token).any()):
                raise RuntimeError("no row\nfor it")
            return call(table, ids)

        return embedding

    return wrap


def finished(engine: Engine, asked: list[SequenceRequest]) -> dict[str, SequenceResult]:
    return {result.id: result for result in engine.run(asked)}


@pytest.mark.requirement(104)
def test_an_op_that_raises_fails_only_those_that_it_cannot_compute(tiny: Engine) -> None:
    good = [SequenceRequest(f"good {at}", (at, 2, 3), max_new_tokens=2, want_logits=True) for at in range(3)]
    alone = {request.id: result for request in good for result in tiny.run([request])}
    used = {token for result in alone.values() for token in result.tokens} | {0, 1, 2, 3}
    token = next(one for one in range(VOCAB) if one not in used)
    bad = SequenceRequest("bad", (1, 2, token), max_new_tokens=4)
    with tiny.kernels_registry.wrap("embedding", refuses(token)):
        results = finished(tiny, [good[0], bad, *good[1:]])
    error = results["bad"].error
    assert error is not None and "RuntimeError: no row for it" in error and results["bad"].finish == "error"
    for request in good:
        assert results[request.id].tokens == alone[request.id].tokens
        assert torch.equal(results[request.id].logits, alone[request.id].logits)  # type: ignore[arg-type]
    tiny.check_integrity()
    assert finished(tiny, [bad])["bad"].error is None


@pytest.mark.requirement(104)
def test_a_draw_that_raises_fails_its_request_only(tiny: Engine) -> None:
    def broken(call: Callable[..., int]) -> Callable[..., int]:
        def sample(logits: torch.Tensor, **named: Any) -> int:
            if named["seed"] == 13:
                raise ZeroDivisionError("unlucky")
            return call(logits, **named)

        return sample

    good = SequenceRequest("good", **GOOD)
    (healthy,) = tiny.run([good])
    with tiny.kernels_registry.wrap("sample", broken):
        results = finished(tiny, [SequenceRequest("bad", **GOOD, seed=13), good])
    assert "ZeroDivisionError: unlucky" in str(results["bad"].error)
    assert results["good"].tokens == healthy.tokens and results["good"].error is None
    tiny.check_integrity()


@pytest.mark.requirement(104)
def test_virtual_ranks_that_raise_leave_an_engine_that_goes_on(checkpoints: Checkpoints) -> None:
    options = EngineOptions(max_context=64, layout="tp2", prefix_cache=True)
    with Engine.open(checkpoints("llama"), options) as engine:
        good = SequenceRequest("good", (5, 6, 7), max_new_tokens=3)
        (healthy,) = engine.run([good])
        with (
            engine.executor.registries[1].wrap("swiglu", lambda call: lambda *given: 1 / 0),
            pytest.raises(EngineError, match=r"rank 1 \(tp1\): ZeroDivisionError"),
        ):
            list(engine.run([good]))
        engine.check_integrity()
        assert not engine.busy
        assert finished(engine, [good])["good"].tokens == healthy.tokens
        engine.check_integrity()
