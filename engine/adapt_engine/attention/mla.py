"""Multi-head latent attention (DeepSeek-V2 report, section 2.1): the cache keeps one latent and one key per token."""

from __future__ import annotations

import torch

from ..config import AttentionSpec
from ..model.step import Step
from ..model.weights import Weights

__all__ = ["attend"]


def attend(step: Step, layer: int, spec: AttentionSpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Output of the attention part for the packed rows x [T, h], before the residual connection: [T, h].

    Cached keys and values are expanded from their latents each time a sequence is read.
    """
    ops, tap = step.ops, step.tap
    q = _query(step, spec, weights, x)
    kv = ops.linear(x, weights["attn.kv_a.weight"], weights.get("attn.kv_a.bias"))
    latent = ops.rms_norm(kv[:, : spec.kv_lora], weights["attn.kv_a_norm"], spec.norm_eps)
    if tap:
        tap("attn.kv_a", kv)
        tap("attn.kv_a_norm", latent)
        tap("attn.kv_b", _expand(step, spec, weights, latent))
    cos, sin = step.rope(spec.rope)
    q_rope = ops.rope_apply(q[..., spec.nope_dim :], cos, sin, spec.rope.interleaved)
    k_rope = ops.rope_apply(kv[:, None, spec.kv_lora :], cos, sin, spec.rope.interleaved)
    if tap:
        tap("attn.q_rope", q_rope)
        tap("attn.k_rope", k_rope)
    q = torch.cat((q[..., : spec.nope_dim], q_rope), dim=-1)
    step.cache.write(layer, step.slots, (latent, k_rope))
    scale = ops.softmax_scale(spec)
    parts = []
    for span in step.spans:
        latents, turned = step.cache.gather(layer, span.slots)
        expanded = _expand(step, spec, weights, latents)
        keys = torch.cat((expanded[..., : spec.nope_dim], turned.expand(-1, spec.heads, -1)), dim=-1)
        parts.append(
            ops.attention(
                q[span.start : span.stop],
                keys,
                expanded[..., spec.nope_dim :],
                q_positions=step.positions[span.start : span.stop],
                k_positions=span.positions,
                scale=scale,
                window=spec.window,
            )
        )
    context = step.join(parts)
    out: torch.Tensor = ops.linear(context.flatten(1), weights["attn.out.weight"], weights.get("attn.out.bias"))
    if tap:
        tap("attn.context", context)
        tap("attn.out", out)
    return out


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


def _expand(step: Step, spec: AttentionSpec, weights: Weights, latent: torch.Tensor) -> torch.Tensor:
    """Keys without position and values, [T, H, nope + v], from latents [T, kv_lora]."""
    rows = step.ops.linear(latent, weights["attn.kv_b.weight"], None)
    return rows.view(latent.shape[0], spec.heads, spec.nope_dim + spec.value_dim)
