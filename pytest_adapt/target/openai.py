"""``openai:URL``: a server that speaks the OpenAI completions API and already serves the checkpoint.

Opening asks the server, with a few short completions, what it can do: token ids as prompts, log-probabilities of
the prompt (`prompt_logprobs`, or `echo`), of the output, and how it counts tokens. A server shows itself through
those alone, so what it cannot do is not asked for again.

The key comes from ADAPT_API_KEY or OPENAI_API_KEY and is never printed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_adapt.target.checked import checked_response
from pytest_adapt.target.completions import (
    Choice,
    Entry,
    Rows,
    echoed_entries,
    joined_events,
    output_entries,
    prompt_entries,
    read_choice,
)
from pytest_adapt.target.http import Answer, JsonClient, api_key
from pytest_adapt.target.probe import probe_prompt
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, TargetError, TopK, UnsupportedDeployment
from pytest_adapt.target.tokenizer import Tokenizer, ids_of_strings, load_tokenizer

if TYPE_CHECKING:
    from pytest_adapt.target.registry import TargetSettings

__all__ = ["OpenAITarget"]

_LOGPROBS = (20, 5, 1)
# Candidates by text may hide one another; the longer the list, the less room is left for a hidden one.
_TEXT_LOGPROBS = 60
# Two answers to one question differ by rounding; a neighbouring row is another distribution altogether.
_ALIKE = 0.5
# vLLM's fields for exact ids, and llama-cpp-python's name for a penalty that its server sets to 1.1 by default.
_EXTRAS: Mapping[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "add_special_tokens": False,
    "repeat_penalty": 1.0,
}


@dataclass(frozen=True)
class _Dialect:
    """What the server was seen to understand."""

    tokens: bool = True
    """Prompts as token ids."""
    extras: bool = True
    """Fields beyond OpenAI's are accepted (or ignored)."""
    k: int = 0
    """Log-probabilities per position that it gives; 0 none."""
    prompt: str = ""
    """How it shows the prompt: prompt_logprobs, echo, echo_after (entry i belongs to row i), or not at all."""
    left_out: int = -1
    """Token id that its echo leaves out; -1 none."""

    @property
    def observables(self) -> frozenset[str]:
        shown = {"text"}
        if self.k:
            shown.add("topk")
        if self.prompt in ("prompt_logprobs", "echo"):
            shown.add("score")
        return frozenset(shown)


