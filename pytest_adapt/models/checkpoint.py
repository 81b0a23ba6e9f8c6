"""Writing a conformance model as a checkpoint directory that any engine can serve."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pytest_adapt.models.entries import ModelEntry, ModelError, directory_name, spec_hash
from pytest_adapt.models.tokenizer import character_tokenizer, tokenizer_config
from pytest_adapt.models.weights import draw, tensors

__all__ = ["MARKER", "StoredTensor", "is_complete", "materialise_entry", "write_json", "write_shards"]

MARKER = "adapt.json"
"""Written last into a checkpoint directory: spec hash, and size and SHA-256 of every other file."""

StoredTensor = tuple[str, str, tuple[int, ...], bytes]
"""Name, safetensors dtype tag, shape, little-endian bytes."""
_ABANDONED = 24 * 3600.0
"""Seconds after which nobody still writes into a scratch directory: a model takes minutes."""


def materialise_entry(entry: ModelEntry, root: Path) -> Path:
    """Write ``entry`` under ``root`` unless a complete copy is there; returns its directory (absolute)."""
    root = root.absolute()
    target = root / directory_name(entry)
    if is_complete(target, spec_hash(entry)):
        return target
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root, entry.name)
    scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=root))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        if entry.kind in ("procedural", "needle"):
            _write_procedural(entry, fresh)
        elif entry.kind == "smollm2":
            from pytest_adapt.models.smollm2 import write_checkpoint

            write_checkpoint(entry, fresh)
        else:
            raise ModelError(f"model {entry.name}: unknown kind {entry.kind!r}; known: procedural, needle, smollm2")
        _write_marker(fresh, spec_hash(entry))
        if target.exists() and not is_complete(target, spec_hash(entry)):
            os.replace(target, scratch / "broken")
        try:
            os.replace(fresh, target)
        except OSError:
            # Another process was faster. Its copy is as good as ours, or something is wrong with the disk.
            if not is_complete(target, spec_hash(entry)):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sweep(root: Path, name: str) -> None:
    """Remove what processes that were killed while they wrote this model left behind, once nobody can still write."""
    for left in root.glob(f".{name}-*"):
        with contextlib.suppress(OSError):  # another process is sweeping too
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left, ignore_errors=True)


def is_complete(directory: Path, spec: str) -> bool:
    """Whether ``directory`` holds the checkpoint of ``spec`` with every file as it was written."""
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        if marker["spec"] != spec:
            return False
        return all(_facts(directory / name) == facts for name, facts in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _write_marker(directory: Path, spec: str) -> None:
    files = {path.name: _facts(path) for path in sorted(directory.iterdir())}
    write_json(directory / MARKER, {"spec": spec, "files": files})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_procedural(entry: ModelEntry, directory: Path) -> None:
    vocab = entry.config["vocab_size"]
    write_json(directory / "config.json", dict(entry.config))
    write_json(
        directory / "generation_config.json",
        {key: entry.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_json(directory / "tokenizer.json", character_tokenizer(vocab))
    write_json(directory / "tokenizer_config.json", tokenizer_config(entry.config["max_position_embeddings"]))
    write_shards(directory, _stored(entry), shards=3 if entry.shape_class == "aligned" else 2)


def _stored(entry: ModelEntry) -> Iterator[StoredTensor]:
    if entry.kind == "needle":
        from pytest_adapt.models.needle import needle_weights

        for name, value in needle_weights(entry).items():
            yield name, "BF16", value.shape, _bf16_bytes(value)
        return
    for spec in tensors(entry):
        value = draw(spec, entry.recipe["seed"])
        data = _bf16_bytes(value) if spec.dtype == "BF16" else value.astype("<f4").tobytes()
        yield spec.name, spec.dtype, spec.shape, data


def _bf16_bytes(value: np.ndarray) -> bytes:
    """Values lie on the bfloat16 grid: dropping the low half loses nothing."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32) >> np.uint32(16)
    return bits.astype("<u2").tobytes()


def write_shards(directory: Path, items: Iterable[StoredTensor], shards: int) -> None:
    """Write tensors into ``shards`` safetensors files of similar size plus the index that Hugging Face uses.

    Tensors keep their order, as exporters do. The bytes depend on the input alone.
    """
    held = list(items)
    total = sum(len(data) for *_, data in held)
    groups: list[list[StoredTensor]] = [[] for _ in range(shards)]
    seen = 0
    for item in held:
        groups[min(shards - 1, seen * shards // total)].append(item)
        seen += len(item[3])
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        _write_safetensors(directory / name, group)
        weight_map.update({item[0]: name for item in group})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def _write_safetensors(path: Path, group: list[StoredTensor]) -> None:
    # The format wants wide dtypes first, so that every tensor is aligned to its element size.
    ordered = sorted(group, key=lambda item: item[1] != "F32")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, data in ordered:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for *_, data in ordered:
            file.write(data)
