"""Sample gates of one item: likelihood, divergence, most probable tokens and tasks, over many short prompts.

Each is the mean of differences between the target and the reference on the same tokens, with a prompt as the unit of
evidence (`statistics.gate_mean`). Its margin is the noise floor: what the emulation of the target's precision shows in
the target's place. None is set by hand.

=====================  ==========================================================  ====================================
gate                   effect                                                      margin
=====================  ==========================================================  ====================================
sample.nll             negative log-likelihood of the prompt's own tokens,         1.3 times the rms that the
                       target minus reference, at certified positions; two-sided   emulation's errors give one prompt
sample.kl              logarithm of a prompt's divergence from the reference over  logarithm of 1.69, as for budgets
                       the emulation's (`statistics.coarse_divergence`)
sample.token_match     share of most probable tokens that differ without a         the emulation's own share, at the
                       certificate, minus the emulation's, at every position       upper end of what it may be
sample.task            share of wrong answers, minus the reference's               the same
=====================  ==========================================================  ====================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.target.protocol import Response
from pytest_adapt.verdict.budget import MAX_FACTOR, MEAN_FACTOR, RMS_FACTOR, ulp
from pytest_adapt.verdict.discrete import near_tie, row_error
from pytest_adapt.verdict.matches import margin_below
from pytest_adapt.verdict.result import Measurement
from pytest_adapt.verdict.sampling import LOOKS, Draws
from pytest_adapt.verdict.statistics import (
    ALPHA,
    RISK,
    Gate,
    Outcome,
    cluster_mean,
    coarse_divergence,
    gate_mean,
    student_quantile,
)
from pytest_adapt.verdict.views import follow, view

__all__ = ["Evidence", "most_likely_rate"]


@dataclass
class _Pool:
    """Differences of one gate and observable by prompt, and the noise floor on the same observations."""

    differences: dict[str, np.ndarray] = field(default_factory=dict)
    noise: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, prompt: str, differences: np.ndarray, noise: np.ndarray) -> None:
        if len(differences):
            self.differences[prompt] = np.asarray(differences, np.float64)
            self.noise[prompt] = np.asarray(noise, np.float64)

    @property
    def floor(self) -> np.ndarray:
        return np.concatenate(list(self.noise.values()))


@dataclass
class Evidence:
    """Everything that one item has sampled, over all its looks, and over all attempts where something reruns it."""

    attempts: int = 0
    """Attempts before the present one."""
    draws: dict[str, Draws] = field(default_factory=dict)
    _pools: dict[tuple[str, str], _Pool] = field(default_factory=dict)

    def sample(self, prompt: str, response: Response, record: Record, precision: str, oracle: Any) -> set[str]:
        """Take in one prompt; the observables that it showed. Raises views.Problem and RecordError.

        ``oracle`` runs freely in the target's precision where a routing flip is possible: its own flips are the noise
        floor. Without one only certified positions count.
        """
        emulation = record.emulation(precision)
        rows = np.flatnonzero(record.positions >= response.first_row)
        certain = rows[emulation.certified[rows]]
        used: set[str] = set()
        if response.scores is not None:
            self._likelihood(prompt, response, record, certain, precision)
            used.add("score")
        chosen: dict[int, int] = {}
        name = "logits" if response.logits is not None else "topk" if response.topk is not None else "text"
        if name != "text":
            self._divergence(prompt, response, name, record, certain, precision)
            chosen = dict(zip(rows.tolist(), view(response, name, record, rows).best.tolist(), strict=True))
            used.add(name)
        elif response.tokens:
            at = {int(position): row for row, position in enumerate(record.positions)}
            places = range(response.prompt_tokens - 1, len(record.tokens))
            chosen = {at[place]: token for place, token in zip(places, response.tokens, strict=False) if place in at}
            used.add("text")
        if chosen:
            self._matches(prompt, name, record, chosen, precision, oracle)
        return used

    def answered(self, prompt: str, wrong: Sequence[bool], floor: Sequence[bool], observable: str) -> None:
        """A task of several questions: which answers of the target, and of the reference, are wrong."""
        mine, other = np.asarray(wrong, np.float64), np.asarray(floor, np.float64)
        self._pool("sample.task", observable).add(prompt, mine - other, other)

    def measurements(self) -> list[Measurement]:
        """The gates as they stand."""
        found = [
            _measured(metric, observable, pool) for (metric, observable), pool in self._pools.items() if pool.noise
        ]
        return [*found, *(one for drawn in self.draws.values() for one in drawn.measurements())]

    def _pool(self, metric: str, observable: str) -> _Pool:
        return self._pools.setdefault((metric, observable), _Pool())

    def _likelihood(self, prompt: str, response: Response, record: Record, certain: np.ndarray, precision: str) -> None:
        known = certain[np.isfinite(record.next_logprob[certain])]
        if not len(known):
            return
        expected = record.next_logprob[known]
        rounding = ulp(expected, "fp32") / math.sqrt(12.0)  # uniform over one ulp of the answer
        errors = np.maximum(record.emulation(precision).follow[known], rounding)
        self._pool("sample.nll", "score").add(prompt, expected - follow(response, record, known), errors)

    def _divergence(
        self, prompt: str, response: Response, name: str, record: Record, certain: np.ndarray, precision: str
    ) -> None:
        if not len(certain):
            return
        reference, emulation = record.topk_logprobs[certain], record.emulation(precision)
        found = coarse_divergence(reference, view(response, name, record, certain).listed - reference)
        p = np.exp(reference)
        outside = np.maximum(1.0 - p.sum(axis=1), 0.0)
        # The emulation's record lacks the mass outside the list: errors of its rms, independent from token to token,
        # shift that mass's logarithm by so much in square (none of those tokens is likelier than the last listed one).
        joined = outside * np.sum(p**2, axis=1) + (1.0 - outside) ** 2 * p[:, -1] * (outside > 0)
        healthy = emulation.kl[certain] + emulation.rms[certain] ** 2 / 2 * joined
        rounding = np.mean(ulp(reference, "fp32") ** 2, axis=1) / 12.0
        ratio = math.log(float(np.mean(found + rounding)) / float(np.mean(healthy + rounding)))
        self._pool("sample.kl", name).add(prompt, np.array([ratio]), np.array([float(np.mean(healthy))]))

    def _matches(
        self, prompt: str, name: str, record: Record, chosen: Mapping[int, int], precision: str, oracle: Any
    ) -> None:
        emulation = record.emulation(precision)
        if oracle is None:
            chosen = {row: token for row, token in chosen.items() if emulation.certified[row]}
        if not chosen:
            return
        rows = np.array(list(chosen), np.int64)
        bound = row_error(emulation.largest)
        floor = np.zeros(len(rows))
        if not emulation.certified[rows].all():
            best = oracle.choices(record.tokens.tolist(), precision)[record.positions[rows]]
            floor = _wrong(record, rows, best, bound)
        mine = _wrong(record, rows, np.array(list(chosen.values()), np.int64), bound)
        self._pool("sample.token_match", name).add(prompt, mine - floor, floor)


def _wrong(record: Record, rows: np.ndarray, tokens: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """1.0 where a token is neither the reference's first choice nor a near-tie with it."""
    found = np.zeros(len(rows))
    for place, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        same = token == int(record.topk_ids[row, 0])
        found[place] = float(not same and not near_tie(margin_below(record, row, token), bound[row]))
    return found


