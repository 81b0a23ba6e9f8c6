"""The static check of a store: index against disk against digests against what the catalogue expects, and what records
themselves give away (placeholders, copies, size, provenance, witness). Runs no test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytest_adapt.golden.record import OBSERVED, Record, RecordError, RecordKey
from pytest_adapt.golden.store import INDEX, Store

__all__ = ["LARGEST", "Finding", "catalogue_keys", "drift", "inspect", "orphans", "served_lengths", "verify"]

LARGEST = 150_000
"""Bytes of a record for each prompt that it serves."""
_PROVENANCE = ("reason", "made_at", "generator", "environment")
# Names under which this project's own code could confirm itself.
_OURS = ("pytest-adapt", "pytest_adapt", "adapt-engine", "adapt_engine", "builtin", "oracle", "target")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``kind``: missing, stale, damaged, orphan, unwitnessed, placeholder, copy, large,
    unprovenanced or changed (a recomputation gave other numbers)."""

    kind: str
    record_id: str
    message: str


def verify(
    store: Store,
    expected: Mapping[str, RecordKey],
    partial: bool = False,
    served: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Finding]:
    """Everything wrong with a store.

    ``expected`` are the records that the catalogue asks for, by id; with ``partial`` it is only a part of them (a
    model whose weights are not installed), and nothing is called an orphan. ``served`` are the lengths of the prompts
    that a record serves (one, unless said). Raises StoreError for an unreadable index.
    """
    found: list[Finding] = []
    for record_id, key in sorted(expected.items()):
        answer = store.lookup(key)
        if answer.status != "ok":
            found.append(Finding(answer.status, record_id, answer.reason))
    for record_id in sorted((store.entries.keys() | store.files().keys()) - expected.keys()):
        found += _unexpected(store, record_id)
        if not partial:
            reason = f"{record_id} is of no model and prompt of the catalogue; python -m pytest_adapt goldens prune"
            found.append(Finding("orphan", record_id, reason))
    return [*found, *inspect(store, served or {})]


