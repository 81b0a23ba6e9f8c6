"""One process a rank: starts them, tells them each step, and ends them all as soon as one of them fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from ..comm import Traffic
from ..comm.board import Board, Sight
from ..errors import CheckpointError, ConfigError, EngineError, LayoutError
from ..weights.loader import LoadReport
from ..weights.parameters import ShardSlice
from ..weights.shards import ShardPlan
from . import watch
from .executor import Executor
from .memory import RankMemory
from .nursery import Nursery
from .plan import RankAnswer, StepPlan
from .rank import PATIENCE
from .requests import EngineOptions
from .wire import Failed, Garbage, Open, RankState, Ready, Stepped, dumps, loads
from .worker import kernels_of

__all__ = ["ProcessExecutor"]

M = TypeVar("M", Ready, Stepped)
_POLL = 0.1
_GRACE = 1.0
"""Seconds in which others may still arrive where a dead rank is missed, and an exit status become known."""
_REFUSALS = {one.__name__: one for one in (CheckpointError, ConfigError, LayoutError, EngineError)}


class ProcessExecutor(Executor):
    """The ranks of ``plan`` as processes of this machine, connected by torch.distributed (gloo) on 127.0.0.1.

    They are forked from ``nursery``, or from one of the executor's own, which ends with it. Every method that talks
    to ranks raises EngineError where a rank died, stands still for ``options.timeout`` seconds, disagrees with
    others or sends nonsense: it names the rank and the collective and shows what every rank did last. All ranks are
    ended then, and the engine must be opened again.
    """

    def __init__(
        self, directory: str | Path, plan: ShardPlan, options: EngineOptions, nursery: Nursery | None = None
    ) -> None:
        self.kernels = kernels_of(options)
        self._mesh = plan.mesh
        self._timeout = options.timeout
        self._broken = ""
        self._connections: list[Connection] = []
        self.pids: list[int] = []
        """Of the rank processes, by rank; empty once they are ended."""
        self._states: list[RankState] = []
        self._own = nursery is None
        self._nursery = nursery or Nursery()
        self._board = Board.create(plan.mesh.layout.world)
        try:
            ready = self._open(str(Path(directory).absolute()), options)
        except BaseException:
            self.close()
            raise
        self._reports = [one.report for one in ready]
        self._placed = [one.placed for one in ready]

    # Executor -------------------------------------------------------------------------------------------------------

    def step(self, plan: StepPlan) -> list[RankAnswer]:
        if self._broken or not self.pids:
            raise EngineError(f"the ranks were ended ({self._broken or 'closed'}); open the engine again")
        try:
            self._tell([dumps(plan)] * len(self.pids))
            return [one.answer for one in self._hear(Stepped)]
        except BaseException:
            self._end()
            raise

    def reports(self) -> list[LoadReport]:
        return self._reports

    def placed(self) -> list[dict[str, ShardSlice]]:
        return self._placed

    def memory(self) -> list[RankMemory]:
        return [state.memory for state in self._states]

    def traffic(self) -> list[dict[tuple[str, str], Traffic]]:
        return [state.traffic for state in self._states]

    def seconds(self) -> float:
        return sum(state.wall for state in self._states) if len(self._states) > 1 else 0.0

    def bubble(self) -> float:
        longest = max(state.wall for state in self._states)
        busy = sum(state.wall - state.waited for state in self._states)
        return 1 - busy / (len(self._states) * longest) if longest else 0.0

    def close(self) -> None:
        self._end()
        if self._own:
            self._nursery.close()
        self._board.close()

    # Start and end --------------------------------------------------------------------------------------------------

    def _open(self, directory: str, options: EngineOptions) -> list[Ready]:
        world = self._mesh.layout.world
        listener = socket.create_server(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        # The store is where ranks learn of each other's addresses; nobody needs it, or its port, later.
        bound = timedelta(seconds=PATIENCE * options.timeout)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, None, True, timeout=bound, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        try:
            for rank in range(world):
                self._fork(rank, world)
            order = dumps(Open(directory, options, port, max(1, (options.threads or _cores()) // world)))
            self._tell([order] * world)
            return self._hear(Ready)
        finally:
            # An error keeps this frame, and with it the store would keep its port.
            del store

    def _fork(self, rank: int, world: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # A stopped rank neither reads nor writes: without a bound a full socket would stop us too.
            moment = struct.pack("ll", int(self._timeout), int(self._timeout % 1 * 1e6))
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, moment)
            self._board.beat(rank)
            self.pids.append(self._nursery.fork(rank, world, theirs.fileno(), self._board.descriptor))
            self._connections.append(Connection(ours.detach()))

    def _end(self) -> None:
        pids, self.pids = self.pids, []
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
        if pids:
            try:
                self._nursery.end(pids)
            except EngineError:  # it cannot be asked any more; without it no rank lives on
                self._nursery.close()

    # Talking --------------------------------------------------------------------------------------------------------

    def _tell(self, messages: list[bytes]) -> None:
        for rank, message in enumerate(messages):
            try:
                self._connections[rank].send_bytes(message)
            except BlockingIOError:
                raise self._silent(rank) from None
            except OSError:
                raise self._dead(rank, range(len(self.pids))) from None

    def _hear(self, kind: type[M]) -> list[M]:
        """One message of every rank, in their order."""
        found: dict[int, M] = {}
        looked = time.monotonic()
        while len(found) < len(self.pids):
            unfinished = [rank for rank in range(len(self.pids)) if rank not in found]
            for ready in wait([self._connections[rank] for rank in unfinished], _POLL):
                rank = next(one for one in unfinished if self._connections[one] is ready)
                found[rank] = self._receive(rank, kind, unfinished)
            if time.monotonic() - looked > _POLL:
                looked = time.monotonic()
                self._check([rank for rank in unfinished if rank not in found])
        states = [found[rank].state for rank in range(len(self.pids))]
        self._states = states
        return [found[rank] for rank in range(len(self.pids))]

    def _receive(self, rank: int, kind: type[M], unfinished: list[int]) -> M:
        try:
            message = loads(self._connections[rank].recv_bytes())
        except BlockingIOError:
            raise self._silent(rank) from None
        except Garbage as problem:
            where = watch.around(self._mesh, self._sights(), rank, unfinished)
            raise self._fail(rank, f"sent {problem}, {where}") from None
        except (EOFError, OSError):
            raise self._dead(rank, unfinished) from None
        if isinstance(message, kind):
            return message
        if not isinstance(message, Failed):
            raise self._fail(rank, f"sent {type(message).__name__} where {kind.__name__} was due")
        if message.lost:
            self._find_dead(unfinished)
        if kind is Ready and message.kind in _REFUSALS and not message.lost:
            raise _REFUSALS[message.kind](message.message)
        known = message.kind in _REFUSALS or message.lost
        raise self._fail(rank, message.message if known else f"failed: {message.kind}: {message.message}")

    # When something is wrong ----------------------------------------------------------------------------------------

    def _sights(self) -> dict[int, Sight]:
        return {rank: self._board.read(rank) for rank in range(self._mesh.layout.world)}

    def _check(self, unfinished: list[int]) -> None:
        """Raise where ranks stand still."""
        now, sights = time.monotonic(), self._sights()
        verdict = watch.stuck(
            self._mesh, sights, unfinished, now, self._timeout, lambda r: "R" in _states(self.pids[r])
        )
        if verdict is not None:
            rank, what = verdict
            raise self._fail(rank, f"{_condition(self.pids[rank])}{what}")

    def _silent(self, rank: int) -> EngineError:
        return self._fail(rank, f"{_condition(self.pids[rank])}neither reads nor writes for {self._timeout:g} s")

    def _find_dead(self, unfinished: list[int]) -> None:
        """A rank lost another: raise for that one, if it is dead indeed."""
        until = time.monotonic() + _GRACE
        while time.monotonic() < until:
            self._look_at_nursery()
            for rank in range(len(self.pids)):
                if self._status(rank) is not None:
                    raise self._dead(rank, unfinished)
            time.sleep(_POLL / 4)

    def _dead(self, rank: int, unfinished: Iterable[int]) -> EngineError:
        others = [other for other in unfinished if other != rank]
        until = time.monotonic() + _GRACE
        while True:
            self._look_at_nursery()
            code, sights = self._status(rank), self._sights()
            missed = sights[rank].pending or any(sights[other].awaited == rank for other in others) or not others
            if time.monotonic() > until or (code is not None and missed):
                break
            time.sleep(_POLL / 4)
        return self._fail(rank, f"{_ending(code)} {watch.around(self._mesh, sights, rank, others)}")

    def _status(self, rank: int) -> int | None:
        try:
            return self._nursery.status(self.pids[rank])
        except EngineError:  # the nursery died, and its ranks with it
            self._look_at_nursery()
            return None

    def _look_at_nursery(self) -> None:
        """Raise where it ended: its ranks ended with it, and none of them is to blame."""
        code = self._nursery.ended
        if code is None:
            return
        what = f"the process that forks ranks (pid {self._nursery.pid}) {_ending(code)}, and every rank with it"
        text = watch.report(self._mesh, self._sights(), None, what)
        self._broken = text.splitlines()[0]
        raise EngineError(text)

    def _fail(self, rank: int, what: str) -> EngineError:
        text = watch.report(self._mesh, self._sights(), rank, what)
        self._broken = text.splitlines()[0]
        return EngineError(text)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its end"
    if code >= 0:
        return f"exited with status {code}"
    names = {one.value: one.name for one in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"


def _condition(pid: int) -> str:
    """``is stopped and `` for a process that a signal stopped; nothing where that cannot be told."""
    return "is stopped and " if {"T", "t"} & set(_states(pid)) else ""


def _states(pid: int) -> str:
    """One letter for each thread, as in proc(5): R runs or would run, S sleeps, T is stopped; empty without /proc."""
    found = ""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            found += thread.read_text().rpartition(")")[2].split()[0]
    return found
