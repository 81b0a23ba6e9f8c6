"""Prompts of needle models: needles at every boundary and questions after them, or the other way round.

A boundary is a length at which an engine's behaviour can change: a page, a chunk, a window, the original range of
the rotary embedding, a power of two that an index may not reach. Each is met at b - 1, b and b + 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_adapt.models.entries import ModelEntry, ModelError
from pytest_adapt.models.needle import KEYS, RULERS, VALUES, Vocabulary

if TYPE_CHECKING:
    from pytest_adapt.open_target import OpenTarget
    from pytest_adapt.target.protocol import Response

__all__ = ["TAIL", "Question", "Recall", "filled", "longest", "recalls", "story", "words_of"]

TAIL = 2 + 2 * KEYS + RULERS
"""Tokens that a prompt may have beyond its context length: the last boundary's neighbours and all questions."""
_EARLY = 8
"""Needles that stand before every boundary, for questions that stand at them."""


@dataclass(frozen=True)
class Question:
    """An address at ``position``. ``answer`` is the token that must follow; -1 where the needle is out of sight."""

    position: int
    needle: int
    answer: int
    where: str
    """The boundary that it is about, as ``8192 - 1``."""

    @property
    def distance(self) -> int:
        return self.position - self.needle


@dataclass(frozen=True)
class Recall:
    """One prompt and what it asks."""

    name: str
    tokens: tuple[int, ...]
    questions: tuple[Question, ...]
    rulers: tuple[int, ...] = ()
    """Tokens whose answers are mixtures that rotary phases decide."""

    @property
    def unseen(self) -> list[tuple[Question, int]]:
        """Questions for needles out of sight, and what those say, which must not be the answer."""
        return [(one, Vocabulary.value_of(self.tokens[one.needle])) for one in self.questions if one.answer < 0]

    def ask(self, target: OpenTarget, most: int = 8) -> dict[str, Response]:
        """Answers by name. One request where the target shows all rows; else one for each of at most ``most``
        questions, which ends with it."""
        if target.supports("logits"):
            first = self.questions[0].position
            return {self.name: target.score(self.tokens, want=("logits",), first_row=first)}
        asked = [one for one in self.questions if one.answer >= 0]
        # The last boundaries are those that no smaller context reaches.
        chosen = {f"{self.name}: {one.where}": self.tokens[: one.position + 1] for one in asked[-most:]}
        want = [name for name in ("topk", "text") if target.supports(name)]
        return target.generate_all(chosen, 1, want, first_row=len(self.tokens))


def words_of(entry: ModelEntry) -> Vocabulary:
    """The vocabulary of a needle model. Raises ModelError for another."""
    if entry.kind != "needle":
        raise ModelError(f"model {entry.name} is no needle model: what it answers has no closed form")
    return Vocabulary(entry.config["vocab_size"])


def recalls(entry: ModelEntry, context: int) -> tuple[Recall, ...]:
    """The prompts of one context length (`TAIL` tokens longer at most). Raises ModelError for no needle model, and for
    a context that holds no question."""
    words, least = words_of(entry), entry.least_context
    if context < least:
        raise ModelError(f"model {entry.name}: a context of {context} holds no question; the least is {least}")
    window = int(entry.config.get("sliding_window") or 0)
    edges = [edge for edge in entry.contexts if window <= edge <= context]
    if window:
        # An edge's needles lie where an edge of one window less has its questions: neighbours go to different prompts.
        parts = [part for part in (edges[0::2], edges[1::2]) if part]
        return tuple(
            _windowed(words, f"{entry.name}.window-{context}-{number}", part, window)
            for number, part in enumerate(parts)
        )
    return (
        _kept(words, f"{entry.name}.kept-{context}", context, edges),
        _asked(words, f"{entry.name}.asked-{context}", context, edges),
    )


def longest(entry: ModelEntry, length: int, number: int = 0) -> Recall:
    """A prompt of exactly ``length`` tokens that ends with a question for a needle as far back as the model sees; for
    each ``number`` another one."""
    words, name = words_of(entry), f"{entry.name}.longest-{length}" + f"-{number}" * (number > 0)
    tokens = filled(words, name, length)
    window = int(entry.config.get("sliding_window") or 0)
    place = max(0, length - window) if window else 0
    key, secret = _shuffled(f"{name}.keys")[0], _numbers(f"{name}.values", 1)[0] % VALUES
    tokens[place], tokens[-1] = words.needle(key, secret), words.address(key)
    return Recall(name, tuple(tokens), (Question(length - 1, place, secret, f"{length} tokens"),))


def filled(words: Vocabulary, key: str, length: int) -> list[int]:
    """``length`` fillers from a hash of ``key``."""
    fillers = words.fillers
    return [fillers[value % len(fillers)] for value in _numbers(key, length)]


