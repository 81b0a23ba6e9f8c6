"""``jsonl:COMMAND``: an engine behind a child process in any language, one JSON object per line.

The judge writes to the child's standard input, the child answers on standard output and logs to standard error::

    > {"op": "open", "deployment": {"model": "/dir", "layout": "single", "precision": "fp32", ...}}
    < {"info": {"name": "tiny", "version": "1", "observables": ["logits", "text"]}}
      or {"unsupported": "reason"} or {"error": "reason"}
    > {"op": "run", "requests": [{"id": "a", "prompt": [5, 6, 7], "max_new_tokens": 2, "want": ["logits"], ...}]}
    < {"response": {"id": "a", "prompt_tokens": 3, "tokens": [8, 9], "logits": [[...], ...]}}   (one line per request)
    > {"op": "close"}                                                                       (the child ends)

Field names are those of `pytest_adapt.target.protocol`. An array is nested lists (null is nan) or
``{"dtype": "float32", "shape": [4, 100], "base64": "..."}``; topk is ``{"ids": array, "logprobs": array}``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from pytest_adapt.documents import one_line
from pytest_adapt.target.checked import checked_info, checked_responses, decode_array
from pytest_adapt.target.process import Child, log_path
from pytest_adapt.target.protocol import (
    OBSERVABLES,
    Deployment,
    Info,
    Request,
    Response,
    TargetError,
    TopK,
    UnsupportedDeployment,
)

if TYPE_CHECKING:
    from pytest_adapt.target.registry import TargetSettings

__all__ = ["JsonlTarget"]

_CLOSE_SECONDS = 5.0
_SETTLE = 0.5
_MAX_LINE = 1 << 30
_SHOWN = 120


class JsonlTarget:
    """Starts the command at open, talks line by line, ends its process group at close."""

    def __init__(self, argument: str, settings: TargetSettings) -> None:
        self._command, self._settings = argument, settings
        self._child: Child | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._who = f"target jsonl:{_shown(argument)}"

    def open(self, deployment: Deployment) -> Info:
        self.close()
        self._lines = queue.Queue()
        log = log_path(self._settings.log_dir, "jsonl")
        self._child = Child(self._command, log, piped=True, grace=self._settings.stop_grace)
        reader = threading.Thread(target=_read, args=(cast(IO[bytes], self._child.stdout), self._lines), daemon=True)
        reader.start()
        try:
            self._send({"op": "open", "deployment": dataclasses.asdict(deployment)})
            answer = self._receive(self._settings.start_timeout, "open")
            if "unsupported" in answer:
                raise UnsupportedDeployment(str(answer["unsupported"]))
            return self._info(answer)
        except TargetError:
            self.close()
            raise

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        asked = list(requests)
        yield from checked_responses(self._who, self._answers(asked) if asked else (), asked)

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.exit_code() is None:
            _write(child, {"op": "close"})
            deadline = time.monotonic() + _CLOSE_SECONDS
            while child.exit_code() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        child.stop()

    def _answers(self, requests: list[Request]) -> list[Response]:
        """All answers before the first is passed on: a caller that stops early leaves no line behind."""
        self._send({"op": "run", "requests": [_request(request) for request in requests]})
        answers = []
        for _ in requests:
            answer = self._receive(self._settings.request_timeout, "run")
            if not isinstance(answer.get("response"), Mapping):
                self._fail(f'answered run with {_shown(answer)}, expected {{"response": {{...}}}}')
            answers.append(self._response(answer["response"]))
        return answers

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._child is None:
            raise TargetError(f"{self._who}: not open")
        _write(self._child, message)

    def _receive(self, timeout: float, op: str) -> Mapping[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self._fail(f"no answer to {op} within {timeout:g} s")
        if line is None:
            self._dead(op)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            self._fail(f"answered {op} with a line that is no JSON: {_shown(line.decode('utf-8', 'replace'))}")
        if not isinstance(answer, Mapping):
            self._fail(f"answered {op} with {_shown(answer)}, expected a JSON object")
        if "error" in answer:
            self._fail(f"refused {op}: {_shown(answer['error'])}")
        return answer

    def _info(self, answer: Mapping[str, Any]) -> Info:
        given = answer.get("info")
        known = {item.name for item in dataclasses.fields(Info)}
        if not isinstance(given, Mapping) or "name" not in given:
            self._fail(f'answered open with {_shown(answer)}, expected {{"info": {{"name": ...}}}}')
        wrong = sorted(set(given) - known)
        if wrong:
            self._fail(f"info has {', '.join(wrong)}; known keys: {', '.join(sorted(known))}")
        values: dict[str, Any] = {"version": "", **given}
        try:
            values["observables"] = frozenset(values.get("observables", ["text"]))
            values["features"] = {name: tuple(levels) for name, levels in values.get("features", {}).items()}
            values["sites"] = tuple(values.get("sites", ()))
        except (TypeError, AttributeError) as error:
            self._fail(f"info: {error}")
        strange = sorted(map(str, values["observables"] - set(OBSERVABLES)))
        if strange:
            self._fail(f"info: observables has {', '.join(strange)}; known: {', '.join(OBSERVABLES)}")
        try:
            return checked_info(self._who, Info(**values))
        except TargetError as error:
            self._fail(str(error).removeprefix(f"{self._who}: "))

    def _response(self, given: Mapping[str, Any]) -> Response:
        values = dict(given)
        wrong = sorted(set(values) - {item.name for item in dataclasses.fields(Response)})
        if wrong or "id" not in values:
            self._fail(f"response has {', '.join(wrong) or 'no id'}; keys are those of protocol.Response")
        at = f"request {values['id']!r}"
        try:
            values.setdefault("prompt_tokens", -1)
            values["tokens"] = tuple(values.get("tokens") or ())
            for name, dtype in (("logits", np.float32), ("scores", np.float64)):
                if values.get(name) is not None:
                    values[name] = decode_array(values[name], dtype)
            if values.get("topk") is not None:
                topk = values["topk"]
                ids, logprobs = (decode_array(topk["ids"], np.int64), decode_array(topk["logprobs"], np.float64))
                values["topk"] = TopK(ids, logprobs)
            taps = values.get("taps") or {}
            values["taps"] = {
                name: decode_array(value, np.int64 if name.endswith(".ids") else np.float32)
                for name, value in taps.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            self._fail(f"{at}: {type(error).__name__}: {error}")
        return Response(**values)

    def _fail(self, what: str) -> NoReturn:
        child, self._child = self._child, None
        if child is not None:
            child.stop()
        story = f"\n{child.story()}" if child else ""
        raise TargetError(f"{self._who}: {what}{story}")

    def _dead(self, op: str) -> NoReturn:
        deadline = time.monotonic() + _SETTLE
        while self._child and self._child.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        how = self._child.describe_exit() if self._child else "is gone"
        if how == "still runs":
            how = "closed its standard output"
        self._fail(f"the command {how} before it answered {op}")


def _read(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    """Feed every line of the child's standard output to the queue; None at its end."""
    try:
        while line := stream.readline(_MAX_LINE):
            if line.strip():
                lines.put(line)
    except (OSError, ValueError):
        pass  # closed while reading
    lines.put(None)


def _write(child: Child, message: Mapping[str, Any]) -> None:
    """Write one line, in a thread: a child that does not read must not block the judge (its answer times out)."""
    stream, line = cast(IO[bytes], child.stdin), json.dumps(message).encode() + b"\n"

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # it died or was closed: the reader says so
            stream.write(line)
            stream.flush()

    threading.Thread(target=write, daemon=True).start()


def _request(request: Request) -> dict[str, Any]:
    return {**dataclasses.asdict(request), "want": sorted(request.want)}


def _shown(value: object) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value), _SHOWN)
