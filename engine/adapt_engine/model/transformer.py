"""The decoder stack: x + attention(norm(x)), then x + feed-forward(norm(x)), for every LayerSpec."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..attention import gqa, mla
from ..config import DenseSpec, LayerSpec, ModelSpec, MoESpec
from ..kernels import KernelRegistry
from ..moe.experts import mix
from .step import Step
from .weights import Weights, layer_weights

__all__ = ["Transformer"]

_HEAD_SITES = ("final.norm", "logits")
_ATTENTION = {"gqa": gqa.attend, "mla": mla.attend}


class Transformer:
    """A model on one rank. ``parameters`` maps buffer names to tensors (`adapt_engine.weights.parameters`)."""

    def __init__(self, spec: ModelSpec, parameters: Mapping[str, torch.Tensor], kernels: KernelRegistry) -> None:
        self.spec = spec
        self.parameters = parameters
        self.kernels = kernels
        self._layers = [layer_weights(parameters, index) for index in range(len(spec.layers))]
        self._head = parameters["embed" if spec.tied else "head"]

    def forward(self, step: Step) -> torch.Tensor:
        """Logits float32 [R, V] of ``step.head_rows``; fills the cache for every row of the step."""
        ops, record = step.ops, step.record
        x = ops.embedding(self.parameters["embed"], step.ids)
        if record:
            record("embed", x)
        for index, (layer, weights) in enumerate(zip(self.spec.layers, self._layers, strict=True)):
            self.kernels.layer = index
            step.tap = record.layer(index) if record else None
            x = self._layer(step, index, layer, weights, x)
        self.kernels.layer = None
        if record and not record.wanted.isdisjoint(_HEAD_SITES):
            # Rows of these two sites must line up with all others, so every row goes through the head.
            normed = ops.rms_norm(x, self.parameters["final.norm"], self.spec.norm_eps)
            record("final.norm", normed)
            logits = ops.lm_head(normed, self._head)
            record("logits", logits)
            return logits[step.head_rows]
        if not step.head_rows.shape[0]:
            return torch.empty((0, self.spec.vocab))
        normed = ops.rms_norm(x[step.head_rows], self.parameters["final.norm"], self.spec.norm_eps)
        return ops.lm_head(normed, self._head)

    def _layer(self, step: Step, index: int, layer: LayerSpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        ops, tap, eps = step.ops, step.tap, self.spec.norm_eps
        normed = ops.rms_norm(x, weights["attn.norm"], eps)
        if tap:
            tap("attn.norm", normed)
        x = ops.add(x, _ATTENTION[layer.attention.kind](step, index, layer.attention, weights, normed))
        normed = ops.rms_norm(x, weights["ffn.norm"], eps)
        if tap:
            tap("attn.residual", x)
            tap("ffn.norm", normed)
        if isinstance(layer.ffn, MoESpec):
            out = mix(step, layer.ffn, weights, normed)
        else:
            out = _dense(step, layer.ffn, weights, normed)
        x = ops.add(x, out)
        if tap:
            tap("ffn.out", out)
            tap("residual", x)
        return x


def _dense(step: Step, spec: DenseSpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    ops, tap = step.ops, step.tap
    gate = ops.linear(x, weights["ffn.gate.weight"], weights.get("ffn.gate.bias"))
    up = ops.linear(x, weights["ffn.up.weight"], weights.get("ffn.up.bias"))
    act = ops.swiglu(gate, up)
    if tap:
        tap("ffn.gate", gate)
        tap("ffn.up", up)
        tap("ffn.act", act)
    out: torch.Tensor = ops.linear(act, weights["ffn.down.weight"], weights.get("ffn.down.bias"))
    return out
