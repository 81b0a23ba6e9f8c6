"""Budgets: how far a healthy target may be from the reference, derived from an emulation on the same inputs.

The yardstick of a comparison is the error that the oracle makes when it rounds as eager code of that precision
does. Two statistics are held against it: the root mean square over everything compared, which thousands of
values make sharp, and the largest single error, which finds local faults. The factors below hold for every model,
site and target; what they let through and what they see is bounded by tests/verdict/test_detection.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist

import numpy as np

__all__ = [
    "MAX_FACTOR",
    "MEAN_FACTOR",
    "POOLED_QUANTILE",
    "RMS_FACTOR",
    "SITE_QUANTILE",
    "Comparison",
    "Rows",
    "spread",
    "ulp",
]

RMS_FACTOR = 1.3
"""Pooled rms may be this many times the emulation's: engines that round as eager code does measure 0.8 to 1.0."""
MAX_FACTOR = 2.0
"""The largest error may be this many times the emulation's largest: two maxima of one distribution differ by less."""
MEAN_FACTOR = RMS_FACTOR**2
"""For means of quantities that are quadratic in the error (divergence, 1 - cosine)."""

# Significand bits (with the hidden one) and smallest normal exponent of each floating-point format.
_FORMAT = {"fp32": (24, -126), "bf16": (8, -126), "fp16": (11, -14), "fp64": (53, -1022)}
POOLED_QUANTILE, SITE_QUANTILE = 3.7, 4.75
"""Normal quantiles of one false alarm in 10,000 (a run makes hundreds of pooled comparisons) and in a million (it
compares tens of thousands of sites)."""

_ALONE = 9
"""Rows that the luck of a row which stands out is judged by, at least."""


def ulp(values: np.ndarray | float, precision: str) -> np.ndarray:
    """Distance between neighbouring numbers of ``precision`` at the magnitude of each value (float64, same shape).

    Values that are not finite have ulp 0. Raises ValueError for an unknown precision.
    """
    if precision not in _FORMAT:
        raise ValueError(f"unknown precision {precision!r}; known are {', '.join(_FORMAT)}")
    bits, smallest = _FORMAT[precision]
    magnitude = np.abs(np.asarray(values, np.float64))
    magnitude = np.where(np.isfinite(magnitude), magnitude, 0.0)
    _, exponent = np.frexp(magnitude)  # magnitude = m 2^e, m in [1/2, 1)
    exponent = np.maximum(np.where(magnitude > 0, exponent - 1, smallest), smallest)
    unit = np.ldexp(1.0, exponent - (bits - 1))
    return np.where(np.isfinite(np.asarray(values, np.float64)), unit, 0.0)


def spread(count: int, quantile: float = POOLED_QUANTILE) -> float:
    """Largest ratio that chance alone gives two rms values of ``count`` independent errors each.

    The logarithm of such a ratio is close to normal with standard deviation sqrt(1 / count) (each log mean square
    has variance 2 / count). For pooled comparisons it falls below the rms factor at about 200 values; few values
    decide less.
    """
    return math.exp(quantile / math.sqrt(count)) if count else math.inf


