"""What a rank process does: meet the others, load its part, compute the steps it is told, until nobody listens."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection

from .. import threads
from ..comm.board import Board
from ..comm.distributed import DistributedCommunicator, RankLost, join
from ..errors import CheckpointError
from ..families import read_config, spec_from_config
from .plan import StepPlan
from .wire import Failed, Open, RankState, Ready, Stepped, dumps, loads
from .worker import Worker, plan_of

__all__ = ["BEAT", "PATIENCE", "serve"]

BEAT = 0.2
"""Seconds between two signs of life."""
PATIENCE = 20
"""Timeouts after which a rank gives up by itself. The controller, who sees all ranks, tells slow from stuck before."""


def serve(rank: int, world: int, connection: Connection, descriptor: int) -> None:
    """Answer the controller at the other end of ``connection`` until it closes it.

    ``descriptor``: the `Board` of all ranks.
    """
    board = Board(descriptor, world)
    threading.Thread(target=_beat, args=(board, rank), name="adapt-beat", daemon=True).start()
    served: _Rank | None = None
    try:
        while True:
            order = loads(connection.recv_bytes())
            try:
                if isinstance(order, Open):
                    served = _Rank(rank, order, board)
                    answer: object = served.ready()
                elif isinstance(order, StepPlan) and served is not None:
                    answer = served.step(order)
                else:
                    answer = Failed("EngineError", f"rank {rank}: cannot follow {type(order).__name__} now")
            except Exception as problem:
                answer = Failed(type(problem).__name__, str(problem), isinstance(problem, RankLost))
            connection.send_bytes(dumps(answer))
    except (EOFError, ConnectionError):
        return  # the controller is gone


def _beat(board: Board, rank: int) -> None:
    while True:
        board.beat(rank)
        time.sleep(BEAT)


class _Rank:
    """The worker of this process."""

    def __init__(self, rank: int, order: Open, board: Board) -> None:
        threads.use(order.threads)
        options = order.options
        spec = spec_from_config(read_config(order.directory))
        plan = plan_of(spec, options)
        self._comm: DistributedCommunicator = join(plan.mesh, rank, order.port, PATIENCE * options.timeout, board)
        try:
            self._worker = Worker.open(order.directory, plan, options, self._comm)
        except OSError as problem:
            name = problem.filename or order.directory
            raise CheckpointError(f"{name}: cannot be read ({problem.strerror})") from None
        self._wall = 0.0

    def ready(self) -> Ready:
        return Ready(self._worker.report, self._worker.placed, self._state())

    def step(self, plan: StepPlan) -> Stepped:
        started = time.perf_counter()
        answer = self._worker.step(plan)
        self._comm.flush()
        self._wall += time.perf_counter() - started
        return Stepped(answer, self._state())

    def _state(self) -> RankState:
        traffic = self._comm.ledger.traffic()
        waited = sum(sums.seconds for sums in traffic.values())
        return RankState(self._worker.memory(), traffic, self._wall, waited)
