"""Keys under which the plugin keeps its state on pytest's own objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_adapt.items import ItemState
    from pytest_adapt.runner import Runner

__all__ = ["RUN", "STATE", "WHOLE"]

RUN: pytest.StashKey[Runner] = pytest.StashKey()
"""On the config, when a target is given."""
WHOLE: pytest.StashKey[bool] = pytest.StashKey()
"""On the config: no path was given, so that everything runs."""
STATE: pytest.StashKey[ItemState] = pytest.StashKey()
"""On each conformance item."""
