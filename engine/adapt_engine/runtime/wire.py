"""What a controller and its rank processes say to each other, and how it becomes bytes.

Values are pickled, but only the types named here are read back: a rank that sends anything else gets an error
instead of running code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm import Traffic
from ..weights.loader import LoadReport
from ..weights.parameters import ShardSlice
from .memory import RankMemory
from .plan import Answer, RankAnswer, SequencePlan, StepPlan
from .requests import EngineOptions

__all__ = ["Failed", "Garbage", "Open", "RankState", "Ready", "Stepped", "dumps", "loads"]


@dataclass(frozen=True)
class Open:
    """Controller: become a rank of this engine."""

    directory: str
    options: EngineOptions
    port: int
    """Of the store on 127.0.0.1 at which the ranks meet."""
    threads: int
    """torch's intra-op threads of this rank."""


@dataclass(frozen=True)
class RankState:
    """What a rank tells about itself with every answer."""

    memory: RankMemory
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    wall: float = 0.0
    """Seconds spent in steps since it was opened."""
    waited: float = 0.0
    """Of those, seconds in collectives."""


@dataclass(frozen=True)
class Ready:
    """Rank: loaded and connected."""

    report: LoadReport
    placed: dict[str, ShardSlice]
    state: RankState


@dataclass(frozen=True)
class Stepped:
    """Rank: a step is done."""

    answer: RankAnswer
    state: RankState


@dataclass(frozen=True)
class Failed:
    """Rank: could not open or compute; it waits to be ended."""

    kind: str
    """Name of the exception's class."""
    message: str
    lost: bool = False
    """It failed because another rank was gone."""


class Garbage(ValueError):
    """Bytes that are none of these messages."""


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


_TYPES = (
    *(Open, RankState, Ready, Stepped, Failed, Traffic, LoadReport, ShardSlice, RankMemory),
    *(Answer, RankAnswer, SequencePlan, StepPlan, EngineOptions),
)
_KNOWN: dict[tuple[str, str], Any] = {
    (one.__module__, one.__qualname__): one for one in (*_TYPES, _tensor, frozenset, set)
}


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        reader: Callable[..., torch.Tensor] = _tensor
        return reader, (raw, str(value.dtype).removeprefix("torch."), tuple(value.shape))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a message")
        return _KNOWN[module, name]


def dumps(value: object) -> bytes:
    """``value`` as bytes; tensors as they lie in memory."""
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(value)
    return out.getvalue()


def loads(data: bytes) -> object:
    """The value behind ``data``. Raises Garbage for what `dumps` did not write."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as problem:  # damaged bytes make the unpickler raise almost anything
        raise Garbage(f"{len(data)} bytes that are no message ({type(problem).__name__}: {problem})") from None
