"""One rank a process: messages through torch.distributed (gloo on CPU), point to point.

gloo's own collectives neither name a rank that is late nor survive unequal calls, so only its sends and receives are
used, and every one carries what it belongs to: a frame of fixed size with the call, a running number and checksums,
then, where they do not fit into the frame, the bytes of the tensor. Two ranks that disagree, and messages that were
lost or damaged, are told apart at the receiver.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from ..errors import EngineError
from ..mesh import Mesh
from .board import Board
from .communicator import Call, Communicator, Shape

__all__ = ["DistributedCommunicator", "Frame", "RankLost", "join"]

_FRAME = 4096
_CHECK = struct.Struct("<I")
_HEAD = struct.Struct("<QQIH")  # number, bytes of the tensor, their checksum, length of the text
_ROOM = _FRAME - _CHECK.size - _HEAD.size
_MEETINGS, _MAIL, _REST = 0, 1, 2
_TAGS = 1 << 30


class RankLost(EngineError):
    """The connection to another rank broke: it died, or its process is being ended."""


@dataclass(frozen=True)
class Frame:
    """The head of one message."""

    number: int
    """Counts the messages of one rank to another, separately for collectives and for send."""
    nbytes: int
    checksum: int
    """CRC-32 of the tensor's bytes."""
    call: str
    """What the sender was doing."""
    dtype: str
    shape: Shape

    def pack(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The message in parts: uint8 [4096] with the head, and ``payload`` (uint8) where it has no room in there."""
        text = "\n".join((self.call, self.dtype, ",".join(map(str, self.shape)))).encode()
        if len(text) > _ROOM:
            raise EngineError(f"a call of {len(text)} bytes does not fit into a message: {self.call[:200]} ...")
        inline = self._inline(len(text))
        body = _HEAD.pack(self.number, self.nbytes, self.checksum, len(text)) + text
        body = (body + payload.numpy().tobytes() if inline else body).ljust(_FRAME - _CHECK.size, b"\0")
        frame = torch.frombuffer(bytearray(_CHECK.pack(zlib.crc32(body)) + body), dtype=torch.uint8)
        return [frame] if inline else [frame, payload]

    def _inline(self, text: int) -> bool:
        """Whether the tensor fits beside a text of so many bytes."""
        return text + self.nbytes <= _ROOM

    @classmethod
    def unpack(cls, frame: torch.Tensor) -> tuple[Frame, torch.Tensor | None]:
        """The head and, where it came along, the payload. Raises ValueError for a frame that is damaged."""
        raw = frame.numpy().tobytes()
        (check,) = _CHECK.unpack_from(raw)
        if zlib.crc32(raw[_CHECK.size :]) != check:
            raise ValueError("checksum of its frame")
        number, nbytes, checksum, length = _HEAD.unpack_from(raw, _CHECK.size)
        start = _CHECK.size + _HEAD.size
        call, dtype, shape = raw[start : start + length].decode().split("\n")
        head = cls(number, nbytes, checksum, call, dtype, tuple(int(size) for size in shape.split(",") if size))
        start += length
        return head, frame[start : start + nbytes].clone() if head._inline(length) else None

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


def join(mesh: Mesh, rank: int, port: int, timeout: float, board: Board | None = None) -> DistributedCommunicator:
    """Meet the other ranks at the store on 127.0.0.1:``port`` and become ``rank``; one world a process at a time.

    ``timeout``: seconds of each wait. Raises EngineError where the others do not come.
    """
    names = [name for _, name in socket.if_nameindex()]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in names else "lo0"
    bound = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=False, timeout=bound, wait_for_workers=False
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.layout.world, timeout=bound)
    except RuntimeError as problem:
        raise RankLost(f"{mesh.name(rank)}: the ranks could not meet: {_first_line(problem)}") from None
    return DistributedCommunicator(mesh, rank, timeout, board)


class DistributedCommunicator(Communicator):
    """One rank's end in the default process group of torch.distributed, whose ranks are those of ``mesh``.

    No wait is longer than ``timeout`` seconds; what this rank is in stands on the ``board``, where there is one.
    After an error the process group cannot be used any more: the process should end.
    """

    def __init__(self, mesh: Mesh, rank: int, timeout: float, board: Board | None = None) -> None:
        super().__init__(rank, mesh.layout.world, mesh.name(rank))
        self._mesh = mesh
        self._timeout = timeout
        self._board = board
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}
        self._outbox: list[tuple[Call, int, list[dist.Work], list[torch.Tensor]]] = []

    def flush(self) -> None:
        """Return when everything that was sent has been received. Raises EngineError where it is not in time."""
        outbox, self._outbox = self._outbox, []
        for call, peer, works, _ in outbox:
            self.ledger.pending = f"{call}, which nobody has received yet"
            self._show()
            for work in works:
                self._wait(work, call, peer)
        self.ledger.pending = ""
        self._show()

    # Transport ------------------------------------------------------------------------------------------------------

    def _exchange(
        self, call: Call, outgoing: Sequence[torch.Tensor | None], incoming: Sequence[Shape | None]
    ) -> list[torch.Tensor | None]:
        others = [(place, rank) for place, rank in enumerate(call.group.ranks) if rank != self.rank]
        listening = {
            place: self._listen(call, rank, _MEETINGS) for place, rank in others if incoming[place] is not None
        }
        sums: dict[int, tuple[torch.Tensor, int]] = {}
        sending = []
        for place, rank in others:
            part = outgoing[place]
            if part is not None:
                payload, checksum = sums.setdefault(id(part), _bytes(part))
                sending.append((rank, *self._send(call, rank, _MEETINGS, part, payload, checksum)))
        received: list[torch.Tensor | None] = [None] * call.group.size
        for place, (work, frame) in listening.items():
            self._wait(work, call, call.group.ranks[place])
            received[place] = self._open(call, call.group.ranks[place], _MEETINGS, frame, incoming[place])
        for rank, works, _ in sending:
            for work in works:
                self._wait(work, call, rank)
        return received

    def _transfer(self, call: Call, peer: int, tensor: torch.Tensor | None, shape: Shape | None) -> torch.Tensor | None:
        if tensor is not None:
            works, kept = self._send(call, peer, _MAIL, tensor, *_bytes(tensor))
            self._outbox.append((call, peer, works, kept))
            return None
        work, frame = self._listen(call, peer, _MAIL)
        self._wait(work, call, peer)
        return self._open(call, peer, _MAIL, frame, shape)

    def _send(
        self, call: Call, peer: int, kind: int, tensor: torch.Tensor, payload: torch.Tensor, checksum: int
    ) -> tuple[list[dist.Work], list[torch.Tensor]]:
        number = self._sent[peer, kind] = self._sent.get((peer, kind), 0) + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        head = Frame(number, payload.numel(), checksum, _signature(call), dtype, tuple(tensor.shape))
        parts = head.pack(payload)
        return self._post(call, peer, kind, number, parts), parts

    def _post(self, call: Call, peer: int, kind: int, number: int, parts: list[torch.Tensor]) -> list[dist.Work]:
        """Hand the parts of one message (uint8) to the transport: its frame, then what did not fit into it."""
        tags = [kind, _rest_tag(kind, number)]
        works = []
        for part, tag in zip(parts, tags, strict=False):
            try:
                work = dist.isend(part, dst=peer, tag=tag)
            except RuntimeError as problem:
                self._lost(call, peer, problem)
            assert work is not None
            works.append(work)
        return works

    def _listen(self, call: Call, peer: int, tag: int, size: int = _FRAME) -> tuple[dist.Work, torch.Tensor]:
        buffer = torch.empty(size, dtype=torch.uint8)
        try:
            work = dist.irecv(buffer, src=peer, tag=tag)
        except RuntimeError as problem:
            self._lost(call, peer, problem)
        assert work is not None
        return work, buffer

    def _open(self, call: Call, peer: int, kind: int, frame: torch.Tensor, shape: Shape | None) -> torch.Tensor:
        """The tensor of a message whose frame has arrived."""
        assert shape is not None
        expected = self._received[peer, kind] = self._received.get((peer, kind), 0) + 1
        other = self._mesh.name(peer)
        try:
            head, payload = Frame.unpack(frame)
        except ValueError as problem:
            raise EngineError(f"{self.name}: {call}: a message of {other} is damaged: {problem}") from None
        if head.number != expected:
            raise EngineError(
                f"{self.name}: {call}: message {head.number} of {other} came where {expected} was due "
                f"({head.call}): one was lost or doubled"
            )
        if head.call != _signature(call):
            raise EngineError(f"{self.name} calls {call} where {other} called {head.call}")
        self._check(call, peer, torch.empty(head.shape, dtype=head.torch_dtype, device="meta"), shape)
        if payload is None:
            work, payload = self._listen(call, peer, _rest_tag(kind, head.number), head.nbytes)
            self._wait(work, call, peer)
        if zlib.crc32(payload.numpy().data) != head.checksum:
            raise EngineError(f"{self.name}: {call}: a message of {other} is damaged: checksum of its tensor")
        return payload.view(head.torch_dtype).reshape(head.shape)

    # Waiting --------------------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> float:
        started = super()._begin(call)
        self._show()
        return started

    def _end(self, call: Call, sent: int, started: float) -> None:
        super()._end(call, sent, started)
        self._show()

    def _show(self) -> None:
        if self._board is not None:
            self._board.write(self.rank, self.ledger)

    def _wait(self, work: dist.Work, call: Call, peer: int) -> None:
        if self._board is not None:
            self._board.wait_for(self.rank, peer)
        started = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as problem:
            if time.monotonic() - started < self._timeout:
                self._lost(call, peer, problem)
            raise EngineError(
                f"{self.name}: {call}: waited {self._timeout:g} s for {self._mesh.name(peer)}; {self.ledger.tail()}"
            ) from None

    def _lost(self, call: Call, peer: int, problem: RuntimeError) -> NoReturn:
        what = _first_line(problem)
        raise RankLost(f"{self.name}: {call}: the connection to {self._mesh.name(peer)} broke ({what})") from None


def _bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """uint8 [nbytes] and its CRC-32."""
    payload = tensor.contiguous().reshape(-1).view(torch.uint8)
    return payload, zlib.crc32(payload.numpy().data)


def _signature(call: Call) -> str:
    """What both ends of a message must agree on beside its shape."""
    return f"send and recv on {call.group}" if call.op in ("send", "recv") else str(call)


def _rest_tag(kind: int, number: int) -> int:
    """Of its own for each message: a lost one must not be mistaken for the next, which may be longer."""
    return _REST + (2 * number + kind) % _TAGS


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]
