"""Requests that cannot be served, and the accounts of pool, prefix cache and scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import CheckpointError, Engine, EngineError, SequenceRequest, SequenceResult
from adapt_engine.kv.pool import BlockPool
from adapt_engine.kv.prefix import PrefixCache
from adapt_engine.runtime.requests import EngineOptions
from adapt_engine.runtime.scheduler import Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

Answer = Callable[..., SequenceResult]

ABNORMAL: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ()}, "empty"),
    ({"prompt": (1, 97)}, "token 1 is 97"),
    ({"prompt": (1, 2, -1)}, "token 2 is -1"),
    ({"prompt": (1, 1 << 70)}, "0..96"),
    ({"prompt": (1, 2.5)}, "token 1 is 2.5"),
    ({"prompt": (1, True)}, "token 1 is True"),
    ({"prompt": (1,) * 257}, "max_context is 256"),
    ({"prompt": (1,) * 200, "max_new_tokens": 57}, "257 tokens"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "five"}, "seed"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": None}, "top_p"),
    ({"max_new_tokens": "many"}, "max_new_tokens"),
    ({"prompt": None}, "tuple or list of token ids"),
    ({"prompt": "text"}, "tuple or list of token ids"),
    ({"first_row": -1}, "first_row"),
]


@pytest.mark.requirement(102)
def test_abnormal_requests_are_answered_and_leave_the_engine_healthy(
    opened: Any, prompt: tuple[int, ...], answer: Answer
) -> None:
    engine = opened("qwen3_moe", prefix_cache=True)
    healthy = answer(engine, prompt, max_new_tokens=5).tokens
    good = [SequenceRequest(f"good {index}", prompt, max_new_tokens=5) for index in range(3)]
    bad = [
        SequenceRequest(f"bad {index}", **{"prompt": (1, 2), **fields}) for index, (fields, _) in enumerate(ABNORMAL)
    ]
    mixed = [good[0], *bad[:9], good[1], *bad[9:], good[2]]
    results = {result.id: result for result in engine.run(mixed)}
    assert set(results) == {request.id for request in mixed}
    for index, (_, rule) in enumerate(ABNORMAL):
        refused = results[f"bad {index}"]
        assert refused.finish == "error" and rule in refused.error and "\n" not in refused.error
        assert refused.tokens == () and refused.logits is None
    for request in good:
        assert results[request.id].error is None and results[request.id].tokens == healthy
    engine.check_integrity()
    assert engine.stats()["errors"] == len(ABNORMAL)
    assert answer(engine, prompt, max_new_tokens=5).tokens == healthy


@pytest.mark.requirement(102)
def test_request_larger_than_the_pool_is_refused_and_smaller_ones_wait_for_it(
    opened: Any, prompt: tuple[int, ...], answer: Answer
) -> None:
    engine = opened("llama", kv_tokens=64)
    requests = [SequenceRequest("large", prompt)]
    requests += [SequenceRequest(str(index), prompt[:33], max_new_tokens=8) for index in range(4)]
    results = {result.id: result for result in engine.run(requests)}
    assert "kv_tokens" in results["large"].error
    assert engine.stats()["largest_batch"] == 1
    assert len({results[str(index)].tokens for index in range(4)}) == 1
    # The last token drawn is never fed: 49 prompt tokens and 16 drawn ones fit in 64 slots.
    assert len(answer(engine, prompt[:49], max_new_tokens=16).tokens) == 16


@pytest.mark.requirement(104)
def test_logits_that_are_not_finite_end_one_request_only(opened: Any, prompt: tuple[int, ...], answer: Answer) -> None:
    engine = opened("llama", prefix_cache=True)
    healthy = answer(engine, (5, 6, 7), max_new_tokens=3).tokens

    def poison(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return call(table, ids).masked_fill((ids == 96)[:, None], math.nan)

        return embedding

    with engine.kernels_registry.wrap("embedding", poison):
        requests = [
            SequenceRequest("bad", (5, 96, 7), max_new_tokens=3),
            SequenceRequest("good", (5, 6, 7), max_new_tokens=3),
        ]
        results = {result.id: result for result in engine.run(requests)}
    assert "not finite" in results["bad"].error and results["bad"].finish == "error"
    assert results["good"].tokens == healthy
    engine.check_integrity()


def test_leaving_a_run_early_drops_what_is_in_flight(opened: Any, prompt: tuple[int, ...], answer: Answer) -> None:
    engine = opened("llama")
    run = engine.run([SequenceRequest(str(index), prompt, max_new_tokens=index + 1) for index in range(3)])
    next(run)
    with pytest.raises(EngineError, match="in progress"):
        next(engine.run([]))
    run.close()
    assert engine.stats()["kv_blocks_available"] == engine.stats()["kv_blocks"]
    assert len(answer(engine, prompt, max_new_tokens=2).tokens) == 2


def test_a_closed_engine_says_so(opened: Any) -> None:
    engine = opened("llama")
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        next(engine.run([SequenceRequest("a", (1,))]))


def test_scored_prompt_gives_no_tokens_and_first_row_cuts_the_rows(
    opened: Any, prompt: tuple[int, ...], answer: Answer
) -> None:
    engine = opened("mixtral")
    full = answer(engine, prompt, want_logits=True)
    assert full.tokens == () and full.finish == "length" and full.logits.shape[0] == len(prompt)
    late = answer(engine, prompt, want_logits=True, first_row=66, max_new_tokens=3)
    assert late.logits.shape[0] == len(prompt) + 2 - 66
    beyond = answer(engine, prompt, want_logits=True, first_row=500, max_new_tokens=3)
    assert beyond.logits.shape == (0, 97) and beyond.tokens == late.tokens


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=12),
    pool=st.integers(4, 12),
    chunk=st.integers(0, 9),
    batch=st.integers(1, 4),
    cached=st.booleans(),
    preemption=st.booleans(),
    owners=st.integers(1, 3),
)
def test_scheduler_serves_everything_once_and_loses_no_block(
    shapes: list[tuple[int, int, int]],
    pool: int,
    chunk: int,
    batch: int,
    cached: bool,
    preemption: bool,
    owners: int,
) -> None:
    """Drives the scheduler with a stand-in model; invariants hold after every step, whoever owns the pages."""
    options = EngineOptions(
        max_context=64,
        page_size=5,
        prefill_chunk=chunk,
        max_batch=batch,
        prefix_cache=cached,
        preemption=preemption,
    )
    pool = -(-pool // owners) * owners
    blocks = BlockPool(pool, owners)
    scheduler = Scheduler(options, blocks, PrefixCache(blocks, 5) if cached else None, keeps_rows=False)
    waiting = 0
    for index, (length, new, kind) in enumerate(shapes):
        # Few kinds of prompt, so that beginnings are shared often.
        request = SequenceRequest(str(index), tuple((kind * place) % 7 for place in range(length)), max_new_tokens=new)
        if -(-(length + max(0, new - 1)) // 5) > pool:
            with pytest.raises(EngineError, match="kv_tokens"):
                scheduler.submit(request)
        else:
            scheduler.submit(request)
            waiting += 1
    done = 0
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        assert plan, "work is waiting but nothing was scheduled"
        assert len(scheduler.running) <= batch
        assert sum(count for _, count in plan) <= options.step_budget
        rows: dict[int, list[int]] = {}
        for sequence, count in plan:
            assert count > 0 and (not chunk or count <= chunk)
            assert [block % owners for block in sequence.table] == [
                page % owners for page in range(len(sequence.table))
            ]
            for place in range(sequence.computed, sequence.computed + count):
                rows.setdefault(int(sequence.slots[place]), []).append(place)
            sequence.advance(count)
            if sequence.computed == len(sequence.known):
                if sequence.generated < sequence.request.max_new_tokens:
                    sequence.known.append(1)
                if sequence.generated >= sequence.request.max_new_tokens:
                    scheduler.finish(sequence)
                    done += 1
        assert all(len(places) == 1 for places in rows.values()), "two rows of a step share a slot"
        scheduler.check_integrity()
    assert done == waiting
    assert blocks.available == pool
    assert preemption or not scheduler.counts["preemptions"]


def test_pool_notices_a_block_freed_too_often_or_held_by_nobody() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    with pytest.raises(EngineError, match=f"block {block}: count 1 but 0"):
        pool.check_integrity([])
    pool.check_integrity([[block]])
    pool.free(block)
    with pytest.raises(EngineError, match="more often"):
        pool.free(block)
    for _ in range(3):
        pool.allocate()
    with pytest.raises(EngineError, match="exhausted.*kv_tokens"):
        pool.allocate()


def test_prefix_depends_on_everything_before_a_page() -> None:
    """The same page after another beginning is another page; digits cannot run together."""
    pool = BlockPool(8)
    prefix = PrefixCache(pool, 2)
    table = [pool.allocate() for _ in range(2)]
    prefix.insert((1, 2, 3, 4), table)
    assert prefix.lookup((1, 2, 3, 4, 5)) == table
    other = [pool.allocate() for _ in range(2)]
    prefix.insert((9, 9, 5, 6), other)
    assert prefix.lookup((9, 9, 3, 4)) == other[:1]
    assert prefix.lookup((12, 3, 4)) == []
    assert prefix.lookup((1, 23, 3, 4)) == []
    pool.check_integrity([table, table, other, other[:1]])
    assert prefix.digests((1, 2, 3)) == prefix.digests((1, 2)) and prefix.digests((1,)) == []


def test_an_evicted_page_is_not_found() -> None:
    pool = BlockPool(2)
    prefix = PrefixCache(pool, 2)
    table = [pool.allocate()]
    prefix.insert((1, 2), table)
    pool.free(table[0])
    assert prefix.lookup((1, 2)) == table
    pool.free(table[0])
    taken = [pool.allocate(), pool.allocate()]
    assert prefix.lookup((1, 2)) == []
    pool.check_integrity([taken])
    prefix.check_integrity()


@pytest.mark.requirement(69)
@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        # layers x KV heads x head width x (key and value)
        ("mixtral", 3 * 2 * 8 * 2),
        ("qwen3_moe", 3 * 2 * 10 * 2),
        # layers x (latent + rotated key), whatever the number of heads
        ("deepseek_v3", 3 * (18 + 6)),
    ],
)
@pytest.mark.parametrize(("precision", "element"), [("fp32", 4), ("bf16", 2)])
def test_cache_takes_the_bytes_that_the_configuration_implies(
    family: str, numbers: int, precision: str, element: int, opened: Any
) -> None:
    engine = opened(family, precision=precision, kv_tokens=100, page_size=16)
    assert engine.stats()["kv_blocks"] == 7
    assert engine.stats()["kv_bytes"] == 7 * 16 * numbers * element


def test_cache_larger_than_the_machine_is_refused_before_it_is_allocated(opened: Any) -> None:
    with pytest.raises(EngineError, match="kv_tokens"):
        opened("llama", max_context=1 << 45)


def test_unreadable_file_is_a_checkpoint_error(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*arguments: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied", "model-00001.safetensors")

    monkeypatch.setattr("adapt_engine.weights.loader.mmap.mmap", denied)
    with pytest.raises(CheckpointError, match=r"model-00001\.safetensors: cannot be read"):
        Engine.open(checkpoints("llama"))
