"""The decoder stack: x + attention(norm(x)), then x + feed-forward(norm(x)), for every LayerSpec."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..attention import gqa, mla
from ..config import DenseSpec, LayerSpec, ModelSpec, MoESpec
from ..kernels import KernelRegistry
from ..kernels.packed import Parameter
from ..kv.cache import PagedCache
from ..moe.experts import mix
from ..runtime.taps import TapRecorder
from .fused import FusedLayers
from .parallel import Parallel
from .step import Step
from .weights import Weights, layer_weights

__all__ = ["Transformer"]

_HEAD_SITES = ("final.norm", "logits")
_ATTENTION = {"gqa": gqa.attend, "mla": mla.attend}


class Transformer:
    """What one rank computes of a model. ``parameters`` maps buffer names to its tensors
    (`adapt_engine.weights.parameters`), ``spec`` holds its layers, numbered from ``first``, as it sees them
    (`adapt_engine.weights.shards.ShardPlan.local_spec`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Mapping[str, Parameter],
        kernels: KernelRegistry,
        first: int = 0,
    ) -> None:
        self.spec = spec
        self.parameters = parameters
        self.kernels = kernels
        self.first = first
        self._layers = [layer_weights(parameters, first + index) for index in range(len(spec.layers))]
        self._fused: FusedLayers | None = None

    def fuse(self, cache: PagedCache) -> None:
        """Compute whole passes over ``cache`` natively where that can be done and nobody looks in between."""
        self._fused = FusedLayers.build(self.spec, self.parameters, self.kernels, cache, self.first)

    def whole(self, parallel: Parallel, record: TapRecorder | None) -> FusedLayers | None:
        """What computes a pass from token ids to logits in one call; None where that cannot be done now."""
        fused = self._fused
        all_here = parallel.first_stage and parallel.last_stage
        return fused if fused is not None and all_here and fused.serves(parallel, record) else None

    def forward(self, step: Step) -> torch.Tensor | None:
        """Logits float32 [R, V] of ``step.head_rows`` on the last stage, None on others.

        Fills the cache for every row of the step.
        """
        parallel, record = step.parallel, step.record
        if parallel.first_stage:
            x = parallel.embedding(step.ops, self.parameters["embed"], step.ids, self.spec.vocab)
            if record:
                record("embed", x)
        else:
            x = parallel.receive(step.ids.shape[0], self.spec.hidden, self.kernels.dtype)
        if self._fused is not None and self._fused.serves(parallel, record):
            if not parallel.first_stage:
                x = x.clone()  # it is written to, and the stage before may still hold it
            logits = self._fused.run(step, x)
            if not parallel.last_stage:
                parallel.hand_on(x)
            return logits
        for index, (layer, weights) in enumerate(zip(self.spec.layers, self._layers, strict=True), self.first):
            self.kernels.layer = index
            step.tap = record.layer(index) if record else None
            x = self._layer(step, index, layer, weights, x)
        self.kernels.layer = None
        if parallel.last_stage:
            return self._logits(step, x)
        parallel.hand_on(x)
        return None

    def release(self) -> None:
        """Let go of the weights; nothing can be computed afterwards."""
        self.parameters = {}
        self._layers = []
        self._fused = None

    def _logits(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        ops, record = step.ops, step.record
        head = self.parameters["embed" if self.spec.tied else "head"]
        if record and not record.wanted.isdisjoint(_HEAD_SITES):
            # Rows of these two sites must line up with all others, so every row goes through the head.
            normed = ops.rms_norm(x, self.parameters["final.norm"], self.spec.norm_eps)
            record("final.norm", normed)
            logits = step.parallel.head(ops, normed, head, self.spec.vocab)
            record("logits", logits)
            return logits[step.head_rows]
        if not step.head_rows.shape[0]:
            return torch.empty((0, self.spec.vocab))
        normed = ops.rms_norm(x[step.head_rows], self.parameters["final.norm"], self.spec.norm_eps)
        return step.parallel.head(ops, normed, head, self.spec.vocab)

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
    return step.parallel.linear_rows(ops, act, weights["ffn.down.weight"], weights.get("ffn.down.bias"))
