"""report.json: everything a run found, under a versioned schema (docs/report-schema.md)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.report.operators import coverage
from pytest_adapt.report.reading import SCHEMA
from pytest_adapt.verdict.ladder import clusters

if TYPE_CHECKING:
    from pytest_adapt.report.collector import Collector

__all__ = ["SCHEMA", "document", "report_path", "write_report"]

PERFORMANCE_NOTE = "times and memory are engineering references of this machine and run, not marketing metrics"
_VERSIONS = ("pytest-adapt", "adapt-engine", "pytest", "numpy", "safetensors", "torch", "transformers")


def report_path(collector: Collector) -> Path:
    settings, config = collector.runner.settings, collector.runner.config
    if settings.report:
        return Path(config.invocation_params.dir) / settings.report / "report.json"
    return config.rootpath / ".adapt" / "report" / "report.json"


def write_report(collector: Collector, exit_status: int) -> str:
    """Write report.json in one step; the path as text, or "" (with a warning) where the directory cannot be written."""
    path = report_path(collector)
    collector.document = _plain(document(collector, exit_status))
    text = json.dumps(collector.document, indent=1, allow_nan=False)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        collector.runner.config.issue_config_time_warning(
            pytest.PytestWarning(f"adapt: cannot write {path}: {error}"), stacklevel=2
        )
        return ""
    return os.path.relpath(path, collector.runner.config.invocation_params.dir)


def document(collector: Collector, exit_status: int) -> dict[str, Any]:
    """The report as plain values."""
    runner = collector.runner
    ladder = collector.ladder
    extra: dict[str, Any] = {}
    runner.config.hook.pytest_adapt_report_metadata(metadata=extra)
    settings = asdict(runner.settings)
    sources = settings.pop("sources")
    return {
        "schema": SCHEMA,
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "exit": exit_status,
        "performance_note": PERFORMANCE_NOTE,
        "seconds": round(collector.seconds, 3),
        "peak_bytes": collector.peak_bytes,
        "fatal": collector.fatal,
        "settings": settings,
        "sources": sources,
        "requires": runner.kind,
        "target": collector.target,
        "environment": _environment(),
        "metadata": extra,
        "ladder": {
            "trusted": ladder.trusted,
            "text": str(ladder),
            "rungs": [{"name": rung.name, "state": rung.state, "counts": dict(rung.counts)} for rung in ladder.rungs],
        },
        "clusters": [
            {
                "cause": cluster.cause,
                "cases": [case.case for case in cluster.cases],
                "first": cluster.first.case,
                "sites": list(cluster.sites),
                "command": runner.command_of(cluster.first),
            }
            for cluster in clusters(collector.cases)
        ],
        "time_box": {name: value for name, value in collector.time_box.items() if name != "lines"},
        "operators": coverage(collector.cases),
        "gate": runner.gating.facts(),
        "cases": [asdict(case) for case in sorted(collector.cases, key=lambda case: case.case)],
        "waivers": [
            {
                **asdict(one.waiver),
                "expires": one.waiver.expires.isoformat(),
                "state": one.state,
                "waived": one.waived,
                "passed": one.passed,
                "red": one.red,
            }
            for one in collector.waived
        ],
        "usage": collector.usage,
    }


def _environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform(), "cores": str(os.cpu_count())}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _plain(value: Any) -> Any:
    """JSON has no infinity: such numbers become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
