"""LC and relatives: what goes wrong only far into a context, at a border, or beyond an index that is too narrow."""

from __future__ import annotations

from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

FULL = ("needle-llama",)
BOTH = ("needle-llama", "needle-mixtral")
_RECALL = "recalled"


def _gathered(seams: Seams, change: Any) -> None:
    """Replace what attention reads of the cache: ``change(cache, original, layer, slots) -> rows``."""

    def wrapper(original: Operation) -> Operation:
        def gather(cache: Any, layer: int, slots: Any) -> Any:
            return change(cache, original, layer, slots)

        return gather

    seams.wrap("kv.gather", wrapper)


def _attention(seams: Seams, change: Any) -> None:
    """Change the arguments of attention: ``change(q, k, v, named) -> (q, k, v, named)``."""

    def wrapper(original: Operation) -> Operation:
        def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
            q, k, v, named = change(q, k, v, named)
            return original(q, k, v, **named)

        return attention

    seams.wrap("attention", wrapper)


def _lost_page(seams: Seams) -> None:
    """The page that begins at position 1024 reads as zeros."""

    def change(cache: Any, original: Operation, layer: int, slots: Any) -> Any:
        parts = tuple(part.clone() for part in original(cache, layer, slots))
        for part in parts:
            part[1024 : 1024 + cache.page_size] = 0
        return parts

    _gathered(seams, change)


def _overwritten_page(seams: Seams) -> None:
    """The page that begins at position 512 holds what belongs to the page behind it."""

    def change(cache: Any, original: Operation, layer: int, slots: Any) -> Any:
        first, size = 512, cache.page_size
        if len(slots) >= first + 2 * size:
            slots = slots.clone()
            slots[first : first + size] = slots[first + size : first + 2 * size].clone()
        return original(cache, layer, slots)

    _gathered(seams, change)


def _last_slot_of_a_page(seams: Seams) -> None:
    """The last row of each page is not written."""

    def wrapper(original: Operation) -> Operation:
        def write(cache: Any, layer: int, slots: Any, rows: Any) -> Any:
            kept = slots % cache.page_size != cache.page_size - 1
            zero = tuple(row * kept.view(-1, *[1] * (row.dim() - 1)).to(row.dtype) for row in rows)
            return original(cache, layer, slots, zero)

        return write

    seams.wrap("kv.write", wrapper)


def _last_key_before_a_chunk(seams: Seams) -> None:
    """A chunk of a prompt does not see the key right before its first row."""

    def change(q: Any, k: Any, v: Any, named: Any) -> Any:
        before = int(named["q_positions"][0]) - 1
        if len(q) > 1 and before >= 0:
            kept = named["k_positions"] != before
            k, v = k[kept], v[kept]
            named = {**named, "k_positions": named["k_positions"][kept]}
        return q, k, v, named

    _attention(seams, change)


def _window_where_none_is(seams: Seams) -> None:
    _attention(seams, lambda q, k, v, named: (q, k, v, {**named, "window": named["window"] or 1000}))


def _inclusive_window(seams: Seams) -> None:
    def change(q: Any, k: Any, v: Any, named: Any) -> Any:
        return q, k, v, {**named, "window": named["window"] and named["window"] + 1}

    _attention(seams, change)


def _exclusive_window(seams: Seams) -> None:
    def change(q: Any, k: Any, v: Any, named: Any) -> Any:
        return q, k, v, {**named, "window": named["window"] and named["window"] - 1}

    _attention(seams, change)


def dropped_beyond(seams: Seams, count: int = 2048) -> None:
    """A kernel's partition holds ``count`` keys; keys behind the first ``count`` are dropped."""
    _attention(seams, lambda q, k, v, named: _kept(q, k, v, named, slice(0, count)))


def _kept(q: Any, k: Any, v: Any, named: Any, part: slice) -> Any:
    first = int(named["k_positions"][part][-1])
    if len(k[part]) == len(k) or first < 1:
        return q, k, v, named
    # The row's own key stays, so that there is always one.
    own = named["k_positions"] >= named["q_positions"][0]
    own[part] = True
    return q, k[own], v[own], {**named, "k_positions": named["k_positions"][own]}


def _rotary_base(seams: Seams) -> None:
    """The rotary base is a tenth too large."""

    def wrapper(original: Operation) -> Operation:
        def rope_tables(spec: Any, positions: Any) -> Any:
            import dataclasses

            return original(dataclasses.replace(spec, theta=spec.theta * 1.1), positions)

        return rope_tables

    seams.wrap("rope_tables", wrapper)


