"""Gates over samples: means of paired differences, grouped by prompt, and two samples permuted within each prompt.

A gate ends in one of three ways. FAIL: the effect is beyond its margin, at a false alarm rate of `ALPHA`. PASS: the
effect is shown to lie within the margin, at a risk of `RISK`. INCONCLUSIVE: this sample shows neither; the gate then
says how many prompts would. Whatever the outcome it says which effect it would have seen with probability `POWER`.

Margins come from the emulation of the target's precision on the same inputs: the noise floor, the reference against
itself. Observations of one prompt share errors, so a prompt is one unit of evidence, however long it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np

__all__ = [
    "ALPHA",
    "POWER",
    "RISK",
    "Clustered",
    "Gate",
    "Outcome",
    "TwoSample",
    "cluster_mean",
    "coarse_divergence",
    "gate_mean",
    "permutation_test",
    "sign_flip",
    "student_quantile",
    "student_tail",
]

ALPHA = 1e-4
"""False alarms of one gate: a run has hundreds of them."""
POWER = 0.8
"""Probability with which the effect that a gate states is seen."""
RISK = 0.05
"""Probability of passing a target whose effect is just the margin."""
EXACT = 16
"""With at most so many clusters all 2^G signs are gone through."""
_MOST_CLUSTERS = 1 << 24
_PERMUTATIONS = 2000
"""At least."""
_EXCEEDED = 20
"""A permutation test ends when so many permutations were as extreme: the p-value is no small one (Besag and Clifford,
Biometrika 78, 1991)."""
_BATCH = 1000
_EXPECTED = 5.0
"""Least expected count of a category; rarer tokens are counted together (Cochran, Biometrics 10, 1954)."""
_CATEGORIES = 32
"""Most categories of a prompt."""


class Outcome(StrEnum):
    """What a gate came to."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Clustered:
    """A mean over all observations, with an error that respects clusters."""

    mean: float
    error: float
    """Standard error; at least what one observation that moves by one step of its scale would do."""
    dof: float
    """Degrees of freedom of the error (Satterthwaite); clusters - 1 where all have one size."""
    clusters: int
    observations: int


@dataclass(frozen=True)
class Gate:
    """One gate's verdict."""

    outcome: Outcome
    effect: float
    margin: float
    p: float
    """Of an effect that lies at the margin being as large as the one seen."""
    alpha: float
    detectable: float
    """Smallest true effect that this sample would have failed with probability `POWER`."""
    sample: Clustered
    sides: int
    method: str
    """sign-flip or t."""

    @property
    def needed(self) -> int:
        """Clusters that would settle it if the effect is what it seems; 0 where it is settled, or where none would."""
        if self.outcome is not Outcome.INCONCLUSIVE:
            return 0
        if self.sample.clusters < 2:
            return 2
        effect = self.effect if self.sides == 1 else abs(self.effect)
        return _needed(effect, self.margin, self.sample, self.alpha / self.sides)

    @property
    def detail(self) -> str:
        """One line: evidence, what would have been seen, what would settle it."""
        seen = f"p {self.p:.2g} over {self.sample.clusters} prompts ({self.method})"
        power = f"sees {self.detectable:.3g} with power {POWER:g} at alpha {self.alpha:g}"
        if self.outcome is not Outcome.INCONCLUSIVE:
            return f"{seen}; {power}"
        needed = self.needed
        settle = f"about {needed} prompts would settle it" if needed else "no number of prompts would settle it"
        return f"undecided, {seen}; {power}; {settle}"


def cluster_mean(clusters: Mapping[str, Sequence[float] | np.ndarray], resolution: float = 0.0) -> Clustered:
    """Mean of all observations and its cluster-robust standard error.

    The bias-reduced linearisation of Bell and McCaffrey (Survey Methodology 28, 2002) for a regression on a constant:
    a cluster of share w of the observations has its residual sum divided by sqrt(1 - w), and the degrees of freedom
    match the first two moments of the variance under independence. Clusters of one size give the paired t test on
    their means. ``resolution`` is one step of the scale of an observation (1 for right and wrong): of a sample without
    any spread, a mean that is off by less than one step of one observation cannot be told.
    Raises ValueError without observations.
    """
    parts = [np.asarray(values, np.float64) for values in clusters.values()]
    sizes = np.array([part.size for part in parts if part.size], np.float64)
    if not len(sizes):
        raise ValueError("no observations: nothing was compared")
    sums = np.array([part.sum() for part in parts if part.size])
    total = float(sizes.sum())
    mean = float(sums.sum() / total)
    least = resolution / total
    share = sizes / total
    if len(sizes) == 1:
        return Clustered(mean, max(math.inf, least), 0.0, 1, int(total))
    residual = sums - sizes * mean
    error = math.sqrt(float(np.sum(residual**2 / (1.0 - share)))) / total
    # Inner products of the vectors whose squares make the variance; in units of 1 / total.
    scaled = share / np.sqrt(1.0 - share)
    moments = -np.outer(scaled, scaled)
    np.fill_diagonal(moments, share)
    dof = float(np.trace(moments) ** 2 / np.sum(moments**2))
    return Clustered(mean, max(error, least), dof, len(sizes), int(total))


