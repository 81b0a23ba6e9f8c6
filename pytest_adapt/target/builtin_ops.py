"""Single operators of the built-in engine: what its kernel registry resolved, and the reference beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_adapt.target.protocol import TargetError
from pytest_adapt.target.torch_arrays import differentiated, from_torch, to_torch

if TYPE_CHECKING:
    import torch
    from adapt_engine.kernels import KernelRegistry, Ops

__all__ = ["BuiltinOps"]

Tensors = Mapping[str, "torch.Tensor"]
Compute = Callable[["Ops", Tensors, Mapping[str, Any]], dict[str, "torch.Tensor"]]

_REFERENCE = "reference"
_GRADIENTS = frozenset({"linear", "grouped_linear", "rms_norm", "swiglu", "rotary", "attention", "softmax", "combine"})


class BuiltinOps:
    """Operators over the registry of an opened engine. "reference" are the plain implementations, resolved apart: what
    is put into the registry in use does not reach them."""

    def __init__(self, registry: KernelRegistry) -> None:
        from adapt_engine.kernels import KernelRegistry, reference

        self._used = registry
        self._plain = KernelRegistry(reference.offers(), registry.dtype, "fast")

    def offered(self) -> dict[str, tuple[str, ...]]:
        """Operator -> implementations, the one in use first."""
        names = self._used.names()
        found = {}
        for name, (kernel, _) in _TABLE.items():
            own = names[kernel]
            others = (_REFERENCE,) if own != _REFERENCE else ()
            found[name] = (own, *others, *_OTHERS.get(name, {}))
        return found

    @property
    def gradients(self) -> frozenset[str]:
        """Operators that autograd passes through in their reference implementation."""
        return _GRADIENTS

    def run(self, name: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """See `pytest_adapt.target.protocol.Target`. Raises TargetError for an operator or implementation that is not
        there."""
        offered = self.offered().get(name, ())
        asked = str(attributes.get("implementation", "")) or (offered[0] if offered else "")
        if asked not in offered:
            raise TargetError(f"builtin: operator {name} has no implementation {asked!r}; it has {', '.join(offered)}")
        wrt = tuple(attributes.get("gradient", ()))
        # A native kernel has no gradient; the reference has autograd's.
        plain = bool(wrt) or (asked == _REFERENCE != offered[0])
        ops = self._plain.ops if plain else self._used.ops
        compute = _OTHERS.get(name, {}).get(asked, _TABLE[name][1])
        if wrt:
            return differentiated(lambda tensors: compute(ops, tensors, attributes), inputs, wrt)
        found = compute(ops, {key: to_torch(array) for key, array in inputs.items()}, attributes)
        return {key: from_torch(value) for key, value in found.items()}


def _linear(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.linear(x["x"], x["weight"], x.get("bias"))}


def _grouped_linear(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.head_linear(x["x"], x["weight"])}


def _router_logits(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.router_logits(x["x"], x["weight"])}


def _rms_norm(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.rms_norm(x["x"], x["weight"], a["eps"])}


def _add_rms_norm(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    total = ops.add(x["residual"], x["x"])
    return {"residual": total, "out": ops.rms_norm(total, x["weight"], a["eps"])}


def _swiglu(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.swiglu(x["gate"], x["up"])}


def _rotary(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from adapt_engine.config import RopeSpec

    renamed = {"original_max_position": "original_context", "scale": "attention_factor"}
    spec = RopeSpec(**{renamed.get(name, name): value for name, value in a.items() if name not in _RESERVED})
    cos, sin = ops.rope_tables(spec, x["positions"])
    return {"out": ops.rope_apply(x["x"], cos, sin, spec.interleaved)}


def _attention(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.attention(x["q"], x["k"], x["v"], **_reading(len(x["q"]), len(x["k"]), a))}


def _merged(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Attention in pieces of the keys, as ranks of a sequence share them, merged by their log-sum-exp."""
    import torch

    settings = _reading(len(x["q"]), len(x["k"]), a)
    parts = []
    for some in torch.arange(len(x["k"])).chunk(3):
        settings["k_positions"] = some
        parts.append(ops.attention_partial(x["q"], x["k"][some], x["v"][some], **settings))
    contexts, weights = (torch.stack(list(pieces)) for pieces in zip(*parts, strict=True))
    return {"out": ops.attention_merge(contexts, weights).to(x["q"].dtype)}


