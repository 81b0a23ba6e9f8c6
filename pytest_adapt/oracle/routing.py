"""Routing of a mixture layer: scores, selection, the choice of experts, its margin, and replay of another's choice.

Sources: Mixtral (arXiv 2401.04088 §2.1), Qwen3-MoE (arXiv 2505.09388), DeepSeek-V3 (arXiv 2412.19437 §2.1.2).
Selection follows a total order: higher score first, then lower expert id.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .blocks import sigmoid
from .errors import OracleError
from .numerics import Numerics
from .spec import RouterSpec

__all__ = [
    "REPLAYED",
    "Choice",
    "check_ids",
    "choose",
    "combine",
    "judge_replay",
    "kept_groups",
    "score_forms",
    "scores_of",
    "weights_of",
]

_LOG2_E = np.float32(np.log2(np.e))
# One row of a replay that differs from the run's own choice.
REPLAYED = np.dtype([("row", np.int64), ("margin", np.float64), ("illegal", np.bool_)])


@dataclass(frozen=True)
class Choice:
    """ids int64 [T, k] ascending; margin float64 [T]: how far the row is from another choice."""

    ids: np.ndarray
    margin: np.ndarray


def scores_of(n: Numerics, router: RouterSpec, logits: np.ndarray) -> np.ndarray:
    """Scores [T, E] that combine weights come from: softmax over all experts, or a sigmoid of each."""
    if router.scoring == "sigmoid":
        return sigmoid(logits)
    unnormalised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: np.ndarray = unnormalised / n.total(unnormalised)
    return scores


def score_forms(router: RouterSpec, logits: np.ndarray) -> list[np.ndarray]:
    """Scores [T, E] in float32 as engines form them besides `scores_of`: with base-2 exponentials, with a reciprocal
    in place of a division, and with a sum from the other end.

    A row has few scores, each of four roundings (difference, exponential, sum, quotient), so that one form may by luck
    hit all of them.
    """
    x = np.asarray(logits, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if router.scoring == "sigmoid":
            e, two = np.exp(x), np.exp2(-x * _LOG2_E)
            return [np.where(x < 0, e / (1 + e), 1 / (1 + np.exp(-x))), np.reciprocal(1 + two)]
        shifted = x - x.max(axis=-1, keepdims=True)
        e, two = np.exp(shifted), np.exp2(shifted * _LOG2_E)
    return [
        two * np.reciprocal(two.sum(axis=-1, keepdims=True)),
        e * np.reciprocal(np.cumsum(e[..., ::-1], axis=-1)[..., -1:]),
        two / np.cumsum(two, axis=-1)[..., -1:],
    ]


def choose(router: RouterSpec, selection: np.ndarray) -> Choice:
    """The ``chosen`` best experts of each row of selection scores [T, E], from the kept groups only.

    Experts of other groups take no part at all, whatever the sign of the scores. The margin is the k-th best
    eligible score minus the next one; with groups, half the gap between the last kept and the first dropped
    group score counts too (half: a group score is the sum of two scores, so its error is twice as large).
    """
    eligible = np.where(_per_expert(router, kept_groups(router, selection)), selection, -np.inf)
    order = _order(eligible)
    ranked = np.take_along_axis(eligible, order, axis=-1).astype(np.float64)
    k = router.chosen
    following = ranked[:, k] if k < router.experts else np.full(len(selection), -np.inf)
    margin = ranked[:, k - 1] - following
    if router.groups > router.groups_kept:
        groups = -np.sort(-_group_scores(router, selection), axis=-1)
        margin = np.minimum(margin, (groups[:, router.groups_kept - 1] - groups[:, router.groups_kept]) / 2)
    return Choice(np.sort(order[:, :k], axis=-1).astype(np.int64), margin)


def kept_groups(router: RouterSpec, selection: np.ndarray) -> np.ndarray:
    """Which groups of each row stay: bool [T, groups], the ``groups_kept`` best by the sum of their two best scores."""
    kept = np.ones((len(selection), router.groups), np.bool_)
    if router.groups > router.groups_kept:
        dropped = _order(_group_scores(router, selection))[:, router.groups_kept :]
        np.put_along_axis(kept, dropped, np.False_, axis=-1)
    return kept


def weights_of(n: Numerics, router: RouterSpec, scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Combine weights [T, k] in the order of ids: the scores themselves (never the biased ones), made to sum to 1
    where the family does so, times the routed scale."""
    weights = np.take_along_axis(scores, ids, axis=-1)
    if router.renormalise:
        weights = weights / (n.total(weights) + router.renormalise_eps)
    return weights * router.scale


