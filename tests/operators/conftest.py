"""The built-in engine with any fault in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.faults import get
from pytest_adapt.models import materialise
from pytest_adapt.target.protocol import Deployment, Info
from pytest_adapt.target.registry import resolve


@dataclass
class Bench:
    """One directory for the models of all tests."""

    root: Path

    def opened(self, precision: str, fault: str = "") -> tuple[Any, Info]:
        target: Any = resolve("builtin").create()
        if fault:
            get(fault).install(target.seams)
        return target, target.open(Deployment(str(materialise("llama-odd", self.root)), precision=precision))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("models"))
