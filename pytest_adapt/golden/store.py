"""A folder of records with an index: one file a record, one line a record, data only.

What a record says is in the file and under its digest. Who made it, when and on what is in the index, outside the
digest, so that recording the same numbers again changes nothing. Tests only read; the command line writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_adapt.golden.record import SCHEMA, Record, RecordError, RecordKey, is_record_id

__all__ = ["INDEX", "Lookup", "Store", "StoreError", "shipped_store"]

INDEX = "index.json"
SUFFIX = ".safetensors"
KINDS = ("reference", "observed")


class StoreError(Exception):
    """A store cannot be read or written; the message is one line with the way out."""


@dataclass(frozen=True)
class Lookup:
    """Answer of `Store.lookup`. ``status``: ok, missing, stale or damaged; ``reason`` is one line with the way out."""

    status: str
    record: Record | None = None
    reason: str = ""


@dataclass
class Store:
    """Records below one directory. ``read_only`` marks the one that ships with the product."""

    directory: Path
    read_only: bool = False
    _entries: dict[str, dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Record id -> index entry. Raises StoreError when the index is there but cannot be read."""
        if self._entries is None:
            self._entries = self._read_index()
        return self._entries

    def path(self, record_id: str) -> Path:
        return self.directory / f"{record_id}{SUFFIX}"

    def files(self) -> dict[str, Path]:
        """Record id -> file, of every record file that is there, indexed or not."""
        return {path.name.removesuffix(SUFFIX): path for path in sorted(self.directory.glob(f"*{SUFFIX}"))}

    def lookup(self, key: RecordKey) -> Lookup:
        """The record of ``key``, or why there is none that can be used."""
        remake = f"python -m pytest_adapt goldens make --models {key.model} --reason ..."
        if self.read_only:
            remake = "reinstall pytest-adapt"
        path, entry = self.path(key.id), self.entries.get(key.id)
        if entry is None and not path.exists():
            return Lookup(
                "missing", reason=f"no golden record {key.id} in {self.directory}; record it: --adapt-goldens=new"
            )
        if entry is None:
            return Lookup("damaged", reason=f"{path} is not in {INDEX}; accept it through review, or delete it")
        if not path.exists():
            return Lookup("damaged", reason=f"{INDEX} lists {key.id}, but {path} is gone; restore it, or {remake}")
        if entry.get("schema") != SCHEMA:
            reason = f"golden record {key.id} has schema {entry.get('schema')!r}, this version reads {SCHEMA}; {remake}"
            return Lookup("stale", reason=reason)
        try:
            record = Record.load(path)
        except RecordError as problem:
            return Lookup("damaged", reason=str(problem))
        if record.digest() != entry.get("digest") or record.key.id != key.id:
            return Lookup("damaged", reason=f"{path} is not the record that {INDEX} lists; restore both, or {remake}")
        changed = _changed(record.key, key)
        if changed:
            return Lookup("stale", record, f"golden record {key.id} is of another {changed}; {remake}")
        return Lookup("ok", record)

    def write(self, record: Record, provenance: Mapping[str, Any]) -> str:
        """Add or replace a record; returns ``new``, ``changed`` or ``same``.

        Numbers that differ less than any budget can see keep their old bytes and their old provenance.
        Raises StoreError when the store is read-only.
        """
        from pytest_adapt.golden.diff import invisible

        if self.read_only:
            raise StoreError(
                f"{self.directory} ships with pytest-adapt and is read-only; set adapt_goldens_dir to your own"
            )
        found = self.lookup(record.key)
        if found.status == "ok" and found.record is not None and invisible(found.record, record):
            return "same"
        record.save(self.path(record.key.id))
        self.entries[record.key.id] = {
            "id": record.key.id,
            "kind": KINDS[record.source.startswith("target")],
            "schema": SCHEMA,
            "digest": record.digest(),
            "tokens": len(record.tokens),
            "precisions": list(record.precisions),
            "provenance": dict(provenance),
        }
        self._write_index()
        return "new" if found.status == "missing" else "changed"

    def remove(self, record_id: str) -> None:
        """Delete a record and its line. Raises StoreError when the store is read-only."""
        if self.read_only:
            raise StoreError(f"{self.directory} ships with pytest-adapt and is read-only")
        self.path(record_id).unlink(missing_ok=True)
        self.entries.pop(record_id, None)
        self._write_index()

    def _read_index(self) -> dict[str, dict[str, Any]]:
        path = self.directory / INDEX
        if not path.exists():
            return {}
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            listed, schema = list(raw["records"]), raw["schema"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{path}: cannot be read as an index ({error!r}); restore it from version control"
            ) from error
        if schema != SCHEMA:
            raise StoreError(f"{path}: schema {schema!r}, this version reads {SCHEMA}; make the records again")
        for number, entry in enumerate(listed, start=1):
            if wrong := _malformed(entry):
                raise StoreError(f"{path}: entry {number}: {wrong}; restore it from version control")
        entries = {entry["id"]: entry for entry in listed}
        if len(entries) != len(listed):
            raise StoreError(f"{path}: a record is listed twice; restore it from version control")
        return entries

    def _write_index(self) -> None:
        lines = [json.dumps(self.entries[name], sort_keys=True) for name in sorted(self.entries)]
        body = ",\n".join(lines)
        text = f'{{"schema": {SCHEMA}, "records": [\n{body}\n]}}\n'
        path = self.directory / INDEX
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def shipped_store() -> Store:
    """The records that ship: inside the wheel beside this package, in a checkout beside ``pytest_adapt/``."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "goldens"
    return Store(inside if inside.is_dir() else package.parent / "goldens", read_only=inside.is_dir())


def _malformed(entry: Any) -> str:
    """What in one entry of an index has a form that nothing may rely on; empty where all is well.

    What is of the right form and says too little (no reason, no witness) is left to `golden.lint`.
    """
    if not isinstance(entry, dict):
        return f"{entry!r} is no object"
    name = entry.get("id")
    if not is_record_id(name):
        return f"id {name!r} is no record's name: letters, digits, '.', '_', '+' and '-' only, and no '.' first"
    if entry.get("kind") not in KINDS:
        return f"{name}: kind {entry.get('kind')!r}; kinds are {' and '.join(KINDS)}"
    told = entry.get("provenance") or {}
    forms: tuple[tuple[str, Any, type, str], ...] = (
        ("digest", entry.get("digest"), str, "text"),
        ("tokens", entry.get("tokens"), int, "a whole number"),
        ("precisions", entry.get("precisions"), list, "a list"),
        ("provenance", told, dict, "an object"),
    )
    if isinstance(told, dict):
        forms += tuple((f"its {one}", told.get(one) or {}, dict, "an object") for one in ("environment", "witness"))
    for what, value, form, said in forms:
        if not isinstance(value, form) or isinstance(value, bool):
            return f"{name}: {what} is {value!r}, and not {said}"
    if wrong := [one for one in entry["precisions"] if not isinstance(one, str)]:
        return f"{name}: precision {wrong[0]!r} is no name"
    return ""


def _changed(found: RecordKey, wanted: RecordKey) -> str:
    """What differs between the key of a stored record and the wanted one; empty when nothing does."""
    names = {"spec_hash": "model specification", "weight_digest": "weights", "prompts_digest": "prompt"}
    return " and ".join(label for name, label in names.items() if getattr(found, name) != getattr(wanted, name))
