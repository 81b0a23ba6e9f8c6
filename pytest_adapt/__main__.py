"""``python -m pytest_adapt COMMAND ...``: the commands beside pytest itself, each imported only when asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "inspect": ("pytest_adapt.inspect.cli", "what config.json alone says: structure, parameters, memory per card"),
    "models": ("pytest_adapt.models.cli", "list, export and search the conformance models"),
    "goldens": ("pytest_adapt.golden.cli", "review, accept, reject, list, prune and verify golden records"),
    "coverage": ("pytest_adapt.audit.coverage", "requirement -> tests -> faults that prove them -> last status"),
    "lint": ("pytest_adapt.audit.lint", "requirement numbers, waivers, golden records and budgets, without a run"),
    "counters": ("pytest_adapt.perf.ledger_cli", "list, accept, reject and verify the counters on record"),
    "trend": ("pytest_adapt.perf.trend_cli", "how ratios to the baseline moved over many runs of the gate"),
    "headroom": ("pytest_adapt.audit.headroom", "how much of its budget each cell used, run after run"),
    "faults": ("pytest_adapt.faults.cli", "list the injectable faults; what the suites see of each"),
    "diagnose": ("pytest_adapt.verdict.diagnose_cli", "which known faults a failed run looks like"),
}


def usage() -> str:
    lines = ["usage: python -m pytest_adapt COMMAND ...", ""]
    lines += [f"  {name:9}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join([*lines, "", "Each command has its own --help. The suites run with: pytest --adapt-target=..."])


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 a finding, 2 wrong usage."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"unknown command {arguments[0]!r}; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[arguments[0]]
    try:
        result = importlib.import_module(module).main(list(arguments[1:]))
    except BrokenPipeError:  # whoever read has seen enough (| head)
        # What is left in the buffer has no reader either, and the interpreter would complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk, a directory that may not be written, a file where one should be
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{arguments[0]}: interrupted", file=sys.stderr)
        return 130
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
