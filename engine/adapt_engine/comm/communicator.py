"""The collectives that model code may call, their checks and their accounts; transports implement two methods.

A transport moves tensors (`Communicator._exchange`, `Communicator._transfer`) and does no arithmetic: sums are taken
here, over gathered float32 partials in the order of the group, so that every transport gives the same bits on
every rank. The public methods are a seam: whoever wraps them on the class or instance sees every collective.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import EngineError
from ..mesh import Group
from .ledger import Entry, Ledger
from .tree import Node, Tree

__all__ = ["Call", "Communicator"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """What all members of a group must agree on when they meet."""

    op: str
    group: Group
    dtype: torch.dtype
    row: Shape
    """Shape of one row; members may send different numbers of rows."""
    counts: tuple[int, ...] = ()
    """Rows of each member, where all of them know."""
    root: int = -1
    """Place in the group of the member that sends; -1 where all do."""

    def __str__(self) -> str:
        rows = f"{list(self.counts)} rows of " if self.counts else "rows of "
        root = f" from {self.root}" if self.root >= 0 else ""
        return f"{self.op} on {self.group}{root} ({rows}{list(self.row)} {_name(self.dtype)})"


class Communicator(ABC):
    """One rank's end. Every member of a group calls the same methods in the same order.

    Tensors handed over or received must not be written to afterwards. All methods raise EngineError, naming rank,
    call and each rank's last calls, where members disagree or one of them is gone.
    """

    def __init__(self, rank: int, world: int, name: str = "") -> None:
        self.rank = rank
        self.world = world
        self.name = name or f"rank {rank}"
        self.ledger = Ledger()

    # What model code calls ------------------------------------------------------------------------------------------

    def all_gather(self, tensor: torch.Tensor, group: Group, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Tensors [counts[i], ...] of all members, in their order. ``counts`` default to equal numbers of rows."""
        counts = tuple(counts) if counts is not None else (tensor.shape[0],) * group.size
        call = Call("all_gather", group, tensor.dtype, tuple(tensor.shape[1:]), counts)
        return self._gather(call, tensor)

    def all_reduce(self, partial: torch.Tensor, group: Group, dtype: torch.dtype) -> torch.Tensor:
        """Sum of float32 partials [...] in the order of the group, in float32, rounded once to ``dtype``."""
        if partial.dtype != torch.float32:
            raise EngineError(f"{self.name}: all_reduce takes float32 partials, got {_name(partial.dtype)}")
        call = Call("all_reduce", group, partial.dtype, tuple(partial.shape[1:]), (partial.shape[0],) * group.size)
        parts = self._gather(call, partial)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(dtype)

    def all_reduce_along(self, sums: torch.Tensor, group: Group, tree: Tree) -> torch.Tensor:
        """Sum [T, ...] along ``tree``, float32 and not rounded; this member brings its nodes' sums [n, T, ...].

        A gather like `all_reduce`; what one rank computes alone has the same bits.
        """
        if sums.dtype != torch.float32:
            raise EngineError(f"{self.name}: all_reduce_along takes float32 sums, got {_name(sums.dtype)}")
        rows = sums.shape[1]
        counts = tuple(len(nodes) * rows for nodes in tree.nodes)
        call = Call("all_reduce", group, sums.dtype, tuple(sums.shape[2:]), counts)
        parts = self._gather(call, sums.flatten(0, 1))
        found: dict[Node, torch.Tensor] = {}
        for nodes, part in zip(tree.nodes, parts, strict=True):
            found.update(zip(nodes, part.view(len(nodes), rows, *call.row), strict=True))
        return tree.add(found)

    def all_to_all(self, parts: Sequence[torch.Tensor], group: Group, counts: Sequence[int]) -> list[torch.Tensor]:
        """Member j receives ``parts[j]`` of every other: a tensor [counts[i], ...] from each member i."""
        first = parts[0]
        call = Call("all_to_all", group, first.dtype, tuple(first.shape[1:]))
        if len(parts) != group.size or len(counts) != group.size:
            raise EngineError(f"{self.name}: {call} takes {group.size} parts and counts")
        return self._meet(call, list(parts), [(count, *call.row) for count in counts])

    def broadcast(
        self, tensor: torch.Tensor | None, group: Group, root: int, shape: Shape, dtype: torch.dtype
    ) -> torch.Tensor:
        """The tensor of the member at place ``root``, which alone gives one; all know its shape and dtype."""
        call = Call("broadcast", group, dtype, shape[1:], (shape[0],) * group.size, root)
        mine = group.index(self.rank) == root
        if mine and (tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype):
            raise EngineError(f"{self.name}: {call}: the root's tensor is missing or is not {list(shape)}")
        outgoing = [tensor if mine else None] * group.size
        incoming = [shape if place == root else None for place in range(group.size)]
        received = self._exchange_recorded(call, outgoing, incoming)[root]
        return _present(received)

    def barrier(self, group: Group) -> None:
        """Return when every member has called."""
        nothing = torch.empty((0, 1), dtype=torch.uint8)
        call = Call("barrier", group, nothing.dtype, (1,), (0,) * group.size)
        self._gather(call, nothing)

    def send(self, tensor: torch.Tensor, group: Group, to: int) -> None:
        """Hand ``tensor`` to the member of ``group`` at place ``to``; does not wait for it."""
        call = Call("send", group, tensor.dtype, tuple(tensor.shape[1:]), (tensor.shape[0],), to)
        started = self._begin(call)
        self._transfer(call, group.ranks[to], tensor, None)
        self._end(call, tensor.nbytes, started)

    def recv(self, group: Group, source: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor that the member at place ``source`` sent here; it must have this shape and dtype."""
        call = Call("recv", group, dtype, shape[1:], (shape[0],), source)
        started = self._begin(call)
        received = _present(self._transfer(call, group.ranks[source], None, shape))
        self._check(call, group.ranks[source], received, shape)
        self._end(call, 0, started)
        return received

    def clock(self) -> float:
        """Seconds; a transport whose ranks share one thread gives each rank its own."""
        return time.perf_counter()

    # What a transport implements ------------------------------------------------------------------------------------

    @abstractmethod
    def _exchange(
        self, call: Call, outgoing: Sequence[torch.Tensor | None], incoming: Sequence[Shape | None]
    ) -> list[torch.Tensor | None]:
        """Send ``outgoing[i]`` to member i and receive a tensor of shape ``incoming[i]`` and of the call's dtype from
        it, for every other member; None moves nothing. Own entries are ignored and may come back as anything.

        Returns when all parts have arrived. ``call.op`` tells all_gather, all_reduce (a gather of partials),
        all_to_all, broadcast and barrier apart, where a transport has a faster way for one.
        """

    @abstractmethod
    def _transfer(self, call: Call, peer: int, tensor: torch.Tensor | None, shape: Shape | None) -> torch.Tensor | None:
        """Point to point: send ``tensor`` to rank ``peer`` without waiting, or receive ``shape`` from it."""

    # Shared ---------------------------------------------------------------------------------------------------------

    def _gather(self, call: Call, tensor: torch.Tensor) -> list[torch.Tensor]:
        if call.counts[call.group.index(self.rank)] != tensor.shape[0]:
            raise EngineError(f"{self.name}: {call}: this rank brings {tensor.shape[0]} rows")
        return self._meet(call, [tensor] * call.group.size, [(count, *call.row) for count in call.counts])

    def _meet(self, call: Call, outgoing: list[torch.Tensor], incoming: list[Shape]) -> list[torch.Tensor]:
        return [_present(part) for part in self._exchange_recorded(call, outgoing, incoming)]

    def _exchange_recorded(
        self, call: Call, outgoing: Sequence[torch.Tensor | None], incoming: Sequence[Shape | None]
    ) -> list[torch.Tensor | None]:
        started = self._begin(call)
        own = call.group.index(self.rank)
        received = list(self._exchange(call, outgoing, incoming))
        received[own] = outgoing[own]
        for place, shape in enumerate(incoming):
            if shape is not None:
                self._check(call, call.group.ranks[place], received[place], shape)
        sent = sum(part.nbytes for place, part in enumerate(outgoing) if part is not None and place != own)
        self._end(call, sent, started)
        return received

    def _begin(self, call: Call) -> float:
        self.ledger.pending = str(call)
        return self.clock()

    def _end(self, call: Call, sent: int, started: float) -> None:
        entry = Entry(self.ledger.step, call.op, str(call.group), _name(call.dtype), sent, self.clock() - started)
        self.ledger.add(call.group.axis, entry)
        self.ledger.pending = ""

    def _check(self, call: Call, source: int, received: torch.Tensor | None, shape: Shape) -> None:
        if received is None or tuple(received.shape) != shape or received.dtype != call.dtype:
            found = "nothing" if received is None else f"{list(received.shape)} {_name(received.dtype)}"
            raise EngineError(
                f"{self.name}: {call}: rank {source} sent {found}, expected {list(shape)} {_name(call.dtype)} "
                f"({math.prod(shape)} numbers)"
            )


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
