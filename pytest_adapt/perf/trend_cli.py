"""``python -m pytest_adapt trend``: how the ratios to the baseline moved over many runs of the gate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_adapt.documents import write
from pytest_adapt.perf.trend import FILE, Series, drawn, read

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Entry point; 0: no present level is slower than the one before it, 1: some is, 2: wrong usage, or no runs."""
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt trend", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help="lines of JSON (default: %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw all series into one picture")
    options = parser.parse_args(list(arguments))
    if not options.file.is_file():
        print(f"{options.file}: no runs yet; pytest --adapt-gate adds a line for each benchmark", file=sys.stderr)
        return 2
    try:
        series, others = read(options.file)
    except OSError as error:
        print(f"{options.file}: cannot be read: {error.strerror or error}", file=sys.stderr)
        return 2
    if not series:
        print(f"{options.file}: no runs in it; {others} lines are no measurements of the gate", file=sys.stderr)
        return 2
    for one in series:
        print(_line(one))
    if options.svg is not None:
        if options.svg.exists() and options.svg.samefile(options.file):
            print(f"--svg {options.svg}: that is the history itself; name another file", file=sys.stderr)
            return 2
        try:
            write(options.svg, drawn(series))
        except OSError as error:
            print(f"--svg {options.svg}: cannot be written: {error.strerror or error}", file=sys.stderr)
            return 2
        print(f"drawn: {options.svg}")
    slower = sum(one.slower is not None for one in series)
    if others:
        print(f"{others} of the file's lines passed over: no measurements of the gate (cut off, or written by others)")
    print(f"{len(series)} series, {slower} slower than before their last change")
    return 1 if slower else 0


def _line(one: Series) -> str:
    levels = " -> ".join(f"x{ratio:.4g}" for _, ratio in one.levels)
    since = one.slower
    told = f"; slower since {since.commit[:8] or 'an unknown commit'} ({since.at})" if since else ""
    return f"{one.case} ({one.target} against {one.baseline}): {len(one.points)} runs, levels {levels}{told}"
