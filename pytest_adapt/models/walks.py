"""Requests that carry a secret: each prompt of a needle model holds its own permutation, and its output walks through.

Needles give 16 keys a permutation of one cycle; the prompt ends with an address, and since every answer is the next
question, n output tokens are n lookups, each in a cache that by then holds what was generated. Two requests share
their fillers, keys and places and differ in what the keys lead to: whoever sees another's cache says another's walk.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_adapt.models.entries import ModelEntry
from pytest_adapt.models.needle import VALUES
from pytest_adapt.models.recall import filled, words_of
from pytest_adapt.target.protocol import Request, Sampling

__all__ = ["Walk", "abnormal_requests", "whose", "walks"]

_SHARED = 24
"""Fillers at the beginning of every prompt: a page and a half that requests have in common."""


@dataclass(frozen=True)
class Walk:
    """One request and the permutation that it alone knows."""

    name: str
    tokens: tuple[int, ...]
    leads: Mapping[int, int]
    """Address -> the address that its needle leads to."""

    def expected(self, count: int) -> tuple[int, ...]:
        """The first ``count`` tokens of the right output."""
        found, at = [], self.tokens[-1]
        for _ in range(count):
            at = self.leads[at]
            found.append(at)
        return tuple(found)


def walks(entry: ModelEntry, count: int, *, shortest: int, longest: int, seed: int = 0) -> tuple[Walk, ...]:
    """``count`` requests of mixed lengths, ends included. Equal arguments give equal requests; another ``seed`` changes
    what the needles say and nothing else. Raises ModelError for a model that recalls nothing."""
    words = words_of(entry)
    window = int(entry.config.get("sliding_window") or 0)
    found = []
    for number in range(count):
        name = f"{entry.name}.walk-{number}"
        length = shortest + (longest - shortest) * number // max(1, count - 1)
        fixed = random.Random(hashlib.sha256(name.encode()).digest())
        tokens = filled(words, f"{entry.name}.walks", _SHARED) + filled(words, name, length - _SHARED)
        # What is asked for must be in sight to the end of the output.
        begin = max(_SHARED, length - window // 2) if window else _SHARED
        places = fixed.sample(range(begin, length - 1), VALUES)
        cycle = list(range(VALUES))
        random.Random(hashlib.sha256(f"{name}.{seed}".encode()).digest()).shuffle(cycle)
        leads = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        for key, place in enumerate(places):
            tokens[place] = words.needle(key, leads[key])
        tokens[-1] = words.address(fixed.randrange(VALUES))
        found.append(Walk(name, tuple(tokens), leads))
    return tuple(found)


def whose(walk: Walk, output: Sequence[int], others: Sequence[Walk]) -> tuple[int, str]:
    """(steps that are not the request's own, name of another request that all of those belong to; "" where none)."""
    steps = list(zip((walk.tokens[-1], *output), output, strict=False))
    wrong = [(at, to) for at, to in steps if walk.leads.get(at) != to]
    fitting = [other.name for other in others if all(other.leads.get(at) == to for at, to in wrong)]
    return len(wrong), fitting[0] if wrong and len(fitting) == 1 else ""


def abnormal_requests(tokens: Sequence[int], vocab: int, limit: int) -> dict[str, Request]:
    """Requests that no target may answer, by what is wrong with them. ``limit`` is the longest context it takes."""
    fine = tuple(tokens)
    nan, infinite = float("nan"), float("inf")
    long = (fine * (limit // len(fine) + 2))[: limit + 1]
    made = {
        "empty prompt": Request("", ()),
        "id past the vocabulary": Request("", (*fine, vocab)),
        "id of 2^31": Request("", (*fine, 1 << 31)),
        "negative id": Request("", (*fine, -1)),
        "prompt beyond the context": Request("", long),
        "output beyond the context": Request("", long[: limit - 1], max_new_tokens=16),
        "negative output length": Request("", fine, max_new_tokens=-1),
        "temperature that is not a number": Request("", fine, 4, sampling=Sampling(temperature=nan)),
        "infinite temperature": Request("", fine, 4, sampling=Sampling(temperature=infinite)),
        "negative temperature": Request("", fine, 4, sampling=Sampling(temperature=-1.0)),
        "top-p of 0": Request("", fine, 4, sampling=Sampling(temperature=1.0, top_p=0.0)),
        "top-p above 1": Request("", fine, 4, sampling=Sampling(temperature=1.0, top_p=1.5)),
    }
    return {
        what: Request(f"abnormal: {what}", one.prompt, one.max_new_tokens or 1, sampling=one.sampling)
        for what, one in made.items()
    }
