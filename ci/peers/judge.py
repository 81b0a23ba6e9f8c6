"""Judge one foreign engine: clean checkpoints must pass, copies with a planted difference must be told apart.

    python ci/peers/judge.py 'vllm serve {model} --port {port} ...' MODEL... [--runs 5] [-- PYTEST OPTIONS]

The planted copies are served in place of the model that the judge knows. Exit status 0: every clean run was
green and every planted one red.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plant import KINDS, plant

from pytest_adapt.models import materialise


def judge(line: str, model: str, options: list[str]) -> tuple[int, str]:
    """Exit status and the first cause (or the rung) of one run."""
    with tempfile.TemporaryDirectory() as report:
        command = [sys.executable, "-m", "pytest", "-q", f"--adapt-target=cmd:{line}", f"--adapt-models={model}"]
        ran = subprocess.run([*command, f"--adapt-report={report}", *options], capture_output=True, text=True)
        path = Path(report) / "report.json"
        if not path.is_file():
            return ran.returncode, (ran.stderr.strip().splitlines() or ["no report"])[-1]
    shown = ran.stdout.partition("= adapt =")[2].splitlines()
    cause = next((text for text in shown if text.startswith("1. ")), "")
    return ran.returncode, cause or next((text for text in shown if text.startswith(("trusted", "narrowed"))), "")


def main() -> int:
    options = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("line")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args(sys.argv[1 : len(sys.argv) - len(options) - ("--" in sys.argv)])
    if arguments.runs < 1:
        parser.error(f"--runs: {arguments.runs} is not a number of at least 1")
    wrong = 0
    for model in arguments.models:
        for run in range(arguments.runs):
            wrong += row(model, f"clean {run + 1}", arguments.line, 0, options)
        source = materialise(model)
        sparse = "num_local_experts" in (text := (source / "config.json").read_text()) or "num_experts" in text
        for kind in KINDS if sparse else KINDS[1:]:
            with tempfile.TemporaryDirectory() as work:
                copy = Path(work) / "planted"
                what = plant(kind, source, copy)
                # The judge's own directory is named, and not used.
                served = f": {{model}}; {arguments.line.replace('{model}', shlex.quote(str(copy)))}"
                wrong += row(model, what, served, 1, options)
    return int(bool(wrong))


def row(model: str, what: str, line: str, expected: int, options: list[str]) -> int:
    started = time.monotonic()
    status, cause = judge(line, model, options)
    verdict = "as it should be" if status == expected else f"WRONG (exit status {status}, expected {expected})"
    print(f"{model:20} {what:48} {time.monotonic() - started:6.0f} s  {verdict}: {cause[:160]}", flush=True)
    return int(status != expected)


if __name__ == "__main__":
    sys.exit(main())
