"""Pending records: what a run proposes, how it differs from what is stored, and who takes it in.

A run never writes into a store. It leaves a pending record below ``.adapt/pending``; a person looks at the
difference and accepts or rejects it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pytest_adapt.golden.diff import BUCKETS, CLASSES, RecordDiff, classify, compare, environment_changes
from pytest_adapt.golden.record import OBSERVED, Record, RecordError, is_record_id
from pytest_adapt.golden.reference import observed_values
from pytest_adapt.golden.store import SUFFIX, Store
from pytest_adapt.target.protocol import Response

__all__ = [
    "Pending",
    "ReviewError",
    "accept",
    "classified",
    "distrust",
    "list_pending",
    "markdown",
    "propose",
    "propose_observed",
    "reject",
    "table",
]

# More than this share of a store at once is a change of everything, not of something.
_MANY = 0.2
_KINDS = ("new", "update", "observed")


class ReviewError(Exception):
    """An acceptance is refused; the message is one line with the option that allows it."""


@dataclass(frozen=True)
class Pending:
    """A proposed record and why it is proposed."""

    path: Path
    record_id: str
    kind: str
    """new (there was none), update (the reference changed) or observed (a target's answers differ from it)."""
    case: str = ""
    reason: str = ""
    run_had_errors: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def note(self) -> Path:
        """The file beside it that says why."""
        return self.path.with_suffix(".json")

    @property
    def record(self) -> Record:
        """The proposed record. Raises RecordError."""
        return Record.load(self.path)


def propose(
    folder: Path, record: Record, kind: str, case: str = "", reason: str = "", provenance: dict[str, Any] | None = None
) -> Pending:
    """Write a pending record, and beside it why; one pair for each record and case, replaced in one step."""
    # What the reference says does not depend on the case that asked; what a target answers does.
    origin = case if kind == "observed" else "reference"
    digest = hashlib.sha256(origin.encode()).hexdigest()[:12]
    path = folder / f"{record.key.id}.{digest}{SUFFIX}"
    record.save(path)
    pending = Pending(path, record.key.id, kind, case, reason, provenance=provenance or {})
    _write_note(pending)
    return pending


def propose_observed(
    folder: Path,
    record: Record,
    response: Response,
    target: str,
    case: str,
    detail: str,
    provenance: dict[str, Any] | None = None,
) -> Pending:
    """Keep what a target answered to the prompt of ``record``, for the reviewer.

    It has the record's budgets and the target's values. Raises RecordError where the answer has none.
    """
    tokens = tuple(int(token) for token in record.tokens)
    values = observed_values(f"target {target}", response, tokens, record.positions, record.vocab)
    seen = replace(record, source=f"target {target}", **values)
    return propose(folder, seen, "observed", case, detail, provenance)


def list_pending(folder: Path) -> list[Pending]:
    """Every pending record, by record id. Raises RecordError for a note that cannot be read."""
    found = []
    for note in sorted(folder.glob("*.json")):
        try:
            raw = json.loads(note.read_text(encoding="utf-8"))
            one = Pending(path=note.with_suffix(SUFFIX), **raw)
            if not is_record_id(one.record_id):
                raise ValueError(f"record_id {one.record_id!r} is no record's name")
            if one.kind not in _KINDS:
                raise ValueError(f"kind {one.kind!r}; kinds are {', '.join(_KINDS)}")
            if not isinstance(one.provenance, dict):
                raise ValueError(f"provenance {one.provenance!r} is no object")
            found.append(one)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RecordError(f"{note}: not the note of a pending record ({error}); delete it") from error
    return found


def difference(store: Store, pending: Pending) -> RecordDiff | None:
    """How a pending record differs from the stored one, or from its beginning; None when there is none to read."""
    path = store.path(pending.record_id)
    if not path.exists():
        return None
    try:
        stored, proposed = Record.load(path), pending.record
        if pending.kind == "observed" and len(proposed.tokens) < len(stored.tokens):
            stored = stored.prefix(len(proposed.tokens))
        return compare(stored, proposed)
    except RecordError:
        return None


def table(store: Store, every: Sequence[Pending]) -> list[str]:
    """Markdown for the reviewer: one block a record, then how often differences of each size occur."""
    lines: list[str] = []
    counts = np.zeros(len(BUCKETS) + 1, np.int64)
    for pending in every:
        found = difference(store, pending)
        case = f", case `{pending.case}`" if pending.case else ""
        reason = f": {pending.reason}" if pending.reason else ""
        lines.append(f"- **{pending.record_id}** ({pending.kind}){case}{reason}")
        if found is None:
            record = pending.record
            lines.append(f"    - new: {len(record.tokens)} tokens, {', '.join(record.precisions)} from {record.source}")
            continue
        lines += [f"    - {line}" for line in found.lines()[:8]] or ["    - no difference"]
        for array in found.arrays:
            counts += np.array(array.buckets)
    if counts.any():
        names = ["== 0", *(f"< {bound:g}" for bound in BUCKETS[1:]), f">= {BUCKETS[-1]:g}"]
        cells = ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))
        lines.append(f"- differences by size over all arrays: {cells}")
    return lines


def classified(store: Store, pending: Pending) -> tuple[str, str]:
    """(class, why) of a pending record: new, or what `diff.classify` says of the change."""
    path = store.path(pending.record_id)
    if not path.exists():
        record = pending.record
        return "new", f"{len(record.tokens)} tokens, {', '.join(record.precisions)} from {record.source}"
    try:
        stored, proposed = Record.load(path), pending.record
    except RecordError as problem:
        return "behaviour", str(problem)
    if pending.kind == "observed" and len(proposed.tokens) < len(stored.tokens):
        stored = stored.prefix(len(proposed.tokens))
    if stored.source == "oracle" and pending.kind == "observed":
        return "behaviour", f"{proposed.source} contradicts the reference: {pending.reason}"
    return classify(stored, proposed, _environment(store, pending.record_id), pending.provenance.get("environment"))


