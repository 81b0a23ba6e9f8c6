"""Reading an OpenAI-style completion: log-probabilities of prompt and output, mapped to token ids and rows.

Row i is what the model says after token i. Three spellings are read:

- ``choices[0].prompt_logprobs`` (vLLM): entry i is the distribution of token i, so it belongs to row i - 1;
- ``echo`` with ``logprobs``: the same convention over prompt and output together;
- ``echo`` as llama-cpp-python writes it: entry i is the distribution *after* token i (row i).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pytest_adapt.target.protocol import TargetError, TopK

__all__ = [
    "Choice",
    "Entry",
    "Rows",
    "echoed_entries",
    "joined_events",
    "output_entries",
    "prompt_entries",
    "read_choice",
]

_LEAST = 1e-12
_TOKEN_ID = re.compile(r"token_id:(\d+)")


@dataclass(frozen=True)
class Entry:
    """The distribution of one token: its text and log-probability, and the best candidates by id."""

    token: int
    """-1 where the text belongs to no single id."""
    logprob: float
    best: Mapping[int, float] = field(default_factory=dict)
    unnamed: tuple[float, ...] = ()
    """Log-probabilities of candidates whose text belongs to no single id. Two of them may have had one text, and
    then only the last is left: ids that are not in ``best`` may be as probable as everything else leaves room for."""
    greedy: int = -1
    """The most probable token, where that is known from elsewhere."""

    @property
    def room(self) -> float:
        """Log-probability of everything that is not listed at all."""
        return math.log(max(_LEAST, 1.0 - sum(math.exp(value) for value in (*self.best.values(), *self.unnamed))))

    def certain(self) -> dict[int, float]:
        """Candidates that no id outside of ``best`` can surpass."""
        if not self.unnamed:
            return dict(self.best)
        bound = max(self.room, *self.unnamed)
        if self.greedy >= 0:
            bound = min(bound, self.best[self.greedy])
        return {token: value for token, value in self.best.items() if value >= bound}

    def with_greedy(self, token: int) -> Entry:
        """The entry after its most probable token became known: ``logprob`` is that token's where it is a number,
        else the best unnamed one's, if nothing unlisted can be above that."""
        if token < 0:
            return self
        if not math.isnan(self.logprob):
            return replace(self, best={**self.best, token: self.logprob}, greedy=token)
        if not self.unnamed or max(self.unnamed) < self.room:
            return self
        rest = sorted(self.unnamed)
        return replace(self, best={**self.best, token: rest[-1]}, unnamed=tuple(rest[:-1]), greedy=token)


@dataclass(frozen=True)
class Choice:
    """The parts of an answer that are believed after these checks."""

    text: str
    finish: str
    prompt_tokens: int
    body: Mapping[str, Any]
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class Rows:
    """Scores and top-k of ``count`` rows; what was never set is -1 and nan."""

    def __init__(self, count: int, k: int) -> None:
        self.scores = np.full(count, np.nan)
        self._ids = np.full((count, k), -1, dtype=np.int64)
        self._logprobs = np.full((count, k), np.nan)

    def put(self, row: int, entry: Entry | None, score: bool = True) -> None:
        """``score``: the entry's own log-probability belongs to the token after ``row``."""
        if entry is None or not 0 <= row < len(self.scores):
            return
        if score:
            self.scores[row] = entry.logprob
        best = sorted(entry.certain().items(), key=lambda item: (-item[1], item[0]))[: self._ids.shape[1]]
        for column, (token, logprob) in enumerate(best):
            self._ids[row, column], self._logprobs[row, column] = token, logprob

    @property
    def empty(self) -> list[int]:
        """Rows that no candidate was put in."""
        return [int(row) for row in np.flatnonzero(self._ids[:, 0] < 0)] if self._ids.shape[1] else []

    @property
    def topk(self) -> TopK:
        return TopK(self._ids, self._logprobs)


def read_choice(who: str, body: Mapping[str, Any]) -> Choice:
    """The one choice of a completion. Raises TargetError for a body that is none."""
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        count = len(choices) if isinstance(choices, list) else "no"
        raise TargetError(
            f"{who}: the answer has {count} choices, expected one (keys: {', '.join(map(str, body)) or 'none'})"
        )
    choice: Mapping[str, Any] = choices[0]
    usage = body.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    if not isinstance(counted, int) or isinstance(counted, bool):
        raise TargetError(f"{who}: the answer has no usage.prompt_tokens, so that no position can be trusted")
    if not isinstance(choice.get("text"), str):
        raise TargetError(f"{who}: choices[0].text is {type(choice.get('text')).__name__}, expected text")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    made = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    return Choice(
        completion_tokens=made if isinstance(made, int) else None,
        text=choice["text"],
        finish=str(choice.get("finish_reason") or "length"),
        prompt_tokens=counted,
        body=choice,
        cached_tokens=cached if isinstance(cached, int) else None,
        token_ids=_ids(who, choice, "token_ids"),
        prompt_token_ids=_ids(who, choice, "prompt_token_ids"),
    )


