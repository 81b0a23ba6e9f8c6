"""The static check of a store: index against disk against digests against what the catalogue expects. Runs no test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_adapt.golden.record import Record, RecordError, RecordKey
from pytest_adapt.golden.store import INDEX, Store

__all__ = ["Finding", "drift", "orphans", "verify"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``kind``: missing, stale, damaged, orphan or unwitnessed."""

    kind: str
    record_id: str
    message: str


def verify(store: Store, expected: Mapping[str, RecordKey], partial: bool = False) -> list[Finding]:
    """Everything wrong with a store.

    ``expected`` are the records that the catalogue asks for, by id; with ``partial`` it is only a part of them (a
    model whose weights are not installed), and nothing is called an orphan. Raises StoreError for an unreadable index.
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
    for record_id, entry in sorted(store.entries.items()):
        if entry.get("kind") == "reference" and not (entry.get("provenance") or {}).get("witness"):
            reason = f"{record_id} has no second witness; make it again with transformers installed"
            found.append(Finding("unwitnessed", record_id, reason))
    return found


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
