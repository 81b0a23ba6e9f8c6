"""What a budget can and cannot see: how often a healthy control is red, and how often a planted error is.

A budget is refused that a healthy control cannot meet, or that an error of several times the control's would pass.
Two kinds of cells are measured: the sites of a model on exact inputs (`site_budgets`), and what golden records hold for
a pooled comparison (`RecordCell`). No target runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.oracle import Rounding
from pytest_adapt.sites import CHOICES, UNRECORDED, layer_of
from pytest_adapt.verdict.budget import Comparison, Rows, ulp
from pytest_adapt.verdict.localise import SiteView, error_scale, farthest, widening
from pytest_adapt.verdict.pooling import quadratic_rows, rows_of

__all__ = ["ALARMS", "MOST", "SEEN", "SEEN_ANYWHERE", "RecordCell", "SiteBudget", "site_budgets", "weaknesses"]

SEEN, SEEN_ANYWHERE = 4.0, 16.0
"""Multiples of the emulation's error that must be red: everywhere at once or in one element of most rows; in one
element of whichever row, one that few others err like included."""
MOST = 0.75
ALARMS = 0.01
"""Share of healthy draws of one cell that may be red before its budget is called unmeetable. Draws resample whole rows,
which is harsher than any target: it moves the error of a volatile position to a quiet one."""
_SAMPLED_ROWS = 9


@dataclass(frozen=True)
class SiteBudget:
    """One site on exact inputs."""

    name: str
    form: str
    own: np.ndarray
    """float64 [rows, n]: the definition's value."""
    emulated: np.ndarray
    """The same under the emulation of this operation alone."""
    widen: float
    terms: np.ndarray | None

    @cached_property
    def scale(self) -> np.ndarray:
        """float64 [rows, n]: what errors are relative to."""
        return error_scale(self.own, self.terms)

    def yardstick(self) -> tuple[np.ndarray, float, float]:
        """The emulation's rms in each row [rows], over all, and its largest error, in units of ``scale`` (as errors are
        judged); rms and largest are at least those of rounding the output once."""
        error, unit = (self.emulated - self.own) / self.scale, ulp(self.own, self.form) / self.scale
        rms = max(float(np.sqrt(np.mean(error**2))), float(np.sqrt(np.mean(unit**2) / 12)))
        return np.sqrt(np.mean(error**2, axis=1)), rms, max(float(np.abs(error).max()), float(unit.max()))

    def red(self, error: np.ndarray) -> set[str]:
        """Statistics that fail for an error [rows, n] in units of ``scale``."""
        value = self.own + error * self.scale
        view = SiteView("p", self.name, value, self.own, self.emulated, self.form, None, len(self.own), self.terms)
        return {measurement.metric for measurement, found in view.judge(self.widen) if found is not None}

    def spike(self, row: int, size: float) -> np.ndarray:
        """An error [rows, n] of ``size`` in one element of one row."""
        error = np.zeros(self.own.shape)
        width = self.own.shape[-1]
        error[row, row % width] = size
        return error

    def noise(self, draw: np.random.Generator) -> np.ndarray:
        """A healthy control's error [rows, n]: as large as the yardstick, spread over everything."""
        _, rms, _ = self.yardstick()
        noise = draw.normal(size=self.own.shape)
        return np.asarray(noise * (rms / np.sqrt(np.mean(noise**2))))


def site_budgets(oracle: Any, tokens: Sequence[int], precision: str, rounds: str = "eager") -> list[SiteBudget]:
    """Budgets of every numeric site of a model for one prompt, on exact inputs. ``rounds`` is `Info.rounds`."""
    rounding, architecture = Rounding.of(precision), oracle.spec.architecture
    exact = oracle.run(tokens, record=("*",)).sites
    forced = {name: value for name, value in exact.items() if layer_of(name)[1] not in UNRECORDED}
    emulated = [trace.own for trace in oracle.emulations(tokens, rounding, forced)]
    terms = oracle.run(tokens, forced=forced, sized=True).terms
    found = []
    for name, value in forced.items():
        if layer_of(name)[1] in CHOICES:
            continue
        form, width = rounding.format_of(name, architecture), value.shape[-1]
        own = np.asarray(value, np.float64).reshape(-1, width)
        other = farthest(own, [np.asarray(one[name]).reshape(-1, width) for one in emulated])
        sums = terms[name].reshape(own.shape) if name in terms else None
        found.append(SiteBudget(name, form, own, other, widening(name, precision, rounds), sums))
    return found


