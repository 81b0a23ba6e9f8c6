"""From errors of rows to measurements: pooled statistics against their budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.verdict.budget import RMS_FACTOR, Comparison, Rows, spread, ulp
from pytest_adapt.verdict.discrete import CANDIDATES
from pytest_adapt.verdict.result import Measurement
from pytest_adapt.verdict.views import View

__all__ = [
    "cosine_gap",
    "describe",
    "judge_assumption",
    "judge_pooled",
    "quadratic_rows",
    "rows_of",
]


def describe(measurement: Measurement) -> str:
    """One line: metric, value, budget, use, where, why."""
    m = measurement
    where = [part for part in (m.prompt, m.site, f"position {m.position}" if m.position is not None else "") if part]
    shown = f" [{m.observable}]" if m.observable else ""
    use = ""
    if m.budget and math.isfinite(m.use):
        use = f" ({m.use:.0%} of budget)" if m.use < 10 else f" ({m.use:.3g} x budget)"
    line = f"{m.metric}{shown}: {m.value:.4g}, budget {m.budget:.4g}{use}"
    if where:
        line += f" at {', '.join(where)}"
    return f"{line}: {m.detail}" if m.detail else line


def rows_of(
    prompt: str,
    record: Record,
    part: np.ndarray,
    error: np.ndarray,
    yard_rms: np.ndarray,
    yard_largest: np.ndarray,
    floor: np.ndarray,
    logprobs: np.ndarray,
) -> Rows:
    """Rows ``part`` of a record from errors [R, n] with nan where nothing was compared; answers are float32 whatever
    the precision."""
    known = ~np.isnan(error)
    count = known.sum(axis=1)
    keep = count > 0
    square = np.where(known, error, 0.0) ** 2
    rounding = ulp(logprobs, "fp32") ** 2 / 12.0  # uniform over one ulp
    rows = Rows(
        prompt=prompt,
        positions=record.positions[part],
        count=count,
        square=square.sum(axis=1) / np.maximum(count, 1),
        largest=np.where(known, np.abs(error), 0.0).max(axis=1, initial=0.0),
        yard_square=np.asarray(yard_rms, np.float64) ** 2,
        yard_largest=np.asarray(yard_largest, np.float64),
        floor=floor.max(axis=1, initial=0.0),
        floor_square=rounding.mean(axis=1) if rounding.size else np.zeros(len(rounding)),
        prefix=prefixes(record, part),
    )
    return rows.take(keep)


def prefixes(record: Record, part: np.ndarray) -> np.ndarray:
    """int64 [R]: one number for each sequence of tokens that ends at a row (a polynomial modulo 2^64)."""
    powers = np.cumprod(np.full(len(record.tokens), 0x9E3779B97F4A7C15, np.uint64))
    sums = np.cumsum((record.tokens.astype(np.uint64) + np.uint64(1)) * powers)
    found: np.ndarray = sums[record.positions[part]].view(np.int64)
    return found


def quadratic_rows(prompt: str, record: Record, rows: np.ndarray, found: np.ndarray, yard: np.ndarray) -> Rows:
    """Rows of a quantity that is quadratic in the error; its floor is that of rounding an answer to float32."""
    rounding = np.mean(ulp(record.topk_logprobs[rows], "fp32") ** 2, axis=1) / 12.0 if len(rows) else np.zeros(0)
    nothing = np.zeros(len(rows))
    count = np.ones(len(rows), np.int64)
    return Rows(
        prompt, record.positions[rows], count, found, nothing, yard, nothing, nothing, rounding, prefixes(record, rows)
    )


def cosine_gap(shown: View, reference: View) -> np.ndarray:
    """1 - cosine [R] of centred logits, from projections of their difference and their norms.

    |a - b|^2 = (|a| - |b|)^2 + 2 |a| |b| (1 - cos), with |a - b|^2 estimated by the mean square projection.
    """
    assert shown.projections is not None and shown.norm is not None
    assert reference.projections is not None and reference.norm is not None
    distance = np.mean((shown.projections - reference.projections) ** 2, axis=1)
    product = np.maximum(shown.norm * reference.norm, np.finfo(np.float64).tiny)
    return np.asarray((distance - (shown.norm - reference.norm) ** 2) / (2.0 * product))


def judge_pooled(key: tuple[str, str], comparison: Comparison) -> list[Measurement]:
    metric, observable = key
    if not comparison.rows:
        return []
    if metric.endswith(("kl", "cosine")):
        value, budget = comparison.mean()
        prompt, position = comparison.worst_row()
        detail = "mean of 1 - cosine of centred logits" if metric.endswith("cosine") else "mean over rows, nats"
        return [
            Measurement(
                metric, value, budget, value <= budget, observable, prompt, position, "", comparison.positions, detail
            )
        ]
    rms, rms_budget = comparison.rms()
    largest, largest_budget, prompt, position = comparison.largest()
    position, before = _first_over(comparison, prompt, position)
    interval = comparison.interval()
    alike = f", {comparison.independent} of them different" if comparison.independent < comparison.positions else ""
    detail = f"rms over {comparison.positions} rows{alike}, nats"
    if interval is not None:
        detail += f"; {interval[0]:.3g} to {interval[1]:.3g} times the emulation's"
    worst_prompt, worst_position = comparison.worst_row()
    base = Measurement(f"{metric}.rms", rms, rms_budget, rms <= rms_budget, observable, compared=comparison.compared)
    return [
        replace(base, prompt=worst_prompt, position=worst_position, detail=detail),
        replace(
            base,
            metric=f"{metric}.max",
            value=largest,
            budget=largest_budget,
            ok=largest <= largest_budget,
            prompt=prompt,
            position=position,
            detail=f"largest error, nats{before}",
        ),
    ]


def judge_assumption(comparison: Comparison, scores: Sequence[np.ndarray]) -> Measurement:
    """Whether the error that certified positions assume is the target's, as far as its logits tell.

    ``scores`` are the emulation's largest score error : margin so far at each compared position. A mask holds while the
    target's scores err at most 1 / (2 score) times as much; what its logits err, in units of the emulation's, is
    measured. Beyond the budget of that ratio nothing certifies those positions; within it, those that would flip are
    counted.
    """
    value, budget = comparison.rms()
    factor = max(RMS_FACTOR, spread(comparison.independent, comparison.quantile))
    ratio = value * factor / budget if budget else 0.0
    every = np.concatenate(scores)
    holds = int(np.sum(CANDIDATES * every * max(1.0, ratio) < 1.0))
    detail = (
        f"times the emulation's error; {holds} of {len(every)} positions stay certified if scores err like the logits"
    )
    return Measurement("certified.error", ratio, factor, ratio <= factor, "logits", compared=len(every), detail=detail)


def _first_over(comparison: Comparison, prompt: str, position: int) -> tuple[int, str]:
    """First position of the prompt whose largest error is over its budget (or the given one), and what precedes."""
    for rows, budget in zip(comparison.rows, comparison.row_budgets(), strict=True):
        over = np.flatnonzero(rows.largest > budget)
        if rows.prompt == prompt and len(over):
            first = int(over[0])
            agree = f"the {first} rows before this one agree" if first > 1 else "only the row before this one agrees"
            return int(rows.positions[first]), f"; {agree}" if first else "; wrong from the first row on"
    return position, ""
