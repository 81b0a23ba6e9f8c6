"""Plain torch implementation of every op: the twin that each faster kernel must match.

Rounding: tensors between ops are in the engine's dtype; inside an op sums, norms, softmax and rotation run in
float32 and are rounded once. That is never coarser than the eager code of the model families.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..config import AttentionSpec, MoESpec, RopeSpec
from .registry import Implementation, Ops, Routing
from .sampling import sample

__all__ = ["offers"]

Tap = Callable[[str, torch.Tensor], None]

# Elements of a block of attention scores: bounds memory to one row block, never S x S.
_SCORE_BLOCK = 1 << 22


def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``table`` [V, h] for ``ids`` [T]."""
    return F.embedding(ids, table)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019).

    Statistics in float32; rounded to the dtype of x before and after the weight, as the families' code does.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] @ weight [out, in]^T + bias; float32 sums."""
    return F.linear(x, weight, bias)


def linear_partial(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` whose result is a summand: float32 [T, out], not rounded to the dtype of x."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def linear_sums(
    x: torch.Tensor, weight: torch.Tensor, ranges: torch.Tensor, largest: torch.Tensor | None
) -> torch.Tensor:
    """`linear` over parts of the depth, before bias and rounding: float32 [n, T, out] for ``ranges`` int64 [n, 2]."""
    parts = [linear_partial(x[:, first:last], weight[:, first:last], None) for first, last in ranges.tolist()]
    return torch.stack(parts)


def linear_finish(
    sums: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    largest: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What `linear` makes of its whole sums float32 [T, out]: bias added, rounded once to ``dtype``."""
    return (sums if bias is None else sums + bias.float()).to(dtype)


def linear_upcast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` for float16 on a CPU, where torch's own many-row product is several times slower than this."""
    if x.shape[0] == 1:
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide).to(x.dtype)


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, in] times each head's own matrix [H, out, in], float32 [T, H, out]: not rounded on the way."""
    return torch.bmm(x.float().transpose(0, 1), weight.float().transpose(1, 2)).transpose(0, 1)


@lru_cache(maxsize=64)
def rope_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Angle per position of each pair, float64 [dim / 2] (sources: `RopeSpec`); shared, not to be written to."""
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float64) / spec.dim
    plain = spec.theta**-exponent
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        # 1 above the high band (kept), 0 below the low band (divided by factor), linear between.
        turns = spec.original_context * plain / (2 * math.pi)
        keep = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
        return plain * (keep + (1 - keep) / spec.factor)
    if spec.kind == "yarn":
        low, high = _yarn_range(spec)
        ramp = (torch.arange(spec.dim // 2, dtype=torch.float64) - low) / (high - low)
        keep = 1 - ramp.clamp(0, 1)
        return plain * (keep + (1 - keep) / spec.factor)
    return plain


def _yarn_range(spec: RopeSpec) -> tuple[float, float]:
    """Pairs below the first bound keep their frequency, above the second are interpolated."""

    def pair(rotations: float) -> float:
        reach = math.log(spec.original_context / (rotations * 2 * math.pi))
        return spec.dim * reach / (2 * math.log(spec.theta))

    low, high = pair(spec.beta_fast), pair(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    # Equal bounds would divide by zero; the published code widens them by this much.
    return (low, high) if low != high else (low, high + 0.001)


def rope_tables(spec: RopeSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every angle, float32 [T, dim / 2]; angles in float64 so that far positions stay exact."""
    angles = positions.double()[:, None] * rope_frequencies(spec)
    return (angles.cos() * spec.attention_factor).float(), (angles.sin() * spec.attention_factor).float()


def rope_apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of the last axis of x [T, H, dim]; float32 inside, output pairs always (i, i + dim / 2)."""
    wide = x.float()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def softmax_scale(spec: AttentionSpec) -> float:
    """Factor on query . key."""
    return spec.scale


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v of one sequence, causal by position, in blocks of query rows.

    q [Tq, H, d], k [Tk, G, d], v [Tk, G, dv], positions ascending; G divides H. A key at position p is visible
    to a query at position t where t - window < p <= t. Float32 inside; returns [Tq, H, dv] in the dtype of q.
    """
    out, _ = _attend(q, k, v, q_positions, k_positions, scale, window, torch.softmax)
    return out


