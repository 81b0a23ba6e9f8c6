"""The blocks of a transformer, each beside its source, in the arithmetic of `numerics`.

T tokens, H query heads, G key-value heads, d head width. All arrays are [T, ...]; no cache, no batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .numerics import Numerics
from .spec import GroupedQuery, Latent, RopeSpec

__all__ = [
    "attend",
    "feed_forward",
    "frequencies",
    "grouped_query_attention",
    "latent_attention",
    "rms_norm",
    "rotary_tables",
    "rotate",
    "sigmoid",
    "silu",
    "weighted",
]

# Query rows of one attention block: memory is rows x T per head, never T x T.
_ROWS = 256


def rms_norm(n: Numerics, name: str, x: np.ndarray, weight: str, eps: float) -> np.ndarray:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis (arXiv 1910.07467, epsilon inside the root)."""
    mean_square = n.total(x * x) / x.shape[-1]
    unit = n.inner(f"{name}.unit", x * (1.0 / np.sqrt(mean_square + eps)))
    return n.site(name, n.parameter(weight) * unit)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)); exp may overflow to infinity, whose reciprocal is the right 0."""
    with np.errstate(over="ignore"):
        result: np.ndarray = 1.0 / (1.0 + np.exp(-x))
    return result


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)) (arXiv 1702.03118)."""
    with np.errstate(over="ignore"):
        result: np.ndarray = x / (1.0 + np.exp(-x))
    return result


def frequencies(rope: RopeSpec) -> np.ndarray:
    """Angle per position of each channel pair, float64 [dim / 2]."""
    plain: np.ndarray = rope.theta ** -(np.arange(0, rope.dim, 2) / rope.dim)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return _llama3(rope, plain) if rope.kind == "llama3" else plain


def _yarn(rope: RopeSpec, plain: np.ndarray) -> np.ndarray:
    """NTK-by-parts (arXiv 2309.00071 §3.2), ramp over channel pairs as in DeepSeek's and transformers' code."""

    def pair_of(rotations: float) -> float:
        """Channel pair that turns ``rotations`` times within the original range."""
        return rope.dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step, without the division by zero
    interpolated = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)
    blended: np.ndarray = plain / rope.factor * interpolated + plain * (1 - interpolated)
    return blended


def _llama3(rope: RopeSpec, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1's scaling: short wavelengths stay, long ones are divided, smooth between (meta-llama, model.py)."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    return np.where(
        turns < rope.low_freq_factor, plain / rope.factor, np.where(turns > rope.high_freq_factor, plain, blended)
    )


