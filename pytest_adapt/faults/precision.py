"""PR: a value kept in fewer bits than the model needs."""

from __future__ import annotations

from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

ALL = ("qwen3-moe-odd", "mixtral-odd", "llama-odd", "deepseek-v3-odd-pos")
MOE = ("qwen3-moe-odd", "mixtral-odd", "deepseek-v3-odd-pos")


def _three_bit_mantissa(x: Any) -> Any:
    """Round to the e4m3 grid's three mantissa bits, whatever the exponent."""
    import torch

    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa * 16).round() / 16, exponent).to(x.dtype)


def _low_precision_from_64_rows(seams: Seams) -> None:
    """A matrix product switches to a coarser format where it has 64 rows or more."""

    def wrapper(original: Operation) -> Operation:
        def linear(x: Any, weight: Any, bias: Any) -> Any:
            return original(_three_bit_mantissa(x) if len(x) >= 64 else x, weight, bias)

        return linear

    seams.wrap("linear", wrapper)


def _expert_output_coarse(seams: Seams) -> None:
    seams.wrap("experts", lambda original: lambda *given, **named: _three_bit_mantissa(original(*given, **named)))


def _activation_saturates(seams: Seams) -> None:
    """The activation is clipped, as an 8-bit kernel with a stale scale does."""
    seams.wrap("swiglu", lambda original: lambda gate, up: original(gate, up).clamp(-0.25, 0.25))


def _residual_in_coarse_format(seams: Seams) -> None:
    seams.wrap("add", lambda original: lambda residual, x: _three_bit_mantissa(original(residual, x)))


def _values_cached_in_fp8(seams: Seams) -> None:
    """Keys come back from a cache of three mantissa bits without anyone having asked for it."""

    def wrapper(original: Operation) -> Operation:
        def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
            return original(q, k, _three_bit_mantissa(v), **named)

        return attention

    seams.wrap("attention", wrapper)


FAULTS = (
    Fault(
        "PR03",
        "Expert output stored in a coarse format",
        "own, after sglang#9918",
        62,
        "correctness",
        "moe.routed",
        MOE,
        _expert_output_coarse,
        0,
    ),
    Fault(
        "PR04",
        "Matrix products lose bits from 64 rows on",
        "own, after llama.cpp#27016",
        62,
        "correctness",
        "attn.q",
        ALL,
        _low_precision_from_64_rows,
        0,
        difficulty="hard",
    ),
    Fault(
        "PR06",
        "Values silently cached in eight bits",
        "own, after sglang#20705",
        62,
        "correctness",
        "attn.context",
        ALL,
        _values_cached_in_fp8,
        0,
        difficulty="hard",
    ),
    Fault(
        "PR21",
        "Activation clipped by a stale scale",
        "own, after onnxruntime#29727",
        62,
        "correctness",
        "moe.experts.act",
        ALL,
        _activation_saturates,
        0,
    ),
    Fault(
        "PR90",
        "Residual stream kept in a coarse format",
        "own, after vllm#13232",
        62,
        "correctness",
        "attn.residual",
        ALL,
        _residual_in_coarse_format,
        0,
    ),
)
