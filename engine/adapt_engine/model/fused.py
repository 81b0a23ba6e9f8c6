"""All layers of a pass in one native call: the bits of the single ops, without Python between them.

The single ops remain, and serve every pass in which somebody looks or reaches in between: a wanted site, a wrapped op,
a replaced method of the cache, ranks that share a layer, an attention that the native decoder does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config import LayerSpec, ModelSpec, MoESpec
from ..kernels import KernelRegistry, native
from ..kernels.packed import PackedMatrix, Parameter
from ..kv.cache import PagedCache
from ..runtime.plan import BatchPlan
from ..runtime.taps import TapRecorder
from .parallel import Parallel
from .step import Step
from .weights import Weights, layer_weights

__all__ = ["FusedLayers"]

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PLAIN = PagedCache.write, PagedCache.gather


class FusedLayers:
    """The layers of one rank over its weights and its cache. Build with `build`."""

    def __init__(self, decoder: Any, spec: ModelSpec, kernels: KernelRegistry, cache: PagedCache, head: bool) -> None:
        self._decoder = decoder
        self._spec = spec
        self._rope = spec.layers[0].attention.rope
        self._kernels = kernels
        self._cache = cache
        self._head = head
        self._reach = 0

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        parameters: Mapping[str, Parameter],
        kernels: KernelRegistry,
        cache: PagedCache,
        first: int,
    ) -> FusedLayers | None:
        """None where the ops in use are not all native, or a layer is of a kind that the decoder does not compute.

        For a rank that computes its layers alone. ``spec`` holds the rank's layers, numbered from ``first``.
        """
        module = native.load()
        if module is None or kernels.names()["linear"] == "reference" or not spec.layers:
            return None
        if len({(layer.attention.rope, layer.attention.head_dim) for layer in spec.layers}) > 1:
            return None
        if not all(map(_known, spec.layers)):
            return None
        decoder = module.Decoder(_TYPES[kernels.dtype], spec.hidden, spec.norm_eps, native.level_of(module))
        for index, layer in enumerate(spec.layers, first):
            if not _add(decoder, spec, layer, layer_weights(parameters, index), cache.rows_of(index)):
                return None
        head = parameters.get("embed" if spec.tied else "head")
        has_head = "final.norm" in parameters and isinstance(head, PackedMatrix)
        if has_head:
            assert isinstance(head, PackedMatrix)
            decoder.set_head(parameters["final.norm"], head.handle)
        table = parameters.get("embed")
        if isinstance(table, PackedMatrix):
            decoder.set_packed_table(table.handle)
        elif table is not None:
            decoder.set_table(table)
        return cls(decoder, spec, kernels, cache, has_head)

    def serves(self, parallel: Parallel, record: TapRecorder | None) -> bool:
        """Whether nobody would miss what happens between the ops of a pass."""
        return (
            record is None
            and not self._kernels.wrapped
            and (type(self._cache).write, type(self._cache).gather) == _PLAIN
            and (self._head or not parallel.last_stage)
        )

    def step(self, sequences: BatchPlan) -> torch.Tensor:
        """Logits float32 [R, V] of the rows that are wanted, from token ids to the head: for a rank with all layers."""
        last = max((sequence.last for sequence in sequences), default=0)
        if last > self._reach:
            # Angles of a position are those of the op, whatever else is asked for.
            self._reach = max(2 * self._reach, last)
            self._decoder.set_angles(*self._kernels.ops.rope_tables(self._rope, torch.arange(self._reach)))
        ids: list[int] = []
        spans = []
        wanted = 0
        for sequence in sequences:
            ids.extend(sequence.ids)
            spans.append((sequence.first, sequence.last, sequence.slots.data_ptr(), sequence.head))
            wanted += sequence.last - sequence.head
        logits = torch.empty((wanted, self._spec.vocab))
        self._decoder.step(ids, spans, logits)
        return logits

    def run(self, step: Step, x: torch.Tensor) -> torch.Tensor | None:
        """Logits float32 [R, V] of the step's head rows on the last stage, None on others; ``x`` [T, h] becomes what
        the layers make of it."""
        cos, sin = step.rope(self._rope)
        logits = torch.empty((step.head_rows.shape[0], self._spec.vocab)) if step.parallel.last_stage else None
        spans = torch.tensor(
            [(span.start, span.stop - span.start, span.known, span.slots.data_ptr()) for span in step.spans],
            dtype=torch.int64,
        )
        self._decoder.run(x, step.positions, step.slots, cos, sin, spans.view(-1, 4), step.head_rows, logits)
        return logits


def _known(layer: LayerSpec) -> bool:
    attention = layer.attention
    return attention.kind == "gqa" and not attention.rope.interleaved and attention.rope.dim == attention.head_dim


def _handles(weights: Weights, *names: str) -> list[Any] | None:
    """Handle and bias of each named product; None where one is not packed."""
    found: list[Any] = []
    for name in names:
        matrix = weights[f"{name}.weight"]
        if not isinstance(matrix, PackedMatrix):
            return None
        found += [matrix.handle, weights.get(f"{name}.bias")]
    return found


def _add(decoder: Any, spec: ModelSpec, layer: LayerSpec, weights: Weights, rows: tuple[torch.Tensor, ...]) -> bool:
    attention = layer.attention
    products = _handles(weights, "attn.q", "attn.k", "attn.v", "attn.out")
    if products is None:
        return False
    decoder.add_layer(
        weights["attn.norm"],
        weights["ffn.norm"],
        weights.get("attn.q_norm"),
        weights.get("attn.k_norm"),
        *products,
        rows[0],
        rows[1],
        attention.heads,
        attention.scale,
        attention.window or 0,
        spec.norm_eps,
        attention.norm_eps,
    )
    if not isinstance(layer.ffn, MoESpec):
        dense = _handles(weights, "ffn.gate", "ffn.up", "ffn.down")
        if dense is not None:
            decoder.set_dense(*dense)
        return dense is not None
    return _add_routed(decoder, layer.ffn, weights)


def _add_routed(decoder: Any, ffn: MoESpec, weights: Weights) -> bool:
    stacks = [weights[f"moe.{name}"] for name in ("router.weight", "experts.gate", "experts.up", "experts.down")]
    handles = [one.handle for one in stacks if isinstance(one, PackedMatrix)]
    if len(handles) < len(stacks) or ffn.top_k > native.MOST_SLOTS:
        return False
    router, gate, up, down = handles
    softmax = ffn.score == "softmax"
    decoder.set_routed(
        router,
        weights.get("moe.router.bias"),
        gate,
        up,
        down,
        ffn.top_k,
        ffn.groups,
        ffn.top_groups,
        softmax,
        ffn.renormalise,
        ffn.routed_scale,
    )
    if not ffn.shared_inter:
        return True
    shared = _handles(weights, "moe.shared.gate", "moe.shared.up", "moe.shared.down")
    if shared is not None:
        decoder.set_dense(*shared)
    return shared is not None