def rotary_tables(n: Numerics, rope: RopeSpec, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine [T, dim / 2] of position x frequency, times the table's scale.

    Exact runs form angles in float64: at position 10^6 they are right to 10^-10. An emulation forms them in
    float32 from frequencies that are as wrong as float32 allows (`_erring`): the yardstick knows.
    """
    found = frequencies(rope)
    angles = positions.astype(n.dtype)[:, None] * (found if n.dtype == np.float64 else _erring(rope, found))
    return n.inner("rope.cos", np.cos(angles) * rope.scale), n.inner("rope.sin", np.sin(angles) * rope.scale)


def _erring(rope: RopeSpec, exact: np.ndarray) -> np.ndarray:
    """Frequencies [dim / 2] in float32, each off by the bound of the eager code's arithmetic, with alternating signs.

    A model has a dozen of them, and every position multiplies the same dozen errors: two libraries whose powers
    differ by an ulp differ twofold at long positions, so one library's luck is no yardstick. In units of half an
    ulp, theta^x errs by ln(theta) x (the rounding of x) plus 1, its reciprocal by 1, interpolation by 2 more.
    """
    x = np.arange(0, rope.dim, 2) / rope.dim
    units = math.log(rope.theta) * x + 2.0 * (x > 0) + 2.0 * (rope.kind != "default")
    sign = np.where(np.arange(len(x)) % 2, -1.0, 1.0)
    erring: np.ndarray = (exact * (1.0 + sign * units * 2.0**-24)).astype(np.float32)
    return erring


def rotate(
    n: Numerics, name: str, x: np.ndarray, tables: tuple[np.ndarray, np.ndarray], interleaved: bool
) -> np.ndarray:
    """Rotate the channel pairs of x [T, heads, dim] (arXiv 2104.09864, eq. 34).

    Pairs are (i, i + dim/2), or (2i, 2i + 1) when interleaved; the result holds first members, then second ones.
    """
    cos, sin = (table[:, None, :] for table in tables)
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    straight = n.inner(f"{name}.cos", np.concatenate([first * cos, second * cos], axis=-1))
    crossed = n.inner(f"{name}.sin", np.concatenate([-second * sin, first * sin], axis=-1))
    return n.site(name, straight + crossed)


def attend(
    n: Numerics, attn: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int
) -> np.ndarray:
    """Causal softmax attention: q [T, H, d], k [T, G, d], v [T, G, dv] -> context [T, H, dv], a site.

    See `weighted`.
    """
    return n.site(f"{attn}.context", weighted(n, attn, q, k, v, scale, window))


def weighted(
    n: Numerics, attn: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int
) -> np.ndarray:
    """The values that each query sees, weighted by causal softmax attention; the shapes of `attend`.

    Query t sees keys max(0, t - window + 1) .. t: with a window exactly ``window`` keys, itself included.
    Query head h reads key-value head h * G // H.
    """
    tokens, heads = q.shape[:2]
    repeats = heads // k.shape[1]
    # Heads first and contiguous: BLAS multiplies per head.
    q, k, v = (
        np.ascontiguousarray(np.swapaxes(x, 0, 1))
        for x in (q, np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1))
    )
    context = np.empty((tokens, heads, v.shape[-1]), n.dtype)
    for start in range(0, tokens, _ROWS):
        stop = min(start + _ROWS, tokens)
        first = max(0, start - window + 1) if window else 0
        query, key = np.arange(start, stop)[:, None], np.arange(first, stop)
        hidden = (key > query) | (key <= query - window if window else np.False_)
        raw = n.inner(f"{attn}.scores.raw", n.matmul(q[:, start:stop], np.swapaxes(k[:, first:stop], 1, 2)))
        scores = n.inner(f"{attn}.scores", raw * scale)
        np.copyto(scores, -np.inf, where=hidden)
        np.subtract(scores, scores.max(axis=-1, keepdims=True), out=scores)
        weights = np.exp(scores, out=scores)
        probs = n.inner(f"{attn}.probs", weights / n.total(weights))
        context[start:stop] = np.swapaxes(n.matmul(probs, v[:, first:stop]), 0, 1)
    return context


def grouped_query_attention(
    n: Numerics,
    attn: str,
    weights: str,
    x: np.ndarray,
    spec: GroupedQuery,
    tables: tuple[np.ndarray, np.ndarray],
    window: int,
    norm_eps: float,
) -> np.ndarray:
    """Grouped-query attention (arXiv 2305.13245), with per-head norms of q and k where the family has them."""
    shape = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    q, k, v = (
        n.site(
            f"{attn}.{part}",
            n.linear(x, f"{weights}.{part}_proj.weight", f"{weights}.{part}_proj.bias" if spec.bias else None).reshape(
                len(x), heads, spec.head_dim
            ),
        )
        for part, heads in shape.items()
    )
    if spec.qk_norm:
        q = rms_norm(n, f"{attn}.q_norm", q, f"{weights}.q_norm.weight", norm_eps)
        k = rms_norm(n, f"{attn}.k_norm", k, f"{weights}.k_norm.weight", norm_eps)
    q = rotate(n, f"{attn}.q_rope", q, tables, interleaved=False)
    k = rotate(n, f"{attn}.k_rope", k, tables, interleaved=False)
    context = attend(n, attn, q, k, v, spec.scale, window).reshape(len(x), -1)
    out_bias = f"{weights}.o_proj.bias" if spec.bias else None
    return n.site(f"{attn}.out", n.linear(context, f"{weights}.o_proj.weight", out_bias))


def latent_attention(
    n: Numerics,
    attn: str,
    weights: str,
    x: np.ndarray,
    spec: Latent,
    tables: tuple[np.ndarray, np.ndarray],
    interleaved: bool,
    window: int,
) -> np.ndarray:
    """Multi-head latent attention (arXiv 2405.04434 §2.1), keys and values expanded from the latent. With
    ``n.absorbed`` queries and contexts go through the expanding weights instead, and attention works on the latent.

    Each head's query and key are [position-free part | rotated part]; the rotated key is shared by all heads.
    """
    tokens = len(x)
    down_bias = spec.bias
    if spec.q_lora:
        bias = f"{weights}.q_a_proj.bias" if down_bias else None
        low = n.site(f"{attn}.q_a", n.linear(x, f"{weights}.q_a_proj.weight", bias))
        low = rms_norm(n, f"{attn}.q_a_norm", low, f"{weights}.q_a_layernorm.weight", spec.norm_eps)
        q = n.linear(low, f"{weights}.q_b_proj.weight")
    else:
        q = n.linear(x, f"{weights}.q_proj.weight")
    q = n.site(f"{attn}.q", q.reshape(tokens, spec.heads, spec.nope + spec.rope))

    bias = f"{weights}.kv_a_proj_with_mqa.bias" if down_bias else None
    compressed = n.site(f"{attn}.kv_a", n.linear(x, f"{weights}.kv_a_proj_with_mqa.weight", bias))
    latent, shared_key = compressed[:, : spec.kv_lora], compressed[:, None, spec.kv_lora :]
    latent = rms_norm(n, f"{attn}.kv_a_norm", latent, f"{weights}.kv_a_layernorm.weight", spec.norm_eps)
    expanded = n.linear(latent, f"{weights}.kv_b_proj.weight").reshape(tokens, spec.heads, spec.nope + spec.value)
    expanded = n.site(f"{attn}.kv_b", expanded)

    q_rope = rotate(n, f"{attn}.q_rope", q[..., spec.nope :], tables, interleaved)
    k_rope = rotate(n, f"{attn}.k_rope", shared_key, tables, interleaved)
    if n.absorbed:
        up = n.parameter(f"{weights}.kv_b_proj.weight").reshape(spec.heads, spec.nope + spec.value, spec.kv_lora)
        q_latent = n.inner(f"{attn}.q_latent", _by_head(n, q[..., : spec.nope], up[:, : spec.nope]))
        held = latent[:, None, :]
        q, k = np.concatenate([q_latent, q_rope], axis=-1), np.concatenate([held, k_rope], axis=-1)
        seen = n.inner(f"{attn}.context_latent", weighted(n, attn, q, k, held, spec.scale, window))
        context = n.site(f"{attn}.context", _by_head(n, seen, np.swapaxes(up[:, spec.nope :], 1, 2)))
    else:
        q = np.concatenate([q[..., : spec.nope], q_rope], axis=-1)
        k = np.concatenate([expanded[..., : spec.nope], np.repeat(k_rope, spec.heads, axis=1)], axis=-1)
        context = attend(n, attn, q, k, expanded[..., spec.nope :], spec.scale, window)
    out_bias = f"{weights}.o_proj.bias" if spec.bias else None
    return n.site(f"{attn}.out", n.linear(context.reshape(tokens, -1), f"{weights}.o_proj.weight", out_bias))


def _by_head(n: Numerics, x: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """x [T, H, a] times each head's matrix [H, a, b]: [T, H, b]."""
    return np.swapaxes(n.matmul(np.ascontiguousarray(np.swapaxes(x, 0, 1)), matrices), 0, 1)


def feed_forward(
    n: Numerics, keep: Callable[[str, np.ndarray], np.ndarray], ffn: str, weights: str, x: np.ndarray, bias: bool
) -> np.ndarray:
    """SwiGLU, down(silu(gate(x)) * up(x)) (arXiv 2002.05202), up to the down projection's result.

    ``keep`` passes the named values on: ``n.site``, or ``n.inner`` inside a shared expert.
    """

    def project(part: str, y: np.ndarray) -> np.ndarray:
        return n.linear(y, f"{weights}.{part}_proj.weight", f"{weights}.{part}_proj.bias" if bias else None)

    gate = keep(f"{ffn}.gate", project("gate", x))
    up = keep(f"{ffn}.up", project("up", x))
    act = keep(f"{ffn}.act", n.inner(f"{ffn}.silu", silu(gate)) * up)
    return project("down", act)
