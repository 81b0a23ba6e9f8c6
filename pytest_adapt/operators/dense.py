"""Matrix products, norms, residual and activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pytest_adapt.inspect.presets import presets
from pytest_adapt.operators.case import Case
from pytest_adapt.operators.definition import Op, Values
from pytest_adapt.operators.draw import Draw, Operand
from pytest_adapt.oracle.blocks import rms_norm, silu
from pytest_adapt.oracle.numerics import Numerics

__all__ = ["AddRmsNorm", "GroupedLinear", "Linear", "RmsNorm", "RouterLogits", "Swiglu", "widths"]

_COLUMNS = 24
"""Columns that are left of a published matrix: the length of its sums is what matters."""


def widths(*path: str) -> list[int]:
    """Distinct values of one number of the published models (`pytest_adapt.inspect.presets`), ascending."""
    found = set()
    for raw in presets().values():
        value: Any = raw
        for key in path:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        if isinstance(value, int):
            found.add(value)
    return sorted(found)


class Linear(Op):
    """x [rows, width] times the transposed weight [columns, width], plus bias [columns] where there is one."""

    name = "linear"
    space = {"rows": range(35), "width": range(1, 41), "columns": range(1, 41), "bias": (False, True)}
    base = {"rows": 9, "width": 72, "columns": 21, "bias": True}
    edges = ({"rows": 0}, {"rows": 1, "width": 1, "columns": 1}, {"rows": 64}, {"rows": 65, "bias": False}, {"rows": 1})
    wrt = ("x", "weight", "bias")
    gradient = {"rows": 3, "width": 5, "columns": 4, "bias": True}
    independent = True
    sums = True

    def published(self) -> Sequence[dict[str, Any]]:
        hidden = [{"rows": 3, "width": width, "columns": _COLUMNS} for width in widths("hidden")]
        return [*hidden, {"rows": 1, "width": max(widths("moe", "inter")), "columns": _COLUMNS}]

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, width, columns = (draw.case[name] for name in ("rows", "width", "columns"))
        found = {"x": draw.activation(rows, width), "weight": draw.weight(columns, width, scale=width**-0.5)}
        return found | ({"bias": draw.weight(columns)} if draw.case["bias"] else {})

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        return {"out": n.site("layer.0.attn.q", n.linear(x["x"], "weight", "bias" if case["bias"] else None))}


class GroupedLinear(Op):
    """Each group's rows times its own matrix: x [rows, groups, width], weight [groups, columns, width] -> [rows,
    groups, columns]."""

    name = "grouped_linear"
    space = {"rows": range(20), "groups": range(1, 9), "width": range(1, 25), "columns": range(1, 25)}
    base = {"rows": 5, "groups": 3, "width": 40, "columns": 11}
    edges = ({"rows": 0}, {"rows": 1}, {"rows": 64})
    wrt = ("x", "weight")
    gradient = {"rows": 2, "groups": 2, "width": 3, "columns": 3}
    independent = True
    sums = True

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"rows": 2, "groups": 4, "width": width, "columns": _COLUMNS} for width in widths("attn", "kv_lora")]

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, groups, width, columns = (draw.case[name] for name in ("rows", "groups", "width", "columns"))
        weight = draw.weight(groups, columns, width, scale=width**-0.5)
        return {"x": draw.activation(rows, groups, width), "weight": weight}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        product = n.matmul(np.swapaxes(x["x"], 0, 1), np.swapaxes(n.parameter("weight"), 1, 2))
        return {"out": n.site("layer.0.attn.kv_b", np.swapaxes(product, 0, 1))}


class RouterLogits(Op):
    """x [rows, width] times the transposed float32 weight [experts, width]; the result is float32 whatever x is."""

    name = "router_logits"
    space = {"rows": range(20), "width": range(1, 41), "experts": range(1, 20)}
    base = {"rows": 9, "width": 72, "experts": 13}
    edges = ({"rows": 0}, {"rows": 1}, {"rows": 64})
    outputs = {"out": "fp32"}
    independent = True
    sums = True

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"rows": 2, "width": width, "experts": 16} for width in widths("hidden")[-2:]]

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, width, experts = (draw.case[name] for name in ("rows", "width", "experts"))
        return {
            "x": draw.activation(rows, width),
            "weight": draw.weight(experts, width, scale=width**-0.5, format="fp32"),
        }

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        # In order under every emulation: the result is float32, so its error is that of the order of its sums.
        logits = n.matmul(x["x"], x["weight"].T, in_order=True)
        return {"out": n.site("layer.0.moe.router.logits", logits)}


class RmsNorm(Op):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis; x [rows, width], or [rows, heads, width]."""

    name = "rms_norm"
    space = {"rows": range(20), "heads": range(6), "width": range(1, 70), "eps": (1e-6, 1e-5)}
    base = {"rows": 9, "width": 103}
    edges = ({"rows": 0}, {"rows": 1, "width": 1}, {"heads": 3, "width": 20}, {"rows": 64, "eps": 1e-5})
    wrt = ("x", "weight")
    gradient = {"rows": 3, "width": 7}

    def published(self) -> Sequence[dict[str, Any]]:
        heads = [{"rows": 2, "heads": 4, "width": width} for width in widths("attn", "head_dim")]
        return [*({"rows": 3, "width": width} for width in widths("hidden")), *heads]

    def attributes(self, case: Case) -> dict[str, Any]:
        return {"eps": case["eps"]}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, heads, width = (draw.case[name] for name in ("rows", "heads", "width"))
        shape = (rows, heads, width) if heads else (rows, width)
        return {"x": draw.activation(*shape), "weight": draw.weight(width, scale=0.2, offset=1.0)}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        return {"out": rms_norm(n, "layer.0.attn.norm", x["x"], "weight", case["eps"])}


