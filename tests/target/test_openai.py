"""A server is believed only as far as its answers make sense."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt.target.owed import shortfall
from pytest_adapt.target.probe import probe
from pytest_adapt.target.protocol import Deployment, Request, Sampling, Target, TargetError, UnsupportedDeployment
from pytest_adapt.target.registry import resolve

KEY = "sk-very-secret-0123456789"
REQUEST = Request("a", (5, 9, 17, 4), max_new_tokens=3, want=frozenset({"topk", "score", "text"}), topk=4)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADAPT_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def target_of(server: Any, **settings: Any) -> Target:
    settings.setdefault("request_timeout", 5.0)
    return resolve(f"openai:{server.url}", **settings).create()


def opened(server: Any, checkpoint: Path, **settings: Any) -> Target:
    target = target_of(server, **settings)
    target.open(Deployment(str(checkpoint), precision="bf16"))
    return target


def sequence_of(server: Any, request: Request) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(server.next_token(tokens[-1]))
    return tokens


def check_rows(server: Any, response: Any, request: Request) -> None:
    """Every row of the answer is the fake model's distribution after that token."""
    sequence = sequence_of(server, request)
    assert response.tokens == tuple(sequence[len(request.prompt) :])
    assert response.first_row + len(response.topk.ids) == len(sequence) - 1
    for row, token in enumerate(sequence[response.first_row : -1]):
        expected = server.distribution(token, request.topk)
        got = dict(zip(response.topk.ids[row].tolist(), response.topk.logprobs[row].tolist(), strict=True))
        assert {token: value for token, value in got.items() if token >= 0} == pytest.approx(expected), row


@pytest.mark.requirement(90)
def test_token_ids_and_prompt_logprobs_are_mapped_to_rows(server: Any, checkpoint: Path) -> None:
    target = target_of(server)
    info = target.open(Deployment(str(checkpoint), precision="bf16"))
    assert (info.kind, info.name, info.max_context) == ("endpoint", "fake", 128)
    assert info.observables == {"topk", "score", "text"}
    assert info.token_prompts
    (response,) = target.run([REQUEST])
    check_rows(server, response, REQUEST)
    sequence = sequence_of(server, REQUEST)
    for row, following in enumerate(sequence[1:-1]):
        best = server.distribution(sequence[row], REQUEST.topk)
        assert response.scores[row] == pytest.approx(best.get(following, -9.0))
    assert math.isnan(response.scores[-1])
    assert probe(target, Deployment(str(checkpoint)), info).missing == {}


@pytest.mark.parametrize(
    "prompt", [REQUEST.prompt, (5, 61, 9, 61, 4), (61, 5, 9, 4)], ids=["plain", "inside", "leading"]
)
@pytest.mark.parametrize(("shifted", "drops"), [(False, False), (True, False), (True, True)])
def test_echo_is_read_in_every_convention(
    shifted: bool, drops: bool, prompt: tuple[int, ...], server: Any, checkpoint: Path
) -> None:
    server.complete = lambda body: server.text_only(body, shifted=shifted, drops=drops)
    target = target_of(server)
    info = target.open(Deployment(str(checkpoint), precision="bf16"))
    assert not info.token_prompts
    assert ("score" in info.observables) is not shifted, "a shifted echo tells nothing about the next token"
    request = replace(REQUEST, prompt=prompt)
    (response,) = target.run([request])
    assert response.first_row == int(shifted), "a shifted echo lacks row 0"
    check_rows(server, response, request)
    assert response.text == "".join(chr(0x4E00 + token) for token in response.tokens)


