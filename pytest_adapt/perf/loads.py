"""The loads that the gate measures: small, so that twenty of them fit into three minutes, and named for good.

A name is part of a case id, and the counters on record are kept under it: a load that is renamed is one that is gone
and one that is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_adapt.handle import ModelHandle

__all__ = ["LOADS", "Load", "load_named"]


@dataclass(frozen=True)
class Load:
    """Prompts in flight together, each of them answered greedily."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    new: int
    """Tokens that each answer has."""

    def prompts(self, model: ModelHandle) -> list[tuple[int, ...]]:
        """Ordinary tokens of the model; the same in every run."""
        drawn = model.load(len(self.lengths), max(self.lengths))
        return [tokens[:length] for tokens, length in zip(drawn.values(), self.lengths, strict=True)]


LOADS: Mapping[str, Load] = {
    load.name: load
    for load in (
        Load("prefill", (96,), 1),
        Load("decode", (8,), 12),
        Load("batch", (8, 8, 8, 8), 8),
        Load("mixed", (3, 17, 40, 64), 6),
    )
}


def load_named(name: str) -> Load:
    """The load of this name. Raises ValueError naming the known ones."""
    if name not in LOADS:
        raise ValueError(f"no load {name!r}; loads are {', '.join(LOADS)}")
    return LOADS[name]
