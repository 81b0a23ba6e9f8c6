"""Where faults are put into the built-in engine: its op registry, its weight loader, its KV cache, its scheduler.

Implements `pytest_adapt.faults.Seams`. Operations belong to an opened engine, so their wrappers are kept and put
on at each open; methods of the loader and of the cache are replaced on their classes while one deployment is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapt_engine import Engine

    from pytest_adapt.faults.registry import Operation, Wrapper

__all__ = ["BuiltinSeams"]

_METHODS = {
    "loader.read": ("adapt_engine.weights.loader", "Loader", "read"),
    "loader.assign": ("adapt_engine.weights.loader", "Loader", "assign"),
    "kv.write": ("adapt_engine.kv.cache", "PagedCache", "write"),
    "kv.gather": ("adapt_engine.kv.cache", "PagedCache", "gather"),
    "pool.allocate": ("adapt_engine.kv.pool", "BlockPool", "allocate"),
    "request.problem": ("adapt_engine.runtime.requests", "SequenceRequest", "problem"),
    "request.settled": ("adapt_engine.runtime.requests", "SequenceRequest", "settled"),
    "pool.free": ("adapt_engine.kv.pool", "BlockPool", "free"),
    "prefix.digests": ("adapt_engine.kv.prefix", "PrefixCache", "digests"),
    "scheduler.schedule": ("adapt_engine.runtime.scheduler", "Scheduler", "schedule"),
    "scheduler.preempt": ("adapt_engine.runtime.scheduler", "Scheduler", "preempt"),
    "scheduler.abort": ("adapt_engine.runtime.scheduler", "Scheduler", "abort"),
    "scheduler.check_integrity": ("adapt_engine.runtime.scheduler", "Scheduler", "check_integrity"),
    "sequence.advance": ("adapt_engine.runtime.scheduler", "Sequence", "advance"),
    "executor.step": ("adapt_engine.runtime.executor", "LocalExecutor", "step"),
    "comm.all_gather": ("adapt_engine.comm.communicator", "Communicator", "all_gather"),
    "comm.all_reduce": ("adapt_engine.comm.communicator", "Communicator", "all_reduce"),
    "comm.all_reduce_along": ("adapt_engine.comm.communicator", "Communicator", "all_reduce_along"),
    "comm.all_to_all": ("adapt_engine.comm.communicator", "Communicator", "all_to_all"),
    "comm.send": ("adapt_engine.comm.communicator", "Communicator", "send"),
    "comm.recv": ("adapt_engine.comm.communicator", "Communicator", "recv"),
    "shards.owners": ("adapt_engine.weights.shards", "ShardPlan", "owners"),
    "shards.piece": ("adapt_engine.weights.shards", "ShardPlan", "piece"),
}
_ORIGINAL = "adapt_original"
_USERS = "adapt_users"


class BuiltinSeams:
    """Seams of one `BuiltinTarget`."""

    def __init__(self) -> None:
        self._operations: list[tuple[str, Wrapper]] = []
        self._methods: list[tuple[str, Wrapper]] = []
        self._originals: list[tuple[type, str, Operation]] = []
        self._engine: Engine | None = None

    def wrap(self, seam: str, wrapper: Wrapper) -> None:
        """See `pytest_adapt.faults.Seams`."""
        from adapt_engine.kernels.registry import OPS

        if seam in _METHODS:
            self._methods.append((seam, wrapper))
        elif seam in OPS:
            self._operations.append((seam, wrapper))
        else:
            raise KeyError(f"the built-in engine has no seam {seam!r}; seams are {', '.join((*OPS, *_METHODS))}")

    def restore(self) -> None:
        """See `pytest_adapt.faults.Seams`. An engine that is open now keeps its wrapped operations until it closes."""
        self.detach()
        self._operations.clear()
        self._methods.clear()

    @property
    def installed(self) -> bool:
        """Whether anything is to be replaced."""
        return bool(self._operations or self._methods)

    def layer(self) -> int | None:
        """See `pytest_adapt.faults.Seams`."""
        return None if self._engine is None else self._engine.executor.running[1]

    def rank(self) -> int:
        """The rank being computed at this moment."""
        return 0 if self._engine is None else self._engine.executor.running[0]

    def before_open(self) -> None:
        """Replace the methods; the target calls this before the engine reads a byte."""
        import importlib

        for seam, wrapper in self._methods:
            module, owner, method = _METHODS[seam]
            cls: Any = getattr(importlib.import_module(module), owner)
            present = getattr(cls, method)
            # Deployments opened side by side carry the same fault: it is put in once, and taken out with the last.
            original = getattr(present, _ORIGINAL, present)
            replaced: Any = wrapper(original)
            setattr(replaced, _ORIGINAL, original)
            setattr(replaced, _USERS, getattr(present, _USERS, 0) + 1)
            self._originals.append((cls, method, original))
            setattr(cls, method, replaced)

    def attach(self, engine: Engine) -> None:
        """Wrap the operations of an engine that has just opened."""
        self._engine = engine
        for seam, wrapper in self._operations:
            for registry in engine.executor.registries:
                registry.wrap(seam, wrapper)

    def detach(self) -> None:
        """Put the methods back; the target calls this when it closes, and when an open failed."""
        self._engine = None
        while self._originals:
            cls, method, original = self._originals.pop()
            present: Any = getattr(cls, method)
            users = getattr(present, _USERS, 1) - 1
            setattr(present, _USERS, users)
            if users <= 0:
                setattr(cls, method, original)
