"""False alarms, counted: healthy targets judged again and again, each time with other weights, prompts and settings.

    python ci/clean_runs.py DIR SPEC [--runs 40] [--seed 0] [--shape odd] [--families llama,mixtral] [--precisions bf16]
                            [--layouts tp2,pp2] [--concurrency 1,2,4] [-- PYTEST OPTIONS]
    python ci/clean_runs.py DIR

One run judges one checkpoint that nobody saw before: the architecture of a procedural model of the catalogue, with
weights and prompts of its own, by the live oracle. Model, weights, precision, layout and the number of requests in
flight are drawn. What was done is a line of DIR/runs.jsonl, and the same command goes on after it (take a new DIR when
the code has changed); another command, with any other setting than --runs, does runs of its own. Reports of runs that
were not green stay in DIR/red. The exit status is 1 where any run in DIR was red. Without SPEC the table is printed
(Markdown), and the exit status is 1 as well where a cell used more than 90% of its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from trial_lines import note, positive, read

from pytest_adapt.layout import LayoutError, parse
from pytest_adapt.matrix import PRECISIONS
from pytest_adapt.models.checkpoint import materialise_entry
from pytest_adapt.models.entries import ModelEntry, catalogue
from pytest_adapt.strategies import fits

ABOVE = 0.9
BOUNDS = (0.25, 0.5, 0.75, ABOVE, 1.0)


def models_of(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Models to draw from, each with those of the layouts that it can take. Raises SystemExit for what cannot be run: a
    setting that nobody has must not end as another one that is green."""
    entries = [one for one in catalogue().values() if one.kind == "procedural" and one.shape_class == arguments.shape]
    families = {entry.family for entry in entries}
    wanted = set(arguments.families.split(",")) if arguments.families else families
    if not entries or wanted - families:
        shapes = sorted({entry.shape_class for entry in catalogue().values() if entry.kind == "procedural"})
        raise SystemExit(
            f"no procedural model has the shape {arguments.shape!r} and a family of {arguments.families!r}; there are "
            f"the shapes {', '.join(shapes)}" + (f", and of this one {', '.join(sorted(families))}" if families else "")
        )
    for name, known in (("precisions", PRECISIONS), ("concurrency", ())):
        for word in getattr(arguments, name).split(","):
            if word not in known if known else not word.isdecimal() or not int(word):
                raise SystemExit(f"--{name}: {word!r} is none of {', '.join(known) or 'the numbers from 1 on'}")
    try:
        layouts = [str(parse(word)) for word in arguments.layouts.split(",")]
    except LayoutError as error:
        raise SystemExit(f"--layouts: {error}") from None
    found = {
        entry.name: [layout for layout in layouts if not fits(layout, entry.config)]
        for entry in sorted(entries, key=lambda entry: entry.name)
        if entry.family in wanted
    }
    for layout in layouts:
        if not any(layout in taken for taken in found.values()):
            raise SystemExit(f"--layouts: no model of the shape {arguments.shape!r} can take {layout}")
    return {name: taken for name, taken in found.items() if taken}


def drawn(arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    """The settings of one run; the same for the same seed and number."""
    source = random.Random(f"{arguments.seed}:{number}")
    models = models_of(arguments)
    model = source.choice(list(models))
    return {
        "model": model,
        "weights": source.randrange(2**31),
        "precision": source.choice(arguments.precisions.split(",")),
        "layout": source.choice(models[model]),
        "concurrency": source.choice(arguments.concurrency.split(",")),
    }


def fresh(model: str, weights: int) -> ModelEntry:
    entry = catalogue()[model]
    return replace(entry, name=f"{model}-{weights}", recipe={**entry.recipe, "seed": weights})


def one_run(arguments: argparse.Namespace, number: int, options: list[str]) -> dict[str, Any]:
    chosen = drawn(arguments, number)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        directory = materialise_entry(fresh(chosen["model"], chosen["weights"]), place / "models")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={place}"),
            *(f"--adapt-target={arguments.spec}", f"--adapt-models={directory}"),
            *(f"--adapt-precisions={chosen['precision']}", "--adapt-profile=smoke"),
            *((f"--adapt-layouts={chosen['layout']}",) if chosen["layout"] != "single" else ()),
            *options,
        ]
        started = time.monotonic()
        environment = {**os.environ, "ADAPT_CONCURRENCY": chosen["concurrency"]}
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - started
        report = place / ".adapt" / "report" / "report.json"
        content = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
        kept = place / ".adapt" / "headroom.jsonl"
        cells = json.loads(kept.read_text(encoding="utf-8").splitlines()[-1])["cells"] if kept.is_file() else {}
        statuses: dict[str, int] = defaultdict(int)
        for case in content.get("cases", ()):
            statuses[case["status"]] += 1
        if done.returncode:
            red = arguments.directory / "red" / f"{len(list((arguments.directory / 'red').glob('*')))}-{number}"
            red.mkdir(parents=True)
            (red / "output.txt").write_text(" ".join(command) + "\n" + done.stdout + done.stderr, encoding="utf-8")
            if report.is_file():
                shutil.copy(report, red)
    opening = content.get("usage", {}).get("open_seconds", 0.0)
    return {
        "target": arguments.label or arguments.spec,
        "settings": settings_of(arguments, options),
        "number": number,
        **chosen,
        "exit": done.returncode,
        "seconds": round(seconds, 1),
        "open_seconds": opening,
        "statuses": dict(statuses),
        "cells": cells,
    }


