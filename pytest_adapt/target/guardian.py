"""Runs one shell line and takes everything that it started along when it ends, however that happens.

Started as a script (``python -I -S guardian.py LIFELINE GRACE LINE``) in a session of its own. LIFELINE is a file
descriptor whose other end the judge holds: a byte on it, or its end when the judge dies (even by SIGKILL), ends the
server. Where it is not 0, standard input and output belong to the child.

Exit status: the child's (128 + signal where a signal ended it).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL = 0.05
_AFTER_KILL = 5.0


def main(arguments: list[str]) -> int:
    lifeline, grace, line = int(arguments[0]), float(arguments[1]), arguments[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # orphans of the server come to us, also those that left its process group
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    piped = lifeline != 0
    child = subprocess.Popen(
        ["/bin/sh", "-c", line],
        stdin=None if piped else subprocess.DEVNULL,
        start_new_session=True,
        restore_signals=True,
        preexec_fn=_default_signals,  # noqa: PLW1509 - this process has one thread
    )
    if piped:  # end of input must reach the child when the judge closes its end
        os.close(0)
        os.close(1)
    while child.poll() is None:
        ready, _, _ = select.select([lifeline], [], [], _POLL)
        if ready:
            break
    _end(child, grace)
    code = child.returncode if child.returncode is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def _default_signals() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    """SIGTERM to the group and to every descendant, SIGKILL after ``grace`` seconds, until nothing is left."""
    _signal_all(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while child.poll() is None or _alive(child.pid):
        _reap(child)
        late = time.monotonic() - deadline
        if late > _AFTER_KILL:  # not even SIGKILL helps (a process inside the kernel)
            break
        if late > 0:
            _signal_all(child.pid, signal.SIGKILL)
        time.sleep(_POLL)
    _reap(child)


def _signal_all(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return bool(_descendants())
    except PermissionError:
        return False
    return True


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collect orphans that became ours; the child itself belongs to subprocess."""
    child.poll()
    for pid in _descendants():
        if pid != child.pid:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.waitpid(pid, os.WNOHANG)


def _descendants() -> list[int]:
    """Every process below this one, zombies included until they are reaped (empty where /proc does not exist)."""
    try:
        entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    parents: dict[int, int] = {}
    for pid in entries:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            parents[pid] = int(file.read().rpartition(b")")[2].split()[1])
    found = {os.getpid()}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return sorted(found - {os.getpid()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
