"""The checkpoint's tokenizer, for servers that take text only: through the `tokenizers` package, or, where every
token is one character (as in the conformance models), with the standard library alone."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pytest_adapt.target.protocol import TargetError

__all__ = ["Tokenizer", "ids_of_strings", "load_tokenizer", "special_ids"]


class Tokenizer(Protocol):
    """Text to ids and back, without special tokens being added or dropped."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def size(self) -> int: ...


class _Characters:
    """Every token is one character, or a special token that no ordinary text contains."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        self._ids = dict(vocab)
        self._texts = {number: text for text, number in vocab.items()}

    @property
    def size(self) -> int:
        return max(self._texts) + 1

    def encode(self, text: str) -> list[int]:
        unknown = sorted({character for character in text if character not in self._ids})
        if unknown:
            raise ValueError(f"character {unknown[0]!r} is no token")
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts.get(number, "") for number in ids)


class _Library:
    def __init__(self, path: Path) -> None:
        tokenizers: Any = importlib.import_module("tokenizers")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in self._tokenizer.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises TargetError where there is none that can be used."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TargetError(f"{directory} holds no tokenizer.json, and this server takes text only")
    try:
        if importlib.util.find_spec("tokenizers") is not None:
            return _Library(path)
        content = json.loads(path.read_bytes())
        vocab, merges = content["model"]["vocab"], content["model"].get("merges")
    except Exception as error:  # the package raises bare Exception for a file that it cannot read
        raise TargetError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if merges or not isinstance(vocab, Mapping):
        raise TargetError(
            f"{path} has merges, and this server takes text only; install the reader: pip install tokenizers"
        )
    return _Characters(vocab)


def special_ids(directory: Path) -> frozenset[int]:
    """Ids that the tokenizer.json of a checkpoint calls special, and that engines may leave out of texts."""
    added = json.loads((directory / "tokenizer.json").read_bytes()).get("added_tokens") or ()
    return frozenset(int(entry["id"]) for entry in added if entry.get("special"))


def ids_of_strings(tokenizer: Tokenizer) -> dict[str, int]:
    """Token text -> id, for every text that belongs to exactly one id.

    Servers drop bytes that are no whole character, so a text counts as shared where it is equal after that.
    """
    texts = [tokenizer.decode([number]).replace("\ufffd", "") for number in range(tokenizer.size)]
    counts = Counter(texts)
    return {text: number for number, text in enumerate(texts) if text and counts[text] == 1}
