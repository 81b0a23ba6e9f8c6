"""``python -m pytest_adapt faults``: list the registry, what waits for machinery, and what the suites see of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_adapt.documents import write as write_file
from pytest_adapt.faults.matrix import MatrixError, load, shipped_matrix
from pytest_adapt.faults.registry import catalogue
from pytest_adapt.faults.waiting import waiting

__all__ = ["fault_rows", "main", "markdown"]

_MEASURED = Path(".adapt") / "selftest" / "kill_matrix.json"


def main(arguments: Sequence[str]) -> int:
    """Run the command; exit code 0, or 2 for wrong usage and for a matrix that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="every fault: id, owning suite, site, public report")
    listing.add_argument("--commands", action="store_true", help="only the command that puts each fault in by hand")
    listing.add_argument("--markdown", action="store_true", help="as the table of docs/faults.md")
    listing.add_argument("--waiting", action="store_true", help="known faults that cannot be put in yet, and why")
    matrix = commands.add_parser("matrix", help="what the suites see of each fault, from the last --adapt-selftest")
    matrix.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help=f"the matrix that a selftest wrote (default: {_MEASURED}, or the shipped one where there is none)",
    )
    matrix.add_argument(
        "--write", action="store_true", help="into this checkout: docs/kill-matrix.md and the shipped kill_matrix.json"
    )
    matrix.add_argument("--partial", action="store_true", help="write it though faults, mutants or limits are missing")
    options = parser.parse_args(list(arguments))
    if options.command == "matrix" and options.partial and not options.write:
        matrix.error("--partial does nothing without --write")
    if options.command == "list" and options.commands:
        for fault in catalogue().values():
            print(fault.command)
        return 0
    if options.command == "list":
        rows = _waiting_rows() if options.waiting else fault_rows()
        if options.markdown:
            print(markdown(rows))
            return 0
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return 0
    return _matrix(options.source, write=options.write, partial=options.partial)


def fault_rows() -> list[tuple[str, ...]]:
    """Every fault of the registry, the head first: id, suite, site or words, report, title."""
    head = ("fault", "suite", "site, or what is said", "report", "what is done")
    return [
        head,
        *(
            (fault.id, fault.suite, fault.site or fault.says, fault.report, fault.title)
            for fault in catalogue().values()
        ),
    ]


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows, the head first, as a Markdown table."""
    head, *body = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def _waiting_rows() -> list[tuple[str, ...]]:
    return [("fault", "waits for", "what goes wrong"), *((one.id, one.needs, one.title) for one in waiting())]


def _matrix(source: Path | None, *, write: bool, partial: bool) -> int:
    from pytest_adapt.selftest.page import page, summary_lines

    shipped = shipped_matrix()
    if source is None:
        source = _MEASURED if write or _MEASURED.exists() or not shipped.exists() else shipped
    try:
        found = load(source)
    except MatrixError as error:
        print(error, file=sys.stderr)
        return 2
    for line in (*summary_lines(found), f"from {source}"):
        print(line)
    if not write:
        return 0
    beside = shipped.parents[2] / "docs" / "kill-matrix.md"
    problem = ""
    if not beside.parent.is_dir():
        problem = f"{beside.parent} does not exist; the page is part of a checkout, not of a wheel"
    elif (lacking := found.lacking(catalogue())) and not partial:
        problem = f"{source} lacks {', '.join(lacking)}; finish pytest --adapt-selftest, or write it with --partial"
    if problem:
        print(f"--write: {problem}", file=sys.stderr)
        return 2
    texts = {shipped: found.text(), beside: page(found)}  # both, before either is replaced
    for path, text in texts.items():
        write_file(path, text)
    print(f"written: {shipped} and {beside}")
    return 0
