"""Calls that may never return, made from one thread of their own and waited for with a limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pytest_adapt.target.protocol import TargetError

__all__ = ["THREAD", "Hung", "Watchdog"]

THREAD = "adapt-target"
"""Name of the thread in which a target's code runs."""

T = TypeVar("T")


class Hung(Exception):
    """A call did not come back in time; its thread was left behind."""


class Watchdog:
    """Runs everything that touches one target in one daemon thread (adapters keep thread-local state), and gives up
    waiting at a deadline. After that the thread is abandoned and the next call gets a new one."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Any] | None = None

    def call(self, function: Callable[[], T], seconds: float, waiting_for: Callable[[], str]) -> T:
        """``function()``. Raises what it raises, or Hung after ``seconds``."""
        return next(iter(self.stream(lambda: [function()], seconds, waiting_for)))

    def stream(self, produce: Callable[[], Iterable[T]], seconds: float, waiting_for: Callable[[], str]) -> Iterator[T]:
        """The values of ``produce()`` as they come; all of them must have come after ``seconds``."""
        deadline = time.monotonic() + seconds
        box: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._thread().put((produce, box))
        while True:
            try:
                kind, value = box.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                self.stop()
                raise Hung(f"no answer within {seconds:.3g} s while waiting for {waiting_for()}") from None
            except KeyboardInterrupt:  # closing the target must not queue behind the call that was interrupted
                self.stop()
                raise
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    def stop(self) -> None:
        """Let the thread end after its present call."""
        if self._tasks is not None:
            self._tasks.put(None)
            self._tasks = None

    def _thread(self) -> queue.SimpleQueue[Any]:
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._tasks,), name=THREAD, daemon=True).start()
        return self._tasks


def _serve(tasks: queue.SimpleQueue[Any]) -> None:
    while (task := tasks.get()) is not None:
        produce, box = task
        try:
            for value in produce():
                box.put(("value", value))
        except Exception as error:  # goes to the caller, whose thread decides
            box.put(("error", error))
        except BaseException as error:  # pytest.skip, KeyboardInterrupt, SystemExit ... out of code that is judged
            box.put(
                (
                    "error",
                    TargetError(f"the target raised {type(error).__name__}: {error}; only errors are its to raise"),
                )
            )
        else:
            box.put(("end", None))
        del task, produce, box
