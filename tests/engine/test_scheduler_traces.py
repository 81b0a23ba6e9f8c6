"""Random traces of submit, step, abort, burst and abandoned runs: every answer is the serial one, bit for bit.

ADAPT_TRACES=10000 runs that many instead of a few hundred.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import Engine, SequenceRequest, SequenceResult
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from .tiny import CONTEXT, MOST_NEW, TAPS, VOCAB, Serial, open_tiny, write_tiny

TRACES = int(os.environ.get("ADAPT_TRACES", "200"))
# Few beginnings, so that prompts share pages often; the second leaves the first after five tokens.
_BEGINNINGS = (
    tuple((5 * place + 1) % VOCAB for place in range(12)),
    tuple((5 * place + 1 + (place > 4)) % VOCAB for place in range(12)),
    tuple((7 * place + 2) % VOCAB for place in range(12)),
)
_SHAPES = st.fixed_dictionaries(
    {
        "prompt": st.builds(lambda kind, length: kind[:length], st.sampled_from(_BEGINNINGS), st.integers(1, 9)),
        "max_new_tokens": st.sampled_from((MOST_NEW, MOST_NEW - 1, 9, 5, 1, 0)),
        "want_logits": st.booleans(),
        "first_row": st.sampled_from((0, 0, 3, 8, 30)),
        "temperature": st.sampled_from((0.0, 0.0, 0.9)),
        "seed": st.integers(0, 1),
        "stop": st.sampled_from(((), (), (3,))),
    }
)
_OPTIONS = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from((1, 2, 3, 1, 2, 5)),
        "prefill_chunk": st.sampled_from((0, 0, 1, 4)),
        "step_tokens": st.sampled_from((0, 9, 5, 2, 1)),
        "max_batch": st.sampled_from((2, 3, 4, 6, 1)),
        "max_waiting": st.sampled_from((0, 0, 0, 3)),
        "prefix_cache": st.booleans(),
        "preemption": st.sampled_from((True, True, True, False)),
        "taps": st.sampled_from(((), (), TAPS)),
    }
)


class Traces(RuleBasedStateMachine):
    """One engine under random use. ``results`` of a request must come once, and be the serial ones."""

    def __init__(self, directory: Path, serial: Serial, tally: Counter[str]) -> None:
        super().__init__()
        self._directory, self._serial, self._tally = directory, serial, tally
        self.engine: Any = None
        self.asked: dict[str, SequenceRequest] = {}
        self.open: set[str] = set()
        self.streamed: dict[str, tuple[int, ...]] = {}

    @initialize(options=_OPTIONS, slots=st.sampled_from((20, 21, 22, 26, 30, 12, 6)))
    def start(self, options: dict[str, Any], slots: int) -> None:
        self.engine = open_tiny(self._directory, kv_tokens=slots, **options)
        _poison_freed_blocks(self.engine)
        _watch_plans(self.engine)

    def _request(self, shape: dict[str, Any]) -> SequenceRequest:
        request = SequenceRequest(f"r{len(self.asked)}", **shape)
        self.asked[request.id] = request
        return request

    def _fits(self, request: SequenceRequest) -> bool:
        fed = len(request.prompt) + max(0, request.max_new_tokens - 1)
        return -(-fed // self.engine.options.page_size) <= self.engine.pool.blocks

    @rule(shape=_SHAPES)
    def submit(self, shape: dict[str, Any]) -> None:
        request = self._request(shape)
        full = 0 < self.engine.options.max_waiting <= len(self.engine.scheduler.waiting)
        refused = self.engine.submit(request)
        if refused is None:
            assert self._fits(request) and not full
            self.open.add(request.id)
        else:
            assert refused.finish == "error" and refused.tokens == ()
            assert ("max_waiting" if self._fits(request) else "kv_tokens") in refused.error
            self._tally["refused"] += 1

    @rule(shapes=st.lists(_SHAPES, min_size=3, max_size=5))
    def burst(self, shapes: list[dict[str, Any]]) -> None:
        for shape in shapes:
            self.submit(shape)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 9), turn=st.integers(0, VOCAB - 1), new=st.integers(0, 4))
    def follow(self, which: int, turn: int, new: int) -> None:
        """The next turn of a conversation: a request and its answer, and a token more."""
        first = list(self.asked.values())[-1 - which % len(self.asked)]
        said = (*first.prompt, *self._serial.answer(first).tokens)[: CONTEXT - MOST_NEW + 4]
        self.submit({"prompt": (*said, turn), "max_new_tokens": new})

    @rule(count=st.integers(1, 20), victim=st.sampled_from(("preempted", "running", "waiting", "over", "", "")))
    def steps(self, count: int, victim: str) -> None:
        """Some steps, and the abort of the first request that is in the state ``victim`` after one of them."""
        for _ in range(count):
            self._step()
            found = self._in_state(victim) if victim else []
            if found:
                assert self.engine.abort(found[-1]) == (victim != "over")
                assert not self.engine.abort(found[-1]), "aborted twice"
                self._tally[f"aborted {victim}"] += 1
                victim = ""

    def _in_state(self, state: str) -> list[str]:
        scheduler = self.engine.scheduler
        flight = {one.request.id: one for one in (*scheduler.running, *scheduler.waiting)}
        if state == "over":
            return [name for name in self.asked if name not in flight]
        if state == "running":
            return [one.request.id for one in scheduler.running]
        return [one.request.id for one in scheduler.waiting if bool(one.preemptions) == (state == "preempted")]

    @rule(shapes=st.lists(_SHAPES, min_size=1, max_size=5), leave=st.integers(1, 6), victim=st.integers(0, 4))
    def iterate(self, shapes: list[dict[str, Any]], leave: int, victim: int) -> None:
        """A run that is left after some results (or served to the end), with an abort from within."""
        self._drain()
        requests = [self._request(shape) for shape in shapes]
        pending = {request.id for request in requests}
        run: Iterator[SequenceResult] = self.engine.run(requests)
        for number, result in enumerate(run, start=1):
            pending.remove(result.id)
            if result.error is None:
                self._check(result)
            else:
                assert not self._fits(self.asked[result.id])
            victims = [*self._in_state("preempted"), requests[victim % len(requests)].id]
            if number == 1 and self.engine.abort(victims[0]):
                self._tally["aborted within a run"] += 1
                self._tally["aborted preempted"] += len(victims) > 1
            self.engine.check_integrity()
            if number == leave:
                break
        else:
            assert not pending, f"no result for {pending}"
        run.close()  # type: ignore[attr-defined]
        self._tally["runs left"] += bool(pending)
        self._idle()

    def _step(self) -> None:
        scheduler = self.engine.scheduler
        line = [*scheduler.running, *scheduler.waiting]
        oldest = line[0] if line else None
        before = oldest.computed if oldest else 0
        for update in self.engine.step():
            self.streamed[update.id] = self.streamed.get(update.id, ()) + update.tokens
            if update.result is not None:
                self.open.remove(update.id)
                assert update.result.finish == "abort" or self.streamed[update.id] == update.result.tokens
                self._check(update.result)
        assert oldest is None or oldest.finish or oldest.computed > before, "the oldest stood still"

    def _check(self, result: SequenceResult) -> None:
        right = self._serial.answer(self.asked[result.id])
        assert result.error is None
        if result.finish == "abort":
            assert result.tokens == right.tokens[: len(result.tokens)]
        else:
            assert (result.tokens, result.finish) == (right.tokens, right.finish)
        taps = right.taps if self.engine.options.taps else {}
        assert set(result.taps) <= set(taps)
        pairs = [(result.logits, right.logits), *((result.taps.get(name), value) for name, value in taps.items())]
        for rows, whole in pairs:
            if rows is None:
                assert whole is None or not len(whole) or result.finish == "abort"
                continue
            assert whole is not None, "rows that nobody wanted"
            assert len(rows) == len(whole) or result.finish == "abort"
            assert torch.equal(rows, whole[: len(rows)])
        self._tally["preempted and right"] += bool(result.preemptions) and result.finish != "abort"

    def _drain(self) -> None:
        scheduler = self.engine.scheduler
        # The oldest has a token in every step and is not preempted: this is all the steps that there can be.
        most = 1 + sum(one.longest for one in (*scheduler.running, *scheduler.waiting))
        for _ in range(most):
            if not self.engine.busy:
                break
            self._step()
        assert not self.engine.busy, "something waits for ever"
        assert not self.open, f"no result for {self.open}"
        self._idle()

    def _idle(self) -> None:
        self.engine.check_integrity()
        assert not self.engine.busy
        assert self.engine.pool.available == self.engine.pool.blocks, "blocks leaked"

    @invariant()
    def sound(self) -> None:
        if self.engine is not None:
            self.engine.check_integrity()
            scheduler = self.engine.scheduler
            assert len(scheduler.running) <= self.engine.options.max_batch
            assert self.engine.options.preemption or not scheduler.counts["preemptions"]

    def teardown(self) -> None:
        if self.engine is None:
            return
        self._drain()
        found = self.engine.stats()
        assert found["recomputed_tokens"] == 0 or found["preemptions"]
        assert found["kv_blocks_peak"] <= found["kv_blocks"]
        self._tally["traces"] += 1
        for name in ("requests", "steps", "preemptions", "recomputed_tokens", "prefix_hit_tokens"):
            self._tally[name] += int(found.get(name, 0))
        self.engine.close()


def _poison_freed_blocks(engine: Any) -> None:
    """What is in a block that nobody holds is not a number: a row read from there cannot pass unseen."""
    free, size, cache = engine.pool.free, engine.options.page_size, engine.executor.workers[0].cache
    shapes = {layer: group.components for group in cache.groups for layer in group.layers}

    def poison(block: int) -> None:
        slots = torch.arange(block * size, (block + 1) * size)
        for layer, parts in shapes.items():
            cache.write(layer, slots, tuple(torch.full((size, *shape), math.nan) for _, shape in parts))

    def freed(block: int) -> None:
        free(block)
        if not engine.pool.is_used(block) and not engine.pool.is_idle(block):
            poison(block)

    for block in range(engine.pool.blocks):
        poison(block)
    engine.pool.free = freed  # type: ignore[method-assign]


def _watch_plans(engine: Engine) -> None:
    """Every plan keeps to the budget and to the chunk, and no two of its rows share a slot."""
    schedule, options = engine.scheduler.schedule, engine.options

    def watched() -> Any:
        plan = schedule()
        assert sum(count for _, count in plan) <= (options.step_tokens or max(CONTEXT, 2048))
        slots = [int(slot) for one, count in plan for slot in one.slots[one.computed : one.computed + count]]
        assert len(set(slots)) == len(slots) == sum(count for _, count in plan)
        assert all(0 < count <= (options.prefill_chunk or count) for _, count in plan)
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]


@pytest.mark.requirement(69, 76, 85, 102, 104)
def test_every_trace_gives_the_serial_answers_and_loses_nothing(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    tally: Counter[str] = Counter()
    with open_tiny(directory, max_batch=1, page_size=64, taps=TAPS) as alone:
        serial = Serial(alone)
        run_state_machine_as_test(
            lambda: Traces(directory, serial, tally),
            settings=settings(
                max_examples=TRACES,
                stateful_step_count=10,
                deadline=None,
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(dict(tally))
    if TRACES < 200:
        return
    for seen in ("preempted and right", "recomputed_tokens", "prefix_hit_tokens", "refused", "runs left"):
        assert tally[seen], f"no trace came to {seen}"
    for state in ("running", "waiting", "preempted", "over"):
        assert tally[f"aborted {state}"], f"nothing {state} was aborted"
