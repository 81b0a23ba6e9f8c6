"""Reading GGUF files (versions 2 and 3): metadata and tensors, dequantised to float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; block layouts from ggml's ggml-common.h.
Everything a file claims is checked against its size before it is used; nothing in it is executed.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from pytest_adapt.models.entries import ModelError

__all__ = ["Gguf", "GgufTensor"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# Bounds far above any real file: a corrupt count must not become an endless loop or a huge allocation.
_MOST_ENTRIES = 1 << 20
_MOST_DIMENSIONS = 4
# ggml type -> (name, elements per block, bytes per block)
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. ``shape`` is in row-major (NumPy) order, the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    bytes: int


class Gguf:
    """An open GGUF file, memory-mapped. Use as a context manager.

    Raises ModelError, in one line that names the file and what is wrong with it: not a GGUF file, an unknown
    version or tensor type, a size that contradicts another, or an end that comes too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as problem:
            raise ModelError(f"{path}: cannot be read as GGUF: {problem}") from None
        self._at = 0
        try:
            self.metadata, self.tensors = self._parse()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map.close()

    def need(self, key: str, kind: type) -> Any:
        """A metadata value of the given type; ModelError when it is missing or of another type."""
        if key not in self.metadata:
            raise self._wrong(f"metadata key {key!r} is missing")
        value = self.metadata[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(f"metadata key {key!r} holds {type(value).__name__}, not {kind.__name__}")
        return value

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, in row-major order. Quantised values are computed in float32, as ggml does."""
        if name not in self.tensors:
            raise self._wrong(f"tensor {name!r} is missing")
        tensor = self.tensors[name]
        data = self._map[tensor.offset : tensor.offset + tensor.bytes]
        return _dequantise(tensor.kind, data).reshape(tensor.shape)

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: not a usable GGUF file: {what}")

    def _take(self, count: int) -> bytes:
        if count > len(self._map) - self._at:
            raise self._wrong(f"it ends at byte {len(self._map)} where {count} more are needed after {self._at}")
        data = self._map[self._at : self._at + count]
        self._at += count
        return data

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _text(self) -> str:
        raw = self._take(self._number("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"a string before byte {self._at} is not UTF-8") from None

    def _count(self, what: str) -> int:
        count = int(self._number("<Q"))
        if count > _MOST_ENTRIES:
            raise self._wrong(f"it claims {count} {what}")
        return count

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY and depth == 0:
            inner = self._number("<I")
            return [self._value(inner, depth + 1) for _ in range(self._count("array elements"))]
        if kind not in _SCALARS:
            raise self._wrong(f"unknown metadata type {kind} before byte {self._at}")
        return self._number(_SCALARS[kind])

    def _parse(self) -> tuple[Mapping[str, Any], Mapping[str, GgufTensor]]:
        magic = self._take(4)
        if magic != b"GGUF":
            raise self._wrong(f"it starts with {magic!r}, not b'GGUF'")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._wrong(f"version {version}; known: 2, 3")
        tensors, pairs = self._count("tensors"), self._count("metadata pairs")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in metadata:
                raise self._wrong(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number("<I"))
        raw = [self._tensor_info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self._at // alignment) * alignment
        return metadata, self._place(raw, start, alignment)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        rank = self._number("<I")
        if not 1 <= rank <= _MOST_DIMENSIONS:
            raise self._wrong(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._number("<Q") for _ in range(rank))
        return name, shape[::-1], self._number("<I"), self._number("<Q")

    def _place(
        self, raw: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        placed: dict[str, GgufTensor] = {}
        for name, shape, code, offset in raw:
            if name in placed:
                raise self._wrong(f"tensor {name!r} appears twice")
            if code not in _TYPES:
                known = ", ".join(kind for kind, *_ in _TYPES.values())
                raise self._wrong(f"tensor {name!r} has type {code}; known: {known}")
            kind, block, size = _TYPES[code]
            if 0 in shape or shape[-1] % block:
                raise self._wrong(
                    f"tensor {name!r}: rows of shape {list(shape)} are not whole {kind} blocks of {block}"
                )
            length = math.prod(shape) // block * size
            if offset % alignment:
                raise self._wrong(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
            if start + offset + length > len(self._map):
                raise self._wrong(
                    f"tensor {name!r} ends at byte {start + offset + length}, the file at {len(self._map)} (truncated?)"
                )
            placed[name] = GgufTensor(name, shape, kind, start + offset, length)
        ordered = sorted(placed.values(), key=lambda tensor: tensor.offset)
        for one, two in itertools.pairwise(ordered):
            if one.offset + one.bytes > two.offset:
                raise self._wrong(f"tensors {one.name!r} and {two.name!r} overlap")
        return placed


def _dequantise(kind: str, data: bytes) -> np.ndarray:
    """Flat float32 values of one tensor's bytes."""
    if kind == "F32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    if kind == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "Q8_0":
        blocks = np.frombuffer(data, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
        return np.asarray(blocks["d"].astype(np.float32)[:, None] * blocks["q"].astype(np.float32)).ravel()
    fields = [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)] if kind == "Q4_1" else [("d", "<f2"), ("q", "u1", 16)]
    blocks = np.frombuffer(data, np.dtype(fields))
    # The low nibbles are elements 0..15 of a block, the high ones 16..31.
    q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
    d = blocks["d"].astype(np.float32)[:, None]
    if kind == "Q4_1":
        return np.asarray(q * d + blocks["m"].astype(np.float32)[:, None]).ravel()
    return np.asarray((q - np.float32(8)) * d).ravel()