@dataclass(frozen=True)
class Rows:
    """Errors of one prompt, reduced to rows (one row: one position, or one slot of one position).

    Every array has one entry a row, float64. ``square`` and ``yard_square`` are mean squares over the ``count``
    values of the row; ``largest`` and ``yard_largest`` their largest magnitudes. ``floor`` is one ulp of the
    output's format at the largest magnitude of the row, ``floor_square`` the mean square error of rounding once.
    """

    prompt: str
    positions: np.ndarray
    count: np.ndarray
    square: np.ndarray
    largest: np.ndarray
    yard_square: np.ndarray
    yard_largest: np.ndarray
    floor: np.ndarray
    floor_square: np.ndarray
    prefix: np.ndarray | None = None
    """int64, one number for each sequence of tokens up to and with the row's own; None where all rows differ."""

    @classmethod
    def of_elements(
        cls, prompt: str, positions: np.ndarray, errors: np.ndarray, yard: np.ndarray, floor: np.ndarray
    ) -> Rows:
        """Reduce errors [rows, n] and the emulation's errors of the same values; ``floor`` is their ulp."""
        width = int(np.prod(errors.shape[1:]))
        errors, yard, floor = (np.asarray(a, np.float64).reshape(len(positions), width) for a in (errors, yard, floor))
        return cls(
            prompt=prompt,
            positions=np.asarray(positions),
            count=np.full(len(positions), errors.shape[1], np.int64),
            square=np.mean(errors**2, axis=1),
            largest=np.max(np.abs(errors), axis=1),
            yard_square=np.mean(yard**2, axis=1),
            yard_largest=np.max(np.abs(yard), axis=1),
            floor=np.max(floor, axis=1),
            floor_square=np.mean(floor**2, axis=1) / 12.0,  # uniform over one ulp
        )

    def take(self, keep: np.ndarray) -> Rows:
        """Rows where ``keep`` (bool or indices) says so."""
        arrays = {
            one.name: getattr(self, one.name)[keep] for one in fields(self) if one.name not in ("prompt", "prefix")
        }
        return replace(self, prefix=None if self.prefix is None else self.prefix[keep], **arrays)


