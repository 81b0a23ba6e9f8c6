"""The engine: open a checkpoint, run requests, close. A step is schedule -> execute on all ranks -> advance.

The engine is the controller of one or many ranks: it schedules, samples and answers; ranks compute. Each dp replica
has a scheduler and a block pool of its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import threads
from ..comm import Traffic
from ..errors import CheckpointError, EngineError
from ..families import read_config, spec_from_config
from ..kv.pool import BlockPool
from ..kv.prefix import PrefixCache
from ..weights.loader import LoadReport
from ..weights.shards import ShardPlan, check_cover
from .assemble import Assembler, Drift
from .executor import Executor, LocalExecutor
from .locate import locate
from .memory import RankMemory, check_memory
from .nursery import Nursery
from .plan import SequencePlan, StepPlan
from .processes import ProcessExecutor
from .requests import EngineOptions, SequenceRequest, SequenceResult, SequenceUpdate, problem_of
from .scheduler import Scheduler, Sequence
from .taps import TapRecorder
from .worker import plan_of

__all__ = ["Engine"]


@dataclass(frozen=True)
class Replica:
    """One dp place: the sequences that it serves and the blocks that they hold."""

    scheduler: Scheduler
    pool: BlockPool
    prefix: PrefixCache | None

    @property
    def load(self) -> int:
        """Requests in it."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)


