"""Router of a layer: float32 logits, choice, combine weights."""

from __future__ import annotations

import torch

from ..config import MoESpec
from ..kernels import Routing
from ..model.step import Step
from ..model.weights import Weights

__all__ = ["choose"]


def choose(step: Step, spec: MoESpec, weights: Weights, x: torch.Tensor) -> Routing:
    """Experts and weights of the rows x [T, h]."""
    ops, tap = step.ops, step.tap
    logits = ops.router_logits(x, weights["moe.router.weight"])
    routing: Routing = ops.route(logits, weights.get("moe.router.bias"), spec)
    if tap:
        tap("moe.router.logits", logits)
        tap("moe.router.scores", routing.scores)
        tap("moe.router.selection", routing.selection)
        tap("moe.router.ids", routing.ids)
        tap("moe.router.weights", routing.weights)
    return routing
