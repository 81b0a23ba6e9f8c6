"""``python -m pytest_adapt diagnose REPORT``: which known faults a failed run looks like."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytest_adapt.faults.matrix import MatrixError
from pytest_adapt.faults.registry import Fault, catalogue
from pytest_adapt.verdict.diagnose import Diagnosis, Match, of_report, read_matrix

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command; exit code 0 when it could answer (also: nothing is red), 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt diagnose", description=__doc__)
    parser.add_argument("report", type=Path, help="report.json of a run, or its directory")
    parser.add_argument("--matrix", type=Path, help="kill matrix (default: the shipped one)")
    parser.add_argument("--most", type=int, default=3, help="explanations of each cause (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    options = parser.parse_args(list(arguments))
    try:
        report = _read(options.report)
        found = of_report(report, read_matrix(options.matrix)) if report["clusters"] else []
    except (MatrixError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    known = catalogue()
    if options.json:
        print(json.dumps([_plain(one, known) for one in found], indent=1))
        return 0
    if not found:
        print("nothing is red: there is nothing to explain")
    for number, diagnosis in enumerate(found, start=1):
        print("\n".join(_lines(number, diagnosis, known, options.most)))
    return 0


def _read(path: Path) -> Mapping[str, Any]:
    """A report. Raises ValueError naming the file where it is none."""
    file = path / "report.json" if path.is_dir() else path
    try:
        report: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if report["schema"] != 1:
            raise ValueError(f"{file}: schema {report['schema']!r}, this version reads 1")
        _ = report["clusters"], report["cases"], report["target"]
    except FileNotFoundError:
        raise ValueError(f"no report at {file}: name the report.json of a run (.adapt/report by default)") from None
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no report of a run: {error}") from None
    return report


def _lines(number: int, diagnosis: Diagnosis, known: Mapping[str, Fault], most: int) -> list[str]:
    plural = "s" if diagnosis.cases > 1 else ""
    lines = [f"{number}. {diagnosis.cause}: {diagnosis.cases} case{plural}, first {diagnosis.first}"]
    shown = diagnosis.matches[:most]
    for match in shown:
        lines.append(f"   {match.likelihood:4.0%}  {_named(match, known)}")
        if match.agrees:
            lines.append(f"         like it: {'; '.join(match.agrees)}")
        if match.differs:
            lines.append(f"         unlike it: {'; '.join(match.differs)}")
    rest = 1.0 - sum(match.likelihood for match in shown)
    none = next(match for match in diagnosis.matches if not match.fault)
    if none not in shown:
        lines.append(f"   {none.likelihood:4.0%}  none of the known; {rest - none.likelihood:.0%} others")
    how = f"by rows of the kill matrix on {diagnosis.observable}" if diagnosis.observable else "nothing was compared"
    return [*lines, f"   {how}"]


def _named(match: Match, known: Mapping[str, Fault]) -> str:
    fault = known.get(match.fault)
    if fault is None:
        return f"{match.fault} (not in this version's registry)" if match.fault else "none of the known"
    return f"{fault.id}  {fault.title} ({fault.report})"


def _plain(diagnosis: Diagnosis, known: Mapping[str, Fault]) -> dict[str, Any]:
    made = asdict(diagnosis)
    for match in made["matches"]:
        fault = known.get(match["fault"])
        match |= {"title": fault.title if fault else "", "report": fault.report if fault else ""}
    return made
