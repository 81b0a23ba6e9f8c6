"""Routing, experts and their combination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pytest_adapt.inspect.presets import presets
from pytest_adapt.operators.case import Case
from pytest_adapt.operators.definition import Op, Values
from pytest_adapt.operators.draw import Draw, Operand
from pytest_adapt.oracle import routing
from pytest_adapt.oracle.blocks import feed_forward
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.oracle.spec import RouterSpec
from pytest_adapt.verdict.discrete import judge_choices, row_error, shape_problem
from pytest_adapt.verdict.result import Measurement

__all__ = ["Combine", "Experts", "Route"]

_ROUTER = "layer.0.moe.router"
_BIASES = {"none": 0.0, "positive": 7.0, "negative": -7.0}
_SPREAD = 0.12


class Route(Op):
    """Choice of experts from float32 logits [rows, groups x size] and their combine weights.

    scores are a softmax or a sigmoid of each; selection adds the bias; of the groups the ``kept`` best by their two
    best selections stay; the ``chosen`` best of those are taken, in ascending id. Equal selections go to the lower id,
    NaN is never chosen. Weights are scores (never biased), made to sum to 1 where renormalised, times the scale.
    """

    name = "route"
    space = {
        "rows": range(20),
        "groups": range(1, 5),
        "size": range(2, 9),
        "kept": range(1, 5),
        "chosen": range(1, 7),
        "scoring": ("softmax", "sigmoid"),
        "bias": tuple(_BIASES),
        "renormalise": (True, False),
        "scale": (1.0, 2.5),
        "nans": range(3),
    }
    base = {"rows": 24, "groups": 4, "size": 5, "kept": 2, "chosen": 4, "scoring": "sigmoid", "bias": "negative"}
    edges = (
        {"rows": 0},
        {"rows": 1},
        *({"bias": bias, "scale": 2.5, "renormalise": again} for bias in _BIASES for again in (True, False)),
        *({"groups": 1, "size": 13, "scoring": kind, "bias": "none", "renormalise": again, "values": values}
          for kind in ("softmax", "sigmoid") for again in (True, False) for values in ("normal", "tied")),
        *({"bias": bias, "values": "tied"} for bias in _BIASES),
        {"kept": 4, "chosen": 6},
        {"kept": 1, "chosen": 5},
        {"groups": 1, "size": 13, "nans": 2, "scale": 2.5},
        {"groups": 1, "size": 2, "chosen": 1, "scoring": "softmax", "bias": "none"},
    )  # fmt: skip
    outputs = {"scores": "fp32", "selection": "fp32", "weights": "fp32"}
    follows = ("ids",)
    architecture = "DeepseekV3ForCausalLM"

    def published(self) -> Sequence[dict[str, Any]]:
        found = []
        for raw in presets().values():
            moe = raw["moe"]
            if moe["score"] not in ("softmax", "sigmoid"):
                continue
            groups = moe.get("n_group", 1)
            shape = {"rows": 8, "groups": groups, "size": moe["experts"] // groups, "kept": moe.get("topk_group", 1)}
            bias = "positive" if moe.get("bias_correction") else "none"
            shape |= {"chosen": moe["topk"], "scoring": moe["score"], "bias": bias, "renormalise": moe["renorm"]}
            found.append({**shape, "scale": float(moe.get("scale", 1.0))})
        return [dict(pairs) for pairs in dict.fromkeys(tuple(shape.items()) for shape in found)]

    def legal(self, parameters: dict[str, Any]) -> dict[str, Any]:
        p = dict(parameters)
        if p["nans"]:
            p |= {"groups": 1, "scoring": "sigmoid"}  # softmax would spread a NaN over its row
        p["kept"] = min(p["kept"], p["groups"])
        p["chosen"] = min(p["chosen"], p["kept"] * p["size"])
        p["nans"] = min(p["nans"], p["groups"] * p["size"] - p["chosen"])
        return p

    def attributes(self, case: Case) -> dict[str, Any]:
        names = ("groups", "kept", "chosen", "scoring", "renormalise", "scale")
        return {"experts": case["groups"] * case["size"], **{name: case[name] for name in names}}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        case = draw.case
        experts = case["groups"] * case["size"]
        logits = draw.activation(case["rows"], experts, format="fp32", huge=4)
        for row in logits.values:
            row[draw.rng.permutation(experts)[: case["nans"]]] = np.nan
        if case["bias"] == "none":
            return {"logits": logits}
        # Narrow and far from zero: what stands in for a dropped group must not win.
        bias = draw.weight(experts, scale=_SPREAD, format="fp32", offset=_BIASES[case["bias"]])
        if case.values == "tied":
            bias = Operand(np.full(experts, _BIASES[case["bias"]]), "fp32", weight=True)
        return {"logits": logits, "bias": bias}

    def router(self, case: Case) -> RouterSpec:
        """The router's rule as the oracle reads it."""
        a = self.attributes(case)
        guard = 1e-20 if a["scoring"] == "sigmoid" else 0.0
        return RouterSpec(
            a["experts"], a["chosen"], a["scoring"], case["bias"] != "none", a["groups"], a["kept"], a["renormalise"],
            guard, a["scale"],
        )  # fmt: skip

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        router = self.router(case)
        scores = n.site(f"{_ROUTER}.scores", routing.scores_of(n, router, x["logits"]))
        selection = n.site(f"{_ROUTER}.selection", scores + x["bias"] if router.selection_bias else scores)
        ids = x["ids"] if "ids" in x else routing.choose(router, selection).ids
        weights = n.site(f"{_ROUTER}.weights", routing.weights_of(n, router, scores, ids))
        return {"scores": scores, "selection": selection, "ids": ids, "weights": weights}

    def judge(self, case: Case, x: Values, got: Values, exact: Values, yard: Values) -> Iterator[Measurement]:
        """The choice itself: right for the target's own selection, ties included; else certified by its margin."""
        router, rows = self.router(case), case["rows"]
        ids = got.get("ids")
        problem = "absent from the answer" if ids is None else None
        if ids is not None and (broken := shape_problem(ids, rows, router.chosen, router.experts)):
            problem = f"row {broken[0]}: {broken[2]}"
        if ids is None or problem:
            yield Measurement("op.choice", 1.0, 0.0, False, compared=max(rows, 1), detail=f"ids: {problem}")
            return
        if not rows:
            yield Measurement("op.choice", 0.0, 0.0, True, compared=1)
            return
        if "selection" in got and got["selection"].shape == exact["selection"].shape:
            own = routing.choose(router, got["selection"].astype(np.float32)).ids
            wrong = np.flatnonzero((own != ids).any(axis=1))
            detail = _choice(wrong, ids, own, "of its own selection") if len(wrong) else ""
            yield Measurement("op.choice", len(wrong) / max(rows, 1), 0.0, not len(wrong), compared=rows, detail=detail)
        error = row_error(np.nan_to_num(yard["selection"] - exact["selection"]))
        certificates = routing.judge_replay(router, exact["selection"], exact["ids"], ids)
        flips = judge_choices(ids, exact["ids"], np.nan_to_num(exact["selection"]), error, certificates)
        illegal = np.array([flip.row for flip in flips if not flip.legal], np.int64)
        detail = f"{len(flips) - len(illegal)} near-ties"
        if len(illegal):
            detail = _choice(illegal, ids, exact["ids"], next(flip.reason for flip in flips if not flip.legal))
        share = len(illegal) / max(rows, 1)
        yield Measurement("op.flips", share, 0.0, not len(illegal), compared=rows, detail=detail)


