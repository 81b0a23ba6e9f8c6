"""Taps on a transformers model: forward hooks under the names of `pytest_adapt.sites`.

Hooks only look. What a module materialises is tapped as it is; what lies between two operations of one
forward function (rotated queries, attention scores, single experts) is not visible, except for the rotated
queries and keys, which the attention function receives (`watched_attention`).

Who chooses experts has moved between releases: the gate returns logits, weights and ids; or ids and weights (4.x,
DeepSeek-V3); or logits alone, and the experts are then called with ids and weights (5.0 to 5.12).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pytest_adapt import sites

__all__ = ["SITES", "TapRecorder", "watched_attention"]

# Local site -> where it is seen: (module path inside the layer, what to take).
_MODULES: dict[str, tuple[str, str]] = {
    "attn.norm": ("input_layernorm", "out"),
    "attn.q_a": ("self_attn.q_a_proj", "out"),
    "attn.q_a_norm": ("self_attn.q_a_layernorm", "out"),
    "attn.q": ("self_attn.q_proj|self_attn.q_b_proj", "heads"),
    "attn.k": ("self_attn.k_proj", "heads"),
    "attn.v": ("self_attn.v_proj", "heads"),
    "attn.kv_a": ("self_attn.kv_a_proj_with_mqa", "out"),
    "attn.kv_a_norm": ("self_attn.kv_a_layernorm", "out"),
    "attn.kv_b": ("self_attn.kv_b_proj", "heads"),
    "attn.q_norm": ("self_attn.q_norm", "out"),
    "attn.k_norm": ("self_attn.k_norm", "out"),
    "attn.context": ("self_attn.o_proj", "heads_in"),
    "attn.out": ("self_attn.o_proj", "out"),
    "attn.residual": ("post_attention_layernorm", "in"),
    "ffn.norm": ("post_attention_layernorm", "out"),
    "ffn.gate": ("mlp.gate_proj", "out"),
    "ffn.up": ("mlp.up_proj", "out"),
    "ffn.act": ("mlp.down_proj", "in"),
    "moe.routed": ("mlp.experts", "out"),
    "moe.shared": ("mlp.shared_experts", "out"),
    "ffn.out": ("mlp", "out"),
    "residual": ("", "out"),
}
_ROUTER = ("moe.router.logits", "moe.router.ids", "moe.router.weights")
_ROTATED = ("attn.q_rope", "attn.k_rope")
_OUTER = ("embed", "final.norm", "logits")

SITES: tuple[str, ...] = (*(f"layer.*.{name}" for name in (*_MODULES, *_ROUTER, *_ROTATED)), *_OUTER)
"""Patterns of everything that can be tapped; a family shows those that it has."""


class TapRecorder:
    """Hooks of one model. ``batch`` and ``tokens`` describe the running forward pass (set before each one).

    Every value is kept as [batch, tokens, ...] float32 (int64 for expert ids) on the CPU, in ``seen``.
    """

    def __init__(self, model: Any, patterns: tuple[str, ...]) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        self.batch = self.tokens = 0
        self._patterns = patterns
        self._handles: list[Any] = []
        self._rotated: dict[int, int] = {}
        if patterns:
            self._attach(model)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def attention(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
        """What the attention function received: [batch, heads, tokens, d], keys of the cache included."""
        layer = self._rotated.get(id(module))
        if layer is None:
            return
        rope = getattr(module, "qk_rope_head_dim", None)
        q, k = query.transpose(1, 2), key[:, :, -self.tokens :].transpose(1, 2)
        if rope is not None:  # MLA: only the rotated part, shared by all heads
            q, k = q[..., -rope:], k[:, :, :1, -rope:]
        self._keep(sites.site(layer, "attn.q_rope"), q)
        self._keep(sites.site(layer, "attn.k_rope"), k)

    def _attach(self, model: Any) -> None:
        base = model.base_model
        self._hook("embed", model.get_input_embeddings(), "out", None)
        self._hook("final.norm", getattr(base, "norm", None), "out", None)
        for number, layer in enumerate(getattr(base, "layers", ())):
            attention = getattr(layer, "self_attn", None)
            for name, (path, take) in _MODULES.items():
                self._hook(sites.site(number, name), _find(layer, path), take, attention)
            self._hook_router(number, layer)
            if attention is not None and any(self._wanted(sites.site(number, name)) for name in _ROTATED):
                self._rotated[id(attention)] = number

    def _wanted(self, name: str) -> bool:
        return sites.matches(name, self._patterns)

    def _hook(self, name: str, module: nn.Module | None, take: str, attention: Any) -> None:
        if module is None or not self._wanted(name):
            return
        if take in ("in", "heads_in"):

            def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
                self._keep(name, self._shaped(arguments[0], take == "heads_in", name, attention))

            self._handles.append(module.register_forward_pre_hook(before))
            return

        def after(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            self._keep(name, self._shaped(value, take == "heads", name, attention))

        self._handles.append(module.register_forward_hook(after))

    def _hook_router(self, number: int, layer: nn.Module) -> None:
        gate = _find(layer, "mlp.gate") if _find(layer, "mlp.experts") is not None else None
        names = {part: sites.site(number, f"moe.router.{part}") for part in ("logits", "ids", "weights")}
        experts = _find(layer, "mlp.experts")
        if gate is None or experts is None or not any(self._wanted(name) for name in names.values()):
            return

        def keep(part: str, value: torch.Tensor) -> None:
            if self._wanted(names[part]):
                self._keep(names[part], value.reshape(self.batch, self.tokens, -1))

        def chosen(ids: torch.Tensor, weights: torch.Tensor) -> None:
            order = ids.argsort(dim=-1)
            keep("ids", ids.gather(-1, order))
            keep("weights", weights.gather(-1, order))

        def after(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, torch.Tensor):
                keep("logits", output)
            elif isinstance(output, tuple) and len(output) == 3:
                keep("logits", output[0])
                chosen(output[2], output[1])
            elif isinstance(output, tuple) and len(output) == 2 and not output[0].is_floating_point():
                chosen(output[0], output[1])

        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if len(arguments) == 3 and not arguments[1].is_floating_point():
                chosen(arguments[1], arguments[2])

        self._handles.append(gate.register_forward_hook(after))
        self._handles.append(experts.register_forward_pre_hook(before))

    def _shaped(self, value: torch.Tensor, heads: bool, name: str, attention: Any) -> torch.Tensor:
        if value.dim() == 4 and name.endswith("attn.kv_b"):  # [batch, 1, all tokens of the cache, width]
            value = value[:, 0, -self.tokens :]
        if value.shape[:2] != (self.batch, self.tokens):
            value = value.reshape(self.batch, self.tokens, *value.shape[1 if value.dim() == 2 else 2 :])
        if heads:
            value = value.reshape(*value.shape[:-1], -1, _head_width(attention, name.rpartition(".")[2]))
        return value

    def _keep(self, name: str, value: torch.Tensor) -> None:
        kind = torch.float32 if value.is_floating_point() else torch.int64
        self.seen[name] = value.detach().to(device="cpu", dtype=kind)


@contextmanager
def watched_attention(recorder: TapRecorder, implementation: str) -> Iterator[str]:
    """Name of an attention implementation that shows its inputs to ``recorder`` and then calls ``implementation``."""
    transformers: Any = importlib.import_module("transformers")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"adapt_{implementation}_{id(recorder):x}"

    def attend(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> Any:
        recorder.attention(module, query, key)
        own: Any = sys.modules[type(module).__module__]
        called = (
            own.eager_attention_forward
            if implementation == "eager"
            else transformers.AttentionInterface()[implementation]
        )
        return called(module, query, key, *rest, **more)

    transformers.AttentionInterface.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    try:
        yield name
    finally:
        transformers.AttentionInterface._global_mapping.pop(name, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


def _find(layer: nn.Module, path: str) -> nn.Module | None:
    for alternative in path.split("|"):
        found: Any = layer
        for part in filter(None, alternative.split(".")):
            found = getattr(found, part, None)
        if isinstance(found, nn.Module):
            return found
    return None


def _head_width(attention: Any, local: str) -> int:
    if hasattr(attention, "qk_head_dim"):  # MLA
        nope, value = int(attention.qk_nope_head_dim), int(attention.v_head_dim)
        return {"q": int(attention.qk_head_dim), "kv_b": nope + value, "context": value}[local]
    return int(attention.head_dim)
