"""The catalogue: one JSON manifest per model (what it is, how it is drawn, what a target must show on it)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

__all__ = ["ModelEntry", "ModelError", "catalogue", "directory_name", "spec_hash"]

# Part of every spec hash: raise it when the meaning of a manifest changes, so that old directories,
# and goldens recorded from them, are recognised as stale.
GENERATOR = 2


class ModelError(Exception):
    """A conformance model cannot be produced; the message is one line with the way out."""


@dataclass(frozen=True)
class ModelEntry:
    """One conformance model, as its manifest describes it."""

    name: str
    family: str
    """qwen3_moe, mixtral, deepseek_v3 or llama."""
    shape_class: str
    """odd (awkward sizes), wide (sizes that many ranks share, unevenly), aligned (what accelerator kernels accept),
    real, or needle (recalls at any length)."""
    kind: str
    """procedural (weights are drawn), needle (they are constructed) or smollm2 (converted from the installed GGUF)."""
    config: Mapping[str, Any] = field(hash=False)
    """config.json of the checkpoint; for converted models, only what the conversion does not read from the file."""
    prompts: tuple[str, ...]
    """Names of prompt sets: random, searched, boundary, text."""
    contexts: tuple[int, ...]
    """Lengths at which this model's behaviour can change: page size, window, original rotary length ..."""
    precisions: tuple[str, ...]
    must_pass: tuple[str, ...]
    """Suites that count for every target; a target cannot shrink this list."""
    description: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """How the weights are drawn: seed, selection_bias, expert cut."""

    @property
    def least_context(self) -> int:
        """Of a needle model: the shortest context that holds a question, its first boundary from the window on."""
        return min(edge for edge in self.contexts if edge >= int(self.config.get("sliding_window") or 0))


def catalogue() -> dict[str, ModelEntry]:
    """Every conformance model by name, sorted by name. Reads the shipped manifests, imports nothing else."""
    folder = resources.files("pytest_adapt.models") / "manifests"
    entries = {}
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".json"):
            raw = json.loads(file.read_text(encoding="utf-8"))
            for key in ("prompts", "contexts", "precisions", "must_pass"):
                raw[key] = tuple(raw[key])
            entries[raw["name"]] = ModelEntry(**raw)
    return entries


def spec_hash(entry: ModelEntry) -> str:
    """SHA-256 (hex) of what determines the checkpoint: architecture, recipe and generator version.

    Prompts, contexts and must-pass lists are not part of it: changing them leaves the weights alone.
    """
    spec = {"generator": GENERATOR, "kind": entry.kind, "config": entry.config, "recipe": entry.recipe}
    return hashlib.sha256(json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def directory_name(entry: ModelEntry) -> str:
    """Folder of the checkpoint below the models root."""
    return f"{entry.name}-{spec_hash(entry)[:12]}"
