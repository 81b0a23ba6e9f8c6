"""``python -m pytest_adapt counters``: what runs propose to keep on record, and who takes it in."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_adapt.arguments import folder, words
from pytest_adapt.perf.ledger import (
    FOLDER,
    Ledger,
    LedgerError,
    Proposal,
    accept,
    changes,
    pending,
    rebuilt,
    reject,
)
from pytest_adapt.perf.loads import LOADS

__all__ = ["findings", "ledgers", "main"]


def main(arguments: Sequence[str]) -> int:
    """Entry point; 0 done, 1 a finding or a refusal, 2 wrong usage."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    from pytest_adapt.golden.store import shipped_store

    store = options.store or shipped_store().directory
    try:
        if options.command == "verify":
            if not store.is_dir():
                parser.error(f"argument --store: {store} is no directory")
            found, files = findings(store), len(ledgers(store))
            read = f"{files} files" if files else "nothing was read: it holds no counters"
            print("\n".join([*found, f"{store / FOLDER}: {len(found)} findings ({read})"]))
            return 1 if found else 0
        every = pending(options.pending)
        if options.command == "list":
            print("\n".join(_table(store, every) or [f"nothing is pending in {options.pending / FOLDER}"]))
            return 0
        chosen = _chosen(every, options)
        if options.command == "reject":
            reject(chosen)
            print(f"{len(chosen)} proposals deleted")
            return 0
        if options.store is None and shipped_store().read_only:
            raise LedgerError(f"{store} ships with pytest-adapt and is read-only; give --store, your adapt_goldens_dir")
        from pytest_adapt.golden.make import provenance

        if not chosen:
            print(f"nothing is pending in {options.pending / FOLDER}")
            return 0
        print("\n".join(_table(store, chosen)))
        told = provenance(options.reason, store)
        kept = {name: told[name] for name in ("reason", "generator", "made_by", "made_at", "commit", "dirty")}
        said = accept(store, chosen, kept, allow_many=options.allow_many, allow_dirty=options.allow_dirty)
        print("\n".join(said))
    except LedgerError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def findings(store: Path) -> list[str]:
    """What is wrong with the ledgers of a store, without a run: files that cannot be read as counters, and rows whose
    model or load is gone."""
    from pytest_adapt.models import catalogue

    known = catalogue()
    found = []
    for path in ledgers(store):
        try:
            rows = Ledger.read(path).rows.values()
        except LedgerError as problem:
            found.append(f"damaged: {problem}")
            continue
        for row in rows:
            model = row.cell.rsplit(" ", 2)[0]
            if row.load not in LOADS:
                found.append(f"gone: {path.name}: {row.key}: no load {row.load!r}; loads are {', '.join(LOADS)}")
            elif row.spec and model not in known:
                found.append(f"gone: {path.name}: {row.key}: no model {model!r} in the catalogue")
    return found


def ledgers(store: Path) -> list[Path]:
    """The files of counters in a store."""
    return sorted((store / FOLDER).glob("*.json"))


def _table(store: Path, every: Sequence[Proposal]) -> list[str]:
    """A line for each proposal and each counter that it changes."""
    lines = []
    for one in every:
        lines.append(f"- **{one.target}** {one.row.key} ({one.kind}){f': {one.reason}' if one.reason else ''}")
        ledger = Ledger.within(store, one.target)
        before = ledger.rows.get(one.row.key) if ledger is not None else None
        if before is None:
            lines.append(f"    - new: {len(one.row.counters)} counters")
            continue
        differing, _ = changes(before, one.row, every=True)
        lines += [f"    - {line}" for line in (*rebuilt(before, one.row), *differing)] or ["    - no difference"]
    return lines


def _chosen(every: Sequence[Proposal], options: argparse.Namespace) -> list[Proposal]:
    if options.all:
        return list(every)
    if not options.names:
        raise LedgerError("name the cases, or --all; counters list shows what is pending")
    for name in options.names:
        if not any(fnmatch.fnmatchcase(one.row.key, name) for one in every):
            raise LedgerError(f"{name}: nothing pending has this key; counters list shows what is pending")
    return [one for one in every if any(fnmatch.fnmatchcase(one.row.key, name) for name in options.names)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt counters", description=__doc__)
    parser.add_argument("--store", type=folder, metavar="DIR", help="your own records (default: those that ship)")
    parser.add_argument("--pending", type=Path, metavar="DIR", default=Path(".adapt/pending"))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what is pending, and how it differs from the record")
    commands.add_parser(
        "verify", help="what is wrong with the counters on record, and whose model or load is gone; runs no test"
    )
    for name, text in (("accept", "take proposals in"), ("reject", "delete proposals")):
        command = commands.add_parser(name, help=text)
        command.add_argument("names", nargs="*", metavar="KEY", help="keys (model layout precision load) or patterns")
        command.add_argument("--all", action="store_true", help="every proposal")
        if name == "accept":
            command.add_argument("--reason", type=words, required=True, help="why they change; kept beside them")
            command.add_argument("--allow-many", action="store_true")
            command.add_argument("--allow-dirty", action="store_true")
    return parser
