"""Weight matrices in the order in which the native kernels read them, packed once at load.

A packed matrix takes exactly the bytes of the tensor that it replaces (int8: one byte an element and a float32 scale
for each output). It carries its order of accumulation: depth is cut into canonical segments, and every kernel, number
of rows, number of threads and rank that holds whole segments adds in that order (`engine/csrc/matrix.h`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..comm.tree import Tree
from ..weights.parameters import SEGMENT, ParameterSpec, segment_of

__all__ = [
    "SEGMENT",
    "PackedMatrix",
    "Parameter",
    "bytes_of",
    "quantisable",
    "pack_parameters",
    "segment_of",
    "storages_of",
]

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8 = 3


class PackedMatrix:
    """A matrix [out, in] or a stack of them [experts, out, in], in packed order.

    ``dtype`` is that of the rows that it multiplies (float32, bfloat16 or float16); ``quantised`` ones hold int8.
    Indexing a stack by a number gives one matrix of it, over the same memory. Whoever treats it as a tensor in any
    other way (a method, a slice, a torch function) gets the result for a copy in ordinary order, `dense`.
    """

    __slots__ = ("dtype", "handle", "index", "module", "quantised", "scales", "segment", "shape", "storage", "tree")

    def __init__(
        self,
        module: ModuleType,
        tensor: torch.Tensor,
        segment: int = SEGMENT,
        *,
        quantised: bool = False,
        tree: Tree | None = None,
        largest: torch.Tensor | None = None,
    ) -> None:
        """Pack ``tensor`` [out, in] or [experts, out, in] of a dtype named above. ``segment``: see `segment_of`.

        ``tree``: how ranks add up what each has of the depth, None where that is all or order does not matter.
        ``largest``: float32 like ``tensor`` without its last axis, the largest magnitude of each whole row, where a
        quantised ``tensor`` has but a part of it.
        """
        stack = tensor if tensor.dim() == 3 else tensor[None]
        count, columns, depth = stack.shape
        element = 1 if quantised else tensor.element_size()
        self.module = module
        self.dtype = tensor.dtype
        self.quantised = quantised
        self.segment = segment
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.tree = tree
        self.index = 0
        self.storage = torch.empty(stack.numel() * element, dtype=torch.uint8)
        self.scales = torch.empty((count, columns)) if quantised else None
        kind = _INT8 if quantised else _FORMATS[tensor.dtype]
        self.handle: Any = module.Weights(self.storage, self.scales, kind, count, columns, depth, segment)
        for at, one in enumerate(stack):
            rows = one if one.stride(-1) == 1 else one.contiguous()
            if quantised and largest is not None:
                self.handle.pack(rows.float(), at, largest.view(count, columns)[at])
            else:
                self.handle.pack(rows.float() if quantised else rows, at)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Any:
        """One matrix of a stack by its number; anything else as of a tensor."""
        if len(self.shape) != 3 or type(index) is not int:
            return self.dense()[index]
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"no matrix {index} in a stack of shape {list(self.shape)}")
        one = object.__new__(PackedMatrix)
        for name in self.__slots__:
            setattr(one, name, getattr(self, name))
        one.shape, one.index = self.shape[1:], index
        return one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map(lambda one: one.dense() if isinstance(one, PackedMatrix) else one, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    @property
    def nbytes(self) -> int:
        """Bytes that the matrix or the stack takes, scales included."""
        if not self.quantised:
            return math.prod(self.shape) * self.dtype.itemsize
        return math.prod(self.shape) + math.prod(self.shape[:-1]) * torch.float32.itemsize

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64 [n]) of a matrix [out, in], as [n, in] of its dtype."""
        return self._unpacked(ids, ids.shape[0])

    def dense(self) -> torch.Tensor:
        """The matrix or the stack in ordinary order; int8 with its scales applied."""
        if len(self.shape) == 3:
            return torch.stack([self[index].dense() for index in range(len(self))])
        return self._unpacked(None, self.shape[0])

    def _unpacked(self, ids: torch.Tensor | None, count: int) -> torch.Tensor:
        out = torch.empty((count, self.shape[-1]), dtype=torch.float32 if self.quantised else self.dtype)
        self.handle.unpack(self.index, ids, out)
        return out.to(self.dtype)


Parameter = torch.Tensor | PackedMatrix
"""A weight as ops take it."""


def storages_of(parameters: Iterable[Parameter]) -> list[torch.Tensor]:
    """The tensors behind parameters, packed or not."""
    found: list[torch.Tensor] = []
    for one in parameters:
        if isinstance(one, PackedMatrix):
            found.append(one.storage)
            if one.scales is not None:
                found.append(one.scales)
        else:
            found.append(one)
    return found


def packable(parameter: ParameterSpec, tied: bool) -> bool:
    """Whether only products read the parameter: not the embedding table (unless it is the head too), no vector, and
    not the matrix that latent attention takes apart by head."""
    if len(parameter.shape) != 2 or parameter.name.endswith(".attn.kv_b.weight"):
        return False
    return tied or parameter.name != "embed"


def quantisable(parameter: ParameterSpec) -> bool:
    """Whether a precision of int8 concerns the parameter: matrices of products, but not the router's, which decide
    discrete choices, nor an embedding table that is the head too."""
    return packable(parameter, tied=False) and not parameter.fp32


def bytes_of(parameter: ParameterSpec, shape: tuple[int, ...], element: int, quantised: bool) -> int:
    """Bytes of a part of ``shape`` of a parameter, at ``element`` bytes a number where nothing else is said."""
    if quantised:
        return math.prod(shape) + torch.float32.itemsize * shape[0]
    return math.prod(shape) * (torch.float32.itemsize if parameter.fp32 else element)


def pack_parameters(
    module: ModuleType,
    parameters: dict[str, torch.Tensor],
    expected: Iterable[ParameterSpec],
    tied: bool,
    quantise: bool,
    trees: Mapping[str, Tree] | None = None,
    largest: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Parameter]:
    """``parameters`` (buffer -> tensor) with every matrix packed; empties the given ones, one by one.

    ``quantise``: as int8, where that concerns them. ``trees`` and ``largest``, by buffer: see `PackedMatrix`.
    """
    packed = {one.buffer: one for one in expected if packable(one, tied)}
    found: dict[str, Parameter] = {}
    for name in list(parameters):
        tensor = parameters.pop(name)
        if name in packed and tensor.numel():
            one = packed[name]
            found[name] = PackedMatrix(
                module,
                tensor,
                segment_of(one),
                quantised=quantise and quantisable(one),
                tree=(trees or {}).get(name),
                largest=(largest or {}).get(name),
            )
        else:
            found[name] = tensor
    return found
