"""Where the right answer comes from: golden records, the live oracle, or another target.

A reference answers `record(prompt, tokens)` for any token sequence. It never says whether a target is right.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pytest_adapt.golden.record import (
    EmulationErrors,
    Record,
    RecordError,
    RecordKey,
    divergence_terms,
    make_record,
    tokens_digest,
)
from pytest_adapt.golden.store import Store

if TYPE_CHECKING:
    from pytest_adapt.models.entries import ModelEntry
    from pytest_adapt.oracle import Oracle
    from pytest_adapt.target.protocol import Response

__all__ = [
    "ClosedReference",
    "GoldenProblem",
    "GoldenReference",
    "OracleReference",
    "Reference",
    "TargetReference",
    "carriers",
]


class GoldenProblem(Exception):
    """No golden record can be used. ``status`` is the case's: stale, fail (missing, damaged) or unchecked (off)."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = self.adapt_status = status


class Reference(Protocol):
    """What suites ask."""

    kind: str
    """golden, oracle or target; the report names it."""

    @property
    def oracle(self) -> Oracle | None:
        """The oracle of this model, for white-box comparison; None where the family is not known."""

    def record(self, prompt: str, tokens: Sequence[int]) -> Record:
        """What is right for a token sequence. Raises GoldenProblem, RecordError or OracleError."""


@dataclass
class OracleReference:
    """The live oracle of a checkpoint directory; records are kept in memory and under ``cache``.

    ``precisions`` are those whose budgets may be asked for. A cached record is found by the digests of
    weights, configuration, tokens and of the code that made it.
    """

    directory: Path
    precisions: tuple[str, ...]
    model: str = "live"
    cache: Path | None = None
    kind: str = "oracle"
    _oracle: Any = field(default=None, repr=False)
    _kept: dict[str, Record] = field(default_factory=dict, repr=False)

    @property
    def oracle(self) -> Oracle:
        if self._oracle is None:
            from pytest_adapt.oracle import Oracle

            self._oracle = Oracle(self.directory)
        found: Oracle = self._oracle
        return found

    def key(self, prompt: str, tokens: Sequence[int], spec_hash: str = "") -> RecordKey:
        checkpoint = self.oracle.checkpoint
        return RecordKey(
            model=self.model,
            prompt=prompt,
            spec_hash=spec_hash or checkpoint.config_digest(),
            weight_digest=checkpoint.weight_digest(),
            prompts_digest=tokens_digest(tokens),
        )

    def record(self, prompt: str, tokens: Sequence[int]) -> Record:
        """The record; the emulation of a precision runs when its budgets are first asked for."""
        digest = tokens_digest(tokens)
        if digest not in self._kept:
            record, fed = self._cached(prompt, tokens, ()), tuple(tokens)
            errors = _OnDemand(self.precisions, lambda name: self._cached(prompt, fed, (name,)).errors[name])
            self._kept[digest] = replace(record, errors=errors)
        record = self._kept[digest]
        return replace(record, key=replace(record.key, prompt=prompt))

    def _cached(self, prompt: str, tokens: Sequence[int], precisions: tuple[str, ...]) -> Record:
        key = self.key(prompt, tokens)
        if self.cache is None:
            return make_record(self.oracle, key, tokens, precisions)
        parts = [key.weight_digest, key.spec_hash, key.prompts_digest, *precisions, _code_digest()]
        name = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:40]
        path = self.cache / f"{name}.safetensors"
        # Files get copied, renamed and restored: what one is of stands in it, under its digest.
        own = replace(key, model="cache", prompt=name)
        if path.exists():
            with contextlib.suppress(RecordError):  # a torn file is made again, as one of something else is
                found = Record.load(path)
                if found.key == own:
                    return replace(found, key=key)
        record = make_record(self.oracle, own, tokens, precisions)
        with contextlib.suppress(OSError):  # a place that cannot be written costs time, not the verdict
            record.save(path)
        return replace(record, key=key)


