"""report.json as the commands read it: of this schema, and of the shape that they go by. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_adapt.documents import (
    DocumentError,
    Shape,
    both,
    choice,
    each,
    fields,
    number,
    of_schema,
    one_line,
    optional,
    read,
    text,
    truth,
    whole,
)
from pytest_adapt.verdict.result import Status

__all__ = ["CASE", "DIAGNOSED", "OUTCOMES", "SCHEMA", "read_report"]

SCHEMA = 1
"""Raised when a field changes its meaning or goes away; new fields do not raise it."""
_STATUS = choice(*(status.value for status in Status))
_MEASUREMENT = fields(
    {"metric": text, "value": number, "ok": truth},
    {"site": text, "prompt": text, "position": optional(whole), "detail": text, "observable": text},
)
_DIVERGENCE = fields(
    {"site": text, "position": whole, "error": number},
    {"got": text, "expected": text, "step": text, "ranks": each(text), "expert": optional(whole)},
)
CASE: Shape = fields(
    {
        **dict.fromkeys(("case", "suite", "rung", "model", "layout", "precision", "reason"), text),
        "status": _STATUS,
        "measurements": each(_MEASUREMENT),
        "divergence": optional(_DIVERGENCE),
    }
)
"""A case as far as a diagnosis reads it: of a report, or of a row of the kill matrix."""
_TARGET = fields({}, {"observables": each(text)})
OUTCOMES: Shape = fields({"cases": each(fields({"case": text, "status": _STATUS}, {"required": truth}))})
"""A report as far as it says what became of each test."""
DIAGNOSED: Shape = fields(
    {
        "target": _TARGET,
        "settings": _TARGET,
        "cases": each(CASE),
        "clusters": each(fields({"cause": text, "cases": each(text), "first": text}, {"sites": each(text)})),
    },
    {"fatal": text},
)
"""A report as far as a diagnosis reads it."""


def read_report(path: Path, shape: Shape) -> Mapping[str, Any]:
    """The report in a file, or in a directory as ``report.json``. Raises DocumentError where it is none, of another
    schema or shape, or where its clusters are not of its cases."""
    file = path / "report.json" if os.path.isdir(path) else path
    if not os.path.lexists(file):
        raise DocumentError(f"no report at {file}: name the report.json of a run (.adapt/report by default)")
    found: Mapping[str, Any] = read(file, both(of_schema(SCHEMA), shape))
    known = {case["case"] for case in found["cases"]}
    for place, cluster in enumerate(found["clusters"] if shape is DIAGNOSED else ()):
        if not cluster["cases"]:
            raise DocumentError(f"{file}: clusters[{place}] has no cases")
        for name in (*cluster["cases"], cluster["first"]):
            if name not in known:
                raise DocumentError(f"{file}: clusters[{place}] names {one_line(name, 120)}, which is no case")
    return found
