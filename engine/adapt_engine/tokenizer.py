"""tokenizer.json of a checkpoint, through Hugging Face ``tokenizers``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .errors import CheckpointError

__all__ = ["Tokenizer"]


class Tokenizer:
    """Text <-> token ids. Raises CheckpointError where tokenizer.json is absent or unreadable."""

    def __init__(self, directory: str | Path) -> None:
        # Imported here: engines that are fed token ids never need it.
        import tokenizers

        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not found; text needs a tokenizer, token ids do not")
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as problem:  # the library raises plain Exception
            raise CheckpointError(f"{path}: not a tokenizer ({problem})") from None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids, with the special tokens that the tokenizer's own template adds."""
        return tuple(self._inner.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._inner.decode(list(ids)))
