"""The engine: open a checkpoint, run requests, close. A step is schedule -> forward -> advance."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ..config import ModelSpec
from ..errors import CheckpointError, EngineError
from ..families import read_config, spec_from_config
from ..kernels import KernelRegistry, native, reference
from ..kv.cache import PagedCache
from ..kv.groups import groups_of
from ..kv.pool import BlockPool
from ..kv.prefix import PrefixCache
from ..model.step import Span, Step
from ..model.transformer import Transformer
from ..weights.index import WeightIndex
from ..weights.loader import Loader, LoadReport
from .requests import DTYPES, EngineOptions, SequenceRequest, SequenceResult, SequenceUpdate
from .scheduler import Scheduler, Sequence
from .taps import TapRecorder

__all__ = ["Engine"]


class Engine:
    """A loaded model on one rank. Build with `open`; not thread-safe.

    `run` serves a batch of requests to the end. Whoever wants tokens as they come, or submits while others run, uses
    what it is made of: `submit`, then `step` while `busy`. `abort` works with both.

    Attributes: ``spec`` (what the model is), ``options``, ``load_report``, ``kernels_registry`` (the seam for
    wrapping ops), ``cache``, ``pool``, ``prefix`` and ``scheduler`` (the seams of the KV cache).
    """

    def __init__(
        self, spec: ModelSpec, options: EngineOptions, transformer: Transformer, load_report: LoadReport
    ) -> None:
        self.spec = spec
        self.options = options
        self.load_report = load_report
        self.kernels_registry = transformer.kernels
        dtype = DTYPES[options.precision]
        blocks = -(-options.cache_tokens // options.page_size)
        _check_memory(spec, blocks * options.page_size, dtype.itemsize)
        self.pool = BlockPool(blocks)
        self.cache = PagedCache(spec, dtype, blocks, options.page_size)
        self.prefix = PrefixCache(self.pool, options.page_size) if options.prefix_cache else None
        recorder = TapRecorder(spec.sites(), options.taps)
        self._taps = recorder if recorder.wanted else None
        self.scheduler = Scheduler(options, self.pool, self.prefix, keeps_rows=self._taps is not None)
        self._transformer: Transformer | None = transformer
        self._ended: deque[SequenceResult] = deque()
        self._counts = {"steps": 0, "rows": 0, "requests": 0, "errors": 0, "generated": 0, "largest_batch": 0}

    @classmethod
    def open(cls, directory: str | Path, options: EngineOptions | None = None) -> Engine:
        """Load the checkpoint in ``directory``.

        Raises CheckpointError (file and tensor or key named) where it cannot be trusted or computed, EngineError
        for options that cannot be met.
        """
        options = options or EngineOptions()
        spec = spec_from_config(read_config(directory))
        offers = reference.offers() + (native.offers() if options.native else [])
        kernels = KernelRegistry(offers, DTYPES[options.precision], options.mode)
        if options.threads:
            torch.set_num_threads(options.threads)
        try:
            loader = Loader(WeightIndex.read(directory), spec, kernels.dtype)
            report = loader.load()
        except OSError as problem:
            raise CheckpointError(f"{problem.filename or directory}: cannot be read ({problem.strerror})") from None
        return cls(spec, options, Transformer(spec, loader.parameters, kernels), report)

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
                while more and len(self.scheduler.waiting) < queue:
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
        return self.scheduler.busy or bool(self._ended)

    def _check_open(self) -> None:
        if self._transformer is None:
            raise EngineError("engine is closed; open it again")

    def submit(self, request: SequenceRequest) -> SequenceResult | None:
        """Queue a request. None where it is accepted; otherwise the result, with ``error``, that it gets at once."""
        self._check_open()
        self._counts["requests"] += 1
        problem = request.problem(self.spec.vocab, self.options)
        if problem is None:
            try:
                self.scheduler.submit(request)
                return None
            except EngineError as refusal:
                problem = str(refusal)
        self._counts["errors"] += 1
        return SequenceResult(request.id, finish="error", error=problem)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False where none of that id is in flight (it may just have ended).

        Its blocks are back when this returns. Its result, with finish ``abort``, comes with the next step.
        """
        sequence = self.scheduler.abort(request_id)
        if sequence is None:
            return False
        self._ended.append(self._result(sequence))
        return True

    def drop_all(self) -> None:
        """Forget everything in flight, without results."""
        self.scheduler.drop_all()
        self._ended.clear()

    @torch.inference_mode()
    def _forward(self, plan: list[tuple[Sequence, int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits of the rows that matter, and for each sequence which of its rows those are."""
        assert self._transformer is not None
        ids: list[int] = []
        spans, slots, positions, head, wanted = [], [], [], [], []
        for sequence, count in plan:
            first, last = sequence.computed, sequence.computed + count
            row = len(ids)
            ids.extend(sequence.known[first:last])
            seen = torch.arange(last)
            spans.append(Span(row, row + count, sequence.slots[:last], seen))
            slots.append(sequence.slots[first:last])
            positions.append(seen[first:])
            rows = self._head_rows(sequence, first, last)
            wanted.append(rows)
            head.append(rows - first + row)
        step = Step(
            ops=self.kernels_registry.ops,
            cache=self.cache,
            ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            spans=tuple(spans),
            head_rows=torch.cat(head),
            record=self._taps,
        )
        return self._transformer.forward(step), wanted

    def _head_rows(self, sequence: Sequence, first: int, last: int) -> torch.Tensor:
        """Positions in [first, last) whose logits are needed: to keep, or to draw the next token from."""
        request = sequence.request
        draws = last == len(sequence.known) and sequence.generated < request.max_new_tokens
        begin = last - 1 if draws else last
        if request.want_logits:
            begin = min(begin, max(first, request.first_row, sequence.reached))
        return torch.arange(begin, last)

    def step(self) -> list[SequenceUpdate]:
        """One forward pass over the next tokens of what is in flight; what it drew and what came to an end.

        Nothing happens while idle. Raises EngineError where the engine is closed or its accounts do not add up
        (checked whenever nothing is left in flight).
        """
        self._check_open()
        updates = [SequenceUpdate(result.id, result=result) for result in self._ended]
        self._ended.clear()
        plan = self.scheduler.schedule()
        if plan:
            updates.extend(self._compute(plan))
        if not self.scheduler.busy:
            self.check_integrity()
        return updates

    def _compute(self, plan: list[tuple[Sequence, int]]) -> Iterator[SequenceUpdate]:
        logits, wanted = self._forward(plan)
        self._counts["steps"] += 1
        self._counts["rows"] += sum(count for _, count in plan)
        self._counts["largest_batch"] = max(self._counts["largest_batch"], len(plan))
        tapped = self._taps.take() if self._taps is not None else {}
        row, head = 0, 0
        for (sequence, count), rows in zip(plan, wanted, strict=True):
            own = logits[head : head + len(rows)]
            self._keep(sequence, own, tapped, row, count)
            row, head = row + count, head + len(rows)
            sequence.advance(count)
            drawn = self._advance(sequence, own)
            if sequence.finish:
                self.scheduler.finish(sequence)
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
        if not bool(torch.isfinite(last).all()):
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
        )

    def stats(self) -> dict[str, float]:
        """Counters since open, and the state of the KV pool."""
        found: dict[str, float] = dict(self._counts)
        found["running"] = len(self.scheduler.running)
        found["waiting"] = len(self.scheduler.waiting)
        found.update(self.scheduler.counts)
        found["kv_blocks"] = self.pool.blocks
        found["kv_blocks_available"] = self.pool.available
        found["kv_blocks_peak"] = self.pool.peak
        found["kv_bytes"] = self.cache.nbytes
        if self.prefix is not None:
            found["prefix_hit_tokens"] = self.prefix.hits
            found["prefix_query_tokens"] = self.prefix.queries
        return found

    def check_integrity(self) -> None:
        """Invariants of scheduler, pool and prefix cache; also checked whenever nothing is left. Raises EngineError."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Release weights and cache. Safe to call twice."""
        self.drop_all()
        self._transformer = None
        self.cache.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_memory(spec: ModelSpec, tokens: int, element: int) -> None:
    """Refuse a KV cache that this machine cannot hold, before anything is allocated."""
    if not hasattr(os, "sysconf"):
        return
    needed = sum(group.bytes_per_token(element) for group in groups_of(spec)) * tokens
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise EngineError(
            f"option kv_tokens: {tokens} slots need {needed} bytes, this machine has {present}; "
            "lower kv_tokens or max_context"
        )