def inspect(store: Store, served: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    """What records and their entries give away by themselves; those that cannot be read are left to `verify`."""
    found: list[Finding] = []
    by_content: dict[str, str] = {}
    for record_id, entry in sorted(store.entries.items()):
        found += _origin(record_id, entry)
        path = store.path(record_id)
        try:
            record = Record.load(path)
        except RecordError:
            continue
        size, prompts = path.stat().st_size, len(served.get(record_id, (0,)))
        if size > LARGEST * prompts:
            reason = (
                f"{record_id} has {size} bytes for {prompts} prompts, beyond {LARGEST} each; record fewer positions"
            )
            found.append(Finding("large", record_id, reason))
        if why := _placeholder(record):
            found.append(Finding("placeholder", record_id, f"{record_id}: {why}; make it again from a real run"))
        twin = by_content.setdefault(_values_digest(record), record_id)
        if twin != record_id:
            reason = (
                f"{record_id} says the same as {twin}, which is about something else; one is a copy: make both again"
            )
            found.append(Finding("copy", record_id, reason))
    return found


def catalogue_keys(store: Store) -> dict[str, RecordKey]:
    """The records that the catalogue asks for, known without any checkpoint: only weights and tokens go unchecked (they
    are taken from the stored record; `goldens verify` computes them)."""
    from pytest_adapt.models import catalogue, spec_hash
    from pytest_adapt.models.prompts import record_names

    entries = {name: entry for name, entry in catalogue().items() if entry.kind != "needle"}
    keys = [RecordKey(name, prompt, "", "", "") for name in entries for prompt in record_names(entries[name])]
    found = {key.id: replace(key, spec_hash=spec_hash(entries[key.model])) for key in keys}
    for path in store.files().values():
        try:
            key = Record.load(path).key
        except RecordError:
            continue
        # What a target answered is kept under a class of its own, and for every prompt that it was sent.
        observed = key.math_class.startswith(OBSERVED) and key.model in entries
        if key.id in found or (observed and key.prompt.partition("-")[0] in entries[key.model].prompts):
            found[key.id] = replace(key, spec_hash=spec_hash(entries[key.model]))
    return found


def served_lengths() -> dict[str, tuple[int, ...]]:
    """Record id -> lengths of the prompts that it serves, of every record of the catalogue."""
    from pytest_adapt.models import catalogue
    from pytest_adapt.models.prompts import record_names

    return {
        RecordKey(name, prompt, "", "", "").id: lengths
        for name, entry in catalogue().items()
        for prompt, lengths in record_names(entry).items()
    }


def drift(store: Store, environment: Mapping[str, str]) -> list[str]:
    """How this environment differs from those that records were made in, one line each; no finding, numbers decide."""
    counts: dict[tuple[str, str, str], int] = {}
    for entry in store.entries.values():
        recorded = (entry.get("provenance") or {}).get("environment") or {}
        for name in sorted(recorded.keys() | environment.keys()):
            before, now = str(recorded.get(name, "unknown")), str(environment.get(name, "unknown"))
            if before != now:
                counts[name, before, now] = counts.get((name, before, now), 0) + 1
    return [f"{name}: {before} -> {now} ({count} records)" for (name, before, now), count in sorted(counts.items())]


def orphans(store: Store, expected: Iterable[str]) -> list[str]:
    """Ids of records, indexed or on disk, that nobody expects."""
    return sorted((store.entries.keys() | store.files().keys()) - set(expected))


def _origin(record_id: str, entry: Mapping[str, Any]) -> list[Finding]:
    """What is missing of who made a record, and of who confirmed it."""
    told = entry.get("provenance") or {}
    found = []
    said = {name: value.strip() if isinstance(value, str) else value for name, value in told.items()}
    if absent := [name for name in _PROVENANCE if not said.get(name)]:
        reason = f"{record_id} does not say its {' and '.join(absent)}; make it again with goldens make or accept"
        found.append(Finding("unprovenanced", record_id, reason))
    if entry.get("kind") != "reference":
        return found
    witness = told.get("witness") or {}
    name, use = witness.get("name") or "", witness.get("use_of_budget")
    confirms = isinstance(use, int | float) and not isinstance(use, bool) and 0.0 <= use <= 1.0
    if not name:
        reason = f"{record_id} has no second witness; make it again with transformers installed"
    elif not isinstance(name, str) or name != name.strip():
        reason = f"{record_id}: its witness {name!r} is no name, or has stray spaces; make it again"
    elif name.lower().startswith(_OURS):
        reason = f"{record_id}: its witness {name} is this project's own code, and not independent; use another engine"
    elif "use_of_budget" not in witness:
        reason = f"{record_id}: how far its witness {name} was away is not told (use_of_budget); make it again"
    elif not confirms:
        reason = f"{record_id}: its witness {name} was {use} of the budget away, which confirms nothing; make it again"
    else:
        return found
    return [*found, Finding("unwitnessed", record_id, reason)]


def _placeholder(record: Record) -> str:
    """What marks a record that no model gave; empty for one that may be real."""
    values = {"lse": record.lse, "topk_logprobs": record.topk_logprobs}
    if np.isfinite(record.norm).all():
        values |= {"norm": record.norm, "projections": record.projections}
    for name, value in values.items():
        if not np.isfinite(value).all():
            return f"{name} holds NaN or infinity"
        # A target that shows log-probabilities has a log-sum-exp of 0 by definition.
        if value.size > 1 and np.ptp(value) == 0 and not (name == "lse" and record.source.startswith("target")):
            return f"{name} is {float(value.flat[0]):g} everywhere"
    if record.topk_ids.shape[1] > 1 and (np.ptp(record.topk_logprobs, axis=1) == 0).any():
        return "a row gives all its tokens one probability"
    for precision, errors in record.errors.items():
        if not errors.rms.any():
            return f"its yardstick in {precision} is 0 everywhere"
    return ""


def _values_digest(record: Record) -> str:
    """sha256 of what a record says, whatever it says it about."""
    digest = hashlib.sha256()
    for value in (record.lse, record.topk_ids, record.topk_logprobs, record.projections):
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _unexpected(store: Store, record_id: str) -> list[Finding]:
    """Damage of a record that is not looked up by a key."""
    path = store.path(record_id)
    if record_id not in store.entries:
        return [Finding("damaged", record_id, f"{path} is not in {INDEX}; accept it through review, or delete it")]
    if not path.exists():
        return [Finding("damaged", record_id, f"{INDEX} lists {record_id}, but {path} is gone; restore it or prune")]
    try:
        digest = Record.load(path).digest()
    except RecordError as problem:
        return [Finding("damaged", record_id, str(problem))]
    if digest != store.entries[record_id].get("digest"):
        return [Finding("damaged", record_id, f"{path} is not the record that {INDEX} lists; restore both")]
    return []
