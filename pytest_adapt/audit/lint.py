"""``python -m pytest_adapt lint``: what is wrong with the harness's own data, found without a run.

Requirement numbers of tests and faults, waivers, golden records, and budgets that nobody could meet or that everybody
would. Exit code 0: nothing found (notes may be listed); 1: findings, one line each; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_adapt.arguments import existing
from pytest_adapt.audit.marks import Claim, MarkError, claims, named_tests, requirement_titles, sources

__all__ = ["Finding", "lint_budgets", "lint_goldens", "lint_requirements", "lint_waivers", "main"]

_PARTS = ("requirements", "waivers", "goldens", "budgets")
_DRAWS = 12


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or (``note``) worth knowing."""

    part: str
    message: str
    note: bool = False

    def __str__(self) -> str:
        return f"{'note: ' if self.note else ''}{self.part}: {self.message}"


def lint_requirements(every: Sequence[Claim], faults: dict[str, int], titles: Iterable[int]) -> list[Finding]:
    """Numbers that are none, suites that claim nothing, and requirements that are claimed but proven by no fault."""
    known = set(titles)
    allowed = f"they are {min(known)} to {max(known)}"
    found = [
        Finding("requirements", f"{claim.test} claims requirement {number}; {allowed}")
        for claim in every
        for number in claim.numbers
        if number not in known
    ]
    found += [
        Finding("requirements", f"{claim.test} carries no requirement; mark it with the numbers that it proves")
        for claim in every
        if claim.suite and not claim.numbers
    ]
    found += [
        Finding("requirements", f"fault {name} belongs to requirement {number}; {allowed}")
        for name, number in faults.items()
        if number not in known
    ]
    unproven = sorted(named_tests(every).keys() & known - set(faults.values()))
    if unproven:
        said = f"{len(unproven)} requirements have tests and no fault that proves them"
        found.append(Finding("requirements", f"{said}: {', '.join(map(str, unproven))}", note=True))
    return found


def lint_waivers(path: Path, report: Path, every: Sequence[Claim], today: datetime.date) -> list[Finding]:
    """Malformed and expired entries, those that the last run did not need, and patterns that match nothing."""
    from pytest_adapt.verdict.waiver import parse_waivers

    entries, problems = parse_waivers(path)
    found = [Finding("waivers", problem) for problem in problems]
    last = _last_run(report)
    ids = [str(case.get("case", "")) for case in last.get("cases", [])]
    states = {(one.get("cases"), one.get("number")): one.get("state") for one in last.get("waivers", [])}
    for waiver in entries:
        name = f"{path}: waiver {waiver.number} ({waiver.cases}; owner {waiver.owner}, {waiver.link})"
        if waiver.expires < today:
            found.append(Finding("waivers", f"{name} expired on {waiver.expires.isoformat()}; renew or remove it"))
        elif states.get((waiver.cases, waiver.number)) == "unused":
            found.append(Finding("waivers", f"{name} was not needed by the run in {report}; remove it"))
        if any(waiver.covers(case) for case in ids) or _names_a_test(waiver.cases, every):
            continue
        if ids:
            found.append(
                Finding("waivers", f"{name} matches no case of {report} and no shipped test; mend the pattern")
            )
        else:
            said = "matches no shipped test; whether it matches one of yours is known after a run"
            found.append(Finding("waivers", f"{name} {said}", note=True))
    return found


def lint_goldens(directory: Path | None) -> list[Finding]:
    """What `goldens verify` finds without a checkpoint (everything but changed weights and changed random prompts), and
    what is wrong with counters on record."""
    from pytest_adapt.golden.lint import catalogue_keys, served_lengths, verify
    from pytest_adapt.golden.store import Store, StoreError, shipped_store
    from pytest_adapt.perf.ledger_cli import findings as counters_findings
    from pytest_adapt.perf.ledger_cli import ledgers

    store = shipped_store() if directory is None else Store(directory)
    try:
        there = store.entries.keys() | store.files().keys()
        # A store of one's own need not hold everything; what it holds must be about something.
        keys = {name: key for name, key in catalogue_keys(store).items() if directory is None or name in there}
        findings = verify(store, keys, served=served_lengths())
    except StoreError as problem:
        return [Finding("goldens", str(problem))]
    said = [*(f"{one.kind}: {one.message}" for one in findings), *counters_findings(store.directory)]
    if not said and not there and not ledgers(store.directory):
        return [Finding("goldens", f"nothing was read: {store.directory} holds no record and no counters", note=True)]
    return [Finding("goldens", one) for one in said]


