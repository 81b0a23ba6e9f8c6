"""All ranks in one process: one thread each, of which exactly one runs at a time.

The thread that holds the baton runs until it must wait for others, then hands it to the next rank that can go on,
in rank order. What happens is therefore a function of the program alone. When no rank can go on, that is a
deadlock and is reported at once, with what every rank did last; nothing ever waits for a timeout.

Each rank has a clock of its own: it advances by the processor time that the rank takes, and members of a group leave
a collective at the latest of their arrival times. Clocks tell how long ranks would wait for each other if each had
a processor of its own (Lamport 1978).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ..errors import EngineError
from ..mesh import Mesh
from .communicator import Call, Communicator, Shape

__all__ = ["VirtualCommunicator", "VirtualWorld"]

T = TypeVar("T")
_READY, _WAITING, _DONE = "ready", "waiting", "done"


class _Stopped(Exception):
    """Unwinds the thread of a rank after another one failed."""


@dataclass
class _Meeting:
    """One collective of one group, while its members arrive."""

    call: Call
    first: int
    parts: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)
    left: int = 0


class VirtualWorld:
    """The ranks of ``mesh``; ``communicators[rank]`` is each one's end."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        size = mesh.layout.world
        self.communicators = [VirtualCommunicator(self, rank) for rank in range(size)]
        self.clocks = [0.0] * size
        """Seconds of each rank's own time."""
        self.busy = [0.0] * size
        """Of those, seconds in which it computed."""
        self.current = 0
        """The rank that runs."""
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._finished = threading.Semaphore(0)
        self._marks = [0.0] * size
        self._reset()

    def _reset(self) -> None:
        size = self.mesh.layout.world
        self._states = [_READY] * size
        self._failure: tuple[int, BaseException] | None = None
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._met: list[dict[tuple[int, ...], int]] = [{} for _ in range(size)]
        self._mail: dict[tuple[int, int], deque[tuple[torch.Tensor, float]]] = {}
        self._awaited: dict[int, int] = {}

    def run(self, task: Callable[[int], T]) -> list[T]:
        """``task(rank)`` on every rank together; results by rank.

        Raises EngineError where a rank failed or ranks could not meet: it names the rank, the collective and every
        rank's last calls.
        """
        self._reset()
        results: dict[int, T] = {}
        threads = [
            threading.Thread(target=self._body, args=(rank, task, results), name=f"adapt-rank-{rank}", daemon=True)
            for rank in range(len(self._states))
        ]
        for thread in threads:
            thread.start()
        self._give(0)
        try:
            self._finished.acquire()
        except BaseException as interrupted:
            # Ranks stop where they next meet; the one that computes now cannot be stopped before.
            self._fail(self.current, interrupted)
            self._finished.acquire()
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._report(*self._failure) from self._failure[1]
        return [results[rank] for rank in range(len(threads))]

    def _body(self, rank: int, task: Callable[[int], T], results: dict[int, T]) -> None:
        self._turns[rank].acquire()
        self._marks[rank] = time.thread_time()
        try:
            if self._failure is None:
                results[rank] = task(rank)
        except _Stopped:
            pass
        except BaseException as error:
            self._fail(rank, error)
        self._tick(rank)
        self._states[rank] = _DONE
        self._pass_on(rank)

    def _report(self, rank: int, error: BaseException) -> EngineError:
        tails = "\n".join(f"  {end.name}: {end.ledger.tail()}" for end in self.communicators)
        step = self.communicators[rank].ledger.step
        what = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        name = self.communicators[rank].name
        head = what if what.startswith(name) else f"{name}: {what}"
        for end in self.communicators:
            end.ledger.pending = ""
        return EngineError(f"step {step}: {head}\n{tails}")

    # The baton ------------------------------------------------------------------------------------------------------

    def _give(self, rank: int) -> None:
        self.current = rank
        self._turns[rank].release()

    def _pass_on(self, rank: int) -> None:
        """Hand the baton to the next rank in order that can go on; the end of the run where all are done."""
        order = [(rank + step) % len(self._states) for step in range(1, len(self._states) + 1)]
        ready = next((other for other in order if self._states[other] == _READY), None)
        if ready is None and any(state == _WAITING for state in self._states):
            stuck = next(other for other in order if self._states[other] == _WAITING)
            self._fail(stuck, EngineError(self._deadlock(stuck)))
            ready = next(other for other in order if self._states[other] == _READY)
        if ready is None:
            self._finished.release()
        else:
            self._give(ready)

    def _deadlock(self, stuck: int) -> str:
        pending = self.communicators[stuck].ledger.pending
        missing = [
            f"{self.communicators[other].name} "
            + ("has finished" if self._states[other] == _DONE else f"is in {self.communicators[other].ledger.pending}")
            for other in self._missing(stuck)
        ]
        return f"{self.communicators[stuck].name} waits for ever in {pending}: {', '.join(missing)}"

    def _missing(self, rank: int) -> list[int]:
        if rank in self._awaited:
            return [self._awaited[rank]]
        here = [meeting for meeting in self._meetings.values() if rank in meeting.parts and not meeting.left]
        return [other for meeting in here for other in meeting.call.group.ranks if other not in meeting.parts]

    def _fail(self, rank: int, error: BaseException) -> None:
        if self._failure is None:
            self._failure = rank, error
        self._states = [_READY if state == _WAITING else state for state in self._states]

    def _tick(self, rank: int) -> None:
        now = time.thread_time()
        self.clocks[rank] += now - self._marks[rank]
        self.busy[rank] += now - self._marks[rank]
        self._marks[rank] = now

    def _wait(self, rank: int) -> None:
        self._states[rank] = _WAITING
        self._pass_on(rank)
        self._turns[rank].acquire()
        self._marks[rank] = time.thread_time()
        if self._failure is not None:
            raise _Stopped

    # Called by communicators, by the rank that holds the baton ------------------------------------------------------

    def time_of(self, rank: int) -> float:
        """The rank's own clock, now."""
        if self.current == rank:
            self._tick(rank)
        return self.clocks[rank]

    def exchange(self, rank: int, call: Call, outgoing: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Bring parts to the group's next meeting; returns what every member brought for this rank."""
        if self._failure is not None:
            raise _Stopped
        self._tick(rank)
        ranks = call.group.ranks
        number = self._met[rank][ranks] = self._met[rank].get(ranks, 0) + 1
        meeting = self._meetings.setdefault((ranks, number), _Meeting(call, rank))
        if meeting.call != call:
            first = self.communicators[meeting.first].name
            raise EngineError(f"{self.communicators[rank].name} calls {call} where {first} called {meeting.call}")
        meeting.parts[rank] = outgoing
        if len(meeting.parts) < len(ranks):
            self._wait(rank)
        else:
            latest = max(self.clocks[other] for other in ranks)
            for other in ranks:
                self.clocks[other] = latest
                self._states[other] = _READY
        place = call.group.index(rank)
        received = [meeting.parts[other][place] for other in ranks]
        meeting.left += 1
        if meeting.left == len(ranks):
            del self._meetings[ranks, number]
        return received

    def post(self, rank: int, to: int, tensor: torch.Tensor) -> None:
        """Leave a tensor for another rank."""
        self._tick(rank)
        self._mail.setdefault((rank, to), deque()).append((tensor, self.clocks[rank]))
        if self._awaited.get(to) == rank:
            self._states[to] = _READY

    def collect(self, rank: int, source: int) -> torch.Tensor:
        """The oldest tensor that ``source`` left for this rank; waits for it."""
        if self._failure is not None:
            raise _Stopped
        self._tick(rank)
        box = self._mail.setdefault((source, rank), deque())
        if not box:
            self._awaited[rank] = source
            self._wait(rank)
            del self._awaited[rank]
        tensor, sent = box.popleft()
        self.clocks[rank] = max(self.clocks[rank], sent)
        return tensor


class VirtualCommunicator(Communicator):
    """One rank of a `VirtualWorld`. Tensors are copied when they are sent, as between processes."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        super().__init__(rank, world.mesh.layout.world, world.mesh.name(rank))
        self._world = world

    def clock(self) -> float:
        return self._world.time_of(self.rank)

    def _exchange(
        self, call: Call, outgoing: Sequence[torch.Tensor | None], incoming: Sequence[Shape | None]
    ) -> list[torch.Tensor | None]:
        own = call.group.index(self.rank)
        copies: dict[int, torch.Tensor] = {}
        parts: list[torch.Tensor | None] = []
        for place, part in enumerate(outgoing):
            if part is None or place == own:
                parts.append(None)
            else:
                parts.append(copies.setdefault(id(part), part.clone()))
        return self._world.exchange(self.rank, call, parts)

    def _transfer(self, call: Call, peer: int, tensor: torch.Tensor | None, shape: Shape | None) -> torch.Tensor | None:
        if tensor is not None:
            self._world.post(self.rank, peer, tensor.clone())
            return None
        return self._world.collect(self.rank, peer)
