"""The two sides of a comparison, and the fresh processes that measure them (`side_process` is what runs in one)."""

from __future__ import annotations

import json
import os
import queue
import shlex
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from pytest_adapt.target.process import Child, log_path
from pytest_adapt.target.protocol import Deployment, TargetError
from pytest_adapt.target.registry import TargetSpec

__all__ = ["Declined", "Measuring", "Side", "search_path"]

_SCRIPT = Path(__file__).with_name("side_process.py")
_GRACE = 2.0


class Declined(Exception):
    """A side does not take a deployment, or has no such answer; the message is its reason."""


@dataclass(frozen=True)
class Side:
    """What is measured on one side: a target, and where its code is found."""

    label: str
    """For people: ``v0.3.1 (9fd2c1ab)``, ``builtin``, ``the working tree``."""
    spec: TargetSpec
    paths: tuple[str, ...]
    """Folders that are searched for modules before those of the interpreter."""
    plant: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Faults: ``module:function``, which is given the target's seams and these arguments."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Variables of its processes, beside those of this one."""


def search_path(entries: Sequence[str] | None = None) -> tuple[str, ...]:
    """Folders that this process (``sys.path``) searches and that a fresh interpreter would not: those of a checkout, of
    PYTHONPATH, and of the user's own modules."""
    own = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    own |= {os.path.join(path, "lib-dynload") for path in own}
    found = [os.path.realpath(entry or os.getcwd()) for entry in (sys.path if entries is None else entries)]
    return tuple(dict.fromkeys(entry for entry in found if entry not in own and os.path.isdir(entry)))


class Measuring:
    """A fresh process of one side. Everything that it is asked has a limit of time; a context manager that ends it.

    ``seed`` is its hash seed: both processes of a pair have the same. ``wrapper`` are words before the interpreter.
    """

    def __init__(
        self, side: Side, seed: int, logs: Path, timeout: float = 600.0, wrapper: Sequence[str] = (), name: str = "side"
    ) -> None:
        self.side = side
        self._timeout = timeout
        self.ended = False
        """Whether it was stopped, or died."""
        self._created = True
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        variables = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            **side.environment,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": os.pathsep.join(side.paths),
        }
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        words = shlex.join([*wrapper, sys.executable, "-P", str(_SCRIPT)])
        self._child = Child(f"exec env {given} {words}", log_path(logs, name), piped=True, grace=_GRACE)
        threading.Thread(
            target=_read, args=(cast(IO[bytes], self._child.stdout), self._lines), daemon=True, name=f"adapt-{name}"
        ).start()

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *what: object) -> None:
        self.stop()

    def create(self) -> None:
        """Ask for an adapter and its target. What is wrong with them, `opened` says."""
        spec = self.side.spec
        settings = {**asdict(spec.settings), "rootdir": str(spec.settings.rootdir)}
        plant = [[place, dict(given)] for place, given in self.side.plant]
        self.tell("create", adapter=spec.adapter, argument=spec.argument, settings=settings, plant=plant)
        self._created = False

    def open(self, deployment: Deployment) -> None:
        """Ask for a deployment, without waiting for it: several sides open together."""
        self.tell("open", deployment=asdict(deployment))

    def opened(self) -> Mapping[str, Any]:
        """Name and version of the target that was asked for. Raises Declined or TargetError."""
        if not self._created:
            try:
                self.answer("create")
            except (Declined, TargetError):
                self.stop()  # there is nothing that could open
                raise
            self._created = True
        return self.answer("open")

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """One message and its answer. Raises Declined, or TargetError where the side failed, died or hung."""
        self.tell(do, **given)
        return self.answer(do)

    def tell(self, do: str, **given: Any) -> None:
        """Send a message; `answer` takes what comes."""
        stream = cast(IO[bytes], self._child.stdin)
        try:
            stream.write(json.dumps({"do": do, **given}).encode() + b"\n")
            stream.flush()
        except (OSError, ValueError):
            pass  # it died: the answer says so

    def answer(self, do: str) -> dict[str, Any]:
        """The answer to the message before."""
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            self.stop()
            raise TargetError(f"{self.side.label}: no answer to {do} within {self._timeout:g} s") from None
        if line is None:
            self.stop()
            how = self._child.describe_exit()
            raise TargetError(f"{self.side.label}: its process {how} before it answered {do}\n{self._child.story()}")
        found: dict[str, Any] = json.loads(line)
        if "declined" in found:
            raise Declined(str(found["declined"]))
        if "failed" in found:
            raise TargetError(f"{self.side.label}: {found['failed']}")
        return found

    def stop(self) -> None:
        """End the process and all that it started. Safe to call twice."""
        self.ended = True
        self._child.stop()
        log = self._child.log
        if log.is_file() and not log.stat().st_size:  # a run of the gate has dozens of processes with nothing to say
            log.unlink(missing_ok=True)


def _read(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    try:
        for line in stream:
            lines.put(line)
    except (OSError, ValueError):
        pass  # closed while reading
    lines.put(None)