@pytest.mark.requirement(113)
@pytest.mark.parametrize("kind", ["token_ids", "echo", "shifted echo", "no log-probabilities"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_an_honest_server_owes_nothing(kind: str, length: int, new: int, server: Any, checkpoint: Path) -> None:
    """Whatever is asked for, the adapter brings it, or has said before that the server cannot show it."""
    if "echo" in kind:
        server.complete = lambda body: server.text_only(body, shifted=kind == "shifted echo", drops=False)
    if kind == "no log-probabilities":
        server.complete = lambda body: server.good({**body, "logprobs": 0, "prompt_logprobs": 0})
    target = target_of(server)
    info = target.open(Deployment(str(checkpoint), precision="bf16"))
    for first in {0, length - 1}:
        want = info.observables if new else info.observables - {"text"} or info.observables
        request = Request("a", REQUEST.prompt[:length] + (8,) * (length - 4), new, want, topk=4, first_row=first)
        (response,) = target.run([request])
        assert shortfall(request, response, info, 128) == ""


def test_a_server_that_cannot_ignore_its_end_token_is_led_past_it(server: Any, checkpoint: Path) -> None:
    """The fake stops where its model says token 33, which is made the end token."""
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "eos_token_id": 33}))

    def stops(body: dict[str, Any]) -> Any:
        answer = server.text_only({**body, "echo": False, "logprobs": 0}, shifted=False)
        if isinstance(answer, dict):
            text = answer["choices"][0]["text"]
            kept = text.partition(chr(0x4E00 + 33))[0]
            stopped = {"text": kept, "finish_reason": "stop" if kept != text else "length"}
            answer["choices"][0].update(stopped)
            answer["usage"]["completion_tokens"] = len(kept)
        return answer

    server.complete = stops
    target = opened(server, checkpoint)
    start = next(token for token in range(60) if server.next_token(server.next_token(token)) == 33)
    request = Request("a", (9, start), max_new_tokens=6)
    expected = tuple(sequence_of(server, request)[2:])
    assert expected[1] == 33
    (response,) = target.run([request])
    assert (response.tokens, response.finish, response.prompt_tokens) == (expected, "length", 2)
    (response,) = target.run([replace(request, ignore_eos=False)])
    assert (response.tokens, response.finish) == (expected[:1], "stop")
    (response,) = target.run([replace(request, stop=(33,))])
    assert (response.tokens, response.finish) == (expected[:2], "stop")
    seeds: list[int] = []
    server.complete = lambda body: seeds.append(body["seed"]) or stops(body)
    for sampling in (Sampling(1.0, top_k=1, seed=7), Sampling(2.0, seed=7)):
        (response,) = target.run([replace(request, sampling=sampling)])
        assert (response.tokens, response.finish) == (expected, "length")
    assert seeds[:2] == [7, 9] and len(set(seeds)) == len(seeds) // 2


def test_an_echo_of_another_length_is_refused(server: Any, checkpoint: Path) -> None:
    server.complete = lambda body: server.text_only(body, shifted=True)
    target = opened(server, checkpoint)

    def shorter(body: dict[str, Any]) -> Any:
        answer = server.text_only(body, shifted=True)
        for entries in answer["choices"][0]["logprobs"].values():
            del entries[2:4]
        return answer

    server.complete = shorter
    with pytest.raises(TargetError, match="the echo has 4 entries for 4 prompt tokens and 3 new ones"):
        list(target.run([REQUEST]))


def test_a_server_without_logprobs_shows_text_alone(server: Any, checkpoint: Path) -> None:
    def bare(body: dict[str, Any]) -> dict[str, Any]:
        answer = server.good({**body, "logprobs": 0, "prompt_logprobs": 0})
        for name in ("token_ids", "prompt_token_ids"):
            del answer["choices"][0][name]
        return answer

    server.complete = bare
    target = target_of(server)
    assert target.open(Deployment(str(checkpoint))).observables == {"text"}
    (response,) = target.run([replace(REQUEST, want=frozenset({"text"}))])
    assert response.tokens == tuple(sequence_of(server, REQUEST)[4:])
    assert response.topk is None


