"""EX: routed experts computed by another formula than the model's."""

from __future__ import annotations

from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

MOE = ("qwen3-moe-odd", "mixtral-odd", "deepseek-v3-odd-pos")


def _halves_exchanged(seams: Seams) -> None:
    seams.wrap("swiglu", lambda original: lambda gate, up: original(up, gate))


def _gelu_for_silu(seams: Seams) -> None:
    def swiglu(gate: Any, up: Any) -> Any:
        import torch

        return (torch.nn.functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)

    seams.wrap("swiglu", lambda original: swiglu)


def _score_on_the_input(seams: Seams) -> None:
    """The router's weight multiplies what an expert is given instead of what it answers."""

    def wrapper(original: Operation) -> Operation:
        def experts(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any, tap: Any) -> Any:
            rows, slots = ids.shape

            def by_row(name: str, value: Any) -> None:
                tap(name, value.view(rows, slots, value.shape[-1]))

            scaled = (x[:, None].float() * weights[..., None]).to(x.dtype).reshape(rows * slots, -1)
            one = weights.new_ones(rows * slots, 1)
            each = original(scaled, ids.reshape(-1, 1), one, gate, up, down, by_row if tap is not None else None)
            return each.view(rows, slots, -1).float().sum(1).to(x.dtype)

        return experts

    seams.wrap("experts", wrapper)


FAULTS = (
    Fault(
        "EX93",
        "The activation is on the wrong half",
        "own, after ROCm/ATOM#885",
        56,
        "correctness",
        "moe.experts.act",
        MOE,
        _halves_exchanged,
        0,
    ),
    Fault(
        "EX94",
        "GELU where SiLU belongs",
        "own",
        56,
        "correctness",
        "moe.experts.act",
        MOE,
        _gelu_for_silu,
        0,
    ),
    Fault(
        "RT24",
        "The router's weight multiplies the input of an expert",
        "llm-compressor#1907",
        54,
        "correctness",
        "moe.experts.gate",
        ("qwen3-moe-odd", "mixtral-odd"),
        _score_on_the_input,
        0,
        difficulty="hard",
    ),
)
