"""The C++ kernels, where the extension is built and the CPU can run them; otherwise nothing is offered."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType

import torch

from ..config import MoESpec
from ..errors import EngineError
from . import reference, sampling
from .packed import PackedMatrix, Parameter
from .registry import Implementation, Ops, Routing

__all__ = ["ISA_VARIABLE", "MOST_SLOTS", "isa", "level_of", "load", "offers"]

ISA_VARIABLE = "ADAPT_ENGINE_ISA"
_LEVELS = ("avx512", "avx2", "scalar")
MOST_SLOTS = 64
"""Experts of a row that native kernels add up."""


def load() -> ModuleType | None:
    """The extension module, or None where the package was built without it."""
    try:
        return importlib.import_module("adapt_engine._native")
    except ModuleNotFoundError:
        return None


def isa(module: ModuleType) -> str:
    """Instruction set to use: the best that the CPU has, or the one that ADAPT_ENGINE_ISA names.

    Raises EngineError for an unknown name or one that this CPU lacks.
    """
    supported = tuple(module.supported_isas())
    asked = os.environ.get(ISA_VARIABLE, "")
    if not asked:
        return str(supported[0])
    if asked not in _LEVELS:
        raise EngineError(f"{ISA_VARIABLE}={asked}: must be one of {', '.join(_LEVELS)}")
    if asked not in supported:
        raise EngineError(f"{ISA_VARIABLE}={asked}: this CPU or build has {', '.join(supported)}")
    return asked


def level_of(module: ModuleType) -> int:
    """The instruction set to use, as the extension numbers them."""
    return _LEVELS.index(isa(module))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a matrix of its last axis; copied only where rows are not dense or not evenly apart."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    rows = x.reshape(-1, x.shape[-1])
    # torch calls an empty tensor contiguous whatever its strides are.
    return rows.contiguous() if rows.numel() else rows.new_empty(rows.shape)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """``x`` [rows, heads, width] with dense heads."""
    return x if x.stride(2) == 1 or not x.numel() else x.contiguous()


def _ascending(positions: torch.Tensor) -> bool:
    """Whether there is at most one key at a position, which is what the kernel has room for."""
    return bool((positions[1:] > positions[:-1]).all())


def _packed(module: ModuleType, weight: Parameter) -> PackedMatrix:
    """A plain tensor, which no checkpoint was loaded into, is packed for the call."""
    return weight if isinstance(weight, PackedMatrix) else PackedMatrix(module, weight)


class _Kernels:
    """The native ops of one instruction set. Each is a method with the signature of the op."""

    def __init__(self, module: ModuleType, level: int) -> None:
        self._module = module
        self._level = level

    def embedding(self, table: Parameter, ids: torch.Tensor) -> torch.Tensor:
        return table.rows(ids) if isinstance(table, PackedMatrix) else reference.embedding(table, ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        self._module.rms_norm(_rows(x), weight, _rows(out), eps, self._level)
        return out

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._module.swiglu(_rows(gate), _rows(up), _rows(out), self._level)
        return out

    def rope_apply(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        if interleaved:
            return reference.rope_apply(x, cos, sin, interleaved)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._module.rotate(_rows(x), _rows(cos), _rows(sin), _rows(out), self._level)
        return out

    def _product(
        self, x: torch.Tensor, weight: Parameter, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype)
        if not out.numel():
            return out
        if not x.shape[1]:
            return out.zero_() if bias is None else out.copy_(bias)
        matrix = _packed(self._module, weight)
        self._module.linear(_rows(x), matrix.handle, matrix.index, bias, out, self._level)
        return out

    def linear(self, x: torch.Tensor, weight: Parameter, bias: torch.Tensor | None) -> torch.Tensor:
        return self._product(x, weight, bias, x.dtype)

    def linear_partial(self, x: torch.Tensor, weight: Parameter, bias: torch.Tensor | None) -> torch.Tensor:
        return self._product(x, weight, bias, torch.float32)

    def linear_sums(
        self, x: torch.Tensor, weight: Parameter, ranges: torch.Tensor, largest: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.empty((ranges.shape[0], x.shape[0], weight.shape[0]))
        if out.numel():
            matrix = _packed(self._module, weight)
            rows = out.flatten(0, 1)
            self._module.linear_sums(_rows(x), matrix.handle, matrix.index, ranges, largest, rows, self._level)
        return out

    def linear_finish(
        self,
        sums: torch.Tensor,
        weight: Parameter,
        bias: torch.Tensor | None,
        largest: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if not isinstance(weight, PackedMatrix):
            return reference.linear_finish(sums, weight, bias, largest, dtype)
        out = torch.empty(sums.shape, dtype=dtype)
        if out.numel():
            self._module.linear_finish(_rows(sums), weight.handle, weight.index, largest, bias, out, self._level)
        return out

    def router_logits(self, x: torch.Tensor, weight: Parameter) -> torch.Tensor:
        return self._product(x, weight, None, torch.float32)

    def lm_head(self, x: torch.Tensor, weight: Parameter) -> torch.Tensor:
        return self._product(x, weight, None, x.dtype).float()

    def route(self, logits: torch.Tensor, selection_bias: torch.Tensor | None, spec: MoESpec) -> Routing:
        rows = logits.shape[0]
        scores, selection = torch.empty(logits.shape), torch.empty(logits.shape)
        ids, weights = torch.empty((rows, spec.top_k), dtype=torch.int64), torch.empty((rows, spec.top_k))
        self._module.route(
            _rows(logits),
            selection_bias,
            spec.groups,
            spec.top_groups,
            spec.score == "softmax",
            spec.renormalise,
            spec.routed_scale,
            scores,
            selection,
            ids,
            weights,
            self._level,
        )
        return Routing(scores, selection, ids, weights)

    def head_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """In float32, head by head; every head's matrix is packed for the call."""
        out = torch.empty((*x.shape[:2], weight.shape[1]))
        for head in range(x.shape[1]):
            out[:, head] = self._product(x[:, head], weight[head].float(), None, torch.float32)
        return out

    def sample(
        self, logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, seed: int, position: int
    ) -> int:
        if temperature == 0 and (drawn := int(self._module.greedy(logits.contiguous(), self._level))) >= 0:
            return drawn
        return sampling.sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, position=position)

    def combine(self, down: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, slots, width = down.shape
        if slots > MOST_SLOTS:
            return reference.combine(down, weights)
        out = torch.empty((rows, width), dtype=down.dtype)
        if out.numel():
            self._module.combine(_rows(down), weights.contiguous(), out, self._level)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_positions: torch.Tensor,
        k_positions: torch.Tensor,
        scale: float,
        window: int | None,
        dtype: torch.dtype,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=dtype)
        self._module.attention(
            _heads(q),
            _heads(k),
            _heads(v),
            q_positions.contiguous(),
            k_positions.contiguous(),
            scale,
            window or 0,
            out,
            weights,
            self._level,
        )
        return out

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_positions: torch.Tensor,
        k_positions: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        if not _ascending(k_positions):
            return reference.attention(
                q, k, v, q_positions=q_positions, k_positions=k_positions, scale=scale, window=window
            )
        k, v = k.to(q.dtype), v.to(q.dtype)
        return self._attend(q, k, v, q_positions, k_positions, scale, window, q.dtype, None)

    def attention_partial(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_positions: torch.Tensor,
        k_positions: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _ascending(k_positions):
            return reference.attention_partial(
                q, k, v, q_positions=q_positions, k_positions=k_positions, scale=scale, window=window
            )
        k, v = k.to(q.dtype), v.to(q.dtype)
        weights = torch.empty(q.shape[:2])
        context = self._attend(q, k, v, q_positions, k_positions, scale, window, torch.float32, weights)
        return context, weights

    def make_experts(self, ops: Ops) -> Callable[..., torch.Tensor]:
        """Fused where nobody looks at what lies between; op by op, with the same bits, where somebody does."""
        apart = reference.make_experts(ops)

        def experts(
            x: torch.Tensor,
            ids: torch.Tensor,
            weights: torch.Tensor,
            gate_w: Parameter,
            up_w: Parameter,
            down_w: Parameter,
            tap: reference.Tap | None,
        ) -> torch.Tensor:
            if tap is not None or ids.shape[1] > MOST_SLOTS or not gate_w.shape[1]:
                return apart(x, ids, weights, gate_w, up_w, down_w, tap)
            gate, up, down = (_packed(self._module, one) for one in (gate_w, up_w, down_w))
            out = torch.empty(x.shape, dtype=x.dtype)
            self._module.experts(
                _rows(x),
                ids.contiguous(),
                weights.contiguous(),
                gate.handle,
                up.handle,
                down.handle,
                out,
                self._level,
            )
            return out

        return experts

    def make_expert_rows(self, ops: Ops) -> Callable[..., torch.Tensor]:
        """As `make_experts`, without weights."""
        apart = reference.make_expert_rows(ops)

        def expert_rows(
            x: torch.Tensor,
            ids: torch.Tensor,
            gate_w: Parameter,
            up_w: Parameter,
            down_w: Parameter,
            partial: bool,
            tap: reference.Tap | None,
        ) -> torch.Tensor:
            if tap is not None or not gate_w.shape[1] or not gate_w.shape[0]:
                return apart(x, ids, gate_w, up_w, down_w, partial, tap)
            gate, up, down = (_packed(self._module, one) for one in (gate_w, up_w, down_w))
            out = torch.empty(x.shape, dtype=torch.float32 if partial else x.dtype)
            slots = ids.contiguous()[:, None]
            self._module.expert_rows(_rows(x), slots, gate.handle, up.handle, down.handle, out, self._level)
            return out

        return expert_rows


def offers() -> list[Implementation]:
    """Native implementations, empty where the extension is not built."""
    module = load()
    if module is None:
        return []
    level = isa(module)
    kernels = _Kernels(module, level_of(module))
    every = frozenset({torch.float32, torch.bfloat16, torch.float16})
    # A row is reduced in one order, whatever its neighbours, the threads and the cuts at segment borders are.
    traits = frozenset({"batch_invariant", "layout_invariant"})
    plain: dict[str, Callable[..., object]] = {
        "embedding": kernels.embedding,
        "rms_norm": kernels.rms_norm,
        "swiglu": kernels.swiglu,
        "rope_apply": kernels.rope_apply,
        "linear": kernels.linear,
        "linear_partial": kernels.linear_partial,
        "linear_sums": kernels.linear_sums,
        "linear_finish": kernels.linear_finish,
        "router_logits": kernels.router_logits,
        "route": kernels.route,
        "combine": kernels.combine,
        "lm_head": kernels.lm_head,
        "sample": kernels.sample,
        "attention": kernels.attention,
        "attention_partial": kernels.attention_partial,
    }
    fused = {
        "experts": (kernels.make_experts, frozenset({"linear", "swiglu", "combine"})),
        "expert_rows": (kernels.make_expert_rows, frozenset({"linear", "linear_partial", "swiglu"})),
    }
    name = f"native-{level}"
    return [
        *(Implementation(op, name, call, every, traits, priority=10) for op, call in plain.items()),
        # torch's batched product is quicker, but depends on the number of rows: for mode strict only.
        Implementation("head_linear", name, kernels.head_linear, every, traits, priority=-1),
        *(
            Implementation(op, name, make, every, traits, priority=10, composite=True, fuses=parts)
            for op, (make, parts) in fused.items()
        ),
    ]
