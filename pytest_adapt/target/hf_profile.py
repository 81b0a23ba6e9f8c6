"""Where transformers' time goes, by class of module: hooks on every module, only while they are asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from pytest_adapt.target.dispatch import dispatch_watcher

__all__ = ["ModuleProfile"]

_CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.thread_time, "wall": time.perf_counter}


class ModuleProfile:
    """Sums of one loaded model since it was loaded, of what ran while the profile was on.

    An operation is the class of a module (``Linear``, ``Qwen3MoeAttention``); the seconds of modules inside another are
    not its own. On an accelerator wall time is that of launching.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sums: dict[str, float] = {}
        self._hooks: list[Any] = []
        self._open: list[tuple[float, float]] = []
        self._counting = False

    def start(self, what: str, clock: str = "wall") -> None:
        """``what`` is time or counts, ``clock`` cpu or wall. Raises ValueError."""
        if what not in ("time", "counts") or clock not in _CLOCKS:
            raise ValueError(f"profile {what!r} by clock {clock!r}: there are time and counts, cpu and wall")
        self.stop()
        self._counting = what == "counts"
        now = None if self._counting else _CLOCKS[clock]
        for module in self._model.modules():
            self._hooks += self._watch(module, now)

    def stop(self) -> None:
        """Take the hooks out; what was summed stays. Safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()
        self._open.clear()
        self._counting = False

    def counters(self) -> dict[str, float]:
        """``op.CLASS.calls``, ``op.CLASS.seconds``, and with counts what the framework did."""
        return dict(self._sums)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, and counts are on, what the framework does in this thread is counted."""
        with dispatch_watcher(self._add) if self._counting else contextlib.nullcontext():
            yield

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def _watch(self, module: Any, now: Callable[[], float] | None) -> list[Any]:
        op = type(module).__name__

        def before(module: Any, arguments: Any) -> None:
            if now is not None:
                self._open.append((now(), 0.0))

        def after(module: Any, arguments: Any, answer: Any) -> None:
            self._add(f"op.{op}.calls", 1)
            if now is None or not self._open:
                return
            started, inner = self._open.pop()
            whole = now() - started
            self._add(f"op.{op}.seconds", whole - inner)
            if self._open:
                outer, others = self._open.pop()
                self._open.append((outer, others + whole))

        # Also where a module raises: what is open must be closed.
        return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
