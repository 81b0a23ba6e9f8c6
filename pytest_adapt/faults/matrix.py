"""The kill matrix: which fault is seen by which suite, through which observable, in which precision.

Written by ``pytest --adapt-target=builtin --adapt-selftest``, shipped as ``kill_matrix.json`` beside this file, read by
whoever matches a failed run with known faults.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_adapt.documents import (
    DocumentError,
    Shape,
    both,
    choice,
    each,
    fields,
    named,
    of_schema,
    optional,
    printable,
    read,
    real,
    truth,
    whole,
    write,
)
from pytest_adapt.report.reading import CASE
from pytest_adapt.target.protocol import OBSERVABLES

__all__ = ["LIMIT", "MUTANT", "ROW", "SCHEMA", "KillMatrix", "MatrixError", "Tally", "load", "shipped_matrix"]

SCHEMA = 1
Row = Mapping[str, Any]
PRECISIONS = ("fp32", "bf16", "fp16")
ROW: Shape = fields(
    {
        **dict.fromkeys(("fault", "layout"), printable),
        "precision": choice(*PRECISIONS),
        "observable": choice(*OBSERVABLES),
        **dict.fromkeys(("differs", "killed", "owner"), truth),
        "located": optional(truth),
        "seconds": real,
        "red": each(CASE),
        "green": named(whole),
    },
    {"model": printable, "healthy": printable, "alone": truth, "said": optional(truth)},
)
MUTANT: Shape = fields({**dict.fromkeys(("name", "what", "by"), printable), "killed": truth})
LIMIT: Shape = fields(
    {
        **dict.fromkeys(("value", "precision"), printable),
        **dict.fromkeys(("changes", "token", "any_token"), optional(real)),
        "detected": both(named(optional(real)), fields({"taps": optional(real)})),
    }
)
_MADE = fields({}, {"seconds": real})
_PARTS = fields({"rows": each(ROW)}, {"mutants": each(MUTANT), "limits": each(LIMIT), "made": _MADE})


class MatrixError(DocumentError):
    """A kill matrix that cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Tally:
    """Of one observable and precision: how many faults were tried, and what became of them."""

    rows: int = 0
    equivalent: int = 0
    """Faults that change no bit of any answer, or that a sound engine of the precision has too."""
    owner: int = 0
    """Seen by the suite that owns them."""
    some: int = 0
    """Seen by some suite."""
    alone: int = 0
    """Seen in the values of this observable itself (not in the text that comes with it)."""
    layered: int = 0
    """Faults whose cause is in a layer."""
    located: int = 0
    """Of those, the ones whose first divergence is named with the right layer and site."""

    @property
    def judged(self) -> int:
        return self.rows - self.equivalent


@dataclass(frozen=True)
class KillMatrix:
    """``rows``: one a fault, precision and observable; ``mutants``: one a wrong comparator; ``limits``: one a scaled
    value, precision and observable; ``made``: version, python, seconds of one process, cores."""

    rows: tuple[Row, ...] = ()
    mutants: tuple[Row, ...] = ()
    limits: tuple[Row, ...] = ()
    made: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def counts(row: Row) -> bool:
        """Whether a row is of a change that somebody should see."""
        return bool(row["differs"]) and not row.get("healthy")

    def of(self, observable: str, precision: str) -> list[Row]:
        """Rows of one observable and precision, in the order of the faults."""
        return [row for row in self.rows if (row["observable"], row["precision"]) == (observable, precision)]

    @property
    def size(self) -> int:
        """How much is known: rows of every kind."""
        return len(self.rows) + len(self.mutants) + len(self.limits)

    def precisions(self) -> list[str]:
        """Precisions that have rows, in the order of fp32, bf16, fp16."""
        found = {row["precision"] for row in self.rows}
        return [name for name in PRECISIONS if name in found]

    def tally(self, observable: str, precision: str) -> Tally:
        """Counts of one observable and precision. A fault that is equivalent has a row of its first observable only;
        it counts in none of the others."""
        rows = self.of(observable, precision)
        judged = [row for row in rows if self.counts(row)]
        layered = [row for row in judged if row["located"] is not None]
        return Tally(
            rows=len(rows),
            equivalent=len(rows) - len(judged),
            owner=sum(row["owner"] for row in judged),
            some=sum(row["killed"] for row in judged),
            alone=sum(bool(row.get("alone")) for row in judged),
            layered=len(layered),
            located=sum(bool(row["located"]) for row in layered),
        )

    def survivors(self, observable: str, precision: str) -> list[str]:
        """Ids of faults that count and that no suite sees."""
        return [row["fault"] for row in self.of(observable, precision) if self.counts(row) and not row["killed"]]

    def lacking(self, faults: Iterable[str]) -> list[str]:
        """What a whole matrix of these faults has beside this one, in words."""
        names = list(faults)
        found = []
        for precision in ("fp32", "bf16"):
            seen = {row["fault"] for row in self.of("taps", precision)}
            if absent := [name for name in names if name not in seen]:
                found.append(f"{len(absent)} of {len(names)} faults in {precision} ({absent[0]} first)")
        found += [what for what, rows in (("mutants", self.mutants), ("limits", self.limits)) if not rows]
        return found

    def save(self, path: Path) -> None:
        """Write the matrix, in one step. Raises OSError."""
        write(path, self.text())

    def text(self) -> str:
        """The matrix as JSON, one row a line."""
        parts = asdict(self)
        lines = [f'"schema": {SCHEMA}', f'"made": {json.dumps(parts["made"], allow_nan=False)}']
        for name in ("rows", "mutants", "limits"):
            lines.append(f'"{name}": {_lines(parts[name])}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def load(path: Path | None = None) -> KillMatrix:
    """The matrix in ``path``; without one the shipped matrix, or an empty one where none is shipped.

    Raises MatrixError for a file that is absent, no JSON, or of another schema or shape.
    """
    place = path or shipped_matrix()
    if path is None and not place.is_file():
        return KillMatrix()
    try:
        found = read(place, both(of_schema(SCHEMA), _PARTS))
    except DocumentError as error:
        raise MatrixError(f"kill matrix {error}; make one with --adapt-selftest") from None
    return KillMatrix(
        rows=tuple(found["rows"]),
        mutants=tuple(found.get("mutants", ())),
        limits=tuple(found.get("limits", ())),
        made=found.get("made", {}),
    )


def shipped_matrix() -> Path:
    """Where the matrix of this version lies."""
    return Path(__file__).resolve().with_name("kill_matrix.json")


def _lines(rows: Iterable[Row]) -> str:
    texts = [json.dumps(row, separators=(",", ":"), allow_nan=False) for row in rows]
    return "[\n" + ",\n".join(texts) + "\n]" if texts else "[]"
