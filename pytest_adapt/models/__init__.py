"""Conformance models: small checkpoints whose weights are computed, and one real model.

Importing this package and calling `catalogue` cost the standard library only (collection does both);
numpy is imported when a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_adapt.models.entries import ModelEntry, ModelError, catalogue, directory_name, spec_hash

# Imported here, before `prompts` is defined: a module that is imported later would take the function's name.
from pytest_adapt.models.prompts import prompts_of

__all__ = [
    "ModelEntry",
    "ModelError",
    "catalogue",
    "directory_name",
    "materialise",
    "prompts",
    "spec_hash",
]


def materialise(name: str, root: Path | str = Path(".adapt/models")) -> Path:
    """Checkpoint directory of a catalogue model, written under ``root`` on first use.

    The directory is ``root/<name>-<first 12 digits of the spec hash>``; it appears in one step (any number
    of processes may ask at once) and is reused while its files still have the digests that were written.
    Raises ModelError for an unknown name, or when the real weights of a model are not installed.
    """
    from pytest_adapt.models.checkpoint import materialise_entry

    entries = catalogue()
    if name not in entries:
        raise ModelError(f"unknown model {name!r}; the catalogue has {', '.join(sorted(entries))}")
    return materialise_entry(entries[name], Path(root))


def prompts(entry: ModelEntry, directory: Path | str) -> Mapping[str, tuple[int, ...]]:
    """Named prompts of a model as token ids; names start with their set (``random-37``, ``searched-0``).

    ``directory`` is the materialised checkpoint (its vocabulary bounds the ids).
    """
    return prompts_of(entry, Path(directory))
