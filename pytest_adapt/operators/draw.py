"""Inputs of a case: adversarial values on the grid of a precision, laid into memory among poison.

In memory an array has the format of the precision: float32, float16, or uint16 with the bits of a bfloat16. Between
and around the elements lies poison (NaN; for integers an impossible id): what is read from there shows in the
result, what is written there is seen afterwards.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pytest_adapt.operators.case import Case
from pytest_adapt.oracle.rounding import FORMATS

__all__ = ["Arena", "Draw", "Operand", "decode", "encode"]

_GUARD = 64
"""Elements of poison before and after each array: more than a vector register holds."""
_OFFSET = 3
"""Elements by which an array misses every alignment."""
_SPIKE: Mapping[str, float] = {"fp32": 2.0**7, "bf16": 2.0**7, "fp16": 2.0**5}
_SMALL = 2.0**-10
_WIDE: Mapping[str, float] = {"fp32": 12.0, "bf16": 12.0, "fp16": 4.0}
"""Exponents either way; products of two values stay below float16's largest."""
_STEPS = 9
_SMALLEST = {"fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24}
_HUGE: Mapping[str, int] = {"fp32": 40, "bf16": 40, "fp16": 6}
"""Exponents at which squares still fit float32, and a product of two float16."""


@dataclass(frozen=True)
class Operand:
    """One input: float64 values that its format holds exactly, or int64."""

    values: np.ndarray
    format: str
    """fp32, bf16 or fp16; "int" for integers."""
    weight: bool = False
    """Weights lie dense, as an engine keeps its own."""

    def magnitude(self) -> Operand:
        """The same without signs."""
        return self if self.format == "int" else Operand(np.abs(self.values), self.format, self.weight)


class Draw:
    """Random inputs of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng((zlib.crc32(case.op.encode()), case.seed))

    def activation(
        self, *shape: int, format: str = "", huge: int | None = None, plain: tuple[str, ...] = ()
    ) -> Operand:
        """Values of the case's kind, normal ones for kinds in ``plain``; ``huge`` is another exponent of huge ones."""
        held = format or self.case.precision
        kind = "normal" if self.case.values in plain else self.case.values
        return Operand(on_grid(self._kind(kind, shape, held, huge), held), held)

    def weight(self, *shape: int, scale: float = 1.0, format: str = "", offset: float = 0.0) -> Operand:
        """Normal values times ``scale`` plus ``offset``, whatever the kind of the case."""
        held = format or self.case.precision
        return Operand(on_grid(offset + scale * self.rng.standard_normal(shape), held), held, weight=True)

    def integers(self, low: int, high: int, *shape: int) -> Operand:
        """Uniform in low .. high - 1."""
        return Operand(self.rng.integers(low, high, shape, dtype=np.int64), "int")

    def _kind(self, kind: str, shape: tuple[int, ...], held: str, huge: int | None) -> np.ndarray:
        # The largest terms of a sum come first: added in that order, the emulation errs as much as in any other.
        rng = self.rng
        normal = rng.standard_normal(shape)
        if kind == "negative":
            return -np.abs(normal) - 2.0**-4
        if kind == "tied":
            return rng.choice([-1.0, 0.5, 1.0], shape)
        if kind == "zero":
            return np.where(normal < 0, -0.0, 0.0)
        if kind == "spike":
            return normal * np.where(np.arange(shape[-1]) == 0, _SPIKE[held], _SMALL)
        if kind == "small":
            return normal * _SMALL
        if kind == "wide":
            return normal * np.exp2(-np.sort(rng.uniform(-_WIDE[held], _WIDE[held], shape), axis=-1))
        if kind == "huge":
            return normal * 2.0 ** (_HUGE[held] if huge is None else huge)
        if kind == "tiny":
            return rng.integers(-_STEPS, _STEPS + 1, shape) * _SMALLEST[held]
        return normal


def on_grid(values: np.ndarray, held: str) -> np.ndarray:
    """The nearest numbers of a format, as float64."""
    return FORMATS[held](np.asarray(values, np.float32)).astype(np.float64)


def encode(values: np.ndarray, held: str) -> np.ndarray:
    """An array as it lies in memory, from float64 values on the grid of ``held`` or integers."""
    if held == "int":
        return values.astype(np.int64)
    if held == "fp16":
        return values.astype(np.float16)
    wide = values.astype(np.float32)
    return (wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if held == "bf16" else wide


def decode(array: np.ndarray) -> np.ndarray:
    """Values of an array as it lies in memory: float64, or int64. The inverse of `encode`."""
    array = np.asarray(array)
    if array.dtype == np.uint16:
        wide = array.astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    return array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)


@dataclass
class Arena:
    """The memory of a case's inputs. What a target may not touch is compared with a copy afterwards."""

    memory: str = "dense"
    _kept: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def place(self, name: str, operand: Operand) -> np.ndarray:
        """``operand`` in a buffer of its own, laid out as the case says.

        dense: C order. offset: C order, aligned to nothing. padded: poison behind each row of the last axis.
        strided: poison between any two elements of the last axis.
        """
        data = encode(operand.values, operand.format)
        layout = "dense" if operand.weight or operand.format == "int" or not data.ndim else self.memory
        step = 2 if layout == "strided" else 1
        gap = 5 if layout == "padded" else 0
        width = (data.shape[-1] if data.ndim else 1) * step + gap
        rows = int(np.prod(data.shape[:-1])) if data.ndim else 1
        start = _GUARD + (_OFFSET if layout == "offset" else 0)
        buffer = np.full(start + rows * width + _GUARD, _poison(data.dtype), data.dtype)
        inside = buffer[start : start + rows * width].reshape(*data.shape[:-1], width)
        view = inside[..., : width - gap : step] if data.ndim else inside.reshape(())
        view = view.reshape(data.shape) if not data.size else view
        view[...] = data
        self._kept[name] = buffer, buffer.copy(), view
        return view

    def damage(self) -> str:
        """What was written where nothing may be: "" where every byte is as it was."""
        for name, (buffer, before, view) in self._kept.items():
            changed = np.flatnonzero(_bits(buffer) != _bits(before))
            if len(changed):
                inside = buffer[changed[0] : changed[0] + 1]
                what = "its input" if np.shares_memory(inside, view) and _covers(view, inside) else "memory outside"
                return f"{what} {name} was written to ({len(changed)} elements)"
        return ""


def _covers(view: np.ndarray, element: np.ndarray) -> bool:
    """Whether an element of the buffer is one of the view's."""
    offset = element.ctypes.data - view.ctypes.data
    for size, stride in sorted(zip(view.shape, view.strides, strict=True), key=lambda pair: -pair[1]):
        index = min(offset // stride, size - 1) if stride else 0
        offset -= index * stride
    return offset == 0


def _poison(dtype: np.dtype) -> int | float:
    if dtype.kind == "i":
        return -(1 << 40)
    return 0x7FC1 if dtype == np.uint16 else np.nan


def _bits(buffer: np.ndarray) -> np.ndarray:
    return buffer.view(np.dtype(f"u{buffer.itemsize}"))
