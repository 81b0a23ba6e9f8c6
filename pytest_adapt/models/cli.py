"""``python -m pytest_adapt models``: list and write the conformance models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_adapt.models import ModelError, catalogue, materialise

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code (1 when a model cannot be written, with one line on stderr)."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "list":
            _list()
        else:
            _export(options.directory, options.models)
    except ModelError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt models", description="Conformance models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every model, its shape class and what it exercises")
    export = commands.add_parser("export", help="write checkpoints that any engine can serve")
    export.add_argument("directory", type=Path, metavar="DIR")
    export.add_argument("--models", nargs="+", metavar="NAME", help="these only (default: every procedural model)")
    return parser


def _list() -> None:
    for entry in catalogue().values():
        print(f"{entry.name:22} {entry.shape_class:8} {entry.description}")


def _export(directory: Path, names: Sequence[str] | None) -> None:
    chosen = names or [entry.name for entry in catalogue().values() if entry.kind == "procedural"]
    for name in chosen:
        print(materialise(name, directory))
