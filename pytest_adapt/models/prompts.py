"""Prompts of a conformance model: random ones, ones searched for wide routing margins, and every boundary length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pytest_adapt.models.entries import ModelEntry, ModelError
from pytest_adapt.models.tokenizer import plain_ids

__all__ = ["LONGEST", "SEARCHED", "lengths_of", "ordinary", "prompts_of", "random_tokens", "record_names", "shipped"]

LONGEST = 4096
SEARCHED = 4
"""Tokens of the prompt that is searched for a directory that routes."""
_RANDOM_LENGTHS = (1, 37, 150, 301)  # one token, and lengths that end inside a page of 16


def prompts_of(entry: ModelEntry, directory: Path) -> Mapping[str, tuple[int, ...]]:
    """See `pytest_adapt.models.prompts`. Raises ModelError for a prompt set nobody defines."""
    makers = {"random": _random, "boundary": _boundary, "searched": _shipped_set, "text": _shipped_set}
    found: dict[str, tuple[int, ...]] = {}
    for name in entry.prompts:
        if name not in makers:
            raise ModelError(f"model {entry.name}: unknown prompt set {name!r}; known: {', '.join(sorted(makers))}")
        found.update(makers[name](entry, directory, name))
    return found


def random_tokens(entry: ModelEntry, directory: Path, key: str, length: int) -> tuple[int, ...]:
    """``length`` ordinary token ids from a hash of (model, key, position); a longer draw extends a shorter one."""
    ids = ordinary(entry, json.loads((directory / "config.json").read_text(encoding="utf-8")))
    stream: list[int] = []
    block = 0
    while len(stream) < length:
        digest = hashlib.sha256(f"{entry.name}:{key}:{block}".encode()).digest()
        stream.extend(ids[int.from_bytes(digest[i : i + 4], "little") % len(ids)] for i in range(0, 32, 4))
        block += 1
    return tuple(stream[:length])


def ordinary(entry: ModelEntry, config: Mapping[str, Any]) -> range:
    """Token ids that mean nothing special, of the vocabulary of the checkpoint's config.json."""
    # Real vocabularies keep their special tokens at the start; skip both ends.
    return plain_ids(config["vocab_size"])[17 if entry.kind == "smollm2" else 0 :]


def shipped(entry: ModelEntry) -> Mapping[str, tuple[int, ...]]:
    """Token lists that ship as data for this model (``data/<name>.prompts.json``); empty when there are none."""
    name = entry.recipe.get("prompts_of", entry.name)
    file = resources.files("pytest_adapt.models") / "data" / f"{name}.prompts.json"
    if not file.is_file():
        return {}
    raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {key: tuple(value) for key, value in raw["prompts"].items()}


def lengths_of(entry: ModelEntry) -> dict[str, int]:
    """Prompt -> its length, of every prompt that tests get; no checkpoint is needed."""
    found: dict[str, int] = {}
    if entry.kind == "directory" and "num_experts_per_tok" in entry.config:
        found[f"searched-{SEARCHED}"] = SEARCHED
    for name in entry.prompts:
        if name in ("random", "boundary"):
            lengths = _RANDOM_LENGTHS if name == "random" else _boundary_lengths(entry)
            found |= {f"{name}-{length}": length for length in lengths}
        else:
            found |= {key: len(ids) for key, ids in shipped(entry).items() if key.startswith(f"{name}-")}
    return found


def record_names(entry: ModelEntry) -> dict[str, tuple[int, ...]]:
    """Prompt with a golden record of its own -> lengths of the prompts that it serves; no checkpoint is needed.

    A prompt that is the beginning of another one (those around boundaries are of one sequence) has no record.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in entry.prompts:
        if name == "random":
            found |= {f"{name}-{length}": (length,) for length in _RANDOM_LENGTHS}
        elif name == "boundary" and (lengths := _boundary_lengths(entry)):
            found[f"{name}-{lengths[-1]}"] = tuple(lengths)
        else:
            mine = {key: ids for key, ids in shipped(entry).items() if key.startswith(f"{name}-")}
            for key in sorted(mine, key=lambda one: (-len(mine[one]), one)):
                ids = mine[key]
                longer = next((one for one in found if one in mine and mine[one][: len(ids)] == ids), key)
                found[longer] = (*found.get(longer, ()), len(ids))
    return found


def _boundary_lengths(entry: ModelEntry) -> list[int]:
    return sorted({n for b in entry.contexts for n in (b - 1, b, b + 1) if 0 < n <= LONGEST})


def _shipped_set(entry: ModelEntry, directory: Path, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((key, value) for key, value in shipped(entry).items() if key.startswith(f"{name}-"))


def _random(entry: ModelEntry, directory: Path, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for length in _RANDOM_LENGTHS:
        yield f"{name}-{length}", random_tokens(entry, directory, f"{name}-{length}", length)


def _boundary(entry: ModelEntry, directory: Path, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """b-1, b and b+1 tokens of one sequence for every b in ``contexts``, so that all share their prefixes.

    The sequence is the shipped ``long`` one (searched like the prompts, so that routing stays certain) as far as
    it goes, then random.
    """
    lengths = _boundary_lengths(entry)
    if not lengths:
        return
    start = shipped(entry).get("long", ())
    tail = random_tokens(entry, directory, name, lengths[-1])
    sequence = start + tail[len(start) :]
    for length in lengths:
        yield f"{name}-{length}", sequence[:length]
