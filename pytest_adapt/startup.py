"""From pytest's configuration to an active run: options and target are resolved, and its hooks registered."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_adapt.gating import baseline_of
from pytest_adapt.matrix import Matrix, github_jobs, make_matrix
from pytest_adapt.options import Settings, read_settings
from pytest_adapt.runner import Runner
from pytest_adapt.stash import RUN
from pytest_adapt.target.protocol import TargetError

if TYPE_CHECKING:
    from pytest_adapt.perf.baseline import Baseline
    from pytest_adapt.target.registry import TargetSpec

__all__ = ["print_matrix", "start"]


def start(config: pytest.Config) -> None:
    """Resolve options and target, and register the active hooks. Raises pytest.UsageError."""
    settings, spec, matrix, baseline = _resolve(config)
    _share_cores()
    if settings.selftest:
        from pytest_adapt.selftest.runner import start as start_selftest

        start_selftest(config, settings)
        return
    runner = Runner(config, settings, spec, matrix, baseline)
    config.stash[RUN] = runner
    config.pluginmanager.register(runner.collection, "adapt-collection")
    config.pluginmanager.register(runner, "adapt-runner")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(runner.collector, "adapt-collector")
    if settings.plan:
        config.option.dist = "no"
        config.option.tx = []


def _share_cores() -> None:
    """Give each xdist worker its share of the cores and let idle OpenMP threads sleep: this must be said before a
    framework is imported. What the user has set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


def print_matrix(config: pytest.Config) -> int:
    """Write the CI matrix to standard output; the exit code."""
    print(github_jobs(_resolve(config)[2]))
    return 0


def _resolve(config: pytest.Config) -> tuple[Settings, TargetSpec, Matrix, Baseline | None]:
    from pytest_adapt.target.registry import builtin_registry

    settings = read_settings(config)
    registry = builtin_registry()
    config.hook.pytest_adapt_register_targets(registry=registry)
    try:
        spec = registry.resolve(settings.target, rootdir=config.rootpath, mode=settings.mode)
        if settings.reference:
            registry.resolve(settings.reference, rootdir=config.rootpath)
    except TargetError as error:
        raise pytest.UsageError(str(error)) from None
    if settings.inject:
        from pytest_adapt.faults.registry import UnknownFault, get

        try:
            get(settings.inject)
        except UnknownFault as error:
            raise pytest.UsageError(f"--adapt-inject: {error}") from None
    if settings.op:
        from pytest_adapt.operators import CaseError, parse_case

        try:
            case = parse_case(settings.op)
        except CaseError as error:
            raise pytest.UsageError(f"--adapt-op: {error}") from None
        settings = replace(settings, precisions=(case.precision,))
    return settings, spec, make_matrix(settings, spec), baseline_of(config, settings, spec, registry)
