"""What lies in a checkpoint directory: how it is sharded, and every tensor's shape from the file headers alone.

safetensors headers are JSON behind an eight-byte length (https://github.com/huggingface/safetensors); no
tensor is read. Pickled files are named, never opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_adapt.inspect.structure import InspectError

__all__ = ["Sharding", "Stored", "sharding", "sum_by_layer", "tensors_of"]

_MOST_HEADER = 100 << 20
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?:safetensors|bin)")
# Names that frameworks give to files already cut for a parallel layout.
_RANKED = (
    (re.compile(r"mp_rank_\d+(?:_\d+)?"), "tensor-parallel ranks (Megatron, DeepSpeed)"),
    (re.compile(r"consolidated\.\d+\."), "tensor-parallel ranks (original Llama release)"),
    (re.compile(r"model\d+-mp\d+"), "tensor-parallel ranks (original DeepSeek conversion)"),
    (re.compile(r"(?:^|[-_.])tp[-_]?(?:rank)?[-_]?\d+"), "tensor-parallel ranks"),
    (re.compile(r"(?:^|[-_.])pp[-_]?(?:rank)?[-_]?\d+"), "pipeline stages"),
    (re.compile(r"(?:^|[-_.])ep[-_]?(?:rank)?[-_]?\d+"), "expert-parallel ranks"),
    (re.compile(r"model-rank-\d+"), "ranks (vLLM sharded state)"),
    (re.compile(r"layer_\d+-model_\d+-model_states"), "pipeline layers (DeepSpeed)"),
)
_OPTIMISER = re.compile(r"optim|zero_pp_rank|scheduler\.pt|rng_state|training_args|trainer_state")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Stored:
    """One tensor as its file's header describes it."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def params(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sharding:
    """How a checkpoint is cut into files."""

    shards: tuple[str, ...]
    """Weight files, sorted."""
    naming: str
    """single file, numbered (name-00001-of-00003), or free."""
    presharded: str = ""
    """For which kind of rank the files were cut beforehand; empty: for none, any layout can load them."""
    layers: tuple[tuple[int, ...], ...] = ()
    """Decoder layers that each shard holds tensors of."""
    ignored: tuple[str, ...] = ()
    """Optimiser and trainer state beside the weights."""


def sharding(directory: Path) -> Sharding:
    """Recover the sharding of a checkpoint directory. Raises InspectError when there are no weights, when numbered
    shards are incomplete, or when the index names a file that is absent."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    ignored = [name for name in names if _OPTIMISER.search(name)]
    weights = [n for n in names if n not in ignored and n.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    if not weights:
        raise InspectError(f"{directory}: no weight files (*.safetensors)")
    ranked = next((what for pattern, what in _RANKED if any(pattern.search(name) for name in weights)), "")
    mapping = _weight_map(directory)
    absent = sorted(set(mapping.values()) - set(weights))
    if absent:
        raise InspectError(f"{directory}: the index names {absent[0]}, which is absent ({len(absent)} such files)")
    naming = _naming(directory, weights)
    held: dict[str, set[int]] = {name: set() for name in weights}
    for tensor, file in mapping.items():
        if found := _LAYER.search(tensor):
            held[file].add(int(found[1]))
    layers = tuple(tuple(sorted(held[name])) for name in weights)
    return Sharding(tuple(weights), naming, ranked, layers, tuple(ignored))


def _naming(directory: Path, weights: list[str]) -> str:
    matches = [_NUMBERED.fullmatch(name) for name in weights]
    if not all(matches):
        return "single file" if len(weights) == 1 else "free"
    counts = {int(found["count"]) for found in matches if found}
    numbers = {int(found["number"]) for found in matches if found}
    missing = sorted(set(range(1, max(counts) + 1)) - numbers)
    if len(counts) > 1:
        raise InspectError(f"{directory}: shards claim different counts ({', '.join(map(str, sorted(counts)))})")
    if missing:
        raise InspectError(f"{directory}: shard {missing[0]} of {max(counts)} is missing ({len(missing)} in all)")
    return "numbered"


def _weight_map(directory: Path) -> Mapping[str, str]:
    """Tensor -> file, from the index where there is one, else from the headers."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return {name: stored.file for name, stored in tensors_of(directory).items()}
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
        found = raw["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise InspectError(f"{index}: is no weight index: {type(problem).__name__} {problem}") from None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise InspectError(f"{index}: weight_map must map tensor names to file names")
    return found


def tensors_of(directory: Path) -> dict[str, Stored]:
    """Every tensor in the directory's safetensors files, by name. Raises InspectError for a damaged header or a
    tensor that two files hold."""
    found: dict[str, Stored] = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, stored in _header(path):
            if name in found:
                raise InspectError(f"{directory}: tensor {name} lies in both {found[name].file} and {path.name}")
            found[name] = stored
    return found


def _header(path: Path) -> Iterable[tuple[str, Stored]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(_MOST_HEADER, path.stat().st_size - 8):
            raise InspectError(
                f"{path}: its header claims {size} bytes, the file has {path.stat().st_size} (truncated?)"
            )
        try:
            raw: dict[str, Any] = json.loads(file.read(size))
            return [
                (name, Stored(str(item["dtype"]), tuple(map(int, item["shape"])), path.name))
                for name, item in raw.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise InspectError(f"{path}: its header is damaged: {type(problem).__name__} {problem}") from None


def sum_by_layer(tensors: Mapping[str, Stored]) -> tuple[dict[int, int], int]:
    """(parameters of each decoder layer, parameters outside layers), tensor by tensor."""
    layers: dict[int, int] = {}
    outer = 0
    for name, stored in tensors.items():
        if found := _LAYER.search(name):
            layers[int(found[1])] = layers.get(int(found[1]), 0) + stored.params
        else:
            outer += stored.params
    return layers, outer
