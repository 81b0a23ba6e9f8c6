"""JSON over HTTP with a deadline, a size limit and one clear line for everything that goes wrong."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_adapt.target.protocol import TargetError

__all__ = ["Answer", "Event", "JsonClient", "Secret", "api_key"]

_MAX_BODY = 256 << 20
_BLOCK = 1 << 16
_SHOWN = 160
_BUSY = (429, 503)
_MAX_WAIT = 30.0
_ATTEMPTS = 4


class Secret:
    """A value that cannot be printed by accident."""

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __bool__(self) -> bool:
        return bool(self._value)

    def reveal(self) -> str:
        return self._value

    def hide(self, text: str) -> str:
        """``text`` with every occurrence of the secret replaced."""
        return text.replace(self._value, "***") if self._value else text


def api_key() -> Secret:
    """The key of the environment: ADAPT_API_KEY, else OPENAI_API_KEY, else none."""
    return Secret((os.environ.get("ADAPT_API_KEY") or os.environ.get("OPENAI_API_KEY") or "").strip())


@dataclass(frozen=True)
class Answer:
    """Status and JSON object of one answer."""

    status: int
    body: Mapping[str, Any]
    message: str = ""
    """The server's own words for a refusal, shortened, without the key."""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True)
class Event:
    """One event of a stream, and when it came (time.perf_counter)."""

    at: float
    body: Mapping[str, Any]


class JsonClient:
    """Talks to the API under ``url`` (ending in /v1 or wherever its /models and /completions lie).

    Every method raises TargetError with one line: refused connection, deadline, redirect, wrong key, a body that
    is no JSON object, is cut short or too large. The key never appears in it.
    """

    def __init__(self, url: str, key: Secret, timeout: float) -> None:
        parts = urllib.parse.urlsplit(url.rstrip("/"))
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._host, self._port, self._prefix = (parts.hostname or "", parts.port, parts.path)
        self._secure = parts.scheme == "https"
        self._key, self._timeout = key, timeout

    def get(self, path: str, *, timeout: float | None = None) -> Answer:
        return self._exchange("GET", path, None, timeout or self._timeout)

    def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST; a busy server (429, 503) is asked again after the time that it names."""
        for attempt in range(_ATTEMPTS):
            answer = self._exchange("POST", path, body, self._timeout)
            if answer.status not in _BUSY or attempt == _ATTEMPTS - 1:
                break
            time.sleep(min(_MAX_WAIT, float(2**attempt)))
        return answer

    def stream(self, path: str, body: Mapping[str, Any]) -> tuple[Answer, list[Event]]:
        """POST, answered with server-sent events: status, and every event as it came. A refusal has no events."""
        events: list[Event] = []

        def read(response: http.client.HTTPResponse) -> bytes:
            if response.status >= 300 or response.headers.get_content_type() != "text/event-stream":
                return _read(response)
            _read_events(response, events)
            return b"{}"

        return self._exchange("POST", path, body, self._timeout, read), events

    def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        read: Callable[[http.client.HTTPResponse], bytes] | None = None,
    ) -> Answer:
        where = f"{method} {self.url}{path}"
        try:
            status, kind, raw, location = self._transfer(method, path, body, timeout, read or _read)
        except TimeoutError:
            raise TargetError(f"{where}: no answer within {timeout:g} s") from None
        except ssl.SSLError as error:
            raise TargetError(f"{where}: TLS failed: {error.reason or error}") from error
        except socket.gaierror as error:
            raise TargetError(f"{where}: the host name {self._host!r} is unknown ({error.strerror})") from error
        except ConnectionRefusedError:
            raise TargetError(f"{where}: nothing listens there (connection refused); is the server running?") from None
        except http.client.IncompleteRead as error:
            raise TargetError(f"{where}: the answer is cut short after {len(error.partial)} bytes") from None
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise TargetError(f"{where}: {type(error).__name__}: {self._short(str(error))}") from None
        if 300 <= status < 400:
            raise TargetError(f"{where}: redirects ({status}) to {self._short(location)}; give the final URL")
        if status in (401, 403):
            state = "was refused" if self._key else "is not set"
            raise TargetError(
                f"{where}: the server wants a key ({status}); the one of ADAPT_API_KEY or OPENAI_API_KEY {state}"
            )
        return self._parsed(where, status, kind, raw)

    def _parsed(self, where: str, status: int, kind: str, raw: bytes) -> Answer:
        shown = self._short(raw[: 4 * _SHOWN].decode("utf-8", "replace"))
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            parsed = None
            if status < 400:
                what = f"{kind or 'no content type'} that is no JSON: {shown!r}"
                raise TargetError(f"{where}: answered {status} with {what}") from None
        if isinstance(parsed, Mapping):
            return Answer(status, parsed, self._short(_words(parsed)) if status >= 400 else "")
        if status < 400:
            raise TargetError(f"{where}: answered {status} with JSON that is no object: {shown!r}")
        return Answer(status, {}, shown or "no body")

    def _short(self, text: str) -> str:
        text = self._key.hide(" ".join(text.split()))
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

    def _transfer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        read: Callable[[http.client.HTTPResponse], bytes],
    ) -> tuple[int, str, bytes, str]:
        deadline = time.monotonic() + timeout
        connection: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        headers = {"Accept": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key.reveal()}"
        payload = None
        if body is not None:
            payload = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        expired = threading.Event()
        connection.connect()
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, (connection.sock, expired))
        timer.daemon = True
        timer.start()  # a server that drips bytes never meets the socket's own timeout
        try:
            connection.request(method, self._prefix + path, payload, headers)
            with connection.getresponse() as response:
                raw = read(response)
            if expired.is_set():
                raise TimeoutError
            headers_given = response.headers
            return response.status, headers_given.get_content_type(), raw, headers_given.get("Location", "nowhere")
        except (OSError, http.client.HTTPException):
            if expired.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
            connection.close()


def _read(response: http.client.HTTPResponse) -> bytes:
    """The whole body; IncompleteRead where it ends before its announced length, ValueError where it is too large."""
    blocks, size = [], 0
    while block := response.read(_BLOCK):
        blocks.append(block)
        size += len(block)
        if size > _MAX_BODY:
            raise ValueError(f"the answer is larger than {_MAX_BODY >> 20} MiB")
    raw = b"".join(blocks)
    if response.length:
        raise http.client.IncompleteRead(raw, response.length)
    return raw


def _read_events(response: http.client.HTTPResponse, events: list[Event]) -> None:
    """Server-sent events up to ``[DONE]``; ValueError for one that is no JSON object, or for too much of them."""
    size = 0
    for line in response:
        size += len(line)
        if size > _MAX_BODY:
            raise ValueError(f"the answer is larger than {_MAX_BODY >> 20} MiB")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        parsed = json.loads(data)
        if not isinstance(parsed, dict):
            raise ValueError("an event of the stream is no JSON object")
        events.append(Event(time.perf_counter(), parsed))


def _words(body: Mapping[str, Any]) -> str:
    """What a refusal says, in the spellings that servers use."""
    error = body.get("error", body.get("detail", body.get("message", body)))
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _cut(sock: socket.socket, expired: threading.Event) -> None:
    expired.set()
    with contextlib.suppress(OSError):  # closed in between
        sock.shutdown(socket.SHUT_RDWR)
