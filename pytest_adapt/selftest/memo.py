"""A target whose answers are remembered, so that judging by another observable computes nothing anew.

Answers are keyed by the deployment and by everything that was asked since it was opened, so that a fault which keeps
count of its calls is repeated exactly. What cannot be remembered (aborts, memory) opens the real target, which is
first asked all that came before.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pytest_adapt.target.protocol import Deployment, Info, Request, Response, Target
from pytest_adapt.verdict import sampling
from pytest_adapt.verdict.sampling import sharpest
from pytest_adapt.verdict.statistics import TwoSample, permutation_test

__all__ = ["Memory", "RememberedTarget"]

_ROWS = frozenset({"logits", "score", "topk"})


@dataclass
class Memory:
    """What the targets of one fault, model, layout and precision have said."""

    opened: dict[Deployment, Info] = field(default_factory=dict)
    answers: dict[tuple[Deployment, str], list[Response]] = field(default_factory=dict)
    counters: dict[tuple[Deployment, str], Mapping[str, float]] = field(default_factory=dict)
    tests: dict[str, TwoSample] = field(default_factory=dict)
    """What permutation tests of the drawn tokens came to: the draws are the same through every observable."""

    @contextlib.contextmanager
    def of_tests(self, plans: dict[str, dict[str, Any]]) -> Iterator[None]:
        """Inside, a permutation test of the same samples is not computed again, nor are settings for the same places,
        which depend on no target: ``plans`` holds those of every session."""

        def tested(*samples: Any, **named: Any) -> TwoSample:
            key = _digest((samples, sorted(named.items())))
            if key not in self.tests:
                self.tests[key] = permutation_test(*samples, **named)
            return self.tests[key]

        def planned(places: Sequence[sampling.Place]) -> dict[str, Any]:
            key = _digest(places)
            if key not in plans:
                plans[key] = sharpest(places)
            return plans[key]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "permutation_test", tested)
            patch.setattr(sampling, "sharpest", planned)
            yield


class RememberedTarget:
    """Stands before the target that ``create`` makes; the protocol's methods, and any optional one of the target's."""

    def __init__(self, create: Callable[[], Target], memory: Memory) -> None:
        self._create = create
        self._memory = memory
        self._real: Any = None
        self._deployment = Deployment("")
        self._past: list[list[Request]] = []
        self._done = 0
        self._key = ""
        self._direct = False

    def open(self, deployment: Deployment) -> Info:
        self.close()
        self._deployment, self._past, self._done, self._key, self._direct = deployment, [], 0, "", False
        if deployment not in self._memory.opened:
            self._real = self._create()
            # A refusal is not remembered: the checkpoint may be another one the next time.
            self._memory.opened[deployment] = self._real.open(deployment)
        return self._memory.opened[deployment]

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        asked = list(requests)
        if self._direct:
            yield from self._target.run(asked)
            return
        # What is asked first is the probe. It asks for all that is declared, and what comes after it is the same for
        # a target that declares less.
        probed = frozenset() if self._past else _ROWS
        whole = [replace(request, want=_whole(request.want | probed)) for request in asked]
        self._key = hashlib.sha256(f"{self._key}{[_words(request) for request in whole]}".encode()).hexdigest()
        key = self._deployment, self._key
        if key not in self._memory.answers:
            self._memory.answers[key] = list(self._target.run(whole))
            self._done += 1
        self._past.append(whole)
        wanted = {request.id: request.want for request in asked}
        for response in self._memory.answers[key]:
            yield _shown(response, wanted.get(response.id, frozenset()))

    def close(self) -> None:
        if self._real is not None:
            self._real.close()
        self._real = None

    def __getattr__(self, name: str) -> Any:
        """Optional methods may change or read what the target has become: from here on it answers itself. Counters
        change nothing, and are remembered."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "stats" and not self._direct:
            counters, key = self._memory.counters, (self._deployment, self._key)
            if key not in counters:
                counters[key] = self._target.stats()
            return lambda: counters[key]
        found = getattr(self._target, name)
        self._direct = True
        return found

    @property
    def _target(self) -> Any:
        """The real target, in the state that everything asked so far has left it in."""
        if self._real is None:
            self._real = self._create()
            self._real.open(self._deployment)
        for requests in self._past[self._done :]:
            list(self._real.run(requests))
        self._done = len(self._past)
        return self._real


def _digest(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()


def _whole(want: frozenset[str]) -> frozenset[str]:
    """All that an answer with these observables can be cut out of. Rows that nobody wants are not asked for: what a
    prefix cache may serve depends on them."""
    return want | _ROWS if want & _ROWS else want


def _words(request: Request) -> tuple[Any, ...]:
    return (
        request.id,
        request.prompt,
        request.max_new_tokens,
        tuple(sorted(request.want)),
        request.topk,
        request.sampling,
        request.stop,
        request.ignore_eos,
        request.first_row,
    )


def _shown(response: Response, want: frozenset[str]) -> Response:
    """The answer without what was not wanted."""
    return replace(
        response,
        logits=response.logits if "logits" in want else None,
        scores=response.scores if "score" in want else None,
        topk=response.topk if "topk" in want else None,
        taps=response.taps if "taps" in want else {},
    )
