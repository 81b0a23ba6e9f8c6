"""Prefix cache: full pages found again by a chained hash of everything before them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..errors import EngineError
from .pool import BlockPool

__all__ = ["PrefixCache"]


class PrefixCache:
    """Digest of (previous digest, tokens of the page) -> block. Only full, computed pages are entered."""

    def __init__(self, pool: BlockPool, page_size: int) -> None:
        self._pool = pool
        self._page = page_size
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self.hits = 0
        """Tokens found, over the lookups that were used."""
        self.queries = 0
        """Tokens asked for in those."""

    def digests(self, tokens: Sequence[int]) -> list[bytes]:
        """Chained digest of each full page of ``tokens``."""
        chain: list[bytes] = []
        previous = b""
        for start in range(0, len(tokens) - self._page + 1, self._page):
            page = ",".join(map(str, tokens[start : start + self._page])).encode()
            previous = hashlib.blake2b(previous + page, digest_size=16).digest()
            chain.append(previous)
        return chain

    def lookup(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest known chain of full pages; takes one reference on each."""
        self._forget_evicted()
        found: list[int] = []
        for digest in self.digests(tokens):
            block = self._blocks.get(digest)
            if block is None:
                break
            self._pool.share(block)
            found.append(block)
        return found

    def count(self, asked: int, blocks: int) -> None:
        """A lookup of ``asked`` tokens was used: add it and its ``blocks`` to the statistics."""
        self.queries += asked
        self.hits += blocks * self._page

    def insert(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Enter the full pages of ``tokens``, held by the blocks of ``table``. A known page keeps its block."""
        self._forget_evicted()
        for digest, block in zip(self.digests(tokens), table, strict=False):
            if digest not in self._blocks and block not in self._digests:
                self._blocks[digest] = block
                self._digests[block] = digest
                self._pool.keep(block)

    def _forget_evicted(self) -> None:
        for block in self._pool.evicted:
            digest = self._digests.pop(block, None)
            if digest is not None:
                del self._blocks[digest]
        self._pool.evicted.clear()

    def check_integrity(self) -> None:
        """Both directions of the map agree. Raises EngineError naming the block."""
        self._forget_evicted()
        for digest, block in self._blocks.items():
            if self._digests.get(block) != digest:
                raise EngineError(f"prefix cache: block {block} is entered under a digest that it does not have")
        if len(self._blocks) != len(self._digests):
            raise EngineError("prefix cache: a block has a digest that leads to no block")
