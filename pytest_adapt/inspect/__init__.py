"""What can be known about a model before anything runs: structure, parameters, memory per card.

    from pytest_adapt.inspect import analyse
    structure = analyse("deepseek-v3")          # a preset, a config.json or a checkpoint directory

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pytest_adapt.inspect.config import from_config, load_config
from pytest_adapt.inspect.parameters import Parameters, count
from pytest_adapt.inspect.presets import preset, presets
from pytest_adapt.inspect.structure import InspectError, Structure

__all__ = ["InspectError", "Parameters", "Structure", "analyse", "count", "reference_scores"]


def analyse(what: str | Path) -> Structure:
    """Structure of a config.json, a directory that holds one, or a preset. Raises InspectError in one line."""
    path = Path(what)
    if path.exists():
        return from_config(load_config(path), path.name if path.is_file() else f"{path.name}/config.json")
    name = str(what)
    if name in presets():
        return preset(name)
    raise InspectError(f"{name}: neither a file, a directory nor a preset; presets are {', '.join(presets())}")


def reference_scores() -> Mapping[str, Any]:
    """Published capability scores with their provenance (anchors, never a gate)."""
    file = resources.files("pytest_adapt.inspect") / "data" / "reference_scores.json"
    raw: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return raw
