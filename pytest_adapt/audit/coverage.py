"""``python -m pytest_adapt coverage``: requirement -> tests that carry it -> faults that prove them -> last status.

Reads marks from the source, faults from the registry, kills from the kill matrix and outcomes from the last report;
runs nothing. Exit code 0: every requirement asked for has a test, a fault that is killed, and a last run that is
green; 1: something is missing, and the table says what; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_adapt.audit.marks import Claim, MarkError, claims, named_tests, requirement_titles, sources
from pytest_adapt.documents import DocumentError, named, one_line, read, truth
from pytest_adapt.faults.matrix import KillMatrix, load
from pytest_adapt.report.reading import OUTCOMES, read_report

__all__ = ["Outcomes", "Row", "cover", "main", "read_kills", "read_outcomes"]

_REPORT = Path(".adapt/report/report.json")
_CACHE = Path(".pytest_cache/v/cache/lastfailed")
_MATRIX = Path(__file__).resolve().parent.parent / "faults" / "kill_matrix.json"
# Worst first: one red case of a test makes the test red.
_ORDER = ("fail", "pass", "skip")
_OUTCOMES = {
    **dict.fromkeys(("pass", "same", "improvement", "waived", "xfail"), "pass"),
    "unsupported": "skip",
}


@dataclass(frozen=True)
class Row:
    """One requirement. ``faults`` maps the id of each fault that belongs to it to killed, survived or not run;
    ``status`` is fail, pass, skip or not run; ``missing`` is empty where nothing is."""

    number: int
    title: str
    tests: tuple[str, ...]
    faults: Mapping[str, str]
    status: str
    missing: tuple[str, ...]


@dataclass
class Outcomes:
    """Last outcome of tests by name (without parameters), from reports read in turn; ``notes`` say which."""

    by_test: dict[str, str]
    notes: list[str]

    def add(self, test: str, outcome: str) -> None:
        """Keep the worst of a test's cases."""
        before = self.by_test.get(test, "skip")
        self.by_test[test] = min(before, outcome, key=_ORDER.index)


def cover(
    every: Iterable[Claim],
    titles: Mapping[int, str],
    faults: Mapping[str, int],
    kills: Mapping[str, str] | None,
    outcomes: Mapping[str, str],
) -> list[Row]:
    """One row for each known requirement.

    ``faults`` maps a fault to its requirement, ``kills`` a fault to killed or survived (None: there is no kill matrix),
    ``outcomes`` a test's name to fail, pass or skip.
    """
    tests = named_tests(every)
    rows = []
    for number, title in titles.items():
        carriers = tuple(tests.get(number, ()))
        proving = {
            name: (kills or {}).get(name, "not run") for name, requirement in faults.items() if requirement == number
        }
        status = min((outcomes[test] for test in carriers if test in outcomes), key=_ORDER.index, default="not run")
        rows.append(Row(number, title, carriers, proving, status, _missing(carriers, proving, status, kills)))
    return rows


def _missing(
    tests: Sequence[str], faults: Mapping[str, str], status: str, kills: Mapping[str, str] | None
) -> tuple[str, ...]:
    found = []
    if not tests:
        found.append("no test")
    if not faults:
        found.append("no fault")
    elif kills is not None:
        found += [f"fault {name} {state}" for name, state in faults.items() if state != "killed"]
    if tests and status != "pass":
        found.append({"fail": "last run is red", "skip": "last run was skipped"}.get(status, "not in the last run"))
    return tuple(found)


def read_kills(path: Path = _MATRIX) -> dict[str, str] | None:
    """Fault id -> killed (every row that differs from the original was caught by some suite) or survived.

    None where there is no kill matrix. Raises MatrixError for a file that is not one.
    """
    if not path.exists():
        return None
    rows = load(path).rows
    found: dict[str, str] = {}
    for row in rows:
        # Taps are the strongest observable: what a weaker one cannot see does not undo a kill.
        if KillMatrix.counts(row) and row["observable"] == "taps":
            killed = row["killed"] and found.get(row["fault"]) != "survived"
            found[row["fault"]] = "killed" if killed else "survived"
    for row in rows:
        if KillMatrix.counts(row) and row["fault"] not in found:
            found[row["fault"]] = "killed" if row["killed"] else "survived"
    return found


def read_outcomes(every: Sequence[Claim], report: Path, junit: Iterable[Path], cache: Path) -> Outcomes:
    """What the last runs came to, for the tests in ``every``.

    ``report`` is report.json (shipped suites), ``junit`` what --junitxml wrote, ``cache`` the list of pytest's own last
    failures; a report or a list that is absent is named in the notes. Raises DocumentError for a file that cannot be
    read.
    """
    found = Outcomes({}, [])
    if report.exists():
        for case in read_report(report, OUTCOMES)["cases"]:
            outcome = _OUTCOMES.get(case["status"])
            red = "fail" if case.get("required", True) or case["status"] in ("fail", "error") else "skip"
            found.add(case["case"].partition("[")[0], outcome or red)
        found.notes.append(f"suites: {report}")
    else:
        found.notes.append(f"suites: no {report}; run pytest --adapt-target=..., or name another with --report")
    files = list(junit)
    names = {_junit_name(claim.test): claim.test for claim in every}
    for path in files:
        for test, outcome in _junit_outcomes(path, names):
            found.add(test, outcome)
    found.notes.append(f"tests: {', '.join(map(str, files)) or 'no JUnit file; run pytest tests --junitxml=FILE'}")
    if not files and cache.exists():
        known = {claim.test for claim in every}
        for nodeid in read(cache, named(truth)):
            if (test := nodeid.partition("[")[0]) in known:
                found.add(test, "fail")
        found.notes.append(f"failures: {cache}")
    return found


