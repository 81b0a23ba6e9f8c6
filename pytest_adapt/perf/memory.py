"""The largest resident size of some processes since a mark was set (Linux's /proc; elsewhere nothing is shown)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["own_peak", "peak_resident", "return_memory", "tree_peak"]

_PROC = Path("/proc")


def return_memory() -> None:
    """Give freed pages back to the system. glibc keeps what a model took in the arena of the thread that loaded it, and
    a run that opens a model ten times would hold it several times over; other C libraries return it by themselves."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def own_peak(reset: bool) -> int | None:
    """The high-water mark of this process since the last reset; see `peak_resident`."""
    if reset:
        return_memory()  # what the allocator keeps for later would hide the next use of it
    return peak_resident((os.getpid(),), reset)


def tree_peak(pid: int, reset: bool) -> int | None:
    """The same for a process and its descendants."""
    return peak_resident(_tree(pid), reset)


def peak_resident(pids: Sequence[int], reset: bool) -> int | None:
    """Sum of the high-water marks of the processes, in bytes; None where the system does not tell.

    Each process has its own peak, at its own time: for several, the sum is an upper bound. With ``reset`` the marks
    are first set to the present sizes, and the answer is None where the system does not allow that.
    """
    if reset and not _reset(pids):
        return None
    found = [_status(pid, "VmHWM") for pid in pids]
    known = [size for size in found if size is not None]
    return sum(known) if known else None


def _reset(pids: Sequence[int]) -> bool:
    try:
        for pid in pids:
            (_PROC / str(pid) / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _tree(pid: int) -> tuple[int, ...]:
    """A process and its descendants, itself first; those that ended meanwhile are left out."""
    parents: dict[int, int] = {}
    for entry in _PROC.glob("[0-9]*"):
        try:
            # The name in parentheses may hold spaces; the parent is the second field after it.
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return tuple(found)


def _status(pid: int, name: str) -> int | None:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith(f"{name}:")), "")
    return int(line.split()[1]) * 1024 if line else None
