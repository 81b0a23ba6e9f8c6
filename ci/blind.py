"""Diagnosis, measured: faults drawn at random, put in blind, and looked for with ``python -m pytest_adapt diagnose``.

    python ci/blind.py [--faults 20] [--seed 0] [--observables topk,text] [--keep DIR] [-- PYTEST OPTIONS]
    python ci/blind.py --fit

Each runs on another model of its families, or in another precision, than the rows of the kill matrix, as far as there
is one. Of every run the table says on which place the true fault stands, how likely the first one was said to be, how
many causes came out and how many lines they took. Exit status 0 when the true one is among the first three in 80%.

``--fit`` needs no engine. It predicts each row of the matrix from the others for several constants of the model, and as
often with the fault itself left out, for which "none of the known" is right; it prints the mean logarithm of the
likelihood of what is true.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_lines import positive

from pytest_adapt.faults.matrix import MatrixError
from pytest_adapt.faults.registry import Fault, catalogue
from pytest_adapt.report.terminal import WIDTH
from pytest_adapt.target.protocol import OBSERVABLES
from pytest_adapt.verdict.diagnose import Constants, Known, of_report, read_matrix

ENOUGH = 0.8
SMOOTHINGS = (0.05, 0.1, 0.2, 0.5, 1.0)
TEMPERS = (0.3, 0.5, 0.7, 1.0)


def cell(fault: Fault, rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """A model and a precision that no row of the fault has, as far as there are."""
    seen = {(row["model"], row["precision"]) for row in rows if row["fault"] == fault.id}
    # What shows in bfloat16 shows in float16, which resolves more.
    precisions = [*fault.precisions, *(["fp16"] if "bf16" in fault.precisions else [])]
    models = sorted(fault.models, key=lambda name: name in {model for model, _ in seen})
    cells = list(itertools.product(models, precisions))
    return next((one for one in cells if one not in seen), cells[-1])


def run(fault: Fault, model: str, precision: str, observables: str, folder: Path, options: Sequence[str]) -> list[str]:
    """One run of the shipped suites; the lines of its summary."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--adapt-target=builtin"),
        *(f"--adapt-inject={fault.id}", f"--adapt-models={model}", f"--adapt-precisions={precision}"),
        *((f"--adapt-observables={observables}", "--adapt-require=endpoint") if observables else ()),
        *((f"--adapt-layouts=single,{fault.layout}",) if fault.layout != "single" else ()),
        *((f"--adapt-contexts={','.join(map(str, fault.contexts))}",) if fault.contexts else ()),
        *(f"--adapt-report={folder}", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (folder / "report.json").is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SystemExit(f"{fault.id}: pytest ended with {done.returncode} and without a report: {said}")
    lines = done.stdout.partition(" adapt =")[2].splitlines()[1:]
    return list(itertools.takewhile(lambda line: not line.startswith("=="), lines))


def blind(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    rows = arguments.rows
    column = arguments.observables.split(",")[0] or "taps"
    measured = sorted(
        {row["fault"] for row in rows if row["killed"] and row["observable"] == column} & set(catalogue())
    )
    if not measured:
        raise SystemExit(f"--observables: the kill matrix has no fault that was seen through {column}")
    drawn = random.Random(arguments.seed).sample(measured, min(arguments.faults, len(measured)))
    print(f"{'fault':7}{'model':22}{'layout':8}{'in':6}{'place':7}{'first':14}{'causes':8}{'lines':6}title")
    places = []
    for name in drawn:
        fault = catalogue()[name]
        model, precision = cell(fault, rows)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(arguments.keep or scratch) / name
            summary = run(fault, model, precision, arguments.observables, folder, options)
            (folder / "summary.txt").write_text("\n".join(summary) + "\n", encoding="utf-8")
            report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        found = of_report(report, rows)
        order = [match.fault for match in found[0].matches if match.fault] if found else []
        place = order.index(name) + 1 if name in order else 0
        places.append(place)
        first = f"{found[0].matches[0].likelihood:.0%} {found[0].matches[0].fault or 'none'}" if found else "green"
        height = sum(max(1, -(-len(line) // WIDTH)) for line in summary)
        head = f"{name:7}{model:22}{fault.layout:8}{precision:6}{place or '-':<7}{first:14}"
        print(f"{head}{len(found):<8}{height:<6}{fault.title}", flush=True)
    first, three = sum(place == 1 for place in places), sum(1 <= place <= 3 for place in places)
    print(f"of {len(places)} faults the true one is first for {first}, among the first three for {three}")
    return 0 if three >= ENOUGH * len(places) else 1


def fit(arguments: argparse.Namespace) -> int:
    rows = [row for row in arguments.rows if row["killed"] and row["red"]]
    places = Counter((row["fault"], row["observable"]) for row in rows)
    if max(places.values(), default=0) < 2:
        print("no fault has two rows at one observable, so that none can be predicted from another", file=sys.stderr)
        return 1
    for smoothing, temper in itertools.product(SMOOTHINGS, TEMPERS):
        constants = Constants(smoothing, temper)
        for observable in sorted({row["observable"] for row in rows}):
            known = Known.of(rows, observable, constants)
            true, none, first = [], [], 0
            for name, patterns in known.rows.items():
                for place, pattern in enumerate(patterns):
                    left = [*patterns[:place], *patterns[place + 1 :]]
                    if left:
                        matches = known.replaced(name, left).matches([("", pattern)])
                        first += matches[0].fault == name
                        true.append(_said(matches, name))
                    none.append(_said(known.replaced(name, ()).matches([("", pattern)]), ""))
            if true:
                mean = (sum(true) / len(true) + sum(none) / len(none)) / 2
                share = f"first {first} of {len(true)}"
                print(
                    f"smoothing {smoothing:<5} temper {temper:<4} {observable:7} {mean:.3f} nats, {share}", flush=True
                )
    return 0


def _said(matches: Sequence[Any], name: str) -> float:
    return math.log(next(match.likelihood for match in matches if match.fault == name))


def main() -> int:
    options = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=positive, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix", type=Path)
    parser.add_argument("--observables", default="")
    parser.add_argument("--keep", type=Path, help="where reports and summaries stay")
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args(sys.argv[1 : len(sys.argv) - len(options) - ("--" in sys.argv)])
    for name in arguments.observables.split(",") if arguments.observables else ():
        if name not in OBSERVABLES:
            parser.error(f"--observables: {name!r} is none of {', '.join(OBSERVABLES)}")
    if arguments.keep and arguments.keep.exists() and not arguments.keep.is_dir():
        parser.error(f"--keep: {arguments.keep} is a file; name a folder")
    try:
        arguments.rows = read_matrix(arguments.matrix)
    except MatrixError as error:
        parser.error(f"--matrix: {error}")
    return fit(arguments) if arguments.fit else blind(arguments, options)


if __name__ == "__main__":
    raise SystemExit(main())