def lint_budgets(directory: Path | None, root: Path) -> list[Finding]:
    """Budgets that a healthy control cannot meet, or that an error of 4 times the control's would pass.

    Cells of the full profile that earlier profiles judge together with larger ones are only noted.
    """
    import numpy as np

    from pytest_adapt.audit.budgets import AGREEING, profile_cells, profile_sites
    from pytest_adapt.golden.store import Store, StoreError, shipped_store
    from pytest_adapt.verdict.power import weaknesses

    store = shipped_store() if directory is None else Store(directory)
    found: list[Finding] = []
    seen = set()
    try:
        for profile in ("smoke", "day0", "full"):
            for cell in profile_cells(store, profile):
                place = (cell.model, cell.precision, cell.context, cell.budget.rows)
                if place in seen:
                    continue
                seen.add(place)
                weak = cell.budget.weaknesses(_DRAWS)
                found += [Finding("budgets", f"{profile}: {cell}: {why}", note=profile == "full") for why in weak]
        for cell in profile_cells(store, "day0", AGREEING):
            weak = cell.budget.weaknesses(_DRAWS, agree=True)
            found += [Finding("budgets", f"consistency, day0: {cell}: {why}") for why in weak]
    except StoreError as problem:
        return [Finding("budgets", str(problem))]
    draw = np.random.default_rng(7)
    for name, site in profile_sites("smoke", root):
        found += [Finding("budgets", f"{name}: {why}") for why in weaknesses(site, draw)]
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    if options.waivers is None and "waivers" in (options.only or ()):
        parser.error("argument --only: waivers needs --waivers FILE, which adapt_waivers in your ini file names")
    if options.rates:
        from pytest_adapt.audit.budgets import rates
        from pytest_adapt.golden.store import Store, shipped_store

        store = shipped_store() if options.goldens is None else Store(options.goldens)
        print("\n".join(rates(store, options.models_root, options.rates)))
        return 0
    wanted = options.only or [part for part in _PARTS if part != "waivers" or options.waivers is not None]
    found: list[Finding] = []
    try:
        every = claims(sources())
    except MarkError as problem:
        every, found = [], [Finding("requirements", str(problem))]
    if "requirements" in wanted:
        from pytest_adapt.faults.registry import catalogue

        faults = {fault.id: fault.requirement for fault in catalogue().values()}
        found += lint_requirements(every, faults, requirement_titles())
    if "waivers" in wanted:
        found += lint_waivers(options.waivers, options.report, every, datetime.date.today())
    if "goldens" in wanted:
        found += lint_goldens(options.goldens)
    if "budgets" in wanted:
        found += lint_budgets(options.goldens, options.models_root)
    for one in found:
        print(one)
    errors = sum(not one.note for one in found)
    print(f"{', '.join(wanted)}: {errors} findings, {len(found) - errors} notes")
    return 1 if errors else 0


def _last_run(report: Path) -> dict[str, Any]:
    """The last report; empty where there is none that can be read (`coverage` says so)."""
    try:
        raw = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _names_a_test(pattern: str, every: Sequence[Claim]) -> bool:
    """Whether the part of a pattern before its brackets matches a known test."""
    head = pattern.partition("[")[0]
    return any(fnmatch.fnmatchcase(claim.test, head) for claim in every)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytest_adapt lint", description=__doc__)
    parser.add_argument("--waivers", type=Path, metavar="FILE", help="your list of known failures")
    parser.add_argument("--goldens", type=existing, metavar="DIR", help="your own records (default: those that ship)")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        default=Path(".adapt/report/report.json"),
        help="the last run, for waivers (default: %(default)s)",
    )
    parser.add_argument("--models-root", type=Path, metavar="DIR", default=Path(".adapt/models"))
    parser.add_argument("--only", nargs="+", choices=_PARTS, metavar="PART", help=f"some of {', '.join(_PARTS)}")
    parser.add_argument(
        "--rates",
        type=int,
        metavar="DRAWS",
        help="print, as Markdown, how often healthy controls and planted errors are red, and stop",
    )
    return parser
