"""AT: attention that sees the wrong keys, at the wrong scale, or a cache that lost some."""

from __future__ import annotations

import itertools
from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

GQA = ("qwen3-moe-odd", "mixtral-odd", "llama-odd")


def _attention(seams: Seams, **changes: Any) -> None:
    """Call attention with some arguments replaced: ``name=function(arguments) -> value``."""

    def wrapper(original: Operation) -> Operation:
        def attention(*arguments: Any, **named: Any) -> Any:
            return original(*arguments, **{**named, **{key: change(named) for key, change in changes.items()}})

        return attention

    seams.wrap("attention", wrapper)


def _inclusive_window(seams: Seams) -> None:
    _attention(seams, window=lambda named: named["window"] + 1 if named["window"] else named["window"])


def _scaled_twice(seams: Seams) -> None:
    _attention(seams, scale=lambda named: named["scale"] ** 2)


def _unscaled(seams: Seams) -> None:
    _attention(seams, scale=lambda named: 1.0)


def _value_scale(seams: Seams) -> None:
    """One value channel of layer 1 is read 1.5 times too large."""

    def wrapper(original: Operation) -> Operation:
        def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
            if seams.layer() == 1:
                v = v.clone()
                v[..., 3] *= 1.5
            return original(q, k, v, **named)

        return attention

    seams.wrap("attention", wrapper)


def _heads_mapped_in_turn(seams: Seams) -> None:
    """Query head i reads KV head i mod G instead of i // (H / G)."""

    def wrapper(original: Operation) -> Operation:
        def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
            heads, groups = q.shape[1], k.shape[1]
            if groups in (1, heads):
                return original(q, k, v, **named)
            order = [index % groups for index in range(heads)]
            return original(q, k[:, order], v[:, order], **named)

        return attention

    seams.wrap("attention", wrapper)


def _chunk_positions_restart(seams: Seams) -> None:
    """Each prefill chunk counts its positions from zero."""

    def wrapper(original: Operation) -> Operation:
        def rope_tables(spec: Any, positions: Any) -> Any:
            chunked = len(positions) > 1 and int(positions[0]) > 0
            return original(spec, positions - positions[0] if chunked else positions)

        return rope_tables

    seams.wrap("rope_tables", wrapper)


def _oldest_key_lost(seams: Seams) -> None:
    """Decode reads a cache whose first slot was overwritten by the newest row."""

    def wrapper(original: Operation) -> Operation:
        def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
            if len(q) == 1 and len(k) > 1:
                k, v = k.clone(), v.clone()
                k[0], v[0] = k[-1], v[-1]
            return original(q, k, v, **named)

        return attention

    seams.wrap("attention", wrapper)


def _residual_left_out(seams: Seams) -> None:
    """The first of layer 2's two sums passes on the branch alone."""

    def wrapper(original: Operation) -> Operation:
        calls = itertools.count(1)

        def add(residual: Any, x: Any) -> Any:
            first = next(calls) % 2 == 1
            return x if first and seams.layer() == 2 else original(residual, x)

        return add

    seams.wrap("add", wrapper)


FAULTS = (
    Fault(
        "AT05",
        "Sliding window sees one key too many",
        "transformers#39408",
        52,
        "correctness",
        "attn.context",
        ("mixtral-odd",),
        _inclusive_window,
        0,
        difficulty="hard",
    ),
    Fault(
        "AT07",
        "Positions restart in each prefill chunk",
        "transformers#43082",
        75,
        "correctness",
        "attn.q_rope",
        GQA,
        _chunk_positions_restart,
        0,
    ),
    Fault(
        "AT18",
        "The first KV slot is overwritten in decode",
        "vllm#43869",
        69,
        "correctness",
        "attn.context",
        ("qwen3-moe-odd", "llama-odd"),
        _oldest_key_lost,
        0,
        difficulty="hard",
    ),
    Fault(
        "AT25", "Attention scaled twice", "transformers#38290", 56, "correctness", "attn.context", GQA, _scaled_twice, 0
    ),
    Fault("AT26", "Attention not scaled", "mlc-llm#3426", 56, "correctness", "attn.context", GQA, _unscaled, 0),
    Fault(
        "AT27",
        "One value channel scaled in one layer",
        "own, after Megatron-Bridge#4155",
        56,
        "correctness",
        "attn.context",
        (*GQA, "deepseek-v3-odd-pos"),
        _value_scale,
        1,
    ),
    Fault(
        "AT95",
        "Residual of one layer left out",
        "own, after vllm#24021",
        56,
        "correctness",
        "attn.residual",
        GQA,
        _residual_left_out,
        2,
    ),
    Fault(
        "AT90",
        "KV heads assigned to query heads in turn",
        "own, after sglang#32858",
        56,
        "correctness",
        "attn.context",
        GQA,
        _heads_mapped_in_turn,
        0,
    ),
)
