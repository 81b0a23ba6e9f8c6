"""What the budgets of sites can and cannot see: errors like the yardstick's pass, ones a few times as large never.

The widening of `verdict.localise` (hidden roundings, few rows) and the allowance for rows in which the emulation errs
more cost sensitivity where they apply; this is the bound on what they cost, at every site of every family.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from pytest_adapt.oracle import Rounding
from pytest_adapt.sites import CHOICES, UNRECORDED, layer_of
from pytest_adapt.verdict.budget import ulp
from pytest_adapt.verdict.localise import _SiteView, _widening, error_scale

FAMILIES = ("qwen3-moe-odd", "mixtral-odd", "deepseek-v3-odd-pos", "llama-odd")
TOKENS = 40
SEEN, SEEN_ANYWHERE = 4.0, 16.0
"""Multiples of the emulation's error that must be red: everywhere at once or in one element of most rows; in one
element of whichever row, one that few others err like included."""
MOST = 0.75


@dataclass(frozen=True)
class Shown:
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
        view = _SiteView(
            "p", self.name, self.own + error * self.scale, self.own, self.emulated, self.form, None, TOKENS, self.terms
        )
        return {measurement.metric for measurement, found in view.judge(self.widen) if found is not None}

    def spike(self, row: int, size: float) -> np.ndarray:
        error = np.zeros(self.own.shape)
        error[row, row % error.shape[1]] = size
        return error


def shown_sites(bench: Any, family: str, precision: str, rounds: str) -> list[Shown]:
    model = bench(family)
    tokens = model.tokens(TOKENS)
    rounding, architecture = Rounding.of(precision), model.oracle.spec.architecture
    exact = model.oracle.run(tokens, record=("*",)).sites
    forced = {name: value for name, value in exact.items() if layer_of(name)[1] not in UNRECORDED}
    emulated = model.oracle.run(tokens, forced=forced, rounding=rounding).own
    terms = model.oracle.run(tokens, forced=forced, sized=True).terms
    found = []
    for name, value in forced.items():
        if layer_of(name)[1] in CHOICES:
            continue
        form, width = rounding.format_of(name, architecture), value.shape[-1]
        own, other = (np.asarray(array, np.float64).reshape(-1, width) for array in (value, emulated[name]))
        sums = terms[name].reshape(own.shape) if name in terms else None
        found.append(Shown(name, form, own, other, _widening(name, precision, rounds), sums))
    return found


def sample(of_row: np.ndarray) -> list[int]:
    """Rows from the smallest to the largest error of the emulation, both included."""
    order = np.argsort(of_row)
    return [int(order[place]) for place in np.linspace(0, len(order) - 1, 9).astype(int)]


@pytest.mark.requirement(114, 116)
@pytest.mark.parametrize("rounds", ["eager", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_like_the_yardsticks_passes_and_one_a_few_times_as_large_does_not(
    bench: Any, family: str, precision: str, rounds: str
) -> None:
    draw = np.random.default_rng(7)
    blind, alarms = [], []
    sites = shown_sites(bench, family, precision, rounds)
    assert len(sites) > 20
    for site in sites:
        of_row, rms, largest = site.yardstick()
        noise = draw.normal(size=site.own.shape)
        noise *= rms / np.sqrt(np.mean(noise**2))
        if site.red(np.clip(noise, -largest, largest)):
            alarms.append(site.name)
        if "site.rms" not in site.red(SEEN * noise):
            blind.append(f"{site.name}: everywhere")
        for size, share in ((SEEN, MOST), (SEEN_ANYWHERE, 1.0)):
            seen = ["site.max" in site.red(site.spike(row, size * largest)) for row in sample(of_row)]
            if np.mean(seen) < share:
                blind.append(f"{site.name}: one element at {size:g} times, {np.mean(seen):.0%} of rows")
    assert not blind, f"not seen: {blind}"
    assert not alarms, f"an error of the yardstick's own size is red at {alarms}"
