"""What a response says about the rows of a record, in the record's terms, and how two such views differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.golden.sketch import log_softmax, project
from pytest_adapt.target.protocol import Response

__all__ = ["Problem", "View", "difference", "reference_view", "view"]


class Problem(Exception):
    """A response cannot be compared as numbers: wrong shape, missing rows, NaN. ``position`` is a token index."""

    def __init__(self, metric: str, reason: str, position: int | None = None) -> None:
        super().__init__(reason)
        self.metric = metric
        self.reason = reason
        self.position = position


@dataclass(frozen=True)
class View:
    """One observable of a response at R rows, for the record's k ids of each row.

    ``listed`` float64 [R, k]: log-probability of the record's ids; nan where a top-k answer does not list one, and
    then it is at most ``tail`` [R] (-inf where everything is known). ``beyond`` [R]: the largest log-probability of an
    id that the record does not list (-inf without). ``best`` int64 [R]: the most probable id. ``projections``
    [R, 8] and ``norm`` [R] of the centred logits, where logits were shown.
    """

    observable: str
    listed: np.ndarray
    tail: np.ndarray
    beyond: np.ndarray
    best: np.ndarray
    projections: np.ndarray | None = None
    norm: np.ndarray | None = None


def reference_view(record: Record, rows: np.ndarray) -> View:
    """The record's own answer at ``rows`` (indices into its positions)."""
    listed = record.topk_logprobs[rows]
    whole = record.topk_ids.shape[1] >= record.vocab
    # A record made from another target's top-k lists has no projections.
    sketched = bool(np.isfinite(record.norm[rows]).all())
    return View(
        observable="",
        listed=listed,
        tail=np.full(len(rows), -np.inf),
        beyond=np.full(len(rows), -np.inf) if whole else listed[:, -1],
        best=record.topk_ids[rows, 0].astype(np.int64),
        projections=np.asarray(record.projections[rows], np.float64) if sketched else None,
        norm=np.asarray(record.norm[rows], np.float64) if sketched else None,
    )


def view(response: Response, observable: str, record: Record, rows: np.ndarray) -> View:
    """``logits`` or ``topk`` of a response at ``rows`` of the record. Raises Problem."""
    at = _response_rows(response, observable, record, rows)
    positions = record.positions[rows]
    ids = record.topk_ids[rows].astype(np.int64)
    if observable == "logits":
        assert response.logits is not None
        logits = np.asarray(response.logits)
        if logits.ndim != 2 or logits.shape[1] != record.vocab:
            raise Problem("shape", f"logits of shape {logits.shape}; expected {record.vocab} columns")
        logits = logits[at].astype(np.float64)
        _require_finite(logits, positions, "logits")
        logprobs, _ = log_softmax(logits)
        projections, norm = project(logits)
        never = np.full(len(rows), -np.inf)
        listed, best = np.take_along_axis(logprobs, ids, axis=1), logits.argmax(axis=1).astype(np.int64)
        np.put_along_axis(logprobs, ids, -np.inf, axis=1)
        return View("logits", listed, never, logprobs.max(axis=1), best, projections, norm)
    assert response.topk is not None
    return _topk_view(response, record, rows, at)


def follow(response: Response, record: Record, rows: np.ndarray) -> np.ndarray:
    """float64 [R]: the response's log-probability of the token that follows each row; nan after the last token.

    Raises Problem where it is absent although the record has a following token.
    """
    at = _response_rows(response, "score", record, rows)
    found = np.asarray(response.scores, np.float64)[at]
    needed = np.isfinite(record.next_logprob[rows])
    bad = np.flatnonzero(needed & ~np.isfinite(found))
    if len(bad):
        position = int(record.positions[rows][bad[0]])
        raise Problem("finite", f"score {found[bad[0]]} at {len(bad)} of {int(needed.sum())} rows", position)
    return np.where(needed, found, np.nan)


