"""A routed layer: chosen experts, weighted, plus the shared experts that every token takes."""

from __future__ import annotations

import torch

from ..config import MoESpec
from ..model.step import Step
from ..model.weights import Weights
from .router import choose

__all__ = ["mix"]


def mix(step: Step, spec: MoESpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Output of the layer for the normalised rows x [T, h], before the residual connection: [T, h]."""
    ops, tap = step.ops, step.tap
    routing = choose(step, spec, weights, x)
    routed: torch.Tensor = ops.experts(
        x,
        routing.ids,
        routing.weights,
        weights["moe.experts.gate"],
        weights["moe.experts.up"],
        weights["moe.experts.down"],
        # Gathering every slot's activations costs memory: only where someone looks at them.
        tap if tap and tap.wants("moe.experts.") else None,
    )
    if tap:
        tap("moe.routed", routed)
    if not spec.shared_inter:
        return routed
    gate = ops.linear(x, weights["moe.shared.gate.weight"], None)
    up = ops.linear(x, weights["moe.shared.up.weight"], None)
    shared = ops.linear(ops.swiglu(gate, up), weights["moe.shared.down.weight"], None)
    if tap:
        tap("moe.shared", shared)
    out: torch.Tensor = ops.shared_combine(routed, shared)
    return out
