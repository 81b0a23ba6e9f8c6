"""How near the kernels are to the limits of this machine, measured in the same run: ``adapt-engine profile``.

Limits are measured, not looked up: bytes a second of a loop that only reads, multiply-adds a second of a loop that
never touches memory, both on as many threads as the kernels use. Rounds of limits and kernels alternate, so that a slow
moment of the machine falls on both; figures are medians over rounds. What is streamed is larger than the caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from .errors import EngineError
from .kernels import native
from .kernels.packed import SEGMENT, PackedMatrix

__all__ = ["Shape", "Use", "measured_limits", "profile_kernels"]

_TURNS = 1_000_000
_FORMATS = {"fp32": 0, "bf16": 1, "int8": 3}


@dataclass(frozen=True)
class Shape:
    """A routed layer and a head; the defaults are those of the bench model."""

    hidden: int = 1024
    inter: int = 512
    experts: int = 32
    chosen: int = 4
    vocab: int = 32000


@dataclass(frozen=True)
class Use:
    """What one kernel reached. ``limit`` is in the unit of ``rate``."""

    name: str
    seconds: float
    rate: float
    """GB/s where memory limits it, GFLOP/s where arithmetic does."""
    limit: float
    unit: str

    @property
    def share(self) -> float:
        return self.rate / self.limit if self.limit else 0.0

    def __str__(self) -> str:
        return f"{self.name:<34}{self.seconds * 1e6:>10.1f} us{self.rate:>9.1f} {self.unit:<8}{self.share:>7.1%}"


@dataclass
class _Case:
    name: str
    run: Callable[[], object]
    work: float
    """Bytes or operations of one run."""
    limit: str
    """Name of the limit that it is compared with."""


def profile_kernels(rounds: int = 7, shape: Shape = Shape()) -> tuple[dict[str, float], list[Use]]:
    """Limits (GB/s, GFLOP/s by format) and what each kernel reaches of them.

    Raises EngineError where the native kernels are not built.
    """
    module, level = _module()
    limits = list(_limits(module, level))
    cases = [*_products(module, level, shape), *_routed(module, level, shape)]
    times: dict[str, list[float]] = {case.name: [] for case in (*limits, *cases)}
    for _ in range(rounds):
        for case in (*limits, *cases):
            times[case.name].append(_seconds(case.run))
    rates = {case.name: case.work / statistics.median(times[case.name]) / 1e9 for case in (*limits, *cases)}
    found = {case.name: rates[case.name] for case in limits}
    return found, [
        Use(
            case.name,
            statistics.median(times[case.name]),
            rates[case.name],
            found[case.limit],
            "GB/s" if case.limit == "read" else "GFLOP/s",
        )
        for case in cases
    ]


def measured_limits(rounds: int = 5) -> dict[str, float]:
    """The limits of `profile_kernels` alone: "read" in GB/s, formats in GFLOP/s. Raises EngineError as it does."""
    cases = list(_limits(*_module()))
    return {case.name: case.work / statistics.median(_seconds(case.run) for _ in range(rounds)) / 1e9 for case in cases}


def _module() -> tuple[ModuleType, int]:
    module = native.load()
    if module is None:
        raise EngineError("adapt-engine profile: the native kernels are not built; install with a C++ compiler")
    return module, native.level_of(module)


def _seconds(run: Callable[[], object], least: float = 0.05) -> float:
    """Seconds of one run, over as many as fill ``least``."""
    run()
    count, spent = 0, 0.0
    start = time.perf_counter()
    while spent < least:
        run()
        count += 1
        spent = time.perf_counter() - start
    return spent / count


def _limits(module: ModuleType, level: int) -> Iterator[_Case]:
    much = torch.empty(256 << 20, dtype=torch.uint8)
    module.large_pages(much)
    much.fill_(1)
    yield _Case("read", lambda: module.roof_read(much, level), much.nbytes, "read")
    for name, code in _FORMATS.items():
        work = float(module.roof_multiply(code, _TURNS, level))
        yield _Case(name, partial(module.roof_multiply, code, _TURNS, level), work, name)


def _in_turn(runs: list[Callable[[], object]]) -> Callable[[], object]:
    """Each call runs the next one: what is small against the caches is not found there again."""
    state = [0]

    def run() -> object:
        state[0] = (state[0] + 1) % len(runs)
        return runs[state[0]]()

    return run


def _products(module: ModuleType, level: int, shape: Shape) -> Iterator[_Case]:
    weight = torch.randn(shape.vocab, shape.hidden)
    columns = min(4096, shape.vocab)
    for name, dtype, quantised in (("bf16", torch.bfloat16, False), ("int8", torch.bfloat16, True)):
        # Several of them, so that none is found in a cache again.
        matrices = [PackedMatrix(module, weight.to(dtype), SEGMENT, quantised=quantised) for _ in range(4)]
        size = matrices[0].storage.nbytes
        for rows in (1, 8):
            x, out = torch.randn(rows, shape.hidden).to(dtype), torch.empty((rows, shape.vocab), dtype=dtype)
            run = _in_turn([_linear(module, level, x, matrix, out) for matrix in matrices])
            yield _Case(f"product {name}, {rows} rows", run, size, "read")
        x, out = torch.randn(512, shape.hidden).to(dtype), torch.empty((512, columns), dtype=dtype)
        part = PackedMatrix(module, weight[:columns].to(dtype), SEGMENT, quantised=quantised)
        run = _linear(module, level, x, part, out)
        yield _Case(f"product {name}, 512 rows", run, 2.0 * 512 * shape.hidden * columns, name)


def _linear(
    module: ModuleType, level: int, x: torch.Tensor, matrix: PackedMatrix, out: torch.Tensor
) -> Callable[[], object]:
    return lambda: module.linear(x, matrix.handle, 0, None, out, level)


def _routed(module: ModuleType, level: int, shape: Shape) -> Iterator[_Case]:
    layers, dtype = 3, torch.bfloat16
    for name, quantised in (("bf16", False), ("int8", True)):
        segments = (SEGMENT, SEGMENT, max(8, shape.inter // 8))
        sizes = ((shape.inter, shape.hidden), (shape.inter, shape.hidden), (shape.hidden, shape.inter))
        stacks = [
            [
                PackedMatrix(module, (0.05 * torch.randn(shape.experts, *size)).to(dtype), segment, quantised=quantised)
                for size, segment in zip(sizes, segments, strict=True)
            ]
            for _ in range(layers)
        ]
        bytes_each = sum(one.storage.nbytes for one in stacks[0]) / shape.experts
        per_row = 2.0 * sum(height * width for height, width in sizes)
        for rows in (1, 8, 7 * shape.experts // shape.chosen, 32 * shape.experts // shape.chosen, 512):
            x, out = torch.randn(rows, shape.hidden).to(dtype), torch.empty((rows, shape.hidden), dtype=dtype)
            weights = torch.rand(rows, shape.chosen)
            runs: list[Callable[[], object]] = []
            distinct = 0
            for turn in range(4 * layers):
                ids = torch.stack([torch.randperm(shape.experts)[: shape.chosen].sort().values for _ in range(rows)])
                distinct += len(set(ids.flatten().tolist()))
                held = [one.handle for one in stacks[turn % layers]]
                runs.append(_experts(module, level, x, ids, weights, held, out))
            each = rows * shape.chosen / shape.experts
            if each >= 16:
                work, limit = per_row * rows * shape.chosen, name
            else:
                work, limit = bytes_each * distinct / len(runs), "read"
            label = f"experts {name}, {rows} rows" + (f" ({each:.0f} each)" if each >= 1 else "")
            yield _Case(label, _in_turn(runs), work, limit)


def _experts(
    module: ModuleType,
    level: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    held: list[object],
    out: torch.Tensor,
) -> Callable[[], object]:
    return lambda: module.experts(x, ids, weights, *held, out, level)