def gate_mean(
    clusters: Mapping[str, Sequence[float] | np.ndarray],
    margin: float,
    *,
    sides: int = 2,
    alpha: float = ALPHA,
    resolution: float = 0.0,
) -> Gate:
    """Hold the mean of paired differences against ``margin``.

    ``clusters`` maps prompts to differences (target minus reference). With ``sides`` 1 only positive effects are bad.
    With up to `EXACT` clusters, as far as 2^G signs can reach ``alpha``, the test is exact under symmetry (Fisher 1935;
    for right and wrong answers it is McNemar's exact test); else it is a t test. Equivalence is shown by one-sided t
    tests (Schuirmann 1987). Raises ValueError for a negative margin, or without observations.
    """
    if margin < 0 or sides not in (1, 2):
        raise ValueError(f"margin {margin} and sides {sides}: a margin is at least 0, sides are 1 or 2")
    sample = cluster_mean(clusters, resolution)
    effect = sample.mean if sides == 1 else abs(sample.mean)
    level = alpha / sides
    if sample.clusters < 2:
        return Gate(Outcome.INCONCLUSIVE, sample.mean, margin, 1.0, alpha, math.inf, sample, sides, "one prompt")
    exact = sample.clusters <= EXACT and 2.0**-sample.clusters <= level
    if exact:
        towards = math.copysign(1.0, sample.mean) if sides == 2 else 1.0
        p = sign_flip(
            [towards * float(np.sum(part)) - margin * np.size(part) for part in clusters.values() if np.size(part)]
        )
    else:
        p = student_tail((effect - margin) / sample.error, sample.dof) if sample.error else float(effect <= margin)
    p = min(1.0, p * sides)
    accepted = effect + student_quantile(1 - RISK, sample.dof) * sample.error
    outcome = Outcome.INCONCLUSIVE
    if p <= alpha and effect > margin:
        outcome = Outcome.FAIL
    elif accepted <= margin:
        outcome = Outcome.PASS
    reach = student_quantile(1 - level, sample.dof) + student_quantile(POWER, sample.dof)
    return Gate(
        outcome=outcome,
        effect=sample.mean,
        margin=margin,
        p=p,
        alpha=alpha,
        detectable=margin + reach * sample.error,
        sample=sample,
        sides=sides,
        method="exact sign-flip" if exact else "t",
    )


def sign_flip(sums: Sequence[float] | np.ndarray) -> float:
    """One-sided p-value of the sum of ``sums`` [G] when every sign is as likely as its opposite: all 2^G of them."""
    values = np.asarray(sums, np.float64)
    found = np.zeros(1)
    for value in values:
        found = np.concatenate([found + value, found - value])
    # Equal in exact arithmetic is equal: sums of the same numbers in another order differ by rounding.
    slack = 4 * np.finfo(np.float64).eps * float(np.abs(values).sum())
    return float(np.mean(found >= values.sum() - slack))


def _needed(effect: float, margin: float, sample: Clustered, level: float) -> int:
    """Clusters like these with which the same effect would pass or fail; 0 where none would."""
    gap = abs(effect - margin)
    spread = sample.error * math.sqrt(sample.clusters)

    def settles(count: int) -> bool:
        quantile = student_quantile(1 - (level if effect > margin else RISK), sample.dof * count / sample.clusters)
        return quantile * spread / math.sqrt(count) <= gap

    if not gap or not math.isfinite(spread):
        return 0
    low, high = sample.clusters, sample.clusters
    while not settles(high):
        low, high = high, 2 * high
        if high > _MOST_CLUSTERS:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if settles(middle) else (middle, high)
    return high


def student_tail(t: float, dof: float) -> float:
    """P(T >= t) of Student's distribution with ``dof`` > 0 degrees of freedom (DLMF 8.17.ii and 8.17.22)."""
    if not math.isfinite(t):
        return 0.0 if t > 0 else 1.0
    half = 0.5 * _beta_ratio(dof / (dof + t * t), dof / 2, 0.5)
    return half if t >= 0 else 1.0 - half


