"""One side of a comparison: a fresh process that opens a target and runs loads when it is told to.

A script, started by its path with the search path of its side, so that the same code measures two versions of all the
rest: of what it finds there it uses the protocol alone (`Deployment`, `Request`, an adapter's open, run, close, and,
where the target has them, control and stats). One JSON object a line in, one out; what the target prints goes to a log.

    do        with                                                     answer
    create    adapter (module:Class), argument, settings, plant        {}
    open      deployment                                               name, version
    load      name, prompts, new                                       {}
    warm      load, repeats                                            cpu, thread, once (ns), waits, runs, children ...
    pin       cores                                                    {}
    slice     load, repeats                                            cpu, wall (ns)
    profile   load, repeats, clock                                     ops: {name: [calls, seconds]}, seconds
    fork      load, repeats: run it in a copy of this process          pid
    close                                                              {}

An answer {"declined": why} says that the target does not take this, {"failed": why} that it broke.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import resource
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

__all__ = ["SideProcess", "main"]

_COUNTERS = "op."


class Refused(Exception):
    """The target declines; the message is its reason."""


class SideProcess:
    """The target of this process, its open deployment, and the loads that it was given."""

    def __init__(self) -> None:
        self._target: Any = None
        self._info: Any = None
        self._loads: dict[str, tuple[list[list[int]], int]] = {}
        self._turns: dict[str, int] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what a message says."""
        found: dict[str, Any] = getattr(self, f"do_{message.pop('do')}")(**message)
        return found

    def do_create(self, adapter: str, argument: str, settings: dict[str, Any], plant: list[Any]) -> dict[str, Any]:
        from pytest_adapt.target.registry import TargetSettings

        known = {one.name for one in fields(TargetSettings)}
        settings = {name: value for name, value in settings.items() if name in known}
        settings["rootdir"] = Path(settings["rootdir"])
        module, _, name = adapter.partition(":")
        self._target = getattr(importlib.import_module(module), name)(argument, TargetSettings(**settings))
        for place, given in plant:
            home, _, function = place.partition(":")
            getattr(importlib.import_module(home), function)(self._target.seams, **given)
        return {}

    def do_open(self, deployment: dict[str, Any]) -> dict[str, Any]:
        from pytest_adapt.target.protocol import Deployment, UnsupportedDeployment

        known = {one.name for one in fields(Deployment)}
        given = {name: value for name, value in deployment.items() if name in known}
        given["taps"] = tuple(given.get("taps", ()))
        given["features"] = tuple((name, value) for name, value in given.get("features", ()))
        self._loads.clear()
        self._turns.clear()
        try:
            self._info = self._target.open(Deployment(**given))
        except UnsupportedDeployment as error:
            raise Refused(str(error)) from error
        return {"name": self._info.name, "version": self._info.version}

    def do_load(self, name: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
        self._loads[name] = (prompts, new)
        self._turns[name] = 0
        return {}

    def do_warm(self, load: str, repeats: int) -> dict[str, Any]:
        # Off until the deployment is closed: when it collects is chance, and once a slice would take longer than that.
        gc.disable()
        gc.collect()
        self._turns[load] = 0  # both sides of a comparison begin with the same prompts
        tokens = self._once(load)
        digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]
        taken = []
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        cpu, thread = time.process_time_ns(), time.thread_time_ns()
        for _ in range(repeats):
            started = time.perf_counter_ns()
            self._once(load)
            taken.append(time.perf_counter_ns() - started)
        return {
            "cpu": time.process_time_ns() - cpu,
            "thread": time.thread_time_ns() - thread,
            "waits": resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits,
            "runs": repeats,
            "once": min(taken),
            "children": _children(),
            "kind": str(getattr(self._info, "kind", "engine")),
            "device": str(getattr(self._info, "environment", {}).get("device", "cpu")),
            "tokens": digest,
        }

    def do_pin(self, cores: list[int]) -> dict[str, Any]:
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        return {}

    def do_slice(self, load: str, repeats: int) -> dict[str, Any]:
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(repeats):
            self._once(load)
        return {"cpu": time.process_time_ns() - cpu, "wall": time.perf_counter_ns() - wall}

    def do_profile(self, load: str, repeats: int, clock: str) -> dict[str, Any]:
        profile, stats = getattr(self._target, "profile", None), getattr(self._target, "stats", None)
        if profile is None or stats is None:
            raise Refused("it has no profile")
        now = time.process_time if clock == "cpu" else time.perf_counter
        try:
            profile("time", clock)
        except Exception as error:  # whatever the target raises: it is measured all the same
            raise Refused(f"its profile failed ({type(error).__name__}: {error})") from error
        try:
            before, started = dict(stats()), now()
            for _ in range(repeats):
                self._once(load)
            seconds, after = now() - started, dict(stats())
        finally:
            profile("off")
        ops: dict[str, list[float]] = {}
        for name, value in after.items():
            op, _, what = name.removeprefix(_COUNTERS).rpartition(".")
            if name.startswith(_COUNTERS) and what in ("calls", "seconds"):
                ops.setdefault(op, [0.0, 0.0])[what == "seconds"] = (value - before.get(name, 0)) / repeats
        return {"ops": ops, "seconds": seconds / repeats}

    def do_fork(self, load: str, repeats: int) -> dict[str, Any]:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            try:
                gc.disable()
                for _ in range(repeats):
                    self._once(load)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"a copy of the process ended with status {status}")
        return {"pid": child}

    def do_close(self) -> dict[str, Any]:
        if self._target is not None:
            self._target.close()
        gc.enable()
        gc.collect()
        return {}

    def _once(self, load: str) -> list[list[int]]:
        """Run a load; the tokens of each answer. Raises RuntimeError where it is not all that was asked for."""
        from pytest_adapt.target.protocol import Request

        prompts, new = self._loads[load]
        turn = self._turns[load]
        self._turns[load] = turn + 1
        requests = []
        for number, prompt in enumerate(prompts):
            # Another order of the same tokens each time, so that no cache of prefixes answers a repetition.
            cut = turn % len(prompt)
            tokens = tuple(prompt[cut:] + prompt[:cut])
            requests.append(Request(f"{turn}.{number}", tokens, max_new_tokens=new, want=frozenset({"text"})))
        answers = {response.id: response for response in self._target.run(requests)}
        found = []
        for request in requests:
            response = answers.get(request.id)
            if response is None or response.error is not None or len(response.tokens) != new:
                what = "none came" if response is None else response.error or f"{len(response.tokens)} came"
                raise RuntimeError(f"{new} tokens were asked for after a prompt of {len(request.prompt)}: {what}")
            found.append([int(token) for token in response.tokens])
        return found


def main(lines: TextIO, out: TextIO) -> None:
    """Answer every line until the last."""
    side = SideProcess()
    for line in lines:
        try:
            found = side.answer(json.loads(line))
        except Refused as error:
            found = {"declined": str(error)}
        except Exception as error:  # whatever the target raises is its failure, and told
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(found) + "\n")
        out.flush()


def _children() -> int:
    """Processes that this one has started and that live."""
    count = 0
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            count += len(file.read_text().split())
        except OSError:
            continue
    return count


if __name__ == "__main__":
    # What the target prints must not pass for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, answers)
