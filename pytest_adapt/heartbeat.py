"""A sign of life from inside a slow item: a line on standard error after half a minute, then one a minute.

Standard error is kept from before pytest captures it, so that the line is seen at once and belongs to no report. Under
xdist each worker, which inherits standard error, speaks for itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

__all__ = ["EVERY", "FIRST", "Heartbeat"]

FIRST = 30.0
"""Seconds from the start of an item to its first line."""
EVERY = 60.0
"""Seconds between the lines that follow."""


class Heartbeat:
    """Lines about one item at a time. Made while nothing is captured (when pytest is configured)."""

    def __init__(self, doing: Callable[[], str], *, silent: bool = False) -> None:
        """``doing`` says what is going on, from another thread; "" where there is nothing to say."""
        self._doing = doing
        self._stop = threading.Event()
        self._descriptor = -1
        if not silent:
            with contextlib.suppress(OSError):  # there may be no standard error
                self._descriptor = os.dup(2)

    def begin(self, name: str) -> None:
        """An item begins; the one before has ended."""
        self.end()
        if self._descriptor >= 0:
            self._stop = threading.Event()
            threading.Thread(target=self._beat, args=(name, self._stop), name="adapt-heartbeat", daemon=True).start()

    def end(self) -> None:
        """The item has ended."""
        self._stop.set()

    def close(self) -> None:
        """Say nothing any more."""
        self.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _beat(self, name: str, stop: threading.Event) -> None:
        started, wait = time.monotonic(), FIRST
        while not stop.wait(wait):
            wait = EVERY
            words = ", ".join(filter(None, [self._doing(), f"{time.monotonic() - started:.0f} s"]))
            with contextlib.suppress(OSError):
                # pytest's own line may be half written.
                os.write(self._descriptor, f"\nadapt: {name}: {words}\n".encode())
