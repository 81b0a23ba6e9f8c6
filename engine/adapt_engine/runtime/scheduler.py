"""One rule: every sequence has ``computed`` tokens chasing ``known`` tokens.

Prefill, chunked prefill, decode, a prefix hit and the recompute after a preemption are the same thing with
different distances between the two.

Order
-----
Requests are admitted in order of arrival; none overtakes another. In a step the oldest running sequence comes first,
then the others, those served longest ago first: one token each while ``step_tokens`` lasts. What is left of it goes
to the same sequences in order of arrival, so that a long prompt is cut to fit. The oldest sequence is therefore part
of every step, and since it is never preempted it ends; then the next one is the oldest. Nothing waits for ever.

Blocks
------
Blocks are taken as tokens are computed. A sequence is admitted when its known tokens and one page to grow fit beside
what the running ones need for theirs. When the pool runs dry, the youngest running sequence is preempted: its blocks
go back (to the prefix cache first, where there is one), ``computed`` returns to 0, known tokens and everything already
handed out stay, and it waits at the head of the queue. The youngest itself never preempts anyone; it skips steps until
a block is there. With ``preemption`` off a sequence is admitted only when its longest possible length fits, so that
nothing is ever computed twice, at the price of fewer sequences together.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ..errors import EngineError
from ..kv.pool import BlockPool
from ..kv.prefix import PrefixCache
from .requests import EngineOptions, SequenceRequest

__all__ = ["Scheduler", "Sequence"]


@dataclass(eq=False)
class Sequence:
    """A request in flight: waiting (never run, or preempted) or running."""

    request: SequenceRequest
    arrival: int
    """Number of the submission; smaller is older."""
    page_size: int
    known: list[int]
    """Prompt and generated tokens."""
    table: list[int] = field(default_factory=list)
    """Block of each page taken so far; empty while waiting."""
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [len(table) * page_size]: cache slot of every position that has one."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    reached: int = 0
    """The most that ``computed`` has been: rows below it were handed out and are not handed out again."""
    cached: int = 0
    """Prompt tokens that the prefix cache gave at the first admission."""
    preemptions: int = 0
    served: int = -1
    """Last step that had a token of this sequence, or a turn that it could not use."""
    started: float = 0.0
    """Clock at the first admission; 0 before it."""
    logits: list[torch.Tensor] = field(default_factory=list)
    taps: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    finish: str = ""
    error: str | None = None

    @property
    def generated(self) -> int:
        return len(self.known) - len(self.request.prompt)

    @property
    def longest(self) -> int:
        """Tokens that it can come to have in the cache. The last token drawn is never fed, so it needs no slot."""
        return len(self.request.prompt) + max(0, self.request.max_new_tokens - 1)

    def extend(self, blocks: list[int]) -> None:
        """Append ``blocks`` to the table."""
        if not blocks:
            return
        size = self.page_size
        first = torch.tensor(blocks, dtype=torch.int64)[:, None] * size
        self.table.extend(blocks)
        self.slots = torch.cat((self.slots, (first + torch.arange(size)).flatten()))

    def advance(self, count: int) -> None:
        """``count`` more tokens are in the cache."""
        self.computed += count
        self.reached = max(self.reached, self.computed)


class Scheduler:
    """Waiting and running sequences, and the blocks that they hold."""

    def __init__(self, options: EngineOptions, pool: BlockPool, prefix: PrefixCache | None, keeps_rows: bool) -> None:
        self.options = options
        self.pool = pool
        self.prefix = prefix
        self.waiting: deque[Sequence] = deque()
        """In order of arrival: preempted ones, then those that never ran."""
        self.running: list[Sequence] = []
        """In order of arrival, all older than any waiting one."""
        self.counts = dict.fromkeys(
            ("admitted", "refused", "aborted", "preemptions", "recomputed_tokens", "largest_queue"), 0
        )
        self._keeps_rows = keeps_rows
        self._in_flight: dict[str, Sequence] = {}
        self._arrivals = 0
        self._steps = 0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id is in flight."""
        return request_id in self._in_flight

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.options.page_size)

    def submit(self, request: SequenceRequest) -> None:
        """Queue a valid request. Raises EngineError where its id is in flight, the queue is full, or it never fits."""
        size, limit = self.options.page_size, self.options.max_waiting
        sequence = Sequence(request, self._arrivals, size, list(request.prompt))
        needed = self._pages(sequence.longest)
        problem = ""
        if request.id in self:
            problem = f"id {request.id!r} is in flight already"
        elif needed > self.pool.blocks:
            present = self.pool.blocks * size
            problem = f"request needs {needed * size} KV slots, the pool has {present}; raise kv_tokens"
        elif limit and len(self.waiting) >= limit:
            problem = f"queue is full: max_waiting is {limit}; submit again after a step, or raise max_waiting"
        if problem:
            self.counts["refused"] += 1
            raise EngineError(problem)
        self._arrivals += 1
        self._in_flight[request.id] = sequence
        self.waiting.append(sequence)
        self._note_queue()

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Admit what fits, then give running sequences their next tokens: pairs (sequence, count > 0), oldest first.

        Every planned sequence has slots for the tokens it is given. Empty only where nothing is in flight.
        """
        while self.waiting and len(self.running) < self.options.max_batch and self._admit(self.waiting[0]):
            pass
        shares = self._shares()
        plan: list[tuple[Sequence, int]] = []
        place = 0
        # Blocks are taken oldest first and victims come from the young end: what is planned stays planned.
        while place < len(self.running):
            sequence = self.running[place]
            count = self._make_room(sequence, shares[place])
            if count:
                plan.append((sequence, count))
                again = min(sequence.computed + count, sequence.reached) - sequence.computed
                self.counts["recomputed_tokens"] += max(0, again)
            place += 1
        return plan

    def _shares(self) -> list[int]:
        """Tokens of this step for each running sequence, by the order that the module states."""
        self._steps += 1
        budget = self.options.step_budget
        shares = [0] * len(self.running)
        turns = sorted(range(len(shares)), key=lambda place: (place > 0, self.running[place].served, place))
        for place in turns[:budget]:
            shares[place] = 1
            self.running[place].served = self._steps
        budget -= sum(shares)
        for place, sequence in enumerate(self.running):
            if shares[place]:
                owed = len(sequence.known) - sequence.computed
                more = min(min(owed, self.options.prefill_chunk or owed) - 1, budget)
                shares[place] += more
                budget -= more
        return shares

    def _make_room(self, sequence: Sequence, count: int) -> int:
        """Take blocks for the next ``count`` tokens, from younger sequences if need be; how many there is room for."""
        needed = self._pages(sequence.computed + count) - len(sequence.table)
        blocks: list[int] = []
        while len(blocks) < needed and self._make_available(sequence, len(sequence.table) + len(blocks)):
            blocks.append(self.pool.allocate(len(sequence.table) + len(blocks)))
        sequence.extend(blocks)
        return min(count, len(sequence.slots) - sequence.computed)

    def _make_available(self, sequence: Sequence, page: int) -> bool:
        """Preempt the youngest until a block for ``page`` is there; False where ``sequence`` is the youngest left."""
        while not self.pool.available_to[page % self.pool.owners]:
            youngest = self.running[-1]
            if youngest is sequence:
                return False
            self.preempt(youngest)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the head of the queue with all that it knows and nothing computed.

        It must be the youngest that runs, or order of arrival is lost.
        """
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.counts["preemptions"] += 1
        self.waiting.appendleft(sequence)
        self._note_queue()

    def _admit(self, sequence: Sequence) -> bool:
        """Start or resume the head of the queue where its blocks fit beside what the running ones still need."""
        claims = [self._claims(other, len(other.table)) for other in self.running]
        claimed = [sum(by_owner) for by_owner in zip(*claims, strict=True)] or [0] * self.pool.owners
        if all(there <= taken for there, taken in zip(self.pool.available_to, claimed, strict=True)):
            return False  # before anything is looked up: at least its last page is always new
        asked, table = sequence.known[: self._reusable(sequence)], list[int]()
        if self.prefix is not None:
            table = self.prefix.lookup(asked)
        needed = self._claims(sequence, len(table))
        spare = [there - taken for there, taken in zip(self.pool.available_to, claimed, strict=True)]
        if any(want > left for want, left in zip(needed, spare, strict=True)):
            self._free(table)
            return False
        if self.prefix is not None:
            self.prefix.count(len(asked), len(table))
        self.waiting.popleft()
        sequence.extend(table)
        sequence.advance(len(sequence.slots))
        if not sequence.started:
            sequence.started = time.perf_counter()
            sequence.cached = sequence.computed
        self.counts["admitted"] += 1
        self.running.append(sequence)
        return True

    def _claims(self, sequence: Sequence, held: int) -> list[int]:
        """Blocks beyond the first ``held`` pages, by owner, that must be there for it to be admitted, and stay claimed
        for it while it runs."""
        tokens = sequence.longest
        if self.options.preemption:
            tokens = min(tokens, len(sequence.known) + self.options.page_size)
        pages, owners = self._pages(tokens), self.pool.owners
        return [len(range(held + (owner - held) % owners, pages, owners)) for owner in range(owners)]

    def _reusable(self, sequence: Sequence) -> int:
        """Tokens that a prefix hit may cover: not the last one, and no row that the caller has still to see."""
        limit = len(sequence.known) - 1
        if sequence.request.want_logits or self._keeps_rows:
            limit = min(limit, max(sequence.request.first_row, sequence.reached))
        return limit

    def _release(self, sequence: Sequence) -> None:
        """Give the blocks back; full computed pages become findable unless the sequence went wrong."""
        if self.prefix is not None and sequence.error is None:
            self.prefix.insert(sequence.known[: sequence.computed], sequence.table)
        self._free(sequence.table)
        sequence.table, sequence.slots, sequence.computed = [], sequence.slots[:0], 0

    def _free(self, table: list[int]) -> None:
        # Last page first: idle blocks are evicted in this order, and a page is found only through those before it.
        for block in reversed(table):
            self.pool.free(block)

    def finish(self, sequence: Sequence) -> None:
        """Take a running sequence out and give its blocks back."""
        self.running.remove(sequence)
        self._release(sequence)
        del self._in_flight[sequence.request.id]

    def abort(self, request_id: str) -> Sequence | None:
        """Take a sequence out wherever it is; its blocks are back at once. None where it is not in flight."""
        sequence = self._in_flight.get(request_id)
        if sequence is None:
            return None
        if sequence in self.running:
            self.finish(sequence)
        else:
            self.waiting.remove(sequence)
            del self._in_flight[request_id]
        self.counts["aborted"] += 1
        sequence.finish = "abort"
        return sequence

    def drop_all(self) -> None:
        """Forget everything in flight, without results."""
        self.waiting.clear()
        for sequence in list(self.running):
            sequence.error = "dropped"
            self.finish(sequence)
        self._in_flight.clear()

    def _note_queue(self) -> None:
        self.counts["largest_queue"] = max(self.counts["largest_queue"], len(self.waiting))

    def check_integrity(self) -> None:
        """Invariants between two steps. Raises EngineError naming the block or the request.

        Blocks are held as often as they are counted; what waits holds none; order of arrival is kept; a running
        sequence has computed less than it knows, within its slots.
        """
        self.pool.check_integrity(sequence.table for sequence in self.running)
        if self.prefix is not None:
            self.prefix.check_integrity()
        everything = [*self.running, *self.waiting]
        if {id(sequence) for sequence in everything} != {id(sequence) for sequence in self._in_flight.values()}:
            raise EngineError(f"{len(everything)} sequences run or wait, {len(self._in_flight)} ids are in flight")
        for older, younger in pairwise(everything):
            if older.arrival >= younger.arrival:
                raise EngineError(f"request {younger.request.id} is behind {older.request.id}, which came later")
        for sequence in self.waiting:
            if sequence.table or sequence.computed:
                raise EngineError(
                    f"request {sequence.request.id} waits with {len(sequence.table)} blocks and "
                    f"{sequence.computed} tokens computed; both must be 0"
                )
        for sequence in self.running:
            known, slots = len(sequence.known), len(sequence.slots)
            if not (0 <= sequence.computed < known and sequence.computed <= sequence.reached <= known):
                raise EngineError(
                    f"request {sequence.request.id}: computed {sequence.computed}, reached {sequence.reached}, "
                    f"known {known} are out of order"
                )
            if not sequence.computed <= slots == len(sequence.table) * self.options.page_size:
                raise EngineError(
                    f"request {sequence.request.id}: {sequence.computed} computed tokens, {slots} slots and "
                    f"{len(sequence.table)} blocks do not belong together"
                )
