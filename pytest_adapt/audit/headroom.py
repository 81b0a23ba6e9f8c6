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

from pytest_adapt.verdict.result import CaseResult

__all__ = ["FILE", "Trend", "append", "main", "read", "trends", "uses_of"]

FILE = Path(".adapt/headroom.jsonl")
KEPT_RUNS, KEPT_BYTES = 200, 8_000_000
_ABOVE = 0.9


@dataclass(frozen=True)
class Trend:
    """One cell over the runs of one target: ``uses`` are shares of its budget, the oldest first."""

    cell: str
    uses: tuple[float, ...]

    @property
    def last(self) -> float:
        return self.uses[-1]

    @property
    def change(self) -> float:
        """The last use less the median of those before it; 0 for a single run."""
        return self.last - statistics.median(self.uses[:-1]) if len(self.uses) > 1 else 0.0


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

    Beyond 200 runs or 8 MB the oldest are dropped. Raises OSError where the file cannot be written.
    """
    if not cells:
        return
    line = json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "target": target, "cells": cells})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        kept = text.splitlines()
        if len(kept) < KEPT_RUNS and sum(map(len, kept)) + len(line) < KEPT_BYTES:
            with path.open("a", encoding="utf-8") as file:
                cut = text and not text.endswith("\n")  # by a full disk; the next line is whole again
                file.write(("\n" if cut else "") + line + "\n")
            return
        kept = [*kept, line][-KEPT_RUNS:]
        while len(kept) > 1 and sum(map(len, kept)) > KEPT_BYTES:
            del kept[0]
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text("\n".join(kept) + "\n", encoding="utf-8")
        partial.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a file, the oldest first; a line that is none (cut by a full disk) is left out. Raises OSError."""
    runs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            run = json.loads(line)
            runs.append({"at": str(run["at"]), "target": str(run["target"]), "cells": dict(run["cells"])})
        except (ValueError, KeyError, TypeError):
            continue
    return runs


def trends(runs: Sequence[dict[str, Any]], target: str) -> list[Trend]:
    """Cells of the last run of a target that has any, over all its runs; the tightest first."""
    mine = [run["cells"] for run in runs if run["target"] == target]
    names = mine[-1] if mine else {}
    found = [Trend(name, tuple(float(run[name]) for run in mine if name in run)) for name in names]
    return sorted(found, key=lambda one: (-one.last, one.cell))


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt headroom", description=__doc__)
    parser.add_argument("--file", type=Path, default=FILE, help="default: %(default)s")
    parser.add_argument("--target", metavar="SPEC", help="default: that of the last run")
    parser.add_argument("--above", type=float, default=_ABOVE, metavar="SHARE", help="limit (default: %(default)s)")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="cells to print (default: %(default)s)")
    options = parser.parse_args(list(arguments))
    runs = read(options.file) if options.file.is_file() else []
    target = options.target or (runs[-1]["target"] if runs else "")
    found = trends(runs, target)
    if not found:
        which = f" of {options.target}" if options.target else ""
        print(f"{options.file} holds no run{which}; run pytest --adapt-target=...", file=sys.stderr)
        return 2
    above = [one for one in found if one.last > options.above]
    number = sum(run["target"] == target for run in runs)
    print(f"{target}: {number} runs, {len(found)} cells in the last; share of the budget that was used")
    print(f"{'last':>6} {'change':>7} {'most':>6} {'runs':>5}  test | model | layout | precision | metric")
    for one in found[: max(options.count, len(above))]:
        numbers = f"{one.last:6.1%} {one.change:+7.1%} {max(one.uses):6.1%} {len(one.uses):5d}"
        print(f"{numbers}  {one.cell}{'  <- above' if one in above else ''}")
    bounds = (0.25, 0.5, 0.75, options.above, 1.0, math.inf)
    shares = [sum(low < one.last <= high for one in found) for low, high in zip((-1.0, *bounds), bounds, strict=False)]
    said = ", ".join(f"<= {high:.0%}: {share}" for high, share in zip(bounds[:-1], shares, strict=False))
    print(f"cells {said}, more: {shares[-1]}; {len(above)} above {options.above:.0%}")
    return 1 if above else 0
