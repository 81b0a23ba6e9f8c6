"""The order in which sums of ranks are added so that one rank alone would get the same bits.

Depth is cut into canonical segments, and their sums are added along a balanced tree that splits at the largest power of
two below their number (`engine/csrc/matrix.h`). A member of a group that has a run of whole segments ships the sums of
the largest subtrees within it, often one, and everybody adds them along the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["Node", "Tree"]

Node = tuple[int, int]
"""A subtree: segments [first, last)."""


@dataclass(frozen=True)
class Tree:
    """Depth [0, ``borders[-1]``) in segments of ``segment`` elements, of which member i of a group has those between
    ``borders[i]`` and ``borders[i + 1]``. Borders do not cut a segment; each member has one or more."""

    segment: int
    borders: tuple[int, ...]

    def __post_init__(self) -> None:
        inner = self.borders[1:-1]
        if (
            self.borders[0]
            or any(border % self.segment for border in inner)
            or sorted(set(self.borders)) != [*self.borders]
        ):
            raise ValueError(f"borders {self.borders} do not cut depth into runs of whole segments of {self.segment}")

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """For each member, the largest subtrees within its run, in order."""
        ends = [-(-border // self.segment) for border in self.borders]
        return tuple(tuple(_within((0, ends[-1]), first, last)) for first, last in zip(ends, ends[1:], strict=False))

    @cached_property
    def ranges(self) -> tuple[torch.Tensor, ...]:
        """For each member, its nodes as elements [first, last) of its own part: int64 [n, 2]."""
        found = []
        for nodes, start, stop in zip(self.nodes, self.borders, self.borders[1:], strict=False):
            edges = [(first * self.segment - start, min(last * self.segment, stop) - start) for first, last in nodes]
            found.append(torch.tensor(edges, dtype=torch.int64))
        return tuple(found)

    def add(self, sums: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """The whole sum, float32, from those of every member's nodes."""

        def total(node: Node) -> torch.Tensor:
            if node in sums:
                return sums[node]
            middle = _middle(node)
            return total((node[0], middle)) + total((middle, node[1]))

        return total((0, -(-self.borders[-1] // self.segment)))


def _middle(node: Node) -> int:
    first, last = node
    return first + (1 << (last - first - 1).bit_length() - 1)


def _within(node: Node, first: int, last: int) -> Iterator[Node]:
    if first <= node[0] and node[1] <= last:
        yield node
    elif node[0] < last and first < node[1]:
        middle = _middle(node)
        yield from _within((node[0], middle), first, last)
        yield from _within((middle, node[1]), first, last)