def difference(one: View, other: View, two_sided: bool) -> np.ndarray:
    """Errors [R, k + 1] of ``one`` against ``other``, nan where nothing can be said.

    An id that a list leaves out is at most the list's last entry, so leaving it out is an error of at least the
    other's value minus that. The last column is the same for the best id that the record does not list; it is
    only known of one side unless both are lists (``two_sided``), where it is left out.
    """
    error = one.listed - other.listed
    absent = np.isnan(one.listed) & ~np.isnan(other.listed)
    error = np.where(absent, -np.maximum(other.listed - one.tail[:, None], 0.0), error)
    error = np.where(
        np.isnan(other.listed) & ~np.isnan(one.listed), np.maximum(one.listed - other.tail[:, None], 0.0), error
    )
    # A bound of 0 says that the lists agree as sets up to near-ties, not that an error was measured.
    error = np.where((np.isnan(one.listed) != np.isnan(other.listed)) & (error == 0.0), np.nan, error)
    beyond = np.full((len(error), 1), np.nan)
    if not two_sided:
        # The record says that every other id is at most its last one.
        with np.errstate(invalid="ignore"):
            excess = one.beyond - other.beyond
        beyond[:, 0] = np.where(np.isfinite(excess) & (excess > 0), excess, np.nan)
    return np.concatenate([error, beyond], axis=1)


def _response_rows(response: Response, observable: str, record: Record, rows: np.ndarray) -> np.ndarray:
    array = {
        "logits": response.logits,
        "score": response.scores,
        "topk": response.topk.ids if response.topk is not None else None,
    }[observable]
    if array is None:
        raise Problem("shown", f"{observable} was not shown")
    at: np.ndarray = record.positions[rows].astype(np.int64) - response.first_row
    count = len(np.asarray(array))
    missing = np.flatnonzero((at < 0) | (at >= count))
    if len(missing):
        position = int(record.positions[rows][missing[0]])
        reason = (
            f"{observable} has {count} rows from token {response.first_row}; {len(missing)} needed rows are missing"
        )
        raise Problem("rows", reason, position)
    return at


def _topk_view(response: Response, record: Record, rows: np.ndarray, at: np.ndarray) -> View:
    assert response.topk is not None
    found, values = np.asarray(response.topk.ids)[at], np.asarray(response.topk.logprobs, np.float64)[at]
    positions = record.positions[rows]
    if found.ndim != 2 or found.shape != values.shape or not found.shape[1]:
        raise Problem("shape", f"top-k ids of shape {found.shape} with log-probabilities of {values.shape}")
    present = found >= 0
    _require_finite(np.where(present, values, 0.0), positions, "top-k log-probabilities")
    if not present[:, 0].all():
        row = int(np.argmin(present[:, 0]))
        raise Problem("rows", "top-k list is empty", int(positions[row]))
    if (found >= record.vocab).any():
        row = int(np.argmax((found >= record.vocab).any(axis=1)))
        raise Problem(
            "shape", f"token id {int(found[row].max())} of a vocabulary of {record.vocab}", int(positions[row])
        )
    ordered = np.sort(np.where(present, found, -1 - np.arange(found.shape[1])), axis=1)
    twice = (np.diff(ordered, axis=1) == 0).any(axis=1)
    if twice.any():
        row = int(np.argmax(twice))
        raise Problem("shape", f"a token id stands twice in the top-k list {found[row].tolist()}", int(positions[row]))
    ids = record.topk_ids[rows].astype(np.int64)
    same = (found[:, None, :] == ids[:, :, None]) & present[:, None, :]
    place = same.argmax(axis=2)
    listed = np.where(same.any(axis=2), np.take_along_axis(values, place, axis=1), np.nan)
    known = np.where(present, values, np.inf)
    stranger = present & ~same.any(axis=1)
    best = found[np.arange(len(found)), np.where(present, values, -np.inf).argmax(axis=1)]
    return View(
        "topk", listed, known.min(axis=1), np.where(stranger, values, -np.inf).max(axis=1), best.astype(np.int64)
    )


def _require_finite(values: np.ndarray, positions: np.ndarray, what: str) -> None:
    bad = ~np.isfinite(values)
    if bad.any():
        row = int(np.argmax(bad.any(axis=1)))
        raise Problem("finite", f"{int(bad.sum())} of {values.size} {what} are not finite", int(positions[row]))


def both_show(first: Response, second: Response) -> list[str]:
    """Numeric observables that both show."""
    names = [n for n in ("logits", "topk") if getattr(first, n) is not None and getattr(second, n) is not None]
    return names + (["score"] if first.scores is not None and second.scores is not None else [])


def common_rows(record: Record, first: Response, second: Response) -> np.ndarray:
    """Rows of the record that both responses have."""
    start = max(first.first_row, second.first_row)
    stop = min(_stop(first), _stop(second), len(record.tokens))
    return np.flatnonzero((record.positions >= start) & (record.positions < stop))


def _stop(response: Response) -> int:
    arrays = [
        a for a in (response.logits, response.scores, response.topk.ids if response.topk else None) if a is not None
    ]
    return response.first_row + min((len(array) for array in arrays), default=0)
