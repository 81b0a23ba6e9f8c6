"""Procedural weights: every tensor of a family, its shape, its magnitude, and the counter-based draw.

Each value is an integer of at most 7 bits times a power of two, so it is exact in float32, bfloat16 and
float16 alike: one set of reference numbers serves every floating-point precision. Magnitudes keep
activations of order one, attention scores at a standard deviation of about 1.7 (queries attend to
something), router logits decisive and output logits at about 3. Norm weights are distinct, some negative;
biases are not zero; selection biases are float32 values off the bfloat16 grid, offset far from zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_adapt.models.entries import ModelEntry, ModelError

__all__ = ["TensorSpec", "draw", "tensors"]

_SCORE_STD = 1.7
_LOGIT_STD = 3.0
# Softmax scores err in proportion to their size, so a flat router keeps margins wide beside the largest error.
_ROUTER_STD = {"softmax": 1.0, "sigmoid": 1.6}
_NORM_RMS = 1.04  # of |w| uniform in [0.5, 1.5]
_ACT_RMS = 0.75  # of silu(g) * u for g, u of standard deviation 1.2


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint. ``draw``: normal (symmetric about 0), norm (about 1, one in eight negative)
    or selection (float32, ``offset`` +- ``std``)."""

    name: str
    shape: tuple[int, ...]
    std: float
    draw: str = "normal"
    offset: float = 0.0

    @property
    def dtype(self) -> str:
        return "F32" if self.draw == "selection" else "BF16"


