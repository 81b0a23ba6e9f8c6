"""``python -m pytest_adapt diagnose REPORT``: which known faults a failed run looks like."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytest_adapt.documents import DocumentError, one_line
from pytest_adapt.faults.registry import Fault, catalogue
from pytest_adapt.report.reading import DIAGNOSED, read_report
from pytest_adapt.verdict.diagnose import Diagnosis, Match, judged, of_report, read_matrix

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command; exit code 0 when it could answer (also: nothing is red), 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt diagnose", description=__doc__)
    parser.add_argument("report", type=Path, help="report.json of a run, or its directory")
    parser.add_argument("--matrix", type=Path, help="kill matrix (default: the shipped one)")
    most = "explanations of each cause, 1 to 99 (default: %(default)s)"
    parser.add_argument("--most", type=int, choices=range(1, 100), metavar="N", default=3, help=most)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    options = parser.parse_args(list(arguments))
    try:
        report = read_report(options.report, DIAGNOSED)
        found = of_report(report, read_matrix(options.matrix)) if report["clusters"] else []
    except DocumentError as error:
        print(error, file=sys.stderr)
        return 2
    known = catalogue()
    if options.json:
        print(json.dumps([_plain(one, known) for one in found], indent=1))
        return 0
    if not judged(report["cases"]):
        print(_nothing(report))
    elif not found:
        print("nothing is red: there is nothing to explain")
    for number, diagnosis in enumerate(found, start=1):
        print("\n".join(_lines(number, diagnosis, known, options.most)))
    return 0


def _nothing(report: Mapping[str, Any]) -> str:
    """Why a run says nothing of any fault."""
    cases = report["cases"]
    why = report.get("fatal") or next((case["reason"] for case in cases if case["reason"]), "no case says why")
    return f"nothing was judged, so that nothing can be explained: {one_line(why)}"


def _lines(number: int, diagnosis: Diagnosis, known: Mapping[str, Fault], most: int) -> list[str]:
    plural = "s" if diagnosis.cases > 1 else ""
    cause, first = one_line(diagnosis.cause), one_line(diagnosis.first)
    lines = [f"{number}. {cause}: {diagnosis.cases} case{plural}, first {first}"]
    shown = diagnosis.matches[:most]
    for match in shown:
        lines.append(f"   {match.likelihood:4.0%}  {_named(match, known)}")
        if match.agrees:
            lines.append(f"         like it: {one_line('; '.join(match.agrees))}")
        if match.differs:
            lines.append(f"         unlike it: {one_line('; '.join(match.differs))}")
    rest = 1.0 - sum(match.likelihood for match in shown)
    none = next(match for match in diagnosis.matches if not match.fault)
    if none not in shown:
        lines.append(f"   {none.likelihood:4.0%}  none of the known; {rest - none.likelihood:.0%} others")
    how = f"by rows of the kill matrix on {diagnosis.observable}" if diagnosis.observable else "nothing was compared"
    return [*lines, f"   {how}"]


def _named(match: Match, known: Mapping[str, Fault]) -> str:
    fault = known.get(match.fault)
    if fault is None:
        return f"{one_line(match.fault, 40)} (not in this version's registry)" if match.fault else "none of the known"
    return f"{fault.id}  {fault.title} ({fault.report})"


def _plain(diagnosis: Diagnosis, known: Mapping[str, Fault]) -> dict[str, Any]:
    made = asdict(diagnosis)
    for match in made["matches"]:
        fault = known.get(match["fault"])
        match |= {"title": fault.title if fault else "", "report": fault.report if fault else ""}
    return made
