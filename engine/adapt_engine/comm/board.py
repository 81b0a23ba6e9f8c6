"""What ranks in processes show of themselves: a page of shared memory each, readable when they are stuck or dead.

The memory has no name: it goes away with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass

from .ledger import Ledger

__all__ = ["Board", "Sight"]

_SLOT = 4096
_BEAT = struct.Struct("<d")
_AWAITED = struct.Struct("<q")
_STATE = struct.Struct("<dqI")
_AT_AWAITED, _AT_STATE, _AT_TEXT = 8, 16, 64
_LONGEST = (_SLOT - _AT_TEXT) // 2 - 1


@dataclass(frozen=True)
class Sight:
    """One rank, as its page shows it. Times are `time.monotonic` of this machine."""

    beat: float
    """Last sign of life; beats come while a rank computes or waits, not while its process is stopped."""
    changed: float
    """Last time that it entered or left a collective."""
    awaited: int
    """Rank that it waits for; -1 while it computes."""
    step: int
    pending: str
    """The collective that it is in; empty while it computes."""
    tail: str
    """Its last collectives, as `Ledger.tail`."""


class Board:
    """Pages of ``ranks`` ranks. Each rank writes its own; anyone reads."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.descriptor = descriptor
        """File descriptor, to be handed to rank processes; owned by the board."""
        self._memory = mmap.mmap(descriptor, ranks * _SLOT)

    @classmethod
    def create(cls, ranks: int) -> Board:
        """New pages, empty, with a first beat for every rank."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("adapt-ranks")
        else:
            with tempfile.TemporaryFile() as unnamed:
                descriptor = os.dup(unnamed.fileno())
        os.truncate(descriptor, ranks * _SLOT)
        board = cls(descriptor, ranks)
        for rank in range(ranks):
            board.write(rank, Ledger())
            board.beat(rank)
        return board

    def beat(self, rank: int) -> None:
        """A sign of life, now."""
        _BEAT.pack_into(self._memory, rank * _SLOT, time.monotonic())

    def wait_for(self, rank: int, awaited: int) -> None:
        """``rank`` waits for ``awaited``; -1: it no longer waits."""
        _AWAITED.pack_into(self._memory, rank * _SLOT + _AT_AWAITED, awaited)

    def write(self, rank: int, ledger: Ledger) -> None:
        """The ledger's last calls, its step and the call that it is in."""
        pending, tail = (text.encode()[:_LONGEST] for text in (ledger.pending, ledger.tail()))
        text = pending + b"\0" + tail
        start = rank * _SLOT
        self._memory[start + _AT_TEXT : start + _AT_TEXT + len(text)] = text
        _STATE.pack_into(self._memory, start + _AT_STATE, time.monotonic(), ledger.step, len(text))
        self.wait_for(rank, -1)

    def read(self, rank: int) -> Sight:
        """What ``rank`` shows; a rank that died while it wrote may leave a garbled text."""
        start = rank * _SLOT
        (beat,) = _BEAT.unpack_from(self._memory, start)
        (awaited,) = _AWAITED.unpack_from(self._memory, start + _AT_AWAITED)
        changed, step, length = _STATE.unpack_from(self._memory, start + _AT_STATE)
        text = self._memory[start + _AT_TEXT : start + min(_SLOT, _AT_TEXT + length)]
        pending, _, tail = text.decode(errors="replace").partition("\0")
        return Sight(beat, changed, awaited, step, pending, tail)

    def close(self) -> None:
        """Unmap; other processes keep theirs. Safe to call twice."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.descriptor)
