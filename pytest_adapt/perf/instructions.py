"""Instructions of one run of a load, counted by valgrind on both sides in the same job.

A number that was stored would shift with the interpreter, the framework and the C library; a baseline counted beside it
does not. Each side is one process under cachegrind that imports and opens once and then runs each load once and three
times, in copies of itself: half of the difference is one run. Counts see neither caches nor memory bandwidth nor
waiting, and under valgrind libraries choose kernels without AVX-512; they see dispatch and Python to a few millionths.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_adapt.perf.rounds import Benchmark
from pytest_adapt.perf.sides import Declined, Measuring, Side
from pytest_adapt.target.protocol import TargetError

__all__ = ["LEAST", "Instructions", "counted", "missing_tool", "verdict_of"]

LEAST = 0.01
"""Changes below 1 % are reported, no more: one process layout counts 0.3 % other instructions than another."""
TOLD = 0.003
_MANY = 3
_REFS = re.compile(r"I\s+refs:\s+([\d,]+)")
_TOOL = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--branch-sim=no")


@dataclass
class Instructions:
    """Counts of both sides. ``planned`` gives all benchmarks of the run when the first is asked for."""

    baseline: Side
    target: Side
    logs: Path
    planned: Callable[[], Sequence[Benchmark]]
    timeout: float = 600.0
    tell: Callable[[str], None] = lambda line: None
    counts: dict[str, dict[str, int | tuple[str, str]]] = field(default_factory=dict)
    """Case -> side (A, B) -> instructions of one run, or (unsupported or fail, why)."""

    def of(self, asked: Benchmark) -> dict[str, int | tuple[str, str]]:
        """Instructions of a benchmark on both sides. The first call counts all that are planned."""
        if asked.case not in self.counts:
            planned = [one for one in self.planned() if one.case not in self.counts]
            benchmarks = planned if asked in planned else [asked]
            for name, side in (("A", self.baseline), ("B", self.target)):
                for case, found in counted(side, benchmarks, self.logs, self.timeout, self.tell).items():
                    self.counts.setdefault(case, {})[name] = found
        return self.counts[asked.case]


def missing_tool() -> str:
    """Why nothing can be counted on this machine; "" where it can."""
    return "" if shutil.which("valgrind") else "valgrind is not installed (apt install valgrind, dnf install valgrind)"


def counted(
    side: Side, benchmarks: Sequence[Benchmark], logs: Path, timeout: float, tell: Callable[[str], None]
) -> dict[str, int | tuple[str, str]]:
    """By case, instructions of one run on one side, or (unsupported or fail, why)."""
    found: dict[str, int | tuple[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="adapt-instructions-") as folder:
        place = Path(folder)
        files = (f"--log-file={place}/%p.log", "--cachegrind-out-file=/dev/null")
        quiet = ("setarch", "-R") if shutil.which("setarch") else ()
        with Measuring(side, 0, logs, timeout, (*quiet, *_TOOL, *files), name="instructions") as process:
            process.create()
            opened = None
            for one in benchmarks:
                tell(f"{side.label}, instructions of {one.case}")
                try:
                    if one.deployment != opened:
                        opened = None
                        process.open(one.deployment)
                        process.opened()
                        opened = one.deployment
                    process.ask("load", name=one.load, prompts=one.prompts, new=one.new)
                    few, many = (_run(process, place, one, repeats) for repeats in (1, _MANY))
                    found[one.case] = round((many - few) / (_MANY - 1))
                except Declined as error:
                    found[one.case] = "unsupported", str(error)
                except TargetError as error:
                    found[one.case] = "fail", str(error)
                    if process.ended:
                        found.update({left.case: found[one.case] for left in benchmarks if left.case not in found})
                        break
    return found


def verdict_of(found: dict[str, int | tuple[str, str]]) -> tuple[str, str, float]:
    """(status, why, ratio of the target to the baseline) of the counts of both sides; ratio nan where there is none."""
    a, b = found["A"], found["B"]
    if isinstance(a, tuple) and isinstance(b, tuple):
        return ("unsupported" if a[0] == b[0] == "unsupported" else "fail"), b[1], math.nan
    if isinstance(a, tuple):
        return "new", f"the baseline does not run it: {a[1]}", math.nan
    if isinstance(b, tuple):
        return "gone", f"the baseline runs it, the target does not: {b[1]}", math.nan
    ratio = b / a
    said = f"{a} -> {b} instructions a run ({ratio - 1:+.2%})"
    if ratio > 1 + LEAST:
        return "regression", said, ratio
    if ratio < 1 / (1 + LEAST):
        return "improvement", said, ratio
    return "same", said if abs(ratio - 1) > TOLD else f"{said}, within what a process layout moves", ratio


def _run(process: Measuring, place: Path, one: Benchmark, repeats: int) -> int:
    """Instructions of a copy of the process that ran a load so often."""
    answer = process.ask("fork", load=one.load, repeats=repeats)
    log = place / f"{answer['pid']}.log"
    matched = _REFS.findall(log.read_text(errors="replace")) if log.is_file() else []
    if not matched:
        raise TargetError(f"{process.side.label}: valgrind left no count of process {answer['pid']} in its log")
    return int(matched[-1].replace(",", ""))
