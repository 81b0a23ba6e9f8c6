"""``cmd:SHELL LINE``: a server started for each deployment from a template, then judged through the OpenAI API.

The line runs in a session of its own with its output in ``.adapt/logs/``; it is healthy when ``/v1/models``
(or ``/health``) answers on the port that it was given. When it dies, the error ends with the tail of its log.
Closing ends it with everything that it started.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_adapt.perf.memory import tree_peak
from pytest_adapt.target.http import JsonClient, Secret
from pytest_adapt.target.openai import OpenAITarget
from pytest_adapt.target.process import Child, log_path, tail
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, TargetError, UnsupportedDeployment
from pytest_adapt.target.template import Template

if TYPE_CHECKING:
    from pytest_adapt.target.registry import TargetSettings

__all__ = ["CmdTarget"]

_POLL = 0.25
_HEALTH_TIMEOUT = 5.0
_SETTLE = 0.5
_PORT_ATTEMPTS = 3
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port \d+ is (?:already )?in use", re.IGNORECASE)


class CmdTarget:
    """Server and client in one: open starts, close stops."""

    def __init__(self, argument: str, settings: TargetSettings) -> None:
        self._template, self._settings = Template(argument), settings
        self._child: Child | None = None
        self._client: OpenAITarget | None = None

    def open(self, deployment: Deployment) -> Info:
        self.close()
        self._check(deployment)
        started = time.perf_counter()
        url = self._start(deployment)
        seconds = time.perf_counter() - started
        options = {name: value for name, value in self._settings.options.items() if name != "precisions"}
        self._client = OpenAITarget(url, replace(self._settings, options=options))
        try:
            info = self._client.open(replace(deployment, layout="single"))
        except TargetError as error:
            self._fail(error)
        log = str(self._child.log) if self._child else ""
        environment = {**info.environment, "command": self._template.line, "log": log}
        return replace(info, environment=environment, load={"seconds": seconds})

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        if self._client is None:
            raise TargetError("target cmd: not open")
        try:
            yield from self._client.run(requests)
        except TargetError as error:
            self._fail(error)

    def close(self) -> None:
        client, self._client = self._client, None
        child, self._child = self._child, None
        if client is not None:
            client.close()
        if child is not None:
            child.stop()

    def peak_memory(self, reset: bool = False) -> int | None:
        """Largest resident size of the server's processes since the last reset, in bytes."""
        return tree_peak(self._child.pid, reset) if self._child is not None else None

    def _check(self, deployment: Deployment) -> None:
        declared = self._settings.options.get("precisions")
        if declared and deployment.precision not in declared.split("+"):
            raise UnsupportedDeployment(f"precision {deployment.precision}: the spec says precisions={declared}")
        if not declared and not self._template.precisions and deployment.precision != "bf16":
            raise UnsupportedDeployment(
                f"precision {deployment.precision}: the command has no {{dtype}}; "
                "say what it runs: cmd[precisions=fp32]:..."
            )
        asked = [name for name, setting in deployment.features if setting]
        if asked:
            raise UnsupportedDeployment(f"feature {asked[0]}: a command has no placeholder for it")

    def _start(self, deployment: Deployment) -> str:
        """Start the server and wait until it is healthy; its API's URL. A taken port is tried again elsewhere."""
        model = str(Path(deployment.model).resolve())
        log, why = Path(), ""
        for _ in range(_PORT_ATTEMPTS):
            port = _free_port()
            line = self._template.render(replace(deployment, model=model), port=port, python=sys.executable)
            log = log_path(self._settings.log_dir, f"cmd-{Path(model).name}-{deployment.layout}-{deployment.precision}")
            self._child = Child(line, log, grace=self._settings.stop_grace)
            url = f"http://127.0.0.1:{port}/v1"
            why = self._wait(url)
            if not why:
                return url
            if _PORT_TAKEN.search(tail(log)) is None:
                self._fail(TargetError(why))
            self.close()
        raise TargetError(f"target cmd: {why}: every port was taken\n{tail(log)}")

    def _wait(self, url: str) -> str:
        """Empty once the server is healthy, else why it will not be."""
        client = JsonClient(url, Secret(""), _HEALTH_TIMEOUT)
        root = JsonClient(url.removesuffix("/v1"), Secret(""), _HEALTH_TIMEOUT)
        deadline = time.monotonic() + self._settings.start_timeout
        while time.monotonic() < deadline:
            if self._child is None or self._child.exit_code() is not None:
                return "the server did not start"
            if _healthy(client, "/models") or _healthy(root, "/health"):
                # The port might be another process's: believe it only while our own still runs.
                return "" if self._child.exit_code() is None else "the server did not start"
            time.sleep(_POLL)
        return f"the server was not healthy within {self._settings.start_timeout:g} s (ADAPT_START_TIMEOUT)"

    def _fail(self, error: TargetError) -> NoReturn:
        """Raise ``error``; where the server died or never became healthy, with how it ended and its log."""
        child = self._child
        if isinstance(error, UnsupportedDeployment) or child is None:
            raise error
        deadline = time.monotonic() + _SETTLE
        while child.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.02)  # a server that dies closes its connections a moment before it is gone
        gone = child.exit_code() is not None
        how = f" ({child.describe_exit()})" if gone else ""
        self.close()
        raise TargetError(f"target cmd: {error}{how}\n{child.story()}") from error


def _healthy(client: JsonClient, path: str) -> bool:
    try:
        answer = client.get(path)
    except TargetError as error:
        # Health pages are often empty, and a server may want its key: both mean that it is up.
        return "is no JSON: ''" in str(error) or "wants a key" in str(error)
    return answer.ok


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