def joined_events(bodies: Sequence[Mapping[str, Any]], prompt_tokens: int) -> Mapping[str, Any]:
    """The body that a completion would have had without streaming, from the events of its stream.

    ``prompt_tokens`` stands in where no event counts them (they were compared when the server was opened).
    """
    whole: dict[str, Any] = {"text": "", "finish_reason": None}
    usage: Any = None
    for body in bodies:
        usage = body.get("usage") or usage
        choices = body.get("choices")
        part = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
        whole["text"] += part.get("text") or ""
        whole["finish_reason"] = part.get("finish_reason") or whole["finish_reason"]
        for name in ("token_ids", "prompt_token_ids"):
            if isinstance(part.get(name), list):
                whole[name] = [*whole.get(name, []), *part[name]]
        if isinstance(part.get("logprobs"), Mapping):
            held = whole.setdefault("logprobs", {})
            for name, values in part["logprobs"].items():
                held[name] = [*(held.get(name) or []), *values] if isinstance(values, list) else values
    counted = usage if isinstance(usage, Mapping) else {"prompt_tokens": prompt_tokens}
    return {"choices": [whole], "usage": counted}


def prompt_entries(who: str, choice: Choice, expected: int) -> list[Entry | None] | None:
    """Entries of ``prompt_logprobs``; None where the answer has none. Raises TargetError for a wrong shape."""
    given = choice.body.get("prompt_logprobs")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != expected:
        shown = len(given) if isinstance(given, list) else type(given).__name__
        raise TargetError(f"{who}: prompt_logprobs has {shown} entries for {expected} prompt tokens")
    return [None if item is None else _by_id(f"{who}: prompt_logprobs[{i}]", item) for i, item in enumerate(given)]


def echoed_entries(
    who: str, choice: Choice, entries: list[Entry | None], prompt: Sequence[int], left_out: int
) -> list[Entry | None]:
    """Entries of an echo by token position; None for tokens with id ``left_out``, which the echo lacks.

    Raises TargetError where the count does not fit.
    """
    made = choice.completion_tokens if choice.completion_tokens is not None else len(entries) - len(prompt)
    skipped = sum(token == left_out for token in prompt)
    # The last output token was never fed: a server that shows what follows each token has no entry for it.
    if made < 0 or len(prompt) + made - len(entries) - skipped not in (0, 1):
        counts = f"{len(entries)} entries for {len(prompt)} prompt tokens and {made} new ones"
        raise TargetError(f"{who}: the echo has {counts}")
    given = iter(entries)
    return [None if token == left_out else next(given) for token in prompt] + list(given)


def output_entries(who: str, choice: Choice, strings: Mapping[str, int]) -> list[Entry | None] | None:
    """Entries of ``logprobs`` (old or chat spelling); None where the answer has none."""
    given = choice.body.get("logprobs")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TargetError(f"{who}: logprobs is {type(given).__name__}, expected an object")
    if isinstance(given.get("content"), list):
        return [_chat_entry(f"{who}: logprobs.content[{i}]", item, strings) for i, item in enumerate(given["content"])]
    tokens, scores, tops = (given.get("tokens"), given.get("token_logprobs"), given.get("top_logprobs"))
    lists = isinstance(tokens, list) and isinstance(scores, list) and len(tokens) == len(scores)
    if not lists or not (tops is None or isinstance(tops, list) and len(tops) == len(tokens or ())):
        raise TargetError(f"{who}: logprobs has tokens, token_logprobs and top_logprobs of different lengths")
    entries: list[Entry | None] = []
    for i, (token, score) in enumerate(zip(tokens or (), scores or (), strict=True)):
        at = f"{who}: logprobs entry {i}"
        top = tops[i] if tops else None
        if top is not None and not isinstance(top, Mapping):
            raise TargetError(f"{at}: top_logprobs is {type(top).__name__}, expected an object")
        logprob = math.nan if score is None else _number(at, score)
        named = [(_token(text, strings), _number(at, value)) for text, value in (top or {}).items()]
        entries.append(_entry(_token(token, strings), logprob, named))
    return entries


def _by_id(at: str, item: object) -> Entry:
    if not isinstance(item, Mapping) or not item:
        raise TargetError(f"{at} is {type(item).__name__}, expected an object of token ids")
    best: dict[int, float] = {}
    for key, value in item.items():
        logprob = value.get("logprob") if isinstance(value, Mapping) else value
        if not str(key).isdigit():
            raise TargetError(f"{at}: key {str(key)[:40]!r} is no token id")
        best[int(key)] = _number(at, logprob)
    return Entry(-1, math.nan, best)


def _chat_entry(at: str, item: object, strings: Mapping[str, int]) -> Entry:
    if not isinstance(item, Mapping):
        raise TargetError(f"{at} is {type(item).__name__}, expected an object")
    top = item.get("top_logprobs") or []
    if not isinstance(top, list) or not all(isinstance(one, Mapping) for one in top):
        raise TargetError(f"{at}: top_logprobs is no list of objects")
    named = [(_identity(one, strings), _number(at, one.get("logprob"))) for one in top]
    return _entry(_identity(item, strings), _number(at, item.get("logprob")), named)


def _entry(token: int, logprob: float, named: Sequence[tuple[int, float]]) -> Entry:
    best = {number: value for number, value in named if number >= 0}
    return Entry(token, logprob, best, tuple(value for number, value in named if number < 0))


def _identity(item: Mapping[str, Any], strings: Mapping[str, int]) -> int:
    given = item.get("id")
    return given if isinstance(given, int) else _token(item.get("token"), strings)


def _token(text: object, strings: Mapping[str, int]) -> int:
    if isinstance(text, str) and (found := _TOKEN_ID.fullmatch(text)):
        return int(found[1])
    return strings.get(str(text), -1)


def _number(at: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
        return float(value)
    raise TargetError(f"{at}: the log-probability is {value!r}, expected a number")


def _ids(who: str, choice: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    given = choice.get(name)
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(isinstance(item, int) for item in given):
        raise TargetError(f"{who}: {name} is no list of token ids")
    return tuple(given)
