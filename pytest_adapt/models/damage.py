"""Damaged copies of a checkpoint, one kind of damage each: what a loader must refuse, and what it must name.

Each kind is taken from reports of engines that loaded such a checkpoint silently: an interrupted download, a
shard deleted, a shard shorter than its header, a stale copy of a tensor in a later shard.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Damage", "applied"]

INDEX = "model.safetensors.index.json"
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}
_NAN = {"F32": b"\x00\x00\xc0\x7f", "F16": b"\x00\x7e", "BF16": b"\xc0\x7f"}
_INF = {"F32": b"\x00\x00\x80\x7f", "F16": b"\x00\x7c", "BF16": b"\x80\x7f"}


@dataclass(frozen=True)
class Damage:
    """A damaged checkpoint: where it is, what was done, and the words (file, tensor or key) a refusal must contain."""

    directory: Path
    what: str
    named: tuple[str, ...]

    def names_in(self, message: str) -> bool:
        return all(word in message for word in self.named)


class _Shard:
    """One safetensors file: its header, and its tensors as views of the mapped file."""

    def __init__(self, path: Path) -> None:
        raw = _mapped(path)
        size = int.from_bytes(raw[:8], "little")
        header: dict[str, Any] = json.loads(bytes(raw[8 : 8 + size]))
        self.path = path
        self.metadata = header.pop("__metadata__", None)
        self.tensors: dict[str, tuple[str, list[int], memoryview | bytes]] = {
            name: (
                entry["dtype"],
                entry["shape"],
                raw[8 + size + entry["data_offsets"][0] : 8 + size + entry["data_offsets"][1]],
            )
            for name, entry in header.items()
        }

    def save(self) -> None:
        header: dict[str, Any] = {} if self.metadata is None else {"__metadata__": self.metadata}
        offset = 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
            offset += len(data)
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        _rewrite(self.path, len(head).to_bytes(8, "little"), head, *(data for _, _, data in self.tensors.values()))

    def matrix(self) -> str:
        """A weight matrix of this shard, the same one every time."""
        return min(name for name, (dtype, shape, _) in self.tensors.items() if len(shape) == 2 and dtype in _NAN)


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _rewrite(path: Path, *parts: bytes | memoryview) -> None:
    """Put a new file in the place of ``path``, which is a link to the undamaged one."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        file.writelines(parts)
    os.replace(fresh, path)


def _shards(directory: Path) -> list[_Shard]:
    files = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    if len(files) < 2:
        raise ValueError(f"{directory}: damage needs a checkpoint of two or more shards, {INDEX} names {len(files)}")
    return [_Shard(directory / name) for name in files]


def _truncated(directory: Path) -> tuple[str, tuple[str, ...]]:
    path = _shards(directory)[-1].path
    _rewrite(path, _mapped(path)[:-64])
    return f"{path.name} lost its last 64 bytes", (path.name,)


def _absent_file(directory: Path) -> tuple[str, tuple[str, ...]]:
    path = _shards(directory)[-1].path
    path.unlink()
    return f"{path.name} is named by the index and absent", (path.name,)


def _missing_tensor(directory: Path) -> tuple[str, tuple[str, ...]]:
    shard = _shards(directory)[0]
    name = shard.matrix()
    del shard.tensors[name]
    shard.save()
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"][name]
    _rewrite(directory / INDEX, json.dumps(index, indent=1, sort_keys=True).encode())
    return f"{name} is in no file and not in the index", (name,)


def _unlisted_tensor(directory: Path) -> tuple[str, tuple[str, ...]]:
    shard = _shards(directory)[0]
    name = shard.matrix()
    del shard.tensors[name]
    shard.save()
    return f"the index promises {name} in {shard.path.name}, which does not hold it", (name, shard.path.name)


def _stale_duplicate(directory: Path) -> tuple[str, tuple[str, ...]]:
    first, last = _shards(directory)[0], _shards(directory)[-1]
    name = first.matrix()
    dtype, shape, data = first.tensors[name]
    last.tensors[name] = (dtype, shape, bytes(len(data)))
    last.save()
    return f"{last.path.name} holds a stale copy of {name}, which the index assigns to {first.path.name}", (
        name,
        last.path.name,
    )


def _wrong_shape(directory: Path) -> tuple[str, tuple[str, ...]]:
    shard = _shards(directory)[0]
    name = next(
        name
        for name, (dtype, shape, _) in sorted(shard.tensors.items())
        if len(shape) == 2 and shape[0] != shape[1] and dtype in _NAN
    )
    dtype, shape, data = shard.tensors[name]
    shard.tensors[name] = (dtype, shape[::-1], data)
    shard.save()
    return f"{name} is stored as {shape[::-1]} instead of {shape}", (name,)


def _wrong_dtype(directory: Path) -> tuple[str, tuple[str, ...]]:
    shard = _shards(directory)[0]
    name = shard.matrix()
    dtype, shape, data = shard.tensors[name]
    shard.tensors[name] = ("U8", [*shape[:-1], shape[-1] * _BYTES[dtype]], data)
    shard.save()
    return f"{name} is stored as U8", (name,)


def _poisoned(pattern: dict[str, bytes], what: str) -> Callable[[Path], tuple[str, tuple[str, ...]]]:
    def poison(directory: Path) -> tuple[str, tuple[str, ...]]:
        shard = _shards(directory)[-1]
        name = shard.matrix()
        dtype, shape, data = shard.tensors[name]
        middle = len(data) // 2 // len(pattern[dtype]) * len(pattern[dtype])
        after = middle + len(pattern[dtype])
        shard.tensors[name] = (dtype, shape, b"".join((data[:middle], pattern[dtype], data[after:])))
        shard.save()
        return f"{name} holds one {what}", (name,)

    return poison


_APPLY: dict[str, Callable[[Path], tuple[str, tuple[str, ...]]]] = {
    "truncated": _truncated,
    "absent_file": _absent_file,
    "missing_tensor": _missing_tensor,
    "unlisted_tensor": _unlisted_tensor,
    "stale_duplicate": _stale_duplicate,
    "wrong_shape": _wrong_shape,
    "wrong_dtype": _wrong_dtype,
    "nan": _poisoned(_NAN, "NaN"),
    "inf": _poisoned(_INF, "infinity"),
}
KINDS: tuple[str, ...] = tuple(_APPLY)


@contextmanager
def applied(kind: str, source: Path, destination: Path) -> Iterator[Damage]:
    """A damaged copy of the checkpoint ``source`` at ``destination``, removed at the end.

    Files that the damage leaves alone are hard links where the file system has them. Raises ValueError for an unknown
    kind or a checkpoint of one shard.
    """
    if kind not in _APPLY:
        raise ValueError(f"unknown damage {kind!r}; known: {', '.join(KINDS)}")
    try:
        shutil.copytree(source, destination, copy_function=_link)
        what, named = _APPLY[kind](destination)
        yield Damage(destination, what, named)
    finally:
        shutil.rmtree(destination, ignore_errors=True)


def _link(source: str, destination: str) -> None:
    try:
        os.link(os.path.realpath(source), destination)
    except OSError:
        shutil.copyfile(source, destination)