def student_quantile(p: float, dof: float) -> float:
    """The t with P(T <= t) = ``p``; inf where there is no degree of freedom."""
    if dof <= 0:
        return math.inf
    if p < 0.5:
        return -student_quantile(1 - p, dof)
    if dof > 1e7:
        return NormalDist().inv_cdf(p)
    if p == 0.5:
        return 0.0
    # Newton's method on log P(T >= t) over log t, which is nearly straight: the tail is a power for few degrees.
    wanted, t = math.log(1 - p), NormalDist().inv_cdf(p)
    front = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    for _ in range(100):
        tail = student_tail(t, dof)
        density = math.exp(front - (dof + 1) / 2 * math.log1p(t * t / dof))
        step = (math.log(tail) - wanted) * tail / (density * t)
        t *= math.exp(max(-1.0, min(1.0, step)))
        if abs(step) < 1e-13:
            break
    return t


def _beta_ratio(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by Lentz's method on its continued fraction."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta_ratio(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1), tiny)
    found = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + term * d
            c = 1.0 + term / c
            d, c = 1.0 / (d if abs(d) > tiny else tiny), c if abs(c) > tiny else tiny
            found *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * found


def coarse_divergence(reference: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """KL(p || q) [R] in nats over the tokens that both list, all other tokens taken as one.

    ``reference`` [R, k] is log p of listed tokens, ``difference`` [R, k] is log q - log p, nan where one side does not
    list a token. Joining tokens never raises a divergence (Cover and Thomas, 2006, section 2.9), so this is a lower
    bound of the one over the whole vocabulary; what it leaves out is how the mass outside is spread. Every term has
    the form p (exp(d) - 1 - d), which sums to the same and does not cancel.
    """
    known = ~np.isnan(difference)
    p = np.where(known, np.exp(reference), 0.0)
    d = np.where(known, difference, 0.0)
    outside = np.maximum(1.0 - p.sum(axis=1), 0.0)
    gained = -np.sum(p * np.expm1(d), axis=1)
    # A share that rounding of the listed ones could have made says nothing.
    counts = outside > 1e-6
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.maximum(np.where(counts, gained / np.where(counts, outside, 1.0), 0.0), np.expm1(-50.0))
    rest = np.where(counts, outside * (share - np.log1p(share)), 0.0)
    small = np.abs(d) < 1e-4
    terms = np.where(small, d * d * (0.5 + d / 6.0), np.expm1(d) - d)
    found: np.ndarray = np.sum(p * terms, axis=1) + rest
    return found


@dataclass(frozen=True)
class TwoSample:
    """Outcome of `permutation_test`."""

    p: float
    surprise: float
    """Mean of the target's values minus the reference's, over all prompts."""
    surprise_score: float
    """The same in standard deviations under permutation."""
    frequency_score: float
    """Sum over prompts of chi-squared of the frequencies, standardised."""
    permutations: int


def permutation_test(
    target: Mapping[str, np.ndarray],
    reference: Mapping[str, np.ndarray],
    values: Mapping[str, np.ndarray],
    *,
    alpha: float = ALPHA,
    seed: int = 0,
    surprise_margin: float = 0.0,
    frequency_margin: float = 0.0,
) -> TwoSample:
    """Whether two samples of tokens come from one distribution, prompt by prompt.

    ``target`` and ``reference`` map prompts to drawn token ids (int [n] and [m]), ``values`` to a number [V] for every
    token: minus its log-probability. Two statistics are taken, of which the larger one counts (Westfall and Young
    1993): the difference of mean values, which is the score test against a wrong temperature and sees mass that moved
    to or from the tail, and the frequencies of tokens, which see anything else. Labels are permuted within each
    prompt, so no prompt's own distribution plays a part, and the p-value is exact for any number of draws, up to the
    Monte Carlo error of max(2000, 1 / alpha) permutations.

    The margins are what a healthy target may show: they are taken off the statistics of the sample, not off those of
    its permutations. ``surprise_margin`` is a difference of means, ``frequency_margin`` an increase of the sum of
    chi-squared. Raises ValueError where a prompt lacks either sample.
    """
    tables = []
    for name, drawn in target.items():
        if not len(drawn) or not len(reference.get(name, ())):
            raise ValueError(
                f"prompt {name}: {len(drawn)} draws against {len(reference.get(name, ()))}; both need some"
            )
        tables.append(_Table.of(np.asarray(drawn), np.asarray(reference[name]), values[name]))
    number = sum(table.drawn for table in tables)
    spread = math.sqrt(sum(table.variance for table in tables))
    freedom = sum(len(table.pool) - 1 for table in tables)

    def scores(counts: Sequence[np.ndarray], surprise: float, frequency: float) -> tuple[np.ndarray, np.ndarray]:
        moved = np.sum([table.excess(one) for table, one in zip(tables, counts, strict=True)], axis=0)
        distance = np.sum([table.distance(one) for table, one in zip(tables, counts, strict=True)], axis=0)
        first = np.maximum(np.abs(moved) - surprise, 0.0) / spread if spread else np.zeros(len(moved))
        second = (distance - frequency - freedom) / math.sqrt(2.0 * freedom) if freedom else np.zeros(len(moved))
        return first, second

    margin = surprise_margin * sum(table.drawn * table.held for table in tables)
    first, second = (
        float(one[0]) for one in scores([table.counts[None] for table in tables], margin, frequency_margin)
    )
    observed = max(first, second)
    rng = np.random.Generator(np.random.Philox(key=seed))
    reached = done = 0
    while done < max(_PERMUTATIONS, math.ceil(1 / alpha)) and reached < _EXCEEDED:
        shuffled = [table.permuted(rng, _BATCH) for table in tables]
        reached += int(np.sum(np.maximum(*scores(shuffled, 0.0, 0.0)) >= observed))
        done += _BATCH
    moved = sum(float(table.excess(table.counts[None])[0]) / table.held for table in tables)
    return TwoSample((1 + reached) / (1 + done), moved / number, first, second, done)


@dataclass(frozen=True)
class _Table:
    """Counts of one prompt by category: tokens of the pooled sample in the order of their values, neighbours taken
    together where they are rare. Which tokens those are depends on the pool alone, never on who drew what."""

    counts: np.ndarray
    """Of the target, int64 [K]."""
    pool: np.ndarray
    """Of both, int64 [K]."""
    values: np.ndarray
    """Means over the pool, float64 [K]."""

    @classmethod
    def of(cls, drawn: np.ndarray, reference: np.ndarray, values: np.ndarray) -> _Table:
        tokens, pool = np.unique(np.concatenate([drawn, reference]), return_counts=True)
        order = np.argsort(values[tokens], kind="stable")
        tokens, pool = tokens[order], pool[order]
        found = np.zeros(len(values), np.int64)
        np.add.at(found, drawn, 1)
        # A category is full when the target is to have so many of it; the last one takes what is left over.
        least = max(_EXPECTED / len(drawn), 1 / _CATEGORIES) * float(pool.sum())
        begins, total = [0], 0
        for place, count in enumerate(pool.tolist()):
            if total >= least:
                begins.append(place)
                total = 0
            total += count
        if len(begins) > 1 and total < least:
            begins.pop()
        together = np.add.reduceat(pool, begins)
        means = np.add.reduceat(pool * values[tokens], begins) / together
        return cls(np.add.reduceat(found[tokens], begins), together, means)

    @property
    def drawn(self) -> int:
        return int(self.counts.sum())

    @property
    def rest(self) -> int:
        return int(self.pool.sum()) - self.drawn

    @property
    def held(self) -> float:
        """The target's mean minus the pool's is this part of its difference from the reference's."""
        return self.rest / (self.drawn + self.rest)

    @property
    def variance(self) -> float:
        """Of the sum of the values of a random part of the pool (drawn without replacement)."""
        mean = float(np.average(self.values, weights=self.pool))
        square = float(np.average((self.values - mean) ** 2, weights=self.pool))
        return square * self.drawn * self.rest / max(1, self.drawn + self.rest - 1)

    def excess(self, counts: np.ndarray) -> np.ndarray:
        """[B]: sum of the values of ``counts`` [B, K] minus what the pool expects."""
        mean = float(np.average(self.values, weights=self.pool))
        found: np.ndarray = counts @ (self.values - mean)
        return found

    def distance(self, counts: np.ndarray) -> np.ndarray:
        """[B]: chi-squared of ``counts`` [B, K]; its mean over permutations is K - 1."""
        total = self.drawn + self.rest
        expected = self.pool * (self.drawn / total)
        found: np.ndarray = np.sum((counts - expected) ** 2 / expected, axis=1) * ((total - 1) / self.rest)
        return found

    def permuted(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """[count, K]: the target's counts under random labels."""
        return np.asarray(rng.multivariate_hypergeometric(self.pool, self.drawn, size=count, method="marginals"))
