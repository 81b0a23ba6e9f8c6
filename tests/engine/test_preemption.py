"""Blocks on demand, preemption by recompute, turns, abort, and the steps that a run is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import Engine, EngineError, EngineOptions, SequenceRequest, SequenceResult
from adapt_engine.kv.pool import BlockPool
from adapt_engine.kv.prefix import PrefixCache
from adapt_engine.runtime.scheduler import Scheduler, Sequence

from .conftest import FAMILIES, VOCAB
from .tiny import TAPS, Serial, open_tiny, write_tiny

PROMPT = (4, 9, 1, 7, 2, 2, 11, 5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(tiny: Path) -> Iterator[Callable[..., Engine]]:
    """``engine(**options)`` on the tiny model, closed when the test ends."""
    made: list[Engine] = []

    def get(**options: Any) -> Engine:
        made.append(open_tiny(tiny, **options))
        return made[-1]

    yield get
    for one in made:
        one.close()


def several(count: int, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> list[SequenceRequest]:
    """Requests named by their order; prompts differ in their first token."""
    return [SequenceRequest(str(index), (index, *prompt[1:]), **fields) for index in range(count)]


def serve(engine: Engine, limit: int = 500) -> dict[str, SequenceResult]:
    """Step until idle."""
    results = {}
    for _ in range(limit):
        if not engine.busy:
            return results
        results.update({update.id: update.result for update in engine.step() if update.result is not None})
    raise AssertionError(f"still busy after {limit} steps")


@pytest.mark.requirement(85, 102)
@pytest.mark.parametrize("cached", [False, True])
def test_a_dry_pool_preempts_the_youngest_and_changes_no_answer(engine: Callable[..., Engine], cached: bool) -> None:
    """Two prompts of 4 pages and one page more for each fit 13 blocks; their outputs do not."""
    serial = Serial(engine(page_size=64, max_batch=1, taps=TAPS))
    small = engine(page_size=2, kv_tokens=26, prefix_cache=cached, taps=TAPS)
    requests = several(3, max_new_tokens=9, want_logits=True, temperature=0.9, seed=5)
    results = {result.id: result for result in small.run(requests)}
    for request in requests:
        result, right = results[request.id], serial.answer(request)
        assert result.tokens == right.tokens
        assert torch.equal(result.logits, right.logits)
        for name in TAPS:
            assert torch.equal(result.taps[name], right.taps[name])
    assert results["0"].preemptions == 0, "the oldest is never preempted"
    assert results["1"].preemptions > 0
    found = small.stats()
    assert found["preemptions"] == sum(result.preemptions for result in results.values())
    assert found["kv_blocks_peak"] == found["kv_blocks"] == 13
    assert found["kv_blocks_available"] == 13
    # Every row of a request was computed once, and those that a preemption threw away once more.
    fed = sum(len(request.prompt) + 8 for request in requests)
    assert found["rows"] == fed + found["recomputed_tokens"]
    assert found["recomputed_tokens"] > 0


@pytest.mark.requirement(85)
def test_without_preemption_the_longest_length_is_reserved(engine: Callable[..., Engine]) -> None:
    small = engine(page_size=2, kv_tokens=26, preemption=False)
    results = {result.id: result for result in small.run(several(3, max_new_tokens=9))}
    assert all(result.preemptions == 0 and len(result.tokens) == 9 for result in results.values())
    assert small.stats()["recomputed_tokens"] == 0
    assert small.stats()["largest_batch"] == 1, "two of them need 16 blocks"


@pytest.mark.requirement(85)
@pytest.mark.parametrize(
    ("family", "layout"),
    [*((family, "single") for family in FAMILIES), ("llama", "sp2"), ("deepseek_v3", "sp2"), ("qwen3_moe", "dp2")],
)
def test_preempted_equals_alone_on_real_kernels(
    family: str, layout: str, opened: Any, rounding: Callable[[str], float]
) -> None:
    """Logits within rounding; a token differs only where the two best logits are nearer than two roundings."""
    torch.manual_seed(4)
    prompts = [tuple(torch.randint(0, VOCAB, (length,)).tolist()) for length in (30, 17, 31, 5, 26)]
    requests = [
        SequenceRequest(str(index), tokens, max_new_tokens=25, want_logits=True) for index, tokens in enumerate(prompts)
    ]
    alone = opened(family)
    small = opened(family, kv_tokens=96, page_size=4, step_tokens=12, layout=layout)
    results = {result.id: result for result in small.run(requests)}
    assert small.stats()["preemptions"] > 0
    for request in requests:
        (right,) = alone.run([request])
        result = results[request.id]
        pairs = zip(result.tokens, right.tokens, strict=True)
        same = next((place for place, (one, other) in enumerate(pairs) if one != other), 25)
        rows = len(request.prompt) + same
        if same < 25:
            best = right.logits[rows - 1].topk(2).values
            assert float(best[0] - best[1]) <= 2 * rounding(family), f"request {request.id} token {same}"
        assert result.logits.shape == right.logits.shape
        assert float((result.logits[:rows] - right.logits[:rows]).abs().max()) <= rounding(family)


@pytest.mark.requirement(76)
def test_a_long_prompt_is_cut_to_the_budget_and_others_go_on_beside_it(engine: Callable[..., Engine]) -> None:
    small = engine(step_tokens=4)
    for request in [SequenceRequest("talks", (1, 2), max_new_tokens=8), SequenceRequest("long", PROMPT * 2)]:
        assert small.submit(request) is None
    seen: list[tuple[str, ...]] = []
    while small.busy:
        seen.append(tuple(update.id for update in small.step() if update.tokens))
    # 2 + 2 rows, then 1 + 3 of each step: the prompt of 16 takes 6 steps, and the other talks in all of its 8.
    assert seen == [("talks",)] * 8
    assert small.stats()["steps"] == 8 and small.stats()["rows"] == 9 + 16


def drive(scheduler: Scheduler, plan: list[tuple[Sequence, int]]) -> None:
    """What a model would do with a plan."""
    for sequence, count in plan:
        sequence.advance(count)
        if sequence.computed == len(sequence.known):
            if sequence.generated < sequence.request.max_new_tokens:
                sequence.known.append(1)
            if sequence.generated >= sequence.request.max_new_tokens:
                scheduler.finish(sequence)


@pytest.mark.requirement(76)
@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_turns_go_round_and_the_oldest_is_in_every_step(budget: int) -> None:
    """With a budget of b, n running sequences each get a turn in ceil((n - 1) / (b - 1)) steps; the oldest in each."""
    options = EngineOptions(max_context=64, step_tokens=budget, max_batch=6, page_size=4)
    scheduler = Scheduler(options, BlockPool(200), None, keeps_rows=False)
    for index in range(9):
        scheduler.submit(SequenceRequest(str(index), (1,) * (20 if index % 3 else 1), max_new_tokens=12 + index))
    waited: dict[str, int] = {}
    order: list[str] = []
    while scheduler.busy:
        plan = scheduler.schedule()
        running = list(scheduler.running)
        planned = {sequence.request.id for sequence, _ in plan}
        assert sum(count for _, count in plan) <= budget
        assert plan[0][0] is running[0], "the oldest is left out"
        for sequence in running:
            name = sequence.request.id
            waited[name] = 0 if name in planned else waited.get(name, 0) + 1
            if budget > 1:
                # Those that came or went meanwhile can push it back by one round.
                assert waited[name] <= 2 * -(-(options.max_batch - 1) // (budget - 1))
        order.extend(one.request.id for one in running if one.request.id not in order)
        drive(scheduler, plan)
    assert order == [str(index) for index in range(9)], "admitted in another order than they came"


@pytest.mark.requirement(76)
def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    """A small one behind it would fit, for ever; it waits."""
    options = EngineOptions(max_context=64, page_size=1, max_batch=8)
    scheduler = Scheduler(options, BlockPool(20), None, keeps_rows=False)
    for name, length in (("first", 12), ("large", 18), ("small", 1)):
        scheduler.submit(SequenceRequest(name, (1,) * length, max_new_tokens=2))
    began: list[str] = []
    while scheduler.busy:
        plan = scheduler.schedule()
        began.extend(one.request.id for one in scheduler.running if one.request.id not in began)
        drive(scheduler, plan)
    assert began == ["first", "large", "small"]


@pytest.mark.requirement(85)
def test_the_youngest_waits_for_a_block_instead_of_giving_up_its_own() -> None:
    options = EngineOptions(max_context=64, page_size=1, max_batch=8)
    pool = BlockPool(10)
    scheduler = Scheduler(options, pool, None, keeps_rows=False)
    old, young = (SequenceRequest(name, (1,) * 4, max_new_tokens=5) for name in ("old", "young"))
    scheduler.submit(old)
    scheduler.submit(young)
    while scheduler.busy:
        plan = scheduler.schedule()
        assert plan[0][0].request is old or len(scheduler.running) == 1
        drive(scheduler, plan)
        scheduler.check_integrity()
    # Both hold 5 when the pool is dry; the old one takes the young one's, which begins again after it.
    assert scheduler.counts["preemptions"] == 1
    assert scheduler.counts["recomputed_tokens"] == 5
    assert pool.available == 10


@pytest.mark.requirement(102)
def test_what_the_engine_refuses_it_says(engine: Callable[..., Engine]) -> None:
    small = engine(kv_tokens=12, page_size=4, max_waiting=2)
    assert small.submit(SequenceRequest("a", PROMPT, max_new_tokens=5)) is None
    twice = small.submit(SequenceRequest("a", PROMPT))
    assert twice is not None and "id 'a' is in flight already" in twice.error
    never = small.submit(SequenceRequest("b", PROMPT, max_new_tokens=6))
    assert never is not None and never.error == "request needs 16 KV slots, the pool has 12; raise kv_tokens"
    assert small.submit(SequenceRequest("b", PROMPT)) is None
    full = small.submit(SequenceRequest("c", PROMPT))
    assert full is not None and "queue is full: max_waiting is 2" in full.error
    nameless = small.submit(SequenceRequest(7, PROMPT))  # type: ignore[arg-type]
    assert nameless is not None and nameless.error == "id is 7: must be text"
    assert small.stats()["refused"] == 2 and small.stats()["errors"] == 4
    assert set(serve(small)) == {"a", "b"}
    assert small.submit(SequenceRequest("a", PROMPT)) is None, "an id may be used again"
    # A run takes requests as there is room, so nothing of it is refused.
    serve(small)
    assert [result.error for result in small.run(several(8, max_new_tokens=2))] == [None] * 8
    assert small.stats()["largest_queue"] == 2


@pytest.mark.requirement(104)
def test_an_abort_gives_blocks_back_at_once_and_leaves_the_others_alone(engine: Callable[..., Engine]) -> None:
    small = engine(page_size=2, kv_tokens=26, max_batch=3)
    serial = Serial(engine(page_size=64, max_batch=1))
    requests = several(5, max_new_tokens=9, want_logits=True)
    for request in requests:
        assert small.submit(request) is None
    results: dict[str, SequenceResult] = {}
    while not any(one.preemptions for one in small.scheduler.waiting):
        results.update({update.id: update.result for update in small.step() if update.result is not None})
    preempted = next(one.request.id for one in small.scheduler.waiting if one.preemptions)
    running, waiting = small.scheduler.running[0].request.id, small.scheduler.waiting[-1].request.id
    assert len({preempted, running, waiting}) == 3
    held = len(small.scheduler.running[0].table)
    before = small.pool.available
    for name in (running, preempted, waiting):
        assert small.abort(name) and not small.abort(name)
        small.check_integrity()
    assert small.pool.available == before + held
    assert not small.abort("never heard of")
    results.update(serve(small))
    assert {name for name, result in results.items() if result.finish == "abort"} == {preempted, running, waiting}
    assert results[waiting].tokens == () and results[waiting].logits is None and results[waiting].seconds == 0
    for request in requests:
        result, right = results[request.id], serial.answer(request)
        assert result.error is None and result.tokens == right.tokens[: len(result.tokens)]
        if request.id == waiting:
            continue
        assert torch.equal(result.logits, right.logits[: len(result.logits)])
        # An aborted request has one row for every token that was fed, as any other has.
        assert len(result.logits) == len(request.prompt) + len(result.tokens) - 1
    assert len(results[preempted].tokens) > 0, "what it had said is kept"
    assert small.stats()["aborted"] == 3 and small.stats()["kv_blocks_available"] == 13


@pytest.mark.requirement(104)
def test_a_run_can_be_aborted_and_added_to_from_within(engine: Callable[..., Engine]) -> None:
    small = engine(max_batch=2)
    requests = several(4, max_new_tokens=3)
    run = small.run([*requests, SequenceRequest("long", PROMPT, max_new_tokens=12)])
    first = next(run)
    assert first.id == "0"
    # "1" ended in the same step and is over; "3" has not begun; "late" is served by the same run.
    assert [small.abort(name) for name in ("1", "3")] == [False, True]
    assert small.submit(SequenceRequest("late", PROMPT, max_new_tokens=1)) is None
    finishes = {result.id: result.finish for result in run}
    assert finishes == {"1": "length", "2": "length", "3": "abort", "long": "length", "late": "length"}
    small.check_integrity()
    with pytest.raises(EngineError, match="in progress"):
        small.submit(requests[0])
        next(small.run([]))


@pytest.mark.requirement(76)
def test_tokens_stream_as_they_are_drawn(engine: Callable[..., Engine]) -> None:
    small = engine()
    request = SequenceRequest("a", PROMPT, max_new_tokens=6)
    (whole,) = small.run([request])
    assert small.submit(request) is None
    updates = []
    while small.busy:
        updates.extend(small.step())
    assert [update.tokens for update in updates] == [(token,) for token in whole.tokens]
    assert [update.result is not None for update in updates] == [False] * 5 + [True]
    assert small.step() == [], "an idle step does nothing"
    small.close()
    with pytest.raises(EngineError, match="closed"):
        small.step()
    with pytest.raises(EngineError, match="closed"):
        small.submit(request)


@pytest.mark.requirement(69)
def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    """What it computed stays findable until someone needs the blocks; rows already handed out may be skipped."""
    options = EngineOptions(max_context=64, page_size=2, prefix_cache=True, max_batch=4)
    pool = BlockPool(10)
    scheduler = Scheduler(options, pool, PrefixCache(pool, 2), keeps_rows=True)
    for name in ("old", "young"):
        prompt = tuple(range(6)) if name == "old" else tuple(range(10, 16))
        scheduler.submit(SequenceRequest(name, prompt, max_new_tokens=9, want_logits=True))
    while scheduler.busy:
        drive(scheduler, scheduler.schedule())
        scheduler.check_integrity()
    counts = scheduler.counts
    assert counts["preemptions"] == 1
    assert scheduler.prefix is not None and scheduler.prefix.hits > 0
    assert 0 < counts["recomputed_tokens"] < 10, "everything was computed again"
    assert pool.available == 10


def test_an_admission_that_does_not_fit_leaves_no_trace_in_the_statistics() -> None:
    options = EngineOptions(max_context=64, page_size=2, prefix_cache=True, max_batch=4)
    pool = BlockPool(6)
    prefix = PrefixCache(pool, 2)
    scheduler = Scheduler(options, pool, prefix, keeps_rows=False)
    for name, new in (("first", 1), ("second", 1), ("third", 8)):
        scheduler.submit(SequenceRequest(name, (1, 2, 3, 4, 5), max_new_tokens=new))
        if name == "first":
            drive(scheduler, scheduler.schedule())
    while scheduler.busy:
        drive(scheduler, scheduler.schedule())
    # Each later prompt asked once for its 4 reusable tokens, and found them.
    assert (prefix.hits, prefix.queries) == (8, 4 + 4 + 4)


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(EngineError, match=f"block {block} is free"):
        pool.share(block)
    assert (pool.in_use, pool.peak) == (0, 1)
