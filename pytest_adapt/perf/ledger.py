"""Counters on record: what each load cost a target in whole numbers, kept like golden records.

One file a target (``counters/NAME.json`` in the shipped store or in the user's own), one line a case, sorted, so that
a change is one line of a diff. A run only reads it: what it proposes lies below ``.adapt/pending/counters`` until a
person accepts it (``python -m pytest_adapt counters``). Provenance stands beside the numbers; the same numbers,
recorded again, change nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "BUILD",
    "FOLDER",
    "ROUNDED",
    "Change",
    "Ledger",
    "LedgerError",
    "Proposal",
    "Row",
    "accept",
    "changes",
    "pending",
    "propose",
    "rebuilt",
    "reject",
]

SCHEMA = 1
FOLDER = "counters"
BUILD = ("torch", "transformers", "native_ops")
"""Entries of a target's environment that say how it was built."""
ROUNDED = ("cpu",)
"""The same for what rounds coarsely: there an instruction set may choose another expert, which counts otherwise."""
_OF_BUILD = ("op.", "framework.")
"""Counters that are compared only where the target is built as it was when they were recorded."""
_MANY = 0.2
"""More than this share of a ledger at once is a change of everything, not of something."""


class LedgerError(Exception):
    """Counters cannot be read or taken in; the message is one line with the way out."""


@dataclass(frozen=True)
class Row:
    """One case: ``key`` is model, layout, precision and load, joined by spaces."""

    key: str
    counters: Mapping[str, int]
    build: Mapping[str, str]
    """The entries of `BUILD` of the target that was counted."""
    spec: str = ""
    """Hash of the model's specification; "" for a directory of the user's."""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Any) -> Row:
        """A row as it was written. Raises ValueError, one line that names the case, for one of another form."""
        if not isinstance(raw, dict) or not isinstance(raw.get("key"), str) or len(raw["key"].split(" ")) < 4:
            raise ValueError(f"{_brief(raw)} has no key of model, layout, precision and load")
        row = cls(**raw)
        if not isinstance(row.counters, dict) or not row.counters:
            raise ValueError(f"{row.key}: counters are {_brief(row.counters)}, and no object that holds any")
        for name, count in row.counters.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"{row.key}: {name} is {_brief(count)}; counters are whole numbers from 0 on")
        if not isinstance(row.build, dict) or any(not isinstance(value, str) for value in row.build.values()):
            raise ValueError(f"{row.key}: build is {_brief(row.build)}, and no object of texts")
        if not isinstance(row.spec, str) or not isinstance(row.provenance, dict):
            raise ValueError(f"{row.key}: spec must be text, and provenance an object")
        return row

    @property
    def load(self) -> str:
        return self.key.rsplit(" ", 1)[-1]

    @property
    def cell(self) -> str:
        """Model, layout and precision."""
        return self.key.rsplit(" ", 1)[0]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


@dataclass(frozen=True)
class Change:
    """One counter that is not what it was; None where there is none."""

    name: str
    before: int | None
    after: int | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.name} is new: {self.after}"
        if self.after is None:
            return f"{self.name} is gone, it was {self.before}"
        share = f" ({self.after / self.before - 1:+.1%})" if self.before else ""
        return f"{self.name} {self.before} -> {self.after}{share}"


def changes(recorded: Row, found: Row, every: bool = False) -> tuple[list[Change], str]:
    """(what differs, by name; what was not compared and why, "" for nothing). ``every``: also what depends on a build
    that is another one."""
    moved = [] if every else rebuilt(recorded, found)
    names = sorted(recorded.counters.keys() | found.counters.keys())
    compared = [name for name in names if not (moved and name.startswith(_OF_BUILD))]
    differing = [
        Change(name, recorded.counters.get(name), found.counters.get(name))
        for name in compared
        if recorded.counters.get(name) != found.counters.get(name)
    ]
    left = len(names) - len(compared)
    if not left:
        return differing, ""
    told = ", ".join(moved)
    return differing, f"{left} counters of operations and framework not compared: recorded with another build ({told})"


def rebuilt(recorded: Row, found: Row) -> list[str]:
    """What is built otherwise, one line each."""
    return [
        f"{name} {recorded.build.get(name, 'none')!r} -> {found.build.get(name, 'none')!r}"
        for name in sorted({*recorded.build, *found.build})
        if recorded.build.get(name) != found.build.get(name)
    ]


