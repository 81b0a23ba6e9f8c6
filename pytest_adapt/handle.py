"""The ``model`` fixture: a checkpoint directory, its prompts, and what its files say without a framework."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_adapt.strategies import fits
from pytest_adapt.verdict.result import Status
from pytest_adapt.verdict.status import Verdict

if TYPE_CHECKING:
    from pytest_adapt.matrix import Model
    from pytest_adapt.models import ModelEntry
    from pytest_adapt.models.recall import Recall
    from pytest_adapt.models.walks import Walk

__all__ = ["ModelHandle"]

_CANDIDATES = 8


class ModelHandle:
    """One model of the run. Catalogue models are written to disk on first use."""

    def __init__(self, model: Model, root: Path) -> None:
        self._model = model
        self._root = root
        self.context: int | None = None
        """The context length of the present item, where it has one, and the next smaller one of the run."""
        self.floor = 0
        self.most = 0
        """Largest number of prompts that a test gets; 0 for all."""
        self.only: tuple[str, int] | None = None
        """The one prompt that tests get, and how many of its tokens (0 for all)."""

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def entry(self) -> ModelEntry | None:
        """Entry of the catalogue; None for a user's own directory."""
        return self._model.entry

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Lengths at which this model's behaviour can change."""
        return self._model.contexts

    @cached_property
    def directory(self) -> Path:
        """The checkpoint. Raises Verdict unknown where the weights of a real model are not installed."""
        if self._model.directory is not None:
            return self._model.directory
        from pytest_adapt.models import ModelError, materialise

        try:
            return materialise(self.name, self._root)
        except ModelError as error:
            raise Verdict(Status.UNKNOWN, str(error), optional=not self._model.explicit) from None
        except OSError as error:
            raise Verdict(Status.ERROR, f"model {self.name} cannot be written below {self._root}: {error}") from None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json of the checkpoint."""
        found: Mapping[str, Any] = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        return found

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end a text by the checkpoint's config.json."""
        found = self.config.get("eos_token_id")
        return frozenset(found if isinstance(found, list) else [] if found is None else [found])

    def prompts(self, limit: int | None = None) -> dict[str, tuple[int, ...]]:
        """Named prompts of at most ``limit`` tokens (all where it is None), the shortest first.

        With the item's own context length as the limit, prompts that fit a smaller context of this run are left
        out: they are judged in that context's row, once. Where nothing is left, one prompt is cut to the limit.
        A profile may cap their number. With --adapt-prompt there is that one only, of whatever length.
        """
        if self.only is not None:
            return self._the_one(*self.only)
        everything = sorted(self.all_prompts.items(), key=lambda item: (len(item[1]), item[0]))
        least = self.floor if limit is not None and limit == self.context else 0
        fitting = {name: ids for name, ids in everything if least < len(ids) <= (limit or len(ids))}
        if fitting or not everything:
            return dict(list(fitting.items())[: self.most or None])
        name, ids = next((one for one in everything if len(one[1]) > least), everything[-1])
        return {name: ids[:limit]}

    def recalls(self, context: int) -> tuple[Recall, ...]:
        """Of a needle model: prompts of a context length with needles and questions at every boundary."""
        from pytest_adapt.models.recall import recalls

        return recalls(self._closed(), context)

    def walks(self, count: int, *, shortest: int, longest: int, seed: int = 0) -> tuple[Walk, ...]:
        """Of a needle model: requests of mixed lengths, each with a secret of its own."""
        from pytest_adapt.models.walks import walks

        return walks(self._closed(), count, shortest=shortest, longest=longest, seed=seed)

    def load(self, count: int, length: int) -> dict[str, tuple[int, ...]]:
        """``count`` prompts of exactly ``length`` ordinary tokens, to be timed with."""
        from pytest_adapt.models.prompts import random_tokens

        entry = self._model.described
        keys = [f"load-{number}" for number in range(count)]
        return {key: random_tokens(entry, self.directory, f"{key}-{length}", length) for key in keys}

    def longest(self, length: int, number: int = 0) -> Recall:
        """Of a needle model: a prompt of exactly so many tokens, which ends with a question for the oldest needle; for
        each ``number`` another one."""
        from pytest_adapt.models.recall import longest

        return longest(self._closed(), length, number)

    def readings(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Texts that the checkpoint's tokenizer makes of token ids: with special tokens, and without. Empty where
        no tokenizer can be read."""
        from pytest_adapt.target.protocol import TargetError
        from pytest_adapt.target.tokenizer import load_tokenizer, special_ids

        try:
            tokenizer = load_tokenizer(self.directory)
        except TargetError:
            return ()
        special = special_ids(self.directory)
        return tokenizer.decode(tokens), tokenizer.decode([token for token in tokens if token not in special])

    def tensor_names(self) -> list[str]:
        """Every tensor that the index names (or, without an index, that the files hold), sorted."""
        return sorted(name for file in self._weight_files() for name in _header(file) if name != "__metadata__")

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file of the checkpoint, by relative name."""
        found = {}
        for file in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            with file.open("rb") as stream:
                found[file.relative_to(self.directory).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
        return found

    def refuse_illegal(self, layout: str) -> None:
        """Raises Verdict unsupported, with the rule and the nearest legal layouts, where this model cannot take it."""
        if problem := fits(layout, self.config):
            raise Verdict(Status.UNSUPPORTED, problem)

    def __repr__(self) -> str:
        return f"<model {self.name}>"

    def _the_one(self, name: str, count: int) -> dict[str, tuple[int, ...]]:
        if name not in self.all_prompts:
            raise Verdict(
                Status.UNKNOWN,
                f"model {self.name} has no prompt {name!r} (--adapt-prompt); it has {', '.join(self.all_prompts)}",
                optional=True,  # another model of the run has it, or the run would not have begun
            )
        tokens = self.all_prompts[name]
        return {name: tokens[: count or len(tokens)]}

    @cached_property
    def all_prompts(self) -> Mapping[str, tuple[int, ...]]:
        """Every named prompt of the model."""
        from pytest_adapt.models.prompts import prompts_of

        found = prompts_of(self._model.described, self.directory)
        return found if self.entry else {**_searched(self.directory, self.config), **found}

    def _closed(self) -> ModelEntry:
        if self.entry is None or self.entry.kind != "needle":
            raise Verdict(Status.UNKNOWN, f"model {self.name} is no needle model: what it answers has no closed form")
        return self.entry

    def _weight_files(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if not index.is_file():
            return sorted(self.directory.glob("*.safetensors"))
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [self.directory / name for name in sorted(set(names))]


def _searched(directory: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """A short prompt at whose end routing is certain: in low precision no position of a random one may be.

    Short, because the oracle runs once a candidate. Empty for a dense model, and for one that the oracle cannot read
    (another reference may judge it).
    """
    from pytest_adapt.models.prompts import SEARCHED
    from pytest_adapt.models.search import choice_of, of_oracle, search
    from pytest_adapt.models.tokenizer import plain_ids
    from pytest_adapt.oracle import Oracle, OracleError

    if "num_experts_per_tok" not in config:
        return {}
    try:
        run = of_oracle(Oracle(directory))
        tokens = search(
            run, choice_of(config), plain_ids(int(config["vocab_size"])), length=SEARCHED, candidates=_CANDIDATES
        ).tokens
    except OracleError:
        return {}
    return {f"searched-{SEARCHED}": tuple(tokens)}


def _header(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: Mapping[str, Any] = json.loads(stream.read(size))
    return header