class _OnDemand(Mapping[str, EmulationErrors]):
    """Errors of one sequence by precision, each made when it is read."""

    def __init__(self, precisions: tuple[str, ...], make: Callable[[str], EmulationErrors]) -> None:
        self._precisions = precisions
        self._make = make
        self._made: dict[str, EmulationErrors] = {}

    def __getitem__(self, precision: str) -> EmulationErrors:
        if precision not in self._precisions:
            raise KeyError(precision)
        if precision not in self._made:
            self._made[precision] = self._make(precision)
        return self._made[precision]

    def __contains__(self, precision: object) -> bool:
        return precision in self._precisions

    def __iter__(self) -> Iterator[str]:
        return iter(self._precisions)

    def __len__(self) -> int:
        return len(self._precisions)


@dataclass
class ClosedReference:
    """A needle model, whose answers have a closed form at any length: records of every question in a prompt, of its
    last token and of the boundaries' neighbours."""

    live: OracleReference
    entry: ModelEntry
    kind: str = "closed form"
    _form: Any = field(default=None, repr=False)
    _kept: dict[str, Record] = field(default_factory=dict, repr=False)

    @property
    def oracle(self) -> Oracle:
        return self.live.oracle

    def record(self, prompt: str, tokens: Sequence[int]) -> Record:
        """The record; the emulation of a precision runs when its budgets are first asked for."""
        from pytest_adapt.golden.closed_form import ClosedForm
        from pytest_adapt.models.recall import words_of

        if self._form is None:
            self._form = ClosedForm(self.entry)
        digest = tokens_digest(tokens)
        if digest not in self._kept:
            words, last = words_of(self.entry), len(tokens) - 1
            near = {edge + shift for edge in self.entry.contexts for shift in (-1, 0, 1)}
            rows = [row for row, token in enumerate(tokens) if words.is_question(token) or row in near or row == last]
            record = self._form.record(prompt, tokens, rows, ())
            form, fed = self._form, tuple(tokens)
            errors = _OnDemand(self.entry.precisions, lambda name: form.record(prompt, fed, rows, (name,)).errors[name])
            self._kept[digest] = replace(record, errors=errors)
        record = self._kept[digest]
        return replace(record, key=replace(record.key, prompt=prompt))


