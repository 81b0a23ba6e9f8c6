"""Discrete choices: which positions are certain, and whether a different choice is legal.

A choice (experts of a router, the most probable token) may differ from the reference's only with a certificate:
an error no larger than the one measured on that very row could have produced it. Positions are *certified* when
no choice so far could have flipped, so that what follows can be compared as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pytest_adapt.verdict.budget import MAX_FACTOR, ulp

__all__ = ["CANDIDATES", "Flip", "certified_positions", "judge_choices", "near_tie", "row_error", "shape_problem"]

CANDIDATES = 2.0
"""Both candidates of a flip move, each by at most the error of its score."""


def row_error(errors: np.ndarray) -> np.ndarray:
    """Error bound of each row of scores, from the largest error measured on it.

    ``errors`` is [rows] or [rows, n]. A row whose errors are small by luck says little about another engine's
    luck on the same row: the bound is at least the rms over rows of the largest error.
    """
    largest = np.abs(np.asarray(errors, np.float64))
    if largest.ndim > 1:
        largest = largest.reshape(len(largest), -1).max(axis=1)
    if not len(largest):
        return largest
    bound: np.ndarray = np.maximum(largest, np.sqrt(np.mean(largest**2)))
    return bound


def near_tie(margin: np.ndarray | float, error: np.ndarray | float) -> np.ndarray:
    """Whether a healthy target may choose the other candidate: its errors may be `MAX_FACTOR` times the emulation's."""
    return np.asarray(margin) <= CANDIDATES * MAX_FACTOR * np.asarray(error)


def certified_positions(ratio: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Positions where no flip is possible so far (bool [T]).

    Both inputs are [T], the score error : margin of each token: ``ratio`` the largest over expert layers that some
    later layer follows, ``last`` that of the model's last layer. A flip in an earlier layer reaches every later
    token through attention; one in the last layer only its own row.
    """
    safe = np.asarray(ratio) * CANDIDATES < 1.0
    inner = np.logical_and.accumulate(safe) if len(safe) else safe
    return np.asarray(inner & (np.asarray(last) * CANDIDATES < 1.0))


@dataclass(frozen=True)
class Flip:
    """One row where a target chose other experts than the reference would, given the same scores."""

    row: int
    legal: bool
    chosen: tuple[int, ...]
    expected: tuple[int, ...]
    margin: float
    error: float
    expert: int
    """The expert that should not have been chosen."""

    @property
    def reason(self) -> str:
        verdict = "near-tie" if self.legal else "illegal"
        return f"{verdict}: expert {self.expert} loses by {self.margin:.3g}, error of that row {self.error:.3g}"


def shape_problem(ids: np.ndarray, tokens: int, chosen: int, experts: int) -> tuple[int, int | None, str] | None:
    """What makes chosen ids [T, k] meaningless whatever the scores: (row, expert, reason), or None.

    An expert out of range or chosen twice is never legal. Slots of other sites are in ascending order of ids.
    """
    ids = np.asarray(ids)
    if not np.issubdtype(ids.dtype, np.integer):
        return 0, None, f"numbers of type {ids.dtype}"
    if ids.shape != (tokens, chosen):
        return 0, None, f"shape {ids.shape}, expected {(tokens, chosen)}"
    outside = (ids < 0) | (ids >= experts)
    if outside.any():
        row, slot = (int(i) for i in np.argwhere(outside)[0])
        return row, int(ids[row, slot]), f"expert {int(ids[row, slot])} of {experts}"
    steps = np.diff(ids, axis=1)
    if (steps <= 0).any():
        row, slot = (int(i) for i in np.argwhere(steps <= 0)[0])
        reason = "chosen twice" if steps[row, slot] == 0 else "not in ascending order"
        return row, int(ids[row, slot]), f"expert {int(ids[row, slot])} {reason}: {ids[row].tolist()}"
    return None


def judge_choices(
    chosen: np.ndarray, own: np.ndarray, selection: np.ndarray, error: np.ndarray, certificates: np.ndarray
) -> list[Flip]:
    """Verdict on every row where ``chosen`` [T, k] differs from the reference's ``own`` choice.

    ``selection`` [T, E] are the reference's scores given the target's inputs, ``error`` [T] the error of their
    emulation; ``certificates`` the oracle's (`pytest_adapt.oracle.REPLAYED`: row, margin, illegal). Where a target
    showed the scores themselves the error is 0 and only ties within one float32 ulp are left.
    """
    bounds = np.maximum(error, ulp(np.abs(selection).max(axis=1), "fp32"))
    flips = []
    for row, margin, illegal in certificates.tolist():
        mine, theirs = set(own[row].tolist()), set(chosen[row].tolist())
        intruders = sorted(theirs - mine) or sorted(theirs)
        flips.append(
            Flip(
                row=int(row),
                legal=bool(not illegal and near_tie(margin, bounds[row])),
                chosen=tuple(chosen[row].tolist()),
                expected=tuple(own[row].tolist()),
                margin=float(margin),
                error=float(bounds[row]),
                expert=int(min(intruders, key=lambda expert: float(selection[row, expert]))),
            )
        )
    return flips