@dataclass
class Comparison:
    """One pooled comparison: the rows of all prompts of an item, for one metric and one observable.

    ``widen`` multiplies the yardstick: sqrt(2) where two answers with independent errors are compared.
    The values of one row share errors (of a hidden state, of a norm's root), so a row counts as one independent error.
    Rows of prompts that begin alike share all of theirs: they count once.
    """

    widen: float = 1.0
    quantile: float = POOLED_QUANTILE
    """Of chance alone (`spread`)."""
    rows: list[Rows] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        if len(rows.positions):
            self.rows.append(rows)

    @property
    def compared(self) -> int:
        """Values compared."""
        return int(sum(int(rows.count.sum()) for rows in self.rows))

    @property
    def positions(self) -> int:
        """Rows compared."""
        return sum(len(rows.positions) for rows in self.rows)

    @property
    def independent(self) -> int:
        """Rows that no other one repeats."""
        return int(self._first().sum())

    def _first(self) -> np.ndarray:
        """bool, for all rows: whether none before it has the same prefix."""
        known = [rows.prefix for rows in self.rows if rows.prefix is not None]
        if not known or len(known) < len(self.rows):
            return np.ones(self.positions, bool)
        found = np.zeros(self.positions, bool)
        found[np.unique(np.concatenate(known), return_index=True)[1]] = True
        return found

    def rms(self) -> tuple[float, float]:
        """(rms error, its budget). The budget is never below the rms of rounding once to the output's format."""
        weight = np.maximum(self._all("count"), 1)
        value = _root_mean(self._all("square"), weight)
        rounding = _root_mean(self._all("floor_square"), weight)
        yard = max(_root_mean(self._all("yard_square"), weight) * self.widen, rounding)
        return value, max(RMS_FACTOR, spread(self.independent, self.quantile)) * yard

    def largest(self) -> tuple[float, float, str, int]:
        """(largest error, its budget, prompt, position): the row that uses most of its own budget (`row_budgets`)."""
        best: tuple[float, float, float, str, int] = (-1.0, 0.0, 0.0, "", 0)
        for rows, budget in zip(self.rows, self.row_budgets(), strict=True):
            use = rows.largest / np.maximum(budget, np.finfo(np.float64).tiny)
            row = int(np.argmax(use))
            if use[row] > best[0]:
                found, limit = float(rows.largest[row]), float(budget[row])
                best = float(use[row]), found, limit, rows.prompt, int(rows.positions[row])
        return best[1:]

    def row_budgets(self) -> list[np.ndarray]:
        """Budget of the largest error of every row, for each of `rows`.

        A multiple of the emulation's largest error over all rows, which is luck where rows are few: it counts for no
        less than the median of the largest of so many normal errors of its rms. Where it errs more in a row than
        elsewhere (cancellation, a volatile position), the row's budget grows alike: as many of its own rms as the
        largest error of any row is of that row's, and the fewer rows err like it, the more of that is one draw's luck
        (`spread`). Never below one ulp at the row's own magnitude.
        """
        largest, root = self._all("yard_largest"), np.sqrt(self._all("yard_square"))
        whole = _root_mean(self._all("yard_square"), np.maximum(self._all("count"), 1))
        yard = max(float(largest.max()), whole * _median_largest(self.independent))
        peak = float(np.max(np.divide(largest, root, out=np.zeros_like(root), where=root > 0)))
        ascending = np.sort(root[self._first()])
        found = []
        for rows in self.rows:
            own = np.sqrt(rows.yard_square)
            # A row that stands out alone was no lucky one: the emulation erred there, so its error says something.
            alike = np.maximum(len(ascending) - np.searchsorted(ascending, own / 2), min(len(ascending), _ALONE))
            factor = np.maximum(MAX_FACTOR, np.exp(self.quantile / np.sqrt(alike))) * self.widen
            found.append(np.maximum(factor * np.maximum(yard, peak * own), rows.floor * self.widen))
        return found

    def mean(self) -> tuple[float, float]:
        """(mean of ``square``, its budget) for quantities that are already quadratic in the error."""
        weight = np.maximum(self._all("count"), 1)
        yard = float(np.average(self._all("yard_square"), weights=weight)) * self.widen**2
        floor = float(np.average(self._all("floor_square"), weights=weight))
        value = float(np.average(self._all("square"), weights=weight))
        return value, max(MEAN_FACTOR, spread(self.independent, self.quantile) ** 2) * max(yard, floor)

    def interval(self) -> tuple[float, float] | None:
        """Interval of the ratio rms : emulation's rms, clustered by prompt (jackknife of its logarithm).

        None with fewer than three prompts, or where one repeats rows of another. Twice the standard error either way.
        """
        prompts = sorted({rows.prompt for rows in self.rows})
        if len(prompts) < 3 or self.independent < self.positions:
            return None
        logs = [_log_ratio([rows for rows in self.rows if rows.prompt != left_out]) for left_out in prompts]
        whole = _log_ratio(self.rows)
        if not all(math.isfinite(value) for value in (*logs, whole)):
            return None
        n = len(logs)
        centre = sum(logs) / n
        error = math.sqrt((n - 1) / n * sum((value - centre) ** 2 for value in logs))
        return math.exp(whole - 2 * error), math.exp(whole + 2 * error)

    def worst_row(self) -> tuple[str, int]:
        """(prompt, position) of the row with the largest mean square."""
        rows = max(self.rows, key=lambda one: float(one.square.max()))
        return rows.prompt, int(rows.positions[int(np.argmax(rows.square))])

    def _all(self, name: str) -> np.ndarray:
        return np.concatenate([np.asarray(getattr(rows, name), np.float64) for rows in self.rows])


def _median_largest(count: int) -> float:
    """Median of the largest magnitude of ``count`` independent normal errors, in standard deviations."""
    return NormalDist().inv_cdf((1.0 + 0.5 ** (1.0 / count)) / 2.0)


def _root_mean(squares: np.ndarray, weight: np.ndarray) -> float:
    return math.sqrt(float(np.average(squares, weights=weight)))


def _log_ratio(parts: Sequence[Rows]) -> float:
    def pooled(name: str) -> float:
        values: Iterator[np.ndarray] = (getattr(rows, name) * rows.count for rows in parts)
        return sum(float(value.sum()) for value in values)

    error, yard = pooled("square"), pooled("yard_square")
    return 0.5 * math.log(error / yard) if error > 0 and yard > 0 else math.nan