def combine(n: Numerics, moe: str, down: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted sum [T, h] of expert outputs [T, k, h] with weights [T, k], in the order of the experts' ids."""
    weighted = n.inner(f"{moe}.experts.weighted", down * weights[..., None])
    routed = np.zeros((len(down), down.shape[-1]), n.dtype)
    for place in range(weights.shape[1]):
        routed = n.inner(f"{moe}.routed.partial", routed + weighted[:, place])
    return n.site(f"{moe}.routed", routed)


def check_ids(router: RouterSpec, name: str, ids: np.ndarray, tokens: int) -> np.ndarray:
    """Another's expert ids as int64 [T, k], sorted. Raises OracleError unless shape and range fit."""
    ids = np.asarray(ids)
    if ids.shape != (tokens, router.chosen):
        raise OracleError(f"{name}: replayed ids have shape {ids.shape}; expected {(tokens, router.chosen)}")
    if not np.issubdtype(ids.dtype, np.integer) or ids.min(initial=0) < 0 or ids.max(initial=0) >= router.experts:
        raise OracleError(f"{name}: replayed ids of {ids.dtype} leave 0..{router.experts - 1}; pass expert ids")
    return np.sort(ids.astype(np.int64), axis=-1)


def judge_replay(router: RouterSpec, selection: np.ndarray, own: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Certificates of the rows where ``given`` ids [T, k] differ from ``own``: a structured array of `REPLAYED`.

    margin: the gap by which the run's scores speak against the given ids, on the scale of `choose`: errors of the
    scores excuse it only from half the gap on. illegal (margin infinite): no scores excuse it, an expert comes
    twice or the experts lie in more groups than the rule keeps.
    """
    rows = np.flatnonzero((own != given).any(axis=-1))
    found = np.zeros(len(rows), REPLAYED)
    for place, row in enumerate(rows):
        found[place] = (row, *_certificate(router, selection[row].astype(np.float64), given[row]))
    return found


def _certificate(router: RouterSpec, selection: np.ndarray, given: np.ndarray) -> tuple[float, bool]:
    size = router.experts // router.groups
    used = np.unique(given // size)
    spare = router.groups_kept - len(used)
    if len(np.unique(given)) < len(given) or spare < 0:
        return float("inf"), True
    sums = _group_scores(router, selection[None])[0] if router.groups > router.groups_kept else np.zeros(router.groups)
    unused = np.setdiff1d(np.arange(router.groups), used)
    # The other engine kept the used groups and some others, which it does not say: the most favourable ones count.
    return min(_excuse(selection, sums, given, [*used, *others]) for others in combinations(unused, spare)), False


def _excuse(selection: np.ndarray, sums: np.ndarray, given: np.ndarray, kept: list[int]) -> float:
    """Margin by which the scores speak against ``given`` experts out of the ``kept`` groups (0 where they do not)."""
    dropped = np.setdiff1d(np.arange(len(sums)), kept)
    group_gap = (sums[dropped].max() - sums[kept].min()) / 2 if len(dropped) else 0.0
    passed_over = np.isin(np.arange(len(selection)) // (len(selection) // len(sums)), kept)
    passed_over[given] = False
    expert_gap = selection[passed_over].max() - selection[given].min() if passed_over.any() else 0.0
    return float(max(0.0, group_gap, expert_gap))


def _group_scores(router: RouterSpec, selection: np.ndarray) -> np.ndarray:
    grouped = selection.reshape(len(selection), router.groups, router.experts // router.groups)
    best = np.sort(grouped, axis=-1)[..., -2:]
    sums: np.ndarray = best[..., 0] + best[..., 1]
    return sums


def _per_expert(router: RouterSpec, kept: np.ndarray) -> np.ndarray:
    return np.repeat(kept, router.experts // router.groups, axis=-1)


def _order(scores: np.ndarray) -> np.ndarray:
    """Expert ids of each row, best first; a stable sort leaves equal scores in ascending id."""
    return np.argsort(-scores, axis=-1, kind="stable")
