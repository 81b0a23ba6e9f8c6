"""A target with its stronger observables hidden, so that detection can be measured for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pytest_adapt.target.protocol import OBSERVABLES, Deployment, Info, Request, Response, Target

__all__ = ["MaskedTarget"]


class MaskedTarget:
    """Wraps ``target`` and shows only ``observables``; everything else passes through.

    What is hidden is neither asked for nor passed on, so a judge sees exactly what a weaker target would show.
    Raises ValueError for a name that is no observable.
    """

    def __init__(self, target: Target, observables: Iterable[str]) -> None:
        shown = frozenset(observables)
        wrong = sorted(shown - set(OBSERVABLES))
        if wrong or not shown:
            raise ValueError(f"observables {wrong or 'none'} cannot be shown; choose from {', '.join(OBSERVABLES)}")
        self.target = target
        self.shown = shown

    def open(self, deployment: Deployment) -> Info:
        wanted = deployment.taps if "taps" in self.shown else ()
        info = self.target.open(replace(deployment, taps=wanted))
        found = replace(info, observables=info.observables & self.shown)
        # Operators one by one are as white a box as taps are.
        return found if "taps" in self.shown else replace(found, sites=(), ops={}, gradients=frozenset())

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        asked = [replace(request, want=request.want & self.shown or frozenset({"text"})) for request in requests]
        for response in self.target.run(asked):
            yield self._masked(response)

    def close(self) -> None:
        self.target.close()

    def __getattr__(self, name: str) -> Any:
        """Optional methods of the target."""
        return getattr(self.target, name)

    def _masked(self, response: Response) -> Response:
        masked = replace(response)
        if "taps" not in self.shown:
            masked.taps = {}
        if "logits" not in self.shown:
            masked.logits = None
        if "score" not in self.shown:
            masked.scores = None
        if "topk" not in self.shown:
            masked.topk = None
        if "text" not in self.shown:
            masked.text, masked.tokens = None, ()
        return masked
