"""``python -m pytest_adapt goldens``: look at, take in, make and check golden records."""

from __future__ import annotations

import argparse
import fnmatch
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_adapt.arguments import folder, words
from pytest_adapt.golden import review
from pytest_adapt.golden.diff import classify, invisible
from pytest_adapt.golden.lint import Finding, catalogue_keys, drift, orphans, served_lengths, verify
from pytest_adapt.golden.make import Task, Witness, catalogue_tasks, environment, provenance
from pytest_adapt.golden.record import OBSERVED, Record, RecordError, RecordKey
from pytest_adapt.golden.review import Pending, ReviewError
from pytest_adapt.golden.store import Store, StoreError, shipped_store
from pytest_adapt.target.protocol import TargetError

__all__ = ["main"]

_REFUSALS = ("structure", "many", "observed", "dirty", "unwitnessed")
_NOTHING = "nothing was read: the store holds no record"


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code: 0 done, 1 a finding or refusal (one line on stderr), 2 wrong usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    reads = options.command in ("list", "verify", "prune") or (options.command == "review" and options.markdown)
    if reads and options.store and not options.store.is_dir():
        parser.error(f"argument --store: {options.store} is no directory")
    store = Store(options.store) if options.store else shipped_store()
    try:
        code: int = options.run(options, store)
    except (StoreError, RecordError, ReviewError, TargetError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt goldens", description=__doc__)
    parser.add_argument("--store", type=folder, metavar="DIR", help="your own records (default: those that ship)")
    parser.add_argument("--pending", type=Path, metavar="DIR", default=Path(".adapt/pending"))
    parser.add_argument("--models-root", type=Path, metavar="DIR", default=Path(".adapt/models"))
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        return command

    add("list", _list, "records of the store, and pending ones")
    looking = add("review", _review, "look at each pending record and accept, reject or skip it (needs a terminal)")
    looking.add_argument(
        "--markdown",
        action="store_true",
        help="print what a pull request should say: noise, environment or behaviour; exit code 1 for behaviour",
    )
    accepting = add("accept", _accept, "take pending records in")
    accepting.add_argument("names", nargs="*", metavar="ID", help="record ids or shell patterns")
    accepting.add_argument("--all", action="store_true", help="every pending record")
    accepting.add_argument("--reason", type=words, required=True, help="why they change; kept in the index")
    for name in _REFUSALS:
        accepting.add_argument(f"--allow-{name}", action="store_true")
    rejecting = add("reject", _reject, "delete pending records")
    rejecting.add_argument("names", nargs="*", metavar="ID")
    rejecting.add_argument("--all", action="store_true")
    checking = add("verify", _verify, "index, files, digests and catalogue against each other; runs no test")
    checking.add_argument("--sample", metavar="N|P%", help="compute so many of the records again, drawn at random")
    checking.add_argument("--seed", type=int, default=0, help="of that draw (default: %(default)s)")
    pruning = add("prune", _prune, "delete records that no model and prompt of the catalogue needs")
    pruning.add_argument("--yes", action="store_true", help="delete; without it they are only listed")
    making = add("make", _make, "compute reference records with the oracle, confirmed by transformers")
    making.add_argument("--models", nargs="+", default=[], metavar="NAME", help="these only (default: all)")
    making.add_argument("--prompts", nargs="+", default=[], metavar="PROMPT", help="these only (default: all)")
    making.add_argument("--stale", action="store_true", help="only records that are missing, stale or damaged")
    making.add_argument("--reason", type=words, required=True, help="why they are made; kept in the index")
    return parser


def _list(options: argparse.Namespace, store: Store) -> int:
    for record_id, entry in sorted(store.entries.items()):
        precisions = ",".join(entry.get("precisions", []))
        print(f"{record_id:44} {entry.get('kind'):9} {entry.get('tokens'):5} tokens  {precisions}")
    pending = review.list_pending(options.pending)
    print(f"{len(store.entries)} records in {store.directory}, {len(pending)} pending in {options.pending}")
    if not store.entries and not store.files():
        print(_NOTHING)
    for line in review.table(store, pending):
        print(line)
    return 0


def _review(options: argparse.Namespace, store: Store) -> int:
    pending = review.list_pending(options.pending)
    if options.markdown:
        print("\n".join(review.markdown(store, pending)))
        return 1 if any(review.classified(store, one)[0] == "behaviour" for one in pending) else 0
    if not sys.stdin.isatty():
        said = "goldens review --markdown, goldens accept ID --reason ..., goldens reject ID"
        print(f"review needs a terminal; without one: {said}", file=sys.stderr)
        return 2
    for number, one in enumerate(pending, 1):
        print(f"[{number}/{len(pending)}]")
        print("\n".join(review.table(store, [one])))
        print(": ".join(review.classified(store, one)))
        answer = input("a accept, r reject, s skip > ").strip().lower()
        if answer == "a":
            why = input("reason > ").strip()
            if not why:
                print("a record changes only for a reason; skipped")
                continue
            try:
                with _witness(options.models_root) as confirm:
                    print("\n".join(review.accept(store, [one], provenance(why, store.directory), confirm=confirm)))
            except (ReviewError, StoreError, TargetError) as problem:
                print(problem)
        elif answer == "r":
            review.reject([one])
    return 0


def _accept(options: argparse.Namespace, store: Store) -> int:
    chosen = _chosen(options)
    if not chosen:
        print(f"nothing is pending in {options.pending}")
        return 0
    print("\n".join(review.table(store, chosen)))
    told = provenance(options.reason, store.directory)
    allowed = {f"allow_{name}": getattr(options, f"allow_{name}") for name in _REFUSALS}
    with _witness(options.models_root) as confirm:
        for line in review.accept(store, chosen, told, confirm=confirm, **allowed):
            print(line)
    return 0


def _reject(options: argparse.Namespace, store: Store) -> int:
    chosen = _chosen(options)
    review.reject(chosen)
    print(f"{len(chosen)} pending records deleted; {store.directory} is as it was")
    return 0


def _verify(options: argparse.Namespace, store: Store) -> int:
    tasks, absent = _tasks_of(store, options)
    expected = {**_observed(store), **{name: task.key for name, task in tasks.items()}}
    findings = verify(store, expected, partial=bool(absent), served=served_lengths())
    if options.sample:
        findings += _recomputed(store, tasks, options.sample, options.seed)
    for finding in findings:
        print(f"{finding.kind}: {finding.message}")
    for model, reason in absent.items():
        print(f"not checked: {model} ({reason})")
    for line in drift(store, environment()):
        print(f"drift: {line}")
    print(f"{len(store.entries)} records, {len(tasks)} expected, {len(findings)} findings")
    if not store.entries and not store.files():
        print(_NOTHING)
    return 1 if findings else 0


def _observed(store: Store) -> dict[str, RecordKey]:
    """The records of what targets answered to prompts of the catalogue."""
    return {name: key for name, key in catalogue_keys(store).items() if key.math_class.startswith(OBSERVED)}


def _tasks_of(store: Store, options: argparse.Namespace) -> tuple[dict[str, Task], dict[str, str]]:
    """What a store should hold: the whole catalogue, or in a store of one's own, what is there."""
    if not options.store:
        return catalogue_tasks(options.models_root)
    from pytest_adapt.models import catalogue

    there = store.entries.keys() | store.files().keys()
    names = [name for name, entry in catalogue().items() if entry.kind != "needle"]
    mine = [name for name in names if any(one.startswith(f"{name}.") for one in there)]
    tasks, absent = catalogue_tasks(options.models_root, mine) if mine else ({}, {})
    return {name: task for name, task in tasks.items() if name in there}, absent


def _recomputed(store: Store, tasks: Mapping[str, Task], size: str, seed: int) -> list[Finding]:
    """Compute a random sample of the stored records again; a finding for each that gives other numbers.

    Raises StoreError for a size that is neither a number nor a share.
    """
    names = sorted(tasks.keys() & store.entries.keys())
    share = size.removesuffix("%")
    if not share.isdecimal() or not int(share) or (share != size and int(share) > 100):
        raise StoreError(f"--sample {size}: write a number of records, or a share of them as 5%")
    count = min(len(names), math.ceil(len(names) * int(share) / 100) if share != size else int(share))
    found = []
    for name in sorted(random.Random(seed).sample(names, count)):
        stored = store.lookup(tasks[name].key)
        if stored.record is None:
            continue  # missing, stale or damaged: a finding already
        again = tasks[name].make()
        same = invisible(stored.record, again)
        print(f"computed again: {name}: {'the same' if same else 'OTHER NUMBERS'}", flush=True)
        if not same:
            told = (store.entries[name].get("provenance") or {}).get("environment") or {}
            kind, why = classify(stored.record, again, told, environment())
            found.append(Finding("changed", name, f"{name} computed again gives other numbers ({kind}): {why}"))
    return found


@contextmanager
def _witness(root: Path) -> Iterator[Callable[[Record], dict[str, Any]]]:
    """A second opinion about records of the catalogue's models; the witness starts when it is first asked."""
    from pytest_adapt.models import ModelError, catalogue, materialise

    started: list[Witness] = []

    def confirm(record: Record) -> dict[str, Any]:
        name = record.key.model
        if name not in catalogue():
            raise ReviewError(f"{record.key.id}: no witness knows model {name}; --allow-unwitnessed if it must be so")
        try:
            directory = materialise(name, root)
        except ModelError as problem:
            raise ReviewError(f"{record.key.id}: {problem}") from None
        if not started:
            started.append(Witness())
        return started[0].confirm(directory, record)

    try:
        yield confirm
    finally:
        for one in started:
            one.close()


def _prune(options: argparse.Namespace, store: Store) -> int:
    tasks, absent = catalogue_tasks(options.models_root)
    if absent:
        raise StoreError(
            f"cannot tell what {next(iter(absent))} needs ({next(iter(absent.values()))}); nothing deleted"
        )
    found = orphans(store, {*tasks, *_observed(store)})
    for record_id in found:
        print(f"{'deleted' if options.yes else 'orphan'}: {record_id}")
        if options.yes:
            store.remove(record_id)
    if found and not options.yes:
        print("nothing deleted; add --yes")
    return 0


def _make(options: argparse.Namespace, store: Store) -> int:
    tasks, absent = catalogue_tasks(options.models_root, options.models)
    for model, reason in absent.items():
        print(f"left out: {model} ({reason})")
    if options.stale:
        tasks = {name: task for name, task in tasks.items() if store.lookup(task.key).status != "ok"}
    if options.prompts:
        tasks = {name: task for name, task in tasks.items() if task.key.prompt in options.prompts}
    told = provenance(options.reason, store.directory)
    witness = Witness()
    try:
        for record_id, task in tasks.items():
            record = task.make()
            outcome = store.write(record, {**told, "witness": witness.confirm(task.live.directory, record)})
            shares = ", ".join(f"{p} {record.certified(p).mean():.0%}" for p in record.precisions)
            print(f"{record_id}: {outcome}; certified {shares}", flush=True)
    finally:
        witness.close()
    return 0


def _chosen(options: argparse.Namespace) -> list[Pending]:
    pending = review.list_pending(options.pending)
    if options.all:
        return pending
    if not options.names:
        raise ReviewError("name the records, or --all; goldens list shows what is pending")
    for name in options.names:
        if not any(fnmatch.fnmatchcase(one.record_id, name) or one.path.name == name for one in pending):
            raise ReviewError(f"{name}: nothing pending has this id; goldens list shows what is pending")
    return [
        one
        for one in pending
        if any(fnmatch.fnmatchcase(one.record_id, name) or one.path.name == name for name in options.names)
    ]
