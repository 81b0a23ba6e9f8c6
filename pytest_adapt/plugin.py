"""Entry point: hooks only. Without --adapt-target nothing here does more than declare options and fixtures.

Standard library and pytest only; the rest of the package is imported when a target is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.fixtures import (
    context_length,
    deployment,
    gate,
    judge,
    layout,
    model,
    precision,
    reference,
    stopwatch,
    target,
)
from pytest_adapt.options import add_options, given_target, refuse_contradictions, refuse_lone_options
from pytest_adapt.stash import WHOLE

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

MARKERS = (
    "requirement(number, ...): numbers of the requirements that this test proves.",
    "adapt(rung=None, needs=(), features={}, profile='smoke', required=True, blocks=False, classes=(), models=(), "
    "layouts=(), precisions=(), contexts=(), first=False, requests=1, tokens=0, tier=''): a conformance test: "
    "its rung on the ladder, the observables of which one must be shown, the features to deploy with, the smallest "
    "profile that runs it, whether the rest of its deployment waits for it, which rows of the matrix it takes, and its "
    "tier of the performance gate.",
    "adapt_serial: measures time; deferred under xdist.",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_adapt import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    known = early_config.known_args_namespace
    if not given_target(early_config, known) or hasattr(early_config, "workerinput"):
        return
    from pytest_adapt.shipped import with_suites

    early_config.stash[WHOLE] = with_suites(
        args,
        known.file_or_dir,
        directory=Path(early_config.invocation_params.dir),
        rootdir=early_config.rootpath,
        testpaths=early_config.getini("testpaths"),
        pyargs=known.pyargs,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.option.adapt_matrix or not _wanted(config):
        return None
    from pytest_adapt.startup import print_matrix

    return print_matrix(config)


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if _wanted(config):
        from pytest_adapt.startup import start

        start(config)
    else:
        refuse_lone_options(config)


def _wanted(config: pytest.Config) -> bool:
    """A target is given, and pytest is asked to do more than print its help. Raises pytest.UsageError where the
    options of such a run contradict each other."""
    option: Any = config.option
    if option.help or option.version:
        return False
    refuse_contradictions(config)
    return bool(given_target(config))
