"""Mutation testing of the judge: a random sample of cosmic-ray's mutants, each against the tests that could see it.

    pip install cosmic-ray coverage
    python ci/mutation.py DIR [--mutants 300] [--seed 0] [--workers 2] [--only pytest_adapt/verdict]
    python ci/mutation.py DIR --table

Mutants are drawn from `pytest_adapt/verdict`, `pytest_adapt/golden` and `pytest_adapt/matrix.py`, all alike; left out
are those inside annotations, which nothing evaluates, and those that do not compile. First every test function of TESTS
runs alone, without a mutant: it must pass, and which lines it runs and how long it takes is a line of DIR/tests.jsonl.
A mutant is then tried on those functions of its part that run its statement, the quickest first, until one fails, and
last on those that start a Python of their own, whose lines nobody sees. A survivor is one of these tests, and others
may still kill it.

Each run is a fork of this process, which has imported what is slow and nothing of the package, in a copy of the tree.
What was done is a line of DIR/mutants.jsonl, and the same command goes on after it: take a new DIR when the package has
changed, and remove a line, there or in DIR/tests.jsonl, to have it done again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trial_lines import note, positive, read

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("pytest_adapt/verdict", "pytest_adapt/golden", "pytest_adapt/matrix.py")
TESTS: dict[str, tuple[str, ...]] = {
    "pytest_adapt/verdict": (
        "tests/verdict",
        "tests/perf/test_growth.py",
        "tests/faults/test_causes.py",
        *(f"tests/models/test_{name}.py" for name in ("walks", "needle")),
        *(f"tests/plugin/test_{name}.py" for name in ("verdicts", "cheats", "samples", "diagnosis", "reruns")),
        *(f"tests/plugin/test_{name}.py" for name in ("selftest", "status", "reports")),
        "tests/audit",
        "tests/golden",
        "tests/peers/test_agreement_script.py",
    ),
    "pytest_adapt/golden": (
        "tests/golden",
        *(f"tests/models/test_{name}.py" for name in ("walks", "needle", "search")),
        *(f"tests/plugin/test_{name}.py" for name in ("observed", "verdicts", "commands")),
        "tests/audit",
        "tests/verdict",
    ),
    "pytest_adapt/matrix.py": tuple(
        f"tests/plugin/test_{name}.py"
        for name in ("matrix", "options", "strategies", "layout", "covering", "commands", "claims", "verdicts")
    ),
}
"""Tests of each part."""
SLOW_TO_IMPORT = ("pytest", "numpy", "torch", "transformers", "hypothesis", "safetensors.numpy")


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


def compiles(source: str) -> bool:
    """Without a warning: what Python itself refuses, no test needs to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile(source, "mutant", "exec")
    except (SyntaxError, SyntaxWarning):
        return False
    return True


