"""A routed layer: chosen experts, weighted, plus the shared experts that every token takes."""

from __future__ import annotations

import torch

from ..config import MoESpec
from ..model.step import Step
from ..model.weights import Weights
from .dispatch import run_remote
from .router import choose

__all__ = ["mix"]


def mix(step: Step, spec: MoESpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Output of the layer for the normalised rows x [T, h], before the residual connection: [T, h].

    The tp ranks, which hold the same rows, each route a share of them and gather the results. The shared experts,
    cut over tp as a dense layer is, are added after that: once.
    """
    ops, tap, parallel = step.ops, step.tap, step.parallel
    own = parallel.share(x)
    routing = choose(step, spec, weights, own)
    if parallel.expert.size == 1:
        routed = ops.experts(
            own,
            routing.ids,
            routing.weights,
            weights["moe.experts.gate"],
            weights["moe.experts.up"],
            weights["moe.experts.down"],
            # Gathering every slot's activations costs memory: only where someone looks at them.
            tap if tap and tap.wants("moe.experts.") else None,
        )
    else:
        down = run_remote(step, spec, weights, own, routing)
        if tap:
            tap("moe.experts.down", down)
        routed = ops.combine(down, routing.weights)
    routed = parallel.collect(routed, x.shape[0])
    if tap:
        tap("moe.routed", routed)
    if not spec.shared_inter:
        return routed
    gate = ops.linear(x, weights["moe.shared.gate.weight"], None)
    up = ops.linear(x, weights["moe.shared.up.weight"], None)
    shared = parallel.linear_rows(ops, ops.swiglu(gate, up), weights["moe.shared.down.weight"], None)
    if tap:
        tap("moe.shared", shared)
    return ops.shared_combine(routed, shared)
