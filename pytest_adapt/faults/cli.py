"""``python -m pytest_adapt faults``: list the registry, or prove each entry through the plugin's own option."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_adapt.faults.registry import Fault, UnknownFault, catalogue, get
from pytest_adapt.sites import layer_of
from pytest_adapt.target.protocol import PRECISIONS

__all__ = ["main"]

_ROW = "{id:6}{precision:6}{verdict:12}{named:34}{title}"


def main(arguments: Sequence[str]) -> int:
    """Run the command; exit code 0 when every fault was caught where it is, 1 otherwise, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="every fault: id, owning suite, site, public report")
    listing.add_argument("--commands", action="store_true", help="only the command that puts each fault in by hand")
    prove = commands.add_parser("prove", help="install each fault with --adapt-inject and run the owning suite")
    prove.add_argument("ids", nargs="*", help="fault ids; none means all")
    prove.add_argument("--precisions", default="fp32,bf16", help="comma-separated (default: %(default)s)")
    options = parser.parse_args(list(arguments))
    if options.command == "list" and options.commands:
        for fault in catalogue().values():
            print(fault.command)
        return 0
    if options.command == "list":
        rows = [("fault", "suite", "site, or what is said", "report", "what is done")]
        rows += [
            (fault.id, fault.suite, fault.site or fault.says, fault.report, fault.title)
            for fault in catalogue().values()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return 0
    try:
        chosen = [get(identifier) for identifier in options.ids] or list(catalogue().values())
    except UnknownFault as error:
        print(error, file=sys.stderr)
        return 2
    precisions = options.precisions.split(",")
    unknown = [name for name in precisions if name not in PRECISIONS]
    if unknown:
        print(f"--precisions: {unknown[0]!r} is not allowed; allowed: {', '.join(PRECISIONS)}", file=sys.stderr)
        return 2
    print(
        _ROW.format(
            id="fault", precision="", verdict="caught", named="first divergence, or words", title="what was done"
        )
    )
    results = [_prove(fault, precision) for fault in chosen for precision in precisions]
    wanted = [right for right in results if right is not None]
    print(f"{sum(wanted)} of {len(wanted)} caught with the right layer and site, or the right words")
    return 0 if wanted and all(wanted) else 1


def _prove(fault: Fault, precision: str) -> bool | None:
    """Print one row. True when caught with the right layer and site; None where the fault does not show."""
    if precision not in fault.precisions:
        print(_ROW.format(id=fault.id, precision=precision, verdict="not visible", named="", title=fault.title))
        return None
    cases = _run(fault, precision)
    red = [case for case in cases if case["status"] == "fail"]
    if fault.white_box:
        sites = [case["divergence"]["site"] for case in red if case["divergence"]]
        right = any(layer_of(site) == (fault.layer, fault.site) for site in sites)
        named = sites[0] if sites else "-"
    else:
        said = [line for case in red for line in _said(case) if fault.says in line]
        right, named = bool(said), fault.says if said else "-"
    verdict = f"{len(red)} of {len(cases)}" if cases else "nothing ran"
    print(_ROW.format(id=fault.id, precision=precision, verdict=verdict, named=named, title=fault.title), flush=True)
    return right


def _said(case: dict[str, Any]) -> list[str]:
    """What a red case says: its reason, and each measurement that failed."""
    failed = [one for one in case["measurements"] if not one["ok"]]
    return [case["reason"], *(f"{one['metric']} {one['prompt']}: {one['detail']}" for one in failed)]


def _run(fault: Fault, precision: str) -> list[dict[str, Any]]:
    """Cases of the owning suite with the fault installed, from the run's report."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--adapt-target=builtin"),
            *(f"--adapt-inject={fault.id}", f"--adapt-models={fault.models[0]}", f"--adapt-precisions={precision}"),
            f"--adapt-layouts={fault.layout}",
            *(f"--adapt-report={folder}", "-k", f"{fault.suite} and {fault.where or 'sites'}"),
            *((f"--adapt-contexts={','.join(map(str, fault.contexts))}",) if fault.contexts else ()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = Path(folder) / "report.json"
        if not report.is_file():
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
            return []
        cases: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["cases"]
        return cases
