"""Child processes of targets: started under a guardian, ended with everything that they started."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from pytest_adapt.target import guardian
from pytest_adapt.target.protocol import TargetError

__all__ = ["Child", "log_path", "tail"]

_TAIL_LINES = 20
_TAIL_BYTES = 1 << 16
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class Child:
    """A shell line in a process group of its own; its log (standard error, and output unless piped) goes to ``log``.

    ``piped`` gives standard input and output to the caller as `stdin` and `stdout` (binary). The guardian ends the
    group when `stop` is called, when the interpreter exits, and when it dies.
    """

    def __init__(self, line: str, log: Path, *, piped: bool = False, grace: float = 10.0) -> None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TargetError(f"no log of {line!r} can be written: {error}") from error
        self.line, self.log, self._grace = line, log, grace
        read, self._lifeline = os.pipe()
        try:
            with log.open("wb") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", guardian.__file__, str(read if piped else 0), str(grace), line],
                    stdin=subprocess.PIPE if piped else read,
                    stdout=subprocess.PIPE if piped else file,
                    stderr=file,
                    pass_fds=(read,) if piped else (),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._lifeline)
            raise TargetError(f"cannot start {line!r}: {error}") from error
        finally:
            os.close(read)
        atexit.register(self.stop)

    @property
    def stdin(self) -> object:
        return self._process.stdin

    @property
    def stdout(self) -> object:
        return self._process.stdout

    @property
    def pid(self) -> int:
        """Of the process above everything that was started."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """The shell line's exit status; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """SIGTERM to everything, SIGKILL after the grace period; returns when nothing is left. Safe to call twice."""
        atexit.unregister(self.stop)
        if self._lifeline < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, b".")
        os.close(self._lifeline)
        self._lifeline = -1
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(self._grace + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def describe_exit(self) -> str:
        """How it ended, in words."""
        code = self.exit_code()
        if code is None:
            return "still runs"
        if code > 128:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(code - 128).name}"
        return f"exited with status {code}"

    def story(self) -> str:
        """The tail of the log, as lines that follow an error's first line; where the whole log is."""
        return tail(self.log)


def tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """Last ``lines`` lines of ``log``, indented, without terminal control codes, after a line that names the file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = _CONTROL.sub("", file.read().decode("utf-8", "replace").replace("\r", "\n"))
    except OSError as error:
        return f"  (no log: {error})"
    kept = [f"  | {line[:300]}" for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join([f"  log: {log}", *(kept or ["  | (empty)"])])


def log_path(directory: Path, name: str) -> Path:
    """A log file of this process that no other worker or earlier deployment writes."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")[:80]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return directory / f"{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}-{clean}.log"
