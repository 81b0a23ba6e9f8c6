"""Reader of Hugging Face checkpoint directories, written apart from every engine's reader.

Format: config.json, and ``model.safetensors.index.json`` with its shards or one ``model.safetensors``.
A safetensors file is eight bytes of little-endian header length, a JSON header that gives dtype, shape and
byte range of each tensor, then the bytes (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .errors import OracleError
from .spec import ModelSpec

__all__ = ["Checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Tag in the header -> dtype of the stored bytes. BF16 has no NumPy dtype: read as its bit pattern.
_STORED: dict[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
}
_LARGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class _Entry:
    file: Path
    tag: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """One checkpoint directory. Tensors are memory-mapped and read when asked for.

    Raises OracleError when config.json, the index or a header is missing, unreadable or contradicts itself.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise OracleError(f"{self.directory}: not a checkpoint directory; expected a folder with config.json")
        self.config: dict[str, Any] = _read_json(self.directory / "config.json")
        self._maps: dict[Path, np.memmap[Any, np.dtype[np.uint8]]] = {}
        self._entries = self._read_entries()

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        return self._entry(name).shape

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in its stored shape: float32 for every floating-point format (float64 stays), integers as stored.

        Read-only; float32 and integers are views of the mapped file.
        """
        entry = self._entry(name)
        stored = self._bytes(entry).view(_STORED[entry.tag]).reshape(entry.shape)
        if entry.tag == "BF16":
            return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if entry.tag == "F16":
            return stored.astype(np.float32)
        return stored

    def weight_digest(self) -> str:
        """sha256 (hex) over name, dtype tag, shape and bytes of every tensor in name order.

        Independent of how tensors are distributed over shards.
        """
        return self._weight_digest

    def config_digest(self) -> str:
        """sha256 (hex) over canonical JSON of what config.json says about the function computed (`ModelSpec`).

        Both spellings of one model have the same digest; token ids, dropout and the like do not enter.
        """
        return hashlib.sha256(ModelSpec.from_config(self.config).canonical().encode()).hexdigest()

    @cached_property
    def _weight_digest(self) -> str:
        digest = hashlib.sha256()
        for name in self.names():
            entry = self._entries[name]
            digest.update(json.dumps([name, entry.tag, entry.shape]).encode())
            digest.update(self._bytes(entry).data)
        return digest.hexdigest()

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise OracleError(f"{self.directory}: no tensor {name!r}; the checkpoint holds {len(self._entries)} others")
        return self._entries[name]

    def _bytes(self, entry: _Entry) -> np.ndarray:
        if entry.start == entry.end:
            return np.empty(0, np.uint8)
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, mode="r")
        return self._maps[entry.file][entry.start : entry.end]

    def _read_entries(self) -> dict[str, _Entry]:
        index = self.directory / _INDEX
        if not index.exists():
            if not (self.directory / _SINGLE).exists():
                raise OracleError(f"{self.directory}: neither {_INDEX} nor {_SINGLE}; weights must be safetensors")
            return _read_header(self.directory / _SINGLE)
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise OracleError(f"{index}: no weight_map; expected tensor name -> file name")
        shards: dict[str, dict[str, _Entry]] = {}
        entries: dict[str, _Entry] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise OracleError(f"{index}: {name!r} lies in {file!r}; expected the name of a file beside the index")
            if file not in shards:
                shards[file] = _read_header(self.directory / file)
            if name not in shards[file]:
                raise OracleError(f"{index}: {name!r} is said to lie in {file}, whose header does not name it")
            entries[name] = shards[file][name]
        return entries


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OracleError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise OracleError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise OracleError(f"{path}: {size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, _LARGEST_HEADER):
                raise OracleError(f"{path}: header of {length} bytes in a file of {size}; truncated or not safetensors")
            header = json.loads(file.read(length).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OracleError(f"{path}: cannot be read as safetensors ({error})") from error
    if not isinstance(header, dict):
        raise OracleError(f"{path}: safetensors header is not a JSON object")
    if not isinstance(header.pop("__metadata__", {}), dict):
        raise OracleError(f"{path}: header key '__metadata__' is not a JSON object")
    return {name: _entry_of(path, name, fields, 8 + length, size) for name, fields in header.items()}


def _entry_of(path: Path, name: str, fields: Any, origin: int, size: int) -> _Entry:
    try:
        tag = str(fields["dtype"])
        shape = tuple(int(extent) for extent in fields["shape"])
        start, end = (origin + int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise OracleError(f"{path}: {name!r} has a malformed header entry ({error})") from error
    if tag not in _STORED:
        raise OracleError(f"{path}: {name!r} has dtype {tag}; known are {', '.join(_STORED)}")
    expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(_STORED[tag]).itemsize
    if min(shape, default=0) < 0 or end - start != expected:
        raise OracleError(
            f"{path}: {name!r} of shape {list(shape)} and {tag} needs {expected} bytes, has {end - start}"
        )
    if start < origin or end > size:
        raise OracleError(f"{path}: {name!r} ends at byte {end} of a file of {size}; truncated")
    return _Entry(path, tag, shape, start, end)
