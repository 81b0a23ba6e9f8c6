"""Where the ranks of an engine live: here, one after the other; or in processes (`processes.ProcessExecutor`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from .. import threads
from ..comm import SoloCommunicator, Traffic, VirtualWorld
from ..kernels import KernelRegistry
from ..weights.loader import LoadReport
from ..weights.parameters import ShardSlice
from ..weights.shards import ShardPlan
from .memory import RankMemory
from .plan import RankAnswer, StepPlan
from .requests import EngineOptions
from .worker import Worker

__all__ = ["Executor", "LocalExecutor"]


class Executor(ABC):
    """All ranks of one engine, as its controller sees them."""

    kernels: KernelRegistry
    """Ops of the controller: sampling."""

    @property
    def registries(self) -> Sequence[KernelRegistry]:
        """Ops of the controller and of every rank in this process: the seam for wrapping them."""
        return (self.kernels,)

    @property
    def running(self) -> tuple[int, int | None]:
        """(rank, layer) being computed in this process at this moment; the layer is None outside the layers."""
        return 0, self.kernels.layer

    @abstractmethod
    def step(self, plan: StepPlan) -> list[RankAnswer]:
        """Compute one step on all ranks; answers by rank. Raises EngineError where ranks failed or disagreed."""

    @abstractmethod
    def reports(self) -> list[LoadReport]:
        """What each rank loaded."""

    @abstractmethod
    def placed(self) -> list[dict[str, ShardSlice]]:
        """For each rank, parameter -> the part that was written there."""

    @abstractmethod
    def memory(self) -> list[RankMemory]:
        """What each rank has allocated."""

    @abstractmethod
    def traffic(self) -> list[dict[tuple[str, str], Traffic]]:
        """For each rank, (op, axis of the group) -> sums since the engine was opened."""

    @abstractmethod
    def seconds(self) -> float:
        """Time of all ranks together that steps have taken since the engine was opened; 0 where there is one rank."""

    @abstractmethod
    def bubble(self) -> float:
        """Share of the ranks' time since the engine was opened in which they did not compute."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Safe to call twice."""


class LocalExecutor(Executor):
    """All ranks in this process: one directly, several as virtual ranks that take turns."""

    def __init__(self, directory: str | Path, plan: ShardPlan, options: EngineOptions) -> None:
        self.world = VirtualWorld(plan.mesh) if plan.mesh.layout.world > 1 else None
        ends = self.world.communicators if self.world is not None else [SoloCommunicator()]
        self.workers: Sequence[Worker] = [Worker.open(directory, plan, options, end) for end in ends]
        self.kernels = self.workers[0].kernels

    @property
    def registries(self) -> Sequence[KernelRegistry]:
        return tuple(worker.kernels for worker in self.workers)

    @property
    def running(self) -> tuple[int, int | None]:
        rank = self.world.current if self.world is not None else 0
        return rank, self.workers[rank].kernels.layer

    def step(self, plan: StepPlan) -> list[RankAnswer]:
        if self.world is None:
            return [self.workers[0].step(plan)]
        # One rank computes at a time; a pool of threads for each rank would only be in each other's way.
        with threads.limited(1):
            return self.world.run(lambda rank: self.workers[rank].step(plan))

    def reports(self) -> list[LoadReport]:
        return [worker.report for worker in self.workers]

    def placed(self) -> list[dict[str, ShardSlice]]:
        return [worker.placed for worker in self.workers]

    def memory(self) -> list[RankMemory]:
        return [worker.memory() for worker in self.workers]

    def traffic(self) -> list[dict[tuple[str, str], Traffic]]:
        return [worker.comm.ledger.traffic() for worker in self.workers]

    def seconds(self) -> float:
        return sum(self.world.clocks) if self.world is not None else 0.0

    def bubble(self) -> float:
        if self.world is None or not max(self.world.clocks):
            return 0.0
        return 1 - sum(self.world.busy) / (len(self.workers) * max(self.world.clocks))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
