"""One rule: every sequence has ``computed`` tokens chasing ``known`` tokens.

Prefill, chunked prefill, decode and a prefix hit are the same thing with different distances between the two.
A sequence is admitted when the blocks for its longest possible length are there, so that nothing admitted can
run out of memory.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from ..errors import EngineError
from ..kv.pool import BlockPool
from ..kv.prefix import PrefixCache
from .requests import EngineOptions, SequenceRequest

__all__ = ["Scheduler", "Sequence"]


@dataclass
class Sequence:
    """A request in flight."""

    request: SequenceRequest
    known: list[int]
    """Prompt and generated tokens."""
    table: list[int]
    """Block of each page."""
    slots: torch.Tensor
    """int64: cache slot of every position it may reach."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    cached: int = 0
    """Of those, tokens that the prefix cache gave at admission."""
    started: float = 0.0
    logits: list[torch.Tensor] = field(default_factory=list)
    taps: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    finish: str = ""
    error: str | None = None

    @property
    def generated(self) -> int:
        return len(self.known) - len(self.request.prompt)


class Scheduler:
    """Waiting and running sequences, and the blocks that they hold."""

    def __init__(self, options: EngineOptions, pool: BlockPool, prefix: PrefixCache | None, keeps_rows: bool) -> None:
        self.options = options
        self.pool = pool
        self.prefix = prefix
        self.waiting: deque[SequenceRequest] = deque()
        self.running: list[Sequence] = []
        self._keeps_rows = keeps_rows
        # Bounds the packed rows of a step; one whole prompt must always fit.
        self._step_tokens = options.max_context

    def blocks_for(self, request: SequenceRequest) -> int:
        """Blocks that a request needs at its longest. The last token drawn is never fed, so it needs no slot."""
        fed = len(request.prompt) + max(0, request.max_new_tokens - 1)
        return -(-fed // self.options.page_size)

    def submit(self, request: SequenceRequest) -> None:
        """Queue a valid request. Raises EngineError where the whole pool could not hold it."""
        needed = self.blocks_for(request)
        if needed > self.pool.blocks:
            size = self.options.page_size
            raise EngineError(
                f"request needs {needed * size} KV slots, the pool has {self.pool.blocks * size}; raise kv_tokens"
            )
        self.waiting.append(request)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Admit what fits, then give each running sequence its next tokens: pairs (sequence, count > 0)."""
        while self.waiting and len(self.running) < self.options.max_batch and self._admit(self.waiting[0]):
            self.waiting.popleft()
        budget = self._step_tokens
        plan: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            count = len(sequence.known) - sequence.computed
            if self.options.prefill_chunk:
                count = min(count, self.options.prefill_chunk)
            if plan and count > budget:
                continue
            budget -= count
            plan.append((sequence, count))
        return plan

    def _admit(self, request: SequenceRequest) -> bool:
        needed = self.blocks_for(request)
        table: list[int] = []
        if self.prefix is not None:
            table = self.prefix.lookup(request.prompt[: self._reusable(request)])
        if needed - len(table) > self.pool.available:
            for block in table:
                self.pool.free(block)
            return False
        cached = len(table) * self.options.page_size
        while len(table) < needed:
            table.append(self.pool.allocate(len(table)))
        size = self.options.page_size
        blocks = torch.tensor(table, dtype=torch.int64)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()
        self.running.append(
            Sequence(request, list(request.prompt), table, slots, cached, cached, started=time.perf_counter())
        )
        return True

    def _reusable(self, request: SequenceRequest) -> int:
        """Prompt tokens that a prefix hit may cover: not the last one, and no row that the caller wants to see."""
        limit = len(request.prompt) - 1
        if request.want_logits or self._keeps_rows:
            limit = min(limit, request.first_row)
        return limit

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out and give its blocks back; its computed full pages become findable."""
        self.running.remove(sequence)
        if self.prefix is not None and sequence.error is None:
            self.prefix.insert(sequence.known[: sequence.computed], sequence.table)
        for block in sequence.table:
            self.pool.free(block)

    def drop_all(self) -> None:
        """Forget everything in flight, without results."""
        self.waiting.clear()
        for sequence in list(self.running):
            sequence.error = "dropped"
            self.finish(sequence)

    def check_integrity(self) -> None:
        """Blocks are accounted for and no sequence has computed more than it knows. Raises EngineError."""
        self.pool.check_integrity(sequence.table for sequence in self.running)
        if self.prefix is not None:
            self.prefix.check_integrity()
        for sequence in self.running:
            if not 0 <= sequence.computed <= len(sequence.known) <= len(sequence.slots) + 1:
                raise EngineError(
                    f"request {sequence.request.id}: computed {sequence.computed}, known {len(sequence.known)}, "
                    f"slots {len(sequence.slots)} are out of order"
                )
