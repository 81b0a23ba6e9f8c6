"""``python -m pytest_adapt models``: list and write the conformance models, search their prompts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_adapt.models import ModelError, catalogue, materialise
from pytest_adapt.target.protocol import Deployment, TargetError

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code (1 when a model cannot be written, with one line on stderr)."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "list":
            _list()
        elif options.command == "export":
            _export(options.directory, options.models)
        elif options.command == "slice":
            _slice(options)
        elif options.command == "smollm2":
            _export(options.directory, [entry.name for entry in catalogue().values() if entry.kind == "smollm2"])
        else:
            _search(options)
    except (ModelError, TargetError) as problem:
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
    piece = commands.add_parser("slice", help="cut an oracle-sized piece out of your own checkpoint")
    piece.add_argument("checkpoint", type=Path, metavar="CKPT")
    piece.add_argument("directory", type=Path, metavar="DIR")
    piece.add_argument("--layers", required=True, metavar="LIST", help="as 0-3,7")
    piece.add_argument("--experts", type=int, metavar="N", help="experts to keep in each layer (default: all)")
    real = commands.add_parser("smollm2", help="write the real model, dense and cut into experts")
    real.add_argument("directory", type=Path, metavar="DIR")
    search = commands.add_parser("search", help="find prompts on which routing is certain")
    search.add_argument("model", metavar="NAME")
    search.add_argument("--target", default="builtin", metavar="SPEC", help="that taps routers (default: builtin)")
    search.add_argument("--length", type=int, default=512, help="tokens of a prompt (default 512)")
    search.add_argument("--candidates", type=int, default=16, help="tried at each position (default 16)")
    search.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="one prompt each (default 0 1)")
    search.add_argument(
        "--name", default="searched", help="of the prompts; -0, -1 ... is added to several (default searched)"
    )
    search.add_argument("--root", type=Path, default=Path(".adapt/models"), help="where checkpoints are written")
    search.add_argument("--out", type=Path, metavar="FILE", help="default: NAME.prompts.json")
    return parser


def _list() -> None:
    for entry in catalogue().values():
        print(f"{entry.name:22} {entry.shape_class:8} {entry.description}")


def _export(directory: Path, names: Sequence[str] | None) -> None:
    chosen = names or [entry.name for entry in catalogue().values() if entry.kind in ("procedural", "needle")]
    for name in chosen:
        print(materialise(name, directory))


def _slice(options: argparse.Namespace) -> None:
    from pytest_adapt.models.slice import numbers_of, slice_checkpoint

    print(slice_checkpoint(options.checkpoint, options.directory, numbers_of(options.layers), options.experts))


def _search(options: argparse.Namespace) -> None:
    from pytest_adapt.models.prompts import ordinary
    from pytest_adapt.models.search import SELECTION, choice_of, of_target, save, search
    from pytest_adapt.target.registry import resolve

    directory = materialise(options.model, options.root)
    # Of a real model the catalogue's entry names only what its checkpoint changes.
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if "num_experts_per_tok" not in config:
        raise ModelError(f"model {options.model} has no router: there is nothing to search for")
    spec = resolve(options.target)
    features = (("prefix_cache", 1),) if 1 in spec.features.get("prefix_cache", ()) else ()
    target = spec.create()
    out = options.out or Path(f"{options.model}.prompts.json")
    try:
        target.open(Deployment(str(directory), max_context=options.length + 1, taps=(SELECTION,), features=features))
        for number, seed in enumerate(options.seeds):
            found = search(
                of_target(target),
                choice_of(config),
                ordinary(catalogue()[options.model], config),
                length=options.length,
                candidates=options.candidates,
                seed=seed,
                progress=out.with_suffix(f".{seed}.partial"),
            )
            name = f"{options.name}-{number}" if len(options.seeds) > 1 else options.name
            print(f"{name}: seed {seed}, narrowest margin {min(found.margins):.3f} standard deviations")
            save(out, _source(options), {name: found.tokens})
            out.with_suffix(f".{seed}.partial").unlink(missing_ok=True)
    finally:
        target.close()
    print(out)


def _source(options: argparse.Namespace) -> str:
    seeds = " ".join(map(str, options.seeds))
    return (
        f"python -m pytest_adapt models search {options.model} --length {options.length} "
        f"--candidates {options.candidates} --seeds {seeds}"
    )
