"""Storage of the paged cache. A slot is block * page_size + offset; a sequence's table turns positions into slots."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..config import ModelSpec
from ..errors import EngineError
from .groups import groups_of

__all__ = ["PagedCache"]


class PagedCache:
    """Rows of every layer, addressed by slot. Untouched memory costs nothing until it is written.

    On one of many ranks ``spec`` is what that rank computes (its KV heads, its layers, numbered from ``first``).
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, blocks: int, page_size: int, first: int = 0) -> None:
        self.groups = groups_of(spec, first)
        self.page_size = page_size
        self.slots = blocks * page_size
        self._rows: dict[int, tuple[torch.Tensor, ...]] = {}
        for group in self.groups:
            for layer in group.layers:
                self._rows[layer] = tuple(
                    torch.empty((self.slots, *shape), dtype=dtype) for _, shape in group.components
                )
            planned = group.bytes_per_token(dtype.itemsize) * self.slots
            actual = sum(rows.nbytes for layer in group.layers for rows in self._rows[layer])
            if planned != actual:
                raise EngineError(f"KV group {group.kind}: planned {planned} bytes, allocated {actual}")

    def tensors(self) -> Iterator[torch.Tensor]:
        """The storage of every layer and component."""
        return (part for rows in self._rows.values() for part in rows)

    def rows_of(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The storage of a layer, one tensor [slots, ...] per component of its group: for kernels that address it
        themselves."""
        return self._rows[layer]

    def write(self, layer: int, slots: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> None:
        """Store ``rows`` (one tensor [n, ...] per component of the layer's group) at ``slots`` int64 [n]."""
        for store, new in zip(self._rows[layer], rows, strict=True):
            store.index_copy_(0, slots, new)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows at ``slots`` int64 [n], in that order, one tensor [n, ...] per component."""
        return tuple(store.index_select(0, slots) for store in self._rows[layer])

    def release(self) -> None:
        """Give the memory back; nothing may be written or gathered afterwards."""
        self._rows.clear()
