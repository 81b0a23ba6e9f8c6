"""Blocks of the paged cache, counted by reference. A block is ``page_size`` token slots in every layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..errors import EngineError

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out block numbers. A freed block that carries a cached prefix stays reusable until evicted.

    States of a block: free, in use (count > 0), or idle (count 0, contents kept, oldest evicted first). Where
    ``owners`` ranks share the pages of a sequence in turn, block b lies on rank b % owners, and page p of a sequence
    takes a block of rank p % owners.
    """

    def __init__(self, blocks: int, owners: int = 1) -> None:
        if blocks % owners:
            raise EngineError(f"KV pool: {blocks} blocks do not divide among {owners} ranks")
        self.blocks = blocks
        self.owners = owners
        self._free = [list(range(blocks - owners + owner, -1, -owners)) for owner in range(owners)]
        self._counts = [0] * blocks
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(owners)]
        self._kept: set[int] = set()
        self.evicted: list[int] = []
        """Blocks whose contents were given up since the owner last drained this list."""
        self.peak = 0
        """Most blocks that were in use at once."""

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still give, evicting idle ones."""
        return sum(self.available_to)

    @property
    def available_to(self) -> list[int]:
        """Those blocks by owner."""
        return [len(free) + len(idle) for free, idle in zip(self._free, self._idle, strict=True)]

    @property
    def in_use(self) -> int:
        """Blocks with at least one user."""
        return self.blocks - self.available

    def is_used(self, block: int) -> bool:
        return self._counts[block] > 0

    def is_idle(self, block: int) -> bool:
        return block in self._idle[block % self.owners]

    def allocate(self, page: int = 0) -> int:
        """A block for page ``page`` of a sequence, with count 1 and unspecified contents.

        Raises EngineError where none is left.
        """
        owner = page % self.owners
        if self._free[owner]:
            block = self._free[owner].pop()
        elif self._idle[owner]:
            block, _ = self._idle[owner].popitem(last=False)
            self._kept.discard(block)
            self.evicted.append(block)
        else:
            raise EngineError(f"KV pool exhausted: all {self.blocks} blocks are in use; raise kv_tokens")
        self._counts[block] = 1
        self.peak = max(self.peak, self.in_use)
        return block

    def share(self, block: int) -> None:
        """One more user of a block whose contents are valid. Raises EngineError for a free block, which has none."""
        if self._counts[block] <= 0 and not self.is_idle(block):
            raise EngineError(f"KV block {block} is free: nothing in it can be shared")
        self._idle[block % self.owners].pop(block, None)
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
                self._idle[block % self.owners][block] = None
            else:
                self._free[block % self.owners].append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Counts equal the number of tables that hold each block, and every block is in exactly one state.

        Raises EngineError naming the block.
        """
        held = [0] * self.blocks
        for table in tables:
            for block in table:
                held[block] += 1
        free = {block for blocks in self._free for block in blocks}
        if len(free) != sum(map(len, self._free)):
            raise EngineError("KV pool: a block is twice on the free list")
        for block in range(self.blocks):
            if held[block] != self._counts[block]:
                raise EngineError(f"KV block {block}: count {self._counts[block]} but {held[block]} sequences hold it")
            states = (block in free) + self.is_idle(block) + (self._counts[block] > 0)
            if states != 1:
                raise EngineError(f"KV block {block} is in {states} states at once (free, idle, in use); must be one")
            if self.is_idle(block) and block not in self._kept:
                raise EngineError(f"KV block {block} is idle but carries no cached prefix")
