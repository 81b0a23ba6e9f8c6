"""Timing of a load: some prompts in flight together, round after round, and what the rounds come to.

Every sample is kept. Numbers are medians of one machine and one run: engineering references, never a limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_adapt.verdict.result import Figure

if TYPE_CHECKING:
    from pytest_adapt.open_target import OpenTarget
    from pytest_adapt.perf.roofline import Peaks, Work
    from pytest_adapt.target.protocol import Response

__all__ = ["Round", "Stopwatch", "figures"]


@dataclass(frozen=True)
class Round:
    """One round of a load: wall seconds, every answer, bytes held at most beyond what was held before (None: not
    shown)."""

    seconds: float
    answers: Mapping[str, Response]
    peak: int | None = None


class Stopwatch:
    """The ``stopwatch`` fixture: one warm-up, then rounds, through pytest-benchmark's fixture where it is installed."""

    def __init__(self, benchmark: Any = None) -> None:
        self._benchmark = benchmark

    def load(self, target: OpenTarget, prompts: Mapping[str, Sequence[int]], new: int, rounds: int = 5) -> list[Round]:
        """``rounds`` times the same prompts together, ``new`` greedy tokens each. One load a test."""
        found: list[Round] = []
        memory = target.shows_memory

        def once() -> None:
            if memory:
                target.peak_memory(reset=True)
            started = time.perf_counter()
            answers = target.generate_all(prompts, new, ("text",), timed=True)
            seconds = time.perf_counter() - started
            found.append(Round(seconds, answers, target.peak_memory() if memory else None))

        self._repeat(once, rounds)
        return found[-rounds:]

    def _repeat(self, once: Callable[[], None], rounds: int) -> None:
        if self._benchmark is not None:
            self._benchmark.pedantic(once, rounds=rounds, warmup_rounds=1, iterations=1)
            return
        for _ in range(rounds + 1):
            once()


def figures(label: str, rounds: Sequence[Round], work: Work | None = None, peaks: Peaks | None = None) -> list[Figure]:
    """What rounds of one load come to: time to first token, time per output token, latency, throughput, memory, and
    where the load's work and the machine's peaks are known, the share of the peaks that is used."""
    answers = [answer for one in rounds for answer in one.answers.values() if answer.error is None]
    first = [answer.first_token_seconds for answer in answers if answer.first_token_seconds is not None]
    per_token = [
        (answer.seconds - answer.first_token_seconds) / (len(answer.tokens) - 1)
        for answer in answers
        if answer.seconds is not None and answer.first_token_seconds is not None and len(answer.tokens) > 1
    ]
    latency = [answer.seconds for answer in answers if answer.seconds is not None]
    made = [sum(len(answer.tokens) for answer in one.answers.values()) / one.seconds for one in rounds]
    memory = [float(one.peak) for one in rounds if one.peak is not None]
    found = [
        ("time to first token", "s", first),
        ("time per output token", "s", per_token),
        ("latency", "s", latency),
        ("throughput", "tokens/s", made),
        ("peak memory", "bytes", memory),
    ]
    if work is not None and peaks is not None:
        if per_token:
            share = work.decode_bytes / peaks.bandwidth / statistics.median(per_token)
            found.append((f"bandwidth used in decode, of {peaks.source}", "share", [share]))
        last = [_last_first(one) for one in rounds]
        if last and min(last) > 0:
            shares = [work.prefill_operations / peaks.operations / seconds for seconds in last]
            found.append((f"operations used in prefill, of {peaks.source}", "share", shares))
    return [Figure(label, name, unit, tuple(samples)) for name, unit, samples in found if samples]


def _last_first(one: Round) -> float:
    """When the last request of a round had its first token; 0 where that is not shown."""
    return max((answer.first_token_seconds or 0.0 for answer in one.answers.values()), default=0.0)