def settings_of(arguments: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """All that decides what a run is, but its number."""
    names = ("spec", "label", "seed", "shape", "families", "precisions", "layouts", "concurrency")
    return {**{name: getattr(arguments, name) for name in names}, "options": options}


UNDECIDED = {"unknown", "inconclusive"}
GREEN = {"pass", "unchecked", "unsupported", "deferred"}


def outcome(run: dict[str, Any]) -> str:
    """``green``, ``undecided`` or ``red``."""
    if run["exit"] == 0:
        return "green"
    seen = set(run.get("statuses", ()))
    return "undecided" if run["exit"] == 1 and seen & UNDECIDED and seen <= UNDECIDED | GREEN else "red"


def table(runs: list[dict[str, Any]]) -> int:
    """Print the runs and the shares of budgets, by target and precision; the exit status."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["target"], run["precision"]].append(run)
    shares = " | ".join(f"<= {bound:.0%}" for bound in BOUNDS)
    print(f"| target | precision | runs | red | undecided | comparisons | {shares} | more | tightest cell |")
    print("|---" * (len(BOUNDS) + 8) + "|")
    bad = False
    for (target, precision), mine in sorted(groups.items()):
        ends = [outcome(run) for run in mine]
        red = ends.count("red")
        uses = [(use, cell) for run in mine for cell, use in run["cells"].items()]
        counts = [
            sum(low < use <= high for use, _ in uses)
            for low, high in zip((-1.0, *BOUNDS), (*BOUNDS, float("inf")), strict=True)
        ]
        most, where = max(uses, default=(0.0, ""))
        test, _, _, _, metric = where.split(" | ") if where else ("", "", "", "", "")
        columns = [
            target,
            precision,
            len(mine),
            red,
            ends.count("undecided"),
            len(uses),
            *counts,
            f"{most:.1%} {test.rpartition('::')[2]} {metric}",
        ]
        print("| " + " | ".join(map(str, columns)) + " |")
        bad = bad or red > 0 or most > ABOVE
    print(f"\n{len(runs)} runs, {sum(outcome(run) == 'red' for run in runs)} red")
    return int(bad)


def main() -> int:
    options = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("spec", nargs="?")
    parser.add_argument("--label", default="", help="name in the table (default: SPEC)")
    parser.add_argument("--runs", type=positive, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", default="odd")
    parser.add_argument("--families", default="")
    parser.add_argument("--precisions", default="bf16")
    parser.add_argument("--layouts", default="single")
    parser.add_argument("--concurrency", default="4")
    arguments = parser.parse_args(sys.argv[1 : len(sys.argv) - len(options) - ("--" in sys.argv)])
    path = arguments.directory / "runs.jsonl"
    if arguments.spec is None:
        if not (runs := read(path)):
            parser.error(f"{path} holds no run; give a SPEC to judge")
        return table(runs)
    models_of(arguments)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    arguments.directory = arguments.directory.absolute()
    mine = settings_of(arguments, options)
    runs = read(path, mend=True)
    done = {run["number"] for run in runs if run.get("settings") == mine}
    for number in range(arguments.runs):
        if number in done:
            continue
        run = one_run(arguments, number, options)
        note(path, run)
        runs.append(run)
        most = max(run["cells"].values(), default=0.0)
        said = ", ".join(f"{count} {status}" for status, count in sorted(run["statuses"].items()))
        print(
            f"{number:3} {run['model']} {run['precision']} {run['layout']} weights {run['weights']}: "
            f"exit {run['exit']}, {run['seconds']:.1f} s, {said}, most {most:.1%} of a budget",
            flush=True,
        )
    red = sum(outcome(run) == "red" for run in runs)
    print(f"{path}: {len(runs)} runs, {red} red")
    return int(red > 0)


if __name__ == "__main__":
    raise SystemExit(main())