def _junit_name(test: str) -> tuple[str, str]:
    """(classname, name) that pytest writes for a test."""
    file, _, rest = test.partition("::")
    *classes, name = rest.split("::")
    return ".".join([file.removesuffix(".py").replace("/", "."), *classes]), name


def _junit_outcomes(path: Path, names: Mapping[tuple[str, str], str]) -> Iterable[tuple[str, str]]:
    try:
        cases = list(xml.parse(path).iter("testcase"))
    except (xml.ParseError, OSError, ValueError, LookupError) as error:  # the last two: of encodings
        why = getattr(error, "strerror", None) or error
        raise DocumentError(f"{path}: no JUnit file ({one_line(why, 200)}); write one with --junitxml") from None
    for case in cases:
        key = (case.get("classname", ""), case.get("name", "").partition("[")[0])
        if key in names:
            kinds = {child.tag for child in case}
            yield names[key], "fail" if kinds & {"failure", "error"} else "skip" if "skipped" in kinds else "pass"


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    options = _parser().parse_args(list(arguments))
    titles = requirement_titles()
    if unknown := [number for number in options.numbers if number not in titles]:
        print(f"requirement {unknown[0]} is unknown; they are 1 to {max(titles)}", file=sys.stderr)
        return 2
    from pytest_adapt.faults.registry import catalogue

    try:
        every = claims(sources())
        kills = read_kills(options.kill_matrix)
        for flag, path in (("--report", options.report), ("--cache", options.cache)):
            if path is not None and not path.exists():
                raise DocumentError(f"{flag} {path}: there is no such file; name one that is there, or leave it out")
        outcomes = read_outcomes(every, options.report or _REPORT, options.junit, options.cache or _CACHE)
    except (MarkError, DocumentError) as problem:
        print(problem, file=sys.stderr)
        return 2
    faults = {fault.id: fault.requirement for fault in catalogue().values()}
    rows = cover(every, titles, faults, kills, outcomes.by_test)
    wanted = [row for row in rows if not options.numbers or row.number in options.numbers]
    notes = [*outcomes.notes, f"kills: {options.kill_matrix if kills is not None else 'no kill matrix'}"]
    if options.json:
        print(json.dumps({"requirements": [asdict(row) for row in wanted], "sources": notes}, indent=1))
    else:
        print("\n".join([*_table(wanted, long=bool(options.numbers)), "", *notes]))
    return 1 if any(row.missing for row in wanted) else 0


def _table(rows: Sequence[Row], *, long: bool) -> list[str]:
    """One line a requirement; with ``long`` also its tests and faults by name."""
    width = max(len(row.title) for row in rows)
    lines = [f"{'':>4} {'requirement':{width}}  tests  faults  last     missing"]
    for row in rows:
        killed = sum(state == "killed" for state in row.faults.values())
        faults = f"{killed}/{len(row.faults)}" if row.faults else "-"
        missing = ", ".join(row.missing[:3]) + (f" and {len(row.missing) - 3} more" if len(row.missing) > 3 else "")
        line = (
            f"{row.number:4d} {row.title:{width}}  {len(row.tests) or '-':>5}  {faults:>6}  {row.status:7}  {missing}"
        )
        lines.append(line.rstrip())
        if long:
            lines += [f"       {test}" for test in row.tests]
            lines += [f"       fault {name}: {state}" for name, state in row.faults.items()]
    have = sum(bool(row.tests) for row in rows)
    proven = sum(bool(row.tests) and bool(row.faults) for row in rows)
    whole = sum(not row.missing for row in rows)
    number = f"{len(rows)} requirement{'s' * (len(rows) != 1)}"
    total = f"{number}: {have} have tests, {proven} of these also a fault, {whole} miss nothing"
    return [*lines, "", total]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt coverage", description=__doc__)
    parser.add_argument(
        "numbers", nargs="*", type=int, metavar="NUMBER", help="these only, with tests and faults by name"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help=f"report.json (default: {_REPORT})")
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", action="append", default=[], help="what --junitxml wrote; may be repeated"
    )
    parser.add_argument("--cache", type=Path, metavar="FILE", help="pytest's last failures, used without --junit")
    parser.add_argument("--kill-matrix", type=Path, metavar="FILE", default=_MATRIX, help=argparse.SUPPRESS)
    return parser