@dataclass
class _Served:
    """The checkpoint as the judge sees it."""

    directory: Path
    vocab: int = 0
    begin: int = -1
    end: int = -1
    tokenizer: Tokenizer | None = None
    strings: dict[str, int] = field(default_factory=dict)

    def reader(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises TargetError where it cannot be read."""
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.directory)
        return self.tokenizer

    def text_of(self, prompt: Sequence[int]) -> str:
        """Text that the checkpoint's tokenizer turns into exactly ``prompt``. Raises ValueError where none does."""
        outside = [token for token in prompt if not 0 <= token < self.vocab]
        if outside:
            raise ValueError(
                f"token id {outside[0]} is outside the vocabulary of {self.vocab}, and no text stands for it"
            )
        text = self.reader().decode(prompt)
        if self.reader().encode(text) != list(prompt):
            raise ValueError("the server takes text only, and no text stands for exactly these token ids")
        return text

    def need_strings(self) -> None:
        if not self.strings:
            self.strings = ids_of_strings(self.reader())


class OpenAITarget:
    """A running server as a target; shows score and top-k where it gives log-probabilities, else text."""

    def __init__(self, argument: str, settings: TargetSettings) -> None:
        self._settings = settings
        self._client = JsonClient(argument, api_key(), settings.request_timeout)
        self._who = f"server {self._client.url}"
        self._dialect = _Dialect()
        self._served = _Served(Path())
        self._model = ""
        self._ready = False

    def open(self, deployment: Deployment) -> Info:
        self.close()
        self._check(deployment)
        self._served = _Served(Path(deployment.model), *_constants(Path(deployment.model)))
        listed = self._models()
        entry = self._choose_model(listed, deployment)
        self._model = str(entry.get("id", self._served.directory.name))
        self._dialect = self._discover()
        self._ready = True
        limit = entry.get("max_model_len")
        owner = str(entry.get("owned_by") or "server")
        return Info(
            name=owner if owner not in ("me", "library") else "openai",
            version=self._version(),
            kind="endpoint",
            observables=self._dialect.observables,
            token_prompts=self._dialect.tokens,
            max_context=limit if isinstance(limit, int) else deployment.max_context,
            vocab_size=self._served.vocab,
            first_row={"": -1, "echo_after": 1}.get(self._dialect.prompt, 0),
            topk=self._dialect.k,
            rounds="fused",
            environment={
                "url": self._client.url,
                "prompts": "token ids" if self._dialect.tokens else "text",
                "prompt_scores": self._dialect.prompt or "none",
                "logprobs": str(self._dialect.k),
            },
        )

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        if not self._ready:
            raise TargetError(f"{self._who}: not open")
        pool = ThreadPoolExecutor(self._settings.concurrency, thread_name_prefix="adapt-openai")
        try:
            yield from pool.map(self._answer, list(requests))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        self._ready = False

    def _check(self, deployment: Deployment) -> None:
        if deployment.layout != "single":
            raise UnsupportedDeployment(
                f"layout {deployment.layout}: a running server keeps the layout it was started with; "
                "cmd: starts one per layout"
            )
        declared = self._settings.options.get("precisions")
        if declared and deployment.precision not in declared.split("+"):
            raise UnsupportedDeployment(f"precision {deployment.precision}: the spec says precisions={declared}")
        asked = [name for name, setting in deployment.features if setting]
        if asked:
            raise UnsupportedDeployment(f"feature {asked[0]}: a running server keeps the features it was started with")

    def _models(self) -> list[Mapping[str, Any]]:
        answer = self._client.get("/models", timeout=min(60.0, self._settings.request_timeout))
        if answer.status == 404:
            return []
        if not answer.ok:
            raise TargetError(f"{self._who}: GET /models answered {answer.status}: {answer.message}")
        listed = answer.body.get("data")
        if not isinstance(listed, list) or not all(isinstance(item, Mapping) and "id" in item for item in listed):
            raise TargetError(
                f"{self._who}: GET /models gave no list of models (keys: {', '.join(map(str, answer.body))})"
            )
        return listed

    def _choose_model(self, listed: list[Mapping[str, Any]], deployment: Deployment) -> Mapping[str, Any]:
        wanted = self._settings.options.get("model")
        directory = Path(deployment.model)
        if wanted:
            return next((item for item in listed if item["id"] == wanted), {"id": wanted})
        if len(listed) <= 1:
            return listed[0] if listed else {}
        named = [item for item in listed if item["id"] in (deployment.model, str(directory.resolve()), directory.name)]
        if len(named) == 1:
            return named[0]
        names = ", ".join(str(item["id"]) for item in listed[:8])
        raise TargetError(f"{self._who} serves {len(listed)} models ({names}); say which: openai[model=NAME]:URL")

    def _version(self) -> str:
        """vLLM says it at /version beside /v1; others do not."""
        root = JsonClient(self._client.url.removesuffix("/v1"), api_key(), 10.0)
        try:
            answer = root.get("/version")
        except TargetError:
            return ""
        return str(answer.body.get("version", "")) if answer.ok else ""

    # Discovery -------------------------------------------------------------------------------------------------

    def _discover(self) -> _Dialect:
        """The richest dialect that the server answers sensibly."""
        said = ""
        counted: int | None = None
        sent = 0
        for tokens, extras in ((True, True), (True, False), (False, True), (False, False)):
            prompt = probe_prompt(self._served.vocab, None if tokens else self._served.reader())
            for k in (*_LOGPROBS, 0) if tokens else (_TEXT_LOGPROBS, *_LOGPROBS, 0):
                dialect = _Dialect(tokens, extras, k)
                try:
                    answer = self._complete(dialect, prompt, 1)
                except ValueError as error:  # no text for this prompt
                    said = str(error)
                    break
                if not answer.ok:
                    said = f"{answer.status}: {answer.message}"
                    continue
                choice = read_choice(self._who, answer.body)
                if choice.prompt_tokens != len(prompt):
                    counted, sent = choice.prompt_tokens, len(prompt)
                    break
                return self._discover_prompt(replace(dialect, k=self._shown_k(choice, dialect)), prompt, choice)
        if counted is not None:
            raise TargetError(
                f"{self._who}: counted {counted} prompt tokens where {sent} were sent; does it serve "
                f"{self._served.directory} with that tokenizer, and without a begin token of its own?"
            )
        raise TargetError(f"{self._who}: refuses a short completion ({said})")

    def _shown_k(self, choice: Choice, dialect: _Dialect) -> int:
        if not dialect.k:
            return 0
        entries = self._output(choice, dialect)
        return dialect.k if entries and entries[0] is not None and entries[0].best else 0

    def _discover_prompt(self, dialect: _Dialect, prompt: Sequence[int], alone: Choice) -> _Dialect:
        if not dialect.k:
            return dialect
        if dialect.extras:
            answer = self._complete(replace(dialect, prompt="prompt_logprobs"), prompt, 1)
            if answer.ok and prompt_entries(self._who, read_choice(self._who, answer.body), len(prompt)):
                return replace(dialect, prompt="prompt_logprobs")
        answer = self._complete(replace(dialect, prompt="echo"), prompt, 1)
        if not answer.ok:
            return dialect
        entries = self._output(read_choice(self._who, answer.body), dialect) or []
        first = (self._output(alone, dialect) or [None])[0]
        if first is None or len(entries) < len(prompt):
            return dialect
        # The first output token's distribution is known from the answer without echo: where is it in this one?
        there = _distance(entries[len(prompt)], first) if len(entries) > len(prompt) else math.inf
        before = _distance(entries[len(prompt) - 1], first)
        if math.isinf(min(there, before)) or min(there, before) > _ALIKE * max(there, before):
            return dialect
        if there < before:
            return replace(dialect, prompt="echo")
        return self._discover_left_out(replace(dialect, prompt="echo_after"), prompt)

    def _discover_left_out(self, dialect: _Dialect, prompt: Sequence[int]) -> _Dialect:
        """llama-cpp-python leaves begin tokens out of its echo."""
        begin = self._served.begin
        if begin < 0:
            return dialect
        inside = (prompt[0], begin, *prompt[2:])
        try:
            answer = self._complete(dialect, inside, 1)
        except ValueError:
            return dialect  # no text stands for it, so it will never be sent
        if not answer.ok:
            return dialect
        choice = read_choice(self._who, answer.body)
        entries = self._output(choice, dialect) or []
        lacks = choice.prompt_tokens == len(inside) and len(entries) < len(inside)
        return replace(dialect, left_out=begin) if lacks else dialect

    # Requests --------------------------------------------------------------------------------------------------

    def _complete(self, dialect: _Dialect, prompt: Sequence[int], new: int, request: Request | None = None) -> Answer:
        return self._client.post("/completions", self._body(dialect, prompt, new, request))

    def _streamed(self, dialect: _Dialect, request: Request) -> tuple[Answer, float | None]:
        """The same answer as a stream, and when its first token came; (refusal, None) where it does not stream."""
        body = self._body(dialect, request.prompt, request.max_new_tokens, request)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer, events = self._client.stream("/completions", body)
        first = next((event.at for event in events if event.body.get("choices")), None)
        if not answer.ok or first is None:
            return replace(answer, status=answer.status if not answer.ok else 501), None
        failed = next((event.body["error"] for event in events if "error" in event.body), None)
        if failed is not None:
            return Answer(500, {}, str(failed)), None
        whole = joined_events([event.body for event in events], len(request.prompt))
        return Answer(answer.status, whole), first

    def _body(self, dialect: _Dialect, prompt: Sequence[int], new: int, request: Request | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt) if dialect.tokens else self._served.text_of(prompt),
            "max_tokens": new or 1,
            "temperature": 0,
            "stream": False,
        }
        if dialect.extras:
            body.update(_EXTRAS)
        if dialect.k:
            body["logprobs"] = dialect.k
        if dialect.prompt == "prompt_logprobs":
            body["prompt_logprobs"] = dialect.k
        elif dialect.prompt:
            body["echo"] = True
        if request is not None:
            self._add_sampling(body, dialect, request)
        return body

    def _add_sampling(self, body: dict[str, Any], dialect: _Dialect, request: Request) -> None:
        sampling = request.sampling
        body["temperature"] = sampling.temperature
        if sampling.temperature:
            body["seed"] = sampling.seed
            body["top_p"] = sampling.top_p
            if dialect.extras:
                # Servers have filters that hold where nothing is said (llama-cpp-python: top_k 40, min_p 0.05).
                body |= {"top_k": 0, "min_p": 0.0}
            if sampling.top_k:
                body["top_k"] = sampling.top_k
        if dialect.extras:
            body["ignore_eos"] = request.ignore_eos
            if request.stop:
                body["stop_token_ids"] = list(request.stop)

    def _answer(self, request: Request) -> Response:
        asked = self._asked(request)
        who = f"{self._who}: request {request.id!r}"
        first: float | None = None
        answer = Answer(501, {})
        started = time.perf_counter()
        try:
            if request.timed and request.max_new_tokens:
                answer, first = self._streamed(asked, request)
            if first is None:
                started = time.perf_counter()
                answer = self._complete(asked, request.prompt, request.max_new_tokens, request)
        except ValueError as error:
            return Response(request.id, len(request.prompt), finish="abort", error=str(error))
        seconds = time.perf_counter() - started
        if not answer.ok:
            return Response(request.id, len(request.prompt), finish="abort", error=f"{answer.status}: {answer.message}")
        choice = read_choice(who, answer.body)
        response = checked_response(who, self._response(who, request, asked, choice, seconds), request)
        response.first_token_seconds = None if first is None else first - started
        if choice.finish == "stop" and request.ignore_eos:
            return self._continued(request, response)
        return response

    def _continued(self, request: Request, response: Response) -> Response:
        """The output of a server that stops at the end token although that should be ignored: the end token is
        put in its place, and the server goes on from there."""
        end, left = self._served.end, request.max_new_tokens - len(response.tokens) - 1
        stopped = bool(response.tokens) and response.tokens[-1] in (*request.stop, end)
        if end < 0 or left < 0 or stopped or response.error is not None:
            return response
        tokens, text = (*response.tokens, end), (response.text or "") + self._served.reader().decode([end])
        if end in request.stop:  # it was to be the last token, and is not shown
            count = None if response.completion_tokens is None else response.completion_tokens + 1
            return replace(response, tokens=tokens, text=text, completion_tokens=count)
        # The same seed would begin again with the random numbers that the first part was drawn with.
        drawn = replace(request.sampling, seed=request.sampling.seed + len(tokens))
        longer = replace(request, prompt=(*request.prompt, *tokens), max_new_tokens=left, first_row=0, sampling=drawn)
        rest = self._answer(longer)
        if rest.error is not None or rest.prompt_tokens != len(longer.prompt):
            return response
        finish = rest.finish if left else "length"
        # The end token was put there, and is counted: it stands where the server would have gone on.
        counts = [response.completion_tokens, rest.completion_tokens if left else 0]
        count = None if None in counts else 1 + sum(number for number in counts if number)
        return replace(
            rest,
            prompt_tokens=response.prompt_tokens,
            tokens=tokens + rest.tokens,
            completion_tokens=count,
            finish=finish,
            text=text + (rest.text or ""),
        )

    def _asked(self, request: Request) -> _Dialect:
        """The server's dialect without what this request does not want."""
        dialect = self._dialect
        k = 0
        if "topk" in request.want:
            k = min(dialect.k, request.topk) if dialect.tokens else dialect.k
        elif "score" in request.want:
            k = min(dialect.k, 1)
        if not k and dialect.k and not dialect.extras:
            k = 1  # the only way to see generated token ids
        rows = bool(request.want & {"topk", "score"})
        wanted_rows = rows and request.first_row < len(request.prompt) - 1
        return replace(dialect, k=k, prompt=dialect.prompt if wanted_rows else "")

    def _response(self, who: str, request: Request, asked: _Dialect, choice: Choice, seconds: float) -> Response:
        length = len(request.prompt)
        base = Response(request.id, choice.prompt_tokens, seconds=seconds, cached_tokens=choice.cached_tokens)
        base.text = choice.text
        if asked.prompt.startswith("echo") and not asked.tokens:
            base.text = choice.text[len(self._served.text_of(request.prompt)) :]
        sent = choice.prompt_token_ids
        if choice.prompt_tokens != length or (sent is not None and sent != request.prompt):
            if choice.prompt_tokens == length:
                return replace(base, error="the server tokenised the prompt into other ids than were sent")
            return base  # rows would be misaligned: the count says it all
        entries = self._output(choice, asked)
        output = entries
        if entries is not None and asked.prompt.startswith("echo"):
            entries = echoed_entries(who, choice, entries, request.prompt, asked.left_out)
            output = entries[length:]
        tokens = self._generated(choice, output, base.text)
        if request.max_new_tokens:
            base.tokens = tokens[: request.max_new_tokens]
            base.completion_tokens = choice.completion_tokens
            base.finish = "stop" if choice.finish == "stop" or (tokens and tokens[-1] in request.stop) else "length"
        if not asked.k or entries is None:
            return base
        rows = Rows(length + max(0, len(base.tokens) - 1), min(asked.k, request.topk))
        sequence = (*request.prompt, *tokens)
        by_row = self._by_row(who, asked, choice, entries, sequence)
        for row, entry in by_row.items():
            rows.put(row, entry)
        first = {"": length - 1, "echo_after": 1}.get(asked.prompt, 0)
        if not asked.tokens and "topk" in request.want:
            for row in rows.empty:
                if row >= max(first, request.first_row):
                    rows.put(row, self._revealed(sequence[: row + 1], by_row.get(row), asked))
        base.first_row = first
        if "topk" in request.want:
            base.topk = TopK(rows.topk.ids[first:], rows.topk.logprobs[first:])
        if "score" in request.want and "score" in self._dialect.observables:
            rows.scores[-1] = math.nan  # the token after the last row was never fed
            base.scores = rows.scores[first:]
        return base

    def _by_row(
        self, who: str, asked: _Dialect, choice: Choice, entries: list[Entry | None], sequence: Sequence[int]
    ) -> dict[int, Entry]:
        """Row -> the entry that says what follows it."""
        length = choice.prompt_tokens
        found: dict[int, Entry | None] = {}
        if asked.prompt == "echo_after":
            # With a begin token in front, llama-cpp-python drops it and thereby puts every row where it belongs.
            late = int(sequence[0] == asked.left_out)
            for position, entry in enumerate(entries):
                found[position - late] = replace(entry, logprob=math.nan) if entry is not None else None
            return {row: entry for row, entry in found.items() if entry is not None}
        if asked.prompt == "prompt_logprobs":
            for position, entry in enumerate(prompt_entries(who, choice, length) or []):
                if entry is not None:
                    token = sequence[position]
                    if token not in entry.best:
                        raise TargetError(f"{who}: prompt_logprobs[{position}] lacks the prompt's own token {token}")
                    found[position - 1] = replace(entry, logprob=entry.best[token])
        offset = 0 if asked.prompt == "echo" else length
        found.update({offset + position - 1: entry for position, entry in enumerate(entries)})
        return {row: entry for row, entry in found.items() if entry is not None}

    def _revealed(self, prefix: Sequence[int], entry: Entry | None, asked: _Dialect) -> Entry | None:
        """An entry whose best candidates hid one another (or that is missing), after asking for one token alone.

        That token is the most probable one, and it is known by its text: a text of one token that ends no character
        halfway stands for one id; an output that ends at once stands for the end token.
        """
        try:
            answer = self._complete(replace(asked, prompt=""), prefix, 1)
        except ValueError:
            return entry  # no text stands for this prefix
        if not answer.ok:
            return entry
        choice = read_choice(self._who, answer.body)
        if choice.prompt_tokens != len(prefix):
            return entry
        alone = (self._output(choice, asked) or [None])[0]
        if alone is not None and choice.completion_tokens in (1, None):
            tokens = self._served.reader().encode(choice.text)
            return alone.with_greedy(tokens[0] if len(tokens) == 1 else -1)
        if entry is None:
            return None
        ended = choice.finish == "stop" and not choice.completion_tokens
        dropped = choice.completion_tokens == 1 and alone is None  # a begin token, again
        return entry.with_greedy(self._served.end if ended else self._served.begin if dropped else -1)

    def _output(self, choice: Choice, dialect: _Dialect) -> list[Entry | None] | None:
        given = choice.body.get("logprobs")
        if given is None:
            return None
        if not self._served.strings and not _names_ids(given):
            self._served.need_strings()
        return output_entries(self._who, choice, self._served.strings)

    def _generated(self, choice: Choice, entries: list[Entry | None] | None, text: str) -> tuple[int, ...]:
        if choice.token_ids is not None:
            return choice.token_ids
        named = tuple(entry.token if entry is not None else -1 for entry in entries or ())
        if named and -1 not in named and choice.completion_tokens in (None, len(named)):
            return named
        try:
            return tuple(self._served.reader().encode(text))
        except (TargetError, ValueError):
            return ()  # the text alone is shown


