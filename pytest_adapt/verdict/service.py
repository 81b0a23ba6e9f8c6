"""What a target promises beyond the numbers of one prompt: needles recalled, secrets kept, blocks given back, costs
that grow no faster than they must, and figures that nobody judges. The judge has methods of the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.inspect import InspectError
from pytest_adapt.models.recall import Question, Recall, story
from pytest_adapt.models.walks import Walk, whose
from pytest_adapt.perf.roofline import declared_peaks, measured_peaks, work
from pytest_adapt.perf.timing import Round, figures
from pytest_adapt.target.protocol import Response
from pytest_adapt.verdict.growth import exponent
from pytest_adapt.verdict.result import Figure

if TYPE_CHECKING:
    from pytest_adapt.verdict.judge import Judge

__all__ = ["growth", "recalled", "returned", "timed", "walked"]


def recalled(judge: Judge, prompt: str, response: Response, recall: Recall, record: Record) -> None:
    """See `Judge.recalled`."""
    count = response.prompt_tokens
    tokens = next((part for part in (recall.tokens, recall.tokens[:count]) if len(part) == count), recall.tokens)
    judge.prompt_tokens(prompt, response, tokens)
    part = record if len(tokens) == len(record.tokens) else record.prefix(len(tokens))
    if response.logits is not None or response.topk is not None or response.scores is not None:
        rulers = np.isin(part.tokens[part.positions], recall.rulers)
        judge.against_record(prompt, response, part.take(~rulers))
        if rulers.any():
            judge.against_record(prompt, response, part.take(rulers), pool="ruler.")
    if response.tokens:
        judge.generated(prompt, response, part, tokens)
    said = _said(response)
    known = [one for one in recall.questions if one.answer >= 0 and one.position in said]
    lost = [one for one in known if said[one.position] != one.answer]
    if known:
        detail = story(known, lost) if lost else f"all {len(known)} recalled"
        _needles(judge, "needles", prompt, lost, len(known), detail)
    _out_of_sight(judge, prompt, recall, part, said)


def _out_of_sight(judge: Judge, prompt: str, recall: Recall, record: Record, said: Mapping[int, int]) -> None:
    """No needle may be found that a window hides. Where the right answer happens to be the same, nothing is told."""
    best = dict(zip(record.positions.tolist(), record.topk_ids[:, 0].tolist(), strict=True))
    asked = [
        (one, secret)
        for one, secret in recall.unseen
        if one.position in said and best.get(one.position, secret) != secret
    ]
    found = [one for one, secret in asked if said[one.position] == secret]
    if asked:
        names = ", ".join(f"{one.needle} asked at {one.position}, {one.distance} keys back" for one in found[:3])
        detail = f"{len(found)} of {len(asked)} needles out of sight are found" + (f": {names}" if found else "")
        _needles(judge, "needles.hidden", prompt, found, len(asked), detail)


def _needles(judge: Judge, metric: str, prompt: str, wrong: Sequence[Question], asked: int, detail: str) -> None:
    position = wrong[0].position if wrong else None
    value = float(len(wrong))
    judge.promise(metric, not wrong, detail, value=value, prompt=prompt, position=position, compared=asked)


def walked(judge: Judge, response: Response, walk: Walk, others: Sequence[Walk], count: int, may_end: bool) -> None:
    """See `Judge.walked`."""
    judge.prompt_tokens(walk.name, response, walk.tokens)
    made = len(response.tokens)
    whole = made == count or (may_end and response.finish == "abort")
    wrong, owner = whose(walk, response.tokens, others)
    detail = f"{wrong} of {made} tokens are not its own"
    if owner:
        detail = f"{detail}: they are the secret of {owner}, which ran beside it"
    steps = enumerate(zip((walk.tokens[-1], *response.tokens), response.tokens, strict=False))
    for number, (at, to) in steps:
        if walk.leads.get(at) != to:
            own = f", where {walk.leads[at]} is its own" if at in walk.leads else ""
            detail = f"{detail}; output token {number}, the first, is {to}{own}"
            break
    if not whole:
        detail = f"{made} tokens came, {count} were asked for ({response.finish}); {detail}"
    ok = whole and not wrong
    judge.promise(
        "secret", ok, detail, value=float(wrong), prompt=walk.name, observable="text", compared=made if ok else 1
    )


def returned(judge: Judge, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """See `Judge.returned`."""
    for name, wanted in (("running", 0.0), ("waiting", 0.0), ("kv_blocks_available", None)):
        if name in before and name in after:
            expected = before[name] if wanted is None else wanted
            missing = abs(after[name] - expected)
            detail = f"{after[name]:g} when all is done, {expected:g} expected"
            judge.promise(f"returned.{name}", not missing, detail, value=missing)


def growth(
    judge: Judge,
    metric: str,
    lengths: Sequence[int],
    values: Sequence[float],
    most: int,
    least: Sequence[float],
    again: Callable[[], Sequence[float]] | None,
) -> None:
    """See `Judge.growth`."""
    budget = most + 0.5
    found = _growth(lengths, values, least)
    rounds = [values]
    if found and again is not None:
        rounds += [again(), again()]
        columns = list(zip(*rounds, strict=True))
        noisy = [bound + max(column) - min(column) for bound, column in zip(least, columns, strict=True)]
        found = _growth(lengths, [min(column) for column in columns], noisy)
    detail = "; again ".join(
        ", ".join(f"{length}: {value:.4g}" for length, value in zip(lengths, one, strict=True)) for one in rounds
    )
    judge.promise(metric, found <= budget, detail, value=found, budget=budget, compared=len(lengths) * len(rounds))


def _growth(lengths: Sequence[int], values: Sequence[float], least: Sequence[float]) -> float:
    """The exponent; 0 where the two largest lengths do not stand out."""
    excess = [value - min(values) - bound for value, bound in zip(values, least, strict=True)]
    return exponent(lengths, values) if min(excess[-2:]) > 0 else 0.0


def timed(label: str, rounds: Sequence[Round], precision: str, directory: Path | None) -> list[Figure]:
    """See `Judge.timed`."""
    spent, peaks = None, declared_peaks() or (measured_peaks() if directory is not None else None)
    if rounds and directory is not None and peaks is not None:
        lengths = [answer.prompt_tokens for answer in rounds[0].answers.values()]
        with contextlib.suppress(InspectError):  # a structure that nobody counted has times all the same
            spent = work(directory, precision, max(lengths), len(lengths))
    return figures(label, rounds, spent, peaks)


def _said(response: Response) -> dict[int, int]:
    """Row -> the token that a response finds most probable after it."""
    found = {}
    if response.logits is not None:
        found = dict(enumerate(np.asarray(response.logits).argmax(axis=1).tolist(), response.first_row))
    elif response.topk is not None:
        found = dict(enumerate(np.asarray(response.topk.ids)[:, 0].tolist(), response.first_row))
    return found | {response.prompt_tokens - 1 + place: token for place, token in enumerate(response.tokens)}
