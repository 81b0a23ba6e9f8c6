"""Budgets of the cells that profiles run, held against a healthy control and a planted error. No target runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pytest_adapt.golden.lint import served_lengths
from pytest_adapt.golden.record import Record, RecordError
from pytest_adapt.golden.store import Store
from pytest_adapt.matrix import PROFILES, Model, Profile, Take, contexts_of
from pytest_adapt.models import ModelEntry, catalogue, materialise
from pytest_adapt.verdict.power import SEEN, RecordCell, SiteBudget, site_budgets

__all__ = ["AGREEING", "Cell", "profile_cells", "profile_sites", "rates"]

AGREEING = 96
"""Longest prompts that the suite consistency compares with themselves."""
_TOKENS = 40


@dataclass(frozen=True)
class Cell:
    """One row of the matrix whose comparisons are pooled: the prompts of a model that fit a context."""

    model: str
    precision: str
    context: int
    budget: RecordCell

    def __str__(self) -> str:
        return f"{self.model} {self.precision} up to {self.context} tokens ({self.budget.rows} certified positions)"


def profile_cells(store: Store, name: str, longest: int = 0) -> Iterator[Cell]:
    """The cells of a profile (smoke, day0 or full) for which a store has records; others are judged live.

    With ``longest``, what a test holds that takes the prompts of at most so many tokens, whatever the context.
    """
    profile = PROFILES[name]
    served = served_lengths()
    records: dict[str, list[Record]] = {}
    for record_id in sorted(store.entries):
        try:
            record = Record.load(store.path(record_id))
        except RecordError:
            continue  # `golden.lint.verify` says so
        records.setdefault(record.key.model, []).append(record)
    for entry, take in _taken(profile):
        contexts = contexts_of(Model(entry.name, entry, None, entry.contexts, entry.precisions), take)
        bands = [(0, longest)] if longest else list(zip((0, *contexts), contexts, strict=False))
        for floor, context in bands:
            fitting = list(_fitting(records.get(entry.name, []), served, floor, context))[: take.prompts or None]
            for precision in take.precisions if fitting else ():
                if all(precision in record.precisions for record in fitting):
                    yield Cell(entry.name, precision, context, RecordCell.of(fitting, precision))


def profile_sites(name: str, root: Path) -> Iterator[tuple[str, SiteBudget]]:
    """(model and precision, site) of the odd models that a profile names, on 40 random tokens; the checkpoints are
    written below ``root``."""
    from pytest_adapt.oracle import Oracle

    take = PROFILES[name].classes["odd"]
    for model in take.names:
        oracle = Oracle(materialise(model, root))
        tokens = tuple(int(token) for token in np.random.default_rng(0).integers(0, oracle.spec.vocab, _TOKENS))
        for precision in take.precisions:
            for site in site_budgets(oracle, tokens, precision):
                yield f"{model} {precision}", site


def rates(store: Store, root: Path, draws: int) -> list[str]:
    """Markdown: for each kind of comparison, how often it is red for a healthy control, and for 1.5, 2 and 4 times its
    error; over the cells of the day0 profile, and the sites of the smoke profile."""
    rows: dict[str, Mapping[float, float]] = {}
    times = (1.0, 1.5, 2.0, SEEN)
    for label, agree in (("pooled, against the record", False), ("prompt by prompt, two answers", True)):
        cells = [cell.budget for cell in profile_cells(store, "day0", AGREEING if agree else 0)]
        rows[f"{label} ({len(cells)} cells x {draws} draws)"] = {
            one: float(np.mean([cell.share(one, draws, agree=agree) for cell in cells])) for one in times
        }
    draw = np.random.default_rng(7)
    sites = [site for _, site in profile_sites("smoke", root)]
    noise = [(site, site.noise(draw), site.yardstick()[2]) for site in sites]
    rows[f"site by site, operations ({len(sites)} sites)"] = {
        one: float(np.mean([bool(site.red(one * np.clip(error, -most, most))) for site, error, most in noise]))
        for one in times
    }
    lines = ["| comparison | healthy | 1.5 x | 2 x | 4 x |", "|---|---|---|---|---|"]
    lines += [f"| {label} | {' | '.join(f'{found[one]:.1%}' for one in times)} |" for label, found in rows.items()]
    return lines


def _taken(profile: Profile) -> Iterator[tuple[ModelEntry, Take]]:
    for entry in catalogue().values():
        take = profile.classes.get(entry.shape_class)
        if take is not None and entry.kind != "needle" and (not take.names or entry.name in take.names):
            yield entry, take


def _fitting(
    records: list[Record], served: Mapping[str, tuple[int, ...]], floor: int, context: int
) -> Iterator[Record]:
    """Records, or beginnings of them, of the prompts of more than ``floor`` and at most ``context`` tokens; the
    shortest first."""
    prompts = [(length, record.key.prompt, record) for record in records for length in served.get(record.key.id, ())]
    for length, _, record in sorted(prompts, key=lambda one: one[:2]):
        if floor < length <= context:
            yield record.prefix(length)
