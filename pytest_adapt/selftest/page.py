"""The kill matrix as a page of Markdown, and as a screen of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_adapt.documents import write
from pytest_adapt.faults.matrix import KillMatrix, Row, Tally
from pytest_adapt.faults.registry import Fault, catalogue

__all__ = ["page", "summary_lines", "write_page"]

_OBSERVABLES = ("taps", "logits", "score", "topk", "text")
_NAMES = {
    "taps": "everything (taps)",
    "logits": "logits and text",
    "score": "scores and text",
    "topk": "top-20 and text",
    "text": "text",
}
_HEAD = """# Kill matrix

What the suites see of each fault of the registry (`docs/faults.md`), measured. Each fault is put into the built-in
engine (fast mode; DT in mode strict, which their suite asks for), and the suites are run on a reduced case set with the
target masked to one observable at a time. The same cases are run without the fault, where all of them must be green.

    pytest --adapt-target=builtin --adapt-selftest -n 2      # everything; what is done is kept, and not done again
    pytest --adapt-target=builtin --adapt-selftest='RT*'     # some faults
    python -m pytest_adapt faults matrix --write             # this page, and pytest_adapt/faults/kill_matrix.json

The reduced case set: the fault's first model, its layout and its lengths; of a model's prompts the first 37 and 150
random tokens and the first 64 of a searched prompt; all tests of the suites that judge such a model. Two faults of
32,768 positions are put in with narrower numbers, at 4,096. A fault *differs* where any answer of any case has
another bit than without it; one that does not is *equivalent*: listed, not counted. So is one that a sound engine of
that precision has too, which is then named. What no suite sees though everything is shown is put before the suite
`operators` as well, whose values reach what a model's own hide.
"""
_LEGEND = """In each cell: **O** seen by the owning suite, *o* by another one only, - by none, = equivalent. The last
columns: whether the first divergence has the right layer and site, or the words that lead to the cause were said
(bf16, else fp32); seconds of CPU time of all runs of the fault.
"""


def write_page(matrix: KillMatrix, path: Path) -> None:
    """Write `page` to a file, in one step. Raises OSError."""
    write(path, page(matrix))


def summary_lines(matrix: KillMatrix) -> list[str]:
    """At most a screen: counts for each observable and precision, then who survives, and why where that is known."""
    lines = ["                            owner suite   some suite   itself     layer and site   equivalent"]
    for precision in matrix.precisions():
        for observable in _OBSERVABLES:
            tally = matrix.tally(observable, precision)
            if tally.rows:
                lines.append(
                    f"{precision:5} {_NAMES[observable]:20}  {_of(tally.owner, tally.judged):>12} "
                    f"{_of(tally.some, tally.judged):>12} {_of(tally.alone, tally.judged):>12} "
                    f"{_of(tally.located, tally.layered) if observable == 'taps' else '':>14} {tally.equivalent:>10}"
                )
    for precision in matrix.precisions():
        for observable in _OBSERVABLES:
            survivors = matrix.survivors(observable, precision)
            if survivors:
                lines.append(f"{precision} {observable}: not seen: {_shortened(survivors)}")
    for name, reason in _reasons(matrix):
        lines.append(f"{name}: {reason}")
    if matrix.mutants:
        alive = [row["name"] for row in matrix.mutants if not row["killed"]]
        tail = f"; alive: {', '.join(alive)}" if alive else ""
        lines.append(f"wrong comparators: {len(matrix.mutants) - len(alive)} of {len(matrix.mutants)} seen{tail}")
    lines.append(f"{matrix.made.get('seconds', 0):g} s of CPU time")
    return lines


def page(matrix: KillMatrix) -> str:
    """The page."""
    made = matrix.made
    parts = [
        _HEAD,
        f"Made with pytest-adapt {made.get('version')} on Python {made.get('python')}: {made.get('seconds')} s of",
        "CPU time.\n",
        "## Summary\n",
        *_summary(matrix),
        "\n## Not seen, and not placed\n",
        *_survivors(matrix),
        "\n## Every fault\n",
        _LEGEND,
        *_table(matrix),
    ]
    if matrix.mutants:
        parts += ["\n## Wrong comparators\n", *_mutants(matrix)]
    if matrix.limits:
        parts += ["\n## Detection limits\n", *_limits(matrix)]
    return "\n".join(parts).rstrip() + "\n"


def _summary(matrix: KillMatrix) -> Iterator[str]:
    heads = ("precision", "shown", "faults", "equivalent", "owning suite", "some suite", "by that observable itself")
    yield f"| {' | '.join(heads)} | layer and site |"
    yield f"|{'---|' * (len(heads) + 1)}"
    for precision in matrix.precisions():
        for observable in _OBSERVABLES:
            tally = matrix.tally(observable, precision)
            if tally.rows:
                yield f"| {precision} | {_NAMES[observable]} | {_cells(tally, observable)} |"


def _cells(tally: Tally, observable: str) -> str:
    located = _of(tally.located, tally.layered) if observable == "taps" else ""
    shares = [_of(number, tally.judged) for number in (tally.owner, tally.some, tally.alone)]
    return " | ".join([str(tally.rows), str(tally.equivalent), *shares, located])


def _survivors(matrix: KillMatrix) -> Iterator[str]:
    for precision in matrix.precisions():
        for observable in _OBSERVABLES:
            names = matrix.survivors(observable, precision)
            if names:
                yield f"- {precision}, {_NAMES[observable]}: {', '.join(names)}"
        judged = [row for row in matrix.of("taps", precision) if matrix.counts(row)]
        misplaced = [row["fault"] for row in judged if row["located"] is False]
        if misplaced:
            yield f"- {precision}: another layer or site is named first, or none: {', '.join(misplaced)}"
    for name, reason in _reasons(matrix):
        yield f"- {name}: {reason}"
    for precision in matrix.precisions():
        rows = {row["fault"] for row in matrix.of("taps", precision)}
        if absent := [name for name in catalogue() if name not in rows]:
            yield f"- {precision}: not measured: {', '.join(absent)}"


def _table(matrix: KillMatrix) -> Iterator[str]:
    columns = [(precision, observable) for precision in matrix.precisions() for observable in _OBSERVABLES]
    heads = [f"{precision} {observable}" for precision, observable in columns]
    yield f"| fault | what was done | suite | {' | '.join(heads)} | placed | s |"
    yield f"|{'---|' * (len(heads) + 5)}"
    cells = {(row["fault"], row["precision"], row["observable"]): row for row in matrix.rows}
    for fault in catalogue().values():
        mine = [row for row in matrix.rows if row["fault"] == fault.id]
        if not mine:
            continue
        shown = [_mark(cells.get((fault.id, *column)), cells.get((fault.id, column[0], "taps"))) for column in columns]
        best = cells.get((fault.id, "bf16", "taps")) or cells.get((fault.id, "fp32", "taps"))
        seconds = sum(row["seconds"] for row in mine)
        first = f"| {fault.id} | {fault.title} | {fault.suite} |"
        yield f"{first} {' | '.join(shown)} | {_placed(fault, best)} | {seconds:.1f} |"


def _mark(row: Row | None, first: Row | None) -> str:
    if row is None:
        return "=" if first is not None and not KillMatrix.counts(first) else ""
    if not KillMatrix.counts(row):
        return "="
    return "**O**" if row["owner"] else "*o*" if row["killed"] else "-"


def _placed(fault: Fault, row: Row | None) -> str:
    if row is None or not KillMatrix.counts(row):
        return ""
    right = row["located"] if fault.white_box else row.get("said")
    if right is None:
        sites = [case["divergence"]["site"] for case in row["red"] if case["divergence"]]
        return f"`{sites[0]}`" if sites else ""
    return "right" if right else "not"


def _mutants(matrix: KillMatrix) -> Iterator[str]:
    yield "Each is one change of the comparing code; a check of `pytest_adapt/selftest/comparators.py` must fail.\n"
    yield "| comparator | what is changed | seen by |"
    yield "|---|---|---|"
    for row in matrix.mutants:
        yield f"| {row['name']} | {row['what']} | {row['by'] if row['killed'] else '**nobody**'} |"


def _limits(matrix: KillMatrix) -> Iterator[str]:
    yield "One value times 1 + d, d in steps from 1e-5 to 1e-1: the smallest d that the correctness suite sees, beside"
    yield "the smallest that changes a bit of any answer (what is smaller is no change) and the smallest that changes"
    yield "a token of ten greedy outputs of 48 tokens: one that no healthy engine may write, and any (near-ties too).\n"
    heads = ("value", "precision", "a bit", "taps", "logits", "scores", "top-20", "text", "a wrong token", "any token")
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in matrix.limits:
        seen = [_d(row["detected"].get(name)) for name in _OBSERVABLES]
        cells = (row["value"], row["precision"], _d(row["changes"]), *seen, _d(row["token"]), _d(row["any_token"]))
        yield f"| {' | '.join(cells)} |"


def _d(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _reasons(matrix: KillMatrix) -> Iterator[tuple[str, str]]:
    """Why a change counts as equivalent though answers differ."""
    for precision in matrix.precisions():
        for row in matrix.of("taps", precision):
            if row["differs"] and row.get("healthy"):
                yield f"{row['fault']}[{precision}]", f"no fault in {precision}: {row['healthy']}"


def _of(number: int, total: int) -> str:
    return f"{number}/{total} {100 * number / total:.0f}%" if total else "-"


def _shortened(names: Iterable[str], most: int = 14) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
