"""(op, dtype, mode) -> implementation, with the traits that a mode requires."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import EngineError

__all__ = ["MODES", "OPS", "Implementation", "KernelRegistry", "Ops", "Routing", "WrapHandle"]

OPS: tuple[str, ...] = (
    "embedding",
    "rms_norm",
    "linear",
    "linear_partial",
    "linear_sums",
    "linear_finish",
    "head_linear",
    "rope_tables",
    "rope_apply",
    "attention",
    "attention_partial",
    "attention_merge",
    "softmax_scale",
    "swiglu",
    "router_logits",
    "route",
    "expert_rows",
    "experts",
    "combine",
    "shared_combine",
    "add",
    "lm_head",
    "sample",
)

# Mode -> traits that every op must have in it.
MODES: Mapping[str, frozenset[str]] = {
    "fast": frozenset(),
    "strict": frozenset({"batch_invariant", "layout_invariant"}),
}


class Routing(NamedTuple):
    """Answer of the ``route`` op for T tokens."""

    scores: torch.Tensor
    """float32 [T, E]: softmax or sigmoid of the logits."""
    selection: torch.Tensor
    """float32 [T, E]: scores plus selection bias, before groups are masked."""
    ids: torch.Tensor
    """int64 [T, k], ascending in each row."""
    weights: torch.Tensor
    """float32 [T, k] in the order of ids, routed scale included."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of one op."""

    op: str
    name: str
    call: Callable[..., Any]
    dtypes: frozenset[torch.dtype]
    """Precisions that it serves."""
    traits: frozenset[str] = frozenset()
    """batch_invariant: a row's bits do not depend on the other rows; layout_invariant: nor on sharding."""
    priority: int = 0
    """The largest one that serves the request wins; reference implementations have 0."""
    composite: bool = False
    """``call(ops)`` makes the op from the other ops of the registry."""
    fuses: frozenset[str] = frozenset()
    """Ops that it computes itself instead of calling them. It gives the bits that they would, and gives way to an
    implementation that calls them as soon as one of them is wrapped."""


class Ops:
    """The resolved ops of one engine, as attributes. Model code calls ``ops.linear(...)``."""

    strict: bool
    """Mode strict: of several ways to compute a thing, the same one is to be taken however many rows there are."""
    embedding: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    linear_partial: Callable[..., torch.Tensor]
    linear_sums: Callable[..., torch.Tensor]
    linear_finish: Callable[..., torch.Tensor]
    head_linear: Callable[..., torch.Tensor]
    rope_tables: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rope_apply: Callable[..., torch.Tensor]
    attention: Callable[..., torch.Tensor]
    attention_partial: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    attention_merge: Callable[..., torch.Tensor]
    softmax_scale: Callable[..., float]
    swiglu: Callable[..., torch.Tensor]
    router_logits: Callable[..., torch.Tensor]
    route: Callable[..., Routing]
    expert_rows: Callable[..., torch.Tensor]
    experts: Callable[..., torch.Tensor]
    combine: Callable[..., torch.Tensor]
    shared_combine: Callable[..., torch.Tensor]
    add: Callable[..., torch.Tensor]
    lm_head: Callable[..., torch.Tensor]
    sample: Callable[..., int]


class WrapHandle:
    """Undoes one `KernelRegistry.wrap`; also a context manager. Handles may be removed in any order."""

    def __init__(self, registry: KernelRegistry, op: str, wrapper: Callable[..., Any]) -> None:
        self._registry = registry
        self._op = op
        self._wrapper = wrapper

    def remove(self) -> None:
        """Take the wrapper out. Safe to call twice."""
        self._registry.unwrap(self._op, self._wrapper)

    def __enter__(self) -> WrapHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


class KernelRegistry:
    """Implementations on offer, the ones chosen for one (dtype, mode), and wrappers around them.

    Parameters: the implementations to choose from, the engine's dtype and its mode, and the ops that this engine never
    calls, which need no traits. Raises EngineError for an unknown mode or an op that nothing on offer can serve with
    the traits that the mode requires.
    """

    def __init__(
        self, offers: Iterable[Implementation], dtype: torch.dtype, mode: str, unused: frozenset[str] = frozenset()
    ) -> None:
        if mode not in MODES:
            raise EngineError(f"option mode: {mode!r} is not one of {', '.join(MODES)}")
        self.dtype = dtype
        self.mode = mode
        self._unused = unused
        self.layer: int | None = None
        self.ops = Ops()
        self.ops.strict = mode == "strict"
        self._chosen: dict[str, Implementation] = {}
        self._apart: dict[str, Implementation] = {}
        self._wrappers: dict[str, list[Callable[..., Any]]] = {op: [] for op in OPS}
        available = list(offers)
        for op in OPS:
            self._chosen[op] = self._resolve(op, available)
            if self._chosen[op].fuses:
                self._apart[op] = self._resolve(op, [offer for offer in available if not offer.fuses])
        for op in OPS:
            self._bind(op)

    def _resolve(self, op: str, offers: list[Implementation]) -> Implementation:
        serving = [offer for offer in offers if offer.op == op and self.dtype in offer.dtypes]
        required = MODES["fast" if op in self._unused else self.mode]
        fit = [offer for offer in serving if required <= offer.traits]
        if not fit:
            have = ", ".join(offer.name for offer in serving) or "none"
            needed = ", ".join(sorted(required)) or "an implementation"
            raise EngineError(
                f"mode {self.mode}: op {op} in {self.dtype} needs {needed}, "
                f"implementations there are: {have}; build the native kernels, or use mode fast"
            )
        return max(fit, key=lambda offer: offer.priority)

    def _in_use(self, op: str) -> Implementation:
        chosen = self._chosen[op]
        return self._apart[op] if any(self._wrappers[part] for part in chosen.fuses) else chosen

    def _bind(self, op: str) -> None:
        chosen = self._in_use(op)
        call = chosen.call(self.ops) if chosen.composite else chosen.call
        for wrapper in self._wrappers[op]:
            call = wrapper(call)
        setattr(self.ops, op, call)

    def wrap(self, op: str, wrapper: Callable[..., Any]) -> WrapHandle:
        """Replace ``op`` by ``wrapper(call)``, the latest wrapper outermost, until the handle is removed."""
        if op not in self._wrappers:
            raise EngineError(f"no op {op!r}; ops are {', '.join(OPS)}")
        self._wrappers[op].append(wrapper)
        self._rebind(op)
        return WrapHandle(self, op, wrapper)

    def unwrap(self, op: str, wrapper: Callable[..., Any]) -> None:
        """Remove one wrapper of an op; nothing happens where it is not there."""
        if wrapper in self._wrappers[op]:
            self._wrappers[op].remove(wrapper)
            self._rebind(op)

    def _rebind(self, op: str) -> None:
        """``op``, and what computes it without calling it."""
        for other in OPS:
            if other == op or op in self._chosen[other].fuses:
                self._bind(other)

    @property
    def wrapped(self) -> bool:
        """Whether anybody has wrapped an op."""
        return any(self._wrappers.values())

    def names(self) -> dict[str, str]:
        """op -> name of the implementation in use (``native-avx512``, ``reference``)."""
        return {op: self._in_use(op).name for op in OPS}
