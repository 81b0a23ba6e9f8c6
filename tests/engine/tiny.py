"""A model small enough to be run ten thousand times, and what it answers when every request is alone.

Its kernels are made batch-invariant by computing each row by itself, with shapes that depend on the row's position
only: whatever the scheduler does, the bits must be those of the serial answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapt_engine import Engine, EngineOptions, SequenceRequest, SequenceResult
from safetensors.numpy import save_file

VOCAB = 13
TAPS = ("layer.1.residual",)
CONTEXT = 24
MOST_NEW = 14
_HIDDEN, _HEADS, _INTER, _LAYERS = 8, 2, 12, 2


def write_tiny(directory: Path) -> Path:
    """A Llama of two layers: in the second, every cached row depends on all tokens before it."""
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    width = _HIDDEN // _HEADS
    tensors = {
        "model.embed_tokens.weight": 2 * matrix(VOCAB, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": 3 * matrix(VOCAB, _HIDDEN),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = np.ones(_HIDDEN, np.float32)
        for name, rows in (("q", _HIDDEN), ("k", width), ("v", width), ("o", _HIDDEN)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = 2 * matrix(rows, _HIDDEN)
        for name in ("gate", "up"):
            tensors[f"{at}.mlp.{name}_proj.weight"] = matrix(_INTER, _HIDDEN)
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(_HIDDEN, _INTER)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rope_theta": 50.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _row_by_row(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The op on each row alone. Copies start at the same alignment, which a product's order of sums may depend on."""

    def rows(x: torch.Tensor, *others: Any) -> torch.Tensor:
        parts = [call(row.clone(), *others) for row in x.split(1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return rows


def _swiglu_by_row(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.cat([call(g.clone(), u.clone()) for g, u in zip(gate.split(1), up.split(1), strict=True)])

    return swiglu


def _query_by_query(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention of each query alone over the keys up to its position."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_positions: torch.Tensor,
        k_positions: torch.Tensor,
        **named: Any,
    ) -> torch.Tensor:
        parts = []
        for row, position in enumerate(q_positions.tolist()):
            seen = position + 1
            keys = {"q_positions": q_positions[row : row + 1], "k_positions": k_positions[:seen]}
            parts.append(call(q[row : row + 1].clone(), k[:seen].clone(), v[:seen].clone(), **keys, **named))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return attention


def open_tiny(directory: Path, **options: Any) -> Engine:
    """The engine on the tiny model, with batch-invariant kernels."""
    engine = Engine.open(directory, EngineOptions(**{"max_context": CONTEXT, "native": False, **options}))
    for op in ("rms_norm", "linear", "lm_head"):
        engine.kernels_registry.wrap(op, _row_by_row)
    engine.kernels_registry.wrap("swiglu", _swiglu_by_row)
    engine.kernels_registry.wrap("attention", _query_by_query)
    return engine


class Serial:
    """Answers of requests served one by one, by an engine that never preempts, shares or cuts anything."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._whole: dict[tuple[object, ...], SequenceResult] = {}

    def answer(self, request: SequenceRequest) -> SequenceResult:
        """The right result of ``request``: tokens, finish, and logits and taps from its first wanted row on."""
        key = (request.prompt, request.temperature, request.seed)
        if key not in self._whole:
            longest = min(MOST_NEW, self._engine.options.max_context - len(request.prompt))
            asked = replace(request, id="serial", max_new_tokens=longest, want_logits=True, first_row=0, stop=())
            (self._whole[key],) = self._engine.run([asked])
        whole = self._whole[key]
        assert whole.error is None and whole.logits is not None
        tokens, finish = whole.tokens[: request.max_new_tokens], "length"
        for place, token in enumerate(tokens):
            if token in request.stop:
                tokens, finish = tokens[: place + 1], "stop"
                break
        fed = len(request.prompt) + max(0, len(tokens) - 1)
        rows = slice(min(request.first_row, fed), fed)
        logits = whole.logits[rows] if request.want_logits else None
        taps = {name: value[rows] for name, value in whole.taps.items()}
        return SequenceResult(request.id, tokens, finish, logits=logits, taps=taps)