def attention_partial(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` over some of a sequence's keys: context float32 [Tq, H, dv] and natural log-sum-exp [Tq, H].

    Without a visible key a row has context 0 and log-sum-exp -inf: it weighs nothing in a merge.
    """
    return _attend(q.float(), k, v, q_positions, k_positions, scale, window, _softmax_or_nothing)


def attention_merge(contexts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Context float32 [T, H, dv] over all keys from partial ones [n, T, H, dv] and their log-sum-exp [n, T, H].

    Summed in the order of the parts; at least one of them has a visible key.
    """
    share = (weights - weights.amax(0)).exp()
    total, norm = contexts[0] * share[0, ..., None], share[0]
    for part, own in zip(contexts[1:], share[1:], strict=True):
        total, norm = total + part * own[..., None], norm + own
    return total / norm[..., None]


def reach(at: torch.Tensor, k_positions: torch.Tensor, window: int | None) -> tuple[int, int]:
    """Keys [begin, end) outside of which none contributes to any query of the ascending positions ``at``: they come
    after the last query, or are out of every query's window."""
    end = int(torch.searchsorted(k_positions, at[-1], right=True))
    begin = 0 if window is None else int(torch.searchsorted(k_positions, at[0] - window, right=True))
    return min(begin, end), end


def _softmax_or_nothing(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax in which a row without finite scores is all zeros."""
    return scores.softmax(dim).nan_to_num(nan=0.0) if scores.shape[dim] else scores


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    window: int | None,
    softmax: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context in the dtype of q; log-sum-exp float32 [Tq, H] only where rows may be without keys."""
    rows, heads, _ = q.shape
    keys, groups, _ = k.shape
    out = torch.empty((rows, heads, v.shape[-1]), dtype=q.dtype)
    partial = softmax is not torch.softmax
    weight = torch.full((rows, heads), -math.inf) if partial else torch.empty(0)
    wide_k = k.float().permute(1, 2, 0)
    wide_v = v.float().transpose(0, 1)
    step = max(1, _SCORE_BLOCK // (heads * max(1, keys)))
    for start in range(0, rows, step):
        at = q_positions[start : start + step]
        begin, end = reach(at, k_positions, window)
        count = at.shape[0]
        block = q[start : start + count].float().view(count, groups, heads // groups, q.shape[-1])
        block = block.permute(1, 2, 0, 3).reshape(groups, heads // groups * count, q.shape[-1])
        scores = torch.bmm(block, wide_k[..., begin:end]) * scale
        seen = k_positions[None, begin:end]
        hidden = seen > at[:, None]
        if window is not None:
            hidden |= seen <= at[:, None] - window
        scores = scores.view(groups, heads // groups, count, end - begin).masked_fill_(hidden, -math.inf)
        if partial:
            weight[start : start + count] = scores.logsumexp(-1).permute(2, 0, 1).reshape(count, heads)
        probs = softmax(scores, dim=-1).view(groups, heads // groups * count, end - begin)
        mixed = torch.bmm(probs, wide_v[:, begin:end])
        mixed = mixed.view(groups, heads // groups, count, v.shape[-1]).permute(2, 0, 1, 3)
        out[start : start + count] = mixed.reshape(count, heads, v.shape[-1])
    return out, weight


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer 2020), float32 inside, rounded once."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Router projection in float32 from the rounded input: [T, h] x [E, h] -> [T, E]."""
    return F.linear(x.float(), weight.float())


def route(logits: torch.Tensor, selection_bias: torch.Tensor | None, spec: MoESpec) -> Routing:
    """Choose ``spec.top_k`` experts per row; ties go to the lowest id, NaN is never preferred.

    Softmax routing with optional renormalisation (Mixtral, Qwen3), or sigmoid routing with a selection bias
    and group limits (DeepSeek-V3 report, section 2.1.2). The bias acts on the choice, never on the weights.
    """
    scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
    selection = scores if selection_bias is None else scores + selection_bias
    eligible = selection.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if spec.groups > 1:
        grouped = eligible.view(eligible.shape[0], spec.groups, spec.experts // spec.groups)
        rank = grouped.topk(2, dim=-1).values.sum(-1)
        kept = _best(rank, spec.top_groups)
        dropped = torch.ones_like(rank, dtype=torch.bool).scatter_(1, kept, False)
        eligible = grouped.masked_fill(dropped[..., None], -math.inf).view_as(eligible)
    ids = _best(eligible, spec.top_k).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if spec.renormalise:
        # 1e-20 is the published guard of the sigmoid form; a softmax sum cannot vanish.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if spec.score == "sigmoid" else 0.0))
    return Routing(scores, selection, ids, weights * spec.routed_scale)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest values of each row; a stable sort, because topk leaves ties open."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def make_expert_rows(ops: Ops) -> Callable[..., torch.Tensor]:
    """The ``expert_rows`` op over the ``linear`` and ``swiglu`` ops of the same registry."""

    def expert_rows(
        x: torch.Tensor,
        ids: torch.Tensor,
        gate_w: torch.Tensor,
        up_w: torch.Tensor,
        down_w: torch.Tensor,
        partial: bool,
        tap: Tap | None,
    ) -> torch.Tensor:
        """Each row through its own expert; ``partial`` results are summands, float32."""
        down = torch.empty((x.shape[0], x.shape[1]), dtype=torch.float32 if partial else x.dtype)
        kept = _run_experts(ops, x, ids, 1, (gate_w, up_w, down_w), down, tap is not None)
        if tap is not None:
            for name, value in kept.items():
                tap(f"moe.experts.{name}", value)
        return down

    return expert_rows


def make_experts(ops: Ops) -> Callable[..., torch.Tensor]:
    """The ``experts`` op over the ``linear``, ``swiglu`` and ``combine`` ops of the same registry."""

    def experts(
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_w: torch.Tensor,
        up_w: torch.Tensor,
        down_w: torch.Tensor,
        tap: Tap | None,
    ) -> torch.Tensor:
        """Weighted sum over each row's experts: float32, in the order of ids, rounded once."""
        rows, slots = ids.shape
        flat = torch.empty((rows * slots, x.shape[1]), dtype=x.dtype)
        kept = _run_experts(ops, x, ids.reshape(-1), slots, (gate_w, up_w, down_w), flat, tap is not None)
        down = flat.view(rows, slots, x.shape[1])
        if tap is not None:
            for name, value in kept.items():
                tap(f"moe.experts.{name}", value.view(rows, slots, value.shape[1]))
            tap("moe.experts.down", down)
        return ops.combine(down, weights)

    return experts


def _run_experts(
    ops: Ops,
    x: torch.Tensor,
    ids: torch.Tensor,
    slots: int,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    down: torch.Tensor,
    keep: bool,
) -> dict[str, torch.Tensor]:
    """Fill ``down`` [n, h]: slot i is row i // ``slots`` of x through expert ``ids[i]``. Returns what is to be kept."""
    gate_w, up_w, down_w = weights
    product = ops.linear_partial if down.dtype != x.dtype else ops.linear
    kept: dict[str, torch.Tensor] = {}
    if keep:
        kept = {name: torch.empty((ids.shape[0], gate_w.shape[1]), dtype=x.dtype) for name in ("gate", "up", "act")}
    order = ids.sort(stable=True).indices
    start = 0
    for expert, count in enumerate(torch.bincount(ids, minlength=gate_w.shape[0]).tolist()):
        if not count:
            continue
        where = order[start : start + count]
        start += count
        chosen = x[where // slots]
        gate, up = ops.linear(chosen, gate_w[expert], None), ops.linear(chosen, up_w[expert], None)
        act = ops.swiglu(gate, up)
        down[where] = product(act, down_w[expert], None)
        if kept:
            kept["gate"][where], kept["up"][where], kept["act"][where] = gate, up, act
    return kept


def combine(down: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum [T, h] of expert outputs [T, k, h], weights float32 [T, k]: float32, in slot order, rounded once."""
    routed = down[:, 0].float() * weights[:, 0, None]
    for slot in range(1, down.shape[1]):
        routed += down[:, slot].float() * weights[:, slot, None]
    return routed.to(down.dtype)


def shared_combine(routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Routed plus shared output."""
    return routed + shared


def add(residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Residual connection."""
    return residual + x


def lm_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits, float32 [T, V]; the product is rounded to the dtype of x, as the families' code does."""
    return F.linear(x, weight).float()


def lm_head_upcast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`lm_head` for float16 (see `linear_upcast`)."""
    return linear_upcast(x, weight, None).float()


def offers() -> list[Implementation]:
    """Reference implementations of all ops."""
    every = frozenset({torch.float32, torch.bfloat16, torch.float16})
    half = frozenset({torch.float16})
    rowwise = frozenset({"batch_invariant", "layout_invariant"})
    table: list[tuple[str, Callable[..., object], frozenset[torch.dtype], frozenset[str]]] = [
        ("embedding", embedding, every, rowwise),
        ("rms_norm", rms_norm, every, frozenset()),
        ("linear", linear, every - half, frozenset()),
        ("linear", linear_upcast, half, frozenset()),
        ("linear_partial", linear_partial, every, frozenset()),
        ("linear_sums", linear_sums, every, frozenset()),
        ("linear_finish", linear_finish, every, rowwise),
        ("head_linear", head_linear, every, frozenset()),
        ("rope_tables", rope_tables, every, rowwise),
        ("rope_apply", rope_apply, every, rowwise),
        ("attention", attention, every, frozenset()),
        ("attention_partial", attention_partial, every, frozenset()),
        ("attention_merge", attention_merge, every, frozenset()),
        ("softmax_scale", softmax_scale, every, rowwise),
        # torch's silu rounds the last elements of a buffer otherwise than those before: not a property of the row.
        ("swiglu", swiglu, every, frozenset()),
        ("router_logits", router_logits, every, frozenset()),
        ("route", route, every, frozenset()),
        ("combine", combine, every, rowwise),
        ("shared_combine", shared_combine, every, rowwise),
        ("add", add, every, rowwise),
        ("lm_head", lm_head, every - half, frozenset()),
        ("lm_head", lm_head_upcast, half, frozenset()),
        ("sample", sample, every, rowwise),
    ]
    plain = [Implementation(op, "reference", call, dtypes, traits) for op, call, dtypes, traits in table]
    return [
        *plain,
        # Row by row they only call other ops, which a mode asks for the same traits.
        Implementation("expert_rows", "reference", make_expert_rows, every, rowwise, composite=True),
        Implementation("experts", "reference", make_experts, every, rowwise, composite=True),
    ]