def _reading(rows: int, keys: int, a: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    positions = torch.arange(keys)
    asking = positions[keys - rows :]
    return {"q_positions": asking, "k_positions": positions, "scale": a["scale"], "window": a["window"] or None}


def _latent(absorb: bool) -> Compute:
    def compute(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        from adapt_engine.attention import mla

        spec: Any = SimpleNamespace(
            heads=a["heads"], nope_dim=a["nope"], value_dim=a["value"], kv_lora=x["latent"].shape[1]
        )
        settings = _reading(len(x["q"]), len(x["latent"]), a)

        def read(*tensors: torch.Tensor) -> tuple[torch.Tensor, None]:
            return ops.attention(*tensors, **settings), None

        way = mla.absorbed if absorb else mla.expanded
        stored = {"attn.kv_b.weight": x["weight"]}
        return {"out": way(ops, spec, stored, x["q"], x["latent"], x["k_rope"][:, None], read)[0]}

    return compute


def _softmax(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The router's: the engine has no other one of its own."""
    spec = _moe_spec({"experts": x["x"].shape[1], "chosen": 1, "scoring": "softmax", "renormalise": True})
    return {"out": ops.route(x["x"], None, spec).scores}


def _route(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = ops.route(x["logits"], x.get("bias"), _moe_spec(a, "bias" in x))
    return {name: getattr(found, name) for name in ("scores", "selection", "ids", "weights")}


def _moe_spec(a: Mapping[str, Any], biased: bool = False) -> Any:
    from adapt_engine.config import MoESpec

    return MoESpec(
        experts=a["experts"],
        top_k=a["chosen"],
        inter=1,
        score=a["scoring"],
        renormalise=a["renormalise"],
        selection_bias=biased,
        groups=a.get("groups", 1),
        top_groups=a.get("kept", 1),
        routed_scale=a.get("scale", 1.0),
    )


def _experts(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.experts(x["x"], x["ids"], x["weights"], x["gate"], x["up"], x["down"], None)}


def _expert_rows(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Slot by slot and combined afterwards, as ranks of an expert group do."""
    rows, chosen = x["ids"].shape
    sent = x["x"].repeat_interleave(chosen, dim=0)
    down = ops.expert_rows(sent, x["ids"].reshape(-1), x["gate"], x["up"], x["down"], False, None)
    return {"out": ops.combine(down.view(rows, chosen, sent.shape[1]), x["weights"])}


def _combine(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.combine(x["down"], x["weights"])}


def _embedding(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.embedding(x["table"], x["ids"])}


def _head(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"out": ops.lm_head(x["x"], x["weight"])}


def _sample(ops: Ops, x: Tensors, a: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    how = {name: a[name] for name in ("temperature", "top_k", "top_p", "seed")}
    return {"ids": torch.tensor([ops.sample(x["logits"], position=at, **how) for at in x["positions"].tolist()])}


_RESERVED = ("implementation", "gradient")
# Operator -> (the engine's kernel that names its implementation, how it is computed).
_TABLE: dict[str, tuple[str, Compute]] = {
    "linear": ("linear", _linear),
    "grouped_linear": ("head_linear", _grouped_linear),
    "router_logits": ("router_logits", _router_logits),
    "rms_norm": ("rms_norm", _rms_norm),
    "add_rms_norm": ("rms_norm", _add_rms_norm),
    "swiglu": ("swiglu", _swiglu),
    "rotary": ("rope_apply", _rotary),
    "attention": ("attention", _attention),
    "latent_attention": ("head_linear", _latent(absorb=False)),
    "softmax": ("route", _softmax),
    "route": ("route", _route),
    "experts": ("experts", _experts),
    "combine": ("combine", _combine),
    "embedding": ("embedding", _embedding),
    "head": ("lm_head", _head),
    "sample": ("sample", _sample),
}
# Other ways through the engine's kernels that must give the same.
_OTHERS: dict[str, dict[str, Compute]] = {
    "attention": {"merged": _merged},
    "latent_attention": {"absorbed": _latent(absorb=True)},
    "experts": {"rows": _expert_rows},
}
