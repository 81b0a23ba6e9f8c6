"""The fixtures of a conformance test. Any test that asks for one gets the matrix; see docs/writing-tests.md.

Without --adapt-target they skip. Heavy modules are imported inside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.stash import RUN

if TYPE_CHECKING:
    from pytest_adapt.handle import ModelHandle
    from pytest_adapt.layout import Layout
    from pytest_adapt.open_target import OpenTarget
    from pytest_adapt.runner import Runner
    from pytest_adapt.target.protocol import Deployment

__all__ = [
    "context_length",
    "deployment",
    "gate",
    "judge",
    "layout",
    "model",
    "precision",
    "reference",
    "stopwatch",
    "target",
]


def _runner(request: pytest.FixtureRequest) -> Runner:
    runner: Runner | None = request.config.stash.get(RUN, None)
    if runner is None:
        pytest.skip("no target: give --adapt-target=SPEC to run this test")
    return runner


def _parameter(request: pytest.FixtureRequest) -> Any:
    _runner(request)
    if not hasattr(request, "param"):
        pytest.fail(
            f"fixture {request.fixturename} has no row of the matrix here: ask for it in the test, not at run time"
        )
    return request.param


@pytest.fixture
def model(request: pytest.FixtureRequest) -> ModelHandle:
    """The model of this row: name, entry, directory, prompts(limit), boundaries."""
    return _runner(request).model(request.node, str(_parameter(request)))


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    """The layout of this row; ``str(layout)`` is its canonical name."""
    from pytest_adapt.layout import parse

    return parse(str(_parameter(request)))


@pytest.fixture
def precision(request: pytest.FixtureRequest) -> str:
    """fp32, bf16 or fp16."""
    return str(_parameter(request))


@pytest.fixture
def context_length(request: pytest.FixtureRequest) -> int:
    """Tokens of the longest prompt of this row."""
    return int(_parameter(request))


@pytest.fixture
def deployment(request: pytest.FixtureRequest, model: ModelHandle, layout: Layout, precision: str) -> Deployment:
    """What the target is opened with: model, layout, precision, and the features that the test's mark asks for."""
    return _runner(request).deployment(request.node, model, str(layout), precision)


@pytest.fixture
def target(request: pytest.FixtureRequest, deployment: Deployment) -> OpenTarget:
    """The target with this deployment open. The test ends here (unknown, unsupported) where that falls short."""
    return _runner(request).target(request.node, deployment)


@pytest.fixture
def reference(request: pytest.FixtureRequest, model: ModelHandle) -> Any:
    """What is right: golden records of a catalogue model, the live oracle for a directory, or --adapt-reference."""
    return _runner(request).reference(request.node, model)


@pytest.fixture
def judge(request: pytest.FixtureRequest, precision: str) -> Any:
    """Collects comparisons and derives budgets; its verdict is taken when the test function returns."""
    info = request.getfixturevalue("target").info if "target" in request.fixturenames else None
    return _runner(request).judge(request.node, precision, info)


@pytest.fixture
def stopwatch(request: pytest.FixtureRequest) -> Any:
    """Times loads: ``stopwatch.load(target, prompts, new)``; through pytest-benchmark where that is installed."""
    from pytest_adapt.perf.timing import Stopwatch

    _runner(request)
    found = request.getfixturevalue("benchmark") if request.config.pluginmanager.hasplugin("benchmark") else None
    return Stopwatch(found if getattr(found, "enabled", False) else None)


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Any:
    """What a load costs: against the record (``counters``), or against a baseline (``times``, ``instructions``)."""
    return _runner(request).gating.asked_by(request.node)
