"""Mutation testing of the judge: a random sample of cosmic-ray's mutants, each against the tests that could see it.

    pip install cosmic-ray
    python ci/mutation.py DIR [--mutants 300] [--seed 0] [--workers 2] [--only pytest_adapt/verdict]
    python ci/mutation.py DIR --table

Mutants are drawn from `pytest_adapt/verdict`, `pytest_adapt/golden` and `pytest_adapt/matrix.py`, all alike; those
inside annotations are left out, which nothing evaluates. The tests of that part of the package run in copies of the
tree, the nearest ones first, until one fails: a survivor is one of these tests, and others may still kill it. What was
done is a line of DIR/mutants.jsonl, and the same command goes on after it: take a new DIR when the code has changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("pytest_adapt/verdict", "pytest_adapt/golden", "pytest_adapt/matrix.py")
TESTS: dict[str, tuple[str, ...]] = {
    "pytest_adapt/verdict": (
        "tests/verdict",
        "tests/perf/test_growth.py",
        *(f"tests/plugin/test_{name}.py" for name in ("verdicts", "cheats", "samples", "diagnosis", "reruns")),
        "tests/audit",
        "tests/golden",
        "tests/plugin/test_selftest.py",
    ),
    "pytest_adapt/golden": (
        "tests/golden",
        *(f"tests/plugin/test_{name}.py" for name in ("observed", "verdicts", "commands")),
        "tests/audit",
        "tests/verdict",
    ),
    "pytest_adapt/matrix.py": tuple(
        f"tests/plugin/test_{name}.py"
        for name in ("matrix", "options", "strategies", "layout", "covering", "commands", "scale", "claims", "verdicts")
    ),
}
"""Tests of each part, the nearest first."""


def spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Begin and end (line, column) of every annotation."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                found.append(((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)))
    return found


def every_mutant() -> list[dict[str, Any]]:
    from cosmic_ray.commands.init import _all_work_items  # the enumeration of `cosmic-ray init`, without its database

    paths = [
        path for place in PLACES for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).glob("*.py"))
    ]
    skipped = {path: spans(path.read_text(encoding="utf-8")) for path in paths}
    found = []
    for item in _all_work_items(sorted(paths), {}):
        (one,) = item.mutations
        if any(begin <= one.start_pos and one.end_pos <= end for begin, end in skipped[Path(one.module_path)]):
            continue
        found.append(
            {
                "module": str(Path(one.module_path).relative_to(ROOT)),
                "operator": one.operator_name,
                "occurrence": one.occurrence,
                "line": one.start_pos[0],
            }
        )
    return found


def mutated(mutant: dict[str, Any], source: str) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    changed = mutate_code(source, get_operator(mutant["operator"])(), mutant["occurrence"])
    if changed is None:
        raise SystemExit(f"no such mutant: {mutant}")
    return str(changed)


def copy_of_tree(place: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv", ".adapt", "__pycache__", "build", "dist")
    return Path(shutil.copytree(ROOT, place, ignore=ignored, dirs_exist_ok=True))


def tests_of(module: str) -> tuple[str, ...]:
    part = next(place for place in PLACES if module.startswith(place))
    named = ROOT / "tests" / Path(module).parent.name / f"test_{Path(module).stem}.py"
    return (*((str(named.relative_to(ROOT)),) if named.is_file() else ()), *TESTS[part])


def survives(tree: Path, tests: tuple[str, ...], limit: float) -> str:
    """``survived``, ``timeout``, or the test that failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "engine")))}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    installed = any(one.name == "adapt" for one in entry_points(group="pytest11"))
    plugin = () if installed else ("-p", "pytest_adapt.plugin")
    command = [sys.executable, "-m", "pytest", "-x", "-q", *plugin, "-p", "no:cacheprovider", "--no-header", *tests]
    child = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "timeout"
    if child.returncode == 0:
        return "survived"
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[-1][:160] if failed else said.strip().splitlines()[-1][:160] if said.strip() else "no output"


def run(arguments: argparse.Namespace) -> int:
    path = arguments.directory / "mutants.jsonl"
    known = {(one["module"], one["operator"], one["occurrence"]) for one in read(path)}
    everything = every_mutant()
    drawn = random.Random(arguments.seed).sample(everything, min(arguments.mutants, len(everything)))
    drawn = [one for one in drawn if one["module"].startswith(arguments.only)]
    left = [one for one in drawn if (one["module"], one["operator"], one["occurrence"]) not in known]
    print(f"{len(everything)} mutants, {len(drawn)} drawn, {len(left)} left", flush=True)
    for place in (place for place in PLACES if any(one["module"].startswith(place) for one in left)):
        # Tests that are red without a mutant would kill every one.
        end = survives(copy_of_tree(arguments.directory / "tree-0"), TESTS[place], arguments.timeout)
        if end != "survived":
            raise SystemExit(f"the tests of {place} are not green without a mutant: {end}")
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for one in left:
        waiting.put(one)
    lock = threading.Lock()

    def work(number: int) -> None:
        tree = copy_of_tree(arguments.directory / f"tree-{number}")
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            source = (ROOT / mutant["module"]).read_text(encoding="utf-8")
            changed = mutated(mutant, source)
            file = tree / mutant["module"]
            file.write_text(changed, encoding="utf-8")
            started = time.monotonic()
            end = survives(tree, tests_of(mutant["module"]), arguments.timeout)
            file.write_text(source, encoding="utf-8")
            diff = "".join(difflib.unified_diff(source.splitlines(True), changed.splitlines(True), n=0))
            done = {**mutant, "end": end, "seconds": round(time.monotonic() - started, 1), "diff": diff}
            with lock, path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(done) + "\n")
            print(f"{mutant['module']}:{mutant['line']} {mutant['operator']}: {end} ({done['seconds']} s)", flush=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(arguments.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return table(read(path))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def table(done: list[dict[str, Any]]) -> int:
    parts = {place: [one for one in done if one["module"].startswith(place)] for place in PLACES}
    print("| part | mutants | killed | survived |\n|---|---|---|---|")
    for place, mine in [*parts.items(), ("all", done)]:
        survived = sum(one["end"] == "survived" for one in mine)
        share = f" ({1 - survived / len(mine):.1%})" if mine else ""
        print(f"| {place} | {len(mine)} | {len(mine) - survived}{share} | {survived} |")
    for one in done:
        if one["end"] == "survived":
            print(
                f"\n{one['module']}:{one['line']} {one['operator']}\n{''.join(one['diff'].splitlines(True)[2:])}",
                end="",
            )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--only", default="", help="modules that begin with this")
    parser.add_argument("--table", action="store_true", help="print what is known, and run nothing")
    arguments = parser.parse_args()
    arguments.directory = arguments.directory.absolute()
    if arguments.table:
        return table(read(arguments.directory / "mutants.jsonl"))
    arguments.directory.mkdir(parents=True, exist_ok=True)
    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
