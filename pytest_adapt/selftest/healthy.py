"""A healthy target made of the oracle: what comparators are tried on. It rounds otherwise than the yardstick does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pytest_adapt.golden.record import Record, RecordKey, make_record, tokens_digest
from pytest_adapt.golden.sketch import log_softmax, top_ids
from pytest_adapt.oracle import Oracle, Rounding, Rule
from pytest_adapt.target.protocol import Response, TopK

__all__ = ["Specimen", "healthy", "respond"]

# Names that eager code materialises and a fused kernel keeps in its registers.
_INSIDE = ("*.unit", "*.cos", "*.sin", "*.raw", "*.silu", "*.weighted", "*.partial", "layer.*.attn.scores")


@dataclass(frozen=True)
class Specimen:
    """One model, the oracle of it, and what a healthy target of each precision answers."""

    directory: Path
    oracle: Oracle

    def tokens(self, count: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(int(t) for t in np.random.default_rng(seed).integers(0, self.oracle.spec.vocab, count))

    def record(self, tokens: tuple[int, ...], *precisions: str) -> Record:
        return make_record(self.oracle, RecordKey("m", "p", "s", "w", tokens_digest(tokens)), tokens, precisions)

    def run(self, tokens: tuple[int, ...], precision: str, directory: Path | None = None, **how: Any) -> Any:
        """A run that shares the oracle's formulas but neither its rounding nor the yardstick's order of sums."""
        oracle = self.oracle if directory is None else Oracle(directory)
        return oracle.run(tokens, rounding=healthy(precision), record=("*",), **how)

    def answer(self, tokens: tuple[int, ...], precision: str, directory: Path | None = None, **how: Any) -> Response:
        return respond(tokens, self.run(tokens, precision, directory, **how))


def healthy(precision: str) -> Rounding:
    """As careful as a fused engine: fewer values rounded, sums in BLAS order."""
    eager = Rounding.of(precision)
    inside = tuple(Rule(pattern, "fp32") for pattern in _INSIDE)
    return Rounding(f"fused {precision}", (*inside, *eager.rules), sequential=False)


def respond(
    tokens: tuple[int, ...], trace: Any, show: tuple[str, ...] = ("logits", "score", "topk", "taps")
) -> Response:
    """A Response that shows what the run computed."""
    logits = np.asarray(trace.logits).astype(np.float32)
    logprobs = log_softmax(logits, np.float32)[0].astype(np.float64)
    ids = top_ids(logits.astype(np.float64)).astype(np.int64)
    follow = np.append(logprobs[np.arange(len(tokens) - 1), list(tokens[1:])], np.nan)
    taps = {
        name: np.asarray(value, np.int64 if name.endswith(".ids") else np.float32)
        for name, value in trace.sites.items()
    }
    taps.pop("logits", None)
    return Response(
        id="r",
        prompt_tokens=len(tokens),
        logits=logits if "logits" in show else None,
        scores=follow if "score" in show else None,
        topk=TopK(ids, np.take_along_axis(logprobs, ids, axis=1)) if "topk" in show else None,
        taps=taps if "taps" in show else {},
    )
