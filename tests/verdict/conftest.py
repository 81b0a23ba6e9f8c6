"""Small models, a healthy target that rounds otherwise than the yardstick, and copies of a model made wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pytest_adapt.models import materialise
from pytest_adapt.oracle import Oracle
from pytest_adapt.selftest.healthy import Specimen, respond
from pytest_adapt.target.protocol import Response


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def bench(models_root: Path) -> Callable[[str], Specimen]:
    made: dict[str, Specimen] = {}

    def get(name: str) -> Specimen:
        if name not in made:
            directory = materialise(name, models_root)
            made[name] = Specimen(directory, Oracle(directory))
        return made[name]

    return get


@pytest.fixture
def answer() -> Callable[..., Response]:
    return respond


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint with some tensors (name -> function of the old values) or keys of config.json changed."""

    def make(
        directory: Path,
        tensors: Mapping[str, Callable[[dict[str, np.ndarray]], np.ndarray]] | None = None,
        **config: Any,
    ) -> Path:
        copy = tmp_path / "damaged"
        copy.mkdir()
        checkpoint = Oracle(directory).checkpoint
        values = {name: np.asarray(checkpoint.tensor(name), np.float32) for name in checkpoint.names()}
        changed = {name: np.ascontiguousarray(change(values), np.float32) for name, change in (tensors or {}).items()}
        assert changed.keys() <= values.keys()
        save_file(
            {name: np.ascontiguousarray(value) for name, value in {**values, **changed}.items()},
            copy / "model.safetensors",
        )
        settings = json.loads((directory / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**settings, **config}))
        return copy

    return make