class AddRmsNorm(Op):
    """The residual connection and the norm behind it: residual + x, and the norm of that sum. Both are answered."""

    name = "add_rms_norm"
    space = {"rows": range(20), "width": range(1, 70), "eps": (1e-6, 1e-5)}
    base = {"rows": 9, "width": 103}
    edges = ({"rows": 0}, {"rows": 1, "width": 1}, {"rows": 64, "eps": 1e-5})
    outputs = {"residual": "", "out": ""}

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"rows": 3, "width": width} for width in widths("hidden")[-3:]]

    def attributes(self, case: Case) -> dict[str, Any]:
        return {"eps": case["eps"]}

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, width = draw.case["rows"], draw.case["width"]
        activations = {name: draw.activation(rows, width) for name in ("residual", "x")}
        return {**activations, "weight": draw.weight(width, scale=0.2, offset=1.0)}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        total = n.site("layer.0.attn.residual", x["residual"] + x["x"])
        return {"residual": total, "out": rms_norm(n, "layer.0.ffn.norm", total, "weight", case["eps"])}


class Swiglu(Op):
    """silu(gate) * up, element by element."""

    name = "swiglu"
    space = {"rows": range(20), "width": range(1, 70)}
    base = {"rows": 9, "width": 103}
    edges = ({"rows": 0}, {"rows": 1, "width": 1}, {"rows": 64})
    wrt = ("gate", "up")
    gradient = {"rows": 3, "width": 7}
    independent = True
    relative = True

    def published(self) -> Sequence[dict[str, Any]]:
        return [{"rows": 2, "width": width} for width in widths("moe", "inter")]

    def inputs(self, draw: Draw) -> dict[str, Operand]:
        rows, width = draw.case["rows"], draw.case["width"]
        return {name: draw.activation(rows, width) for name in ("gate", "up")}

    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        return {"out": n.site("layer.0.ffn.act", n.inner("layer.0.ffn.silu", silu(x["gate"])) * x["up"])}
