"""RT: the wrong experts, or the right ones with the wrong weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

DEEPSEEK = ("deepseek-v3-odd-pos", "deepseek-v3-odd-neg")


def _routed(change: Callable[[Any, Any, Any, Any], Any]) -> Callable[[Seams], None]:
    """Install ``change(routing, logits, selection_bias, spec)`` behind the route operation."""

    def install(seams: Seams) -> None:
        def wrapper(original: Operation) -> Operation:
            def route(logits: Any, selection_bias: Any, spec: Any) -> Any:
                return change(original(logits, selection_bias, spec), logits, selection_bias, spec)

            return route

        seams.wrap("route", wrapper)

    return install


def _weights_from_biased_scores(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    if bias is None:
        return routing
    biased = routing.selection.gather(-1, routing.ids)
    plain = routing.scores.gather(-1, routing.ids)
    return routing._replace(weights=routing.weights * biased / plain)


def _bias_in_bf16(seams: Seams) -> None:
    def wrapper(original: Operation) -> Operation:
        def route(logits: Any, selection_bias: Any, spec: Any) -> Any:
            return original(logits, None if selection_bias is None else selection_bias.bfloat16().float(), spec)

        return route

    seams.wrap("route", wrapper)


def _scaled_twice(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    return routing._replace(weights=routing.weights * spec.routed_scale)


def _scale_only_with_renormalisation(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    return routing if spec.renormalise else routing._replace(weights=routing.weights / spec.routed_scale)


def _raw_logits(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    return routing if spec.renormalise else routing._replace(weights=logits.gather(-1, routing.ids))


def _always_renormalised(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    total = routing.weights.sum(-1, keepdim=True)
    return routing if spec.renormalise else routing._replace(weights=routing.weights / total * spec.routed_scale)


def _chosen(routing: Any, ids: Any, spec: Any) -> Any:
    """The routing with other experts, weighted as the family does."""
    ids = ids.sort(-1).values
    weights = routing.scores.gather(-1, ids)
    if spec.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return routing._replace(ids=ids, weights=weights * spec.routed_scale)


def _dropped_groups_hold_zero(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    """Experts of dropped groups get 0 instead of minus infinity, and win where kept scores are negative."""
    if spec.groups <= 1:
        return routing
    import torch

    selection = routing.selection
    grouped = selection.unflatten(1, (spec.groups, -1))  # a rank may have no row
    kept = grouped.topk(2, -1).values.sum(-1).topk(spec.top_groups, -1).indices
    mask = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, kept, True)
    masked = grouped.masked_fill(~mask[..., None], 0.0).reshape(selection.shape)
    return _chosen(routing, masked.topk(spec.top_k, -1).indices, spec)


def _zero_padded_lanes(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    """Top-k over lanes padded with 0: with negative scores the padding wins, and the worst expert stands in for it."""
    import torch

    selection = routing.selection
    padded = torch.cat([selection, selection.new_zeros(len(selection), 1)], -1)
    best = padded.topk(spec.top_k, -1).indices
    filler = selection.argmin(-1, keepdim=True).expand_as(best)
    ids = torch.where(best >= selection.shape[1], filler, best)
    return _chosen(routing, ids, spec)


def _scale_left_at_one(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    """The kernel takes no scale and begins with 1."""
    return routing._replace(weights=routing.weights / spec.routed_scale)


def _groups_by_their_best(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    """Groups are ranked by their best expert instead of by the sum of their best two."""
    if spec.groups <= 1:
        return routing
    import torch

    selection = routing.selection
    grouped = selection.reshape(len(selection), spec.groups, -1)
    kept = grouped.amax(-1).topk(spec.top_groups, -1).indices
    mask = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, kept, True)
    masked = grouped.masked_fill(~mask[..., None], float("-inf")).reshape(selection.shape)
    return _chosen(routing, masked.topk(spec.top_k, -1).indices, spec)


def _gate_normalises_again(seams: Seams) -> None:
    """The gate is given the normalised rows, and normalises its input itself."""

    def wrapper(original: Operation) -> Operation:
        def router_logits(x: Any, weight: Any) -> Any:
            wide = x.float()
            return original((wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype), weight)

        return router_logits

    seams.wrap("router_logits", wrapper)


def _router_output_in_bf16(seams: Seams) -> None:
    seams.wrap("router_logits", lambda original: lambda *arguments: original(*arguments).bfloat16().float())


def _lowest_id_left_out(routing: Any, logits: Any, bias: Any, spec: Any) -> Any:
    """Ids shifted by one: the last slot takes the expert after the one chosen."""
    ids = routing.ids.clone()
    ids[:, -1] = (ids[:, -1] + 1) % routing.scores.shape[1]
    return _chosen(routing, ids, spec)


FAULTS = (
    Fault(
        "RT01",
        "Combine weights gathered from biased scores",
        "transformers#39581",
        54,
        "correctness",
        "moe.router.weights",
        DEEPSEEK,
        _routed(_weights_from_biased_scores),
        2,
        difficulty="hard",
    ),
    Fault(
        "RT03",
        "Selection bias rounded to bf16",
        "sglang#37133",
        54,
        "correctness",
        "moe.router.selection",
        DEEPSEEK,
        _bias_in_bf16,
        2,
        difficulty="hard",
    ),
    Fault(
        "RT04",
        "Routed scale applied twice",
        "vllm#24119",
        56,
        "correctness",
        "moe.router.weights",
        DEEPSEEK,
        _routed(_scaled_twice),
        2,
    ),
    Fault(
        "RT09",
        "Routed scale skipped without renormalisation",
        "sglang-jax#1282",
        56,
        "correctness",
        "moe.router.weights",
        ("deepseek-v3-odd-neg",),
        _routed(_scale_only_with_renormalisation),
        2,
    ),
    Fault(
        "RT10",
        "Routed scale left at one",
        "flashinfer#3499",
        54,
        "correctness",
        "moe.router.weights",
        DEEPSEEK,
        _routed(_scale_left_at_one),
        2,
    ),
    Fault(
        "RT11",
        "Raw logits as weights without renormalisation",
        "sglang#35160",
        54,
        "correctness",
        "moe.router.weights",
        ("qwen3-moe-odd-raw",),
        _routed(_raw_logits),
        1,
    ),
    Fault(
        "RT15",
        "Dropped expert groups filled with 0",
        "transformers (DeepSeek-V3 routing), sglang#3705",
        54,
        "correctness",
        "moe.router.ids",
        ("deepseek-v3-odd-neg",),
        _routed(_dropped_groups_hold_zero),
        2,
        difficulty="hard",
    ),
    Fault(
        "RT16",
        "Zero padding wins over negative scores",
        "flashinfer#2822",
        54,
        "correctness",
        "moe.router.ids",
        ("deepseek-v3-odd-neg",),
        _routed(_zero_padded_lanes),
        2,
    ),
    Fault(
        "RT17",
        "Weights always renormalised",
        "flashinfer#2889",
        54,
        "correctness",
        "moe.router.weights",
        ("qwen3-moe-odd-raw",),
        _routed(_always_renormalised),
        1,
    ),
    Fault(
        "RT19",
        "Router logits stored in bf16",
        "sglang#38695",
        54,
        "correctness",
        "moe.router.logits",
        ("qwen3-moe-odd", "deepseek-v3-odd-pos"),
        _router_output_in_bf16,
        0,
        difficulty="hard",
    ),
    Fault(
        "RT23",
        "The gate normalises what is normalised already",
        "NeMo Automodel#1852",
        54,
        "correctness",
        "moe.router.logits",
        ("qwen3-moe-odd", "mixtral-odd"),
        _gate_normalises_again,
        0,
    ),
    Fault(
        "RT91",
        "Groups ranked by their best expert alone",
        "own, after flashinfer#2889",
        54,
        "correctness",
        "moe.router.ids",
        DEEPSEEK,
        _routed(_groups_by_their_best),
        2,
        difficulty="hard",
    ),
    Fault(
        "RT90",
        "The last expert slot is off by one",
        "own, after vllm-ascend#4793",
        54,
        "correctness",
        "moe.router.ids",
        ("qwen3-moe-odd", "mixtral-odd"),
        _routed(_lowest_id_left_out),
        0,
    ),
)