def carriers(prompts: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Prompt -> the prompt whose record serves it: the longest one that starts with the same tokens.

    No row depends on later tokens, so the lengths around a boundary share the record of the longest of them.
    """
    longest = sorted(prompts, key=lambda name: (-len(prompts[name]), name))
    return {
        name: next(one for one in longest if tuple(prompts[one][: len(tokens)]) == tuple(tokens))
        for name, tokens in prompts.items()
    }


@dataclass
class GoldenReference:
    """Stored records of one model, checked against what the model is now; the live oracle for other sequences.

    ``prompts`` are the model's own prompts: only these (and their prefixes) have records. ``mode`` is
    --adapt-goldens: ``check`` reads, ``new`` and ``update`` write pending records for review, ``off`` checks nothing.
    ``required`` is False for a user's own directory, where a missing record means that the live oracle judges.
    """

    live: OracleReference
    stores: tuple[Store, ...]
    prompts: Mapping[str, Sequence[int]]
    spec_hash: str
    mode: str = "check"
    required: bool = True
    propose: Callable[[Record, str], None] | None = None
    """Writes a pending record (record, ``new`` or ``update``); called in modes new and update only."""
    kind: str = "golden"
    proposed: list[str] = field(default_factory=list)
    """Ids of records that this run proposed: their cases have the status ``new``."""
    _kept: dict[str, Record] = field(default_factory=dict, repr=False)

    @property
    def oracle(self) -> Oracle:
        return self.live.oracle

    def record(self, prompt: str, tokens: Sequence[int]) -> Record:
        if self.mode == "off":
            raise GoldenProblem("unchecked", "goldens are off (--adapt-goldens=off): nothing to compare with")
        carrier = self._carriers.get(prompt, "")
        whole = tuple(self.prompts.get(carrier, ()))
        if not whole or tuple(tokens) != whole[: len(tokens)]:
            return self.live.record(prompt, tokens)
        if carrier not in self._kept:
            self._kept[carrier] = self._stored(carrier, whole)
        record = self._kept[carrier]
        return record if len(tokens) == len(whole) else record.prefix(len(tokens))

    @cached_property
    def _carriers(self) -> dict[str, str]:
        return carriers(self.prompts)

    def _stored(self, prompt: str, tokens: Sequence[int]) -> Record:
        key = self.live.key(prompt, tokens, self.spec_hash)
        found = [store.lookup(key) for store in self.stores]
        # The first store that knows the record decides: a damaged or stale one is never replaced by another silently.
        best = next((one for one in found if one.status != "missing"), None)
        status = best.status if best is not None else "missing"
        if best is not None and best.record is not None and status == "ok" and self.mode != "update":
            return best.record
        if status == "missing" and not self.required and self.mode in ("check", "observe"):
            return self.live.record(prompt, tokens)
        if self.mode == "update" or (self.mode == "new" and status == "missing"):
            return self._proposed(key, tokens, best.record if best is not None else None)
        reason = best.reason if best is not None else found[0].reason if found else f"no store has {key.id}"
        raise GoldenProblem("stale" if status == "stale" else "fail", reason)

    def _proposed(self, key: RecordKey, tokens: Sequence[int], old: Record | None) -> Record:
        from pytest_adapt.golden.diff import invisible

        inside = [len(self.prompts[name]) for name, carrier in self._carriers.items() if carrier == key.prompt]
        record = make_record(self.live.oracle, key, tokens, self.live.precisions, inside)
        if old is not None and old.key == key and invisible(old, record):
            return old
        if self.propose is not None:
            self.propose(record, "new" if old is None else "update")
        self.proposed.append(key.id)
        return record


@dataclass
class TargetReference:
    """Another target's answers as what is right (--adapt-reference=SPEC).

    ``score`` returns that target's Response to a teacher-forced prompt, with logits, or top-k log-probabilities and
    scores. Budgets still come from the oracle's emulation where the family is known (``live``); both sides have errors
    then, so yardsticks are sqrt(2) larger. Otherwise they come from the reference's own noise: the same prompt
    again, which a deterministic target answers without any, and then only one ulp is left.
    """

    name: str
    score: Callable[[Sequence[int]], Response]
    precision: str
    vocab: int
    live: OracleReference | None = None
    kind: str = "target"
    _kept: dict[str, Record] = field(default_factory=dict, repr=False)

    @property
    def oracle(self) -> Oracle | None:
        return self.live.oracle if self.live is not None else None

    def record(self, prompt: str, tokens: Sequence[int]) -> Record:
        digest = tokens_digest(tokens)
        if digest not in self._kept:
            self._kept[digest] = self._observed(prompt, tokens)
        return self._kept[digest]

    def _observed(self, prompt: str, tokens: Sequence[int]) -> Record:
        from pytest_adapt.golden.sketch import positions_of

        base = self.live.record(prompt, tokens) if self.live is not None else None
        positions = base.positions if base is not None else positions_of(len(tokens))
        first = observed_values(self.name, self.score(tokens), tokens, positions, self.vocab)
        if base is not None:
            errors = {self.precision: _both_sides(base.emulation(self.precision))}
            source = f"target {self.name}; budgets from the oracle's emulation, twice (both sides have errors)"
            return replace(base, **first, errors=errors, source=source)
        again = observed_values(self.name, self.score(tokens), tokens, positions, self.vocab)
        return Record(
            key=RecordKey("reference", prompt, "", "", tokens_digest(tokens)),
            vocab=self.vocab,
            tokens=np.asarray(tuple(tokens), np.int32),
            positions=positions,
            margin=np.full(len(positions), np.inf, np.float32),
            errors={self.precision: _noise(first, again)},
            source=f"target {self.name}; budgets from its own repeats (no oracle here), routing not certified",
            **first,
        )


def observed_values(
    who: str, response: Response, tokens: Sequence[int], positions: np.ndarray, vocab: int
) -> dict[str, Any]:
    """The value arrays of a Record from a response that covers every position. Raises RecordError."""
    from pytest_adapt.golden.sketch import PROJECTIONS, TOP, log_softmax, project, top_ids

    if response.error is not None:
        raise RecordError(f"{who}: refused the prompt: {response.error}")
    if response.first_row or response.prompt_tokens != len(tokens):
        raise RecordError(
            f"{who}: answered {response.prompt_tokens} tokens from {response.first_row}, sent {len(tokens)}"
        )
    follow = np.append(np.asarray(tuple(tokens), np.int64)[1:], -1)[positions]
    last = follow < 0
    if response.logits is not None:
        logits = np.asarray(response.logits)[positions].astype(np.float64)
        logprobs, lse = log_softmax(logits)
        ids = top_ids(logits)
        projections, norm = project(logits)
        following = np.where(last, np.nan, logprobs[np.arange(len(positions)), np.maximum(follow, 0)])
        listed = np.take_along_axis(logprobs, ids.astype(np.int64), axis=1)
    elif response.topk is not None and response.scores is not None:
        ids = np.asarray(response.topk.ids)[positions, :TOP].astype(np.int32)
        listed = np.asarray(response.topk.logprobs, np.float64)[positions, :TOP]
        following = np.where(last, np.nan, np.asarray(response.scores, np.float64)[positions])
        lse = np.zeros(len(positions))  # servers show log-probabilities: their own log-sum-exp is 0
        projections, norm = np.full((len(positions), PROJECTIONS), np.nan), np.full(len(positions), np.nan)
        if (ids < 0).any() or (ids >= vocab).any():
            raise RecordError(
                f"{who}: shows fewer than {TOP} tokens a row, or ids outside {vocab}; a reference needs them"
            )
    else:
        raise RecordError(f"{who}: shows neither logits nor top-k with scores; it cannot be a reference")
    if not np.isfinite(listed).all() or not np.isfinite(following[~last]).all():
        raise RecordError(f"{who}: answers with NaN or infinity; it cannot be a reference")
    return {
        "lse": lse,
        "topk_ids": ids,
        "topk_logprobs": listed,
        "next_logprob": following,
        "projections": projections.astype(np.float32),
        "norm": norm.astype(np.float32),
    }


def _both_sides(errors: EmulationErrors) -> EmulationErrors:
    root = float(np.sqrt(2.0))
    return replace(
        errors,
        rms=errors.rms * root,
        largest=errors.largest * root,
        follow=errors.follow * root,
        kl=errors.kl * 2.0,
        gap=errors.gap * 2.0,
    )


def _noise(first: Mapping[str, np.ndarray], again: Mapping[str, np.ndarray]) -> EmulationErrors:
    same = first["topk_ids"] == again["topk_ids"]
    error = np.where(same, first["topk_logprobs"] - again["topk_logprobs"], 0.0)
    rows = len(error)
    return EmulationErrors(
        score=np.zeros(rows),
        rms=np.sqrt(np.mean(error**2, axis=1)),
        largest=np.abs(error).max(axis=1),
        follow=np.abs(first["next_logprob"] - again["next_logprob"]),
        kl=np.sum(np.exp(first["topk_logprobs"]) * divergence_terms(error), axis=1),
        gap=np.zeros(rows),
        certified=np.ones(rows, bool),
    )


def _code_digest() -> str:
    """sha256 of the sources that decide what a record says, so that a cache never outlives them."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in _sources(package):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(package: Path) -> Iterable[Path]:
    yield from sorted((package / "oracle").glob("*.py"))
    yield from (package / "golden" / name for name in ("record.py", "sketch.py"))
    yield package / "verdict" / "discrete.py"
