"""The weight index: name, shape, dtype, offset and file of every tensor of a checkpoint, checked before any read.

File format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data).
Nothing here executes or trusts what it reads: lengths are checked against the file's size before use.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

__all__ = ["DTYPE_BYTES", "TensorEntry", "WeightIndex", "read_header"]

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_HEADER_LIMIT = 100_000_000
_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor. ``offset`` is its first byte in ``file``, ``nbytes`` its length."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As the file spells it: F32, BF16 ..."""
    file: Path
    offset: int
    nbytes: int


class WeightIndex:
    """Every tensor of a checkpoint directory, each exactly once. Raises CheckpointError on construction."""

    def __init__(self, entries: Mapping[str, TensorEntry], files: tuple[Path, ...], warnings: tuple[str, ...]) -> None:
        self.entries = entries
        self.files = files
        self.warnings = warnings

    @classmethod
    def read(cls, directory: str | Path) -> WeightIndex:
        """Index ``directory``: model.safetensors.index.json with its shards, or one model.safetensors."""
        root = Path(directory)
        index, single = root / _INDEX_NAME, root / _SINGLE_NAME
        if index.is_file():
            mapping, stated = _read_mapping(index)
            if single.is_file() and _SINGLE_NAME not in mapping.values():
                raise CheckpointError(f"{single}: a second checkpoint beside {_INDEX_NAME}; remove the stale one")
        elif single.is_file():
            mapping, stated = None, None
        else:
            raise CheckpointError(f"{root}: neither {_INDEX_NAME} nor {_SINGLE_NAME} is there")
        files = sorted(set(mapping.values())) if mapping is not None else [_SINGLE_NAME]
        entries: dict[str, TensorEntry] = {}
        for name in files:
            path = root / name
            if not path.is_file():
                example = next(tensor for tensor, file in (mapping or {}).items() if file == name)
                raise CheckpointError(f"{path}: named by {_INDEX_NAME} (tensor {example!r}) but not there")
            for entry in read_header(path):
                _place(entry, name, mapping, entries)
        for tensor, name in (mapping or {}).items():
            if tensor not in entries:
                raise CheckpointError(f"{root / name}: tensor {tensor!r}, named by {_INDEX_NAME}, is missing from it")
        return cls(entries, tuple(root / name for name in files), tuple(_remarks(root, files, entries, stated)))

    def __iter__(self) -> Iterator[TensorEntry]:
        return iter(self.entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self)


def _place(entry: TensorEntry, file: str, mapping: Mapping[str, str] | None, entries: dict[str, TensorEntry]) -> None:
    if mapping is not None:
        named = mapping.get(entry.name)
        if named is None:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} is not in {_INDEX_NAME}: stale; rewrite the file"
            )
        if named != file:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} is stale: {_INDEX_NAME} names {named} for it; rewrite the file"
            )
    entries[entry.name] = entry


def _remarks(root: Path, files: list[str], entries: Mapping[str, TensorEntry], stated: int | None) -> Iterator[str]:
    actual = sum(entry.nbytes for entry in entries.values())
    if stated is not None and stated != actual:
        yield f"{_INDEX_NAME}: metadata.total_size is {stated}, the tensors have {actual} bytes"
    for other in sorted(root.glob("*.safetensors")):
        if other.name not in files:
            yield f"{other.name}: not named by the index, not read"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice")
        found[key] = value
    return found


def _read_mapping(path: Path) -> tuple[dict[str, str], int | None]:
    if path.stat().st_size > _HEADER_LIMIT:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes; an index has at most {_HEADER_LIMIT}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: not a valid index ({problem})") from None
    mapping = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{path}: key 'weight_map' must be a non-empty object of tensor name -> file name")
    for tensor, file in mapping.items():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise CheckpointError(
                f"{path}: tensor {tensor!r} points to {file!r}: must be a plain *.safetensors name in this directory"
            )
    metadata = raw.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    whole = isinstance(stated, int) and not isinstance(stated, bool)
    return mapping, stated if whole else None


def read_header(path: Path) -> list[TensorEntry]:
    """Entries of one safetensors file, in order of offset. Raises CheckpointError naming file and tensor."""
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes: truncated before the header length")
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _HEADER_LIMIT:
            raise CheckpointError(f"{path}: header length {length} is absurd (limit {_HEADER_LIMIT}); not safetensors?")
        if 8 + length > size:
            raise CheckpointError(f"{path}: truncated: header ends at byte {8 + length}, the file has {size}")
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: header is not valid JSON ({problem})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header holds {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header key '__metadata__' must be an object of text values")
    entries = [_entry(path, name, item, 8 + length) for name, item in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_tiling(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, name: str, item: Any, start: int) -> TensorEntry:
    def refuse(rule: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {rule}")

    if not isinstance(item, dict):
        raise refuse("its header entry is not an object")
    dtype, shape, span = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise refuse(f"dtype {dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or not all(_natural(length) for length in shape):
        raise refuse(f"shape {shape!r} is not a list of non-negative integers")
    if not isinstance(span, list) or len(span) != 2 or not all(_natural(point) for point in span):
        raise refuse(f"data_offsets {span!r} is not a pair of non-negative integers")
    begin, end = span
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise refuse(f"data_offsets span {end - begin} bytes, {dtype} {shape} needs {expected}")
    return TensorEntry(name, tuple(shape), dtype, path, start + begin, expected)


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_tiling(path: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    """Tensors must cover the data exactly: a gap, an overlap or a tail means that header and data disagree."""
    position, before = start, None
    for entry in entries:
        if entry.offset < position and before is not None:
            raise CheckpointError(f"{path}: tensors {before.name!r} and {entry.name!r} overlap")
        if entry.offset > position:
            raise CheckpointError(
                f"{path}: {entry.offset - position} bytes before tensor {entry.name!r} belong to none"
            )
        position, before = entry.offset + entry.nbytes, entry
        if position > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {entry.name!r} ends at byte {position}, the file has {size}"
            )
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor; header and data disagree")
