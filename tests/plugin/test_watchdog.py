"""Waiting for a target with a limit, and leaving behind what does not come back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from pytest_adapt.watchdog import Watchdog


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_an_interrupted_call_is_left_behind() -> None:
    """Ctrl-C while the target is busy: closing it does not wait until it comes back."""
    watchdog, busy = Watchdog(), threading.Event()
    # A job that a shell put into the background inherits SIGINT ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            watchdog.call(lambda: busy.wait(60), 30, lambda: "a busy target")
    finally:
        signal.signal(signal.SIGINT, inherited)
    started = time.monotonic()
    assert watchdog.call(lambda: "closed", 30, lambda: "the target to close") == "closed"
    assert time.monotonic() - started < 10
    busy.set()
