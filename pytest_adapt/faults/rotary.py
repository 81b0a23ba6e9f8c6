"""RP: positions that are scaled, paired or rounded wrongly."""

from __future__ import annotations

import itertools
import math
from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

ALL = ("qwen3-moe-odd", "mixtral-odd", "llama-odd", "deepseek-v3-odd-pos")
DEEPSEEK = ("deepseek-v3-odd-pos", "deepseek-v3-odd-neg")


def _attention_factor_omitted(seams: Seams) -> None:
    """MLA's softmax scale without YaRN's mscale squared."""
    seams.wrap("softmax_scale", lambda original: lambda spec: spec.head_dim**-0.5)


def _mscale_misread(seams: Seams) -> None:
    """The softmax scale takes mscale (1 in these models) where mscale_all_dim belongs."""

    def softmax_scale(spec: Any) -> float:
        factor = 0.1 * math.log(spec.rope.factor) + 1.0
        return float(spec.head_dim**-0.5 * factor * factor)

    seams.wrap("softmax_scale", lambda original: softmax_scale)


def _angles_in_bf16(seams: Seams) -> None:
    """Angles pass through bf16 before cosine and sine, as under an autocast."""

    def wrapper(original: Operation) -> Operation:
        def rope_tables(spec: Any, positions: Any) -> Any:
            import torch

            cos, sin = original(spec, positions)
            length = (cos * cos + sin * sin).sqrt()
            unit, _ = original(spec, positions.new_ones(1))
            step = torch.acos((unit / length[:1]).clamp(-1, 1))
            angle = (positions[:, None].float() * step).bfloat16().float()
            return angle.cos() * length, angle.sin() * length

        return rope_tables

    seams.wrap("rope_tables", wrapper)


def _tables_downcast_after_first_use(seams: Seams) -> None:
    """The shared cosine and sine cache is rounded to bf16 by the first step and used so from the second on."""
    calls = 0

    def wrapper(original: Operation) -> Operation:
        def rope_tables(spec: Any, positions: Any) -> Any:
            nonlocal calls
            calls += 1
            cos, sin = original(spec, positions)
            return (cos, sin) if calls == 1 else (cos.bfloat16().float(), sin.bfloat16().float())

        return rope_tables

    seams.wrap("rope_tables", wrapper)


def _pairs_misread(seams: Seams) -> None:
    seams.wrap("rope_apply", lambda original: lambda x, cos, sin, interleaved: original(x, cos, sin, not interleaved))


def _one_position_late(seams: Seams) -> None:
    """Decode rotates with the position after the one it computes."""

    def wrapper(original: Operation) -> Operation:
        def rope_tables(spec: Any, positions: Any) -> Any:
            return original(spec, positions + 1 if len(positions) == 1 else positions)

        return rope_tables

    seams.wrap("rope_tables", wrapper)


def _keys_of_one_layer_not_rotated(seams: Seams) -> None:
    """Layer 2 is taken for one without positions where keys are rotated, the second rotation of a layer."""

    def wrapper(original: Operation) -> Operation:
        calls = itertools.count(1)

        def rope_apply(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
            second = next(calls) % 2 == 0
            return x if second and seams.layer() == 2 else original(x, cos, sin, interleaved)

        return rope_apply

    seams.wrap("rope_apply", wrapper)


FAULTS = (
    Fault(
        "RP01",
        "YaRN's factor on the attention logits omitted",
        "onnxruntime/mobius#548",
        56,
        "correctness",
        "attn.context",
        DEEPSEEK,
        _attention_factor_omitted,
        0,
    ),
    Fault(
        "RP02",
        "mscale used where mscale_all_dim belongs",
        "Megatron-LM#1429",
        56,
        "correctness",
        "attn.context",
        DEEPSEEK,
        _mscale_misread,
        0,
    ),
    Fault(
        "RP04",
        "Rotary angles rounded to bf16",
        "transformers#29285",
        53,
        "correctness",
        "attn.q_rope",
        ALL,
        _angles_in_bf16,
        0,
        difficulty="hard",
    ),
    Fault(
        "RP07",
        "Rotary tables downcast in place by the first step",
        "sglang#33117",
        53,
        "correctness",
        "attn.q_rope",
        ALL,
        _tables_downcast_after_first_use,
        0,
        difficulty="hard",
        precisions=("fp32",),
        healthy="transformers rounds these tables to the type of the activations",
    ),
    Fault(
        "RP12",
        "Rotary pairing flag flipped",
        "ROCm/ATOM#1502",
        53,
        "correctness",
        "attn.q_rope",
        ALL,
        _pairs_misread,
        0,
    ),
    Fault(
        "RP91",
        "Keys of one layer are not rotated",
        "own, after llama.cpp#17945",
        53,
        "correctness",
        "attn.k_rope",
        ("qwen3-moe-odd", "mixtral-odd", "llama-odd"),
        _keys_of_one_layer_not_rotated,
        2,
    ),
    Fault(
        "RP90",
        "Decode rotates one position late",
        "own, after transformers#43082",
        82,
        "correctness",
        "attn.q_rope",
        ALL,
        _one_position_late,
        0,
    ),
)