def test_a_server_is_told_what_not_to_filter(server: Any, checkpoint: Path) -> None:
    """llama-cpp-python keeps 40 tokens, and those of a twentieth of the best, where nothing is said."""
    target = opened(server, checkpoint)
    hot = Sampling(1.4, seed=7)
    list(target.run([replace(REQUEST, sampling=hot), replace(REQUEST, sampling=replace(hot, top_k=3, top_p=0.8))]))
    asked = [
        {name: body[name] for name in ("temperature", "seed", "top_p", "top_k", "min_p")} for body in server.bodies[-2:]
    ]
    everything = {"temperature": 1.4, "seed": 7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert sorted(asked, key=lambda body: body["top_k"]) == [everything, {**everything, "top_k": 3, "top_p": 0.8}]


def test_a_server_that_allows_fewer_logprobs_is_asked_for_fewer(server: Any, checkpoint: Path) -> None:
    def strict(body: dict[str, Any]) -> Any:
        if max(body.get("logprobs", 0), body.get("prompt_logprobs", 0)) > 5:
            return 400, "application/json", b'{"error": {"message": "logprobs must be at most 5"}}'
        return server.good(body)

    server.complete = strict
    target = target_of(server)
    info = target.open(Deployment(str(checkpoint)))
    assert info.environment["logprobs"] == "5"
    (response,) = target.run([replace(REQUEST, topk=20)])
    assert response.topk.ids.shape == (6, 5)


def test_a_prompt_that_is_counted_differently_is_refused_at_once(server: Any, checkpoint: Path) -> None:
    def adds_bos(body: dict[str, Any]) -> dict[str, Any]:
        answer = server.good(body)
        answer["usage"]["prompt_tokens"] += 1
        return answer

    server.complete = adds_bos
    with pytest.raises(TargetError, match="counted 13 prompt tokens where 12 were sent"):
        opened(server, checkpoint)


@pytest.mark.requirement(102)
def test_a_refusal_is_an_answer_and_the_next_request_is_served(server: Any, checkpoint: Path) -> None:
    target = opened(server, checkpoint)

    def refuses_long(body: dict[str, Any]) -> Any:
        if len(body["prompt"]) > 100:
            return 400, "application/json", b'{"object": "error", "message": "maximum context length is 128 tokens"}'
        return server.good(body)

    server.complete = refuses_long
    long = replace(REQUEST, id="long", prompt=(5,) * 101)
    refused, served = target.run([long, REQUEST])
    assert refused.error == "400: maximum context length is 128 tokens"
    assert served.error is None and len(served.tokens) == 3


@pytest.mark.parametrize("status", [400, 404, 413, 422, 500])
def test_a_refusal_in_any_spelling_is_that_requests_error(status: int, server: Any, checkpoint: Path) -> None:
    target = opened(server, checkpoint)
    spellings: dict[str, bytes] = {
        "CUDA error: out of memory": b"CUDA error: out of memory",
        "too long": b'{"error": {"message": "too long"}}',
        "no such field": b'{"detail": "no such field"}',
        "no body": b"",
    }
    for message, raw in spellings.items():
        server.complete = lambda body, raw=raw: (status, "text/plain", raw)
        (response,) = target.run([REQUEST])
        assert response.error == f"{status}: {message}"
        assert response.tokens == () and response.topk is None


def drip(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        if handler.server_release.wait(0.1):
            return


def truncated(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')


def endless(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 65536)
    except OSError:
        pass


def garbage(handler: Any) -> None:
    handler.wfile.write(b"\x00\x01\x02 not HTTP\r\n\r\n")


def reset(handler: Any) -> None:
    handler.connection.close()


RAW: list[tuple[str, Callable[[Any], None], str]] = [
    ("drips bytes for ever", drip, "no answer within 0.5 s"),
    ("cut short", truncated, "cut short"),
    ("endless body", endless, "larger than 1 MiB|no answer within"),
    ("not HTTP", garbage, "BadStatusLine"),
    ("closes the connection", reset, "RemoteDisconnected|BadStatusLine|ConnectionReset|closed"),
]


@pytest.mark.requirement(102)
@pytest.mark.parametrize(("raw", "message"), [case[1:] for case in RAW], ids=[case[0] for case in RAW])
def test_a_broken_transfer_is_one_clear_line(
    raw: Callable[[Any], None], message: str, server: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_adapt.target.http._MAX_BODY", 1 << 20)
    target = opened(server, checkpoint, request_timeout=0.5)

    def spoil(handler: Any) -> None:
        handler.server_release = server.release
        handler.close_connection = True
        raw(handler)

    server.raw = spoil
    with pytest.raises(TargetError, match=message) as caught:
        list(target.run([REQUEST]))
    assert "\n" not in str(caught.value)


def changed(**choice: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0].update(choice)
        return answer

    return change


def first_entry(value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0]["prompt_logprobs"][1] = value
        return answer

    return change


NONSENSE: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("HTML", lambda _: (200, "text/html", b"<html>Welcome</html>"), "text/html that is no JSON"),
    ("a JSON list", lambda _: (200, "application/json", b"[1, 2]"), "JSON that is no object"),
    ("deep nesting", lambda _: (200, "application/json", b"[" * 100_000), "no JSON"),
    ("no choices", lambda answer: {"usage": answer["usage"]}, "no choices"),
    ("two choices", lambda answer: {**answer, "choices": answer["choices"] * 2}, "2 choices"),
    ("no usage", lambda answer: {"choices": answer["choices"]}, "no usage.prompt_tokens"),
    ("text is a number", changed(text=7), "text is int"),
    ("token ids are text", changed(token_ids="abc"), "token_ids is no list of token ids"),
    ("prompt rows are missing", changed(prompt_logprobs=[None]), "1 entries for 4 prompt tokens"),
    ("prompt row is a number", first_entry(3), r"prompt_logprobs\[1\] is int"),
    ("prompt row is keyed by words", first_entry({"cat": {"logprob": -1}}), "'cat' is no token id"),
    ("prompt row lacks its token", first_entry({"1": {"logprob": -1.0}}), "lacks the prompt's own token 9"),
    ("NaN", first_entry({"9": {"logprob": math.nan}}), "log-probability is nan"),
    ("null", first_entry({"9": {"logprob": None}}), "log-probability is None"),
    (
        "lists of different lengths",
        changed(logprobs={"tokens": ["token_id:1"], "token_logprobs": []}),
        "different lengths",
    ),
    ("logprobs are a list", changed(logprobs=[]), "logprobs is list"),
    ("redirect", lambda _: (302, "text/plain", b""), r"redirects \(302\) to http://127.0.0.1:1/elsewhere"),
    ("key refused", lambda _: (401, "application/json", b"{}"), "wants a key .*is not set"),
]


@pytest.mark.requirement(102)
@pytest.mark.parametrize(("change", "message"), [case[1:] for case in NONSENSE], ids=[case[0] for case in NONSENSE])
def test_nonsense_is_one_clear_line(
    change: Callable[[dict[str, Any]], Any], message: str, server: Any, checkpoint: Path
) -> None:
    target = opened(server, checkpoint)
    server.complete = lambda body: change(server.good(body))
    with pytest.raises(TargetError, match=message) as caught:
        list(target.run([REQUEST]))
    assert "\n" not in str(caught.value)


def test_other_prompt_ids_than_were_sent_are_noticed(server: Any, checkpoint: Path) -> None:
    target = opened(server, checkpoint)
    server.complete = lambda body: changed(prompt_token_ids=[1, 2, 3, 4])(server.good(body))
    (response,) = target.run([REQUEST])
    assert response.error == "the server tokenised the prompt into other ids than were sent"
    assert response.topk is None


def test_a_server_that_is_not_there(checkpoint: Path) -> None:
    target = resolve("openai:http://127.0.0.1:9/v1").create()
    with pytest.raises(TargetError, match="connection refused.*is the server running") as caught:
        target.open(Deployment(str(checkpoint)))
    assert "\n" not in str(caught.value)


def test_several_models_need_a_choice(server: Any, checkpoint: Path) -> None:
    server.models = {"data": [{"id": "one"}, {"id": "two"}]}
    with pytest.raises(TargetError, match=r"serves 2 models \(one, two\); say which: openai\[model=NAME\]"):
        opened(server, checkpoint)
    target = resolve(f"openai[model=two]:{server.url}").create()
    target.open(Deployment(str(checkpoint)))
    assert server.bodies[-1]["model"] == "two"
    server.models = {"data": [{"id": "one"}, {"id": checkpoint.name}]}
    opened(server, checkpoint)
    assert server.bodies[-1]["model"] == checkpoint.name


def test_a_running_server_keeps_its_layout_and_its_declared_precision(server: Any, checkpoint: Path) -> None:
    target = resolve(f"openai[precisions=bf16]:{server.url}").create()
    with pytest.raises(UnsupportedDeployment, match="layout tp2"):
        target.open(Deployment(str(checkpoint), layout="tp2", precision="bf16"))
    with pytest.raises(UnsupportedDeployment, match="precision fp32"):
        target.open(Deployment(str(checkpoint), precision="fp32"))


@pytest.mark.parametrize("variable", ["ADAPT_API_KEY", "OPENAI_API_KEY"])
def test_the_key_is_sent_and_never_printed(
    variable: str, server: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, KEY)
    target = target_of(server)
    info = target.open(Deployment(str(checkpoint)))
    assert all(header["Authorization"] == f"Bearer {KEY}" for header in server.headers)
    shown = [repr(target), repr(vars(target)), repr(vars(target)["_client"].__dict__), repr(info)]
    leaks: list[Any] = [
        (500, "application/json", json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()),
        (400, "text/plain", f"bad key {KEY}".encode()),
        (200, "text/html", f"<p>{KEY}</p>".encode()),
        (403, "application/json", json.dumps({"error": KEY}).encode()),
    ]
    for leak in leaks:
        server.complete = lambda body, leak=leak: leak
        try:
            shown += [repr(response) for response in target.run([REQUEST])]
        except TargetError as error:
            shown.append(str(error))
    captured = capfd.readouterr()
    assert not [text for text in [*shown, captured.out, captured.err] if KEY in text]


def test_requests_in_flight_are_bounded(server: Any, checkpoint: Path) -> None:
    import threading

    busy, most, lock = [0], [0], threading.Lock()
    target = opened(server, checkpoint, concurrency=3)

    def slow(body: dict[str, Any]) -> dict[str, Any]:
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        server.release.wait(0.02)
        with lock:
            busy[0] -= 1
        return server.good(body)

    server.complete = slow
    answers = list(target.run([replace(REQUEST, id=str(i)) for i in range(12)]))
    assert {answer.id for answer in answers} == {str(i) for i in range(12)}
    assert 2 <= most[0] <= 3
    assert all(np.isfinite(answer.topk.logprobs).all() for answer in answers if answer.topk)


TIMED = replace(REQUEST, want=frozenset({"text"}), timed=True)


def stream_of(answer: dict[str, Any], usage: bool = True) -> tuple[int, str, bytes]:
    """A whole answer as server-sent events, one token each."""
    choice = answer["choices"][0]
    events: list[dict[str, Any]] = []
    for place, token in enumerate(choice["token_ids"]):
        part = {"index": 0, "text": choice["text"][place], "token_ids": [token], "finish_reason": None}
        events.append({"choices": [part]})
    events[-1]["choices"][0]["finish_reason"] = "length"
    if usage:
        events.append({"choices": [], "usage": answer["usage"]})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return 200, "text/event-stream", (": hello\n\n" + "".join(lines) + "data: [DONE]\n\n").encode()


@pytest.mark.requirement(105)
@pytest.mark.parametrize("usage", [True, False])
def test_a_timed_request_is_streamed(server: Any, checkpoint: Path, usage: bool) -> None:
    target = opened(server, checkpoint)
    server.complete = lambda body: stream_of(server.good(body), usage) if body["stream"] else server.good(body)
    (response,) = target.run([TIMED])
    (plain,) = target.run([replace(TIMED, timed=False)])
    assert response.error is None and response.tokens == plain.tokens and response.text == plain.text
    assert response.prompt_tokens == len(TIMED.prompt)
    assert response.first_token_seconds is not None and response.seconds is not None
    assert 0 < response.first_token_seconds <= response.seconds
    assert plain.first_token_seconds is None
    assert [body["stream"] for body in server.bodies[-2:]] == [True, False]


def test_a_server_that_does_not_stream_is_timed_as_a_whole(server: Any, checkpoint: Path) -> None:
    target = opened(server, checkpoint)
    refusal = (400, "application/json", b'{"error": {"message": "no streams"}}')
    server.complete = lambda body: refusal if body["stream"] else server.good(body)
    (response,) = target.run([TIMED])
    assert response.error is None and len(response.tokens) == 3
    assert response.first_token_seconds is None and response.seconds is not None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"data: {not json\n\n", "JSONDecodeError"),
        (b"data: [1]\n\n", "no JSON object"),
    ],
)
def test_a_broken_stream_is_one_clear_line(server: Any, checkpoint: Path, raw: bytes, why: str) -> None:
    target = opened(server, checkpoint)
    server.complete = lambda body: (200, "text/event-stream", raw)
    with pytest.raises(TargetError, match=why):
        list(target.run([TIMED]))


def test_an_error_within_a_stream_is_the_answer(server: Any, checkpoint: Path) -> None:
    target = opened(server, checkpoint)
    events = b'data: {"choices": [{"text": "\\u4e05"}]}\n\ndata: {"error": {"message": "out of memory"}}\n\n'
    failed = (500, "application/json", b'{"error": {"message": "out of memory"}}')
    server.complete = lambda body: (200, "text/event-stream", events) if body["stream"] else failed
    (response,) = target.run([TIMED])
    assert response.error is not None and "out of memory" in response.error
