"""Hooks that pytest-adapt calls. Other plugins and conftest.py files implement them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_adapt.target.registry import Registry
    from pytest_adapt.verdict.result import CaseResult


def pytest_adapt_register_targets(registry: Registry) -> None:
    """Add target schemes: ``registry.register("acme", "acme_adapt:Target", requires=("acme",))``.

    Called once, before --adapt-target is resolved. Registering must not import the adapter.
    """


def pytest_adapt_case_finished(case: CaseResult) -> None:
    """A case came to its status. Called where reports are written (under xdist: on the controller)."""


@pytest.hookspec(firstresult=False)
def pytest_adapt_report_metadata(metadata: dict[str, Any]) -> None:
    """Add entries to the ``metadata`` of report.json (a build number, a board's serial); values must be JSON."""
