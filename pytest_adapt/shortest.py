"""A failing item of a target that cannot be tapped: the shortest beginning of a prompt that shows the failure.

Beginnings are sent alone and held against the record's own rows under the same budgets. Bisection assumes that what
contains a failing beginning fails too. A shorter and a longer one are tried beside it, and the result says where the
answers contradict that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_adapt.session import Fatal
from pytest_adapt.verdict.result import Measurement, Prefix
from pytest_adapt.verdict.status import Verdict

if TYPE_CHECKING:
    from pytest_adapt.items import ItemState

__all__ = ["shortest_prefix", "shrink"]

_REQUESTS = 8
_CHECKS = 1
"""Of them at least, to see whether failing grows with the length."""
_SECONDS = 30.0
_AGAINST_REFERENCE = ("logprob", "kl", "cosine", "token_match")
_NUMBERS = frozenset({"logits", "score", "topk"})


def shortest_prefix(state: ItemState) -> Prefix | str:
    """The shortest beginning of a failing prompt that fails alone, by at most 8 requests within 30 seconds; or why
    there is none.

    "" where none is sought: the target can be tapped (its sites say more), or nothing failed against the reference.
    """
    if state.target is None or state.model is None or state.reference is None:
        return ""
    if "taps" in state.target.info.observables:
        return ""
    prompts = state.model.all_prompts
    failures = [one for one in state.judge.failures() if one.metric.startswith(_AGAINST_REFERENCE)]
    failures = [one for one in failures if one.prompt in prompts]
    if not failures:
        return ""
    worst = min(failures, key=lambda one: (not _is_first(one), one.position is None, one.position or 0))
    tokens = prompts[worst.prompt]
    first = worst.position + 1 if _is_first(worst) and worst.position is not None else len(tokens)
    try:
        found = shrink(worst.prompt, len(tokens), min(first, len(tokens)), _fails(state, worst.prompt, tokens))
    except (Verdict, Fatal) as error:  # the target has gone; the verdict on the item stands
        return f"none, the target could not be asked again: {str(error).partition(chr(10))[0]}"
    if found is not None:
        return found
    if worst.position is not None and worst.position >= len(tokens):
        return (
            f"none, position {worst.position} is of the answer: the {len(tokens)} tokens of {worst.prompt} alone do "
            "not show it"
        )
    return f"none, no beginning of {worst.prompt} fails alone: it depends on what else was asked"


def shrink(
    prompt: str, whole: int, first: int, fails: Callable[[int], bool], seconds: float = _SECONDS
) -> Prefix | None:
    """Bisect for the least length at which ``fails`` holds, by at most 8 calls, none begun after ``seconds``.

    ``first`` is the length that the failure points to, ``whole`` that of the prompt. None where both pass.
    """
    started = time.monotonic()
    tried: dict[int, bool] = {}

    def at(length: int) -> bool:
        if length not in tried:
            tried[length] = fails(length)
        return tried[length]

    high = next((length for length in dict.fromkeys((first, whole)) if at(length)), None)
    if high is None:
        return None
    low = max((length for length, failed in tried.items() if not failed and length < high), default=0)
    # Rows that depend on nothing later fail at the very first that is off: then the next shorter one passes.
    probe = high - 1
    while high - low > 1 and len(tried) < _REQUESTS - _CHECKS and time.monotonic() - started < seconds:
        if at(probe):
            high = probe
        else:
            low = probe
        probe = (low + high) // 2
    for check in ((high + whole) // 2, low // 2):
        if check and len(tried) < _REQUESTS and time.monotonic() - started < seconds:
            at(check)
    least = min(length for length, failed in tried.items() if failed)
    passing = [length for length, failed in tried.items() if not failed]
    below = max((length for length in passing if length < least), default=0)
    return Prefix(prompt, least, whole, below, len(tried), min((one for one in passing if one > least), default=0))


def _is_first(measurement: Measurement) -> bool:
    """Whether its position is the first one that is off (of an rms it is the worst)."""
    return measurement.metric.endswith((".max", "token_match")) and measurement.observable != "text"


def _fails(state: ItemState, prompt: str, tokens: tuple[int, ...]) -> Callable[[int], bool]:
    from pytest_adapt.golden.record import RecordError
    from pytest_adapt.verdict.judge import Judge

    assert state.target is not None and state.cell is not None
    target, record, precision = state.target, state.reference.record(prompt, tokens), state.cell.precision
    numeric = bool(_NUMBERS & target.shown)

    def fails(length: int) -> bool:
        part = tokens[:length]
        known = record if length == len(tokens) else record.prefix(length)
        judge = Judge(precision, rounds=target.info.rounds, router=target.info.router)
        answer = target.score(part, _NUMBERS) if numeric else target.generate(part, 1, ("text",))
        if answer.error is not None:  # refused, as a server may do with a single token: that is another failure
            return False
        try:
            if numeric:
                judge.against_record(prompt, answer, known)
            else:
                judge.generated(prompt, answer, known, part)
            return bool(judge.failures()) and not judge.undecided
        except RecordError:
            return False

    return fails
