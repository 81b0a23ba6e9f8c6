"""Small pieces of a user's checkpoint: some of its layers, and some experts of each, with the real weights.

A piece is a checkpoint like any other, small enough for the oracle. It computes another function than the whole
model, so its text means nothing; that a target and the oracle agree on it means as much as on a procedural model,
with the value ranges that trained weights have. Bytes are copied, never converted.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_adapt.models.checkpoint import StoredTensor, write_json, write_shards
from pytest_adapt.models.entries import ModelError

__all__ = ["numbers_of", "slice_checkpoint"]

_LAYER = re.compile(r"(?P<before>(?:^|.*\.)layers\.)(?P<layer>\d+)(?P<after>\..+)")
_EXPERT = re.compile(r"(?P<before>.*\.experts\.)(?P<expert>\d+)(?P<after>\..+)")
# Rows of these belong to experts.
_PER_EXPERT = re.compile(r".*\.gate\.(?:weight|bias|e_score_correction_bias)")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def numbers_of(text: str) -> tuple[int, ...]:
    """``0-3,7`` -> (0, 1, 2, 3, 7). Raises ModelError."""
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not ends or int(ends[2] or ends[1]) < int(ends[1]) or int(ends[2] or 0) > 1 << 16:
            raise ModelError(f"{text!r}: cannot read {part!r}; expected numbers and ranges, as in 0-3,7")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    if len(set(found)) != len(found):
        raise ModelError(f"{text!r} names a number twice")
    return tuple(sorted(found))


def slice_checkpoint(source: Path, target: Path, layers: Sequence[int], experts: int | None = None) -> Path:
    """Write the piece of ``source`` that has only ``layers`` (renumbered) and ``experts`` experts in each.

    With expert groups, every group keeps equally many. ``target`` must not exist. Raises ModelError for a layer or
    an expert that is not there, experts stored fused, or a checkpoint that cannot be read.
    """
    if target.exists():
        raise ModelError(f"{target} exists; name a new directory")
    config = _json(source / "config.json")
    chosen = _experts(config, experts)
    fresh = _config(config, layers, chosen)
    tensors = list(_tensors(source, {old: new for new, old in enumerate(layers)}, chosen))
    target.mkdir(parents=True)
    write_json(target / "config.json", fresh)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    write_shards(target, tensors, shards=2)
    return target


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{path}: cannot be read: {problem}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds {type(raw).__name__}, expected an object")
    return raw


def _experts(config: Mapping[str, Any], wanted: int | None) -> tuple[int, ...] | None:
    """Old numbers of the experts that stay, ascending; None where all do."""
    if wanted is None:
        return None
    keys = [key for key in _EXPERT_COUNTS if config.get(key)]
    if not keys:
        raise ModelError("the model has no experts: leave --experts out")
    for key in (keys[0], "n_group", "topk_group", "num_experts_per_tok"):
        if config.get(key) is not None and (type(config[key]) is not int or config[key] < 1):
            raise ModelError(f"config.json: {key} is {config[key]!r}, expected a number of at least 1")
    count, groups = config[keys[0]], config.get("n_group") or 1
    if not 1 <= wanted <= count or wanted % groups:
        rule = f", a multiple of its {groups} groups" if groups > 1 else ""
        raise ModelError(f"{wanted} experts of {count}: expected 1 to {count}{rule}")
    size, kept = count // groups, wanted // groups
    if groups > 1 and kept < 2:
        raise ModelError(
            f"{wanted} experts of {count}: a group is ranked by its two best, so keep at least {2 * groups}"
        )
    return tuple(group * size + i for group in range(groups) for i in range(kept))


def _config(config: Mapping[str, Any], layers: Sequence[int], experts: tuple[int, ...] | None) -> dict[str, Any]:
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or not layers or layers[-1] >= count:
        raise ModelError(f"layers {','.join(map(str, layers))}: the model has layers 0 to {count!r} - 1")
    fresh = dict(config) | {"num_hidden_layers": len(layers)}
    if config.get("num_nextn_predict_layers"):
        fresh["num_nextn_predict_layers"] = 0
    if isinstance(config.get("layer_types"), list):
        fresh["layer_types"] = [config["layer_types"][i] for i in layers]
    if config.get("mlp_only_layers"):
        fresh["mlp_only_layers"] = [new for new, old in enumerate(layers) if old in config["mlp_only_layers"]]
    if config.get("first_k_dense_replace"):
        fresh["first_k_dense_replace"] = sum(old < config["first_k_dense_replace"] for old in layers)
    if (config.get("decoder_sparse_step") or 1) > 1:
        # Renumbering breaks the stride; a list of dense layers says the same.
        step = config["decoder_sparse_step"]
        fresh["decoder_sparse_step"] = 1
        dense = {new for new, old in enumerate(layers) if (old + 1) % step}
        fresh["mlp_only_layers"] = sorted(dense | set(fresh.get("mlp_only_layers") or []))
    if experts is not None:
        fresh |= {key: len(experts) for key in _EXPERT_COUNTS if config.get(key)}
        most = len(experts) // (config.get("n_group") or 1) * (config.get("topk_group") or 1)
        fresh["num_experts_per_tok"] = min(config["num_experts_per_tok"], most)
    return fresh


def _tensors(source: Path, layers: Mapping[int, int], experts: tuple[int, ...] | None) -> Iterator[StoredTensor]:
    renumbered = {old: new for new, old in enumerate(experts)} if experts is not None else None
    seen: set[int] = set()
    for file, names in _by_file(source).items():
        with _Header(file) as header:
            for name in names:
                where = _LAYER.fullmatch(name)
                if where and int(where["layer"]) not in layers:
                    continue
                dtype, shape, data = header.tensor(name)
                if where:
                    seen.add(int(where["layer"]))
                    name = f"{where['before']}{layers[int(where['layer'])]}{where['after']}"
                expert = _EXPERT.fullmatch(name)
                if renumbered is None:
                    yield name, dtype, shape, data
                elif expert:
                    if int(expert["expert"]) in renumbered:
                        new = renumbered[int(expert["expert"])]
                        yield f"{expert['before']}{new}{expert['after']}", dtype, shape, data
                elif ".experts." in name:
                    raise ModelError(f"{file}: {name} holds all experts fused; only checkpoints with one tensor each")
                elif _PER_EXPERT.fullmatch(name) and experts is not None:
                    row = len(data) // shape[0]
                    kept = b"".join(data[i * row : (i + 1) * row] for i in experts)
                    yield name, dtype, (len(experts), *shape[1:]), kept
                else:
                    yield name, dtype, shape, data
    absent = sorted(set(layers) - seen)
    if absent:
        raise ModelError(f"{source}: no tensor of layer {absent[0]}")


def _by_file(source: Path) -> dict[Path, list[str]]:
    """Files with the names of their tensors, in checkpoint order."""
    index = source / "model.safetensors.index.json"
    if not index.is_file():
        single = source / "model.safetensors"
        if not single.is_file():
            raise ModelError(f"{source}: neither model.safetensors.index.json nor model.safetensors")
        with _Header(single) as header:
            return {single: list(header.names)}
    mapping = _json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelError(f"{index}: weight_map is missing")
    found: dict[Path, list[str]] = {}
    for name, file in mapping.items():
        found.setdefault(source / str(file), []).append(name)
    return dict(sorted(found.items()))


class _Header:
    """One open safetensors file. Raises ModelError when it is damaged or lacks a tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as problem:
            raise ModelError(f"{path}: cannot be read: {problem.strerror}") from None
        try:
            size = int.from_bytes(self._file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            self._start = 8 + size
            self._entries: dict[str, Any] = json.loads(self._file.read(size))
            self.names = [name for name in self._entries if name != "__metadata__"]
        except (ValueError, TypeError, RecursionError) as problem:
            self._file.close()
            raise ModelError(f"{path}: is no safetensors file: {problem}") from None

    def __enter__(self) -> _Header:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tensor(self, name: str) -> tuple[str, tuple[int, ...], bytes]:
        """(dtype tag, shape, bytes)."""
        try:
            entry = self._entries[name]
            first, stop = entry["data_offsets"]
            self._file.seek(self._start + first)
            data = self._file.read(stop - first)
            if len(data) != stop - first:
                raise ValueError(f"the file ends inside {name} (truncated?)")
            return str(entry["dtype"]), tuple(entry["shape"]), data
        except (KeyError, TypeError, ValueError) as problem:
            raise ModelError(f"{self.path}: tensor {name}: {type(problem).__name__}: {problem}") from None
