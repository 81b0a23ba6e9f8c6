"""NM: normalisation with the wrong epsilon, mean or weight."""

from __future__ import annotations

import itertools
from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

ALL = ("qwen3-moe-odd", "mixtral-odd", "llama-odd", "deepseek-v3-odd-pos")


def _norm(seams: Seams, compute: Operation) -> None:
    seams.wrap("rms_norm", lambda original: lambda x, weight, eps: compute(original, x, weight, eps))


def _epsilon_hard_coded(seams: Seams) -> None:
    _norm(seams, lambda original, x, weight, eps: original(x, weight, 1e-5 if eps != 1e-5 else 1e-6))


def _epsilon_outside_the_root(seams: Seams) -> None:
    def compute(original: Operation, x: Any, weight: Any, eps: float) -> Any:
        wide = x.float()
        root = wide.square().mean(-1, keepdim=True).sqrt()
        return (wide / (root + eps)).to(x.dtype) * weight

    _norm(seams, compute)


def _sum_for_mean(seams: Seams) -> None:
    _norm(seams, lambda original, x, weight, eps: original(x, weight, eps) * x.shape[-1] ** -0.5)


def _unit_offset(seams: Seams) -> None:
    """The weight is taken as an offset from one, as another family stores it."""
    _norm(seams, lambda original, x, weight, eps: original(x, weight + 1, eps))


def _last_lanes_left_out(seams: Seams) -> None:
    """The mean covers only whole vectors of 8 lanes."""

    def compute(original: Operation, x: Any, weight: Any, eps: float) -> Any:
        whole = x.shape[-1] // 8 * 8
        if whole in (0, x.shape[-1]):
            return original(x, weight, eps)
        wide = x.float()
        mean = wide[..., :whole].square().mean(-1, keepdim=True)
        return (wide * (mean + eps).rsqrt()).to(x.dtype) * weight

    _norm(seams, compute)


def _keys_not_normalised(seams: Seams) -> None:
    """Each layer normalises its heads' queries, then its heads' keys: the second of these calls does nothing."""

    def wrapper(original: Operation) -> Operation:
        calls = itertools.count(1)

        def rms_norm(x: Any, weight: Any, eps: float) -> Any:
            return x if x.dim() == 3 and next(calls) % 2 == 0 else original(x, weight, eps)

        return rms_norm

    seams.wrap("rms_norm", wrapper)


FAULTS = (
    Fault(
        "NM01",
        "Epsilon added outside the root",
        "own, after mlx-lm#1624",
        56,
        "correctness",
        "attn.norm",
        ALL,
        _epsilon_outside_the_root,
        0,
        difficulty="hard",
        precisions=("fp32",),
    ),
    Fault(
        "NM02",
        "Epsilon hard-coded",
        "paiml/aprender#1606",
        56,
        "correctness",
        "attn.norm",
        ALL,
        _epsilon_hard_coded,
        0,
        difficulty="hard",
        precisions=("fp32",),
    ),
    Fault(
        "NM05", "Sum of squares taken as mean", "tt-mlir#8798", 56, "correctness", "attn.norm", ALL, _sum_for_mean, 0
    ),
    Fault(
        "NM07",
        "Weight taken as an offset from one",
        "own, after vllm#3653",
        56,
        "correctness",
        "attn.norm",
        ALL,
        _unit_offset,
        0,
    ),
    Fault(
        "NM91",
        "Heads' keys are not normalised",
        "own, after sglang#38230",
        56,
        "correctness",
        "attn.k_norm",
        ("qwen3-moe-odd",),
        _keys_not_normalised,
        0,
    ),
    Fault(
        "NM90",
        "The mean misses the last lanes",
        "own, after sglang#38230",
        56,
        "correctness",
        "attn.norm",
        ("qwen3-moe-odd-raw", "mixtral-odd", "llama-odd", "deepseek-v3-odd-pos"),
        _last_lanes_left_out,
        0,
    ),
)
