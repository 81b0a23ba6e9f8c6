"""Which clock tells what a target costs, and what the machine did meanwhile.

CPU time is the better clock by far on a shared machine, and it means something only where the target computes in the
measuring process and in one thread: it misses what a server does, and what threads wait for. Both are seen, not said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Clock",
    "Facts",
    "Machine",
    "choose_clock",
    "idle_ticks",
    "machine",
    "own_cores",
    "quietest_core",
    "steal_since",
]

_MAIN_SHARE = 0.95
"""Share of a process's CPU time that its main thread has where there is one thread that computes."""


@dataclass(frozen=True)
class Facts:
    """What a side was seen to do while it warmed up."""

    kind: str
    """engine or endpoint, as the target says."""
    device: str
    """cpu where the target does not say."""
    children: int
    """Processes that it started."""
    cpu: int
    """Nanoseconds of CPU time of the process."""
    thread: int
    """Of these, nanoseconds of its main thread."""
    waits: int
    """How often it gave up its core to wait for somebody (a neighbour that takes the core is no such wait)."""
    runs: int
    """Runs of a load in which that was seen."""

    @classmethod
    def of(cls, raw: Mapping[str, object]) -> Facts:
        """From what a side process sent."""
        numbers = {name: int(str(raw[name])) for name in ("children", "cpu", "thread", "waits", "runs")}
        return cls(kind=str(raw["kind"]), device=str(raw["device"]), **numbers)

    def against_cpu(self) -> str:
        """Why CPU time does not tell the cost of this side; "" where it does."""
        if self.kind != "engine":
            return "it is a server"
        if self.device != "cpu":
            return f"it computes on {self.device}"
        if self.children:
            return f"it has {self.children} processes of its own"
        if self.waits >= self.runs:
            return f"it waits for others ({self.waits} times in {self.runs} runs)"
        if self.thread < _MAIN_SHARE * self.cpu:
            return "several threads compute"
        return ""


@dataclass(frozen=True)
class Clock:
    """The clock that gates a benchmark, and why it is that one."""

    name: str
    """cpu or wall."""
    why: str

    def __str__(self) -> str:
        return f"{self.name} time ({self.why})"


def choose_clock(a: Facts, b: Facts) -> Clock:
    """CPU time where it tells the cost of both sides, else interleaved wall time."""
    for side, facts in (("the baseline", a), ("the target", b)):
        if reason := facts.against_cpu():
            return Clock("wall", f"{side}: {reason}")
    return Clock("cpu", "one thread of the measuring process computes")


@dataclass(frozen=True)
class Machine:
    """How busy the machine was at one moment."""

    load: float
    """Processes that ran or waited, over the last minute."""
    cores: int
    steal: int
    total: int
    """Ticks of all cores since boot: taken by the host, and altogether (0 where the system does not say)."""

    def __str__(self) -> str:
        return f"load average {self.load:.1f} on {self.cores} cores"


def machine(stat: Path = Path("/proc/stat")) -> Machine:
    """The machine now."""
    try:
        ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        ticks = []
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    steal = ticks[7] if len(ticks) == 8 else 0
    return Machine(load, os.cpu_count() or 1, steal, sum(ticks))


def steal_since(before: Machine, after: Machine) -> float:
    """Share of the machine's time between two moments that its host gave to others."""
    passed = after.total - before.total
    return (after.steal - before.steal) / passed if passed > 0 else 0.0


def own_cores() -> Sequence[int]:
    """Cores that this process may run on, in order; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()


def idle_ticks(stat: Path = Path("/proc/stat")) -> dict[int, int]:
    """Core -> ticks that it has idled since boot; empty where the system does not say."""
    found = {}
    try:
        for line in stat.read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name[3:].isdigit():
                found[int(name[3:])] = int(ticks[3])
    except (OSError, ValueError, IndexError):
        return {}
    return found


def quietest_core(cores: Sequence[int], before: Mapping[int, int], after: Mapping[int, int], turn: int) -> int | None:
    """The core that idled most between two moments; of equals the next one by ``turn``. None where there is none."""
    if not cores:
        return None
    idled = {core: after.get(core, 0) - before.get(core, 0) for core in cores}
    most = [core for core in cores if idled[core] == max(idled.values())]
    return most[turn % len(most)]
