"""``python -m pytest_adapt headroom``: how much of its budget each cell used, run after run.

Every run adds one line to ``.adapt/headroom.jsonl`` (test x model x layout x precision x metric -> share of budget);
the newest are kept. Exit code 0: no cell of the last run is above the limit; 1: some are; 2: wrong usage, or no runs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_adapt.documents import DocumentError, fields, named, one_line, real, text
from pytest_adapt.verdict.result import CaseResult

__all__ = ["FILE", "Trend", "append", "main", "read", "trends", "uses_of"]

FILE = Path(".adapt/headroom.jsonl")
KEPT_RUNS, KEPT_BYTES = 200, 8_000_000
_ABOVE = 0.9
_RUN = fields({"at": text, "target": text, "cells": named(real)})


@dataclass(frozen=True)
class Trend:
    """One cell over the runs of one target: ``uses`` are shares of its budget, the oldest first."""

    cell: str
    uses: tuple[float, ...]

    @property
    def last(self) -> float:
        return self.uses[-1]

    @property
    def change(self) -> float | None:
        """The last use less the median of those before it; None where there are none."""
        return self.last - statistics.median(self.uses[:-1]) if len(self.uses) > 1 else None


def uses_of(cases: Iterable[CaseResult]) -> dict[str, float]:
    """Cell -> largest share of its budget, of every case that passed or failed by comparing numbers.

    A cell is ``test | model | layout | precision | metric``: prompts, positions and context lengths are pooled.
    Promises that hold or do not have no budget to use.
    """
    found: dict[str, float] = {}
    for case in cases:
        test = case.case.partition("[")[0]
        for one in case.measurements:
            if one.budget > 0 and math.isfinite(one.use) and one.compared:
                cell = " | ".join((test, case.model, case.layout, case.precision, one.metric))
                found[cell] = max(found.get(cell, 0.0), one.use)
    return {cell: float(f"{use:.4g}") for cell, use in sorted(found.items())}


def append(path: Path, target: str, cells: dict[str, float]) -> None:
    """Add one run. Runs that end at the same moment are both kept: a lock beside the file orders them.

    Beyond 200 runs or 8 MB the oldest are dropped. What is there already is not understood here: bytes that are no run
    stay, and cost no run of theirs. Raises OSError where the file cannot be written.
    """
    if not cells:
        return
    made = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "target": target, "cells": cells}
    line = json.dumps(made, allow_nan=False).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = path.read_bytes() if path.exists() else b""
        kept = held.splitlines()
        if len(kept) < KEPT_RUNS and sum(map(len, kept)) + len(line) < KEPT_BYTES:
            with path.open("ab") as file:
                cut = held and not held.endswith(b"\n")  # by a full disk; the next line is whole again
                file.write((b"\n" if cut else b"") + line + b"\n")
            return
        kept = [*kept, line][-KEPT_RUNS:]
        while len(kept) > 1 and sum(map(len, kept)) > KEPT_BYTES:
            del kept[0]
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(b"\n".join(kept) + b"\n")
        partial.replace(path)


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The runs of a file, the oldest first, and how many lines are no JSON (cut by a full disk) and were left out.

    Raises OSError, and DocumentError for a run of another shape: to leave that out could hide a cell.
    """
    runs, left_out = [], 0
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            run = json.loads(line.decode())
        except (ValueError, RecursionError):
            left_out += bool(line.strip())
            continue
        if (problem := _RUN(run)) is not None:
            raise DocumentError(f"{path}: line {number}: {one_line(problem, 200).lstrip('.')}; take that line out")
        runs.append(run)
    return runs, left_out


def trends(runs: Sequence[dict[str, Any]], target: str) -> list[Trend]:
    """Cells of the last run of a target that has any, over all its runs; the tightest first."""
    mine = [run["cells"] for run in runs if run["target"] == target]
    names = mine[-1] if mine else {}
    found = [Trend(name, tuple(float(run[name]) for run in mine if name in run)) for name in names]
    return sorted(found, key=lambda one: (-one.last, one.cell))


def _share(typed: str) -> float:
    """A limit as it is typed."""
    share = float(typed)
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"{typed!r} is no share of a budget; write a number from 0 on, such as 0.9")
    return share


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt headroom", description=__doc__)
    parser.add_argument("--file", type=Path, default=FILE, help="default: %(default)s")
    parser.add_argument("--target", metavar="SPEC", help="default: that of the last run")
    parser.add_argument("--above", type=_share, default=_ABOVE, metavar="SHARE", help="limit (default: %(default)s)")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="cells to print (default: %(default)s)")
    options = parser.parse_args(list(arguments))
    try:
        runs, left_out = read(options.file) if options.file.exists() else ([], 0)
    except (DocumentError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if left_out:
        print(f"{options.file}: {left_out} line{'s' * (left_out > 1)} left out: no JSON", file=sys.stderr)
    target = options.target or (runs[-1]["target"] if runs else "")
    found = trends(runs, target)
    if not found:
        which = f" of {options.target}" if options.target else ""
        print(f"{options.file} holds no run{which}; run pytest --adapt-target=...", file=sys.stderr)
        return 2
    above = [one for one in found if one.last > options.above]
    number = sum(run["target"] == target for run in runs)
    counts = f"{number} run{'s' * (number > 1)}, {len(found)} cell{'s' * (len(found) > 1)} in the last"
    print(f"{one_line(target)}: {counts}; share of the budget that was used")
    print(f"{'last':>6} {'change':>7} {'most':>6} {'runs':>5}  test | model | layout | precision | metric")
    for one in found[: max(options.count, len(above))]:
        change = "first" if one.change is None else f"{one.change:+.1%}"
        numbers = f"{one.last:6.1%} {change:>7} {max(one.uses):6.1%} {len(one.uses):5d}"
        print(f"{numbers}  {one_line(one.cell)}{'  <- above' if one in above else ''}")
    bounds = (0.25, 0.5, 0.75, options.above, 1.0, math.inf)
    shares = [sum(low < one.last <= high for one in found) for low, high in zip((-1.0, *bounds), bounds, strict=False)]
    said = ", ".join(f"<= {high:.0%}: {share}" for high, share in zip(bounds[:-1], shares, strict=False))
    print(f"cells {said}, more: {shares[-1]}; {len(above)} above {options.above:.0%}")
    return 1 if above else 0
