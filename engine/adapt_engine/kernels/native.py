"""The C++ kernels, where the extension is built and the CPU can run them; otherwise nothing is offered."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from ..errors import EngineError
from . import reference
from .registry import Implementation

__all__ = ["ISA_VARIABLE", "isa", "load", "offers"]

ISA_VARIABLE = "ADAPT_ENGINE_ISA"
_LEVELS = ("avx512", "avx2", "scalar")


def load() -> ModuleType | None:
    """The extension module, or None where the package was built without it."""
    try:
        return importlib.import_module("adapt_engine._native")
    except ModuleNotFoundError:
        return None


def isa(module: ModuleType) -> str:
    """Instruction set to use: the best that the CPU has, or the one that ADAPT_ENGINE_ISA names.

    Raises EngineError for an unknown name or one that this CPU lacks.
    """
    supported = tuple(module.supported_isas())
    asked = os.environ.get(ISA_VARIABLE, "")
    if not asked:
        return str(supported[0])
    if asked not in _LEVELS:
        raise EngineError(f"{ISA_VARIABLE}={asked}: must be one of {', '.join(_LEVELS)}")
    if asked not in supported:
        raise EngineError(f"{ISA_VARIABLE}={asked}: this CPU or build has {', '.join(supported)}")
    return asked


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a matrix of its last axis; copied only where rows are not dense or not evenly apart."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()


def offers() -> list[Implementation]:
    """Native implementations, empty where the extension is not built."""
    module = load()
    if module is None:
        return []
    level = isa(module)
    code = _LEVELS.index(level)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        module.rms_norm(_rows(x), weight, _rows(out), eps, code)
        return out

    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(gate.shape, dtype=gate.dtype)
        module.swiglu(_rows(gate), _rows(up), _rows(out), code)
        return out

    def rope_apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        if interleaved:
            return reference.rope_apply(x, cos, sin, interleaved)
        out = torch.empty(x.shape, dtype=x.dtype)
        module.rotate(_rows(x), _rows(cos), _rows(sin), _rows(out), code)
        return out

    every = frozenset({torch.float32, torch.bfloat16, torch.float16})
    # A row is reduced by one thread in a fixed lane order, whatever its neighbours are.
    traits = frozenset({"batch_invariant", "layout_invariant"})
    name = f"native-{level}"
    return [
        Implementation("rms_norm", name, rms_norm, every, traits, priority=10),
        Implementation("swiglu", name, swiglu, every, traits, priority=10),
        Implementation("rope_apply", name, rope_apply, every, traits, priority=10),
    ]