def draw(everything: list[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """The first mutants of a random order that compile, of all modules alike; more of them begin with the same ones."""
    random.Random(seed).shuffle(everything)
    sources = {name: (ROOT / name).read_text(encoding="utf-8") for name in {one["module"] for one in everything}}
    fit = (one for one in everything if compiles(mutated(one, sources[one["module"]])))
    return list(itertools.islice(fit, count))


def copy_of_tree(place: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv", ".adapt", "__pycache__", "build", "dist")
    return Path(shutil.copytree(ROOT, place, ignore=ignored, dirs_exist_ok=True))


def forked(tree: Path, call: Callable[[], int]) -> tuple[int, str]:
    """Wait status and output of ``call`` in a fork of this process, with ``tree`` in the place of the checkout."""
    log = tree.with_suffix(".log")
    child = os.fork()
    if not child:
        try:
            os.setsid()
            sys.stdout = sys.stderr = log.open("w", encoding="utf-8")
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            os.chdir(tree)
            sys.path[:0] = found = [str(tree), str(tree / "engine")]
            quiet = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            os.environ.update(quiet, PYTHONPATH=os.pathsep.join(found))
            code = call()
        except BaseException:
            traceback.print_exc()
            code = 99
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started and did not end
    return os.waitpid(child, 0)[1], log.read_text(errors="replace")


class Limit:
    """A pytest plugin that ends this process when one test takes too much time."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def pytest_runtest_logstart(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self.seconds)  # of this process, whatever else the machine does
        signal.alarm(10 * self.seconds)


def pytest_here(tests: Iterable[str], limit: int, *more: str) -> int:
    import pytest

    plugin = Limit(limit)
    plugin.pytest_runtest_logstart()
    words = ["-x", "-q", "-p", "pytest_adapt.plugin", "-p", "no:cacheprovider", "--no-header", *more, *tests]
    return int(pytest.main([*words, f"--basetemp={Path.cwd()}.tmp"], plugins=[plugin]))


def survives(tree: Path, tests: Iterable[str], limit: int) -> str:
    """``survived``, ``timeout``, or the test that failed."""
    status, said = forked(tree, lambda: pytest_here(tests, limit))
    if status == 0:
        return "survived"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
        return "timeout"
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[-1][:160] if failed else said.strip().splitlines()[-1][:160] if said.strip() else "no output"


def functions(tree: Path, tests: Iterable[str], limit: int) -> list[str]:
    """Every test function, without its parameters."""
    status, said = forked(tree, lambda: pytest_here(tests, limit, "--collect-only"))
    if status:
        raise SystemExit(said)
    return list(dict.fromkeys(line.partition("[")[0] for line in said.splitlines() if "::" in line))


def measured(tree: Path, test: str, limit: int) -> dict[str, Any]:
    """How long a test function takes alone, the lines of PLACES that it runs, and whether it starts a Python."""
    kept = tree.with_suffix(".lines")

    def call() -> int:
        import coverage

        begun: list[bool] = []
        sys.addaudithook(
            lambda event, given: begun.append("python" in str(given[0])) if event == "subprocess.Popen" else None
        )
        seen = coverage.Coverage(
            data_file=None,
            config_file=False,
            include=[f"{tree / place}{end}" for place in PLACES for end in ("", "/*")],
        )
        started = time.monotonic()
        with seen.collect():
            code = pytest_here([test], limit)
        data = seen.get_data()
        lines = {str(Path(file).relative_to(tree)): data.lines(file) for file in data.measured_files()}
        done = {"test": test, "seconds": round(time.monotonic() - started, 2), "python": any(begun), "lines": lines}
        kept.write_text(json.dumps(done), encoding="utf-8")
        return code

    status, said = forked(tree, call)
    if status:
        raise SystemExit(f"not green without a mutant: {test}\n{said}")
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def statement(source: str, line: int) -> range:
    """Lines of the innermost statement around a line: whoever runs the line runs one of these."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and not isinstance(
            node, ast.Continue | ast.Break | ast.Pass
        ):  # may leave no code
            begin = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            spans.append(range(begin, (node.end_lineno or begin) + 1))
    return min((span for span in spans if line in span), key=len)


def tests_of(mutant: dict[str, Any], source: str, known: list[dict[str, Any]]) -> list[str]:
    """Test functions of a mutant's part that run its statement, the quickest first, and those that might."""
    part = next(place for place in PLACES if mutant["module"].startswith(place))
    lines = statement(source, mutant["line"])
    mine = [one for one in known if one["test"].startswith(TESTS[part])]
    seen = [one for one in mine if not set(lines).isdisjoint(one["lines"].get(mutant["module"], ()))]
    hidden = [one for one in mine if one["python"] and one not in seen]
    return [one["test"] for group in (seen, hidden) for one in sorted(group, key=lambda one: one["seconds"])]


def run(arguments: argparse.Namespace) -> int:
    lacking = [name for name in ("cosmic_ray", "coverage") if importlib.util.find_spec(name) is None]
    if lacking:
        raise SystemExit(f"{' and '.join(lacking)} cannot be imported; install them: pip install cosmic-ray coverage")
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    path, timed = arguments.directory / "mutants.jsonl", arguments.directory / "tests.jsonl"
    known = {(one["module"], one["operator"], one["occurrence"]) for one in read(path, mend=True)}
    everything = every_mutant()
    drawn = [
        one for one in draw(everything, arguments.mutants, arguments.seed) if one["module"].startswith(arguments.only)
    ]
    if not drawn:
        raise SystemExit(f"--only={arguments.only}: none of {arguments.mutants} mutants is of such a module")
    left = [one for one in drawn if (one["module"], one["operator"], one["occurrence"]) not in known]
    print(f"{len(everything)} mutants, {len(drawn)} drawn, {len(left)} left", flush=True)
    trees = [copy_of_tree(arguments.directory / f"tree-{number}") for number in range(arguments.workers)]

    def measure(tree: Path, tests: list[str]) -> None:
        for test in tests:
            note(timed, measured(tree, test, arguments.timeout))

    def attempt(tree: Path, mutants: list[dict[str, Any]]) -> None:
        sys.dont_write_bytecode = True  # a mutant may be as long as the one before it, and written in the same second
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for mutant in mutants:
            source = (ROOT / mutant["module"]).read_text(encoding="utf-8")
            changed = mutated(mutant, source)
            file = tree / mutant["module"]
            file.write_text(changed, encoding="utf-8")
            started = time.monotonic()
            chosen = tests_of(mutant, source, tests)
            end = survives(tree, chosen, arguments.timeout) if chosen else "survived"
            shutil.copy2(ROOT / mutant["module"], file)
            diff = "".join(difflib.unified_diff(source.splitlines(True), changed.splitlines(True), n=0))
            seconds = round(time.monotonic() - started, 1)
            note(path, {**mutant, "end": end, "seconds": seconds, "tests": len(chosen), "diff": diff})
            print(f"{mutant['module']}:{mutant['line']} {mutant['operator']}: {end} ({seconds} s)", flush=True)

    files = {test for place in PLACES if any(one["module"].startswith(place) for one in left) for test in TESTS[place]}
    had = {one["test"] for one in read(timed, mend=True)}
    wanted = functions(trees[0], sorted(files), arguments.timeout) if files else []
    in_each(trees, measure, [test for test in wanted if test not in had])
    tests = read(timed)
    in_each(trees, attempt, left)
    return table(read(path))


def in_each(trees: list[Path], work: Callable[[Path, list[Any]], None], things: list[Any]) -> None:
    """Deal ``things`` out to one process a tree."""
    fork = multiprocessing.get_context("fork")
    workers = [
        fork.Process(target=work, args=(tree, things[number :: len(trees)])) for number, tree in enumerate(trees)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(1)


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
    parser.add_argument("--mutants", type=positive, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--timeout", type=positive, default=60, help="seconds of processor time for one test")
    parser.add_argument("--only", default="", help="modules that begin with this")
    parser.add_argument("--table", action="store_true", help="print what is known, and run nothing")
    arguments = parser.parse_args()
    arguments.directory = arguments.directory.absolute()
    if arguments.table:
        path = arguments.directory / "mutants.jsonl"
        if not (done := read(path)):
            parser.error(f"{path} holds no mutant; leave --table out to try some")
        return table(done)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
