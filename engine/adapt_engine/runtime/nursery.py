"""A process that has imported the engine once and forks rank processes, which start in milliseconds.

It also sees to it that no rank outlives the controller: when the controller's end of its socket closes, however that
happens, it kills and reaps them all; when it dies itself, Linux kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import EngineError

__all__ = ["Nursery", "main"]

_PR_SET_PDEATHSIG = 1
_CODE = "import sys; sys.path.append(sys.argv[1]); from adapt_engine.runtime.nursery import main; main(sys.argv[2:])"
_LONGEST = 1 << 16
_ANSWER = 30.0
"""Seconds in which a request must be answered."""
_GRACE = 5.0
"""Seconds in which it ends when it is no longer needed; then it is killed."""


class Nursery:
    """Starts the process; `fork`, `status` and `end` are for `ProcessExecutor`. One may serve several engines.

    ``preload``: modules to import, or Python files (``*.py``) to run, before anything is forked: every rank has them.
    Raises EngineError where the process does not come up within ``start_timeout`` seconds.
    """

    def __init__(self, preload: Sequence[str] = (), start_timeout: float = 300.0) -> None:
        self._socket, theirs = socket.socketpair()
        package = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-P", "-c", _CODE, str(package), str(theirs.fileno()), *preload]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
                )
        except OSError as problem:
            self._socket.close()
            raise EngineError(f"the process that forks ranks cannot be started: {problem}") from None
        try:
            self._ask(None, (), start_timeout)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the nursery process."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """How the process ended, as `subprocess.Popen.returncode`; None while it runs."""
        return self._process.poll()

    def fork(self, rank: int, world: int, connection: int, board: int) -> int:
        """A new process that runs `adapt_engine.runtime.rank.serve` on copies of these descriptors; its pid."""
        return int(self._ask({"fork": [rank, world]}, (connection, board)))

    def status(self, pid: int) -> int | None:
        """How a rank process ended, as `subprocess.Popen.returncode`; None while it runs."""
        found = self._ask({"status": pid})
        return None if found is None else int(found)

    def end(self, pids: Iterable[int]) -> None:
        """Kill and reap rank processes, stopped ones too."""
        self._ask({"end": list(pids)})

    def close(self) -> None:
        """End the process and every rank that it forked. Safe to call twice."""
        self._socket.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: object, descriptors: Sequence[int] = (), timeout: float = _ANSWER) -> Any:
        try:
            self._socket.settimeout(timeout)
            if request is not None:
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
            answer = self._socket.recv(_LONGEST)
        except OSError as problem:
            answer = b""
            reason = f"{type(problem).__name__}: {problem}"
        else:
            reason = "it ended"
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
            code = self._process.poll()
            state = "it runs" if code is None else f"exit status {code}"
            raise EngineError(f"the process that forks ranks does not answer ({reason}; {state})")
        return json.loads(answer)


def main(arguments: Sequence[str]) -> None:
    """The process: ``SOCKET MODULE ...``; ends it when the controller's end of SOCKET closes."""
    control = socket.socket(fileno=int(arguments[0]))
    importlib.import_module("adapt_engine.runtime.rank")  # torch and the engine, once for all ranks

    for name in arguments[1:]:
        if name.endswith(".py"):
            runpy.run_path(name)
        else:
            importlib.import_module(name)

    children: dict[int, int | None] = {}
    try:
        control.sendall(b"null")
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, _LONGEST, 2)
            if not data:
                break
            request = json.loads(data)
            answer: int | None
            if "fork" in request:
                rank, world = request["fork"]
                answer = _fork(control, rank, world, descriptors, children)
            elif "status" in request:
                answer = _reap(children, request["status"], os.WNOHANG)
            else:
                _end(children, request["end"])
                answer = None
            control.sendall(json.dumps(answer).encode())
    except ConnectionError:
        pass
    finally:
        _end(children, list(children))
    os._exit(0)  # nothing is left to be tidied, and tidying up torch takes time


def _fork(
    control: socket.socket, rank: int, world: int, descriptors: list[int], children: dict[int, int | None]
) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        children[pid] = None
        return pid
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(code)
        control.close()
        from .rank import serve

        serve(rank, world, Connection(descriptors[0]), descriptors[1])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(children: dict[int, int | None], pid: int, flags: int = 0) -> int | None:
    if children[pid] is None:
        found, status = os.waitpid(pid, flags)
        if found:
            children[pid] = os.waitstatus_to_exitcode(status)
    return children[pid]


def _end(children: dict[int, int | None], pids: Sequence[int]) -> None:
    for pid in pids:
        if _reap(children, pid, os.WNOHANG) is None:
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        _reap(children, pid)
        del children[pid]