@dataclass
class Ledger:
    """The counters of one target."""

    path: Path
    target: str
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def find(cls, folders: Iterable[Path], target: str) -> Ledger | None:
        """The ledger of a target in the first of these stores that has one. Raises LedgerError."""
        return next((found for folder in folders if (found := cls.within(folder, target)) is not None), None)

    @classmethod
    def within(cls, folder: Path, target: str) -> Ledger | None:
        """The ledger of a target in one store; None where it has none. Raises LedgerError."""
        path = cls.place(folder, target)
        found = cls.read(path) if path.is_file() else None
        if found is not None and found.target != target:
            raise LedgerError(f"{path}: holds the counters of {found.target}, and {target} would be kept there too")
        return found

    @classmethod
    def place(cls, folder: Path, target: str) -> Path:
        """Where a store keeps the counters of a target."""
        name = "".join(char if char.isalnum() or char in "._-" else "_" for char in target)
        return folder / FOLDER / f"{name}.json"

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Raises LedgerError for a file that cannot be read."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["schema"] != SCHEMA:
                raise LedgerError(f"{path}: schema {raw['schema']!r}, this version reads {SCHEMA}; record it again")
            target, rows = raw["target"], [Row.of(one) for one in raw["cases"]]
            if not isinstance(target, str) or cls.place(path.parent.parent, target).name != path.name:
                raise ValueError(f"target is {_brief(target)}, which is not kept under this name")
            keys = [row.key for row in rows]
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise ValueError(f"{twice[0]}: listed twice")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise LedgerError(
                f"{path}: cannot be read as counters ({_why(error)}); restore it from version control"
            ) from None
        return cls(path, target, {row.key: row for row in rows})

    def write(self) -> None:
        """In one step, sorted, one line a case."""
        lines = [json.dumps(asdict(self.rows[key]), sort_keys=True) for key in sorted(self.rows)]
        head = f'{{"schema": {SCHEMA}, "target": {json.dumps(self.target)}, "cases": ['
        text = "\n".join([head, ",\n".join(lines), "]}", ""])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(self.path)

    def gone(self, cell: str, loads: Iterable[str]) -> list[Row]:
        """Rows of a cell whose load nobody runs any more."""
        known = set(loads)
        return [row for row in self.rows.values() if row.cell == cell and row.load not in known]


@dataclass(frozen=True)
class Proposal:
    """Counters that a run proposes. ``kind``: new (there were none) or update."""

    target: str
    kind: str
    row: Row
    case: str
    reason: str
    path: Path | None = None
    """Where it lies, once it does."""


def propose(folder: Path, one: Proposal) -> Path:
    """Leave a proposal below ``folder`` (``.adapt/pending``): a file for each target and case, replaced in one step."""
    digest = hashlib.sha256(f"{one.target}\0{one.row.key}".encode()).hexdigest()[:16]
    path = folder / FOLDER / f"{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = asdict(one)
    del raw["path"]
    part = path.with_name(f".{digest}.{os.getpid()}")
    part.write_text(json.dumps(raw, sort_keys=True, indent=1), encoding="utf-8")
    part.replace(path)
    return path


def pending(folder: Path) -> list[Proposal]:
    """All proposals below ``folder``, by target and case. Raises LedgerError for a file that cannot be read."""
    found = []
    for path in sorted((folder / FOLDER).glob("[0-9a-f]*.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            one = Proposal(**{**raw, "row": Row.of(raw["row"]), "path": path})
            if not one.target or not all(
                isinstance(text, str) for text in (one.target, one.kind, one.case, one.reason)
            ):
                raise ValueError("target, kind, case and reason must be text, and target not empty")
            found.append(one)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise LedgerError(f"{path}: no proposal of counters ({_why(error)}); delete it") from None
    return sorted(found, key=lambda one: (one.target, one.row.key))


def _why(error: Exception) -> str:
    """A ValueError of this module says in words what is wrong; what Python raises needs its kind."""
    return str(error) if type(error) is ValueError else repr(error)


def accept(
    folder: Path,
    chosen: Sequence[Proposal],
    provenance: Mapping[str, Any],
    *,
    allow_many: bool = False,
    allow_dirty: bool = False,
) -> list[str]:
    """Take proposals into the store in ``folder`` and delete them; what happened, one line each. Raises LedgerError
    before anything is written."""
    if provenance.get("dirty") and not allow_dirty:
        raise LedgerError(
            f"the working tree that holds {folder} has changes outside it; commit them, or --allow-dirty (it is noted)"
        )
    ledgers: dict[str, Ledger] = {}
    said = []
    for one in chosen:
        if one.target not in ledgers:
            path = Ledger.place(folder, one.target)
            ledgers[one.target] = Ledger.within(folder, one.target) or Ledger(path, one.target)
    for target, ledger in ledgers.items():
        changing = [one for one in chosen if one.target == target and one.row.key in ledger.rows]
        if len(changing) > max(1, _MANY * len(ledger.rows)) and not allow_many:
            raise LedgerError(
                f"{len(changing)} of {len(ledger.rows)} cases of {target} would change at once; --allow-many if all "
                "of them should"
            )
    for one in chosen:
        rows = ledgers[one.target].rows
        before = rows.get(one.row.key)
        if before is not None and (before.counters, before.build) == (one.row.counters, one.row.build):
            said.append(f"{one.target} {one.row.key}: same")
            continue
        told = {**provenance, "proposed": one.reason}
        rows[one.row.key] = Row(one.row.key, one.row.counters, one.row.build, one.row.spec, told)
        said.append(f"{one.target} {one.row.key}: {'new' if before is None else 'changed'}")
    for ledger in ledgers.values():
        ledger.write()
    reject(chosen)
    return said


def reject(chosen: Iterable[Proposal]) -> None:
    """Delete proposals."""
    for one in chosen:
        if one.path is not None:
            one.path.unlink(missing_ok=True)