def _counter(seed: int, name: str, count: int) -> np.ndarray:
    """uint64 [count]: SplitMix64 (Steele, Lea, Flood 2014) of a counter, keyed by seed and tensor name."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw(spec: TensorSpec, seed: int) -> np.ndarray:
    """float32 array of ``spec.shape``; the same bits on every machine and numpy version."""
    bits = _counter(seed, spec.name, math.prod(spec.shape))
    if spec.draw == "selection":
        unit = (bits >> np.uint64(40)).astype(np.float64) / 2.0**24
        return (spec.offset + spec.std * (2.0 * unit - 1.0)).astype(np.float32).reshape(spec.shape)
    high = bits >> np.uint64(32)
    if spec.draw == "norm":
        # |w| in [std/2, 3 std/2]; 42..126 times a power of two when std is 1.3, 32..96 when it is 1.
        top, step = _grid(1.5 * spec.std)
        low = round(top / 3)
        size = low + ((high * np.uint64(top - low + 1)) >> np.uint64(32)).astype(np.int64)
        value = np.where(bits & np.uint64(7), size, -size)
    else:
        top, step = _grid(math.sqrt(3.0) * spec.std)
        value = ((high * np.uint64(2 * top + 1)) >> np.uint64(32)).astype(np.int64) - top
    return (value.astype(np.float64) * step).astype(np.float32).reshape(spec.shape)


def _grid(largest: float) -> tuple[int, float]:
    """(integer in 64..127, power of two) whose product is nearest to ``largest``."""
    exponent = math.floor(math.log2(largest)) - 6
    return min(127, round(largest / 2.0**exponent)), 2.0**exponent


def tensors(entry: ModelEntry) -> Iterator[TensorSpec]:
    """Every tensor of a procedural model under its Hugging Face checkpoint name, in checkpoint order.

    Raises ModelError for a family this module does not know.
    """
    families = {"qwen3_moe": _gqa_layer, "mixtral": _gqa_layer, "llama": _gqa_layer, "deepseek_v3": _mla_layer}
    if entry.family not in families:
        raise ModelError(f"model {entry.name}: unknown family {entry.family!r}; known: {', '.join(sorted(families))}")
    c = entry.config
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    # A tied head reads the embedding, so there the embedding's size is set by the logits.
    stream = _LOGIT_STD / math.sqrt(hidden) if c["tie_word_embeddings"] else 1.0
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden), stream)
    for layer in range(c["num_hidden_layers"]):
        yield from families[entry.family](entry, layer, stream)
    yield TensorSpec("model.norm.weight", (hidden,), 1.0, "norm")
    if not c["tie_word_embeddings"]:
        yield TensorSpec("lm_head.weight", (vocab, hidden), _LOGIT_STD / (_NORM_RMS * math.sqrt(hidden)))


def _linear(
    name: str, rows: int, columns: int, out: float, bias: bool = False, into: float = 1.0
) -> Iterator[TensorSpec]:
    """A projection whose output has standard deviation ``out`` for inputs of rms ``into``."""
    yield TensorSpec(f"{name}.weight", (rows, columns), out / (into * math.sqrt(columns)))
    if bias:
        yield TensorSpec(f"{name}.bias", (rows,), 0.3 * out)


def _gqa_layer(entry: ModelEntry, layer: int, stream: float) -> Iterator[TensorSpec]:
    c = entry.config
    hidden, heads, kv, width = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    at = f"model.layers.{layer}"
    bias = bool(c.get("attention_bias", False))
    side = math.sqrt(_SCORE_STD)
    yield TensorSpec(f"{at}.input_layernorm.weight", (hidden,), 1.0, "norm")
    yield from _linear(f"{at}.self_attn.q_proj", heads * width, hidden, side, bias, _NORM_RMS)
    yield from _linear(f"{at}.self_attn.k_proj", kv * width, hidden, side, bias, _NORM_RMS)
    yield from _linear(f"{at}.self_attn.v_proj", kv * width, hidden, 1.0, bias, _NORM_RMS)
    yield from _linear(f"{at}.self_attn.o_proj", hidden, heads * width, stream, bias)
    if entry.family == "qwen3_moe":
        for which in ("q_norm", "k_norm"):
            yield TensorSpec(f"{at}.self_attn.{which}.weight", (width,), side / _NORM_RMS, "norm")
    yield TensorSpec(f"{at}.post_attention_layernorm.weight", (hidden,), 1.0, "norm")
    yield from _feed_forward(entry, layer, stream)


def _mla_layer(entry: ModelEntry, layer: int, stream: float) -> Iterator[TensorSpec]:
    c = entry.config
    hidden, heads, q_lora, kv_lora = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    at = f"model.layers.{layer}"
    # YaRN multiplies the softmax scale by the square of 0.1 mscale_all_dim ln(factor) + 1.
    scaling = c["rope_scaling"]
    gain = (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0) ** 2
    side = math.sqrt(_SCORE_STD / gain)
    yield TensorSpec(f"{at}.input_layernorm.weight", (hidden,), 1.0, "norm")
    yield from _linear(f"{at}.self_attn.q_a_proj", q_lora, hidden, 1.0, into=_NORM_RMS)
    yield TensorSpec(f"{at}.self_attn.q_a_layernorm.weight", (q_lora,), 1.0, "norm")
    yield from _linear(f"{at}.self_attn.q_b_proj", heads * (nope + rope), q_lora, side, into=_NORM_RMS)
    # Latent rows are normalised later, the rotary rows are not: one matrix, one scale, fit for the latter.
    yield from _linear(f"{at}.self_attn.kv_a_proj_with_mqa", kv_lora + rope, hidden, side, into=_NORM_RMS)
    yield TensorSpec(f"{at}.self_attn.kv_a_layernorm.weight", (kv_lora,), 1.0, "norm")
    yield from _linear(f"{at}.self_attn.kv_b_proj", heads * (nope + value), kv_lora, side, into=_NORM_RMS)
    yield from _linear(f"{at}.self_attn.o_proj", hidden, heads * value, stream, into=side)
    yield TensorSpec(f"{at}.post_attention_layernorm.weight", (hidden,), 1.0, "norm")
    yield from _feed_forward(entry, layer, stream)


def _feed_forward(entry: ModelEntry, layer: int, stream: float) -> Iterator[TensorSpec]:
    c = entry.config
    at = f"model.layers.{layer}"
    if entry.family == "llama":
        yield from _swiglu(f"{at}.mlp", _GATED, c, c["intermediate_size"], 0.7 * stream, bool(c.get("mlp_bias", False)))
    elif entry.family == "mixtral":
        chosen = c["num_experts_per_tok"]
        yield from _router(f"{at}.block_sparse_moe.gate", c["num_local_experts"], c["hidden_size"])
        for expert in range(c["num_local_experts"]):
            size = 0.7 * stream * math.sqrt(chosen)
            yield from _swiglu(f"{at}.block_sparse_moe.experts.{expert}", _NUMBERED, c, c["intermediate_size"], size)
    elif entry.family == "qwen3_moe":
        if layer in c["mlp_only_layers"]:
            yield from _swiglu(f"{at}.mlp", _GATED, c, c["intermediate_size"], 0.7 * stream)
            return
        yield from _experts(f"{at}.mlp", c, c["num_experts"], 0.7 * stream)
    elif layer < c["first_k_dense_replace"]:
        yield from _swiglu(f"{at}.mlp", _GATED, c, c["intermediate_size"], 0.7 * stream)
    else:
        # Chosen sigmoid scores average about 0.8 where they are not renormalised to 1/k.
        scale = c["routed_scaling_factor"] * (1.0 if c["norm_topk_prob"] else 0.8 * c["num_experts_per_tok"])
        yield from _experts(f"{at}.mlp", c, c["n_routed_experts"], 0.7 * stream / scale, entry.recipe["selection_bias"])
        shared = c["n_shared_experts"] * c["moe_intermediate_size"]
        yield from _swiglu(f"{at}.mlp.shared_experts", _GATED, c, shared, 0.5 * stream)


def _experts(at: str, c: Any, count: int, out: float, selection_bias: float | None = None) -> Iterator[TensorSpec]:
    yield from _router(f"{at}.gate", count, c["hidden_size"], c.get("scoring_func", "softmax"))
    if selection_bias is not None:
        yield TensorSpec(f"{at}.gate.e_score_correction_bias", (count,), 0.12, "selection", selection_bias)
    for expert in range(count):
        size = out * math.sqrt(c["num_experts_per_tok"])
        yield from _swiglu(f"{at}.experts.{expert}", _GATED, c, c["moe_intermediate_size"], size)


def _router(name: str, count: int, hidden: int, score: str = "softmax") -> Iterator[TensorSpec]:
    yield from _linear(name, count, hidden, _ROUTER_STD[score], into=_NORM_RMS)


_GATED = ("gate_proj", "up_proj", "down_proj")
_NUMBERED = ("w1", "w3", "w2")


def _swiglu(
    at: str, names: tuple[str, str, str], c: Any, inner: int, out: float, bias: bool = False
) -> Iterator[TensorSpec]:
    hidden = c["hidden_size"]
    gate, up, down = names
    yield from _linear(f"{at}.{gate}", inner, hidden, 1.2, bias, _NORM_RMS)
    yield from _linear(f"{at}.{up}", inner, hidden, 1.2, bias, _NORM_RMS)
    yield from _linear(f"{at}.{down}", hidden, inner, out, bias, _ACT_RMS)
