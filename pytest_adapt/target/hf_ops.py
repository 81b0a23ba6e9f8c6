"""Single operators of transformers and torch, code that nobody here wrote, named as in `pytest_adapt.operators`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_adapt.target.protocol import TargetError, UnsupportedOp
from pytest_adapt.target.torch_arrays import differentiated, from_torch, to_torch

if TYPE_CHECKING:
    import torch

__all__ = ["HfOps"]

Tensors = Mapping[str, "torch.Tensor"]
Compute = Callable[[Tensors, Mapping[str, Any]], dict[str, "torch.Tensor"]]


class HfOps:
    """Operators on one device. Eager code of the model families, and torch's functions that it is made of."""

    def __init__(self, device: str) -> None:
        self._device = device

    def offered(self) -> dict[str, tuple[str, ...]]:
        """Operator -> where its code comes from."""
        return {name: (source,) for name, (source, _) in _TABLE.items()}

    @property
    def gradients(self) -> frozenset[str]:
        """Operators that have a gradient: autograd passes through all of them."""
        return frozenset(_TABLE)

    def run(self, name: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """See `pytest_adapt.target.protocol.Target`. Raises TargetError for an operator that is not there."""
        if name not in _TABLE:
            raise TargetError(f"hf: no operator {name}; operators are {', '.join(_TABLE)}")
        compute = _TABLE[name][1]

        def there(tensors: Tensors) -> dict[str, torch.Tensor]:
            return compute({key: tensor.to(self._device) for key, tensor in tensors.items()}, attributes)

        wrt = tuple(attributes.get("gradient", ()))
        if wrt:
            return differentiated(there, inputs, wrt)
        found = there({key: to_torch(array) for key, array in inputs.items()})
        return {key: from_torch(value) for key, value in found.items()}


def _linear(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from torch.nn import functional

    return {"out": functional.linear(x["x"], x["weight"], x.get("bias"))}


def _router_logits(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from torch.nn import functional

    return {"out": functional.linear(x["x"].float(), x["weight"])}


def _grouped_linear(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    return {"out": torch.bmm(x["x"].transpose(0, 1), x["weight"].transpose(1, 2)).transpose(0, 1)}


def _rms_norm(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module: Any = SimpleNamespace(weight=x["weight"], variance_epsilon=a["eps"])
    return {"out": LlamaRMSNorm.forward(module, x["x"])}


def _add_rms_norm(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    total = x["residual"] + x["x"]
    return {"residual": total, **_rms_norm({"x": total, "weight": x["weight"]}, a)}


def _swiglu(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from torch.nn import functional

    return {"out": functional.silu(x["gate"]) * x["up"]}


def _softmax(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": x["x"].softmax(-1)}


def _rotary(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Plain frequencies; the scaled ones need a whole configuration."""
    from transformers import LlamaConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    if a["kind"] != "default":
        raise UnsupportedOp(f"rotary scaling {a['kind']}")
    config = LlamaConfig(head_dim=a["dim"], hidden_size=a["dim"], num_attention_heads=1, rope_theta=a["theta"])
    config.rope_parameters = {"rope_type": "default", "rope_theta": a["theta"]}
    table = LlamaRotaryEmbedding(config).to(x["x"].device)
    heads = x["x"].transpose(0, 1)[None]
    cos, sin = table(x["x"], x["positions"][None])
    turn = apply_rotary_pos_emb_interleave if a["interleaved"] else apply_rotary_pos_emb
    return {"out": turn(heads, heads, cos, sin)[0][0].transpose(0, 1)}


def _attention(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    import torch
    from transformers.models.llama.modeling_llama import eager_attention_forward

    q, k, v = (x[name].transpose(0, 1)[None] for name in ("q", "k", "v"))
    rows, keys = q.shape[2], k.shape[2]
    seen = torch.arange(keys, device=q.device)
    asking = seen[keys - rows :, None]
    hidden = seen > asking
    if a["window"]:
        hidden |= seen <= asking - a["window"]
    mask = torch.zeros((1, 1, rows, keys), dtype=q.dtype, device=q.device)
    mask = mask.masked_fill(hidden, torch.finfo(q.dtype).min)
    module: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    return {"out": eager_attention_forward(module, q, k, v, mask, scaling=a["scale"])[0][0]}


def _embedding(x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from torch.nn import functional

    return {"out": functional.embedding(x["ids"], x["table"])}


_TABLE: dict[str, tuple[str, Compute]] = {
    "linear": ("torch", _linear),
    "grouped_linear": ("torch", _grouped_linear),
    "router_logits": ("torch", _router_logits),
    "rms_norm": ("transformers", _rms_norm),
    "add_rms_norm": ("transformers", _add_rms_norm),
    "swiglu": ("torch", _swiglu),
    "rotary": ("transformers", _rotary),
    "attention": ("transformers", _attention),
    "softmax": ("torch", _softmax),
    "embedding": ("torch", _embedding),
    "head": ("torch", _linear),
}
