"""Embedding, head and the choice of the next token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pytest_adapt.operators.case import Case
from pytest_adapt.operators.definition import EXACT, Op, Values
from pytest_adapt.operators.dense import widths
from pytest_adapt.operators.draw import Draw, Operand
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.verdict.budget import SITE_QUANTILE, ulp
from pytest_adapt.verdict.result import Measurement

__all__ = ["Embedding", "Head", "Sample"]

_DRAWS = 192
_FEW = 5.0
"""Expected draws of a cell of the chi-square statistic, at least (Cochran's rule)."""


class Embedding(Op):
    """Rows of the table [vocabulary, width] for ids [rows]: copies, bit for bit."""

    name = "embedding"
    space = {"rows": range(20), "vocabulary": range(1, 40), "width": range(1, 40)}
    base = {"rows": 9, "vocabulary": 31, "width": 40}
    edges = ({"rows": 0}, {"rows": 1, "vocabulary": 1}, {"rows": 64})
    kinds = ("normal",)
    memories = ("dense",)
    outputs = {"out": EXACT}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, vocabulary, width = (draw.case[name] for name in ("rows", "vocabulary", "width"))
        ids = draw.integers(0, vocabulary, rows)
        ids.values[:2] = (0, vocabulary - 1)[: min(rows, 2)]
        return {"table": draw.weight(vocabulary, width), "ids": ids}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        return {"out": n.site("embed", n.parameter("table")[x["ids"]])}


class Head(Op):
    """Logits [rows, vocabulary] of x [rows, width] and weight [vocabulary, width]."""

    name = "head"
    space = {"rows": range(12), "width": range(1, 41), "vocabulary": range(1, 70)}
    base = {"rows": 5, "width": 72, "vocabulary": 41}
    edges = ({"rows": 0}, {"rows": 1})
    independent = True
    sums = True

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"rows": 2, "width": width, "vocabulary": 40} for width in widths("hidden")[-2:]]

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, width, vocabulary = (draw.case[name] for name in ("rows", "width", "vocabulary"))
        return {"x": draw.activation(rows, width), "weight": draw.weight(vocabulary, width, scale=width**-0.5)}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        return {"out": n.site("logits", n.linear(x["x"], "weight"))}


class Sample(Op):
    """Tokens drawn from float32 logits [vocabulary], one for each of the positions.

    temperature 0 takes the largest logit, the lowest id among equals. Otherwise: divide by it, keep the top_k largest
    (0: all), of those the shortest prefix whose probability reaches top_p, and draw. The same seed gives the same
    tokens.
    """

    name = "sample"
    space = {
        "vocabulary": range(2, 40),
        "temperature": (0.0, 1.0, 0.7, 1.6),
        "top_k": (0, 1, 3, 8),
        "top_p": (1.0, 0.9, 0.5, 0.1),
    }
    base = {"vocabulary": 31}
    edges = (
        {"vocabulary": 2},
        *({"temperature": warm, "top_k": k, "top_p": p} for warm in (0.7, 1.6) for k in (0, 3) for p in (1.0, 0.5)),
        {"temperature": 1.0, "values": "tied", "top_k": 3},
        {"temperature": 1.0, "top_k": 1},
    )
    outputs = {}
    kinds = ("normal", "negative", "tied", "zero", "spike", "wide")

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"vocabulary": max(widths("vocab"))}]

    def attributes(self, case: Case) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p")
        return {"seed": case.seed, **{name: case[name] for name in names}}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        count = _DRAWS if draw.case["temperature"] else 2
        positions = Operand(np.arange(count, dtype=np.int64), "int")
        return {"logits": draw.activation(draw.case["vocabulary"], format="fp32"), "positions": positions}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        """Probabilities [vocabulary] of the tokens that may be drawn, and the mass before each in descending order."""
        logits = x["logits"].astype(np.float64)
        if not case["temperature"]:
            share = np.zeros(len(logits))
            share[int(np.argmax(logits))] = 1.0
            return {"share": share, "widest": share}
        order = np.argsort(-logits, kind="stable")
        scaled = logits[order] / case["temperature"]
        scaled[case["top_k"] or len(scaled) :] = -np.inf
        probability = np.exp(scaled - scaled[0])
        probability /= probability.sum()
        before = np.cumsum(probability) - probability
        # A sum of float32 terms may end on either side of the border.
        slack = float(ulp(1.0, "fp32")) * len(logits)
        found = {}
        for name, border in (("share", case["top_p"]), ("widest", case["top_p"] + slack)):
            kept = np.where(before < border, probability, 0.0)
            found[name] = np.empty(len(logits))
            found[name][order] = kept / kept.sum()
        return found

    def judge(self, case: Case, x: Values, got: Values, exact: Values, yard: Values) -> Iterator[Measurement]:
        ids, count = got.get("ids"), len(x["positions"])
        if ids is None or ids.shape != (count,) or ids.min() < 0 or ids.max() >= case["vocabulary"]:
            shown = "absent" if ids is None else f"shape {ids.shape}, from {ids.min()} to {ids.max()}"
            detail = f"ids are {shown}; expected {count} of 0 .. {case['vocabulary'] - 1}"
            yield Measurement("op.choice", 1.0, 0.0, False, compared=count, detail=detail)
            return
        wrong = np.flatnonzero(exact["widest"][ids] == 0.0)
        detail = ""
        if len(wrong):
            likely = int(np.argmax(exact["share"]))
            detail = f"token {ids[wrong[0]]} may not be drawn (the most probable is {likely}); {len(wrong)} of {count}"
        yield Measurement("op.choice", len(wrong) / count, 0.0, not len(wrong), compared=count, detail=detail)
        if case["temperature"]:
            deviate = _deviate(np.bincount(ids, minlength=case["vocabulary"]), exact["share"] * count)
            detail = f"{count} draws against their distribution, in standard deviations of chi-square"
            yield Measurement(
                "op.drawn", deviate, SITE_QUANTILE, deviate <= SITE_QUANTILE, compared=count, detail=detail
            )


def _deviate(seen: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts as a normal deviate (Wilson & Hilferty 1931); rare tokens share one cell."""
    rare = expected < _FEW
    cells = [*zip(seen[~rare], expected[~rare], strict=True), (seen[rare].sum(), expected[rare].sum())]
    cells = [(found, wanted) for found, wanted in cells if wanted > 0]
    freedom = len(cells) - 1
    if freedom < 1:
        return 0.0
    square = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    spread = 2.0 / (9.0 * freedom)
    return float(((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
