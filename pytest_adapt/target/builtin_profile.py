"""Where the built-in engine's time and memory go, by operation: wrappers around its op registry, while asked for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pytest_adapt.target.dispatch import dispatch_watcher

if TYPE_CHECKING:
    from adapt_engine.kernels import KernelRegistry, WrapHandle

__all__ = ["OpProfile"]

_CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.thread_time, "wall": time.perf_counter}


class OpProfile:
    """Sums of one opened engine since it was opened, of what ran while the profile was on.

    ``time`` takes the seconds of each operation, those of operations inside it not counted (the operation itself is
    made slower by about a microsecond). ``counts`` counts calls, bytes read and written, and what the framework did.
    """

    def __init__(self, registries: Sequence[KernelRegistry]) -> None:
        self._registries = registries
        self._sums: dict[str, float] = {}
        self._handles: list[WrapHandle] = []
        self._open = threading.local()
        """Seconds of operations inside those that run; virtual ranks have a thread each."""
        self._counting = False

    def start(self, what: str, clock: str = "wall") -> None:
        """``what`` is time or counts, ``clock`` cpu or wall. Raises ValueError."""
        if what not in ("time", "counts") or clock not in _CLOCKS:
            raise ValueError(f"profile {what!r} by clock {clock!r}: there are time and counts, cpu and wall")
        self.stop()
        self._counting = what == "counts"
        from adapt_engine.kernels.registry import OPS

        for registry in self._registries:
            for op in OPS:
                wrapper = self._counted(op) if self._counting else self._timed(op, _CLOCKS[clock])
                self._handles.append(registry.wrap(op, wrapper))

    def stop(self) -> None:
        """Take the wrappers out; what was summed stays. Safe to call twice."""
        while self._handles:
            self._handles.pop().remove()
        self._counting = False

    def counters(self) -> dict[str, float]:
        """``op.NAME.calls``, ``.seconds``, ``.bytes``; ``framework.calls``, ``.allocations``, ``.allocated_bytes``."""
        return dict(self._sums)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, and counts are on, what the framework does in this thread is counted."""
        if not self._counting:
            yield
            return
        with dispatch_watcher(self._add):
            yield

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def _timed(self, op: str, now: Callable[[], float]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        calls, seconds, sums, open_ops = f"op.{op}.calls", f"op.{op}.seconds", self._sums, self._open

        def wrapper(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any, **named: Any) -> Any:
                inner: list[float] | None = getattr(open_ops, "inner", None)
                if inner is None:
                    inner = open_ops.inner = []
                inner.append(0.0)
                started = now()
                try:
                    return call(*arguments, **named)
                finally:
                    whole = now() - started
                    sums[calls] = sums.get(calls, 0.0) + 1
                    sums[seconds] = sums.get(seconds, 0.0) + whole - inner.pop()
                    if inner:
                        inner[-1] += whole

            return timed

        return wrapper

    def _counted(self, op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapper(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **named: Any) -> Any:
                answer = call(*arguments, **named)
                self._add(f"op.{op}.calls", 1)
                self._add(f"op.{op}.bytes", _bytes((arguments, tuple(named.values()), answer)))
                return answer

            return counted

        return wrapper


def _bytes(value: Any) -> int:
    """Bytes of all tensors and packed matrices in a value."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, tuple | list):
        return sum(map(_bytes, value))
    return 0
