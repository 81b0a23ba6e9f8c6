"""DT: bits that depend on what they must not depend on, in a target that was asked to be deterministic.

None of these is an error of any size: each sum is as good as the one that it replaces.
"""

from __future__ import annotations

from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams


def _slots_by_batch(seams: Seams) -> None:
    """Steps of an even number of rows add up two halves of the slots, each of them rounded first."""

    def wrapper(original: Operation) -> Operation:
        def combine(down: Any, weights: Any) -> Any:
            half = weights.shape[1] // 2
            if len(down) % 2 or not half:
                return original(down, weights)
            return original(down[:, :half], weights[:, :half]) + original(down[:, half:], weights[:, half:])

        return combine

    seams.wrap("combine", wrapper)


def _another_kernel_for_one_row(seams: Seams) -> None:
    """A step of one row has a product of its own: two halves of the depth, each of them rounded first."""

    def wrapper(original: Operation) -> Operation:
        def linear(x: Any, weight: Any, bias: Any = None) -> Any:
            if len(x) != 1 or bias is not None:
                return original(x, weight, bias)
            dense, half = weight.dense() if hasattr(weight, "dense") else weight, x.shape[1] // 2
            parts = ((x[:, part].float() * dense[:, part].float()).sum(1) for part in (slice(half), slice(half, None)))
            return sum(part.to(x.dtype) for part in parts)[None]

        return linear

    seams.wrap("linear", wrapper)


def _sums_in_the_order_of_ranks(seams: Seams) -> None:
    """Ranks add their sums up as a ring would, one rank after the other, and not along the tree."""

    def wrapper(original: Operation) -> Operation:
        def all_reduce_along(self: Any, sums: Any, group: Any, tree: Any) -> Any:
            return self.all_reduce(sums.sum(0), group, sums.dtype)

        return all_reduce_along

    seams.wrap("comm.all_reduce_along", wrapper)


FAULTS = (
    Fault(
        "DT02", "The combine sums in another order for another batch", "vllm#45683", 99, "determinism", "",
        ("qwen3-moe-wide",), _slots_by_batch, None, "logits", "hard",
        where="company", says="differ in their bits",
    ),
    Fault(
        "DT90", "Another kernel where a step has one row", "own, after vllm#45683", 99, "determinism", "",
        ("qwen3-moe-wide",), _another_kernel_for_one_row, None, "logits", "hard",
        where="company", says="differ in their bits",
    ),
    Fault(
        "DT91", "Sums of ranks added in the order of ranks", "own", 99, "determinism", "",
        ("qwen3-moe-wide",), _sums_in_the_order_of_ranks, None, "logits", "hard", ("fp32",), layout="tp4",
        where="a_layout", says="differ in their bits",
    ),
)  # fmt: skip