class Experts(Op):
    """Each row through its chosen experts' SwiGLU, weighted and summed: x [rows, width], ids and float32 weights [rows,
    chosen], gate and up [experts, inter, width], down [experts, width, inter] -> [rows, width].

    ``crowded`` sends every row to the same experts: all others are empty.
    """

    name = "experts"
    space = {
        "rows": range(12),
        "experts": range(1, 8),
        "chosen": range(1, 5),
        "width": range(1, 24),
        "inter": range(1, 24),
        "crowded": (False, True),
    }
    base = {"rows": 9, "experts": 7, "chosen": 3, "width": 40, "inter": 22}
    edges = ({"rows": 0}, {"rows": 1}, {"crowded": True}, {"experts": 3, "chosen": 3}, {"rows": 64, "chosen": 2})
    # Products of three activations: huge ones overflow, and what is left is no comparison.
    kinds = ("normal", "negative", "tied", "zero", "spike", "small", "tiny")

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"rows": 2, "experts": 4, "chosen": 2, "width": 2048, "inter": 24}]

    def legal(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {**parameters, "chosen": min(parameters["chosen"], parameters["experts"])}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        case = draw.case
        rows, experts, chosen, width, inter = (case[p] for p in ("rows", "experts", "chosen", "width", "inter"))
        orders = [draw.rng.permutation(experts)[:chosen] for _ in range(rows)]
        if case["crowded"] and rows:
            orders = [orders[0]] * rows
        ids = np.sort(np.array(orders, np.int64).reshape(rows, chosen), axis=-1)
        return {
            "x": draw.activation(rows, width),
            "ids": Operand(ids, "int"),
            "weights": draw.weight(rows, chosen, scale=0.1, format="fp32", offset=0.5),
            "gate": draw.weight(experts, inter, width, scale=width**-0.5),
            "up": draw.weight(experts, inter, width, scale=width**-0.5),
            "down": draw.weight(experts, width, inter, scale=inter**-0.5),
        }

    def stored(self, name: str, operands: Mapping[str, Operand]) -> np.ndarray:
        """``3.gate_proj.weight``: the gate of expert 3."""
        expert, part, _ = name.split(".")
        found: np.ndarray = operands[part.removesuffix("_proj")].values[int(expert)]
        return found

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        ids, moe = x["ids"], "layer.0.moe"
        down = np.empty((*ids.shape, case["width"]), n.dtype)
        for expert in np.unique(ids):
            row, place = np.nonzero(ids == expert)
            rows = x["x"][row]
            down[row, place] = feed_forward(n, n.site, f"{moe}.experts", f"{expert}", rows, bias=False)
        return {"out": routing.combine(n, moe, n.site(f"{moe}.experts.down", down), x["weights"])}


class Combine(Op):
    """Weighted sum of expert outputs [rows, chosen, width] with float32 weights [rows, chosen] -> [rows, width]."""

    name = "combine"
    space = {"rows": range(20), "chosen": range(1, 9), "width": range(1, 40)}
    base = {"rows": 9, "chosen": 5, "width": 72}
    edges = ({"rows": 0}, {"rows": 1, "chosen": 1}, {"rows": 64})
    wrt = ("down", "weights")
    gradient = {"rows": 2, "chosen": 3, "width": 4}
    independent = True
    sums = True
    architecture = "DeepseekV3ForCausalLM"

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"rows": 2, "chosen": 8, "width": 7168}]

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, chosen, width = (draw.case[name] for name in ("rows", "chosen", "width"))
        weights = draw.weight(rows, chosen, scale=0.1, format="fp32", offset=0.5)
        return {"down": draw.activation(rows, chosen, width), "weights": weights}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        return {"out": routing.combine(n, "layer.0.moe", x["down"], x["weights"])}


def _choice(rows: np.ndarray, got: np.ndarray, expected: np.ndarray, why: str) -> str:
    row = int(rows[0])
    return f"row {row}: experts {got[row].tolist()}, expected {expected[row].tolist()} ({why}); {len(rows)} rows"