def weaknesses(site: SiteBudget, draw: np.random.Generator) -> list[str]:
    """Why a site's budget is refused, one line each; empty for a sound one."""
    of_row, _, largest = site.yardstick()
    noise = site.noise(draw)
    found = []
    if red := site.red(np.clip(noise, -largest, largest)):
        found.append(f"{site.name}: a healthy control cannot meet it ({', '.join(sorted(red))})")
    if "site.rms" not in site.red(SEEN * noise):
        found.append(f"{site.name}: {SEEN:g} times the control's error, everywhere, passes")
    order = np.argsort(of_row)  # rows from the smallest to the largest error of the emulation, both included
    rows = [int(order[place]) for place in np.linspace(0, len(order) - 1, _SAMPLED_ROWS).astype(int)]
    for size, share in ((SEEN, MOST), (SEEN_ANYWHERE, 1.0)):
        seen = float(np.mean(["site.max" in site.red(site.spike(row, size * largest)) for row in rows]))
        if seen < share:
            found.append(f"{site.name}: one element at {size:g} times the largest error is red in {seen:.0%} of rows")
    return found


@dataclass(frozen=True)
class RecordCell:
    """What the prompts of one item hold for comparisons of log-probabilities at one precision.

    Against a record everything is pooled; two answers of one target (``agree``) are compared prompt by prompt, with
    yardsticks that are sqrt(2) larger. Rows are certified positions.
    """

    parts: tuple[tuple[Rows, Rows], ...]
    """For each prompt: rows of the log-probabilities, and of the divergence, with nothing but their yardsticks."""

    @classmethod
    def of(cls, records: Iterable[Record], precision: str) -> RecordCell:
        """The cell of some records (or of beginnings of them); those without a certified row hold nothing."""
        found = []
        for record in records:
            emulation = record.emulation(precision)
            part = np.flatnonzero(emulation.certified)
            if not len(part):
                continue
            values, nothing = record.topk_logprobs[part], np.zeros((len(part), record.topk_logprobs.shape[1]))
            floor = ulp(values + record.lse[part][:, None], precision)
            name = record.key.prompt
            numbers = rows_of(name, record, part, nothing, emulation.rms[part], emulation.largest[part], floor, values)
            found.append((numbers, quadratic_rows(name, record, part, nothing[:, 0], emulation.kl[part])))
        return cls(tuple(found))

    @property
    def rows(self) -> int:
        """Certified positions in all."""
        return sum(len(numbers.positions) for numbers, _ in self.parts)

    def red(self, times: float, draw: np.random.Generator, *, agree: bool = False) -> bool:
        """Whether anything fails when the target errs ``times`` as much as a healthy control.

        The control's error in a row is the emulation's of another row of the same prompt.
        """
        widen = float(np.sqrt(2.0)) if agree else 1.0
        groups = [[part] for part in self.parts] if agree else [list(self.parts)]
        return any(_red(group, times * widen, widen, draw) for group in groups)

    def share(self, times: float, draws: int, *, agree: bool = False, seed: int = 7) -> float:
        """Share of draws in which something is red."""
        draw = np.random.default_rng(seed)
        return float(np.mean([self.red(times, draw, agree=agree) for _ in range(draws)]))

    def weaknesses(self, draws: int, *, agree: bool = False) -> list[str]:
        """Why the budget of this cell is refused, one line each; empty for a sound one."""
        found = []
        alarms, seen = (self.share(times, draws, agree=agree) for times in (1.0, SEEN))
        if alarms > ALARMS:
            found.append(f"a healthy control is red in {alarms:.1%} of {draws} draws")
        if seen < 1.0:
            found.append(f"{SEEN:g} times the control's error passes in {1 - seen:.1%} of {draws} draws")
        return found


def _red(parts: Sequence[tuple[Rows, Rows]], size: float, widen: float, draw: np.random.Generator) -> bool:
    numbers, quadratic = Comparison(widen), Comparison(widen)
    for rows, divergence in parts:
        other = draw.integers(0, len(rows.positions), len(rows.positions))
        square, largest = size**2 * rows.yard_square[other], size * rows.yard_largest[other]
        numbers.add(replace(rows, square=square, largest=largest))
        quadratic.add(replace(divergence, square=size**2 * divergence.yard_square[other]))
    if not numbers.rows:
        return False
    pairs = (numbers.rms(), numbers.largest()[:2], quadratic.mean())
    return any(value > budget for value, budget in pairs)
