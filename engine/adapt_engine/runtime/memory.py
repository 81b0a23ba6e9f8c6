"""Bytes by class: what a rank will need (known before anything is allocated), what it holds, what its steps take.

A CPU has no allocator that could be asked. Weights and cache are counted from the storages behind the tensors.
Temporary memory is counted by `StepMeter`, on request: it watches every tensor that an operation hands back; scratch
memory that a kernel takes and frees inside is not seen.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import EngineError
from ..kernels.packed import bytes_of, quantisable
from ..kv.groups import groups_of
from ..weights.shards import ShardPlan
from .requests import DTYPES, QUANTISED, EngineOptions

__all__ = ["RankMemory", "StepMeter", "check_memory", "planned", "storage_bytes"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    rank: int
    name: str
    weights: int
    kv: int
    temporary: int | None = None
    """Most that one step had alive at once beside those two: activations and scratch tensors; None where it was not
    measured (`EngineOptions.measure_memory`) or no step was taken."""


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
    return sum(storages.values())


def planned(plan: ShardPlan, options: EngineOptions, rank: int) -> RankMemory:
    """Weights and KV cache of ``rank``, from config.json alone."""
    element = DTYPES[options.precision].itemsize
    small = options.precision in QUANTISED
    weights = sum(
        bytes_of(piece.parameter, piece.part.shape, element, small and quantisable(piece.parameter))
        for piece in plan.pieces(rank)
    )
    blocks = -(-options.cache_tokens // options.page_size)
    slots = -(-blocks // plan.mesh.layout.sp) * options.page_size
    kv = slots * sum(group.bytes_per_token(element) for group in groups_of(plan.local_spec(rank)))
    return RankMemory(rank, plan.mesh.name(rank), weights, kv)


def check_memory(plan: ShardPlan, options: EngineOptions) -> None:
    """Refuse what would not fit before anything is allocated.

    Raises EngineError where a rank needs more than ``memory_limit`` for weights and cache, or all ranks together more
    than this machine has: for their caches, and where there are several ranks for their weights too.
    """
    alike = plan.alike()
    ranks = {rank: planned(plan, options, rank) for rank in alike}
    for rank in ranks.values():
        if options.memory_limit and rank.weights + rank.kv > options.memory_limit:
            raise EngineError(
                f"option memory_limit: {rank.name} needs {rank.weights} bytes for weights and {rank.kv} for "
                f"{options.cache_tokens} KV slots, the limit is {options.memory_limit}; {_way_out(rank, options)}"
            )
    if not hasattr(os, "sysconf"):
        return
    layout, present = plan.mesh.layout, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = sum(ranks[first].kv * count for first, count in alike.items())
    if layout.world > 1:
        needed += sum(ranks[first].weights * count for first, count in alike.items())
        largest = max(ranks.values(), key=lambda rank: rank.weights + rank.kv)
        if needed > present:
            raise EngineError(
                f"option layout: the {layout.world} ranks of {layout} need {needed} bytes, up to {largest.weights} for "
                f"weights and {largest.kv} for {options.cache_tokens} KV slots on one, this machine has {present}; "
                "take a layout of fewer ranks, or lower kv_tokens or max_context"
            )
    elif needed > present:
        raise EngineError(
            f"option kv_tokens: {options.cache_tokens} slots need {needed} bytes, this machine has {present}; "
            "lower kv_tokens or max_context"
        )


def _way_out(rank: RankMemory, options: EngineOptions) -> str:
    """What would fit."""
    pages = -(-options.cache_tokens // options.page_size)
    fitting = max(0, options.memory_limit - rank.weights) * pages // rank.kv * options.page_size
    if fitting:
        return f"kv_tokens={fitting} would fit"
    return "take a layout of more ranks or a smaller precision, or raise the limit"


class StepMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors while it is entered: ``peak`` is the most bytes that were alive at once in any entering.

    What existed before (weights, cache, tokens) is not counted, and what outlives a step (its answers) no longer
    once the next one begins. Slow: each operation passes through Python.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = frozenset(tensor.untyped_storage().data_ptr() for tensor in known)
        self._live: dict[int, list[int]] = {}
        self._now = 0
        self.peak: int | None = None

    def __enter__(self) -> StepMeter:
        self._live, self._now, self.peak = {}, 0, self.peak or 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._note(value)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._known:
            return
        live = self._live
        if address in live:
            live[address][1] += 1
        else:
            live[address] = [size, 1]
            self._now += size
            self.peak = max(self.peak or 0, self._now)
        weakref.finalize(tensor, self._forget, live, address).atexit = False

    def _forget(self, live: dict[int, list[int]], address: int) -> None:
        entry = live[address]
        entry[1] -= 1
        if not entry[1]:
            del live[address]
            if live is self._live:
                self._now -= entry[0]