def _names_ids(logprobs: object) -> bool:
    tokens = logprobs.get("tokens") if isinstance(logprobs, Mapping) else None
    return isinstance(tokens, list) and all(isinstance(text, str) and text.startswith("token_id:") for text in tokens)


def _distance(one: Entry | None, other: Entry | None) -> float:
    """Mean difference of two distributions over the candidates of either; inf where there is nothing to compare."""
    if one is None or other is None or not one.best or not other.best:
        return math.inf
    floor = min(*one.best.values(), *other.best.values(), -1.0)
    tokens = one.best.keys() | other.best.keys()
    return sum(abs(one.best.get(token, floor) - other.best.get(token, floor)) for token in tokens) / len(tokens)


def _constants(directory: Path) -> tuple[int, int, int]:
    """Size of the vocabulary, ids of the begin and of the end token (-1 where there is none)."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(f"{path} cannot be read: {error}; a model is a checkpoint directory") from error
    config = config if isinstance(config, dict) else {}
    inner = {**config, **config.get("text_config", {})}
    size, begin, end = (inner.get(name) for name in ("vocab_size", "bos_token_id", "eos_token_id"))
    if not isinstance(size, int) or size < 1:
        raise TargetError(f"{path} has no vocab_size")
    return size, begin if isinstance(begin, int) else -1, end if isinstance(end, int) else -1