def markdown(store: Store, every: Sequence[Pending]) -> list[str]:
    """What a pull request should say about pending records: how many of each class, each with its reason, the worst
    class first, then the differences of what is more than noise, and what changed in the environment."""
    found = [(pending, *classified(store, pending)) for pending in every]
    order = ("behaviour", "environment", "new", "noise")
    counts = {name: sum(kind == name for _, kind, _ in found) for name in order}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"
    lines = [f"### Golden records: {said}", ""]
    if found:
        lines += ["| record | class | why |", "|---|---|---|"]
    for pending, kind, why in sorted(found, key=lambda one: (order.index(one[1]), one[0].record_id)):
        lines.append(f"| {pending.record_id} | {kind} | {why.replace('|', chr(92) + '|')} |")
    changes = {
        line: None
        for pending, kind, _ in found
        for line in environment_changes(
            _environment(store, pending.record_id), pending.provenance.get("environment") or {}
        )
    }
    lines += ["", *(f"- environment: {line}" for line in changes)] if changes else []
    told = [pending for pending, kind, _ in found if kind in CLASSES[1:]]
    return [*lines, "", *table(store, told)] if told else lines


def _environment(store: Store, record_id: str) -> dict[str, str]:
    """The inventory of what made a stored record."""
    told = store.entries.get(record_id, {}).get("provenance") or {}
    return {str(name): str(value) for name, value in (told.get("environment") or {}).items()}


def accept(
    store: Store,
    chosen: Sequence[Pending],
    provenance: dict[str, Any],
    *,
    allow_structure: bool = False,
    allow_many: bool = False,
    allow_observed: bool = False,
    allow_dirty: bool = False,
    allow_unwitnessed: bool = False,
    confirm: Callable[[Record], dict[str, Any]] | None = None,
) -> list[str]:
    """Take pending records into the store; returns what happened. Raises ReviewError before anything is written.

    ``confirm`` asks the second witness about a record that becomes a reference, and returns who it was; it raises
    StoreError where the witness disagrees, which nothing allows. Without it ``provenance`` names the witness.
    """
    by_record: dict[str, Pending] = {}
    for pending in chosen:
        if pending.record_id in by_record:
            raise ReviewError(f"{pending.record_id} is pending from two cases; accept one by its file name")
        by_record[pending.record_id] = pending
    if provenance.get("dirty") and not allow_dirty:
        raise ReviewError(
            f"the working tree that holds {store.directory} has changes outside it; commit them, or --allow-dirty (it "
            "is noted)"
        )
    for pending in chosen:
        if pending.run_had_errors:
            raise ReviewError(f"{pending.record_id}: the run that proposed it had errors; run it again")
        apart = pending.record.key.math_class.startswith(OBSERVED)  # stands beside the reference, not in its place
        if pending.kind == "observed" and not apart and not allow_observed:
            raise ReviewError(
                f"{pending.record_id}: a target's answers, which the reference contradicts; find out which is "
                "wrong, then --allow-observed (the record stops being a reference)"
            )
        listed = store.entries.get(pending.record_id, {}).get("tokens", 0)
        if len(pending.record.tokens) < listed:
            raise ReviewError(
                f"{pending.record_id}: covers {len(pending.record.tokens)} of {listed} tokens; it cannot take the "
                "record's place, reject it"
            )
        found = difference(store, pending)
        if found is not None and found.structure and not allow_structure:
            raise ReviewError(
                f"{pending.record_id}: structure changes ({found.structure[0]}); --allow-structure if meant"
            )
    changing = [pending for pending in chosen if pending.record_id in store.entries]
    if len(changing) > max(1, _MANY * len(store.entries)) and not allow_many:
        raise ReviewError(
            f"{len(changing)} of {len(store.entries)} records would change at once; --allow-many if all of them should"
        )
    witnesses = {}
    for pending in chosen:
        if pending.kind == "observed" or allow_unwitnessed:
            continue
        if confirm is not None:
            witnesses[pending.record_id] = {"witness": confirm(pending.record)}
        elif not provenance.get("witness"):
            raise ReviewError(f"{pending.record_id}: nobody else confirms it; ask a witness, or --allow-unwitnessed")
    outcome = []
    for pending in chosen:
        told = {**provenance, **pending.provenance, **witnesses.get(pending.record_id, {}), "proposed": pending.reason}
        result = store.write(pending.record, told)
        outcome.append(f"{pending.record_id}: {result}")
        reject([pending])
    return outcome


def distrust(folder: Path, before: Mapping[str, int]) -> int:
    """Note that the run which wrote pending records had errors, so that none of them is accepted; how many there are.

    ``before`` maps the names of the notes that were there when the run began to their times of change (st_mtime_ns).
    """
    written = [one for one in list_pending(folder) if before.get(one.note.name) != one.note.stat().st_mtime_ns]
    for pending in written:
        _write_note(replace(pending, run_had_errors=True))
    return len(written)


def reject(chosen: Iterable[Pending]) -> None:
    """Delete pending records."""
    for pending in chosen:
        pending.path.unlink(missing_ok=True)
        pending.note.unlink(missing_ok=True)


def _write_note(pending: Pending) -> None:
    note = asdict(pending)
    del note["path"]
    path = pending.note
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(note, sort_keys=True, indent=1), encoding="utf-8")
    partial.replace(path)
