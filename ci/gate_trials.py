"""How far the gate can be believed: false alarms between equal code, and slowdowns of known size and place.

    python ci/gate_trials.py FOLDER [--equal 60] [--planted 20] [--sizes 5 10 15] [--twenty] [--report]

Beside a busy neighbour process (--alone leaves it out) it measures the built-in engine against itself so often, eight
benchmarks each; then plants a slowdown into one operation of the engine on the target's side, through the seams that
faults use, large enough to cost a benchmark that many percent, so many times for each size (there both sides run their
operations one by one: a fused pass has no room for it). Every measurement is a line
of FOLDER/trials.jsonl as soon as it is done: the same command goes on where it was stopped. --twenty also runs twenty
benchmarks through pytest and takes the time. The tables are printed at the end; --report prints them alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trial_lines import note, read

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pytest_adapt.models import catalogue, materialise
from pytest_adapt.models.prompts import random_tokens
from pytest_adapt.perf.gate import Gate
from pytest_adapt.perf.loads import LOADS
from pytest_adapt.perf.rounds import Benchmark, measure_round
from pytest_adapt.perf.sides import Side, search_path
from pytest_adapt.target.protocol import Deployment
from pytest_adapt.target.registry import resolve

MODELS = ("qwen3-moe-odd", "deepseek-v3-odd-neg", "llama-odd", "mixtral-odd")
RUN = ("prefill", "decode")
LEAST_CALL = 5e-6
"""Seconds that a planted slowdown takes in one call at least: below, the wrapper itself would be a part of it."""
NEIGHBOUR = """
import array, time
block = array.array("d", bytes(1 << 24))
while True:
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        sum(i * i for i in range(1000))
    block[:] = array.array("d", block)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--equal", type=int, default=60, help="measurements of equal code (default: %(default)s)")
    parser.add_argument("--planted", type=int, default=20, help="slowdowns of each size (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 10, 15], help="percent (default: 5 10 15)")
    parser.add_argument("--twenty", action="store_true", help="take the time of twenty benchmarks in pytest")
    parser.add_argument("--alone", action="store_true", help="without a busy neighbour")
    parser.add_argument("--report", action="store_true", help="print the tables of what is there")
    options = parser.parse_args()
    trials = Trials(options.folder)
    if not options.report:
        with neighbour(not options.alone):
            trials.calibrate()
            for number in range(options.equal):
                trials.equal(number)
            for number in range(options.planted):
                for size in options.sizes:
                    trials.planted(size, number)
            if options.twenty:
                trials.twenty()
    print("\n".join(trials.tables()))
    return 0


class Trials:
    """What was measured so far, and what comes next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "trials.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = read(self.file, mend=True)
        self.side = Side("the engine", resolve("builtin", rootdir=folder), search_path())
        self.single = replace(self.side, plant=(("pytest_adapt.faults.slowness:single_ops", {}),))

    def done(self, **key: Any) -> list[dict[str, Any]]:
        return [row for row in self.rows if all(row.get(name) == value for name, value in key.items())]

    def keep(self, **row: Any) -> None:
        self.rows.append(row)
        note(self.file, row)
        print(time.strftime("%H:%M:%S"), {name: value for name, value in row.items() if name != "costs"}, flush=True)

    def benchmarks(self) -> list[Benchmark]:
        found = []
        for name in MODELS:
            directory = materialise(name, self.folder / "models")
            deployment = Deployment(str(directory), precision="fp32", max_context=640)
            for load in RUN:
                named = LOADS[load]
                prompts = tuple(
                    random_tokens(catalogue()[name], directory, f"trial-{place}", length)
                    for place, length in enumerate(named.lengths)
                )
                found.append(Benchmark(f"{name} {load}", deployment, load, prompts, named.new))
        return found

    def calibrate(self) -> None:
        """Seconds of every benchmark and calls of its operations, run one by one, without a slowdown."""
        if self.done(kind="calibration"):
            return
        found = self._round(1)
        costs = {}
        for case, seen in found.items():
            profile = seen.profiles[0]
            costs[case] = {
                "seconds": statistics.median(seen.seconds["A"]),
                "calls": {op: round(calls) for op, (calls, _) in profile.ops["A"].items()},
            }
        self.keep(kind="calibration", costs=costs)

    def _round(self, pairs: int) -> dict[str, Any]:
        return measure_round(
            self.single,
            self.single,
            self.benchmarks(),
            pairs,
            dice=random.Random(0),
            logs=self.folder / "logs",
            profile=True,
        ).seen

    def equal(self, number: int) -> None:
        """The engine against itself, all benchmarks."""
        if self.done(kind="equal", number=number):
            return
        started = time.monotonic()
        benchmarks = self.benchmarks()
        gate = self.gate(self.side, self.side, benchmarks, 1000 + number)
        found = {one.case: gate.times(one) for one in benchmarks}
        self.keep(
            kind="equal",
            number=number,
            verdicts={case: one.status for case, one in found.items()},
            ratios={case: one.first.ratio if one.first else None for case, one in found.items()},
            noise={case: one.first.noise if one.first else None for case, one in found.items()},
            suspected=gate.suspected,
            control=gate.control.ratio if gate.control else None,
            seconds=round(time.monotonic() - started, 1),
            load=os.getloadavg()[0],
        )

    def planted(self, size: int, number: int) -> None:
        """One benchmark, one operation of it slower by so much that the benchmark costs ``size`` percent more."""
        if self.done(kind="planted", size=size, number=number):
            return
        dice = random.Random(f"{size} {number}")
        costs = self.done(kind="calibration")[0]["costs"]
        benchmarks = self.benchmarks()
        one = benchmarks[number % len(benchmarks)]
        cost = costs[one.case]
        extra = size / 100 * cost["seconds"]
        fit = sorted(op for op, calls in cost["calls"].items() if calls and extra / calls >= LEAST_CALL)
        op = dice.choice(fit)
        plant = ("pytest_adapt.faults.slowness:slow_op", {"op": op, "seconds": extra / cost["calls"][op]})
        started = time.monotonic()
        slowed = replace(self.single, label="the engine, slowed", plant=(*self.single.plant, plant))
        gate = self.gate(self.single, slowed, [one], 5000 + number)
        found = gate.times(one)
        self.keep(
            kind="planted",
            size=size,
            number=number,
            case=one.case,
            op=op,
            verdict=found.status,
            blamed=found.op,
            suspected=bool(gate.suspected),
            first=found.first.ratio if found.first else None,
            confirming=found.confirming.ratio if found.confirming else None,
            why=found.why,
            seconds=round(time.monotonic() - started, 1),
            load=os.getloadavg()[0],
        )

    def gate(self, baseline: Side, target: Side, benchmarks: Sequence[Benchmark], seed: int) -> Gate:
        return Gate(baseline, target, self.folder / "logs", lambda: list(benchmarks), seed=seed)

    def twenty(self) -> None:
        """Wall seconds of the gate over the twenty benchmarks of the profile day0, through pytest."""
        words = [sys.executable, "-m", "pytest", "-p", "pytest_adapt.plugin", "-q"]
        words += ["--adapt-target=builtin", "--adapt-gate=times"]
        words += ["--adapt-baseline=builtin", f"--adapt-report={self.folder.resolve() / 'report'}"]
        words += [f"--rootdir={self.folder.resolve()}", "benchmark/test_gate.py", "-k", "no_slower"]
        started = time.monotonic()
        alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(words, cwd=self.folder, env=alone, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        report = json.loads((self.folder / "report" / "report.json").read_text(encoding="utf-8"))
        statuses = Counter(case["status"] for case in report["cases"])
        self.keep(kind="twenty", seconds=round(seconds, 1), statuses=dict(statuses), exit=done.returncode)

    def tables(self) -> Iterator[str]:
        """What was found, as Markdown."""
        equal = self.done(kind="equal")
        if equal:
            valid = [row for row in equal if "invalid machine" not in row["verdicts"].values()]
            measured = sum(len(row["verdicts"]) for row in equal)
            confirmed = sum(v in ("regression", "improvement") for row in equal for v in row["verdicts"].values())
            open_ones = sum(v == "inconclusive" for row in equal for v in row["verdicts"].values())
            yield f"{len(equal)} measurements of equal code, {measured} benchmarks in them:"
            yield ""
            yield "| invalid machine | false alarms before confirmation | after | inconclusive | seconds, median |"
            yield "|---|---|---|---|---|"
            alarms = sum(len(row["suspected"]) for row in equal)
            seconds = statistics.median(row["seconds"] for row in equal)
            yield (
                f"| {len(equal) - len(valid)} of {len(equal)} | {alarms} of {measured} | {confirmed} | {open_ones} "
                f"| {seconds:.0f} |"
            )
            yield ""
            yield "| benchmark | ratio, median | standard deviation | largest | noise of a pair, median | suspected |"
            yield "|---|---|---|---|---|---|"
            for case in equal[0]["verdicts"]:
                logs = [math.log(row["ratios"][case]) for row in equal if row["ratios"][case]]
                noise = [row["noise"][case] for row in equal if row["noise"][case] is not None]
                hits = sum(case in row["suspected"] for row in equal)
                yield (
                    f"| {case} | {math.exp(statistics.median(logs)):.4f} | {statistics.pstdev(logs):.2%} "
                    f"| {max(map(abs, logs)):.2%} | {statistics.median(noise):.2%} | {hits} |"
                )
            yield ""
        sizes = sorted({row["size"] for row in self.done(kind="planted")})
        if sizes:
            yield "| planted | trials | suspected | confirmed | put down to that operation | inconclusive | invalid | "
            yield "|---|---|---|---|---|---|---|"
            for size in sizes:
                rows = self.done(kind="planted", size=size)
                found = [row for row in rows if row["verdict"] == "regression"]
                named = sum(row["blamed"] == row["op"] for row in found)
                counts = Counter(row["verdict"] for row in rows)
                yield (
                    f"| +{size} % | {len(rows)} | {sum(row['suspected'] for row in rows)} | {len(found)} | {named} "
                    f"| {counts['inconclusive']} | {counts['invalid machine']} |"
                )
            yield ""
        for row in self.done(kind="twenty"):
            said = ", ".join(f"{number} {status}" for status, number in row["statuses"].items())
            yield f"twenty benchmarks through pytest: {row['seconds']} s ({said})"


@contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """A process that computes and copies memory without a pause, as long as this lasts."""
    if not wanted:
        yield
        return
    busy = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


if __name__ == "__main__":
    sys.exit(main())
