"""Counts of discrete agreement: at how many rows the most probable token is the reference's, a near-tie, or wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.verdict.discrete import near_tie
from pytest_adapt.verdict.result import Measurement

__all__ = ["Matches", "judge_matches", "margin_below"]


@dataclass
class Matches:
    """Counts of discrete agreement over the prompts of an item."""

    compared: int = 0
    equal: int = 0
    ties: int = 0
    uncertain: int = 0
    """Not compared: a routing flip is possible before that position."""
    wrong: list[tuple[str, int, str]] = field(default_factory=list)

    def add(
        self,
        prompt: str,
        record: Record,
        rows: np.ndarray,
        chosen: np.ndarray,
        certified: np.ndarray,
        bound: np.ndarray,
    ) -> None:
        """Count rows where the most probable token is the reference's, a near-tie, or wrong."""
        for row, token, certain, error in zip(rows, chosen, certified, bound, strict=True):
            if not certain:
                self.uncertain += 1
                continue
            self.compared += 1
            best = int(record.topk_ids[row, 0])
            if token == best:
                self.equal += 1
                continue
            margin = margin_below(record, int(row), int(token))
            if near_tie(margin, error):
                self.ties += 1
                continue
            at_least = "at least " if int(token) not in record.topk_ids[row] else ""
            reason = f"token {int(token)} instead of {best}, {at_least}{margin:.3g} nats below it, "
            reason += f"where a healthy target errs by {error:.3g}"
            self.wrong.append((prompt, int(record.positions[row]), reason))


def judge_matches(key: tuple[str, str], found: Matches) -> Measurement:
    metric, observable = key
    detail = f"{found.equal} of {found.compared} equal, {found.ties} near-ties, {found.uncertain} not certified"
    prompt, position = "", None
    if found.wrong:
        prompt, position, reason = found.wrong[0]
        detail = f"{reason}; {detail}"
    wrong = len(found.wrong)
    return Measurement(
        metric, wrong / found.compared, 0.0, not wrong, observable, prompt, position, "", found.compared, detail
    )


def margin_below(record: Record, row: int, token: int) -> float:
    """How far ``token`` is below the best one, in nats; a lower bound where the record does not list it."""
    place = np.flatnonzero(record.topk_ids[row] == token)
    logprobs = record.topk_logprobs[row]
    return float(logprobs[0] - logprobs[place[0] if len(place) else -1])
