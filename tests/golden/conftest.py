"""One small model, its oracle, and records of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pytest_adapt.golden.record import Record, RecordKey, make_record, tokens_digest
from pytest_adapt.golden.reference import OracleReference
from pytest_adapt.models import materialise


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def live(models_root: Path) -> OracleReference:
    return OracleReference(materialise("qwen3-moe-odd", models_root), ("fp32", "bf16"), "qwen3-moe-odd")


@pytest.fixture(scope="session")
def tokens() -> Callable[..., tuple[int, ...]]:
    def draw(count: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 331, count))

    return draw


@pytest.fixture(scope="session")
def make(live: OracleReference) -> Callable[..., Record]:
    def record(prompt: str, sequence: tuple[int, ...], precisions: tuple[str, ...] = ("fp32", "bf16")) -> Record:
        key = RecordKey(
            "qwen3-moe-odd", prompt, "spec", live.oracle.checkpoint.weight_digest(), tokens_digest(sequence)
        )
        return make_record(live.oracle, key, sequence, precisions)

    return record
