"""Blocks of the paged cache, counted by reference. A block is ``page_size`` token slots in every layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..errors import EngineError

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out block numbers. A freed block that carries a cached prefix stays reusable until evicted.

    States of a block: free, in use (count > 0), or idle (count 0, contents kept, oldest evicted first).
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._counts = [0] * blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self.evicted: list[int] = []
        """Blocks whose contents were given up since the owner last drained this list."""
        self.peak = 0
        """Most blocks that were in use at once."""

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still give, evicting idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Blocks with at least one user."""
        return self.blocks - self.available

    def is_used(self, block: int) -> bool:
        return self._counts[block] > 0

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def allocate(self) -> int:
        """A block with count 1 and unspecified contents. Raises EngineError where none is left."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._kept.discard(block)
            self.evicted.append(block)
        else:
            raise EngineError(f"KV pool exhausted: all {self.blocks} blocks are in use; raise kv_tokens")
        self._counts[block] = 1
        self.peak = max(self.peak, self.in_use)
        return block

    def share(self, block: int) -> None:
        """One more user of a block whose contents are valid. Raises EngineError for a free block, which has none."""
        if self._counts[block] <= 0 and block not in self._idle:
            raise EngineError(f"KV block {block} is free: nothing in it can be shared")
        self._idle.pop(block, None)
        self._counts[block] += 1
        self.peak = max(self.peak, self.in_use)

    def keep(self, block: int) -> None:
        """The block carries a cached prefix: when its last user leaves, it becomes idle instead of free."""
        self._kept.add(block)

    def free(self, block: int) -> None:
        """One user less."""
        if self._counts[block] <= 0:
            raise EngineError(f"KV block {block} freed more often than it was taken")
        self._counts[block] -= 1
        if self._counts[block] == 0:
            if block in self._kept:
                self._idle[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Counts equal the number of tables that hold each block, and every block is in exactly one state.

        Raises EngineError naming the block.
        """
        held = [0] * self.blocks
        for table in tables:
            for block in table:
                held[block] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise EngineError("KV pool: a block is twice on the free list")
        for block in range(self.blocks):
            if held[block] != self._counts[block]:
                raise EngineError(f"KV block {block}: count {self._counts[block]} but {held[block]} sequences hold it")
            states = (block in free) + (block in self._idle) + (self._counts[block] > 0)
            if states != 1:
                raise EngineError(f"KV block {block} is in {states} states at once (free, idle, in use); must be one")
            if block in self._idle and block not in self._kept:
                raise EngineError(f"KV block {block} is idle but carries no cached prefix")
