"""A fake OpenAI server whose answers a test decides, and a tiny checkpoint directory for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.models.tokenizer import character_tokenizer

VOCAB = 64
BEGIN = 61
Answer = tuple[int, str, bytes] | dict[str, Any]


class FakeServer:
    """Answers POST /v1/completions with ``complete(body)``: a JSON object, or (status, content type, bytes)."""

    def __init__(self) -> None:
        self.complete: Callable[[dict[str, Any]], Answer] = good_completion
        self.good = good_completion
        self.text_only = text_completion
        self.next_token = next_token
        self.distribution = distribution
        self.models: Answer = {"data": [{"id": "tiny", "owned_by": "fake", "max_model_len": 128}]}
        self.raw: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.headers.append(dict(self.headers))
                outer.send(self, outer.models if self.path == "/v1/models" else (404, "text/plain", b"no"))

            def do_POST(self) -> None:
                outer.headers.append(dict(self.headers))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                if outer.raw is not None:
                    outer.raw(self)
                else:
                    outer.send(self, outer.complete(body))

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        status, kind, raw = (
            (200, "application/json", json.dumps(answer).encode()) if isinstance(answer, dict) else answer
        )
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(raw)))
        if 300 <= status < 400:
            handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
        handler.end_headers()
        handler.wfile.write(raw)

    def stop(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def next_token(token: int) -> int:
    """The fake model: what follows ``token``."""
    return (7 * token + 3) % (VOCAB - 4)


def distribution(token: int, k: int) -> dict[int, float]:
    """The k best candidates after ``token``, best first."""
    return {(next_token(token) + i) % (VOCAB - 4): -0.7 - i for i in range(min(k, VOCAB - 4))}


def text_of(token: int) -> str:
    return "<|bos|>" if token == BEGIN else chr(0x4E00 + token)


def ids_of(prompt: list[int] | str) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    return [ord(character) - 0x4E00 for character in prompt.replace("<|bos|>", chr(0x4E00 + BEGIN))]


def generated(prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token((prompt + tokens)[-1]))
    return tokens


def good_completion(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers: token ids, prompt_logprobs, logprobs with token_id: keys."""
    prompt, k = ids_of(body["prompt"]), body.get("logprobs") or 0
    tokens = generated(prompt, body["max_tokens"])
    fed = prompt + tokens
    choice: dict[str, Any] = {
        "index": 0,
        "text": "".join(chr(0x4E00 + token) for token in tokens),
        "finish_reason": "length",
        "token_ids": tokens,
        "prompt_token_ids": prompt,
    }
    if k:
        rows = [distribution(fed[len(prompt) - 1 + i], k) for i in range(len(tokens))]
        choice["logprobs"] = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [row[token] for row, token in zip(rows, tokens, strict=True)],
            "top_logprobs": [{f"token_id:{token}": value for token, value in row.items()} for row in rows],
        }
    if body.get("prompt_logprobs"):
        entries: list[Any] = [None]
        for before, token in zip(prompt, prompt[1:], strict=False):
            row = {token: -9.0, **distribution(before, body["prompt_logprobs"])}
            entries.append({str(candidate): {"logprob": value, "rank": 1} for candidate, value in row.items()})
        choice["prompt_logprobs"] = entries
    return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}


def text_completion(body: dict[str, Any], *, shifted: bool, drops: bool = True) -> Answer:
    """What a text-only server answers. ``shifted`` is llama-cpp-python's echo: entry i is what follows token i, the
    last token has none; where it ``drops`` begin tokens, a leading one shifts everything back."""
    if not isinstance(body["prompt"], str):
        return 422, "application/json", json.dumps({"detail": "prompt must be a string"}).encode()
    prompt, k, echo = ids_of(body["prompt"]), body.get("logprobs") or 0, bool(body.get("echo"))
    tokens = generated(prompt, body["max_tokens"])
    fed = prompt + tokens
    shown = list(range(len(fed))) if echo else list(range(len(prompt), len(fed)))  # positions with an entry
    source = {position: position - 1 for position in shown}  # the token whose successor the entry describes
    if echo and shifted:
        late = int(drops and prompt[0] == BEGIN)
        source = {position: position - late for position in shown if not drops or fed[position] != BEGIN}
        source = {position: before for position, before in source.items() if before < len(fed) - 1}
    rows = [{fed[p]: -9.0, **(distribution(fed[q], k) if q >= 0 else {})} for p, q in source.items()]
    tops: list[Any] = [{text_of(token): value for token, value in row.items()} for row in rows]
    scores: list[Any] = [row[fed[position]] for row, position in zip(rows, source, strict=True)]
    if echo:
        tops[0] = scores[0] = None
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice["text"] = "".join(text_of(token) for token in (fed if echo else tokens))
    if k:
        texts = [text_of(fed[position]) for position in source]
        choice["logprobs"] = {"tokens": texts, "token_logprobs": scores, "top_logprobs": tops}
    return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """config.json and tokenizer.json are all that a client of a server reads."""
    directory = tmp_path / "a model"
    directory.mkdir()
    (directory / "config.json").write_text(
        json.dumps({"vocab_size": VOCAB, "model_type": "llama", "bos_token_id": BEGIN})
    )
    (directory / "tokenizer.json").write_text(json.dumps(character_tokenizer(VOCAB)))
    return directory