def _kept(words: Vocabulary, name: str, context: int, edges: Sequence[int]) -> Recall:
    """A needle at every boundary and at the very beginning, the other keys anywhere; all are asked for at the end."""
    places = {0: "0"} | _around(edges)
    for value in _numbers(f"{name}.places", 8 * KEYS):
        if len(places) < KEYS:
            places.setdefault(value % context, "anywhere")
    length = context + 2
    tokens = filled(words, name, length)
    secrets = _numbers(f"{name}.values", KEYS)
    questions = []
    # Keys in an order that has nothing to do with places: neighbours share no half of their codes.
    for key, (place, where) in zip(_shuffled(f"{name}.keys"), sorted(places.items()), strict=False):
        value = secrets[key] % VALUES
        tokens[place] = words.needle(key, value)
        questions.append(Question(len(tokens), place, value, where))
        tokens += [words.address(key), words.address(value)]
    tokens += [words.ruler(which) for which in range(RULERS)]
    return Recall(name, tuple(tokens), tuple(questions), tuple(words.ruler(which) for which in range(RULERS)))


def _asked(words: Vocabulary, name: str, context: int, edges: Sequence[int]) -> Recall:
    """A few needles at the beginning; a question at every boundary."""
    tokens = filled(words, name, context + 2)
    secrets = _numbers(f"{name}.values", _EARLY)
    keys = _shuffled(f"{name}.keys")[:_EARLY]
    for place, key in enumerate(keys):
        tokens[2 + place] = words.needle(key, secrets[place] % VALUES)
    questions = []
    for number, (position, where) in enumerate(sorted(_around(edges).items())):
        place = number * 5 % _EARLY
        tokens[position] = words.address(keys[place])
        questions.append(Question(position, 2 + place, secrets[place] % VALUES, where))
    return Recall(name, tuple(tokens), tuple(questions))


def _windowed(words: Vocabulary, name: str, edges: Sequence[int], window: int) -> Recall:
    """Questions at boundaries from the window on: for the oldest needle in sight, for a younger one, and for one that
    is just out of sight."""
    tokens = filled(words, name, edges[-1] + 2)
    keys = iter(_shuffled(f"{name}.keys"))
    secrets = _numbers(f"{name}.values", KEYS)
    questions = []
    for edge in edges:
        for shift, distance in ((-1, window - 1), (0, window - 2), (1, window)):
            key, position = next(keys), edge + shift
            value = secrets[key] % VALUES
            tokens[position - distance] = words.needle(key, value)
            tokens[position] = words.address(key)
            seen = distance < window
            where = f"{_shifted(edge, shift)}, {distance} keys back of a window of {window}"
            questions.append(Question(position, position - distance, value if seen else -1, where))
    return Recall(name, tuple(tokens), tuple(questions))


def story(asked: Sequence[Question], lost: Sequence[Question]) -> str:
    """What the lost needles have in common, in one line."""
    found = [one for one in asked if one not in lost]
    head = f"{len(lost)} of {len(asked)} needles are not recalled"
    if not found:
        return f"{head}: attention finds nothing by its key at any place"
    names = ", ".join(f"{one.needle} asked at {one.position} ({one.where})" for one in lost[:3])
    if all(one.needle < other.needle for one in lost for other in found):
        oldest = min(found, key=lambda one: (one.needle, -one.distance))
        return (
            f"{head}: all before position {oldest.needle}, which is found {oldest.distance} keys back; "
            f"older keys are not seen (a window, a limit, keys that were dropped): {names}"
        )
    if all(one.needle > other.needle for one in lost for other in found):
        return f"{head}: all from position {min(one.needle for one in lost)} on: {names}"
    if all(one.position > other.position for one in lost for other in found):
        return f"{head}: all questions from position {lost[0].position} on: {names}"
    first, last = min(one.needle for one in lost), max(one.needle for one in lost)
    if first < last and len(lost) > 2 and not any(first <= one.needle <= last for one in found):
        return f"{head}: all from position {first} to {last}, those before and after are found: {names}"
    return f"{head}: {names}{' ...' if len(lost) > 3 else ''}"


def _around(edges: Iterable[int]) -> dict[int, str]:
    return {edge + shift: _shifted(edge, shift) for edge in edges for shift in (-1, 0, 1)}


def _shifted(edge: int, shift: int) -> str:
    return f"{edge} {'+' if shift > 0 else '-'} 1" if shift else str(edge)


def _numbers(key: str, count: int) -> list[int]:
    """Integers of 32 bits from a hash of ``key``; a longer list begins with the shorter one."""
    return list(_stream(key, count))


def _stream(key: str, count: int) -> Iterator[int]:
    for block in range(-(-count // 8)):
        digest = hashlib.sha256(f"{key}:{block}".encode()).digest()
        for place in range(min(8, count - 8 * block)):
            yield int.from_bytes(digest[4 * place : 4 * place + 4], "little")


def _shuffled(key: str) -> list[int]:
    """All keys in an order from a hash."""
    return [place for _, place in sorted((value, place) for place, value in enumerate(_numbers(key, KEYS)))]