class Engine:
    """A loaded model. Build with `open`; not thread-safe.

    `run` serves a batch of requests to the end. Whoever wants tokens as they come, or submits while others run, uses
    what it is made of: `submit`, then `step` while `busy`. `abort` works with both.

    Attributes: ``spec`` (what the model is), ``options``, ``layout``, ``load_report``, ``executor`` (its ranks),
    ``replicas``, and of the first of each: ``kernels_registry`` (the seam for wrapping ops), ``pool``, ``prefix`` and
    ``scheduler``.
    """

    def __init__(self, plan: ShardPlan, options: EngineOptions, executor: Executor) -> None:
        self.spec = plan.spec
        self.options = options
        self.layout = plan.mesh.layout
        self.executor = executor
        self.kernels_registry = executor.kernels
        self.load_report = _together(executor.reports())
        recorder = TapRecorder(self.spec.sites(), options.taps)
        self._wanted = recorder.wanted
        self._assembler = Assembler(plan, options.page_size)
        blocks = -(-options.cache_tokens // options.page_size)
        blocks = -(-blocks // self.layout.sp) * self.layout.sp
        self.replicas = tuple(self._replica(blocks) for _ in range(self.layout.dp))
        self._turn = 0
        self._seen = 0
        self._open = True
        self._served: dict[str, int] = {}
        self._ended: deque[SequenceResult] = deque()
        self._counts = {"steps": 0, "rows": 0, "requests": 0, "errors": 0, "generated": 0, "largest_batch": 0}

    def _replica(self, blocks: int) -> Replica:
        pool = BlockPool(blocks, self.layout.sp)
        prefix = PrefixCache(pool, self.options.page_size) if self.options.prefix_cache else None
        return Replica(Scheduler(self.options, pool, prefix, keeps_rows=bool(self._wanted)), pool, prefix)

    @property
    def scheduler(self) -> Scheduler:
        return self.replicas[0].scheduler

    @property
    def pool(self) -> BlockPool:
        return self.replicas[0].pool

    @property
    def prefix(self) -> PrefixCache | None:
        return self.replicas[0].prefix

    @classmethod
    def open(
        cls, directory: str | Path, options: EngineOptions | None = None, *, nursery: Nursery | None = None
    ) -> Engine:
        """Load the checkpoint in ``directory``. Processes of ranks come from ``nursery``, or from an own one.

        Raises CheckpointError (file and tensor or key named) where it cannot be trusted or computed, EngineError
        for options that cannot be met.
        """
        options = options or EngineOptions()
        spec = spec_from_config(read_config(directory))
        plan = plan_of(spec, options)
        check_memory(plan, options)
        if options.threads:
            threads.use(options.threads)
        try:
            executor: Executor = (
                ProcessExecutor(directory, plan, options, nursery)
                if options.communicator == "gloo"
                else LocalExecutor(directory, plan, options)
            )
        except OSError as problem:
            raise CheckpointError(f"{problem.filename or directory}: cannot be read ({problem.strerror})") from None
        try:
            check_cover(spec, executor.placed())
            return cls(plan, options, executor)
        except BaseException:
            executor.close()
            raise

    def kernels(self) -> dict[str, str]:
        """op -> implementation in use (``native-avx512``, ``reference``)."""
        return self.kernels_registry.names()

    def run(self, requests: Iterable[SequenceRequest]) -> Iterator[SequenceResult]:
        """Serve requests together; yields each result as soon as it is complete.

        A request that cannot be served gives a result with ``error``; the others are not affected. Leaving
        the iterator early drops what is still in flight. Requests are taken from ``requests`` as there is room.
        """
        self._check_open()
        if self.busy:
            raise EngineError("a run is already in progress; finish or close its iterator, or step until idle, first")
        source = iter(requests)
        queue = min(self.options.max_batch, self.options.max_waiting or self.options.max_batch)
        try:
            more = True
            while more or self.busy:
                while more and min(len(replica.scheduler.waiting) for replica in self.replicas) < queue:
                    try:
                        request = next(source)
                    except StopIteration:
                        more = False
                        break
                    refused = self.submit(request)
                    if refused is not None:
                        yield refused
                yield from (update.result for update in self.step() if update.result is not None)
        finally:
            self.drop_all()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._ended) or any(replica.load for replica in self.replicas)

    def _check_open(self) -> None:
        if not self._open:
            raise EngineError("engine is closed; open it again")

    def _assign(self) -> Replica:
        """The replica with the fewest requests; among equals, the one that has waited longest for one."""
        count = len(self.replicas)
        order = [(self._turn + step) % count for step in range(count)]
        chosen = min(order, key=lambda index: self.replicas[index].load)
        self._turn = (chosen + 1) % count
        return self.replicas[chosen]

    def submit(self, request: SequenceRequest) -> SequenceResult | None:
        """Queue a request. None where it is accepted; otherwise the result, with ``error``, that it gets at once."""
        self._check_open()
        if not self.busy:
            self._seen = len(self.drifts)
        self._counts["requests"] += 1
        problem = problem_of(request, self.spec.vocab, self.options)
        if problem is None and any(request.id in replica.scheduler for replica in self.replicas):
            problem = f"id {request.id!r} is in flight already; wait for its result or use another id"
        if problem is None:
            try:
                replica = self._assign()
                replica.scheduler.submit(request.settled())
                self._served[request.id] = self.replicas.index(replica)
                return None
            except EngineError as refusal:
                problem = str(refusal)
        self._counts["errors"] += 1
        return SequenceResult(getattr(request, "id", ""), finish="error", error=problem)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False where none of that id is in flight (it may just have ended).

        Its blocks are back when this returns. Its result, with finish ``abort``, comes with the next step.
        """
        for replica in self.replicas:
            sequence = replica.scheduler.abort(request_id)
            if sequence is not None:
                self._ended.append(self._result(sequence))
                return True
        return False

    def drop_all(self) -> None:
        """Forget everything in flight, without results."""
        for replica in self.replicas:
            replica.scheduler.drop_all()
        self._ended.clear()
        self._served.clear()

    def _plan(self, sequence: Sequence, count: int) -> SequencePlan:
        first, last = sequence.computed, sequence.computed + count
        head = self._first_head_row(sequence, first, last)
        return SequencePlan(tuple(sequence.known[first:last]), first, last, sequence.slots[:last], head)

    def _first_head_row(self, sequence: Sequence, first: int, last: int) -> int:
        """Positions from this to ``last`` need logits: to keep, or to draw the next token from."""
        request = sequence.request
        draws = last == len(sequence.known) and sequence.generated < request.max_new_tokens
        begin = last - 1 if draws else last
        if request.want_logits:
            begin = min(begin, max(first, request.first_row, sequence.reached))
        return begin

    def step(self) -> list[SequenceUpdate]:
        """One forward pass over the next tokens of what is in flight; what it drew and what came to an end.

        Nothing happens while idle. An op that raises ends those requests only that it cannot compute, each with its
        ``error``. Raises EngineError where the engine is closed, one of several ranks failed (what was in flight still
        is, as it was before the step: `drop_all` it, or try again), or the accounts do not add up (checked whenever
        nothing is left in flight).
        """
        self._check_open()
        updates = [SequenceUpdate(result.id, result=result) for result in self._ended]
        self._ended.clear()
        scheduled = [self._scheduled(replica.scheduler) for replica in self.replicas]
        if any(scheduled):
            updates.extend(self._compute(scheduled))
        if not self.busy:
            self.check_integrity()
        return updates

    def _scheduled(self, scheduler: Scheduler) -> list[tuple[Sequence, int]]:
        """What a replica computes next. The oldest can always go on; if nothing can, its accounts are wrong."""
        plan = scheduler.schedule()
        if not plan and scheduler.busy:
            stuck = ", ".join(sequence.request.id for sequence in [*scheduler.running, *scheduler.waiting][:4])
            raise EngineError(
                f"{len(scheduler.running)} sequences run, {len(scheduler.waiting)} wait and none can go on ({stuck}): "
                f"{scheduler.pool.in_use} of {scheduler.pool.blocks} KV blocks are in use; close the engine"
            )
        return plan

    def _compute(self, scheduled: list[list[tuple[Sequence, int]]]) -> Iterator[SequenceUpdate]:
        wanted = (self.options.micro_batches or self.layout.pp) if self.layout.pp > 1 else 1
        step = StepPlan(
            number=self._counts["steps"],
            replicas=tuple(tuple(self._plan(*item) for item in items) for items in scheduled),
            # A part without sequences would cost a pass through all stages and give nothing.
            micro_batches=min(wanted, max(map(len, scheduled))),
        )
        try:
            answers = self.executor.step(step)
            rows = {dp: self._assembler.replica(step, answers, dp) for dp, items in enumerate(scheduled) if items}
        except EngineError:
            raise
        except Exception as problem:
            yield from self._apart(scheduled, problem)
            return
        self._counts["steps"] += 1
        for dp, (logits, taps) in rows.items():
            yield from self._advance_replica(step, logits, taps, dp, scheduled[dp])

    def _apart(self, scheduled: list[list[tuple[Sequence, int]]], problem: Exception) -> Iterator[SequenceUpdate]:
        """What an op broke, sequence by sequence: only those that it breaks alone fail.

        Nothing was advanced by then, and computing a token again writes the same slots.
        """
        items = [(dp, item) for dp, those in enumerate(scheduled) for item in those]
        if len(items) == 1:
            ((dp, (sequence, _)),) = items
            self._break(sequence, problem)
            self.replicas[dp].scheduler.finish(sequence)
            yield SequenceUpdate(sequence.request.id, result=self._result(sequence))
            return
        for dp, item in items:
            yield from self._compute([[item] if place == dp else [] for place in range(len(scheduled))])

    def _break(self, sequence: Sequence, problem: Exception) -> None:
        """End a sequence that an op cannot compute."""
        what = " ".join(f"{type(problem).__name__}: {problem}".split())
        sequence.finish = "error"
        sequence.error = f"step {self._counts['steps']}, after {sequence.computed} tokens: {what}"
        self._counts["errors"] += 1

    def _advance_replica(
        self,
        step: StepPlan,
        logits: torch.Tensor,
        taps: dict[str, torch.Tensor],
        dp: int,
        items: list[tuple[Sequence, int]],
    ) -> Iterator[SequenceUpdate]:
        taps = {site: rows for site, rows in taps.items() if site in self._wanted}
        self._counts["rows"] += sum(count for _, count in items)
        self._counts["largest_batch"] = max(self._counts["largest_batch"], len(items))
        row, head = 0, 0
        for (sequence, count), plan in zip(items, step.replicas[dp], strict=True):
            own = logits[head : head + plan.last - plan.head]
            self._keep(sequence, own, taps, row, count)
            row, head = row + count, head + len(own)
            sequence.advance(count)
            try:
                drawn = self._advance(sequence, own)
            except Exception as problem:
                self._break(sequence, problem)
                drawn = ()
            if sequence.finish:
                self.replicas[dp].scheduler.finish(sequence)
                yield SequenceUpdate(sequence.request.id, drawn, self._result(sequence))
            elif drawn:
                yield SequenceUpdate(sequence.request.id, drawn)

    def _keep(
        self, sequence: Sequence, logits: torch.Tensor, tapped: dict[str, torch.Tensor], row: int, count: int
    ) -> None:
        # Rows that were handed out before a preemption are not handed out again.
        skip = max(0, max(sequence.request.first_row, sequence.reached) - sequence.computed)
        if sequence.request.want_logits:
            sequence.logits.append(logits if skip < count else logits[:0])
        for name, rows in tapped.items():
            if skip < count:
                sequence.taps.setdefault(name, []).append(rows[row + skip : row + count].clone())

    def _advance(self, sequence: Sequence, logits: torch.Tensor) -> tuple[int, ...]:
        """Draw the next token where all known ones are computed; decide whether the sequence is finished."""
        request = sequence.request
        if sequence.computed < len(sequence.known):
            return ()
        if sequence.generated >= request.max_new_tokens:
            sequence.finish = "length"
            return ()
        last = logits[-1]
        # Both are NaN where one element is.
        if not all(math.isfinite(float(bound)) for bound in torch.aminmax(last)):
            sequence.finish = "error"
            sequence.error = f"logits after token {sequence.computed - 1} are not finite"
            self._counts["errors"] += 1
            return ()
        token = self.kernels_registry.ops.sample(
            last,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed + self.options.seed,
            position=sequence.computed,
        )
        sequence.known.append(token)
        self._counts["generated"] += 1
        if token in request.stop:
            sequence.finish = "stop"
        elif sequence.generated >= request.max_new_tokens:
            sequence.finish = "length"
        return (token,)

    def _result(self, sequence: Sequence) -> SequenceResult:
        seconds = time.perf_counter() - sequence.started if sequence.started else 0.0
        replica = self._served.pop(sequence.request.id, 0)
        if sequence.error is not None:
            return SequenceResult(sequence.request.id, finish="error", error=sequence.error, seconds=seconds)
        kept = _joined(sequence.logits) if sequence.logits else None
        return SequenceResult(
            id=sequence.request.id,
            tokens=tuple(sequence.known[len(sequence.request.prompt) :]),
            finish=sequence.finish,
            logits=kept,
            taps={name: _joined(parts) for name, parts in sequence.taps.items()},
            cached_tokens=sequence.cached,
            seconds=seconds,
            preemptions=sequence.preemptions,
            replica=replica,
            drift=tuple(str(drift) for drift in self.drifts[self._seen :]),
        )

    def stats(self) -> dict[str, float]:
        """Counters since open, and the state of the KV pools."""
        found: dict[str, float] = dict(self._counts)
        found["running"] = sum(len(replica.scheduler.running) for replica in self.replicas)
        found["waiting"] = sum(len(replica.scheduler.waiting) for replica in self.replicas)
        for name in self.scheduler.counts:
            each = [replica.scheduler.counts[name] for replica in self.replicas]
            found[name] = max(each) if name == "largest_queue" else sum(each)
        found["kv_blocks"] = sum(replica.pool.blocks for replica in self.replicas)
        found["kv_blocks_available"] = sum(replica.pool.available for replica in self.replicas)
        found["kv_blocks_peak"] = sum(replica.pool.peak for replica in self.replicas)
        ranks = self.memory()
        found["weight_bytes"] = sum(rank.weights for rank in ranks)
        found["kv_bytes"] = sum(rank.kv for rank in ranks)
        if (temporary := max((rank.temporary or 0 for rank in ranks), default=0)) > 0:
            found["temporary_bytes"] = temporary
        found["drifts"] = len(self.drifts)
        sums = [sums for rank in self.traffic() for sums in rank.values()]
        found["comm_calls"] = sum(one.calls for one in sums)
        found["comm_bytes"] = sum(one.sent for one in sums)
        total = self.executor.seconds()
        found["comm_share"] = sum(one.seconds for one in sums) / total if total > 0 else 0.0
        caches = [replica.prefix for replica in self.replicas if replica.prefix is not None]
        if caches:
            found["prefix_hit_tokens"] = sum(cache.hits for cache in caches)
            found["prefix_query_tokens"] = sum(cache.queries for cache in caches)
        return found

    def locate(
        self, site: str, position: int, element: tuple[int, ...] = (), expert: int | None = None, replica: int = 0
    ) -> tuple[str, ...]:
        """Names of the ranks on which an element of a site came about (`adapt_engine.runtime.locate`)."""
        plan = self._assembler.plan
        ranks = locate(plan, self.options.page_size, site, position, element, expert, replica)
        return tuple(plan.mesh.name(rank) for rank in ranks)

    @property
    def drifts(self) -> list[Drift]:
        """Copies on several ranks that were not equal, in the order in which they were seen."""
        return self._assembler.drifts

    def memory(self) -> list[RankMemory]:
        """Bytes of each rank by class; `adapt_engine.runtime.memory` says what is counted."""
        return self.executor.memory()

    def traffic(self) -> list[dict[tuple[str, str], Traffic]]:
        """For each rank, (op, axis of the group) -> calls, bytes sent and seconds since open."""
        return self.executor.traffic()

    def check_integrity(self) -> None:
        """Invariants of schedulers, pools and prefix caches; also checked whenever nothing is left in flight.

        Raises EngineError.
        """
        for replica in self.replicas:
            replica.scheduler.check_integrity()

    def close(self) -> None:
        """Release weights and caches. Safe to call twice."""
        self.drop_all()
        self._open = False
        self.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _together(reports: list[LoadReport]) -> LoadReport:
    """What all ranks loaded, as one report; ranks of one process load one after the other."""
    if len(reports) == 1:
        return reports[0]
    seconds, size = sum(one.seconds for one in reports), sum(one.bytes for one in reports)
    return LoadReport(
        seconds=seconds,
        bytes=size,
        bytes_per_second=size / seconds if seconds > 0 else 0.0,
        read=frozenset().union(*(one.read for one in reports)),
        files=max(one.files for one in reports),
        warnings=tuple(dict.fromkeys(warning for one in reports for warning in one.warnings)),
        largest=max(one.largest for one in reports),
        io_share=sum(one.io_share * one.seconds for one in reports) / seconds if seconds > 0 else 0.0,
    )