def _measured(metric: str, observable: str, pool: _Pool) -> Measurement:
    level = ALPHA / LOOKS
    if metric == "sample.nll":
        # One prompt of the usual length: errors of its positions are independent, as budgets take them to be.
        per_prompt = len(pool.floor) / len(pool.noise)
        margin = RMS_FACTOR * math.sqrt(float(np.mean(pool.floor**2)) / per_prompt)
        gate = gate_mean(pool.differences, margin, alpha=level)
        shown = f"mean of {gate.sample.observations} tokens, nats; the noise of one prompt is {margin / RMS_FACTOR:.3g}"
    elif metric == "sample.kl":
        margin = math.log(MEAN_FACTOR)
        gate = gate_mean(pool.differences, margin, sides=1, alpha=level)
        shown = f"{math.exp(gate.effect):.3g} times the emulation's, which is {float(np.mean(pool.floor)):.3g} nats; "
        shown += "the mass outside the list counts as one token, so this is a lower bound"
    else:
        margin = (MAX_FACTOR - 1.0) * most_likely_rate(pool.noise)
        gate = gate_mean(pool.differences, margin, sides=1, alpha=level, resolution=1.0)
        what = "tokens differ" if metric == "sample.token_match" else "answers are wrong"
        wrong = sum(float(np.sum(pool.differences[name] + floor)) for name, floor in pool.noise.items())
        shown = (
            f"{wrong:.0f} of {gate.sample.observations} {what}, {float(pool.floor.sum()):.0f} of the reference's own"
        )
    return _of_gate(metric, observable, gate, shown, _worst(pool, gate))


def _of_gate(metric: str, observable: str, gate: Gate, shown: str, prompt: str) -> Measurement:
    value = gate.effect if metric != "sample.nll" else abs(gate.effect)
    return Measurement(
        metric,
        value,
        gate.margin,
        gate.outcome is Outcome.PASS,
        observable,
        prompt if gate.outcome is Outcome.FAIL else "",
        compared=gate.sample.observations,
        detail=f"{shown}; {gate.detail}",
        settled=gate.outcome is not Outcome.INCONCLUSIVE,
    )


def _worst(pool: _Pool, gate: Gate) -> str:
    """The prompt that speaks most for the effect."""
    sign = math.copysign(1.0, gate.effect)
    return max(pool.differences, key=lambda name: sign * float(np.mean(pool.differences[name])))


def most_likely_rate(noise: Mapping[str, np.ndarray]) -> float:
    """Upper limit, at a risk of `RISK`, of the rate behind observations of 0 and 1 in clusters.

    The larger one of Garwood's exact limit for a Poisson count (3 events where none was seen), and of the clusters'
    spread.
    """
    sample = cluster_mean(noise)
    count = sample.mean * sample.observations
    spread = sample.mean
    if sample.clusters > 1:
        spread += student_quantile(1 - RISK, sample.dof) * sample.error
    return max(_poisson_limit(round(count)) / sample.observations, spread)


def _poisson_limit(count: int) -> float:
    """The rate at which ``count`` events or fewer come with probability `RISK`."""

    def at_most(rate: float) -> float:
        return sum(math.exp(i * math.log(rate) - rate - math.lgamma(i + 1)) for i in range(count + 1))

    low, high = 1e-9, 2.0 * count + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(middle) > RISK else (low, middle)
    return high
