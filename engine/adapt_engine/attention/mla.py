"""Multi-head latent attention (DeepSeek-V2 report, section 2.1): the cache keeps one latent and one key per token."""

from __future__ import annotations

from functools import partial

import torch

from ..config import AttentionSpec
from ..kernels import Ops
from ..model.step import Span, Step
from ..model.weights import Weights
from .spans import Read, attend_spans

__all__ = ["absorbed", "attend", "expanded"]

# Rows of a sequence are few when its keys are this many times as many.
_FEW_ROWS = 8


def attend(step: Step, layer: int, spec: AttentionSpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Output of the attention part for the packed rows x [T, h], before the residual connection: [T, h].

    A sequence with many new rows expands keys and values from the latents; one with few moves the expansion to
    the query and output side instead (section 2.1.2 there).
    """
    ops, tap = step.ops, step.tap
    q = _query(step, spec, weights, x)
    kv = ops.linear(x, weights["attn.kv_a.weight"], weights.get("attn.kv_a.bias"))
    latent = ops.rms_norm(kv[:, : spec.kv_lora], weights["attn.kv_a_norm"], spec.norm_eps)
    if tap:
        tap("attn.kv_a", kv)
        tap("attn.kv_a_norm", latent)
        tap("attn.kv_b", _expand(ops, spec, weights, latent))
    cos, sin = step.rope(spec.rope)
    q_rope = ops.rope_apply(q[..., spec.nope_dim :], cos, sin, spec.rope.interleaved)
    k_rope = ops.rope_apply(kv[:, None, spec.kv_lora :], cos, sin, spec.rope.interleaved)
    if tap:
        tap("attn.q_rope", q_rope)
        tap("attn.k_rope", k_rope)
    step.cache.write(layer, step.slots, (latent, k_rope))
    scale = ops.softmax_scale(spec)
    queries = torch.cat((q[..., : spec.nope_dim], q_rope), dim=-1)

    def one(
        span: Span, queries: torch.Tensor, positions: torch.Tensor, read: Read
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        (latents, turned), seen = step.past(layer, span)
        settings = {
            "q_positions": positions,
            "k_positions": seen,
            "scale": scale,
            "window": spec.window,
        }
        few = ops.strict or (span.stop - span.start) * _FEW_ROWS <= span.known
        attend_span = absorbed if few else expanded
        return attend_span(step.ops, spec, weights, queries, latents, turned, partial(read, **settings))

    context = attend_spans(step, queries, spec.value_dim, one)
    out = step.parallel.linear_rows(ops, context.flatten(1), weights["attn.out.weight"], weights.get("attn.out.bias"))
    if tap:
        tap("attn.context", context)
        tap("attn.out", out)
    return out


def expanded(
    ops: Ops,
    spec: AttentionSpec,
    weights: Weights,
    queries: torch.Tensor,
    latents: torch.Tensor,
    turned: torch.Tensor,
    read: Read,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Context [Tq, H, v] from keys and values expanded for every head: cheap where many rows share them."""
    rows = _expand(ops, spec, weights, latents)
    keys = torch.cat((rows[..., : spec.nope_dim], turned.expand(-1, spec.heads, -1)), dim=-1)
    return read(queries, keys, rows[..., spec.nope_dim :])


def absorbed(
    ops: Ops,
    spec: AttentionSpec,
    weights: Weights,
    queries: torch.Tensor,
    latents: torch.Tensor,
    turned: torch.Tensor,
    read: Read,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same from the latents themselves: q (W l) = (q W) l, and W (sum p l) = sum p (W l).

    All heads share one "key head" of width kv_lora + rope, so decoding does not expand its whole past again.
    Stays in float32 until the context, which is what the expanded form rounds; W commutes with merging partial
    contexts, whose weights sum to one.
    """
    matrix = weights["attn.kv_b.weight"]
    assert isinstance(matrix, torch.Tensor), "latent attention takes this matrix apart: it is not packed"
    per_head = matrix.view(spec.heads, spec.nope_dim + spec.value_dim, spec.kv_lora)
    moved = ops.head_linear(queries[..., : spec.nope_dim], per_head[:, : spec.nope_dim].transpose(1, 2))
    shared = torch.cat((moved, queries[..., spec.nope_dim :].float()), dim=-1)
    keys = torch.cat((latents[:, None], turned), dim=-1)
    mixed, weight = read(shared, keys, latents[:, None])
    context = ops.head_linear(mixed, per_head[:, spec.nope_dim :])
    return context if weight is not None else context.to(latents.dtype), weight


def _query(step: Step, spec: AttentionSpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Queries [T, H, nope + rope], through the low-rank pair where the model has one."""
    ops, tap = step.ops, step.tap
    if spec.q_lora:
        x = ops.linear(x, weights["attn.q_a.weight"], weights.get("attn.q_a.bias"))
        if tap:
            tap("attn.q_a", x)
        x = ops.rms_norm(x, weights["attn.q_a_norm"], spec.norm_eps)
        if tap:
            tap("attn.q_a_norm", x)
    q = ops.linear(x, weights["attn.q.weight"], None).view(x.shape[0], spec.heads, spec.head_dim)
    if tap:
        tap("attn.q", q)
    return q


def _expand(ops: Ops, spec: AttentionSpec, weights: Weights, latent: torch.Tensor) -> torch.Tensor:
    """Keys without position and values, [T, H, nope + v], from latents [T, kv_lora]."""
    rows = ops.linear(latent, weights["attn.kv_b.weight"], None)
    return rows.view(latent.shape[0], spec.heads, spec.nope_dim + spec.value_dim)
