"""One case of one operator, and the string that names it: what a failure prints and ``--adapt-op`` takes again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "MEMORIES", "PRECISIONS", "Case", "CaseError", "read_words"]

PRECISIONS = ("fp32", "bf16", "fp16")
KINDS: tuple[str, ...] = ("normal", "negative", "tied", "zero", "spike", "small", "wide", "huge", "tiny")
"""How the values of activations are drawn, the plainest first (`pytest_adapt.operators.draw`)."""
MEMORIES: tuple[str, ...] = ("dense", "offset", "padded", "strided")
"""How activations lie in memory, the plainest first."""
_FORM = re.compile(r"\s*(?P<op>[a-z_]+)\s*\((?P<inside>[^()]*)\)\s*")


class CaseError(ValueError):
    """A case string cannot be read; the message says what is allowed."""


@dataclass(frozen=True)
class Case:
    """An operator, its parameters, and how its inputs are drawn. Equal cases have equal inputs, bit for bit."""

    op: str
    precision: str
    parameters: tuple[tuple[str, Any], ...]
    """In the order in which the operator declares them."""
    values: str = "normal"
    memory: str = "dense"
    seed: int = 0

    def __getitem__(self, name: str) -> Any:
        return dict(self.parameters)[name]

    def __str__(self) -> str:
        """``rms_norm(dtype=bf16,rows=3,width=5,values=huge,memory=padded,seed=7)``."""
        words = {"dtype": self.precision, **dict(self.parameters)}
        words |= {"values": self.values, "memory": self.memory, "seed": self.seed}
        return f"{self.op}({','.join(f'{name}={_word(value)}' for name, value in words.items())})"

    @property
    def size(self) -> tuple[int, int]:
        """Sort key that puts the simplest case first."""
        numbers = [value for _, value in self.parameters if type(value) is int]
        return sum(numbers), KINDS.index(self.values) + MEMORIES.index(self.memory) + bool(self.seed)


def read_words(text: str) -> tuple[str, Mapping[str, Any]]:
    """(operator, words) of a case string; numbers and truth values are read. Raises CaseError."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise CaseError(f"{text!r} is no case; write OPERATOR(name=value,...), as a failure prints it")
    words: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in found["inside"].split(","))):
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise CaseError(f"{text!r}: {part!r} is not name=value")
        words[name.strip()] = _value(value.strip())
    return found["op"], words


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _value(word: str) -> Any:
    if word in ("True", "False"):
        return word == "True"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