def _original_range_ignored(seams: Seams) -> None:
    """Frequencies are scaled from positions beyond the original range on only."""

    def wrapper(original: Operation) -> Operation:
        def rope_tables(spec: Any, positions: Any) -> Any:
            import dataclasses

            if not spec.original_context or int(positions.max()) >= spec.original_context:
                return original(spec, positions)
            return original(dataclasses.replace(spec, kind="default"), positions)

        return rope_tables

    seams.wrap("rope_tables", wrapper)


def narrow_slots(seams: Seams, bits: int = 15) -> None:
    """The index of a cache slot has ``bits`` bits."""

    def change(cache: Any, original: Operation, layer: int, slots: Any) -> Any:
        return original(cache, layer, slots & ((1 << bits) - 1))

    _gathered(seams, change)


def narrow_positions(seams: Seams, bits: int = 16) -> None:
    """Positions are signed integers of ``bits`` bits when angles are formed."""

    def wrapper(original: Operation) -> Operation:
        def rope_tables(spec: Any, positions: Any) -> Any:
            half = 1 << (bits - 1)
            return original(spec, (positions + half) % (2 * half) - half)

        return rope_tables

    seams.wrap("rope_tables", wrapper)


def _all_scores(seams: Seams, heads: bool = False) -> None:
    """Attention holds a score of every token for every other one: of one head in the target's precision, or of all
    ``heads`` in float32, as they are accumulated."""

    def wrapper(original: Operation) -> Operation:
        def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
            import torch

            # Written, so that its pages are really there.
            held = torch.ones((q.shape[1] if heads else 1, len(k), len(k)), dtype=torch.float32 if heads else q.dtype)
            return original(q * held[0, 0, 0].to(q.dtype), k, v, **named)

        return attention

    seams.wrap("attention", wrapper)


def _entry(
    identifier: str,
    title: str,
    report: str,
    install: Any,
    says: str,
    models: tuple[str, ...] = FULL,
    where: str = _RECALL,
    contexts: tuple[int, ...] = (4096,),
    requirement: int = 104,
    reduced: Any = None,
) -> Fault:
    return Fault(
        identifier,
        title,
        report,
        requirement,
        "long_context",
        "",
        models,
        install,
        observable="text",
        where=where,
        says=says,
        contexts=contexts,
        reduced=reduced,
    )


FAULTS = (
    _entry("LC90", "A page of the cache is lost", "own, after vllm#52516", _lost_page, "1024 asked at"),
    _entry(
        "LC91", "A page is overwritten by its neighbour", "own, after LMCache#4385", _overwritten_page, "512 asked at"
    ),
    _entry(
        "LC92", "The last slot of each page is not written", "own, after vllm#43869", _last_slot_of_a_page, "- 1)", BOTH
    ),
    _entry(
        "LC93",
        "A chunk misses the key before its first row",
        "own, after nano-vllm#213",
        _last_key_before_a_chunk,
        "(4096 - 1)",
    ),
    _entry(
        "LC94",
        "A window where there is none",
        "own, after mlx-lm#1454",
        _window_where_none_is,
        "older keys are not seen",
    ),
    _entry("LC95", "The rotary base a tenth too large", "own", _rotary_base, "ruler", BOTH),
    _entry(
        "LC96",
        "Rotary scaling only beyond the original range",
        "own, after llama.cpp#24823",
        _original_range_ignored,
        "ruler",
        contexts=(4096,),
    ),
    _entry(
        "LC97",
        "Keys beyond 2048 are dropped",
        "own, after sparkinfer#976",
        dropped_beyond,
        "2048 asked at",
        contexts=(4096,),
    ),
    _entry(
        "LC98", "The window one key too wide", "transformers#39408", _inclusive_window, "logprob", ("needle-mixtral",)
    ),
    _entry(
        "LC99",
        "The window one key too narrow",
        "own, after transformers#39408",
        _exclusive_window,
        "1023 keys back of a window of 1024",
        ("needle-mixtral",),
    ),
    _entry(
        "LC02",
        "Cache slots indexed in 15 bits",
        "vllm#50427",
        narrow_slots,
        "asked at",
        contexts=(32768,),
        reduced=(lambda seams: narrow_slots(seams, 11), (4096,)),
    ),
    _entry(
        "RP10",
        "Positions in 16 bits",
        "vllm-project/tpu-inference#2756",
        narrow_positions,
        "ruler",
        contexts=(32768,),
        reduced=(lambda seams: narrow_positions(seams, 12), (4096,)),
    ),
    _entry(
        "LC89",
        "Attention holds all scores",
        "own",
        _all_scores,
        "memory.exponent",
        where="longest",
        contexts=(16384,),
        requirement=70,
        reduced=(lambda seams: _all_scores(seams, heads=True), (4096,)),
    ),
)
