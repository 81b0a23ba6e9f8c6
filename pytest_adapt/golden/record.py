"""A record: what the reference says about one prompt, and how far each precision is from it.

Coordinates are logical and unsharded: layout, batch, chunking, cache and platform are never part of a key; they
are invariances, tested against the same record. Values come from the float64 oracle; beside them stand, for every
precision, the errors of the oracle's emulation on the same prompt, from which budgets are derived.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pytest_adapt.golden.sketch import log_softmax, positions_of, project, top_ids
from pytest_adapt.verdict.discrete import certified_positions, row_error

__all__ = [
    "OBSERVED",
    "SCHEMA",
    "EmulationErrors",
    "Record",
    "RecordError",
    "RecordKey",
    "answer_errors",
    "content_digest",
    "is_record_id",
    "live_record",
    "make_record",
    "tokens_digest",
]

OBSERVED = "seen-"
"""Beginning of the mathematical class of what a target answered at a precision (``seen-bf16``): beside the reference's
record of the same prompt, never in its place."""
SCHEMA = 1
"""Raised when the meaning of a stored array changes; records of another schema are stale."""
_IDENTIFIER = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*")


def is_record_id(name: object) -> bool:
    """Whether this may be the name of a record, and so of a file in a store: no separator, no ``..``, not empty."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None


class RecordError(Exception):
    """A record cannot be read or does not fit; the message is one line with the way out."""


@dataclass(frozen=True)
class RecordKey:
    """What a record is about. Digests are hex; a change of any of them makes a stored record stale."""

    model: str
    prompt: str
    spec_hash: str
    weight_digest: str
    prompts_digest: str
    math_class: str = "exact"
    """Which function of the weights is computed: exact, or int8w, fp8kv ... where values are quantised."""

    @property
    def id(self) -> str:
        """Name of the record and stem of its file: ``model.prompt.class``."""
        parts = (self.model, self.prompt, self.math_class)
        for part in parts:
            if not is_record_id(part):
                raise RecordError(f"record name part {part!r}: letters, digits, '.', '_', '+' and '-' only")
        return ".".join(parts)


@dataclass(frozen=True)
class EmulationErrors:
    """Errors of one precision's emulation at the recorded positions, under replay of the reference's experts.

    float64 [P] each, ``certified`` bool [P]. ``score`` is the largest selection error : margin over expert layers
    (0 where there are none); ``rms`` and ``largest`` are those of the log-probabilities of the row's top tokens,
    ``follow`` is the error of the next token's log-probability (nan on the last row), all in nats; ``kl`` is the
    divergence over the top tokens in nats, ``gap`` is 1 - cosine of the centred logits.
    """

    score: np.ndarray
    rms: np.ndarray
    largest: np.ndarray
    follow: np.ndarray
    kl: np.ndarray
    gap: np.ndarray
    certified: np.ndarray


@dataclass(frozen=True)
class Record:
    """The reference's answer to one prompt of n tokens, at P recorded positions.

    Row i says what follows after token ``positions[i]``.
    """

    key: RecordKey
    vocab: int
    tokens: np.ndarray
    """int32 [n]."""
    positions: np.ndarray
    """int32 [P], ascending."""
    lse: np.ndarray
    """float64 [P]: log of the sum of exp(logits)."""
    topk_ids: np.ndarray
    """int32 [P, k], most probable first."""
    topk_logprobs: np.ndarray
    """float64 [P, k], nats; stored to 1/256 of a float32 ulp."""
    next_logprob: np.ndarray
    """float64 [P]: log-probability of the token that follows in ``tokens``; nan after the last."""
    projections: np.ndarray
    """float32 [P, 8] of the centred logits (`sketch.project`)."""
    norm: np.ndarray
    """float32 [P]: rms of the centred logits."""
    margin: np.ndarray
    """float32 [P]: smallest selection margin over expert layers; inf without any."""
    expert_ids: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Layer -> uint16 [P, k], ascending."""
    errors: Mapping[str, EmulationErrors] = field(default_factory=dict)
    """Precision -> errors of its emulation."""
    source: str = "oracle"
    """Who gave the values and the budgets, for the report."""

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(self.errors)

    def emulation(self, precision: str) -> EmulationErrors:
        """Errors of one precision. Raises RecordError when the record has none for it."""
        if precision not in self.errors:
            known = ", ".join(self.errors) or "none"
            raise RecordError(f"record {self.key.id}: no budgets for {precision} (has {known}); make it again with it")
        return self.errors[precision]

    def certified(self, precision: str) -> np.ndarray:
        """bool [P]: no expert choice up to this position can flip within the score error of this precision."""
        return self.emulation(precision).certified

    def take(self, keep: np.ndarray) -> Record:
        """The record of some of its rows (bool [P]); the tokens are all there."""
        experts = {layer: ids[keep] for layer, ids in self.expert_ids.items()}
        rows = {name: getattr(self, name)[keep] for name in (*_PER_ROW, "positions", "next_logprob")}
        errors = _Changed(
            self.errors, lambda one: EmulationErrors(**{key: value[keep] for key, value in vars(one).items()})
        )
        return replace(self, errors=errors, expert_ids=experts, **rows)

    def prefix(self, count: int) -> Record:
        """The record of the first ``count`` tokens: no row depends on later tokens."""
        keep = self.positions < count
        follow = np.where(self.positions[keep] == count - 1, np.nan, self.next_logprob[keep])
        last = np.where(self.positions[keep] == count - 1, np.nan, 1.0)
        return replace(
            self,
            tokens=self.tokens[:count],
            positions=self.positions[keep],
            next_logprob=follow,
            expert_ids={layer: ids[keep] for layer, ids in self.expert_ids.items()},
            errors=_Changed(
                self.errors,
                lambda one: EmulationErrors(
                    **{
                        key: value[keep] * (last if key == "follow" else 1) if value.dtype != bool else value[keep]
                        for key, value in vars(one).items()
                    }
                ),
            ),
            **{name: getattr(self, name)[keep] for name in _PER_ROW},
        )

    # Storage -----------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, np.ndarray]:
        """Arrays as stored: narrow integers where they fit, errors as bfloat16 bit patterns."""
        wide = self.vocab > np.iinfo(np.uint16).max
        stored = self.topk_logprobs.astype(np.float32)
        step = np.spacing(np.abs(stored)).astype(np.float64)
        residual = np.clip(np.rint((self.topk_logprobs - stored) / step * _RESIDUAL), -126, 126)
        tensors: dict[str, np.ndarray] = {
            "tokens": self.tokens.astype(np.int32),
            "positions": self.positions.astype(np.int32),
            "lse": self.lse.astype(np.float64),
            "topk_ids": self.topk_ids.astype(np.int32 if wide else np.uint16),
            "topk_logprobs": stored,
            "topk_residual": residual.astype(np.int8),
            "next_logprob": self.next_logprob.astype(np.float64),
            "projections": self.projections.astype(np.float32),
            "norm": self.norm.astype(np.float32),
            "margin": self.margin.astype(np.float32),
        }
        for layer, ids in self.expert_ids.items():
            tensors[f"experts.{layer}"] = ids.astype(np.uint16)
        for precision, errors in self.errors.items():
            for name, values in vars(errors).items():
                packed = np.packbits(values) if name == "certified" else _to_bits(values)
                tensors[f"errors.{precision}.{name}"] = packed
        return tensors

    def digest(self) -> str:
        """sha256 (hex) of the stored content and the key; provenance does not enter."""
        return content_digest(self.tensors(), self._content_metadata())

    def save(self, path: Path) -> None:
        """Write a safetensors file with one metadata key, ``adapt``, of canonical JSON. Replaces in one step."""
        from safetensors.numpy import save

        metadata = {**self._content_metadata(), "digest": self.digest()}
        data = save(self.tensors(), metadata={"adapt": json.dumps(metadata, sort_keys=True, separators=(",", ":"))})
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of this process alone: under xdist several may write the same record at once.
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(data)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read and verify a record. Raises RecordError: unreadable, truncated, other schema, edited by hand."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as file:
                metadata = json.loads((file.metadata() or {}).get("adapt", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise RecordError(f"{path}: not a whole safetensors file ({error}); restore it or make it again") from error
        if not isinstance(metadata, dict) or not isinstance(metadata.get("key"), dict):
            raise RecordError(f"{path}: no metadata key 'adapt'; this is not a golden record")
        if metadata.get("schema") != SCHEMA:
            raise RecordError(f"{path}: schema {metadata.get('schema')!r}, this version reads {SCHEMA}; make it again")
        expected = metadata.pop("digest", None)
        if content_digest(tensors, metadata) != expected:
            raise RecordError(f"{path}: content differs from its digest (edited by hand?); restore it or make it again")
        try:
            return cls._from_tensors(tensors, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path}: malformed record ({error!r}); make it again") from error

    def _content_metadata(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "key": asdict(self.key),
            "vocab": self.vocab,
            "source": self.source,
            "packed": "errors.*: bfloat16 bit patterns; errors.*.certified: bits",
        }

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> Record:
        stored = tensors["topk_logprobs"]
        step = np.spacing(np.abs(stored)).astype(np.float64)
        rows = len(tensors["positions"])
        errors: dict[str, dict[str, np.ndarray]] = {}
        experts: dict[int, np.ndarray] = {}
        for name, values in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "experts":
                experts[int(rest)] = values
            elif kind == "errors":
                precision, _, part = rest.partition(".")
                unpacked = np.unpackbits(values, count=rows).astype(bool) if part == "certified" else _from_bits(values)
                errors.setdefault(precision, {})[part] = unpacked
        return cls(
            key=RecordKey(**metadata["key"]),
            vocab=int(metadata["vocab"]),
            tokens=tensors["tokens"],
            positions=tensors["positions"],
            lse=tensors["lse"],
            topk_ids=tensors["topk_ids"].astype(np.int32),
            topk_logprobs=stored.astype(np.float64) + tensors["topk_residual"] * step / _RESIDUAL,
            next_logprob=tensors["next_logprob"],
            projections=tensors["projections"],
            norm=tensors["norm"],
            margin=tensors["margin"],
            expert_ids=dict(sorted(experts.items())),
            errors={p: EmulationErrors(**errors[p]) for p in _ORDER if p in errors},
            source=str(metadata["source"]),
        )


class _Changed(Mapping[str, EmulationErrors]):
    """Errors of every precision after a change, made when they are read: those of one precision may be costly."""

    def __init__(
        self, errors: Mapping[str, EmulationErrors], change: Callable[[EmulationErrors], EmulationErrors]
    ) -> None:
        self._errors = errors
        self._change = change

    def __getitem__(self, precision: str) -> EmulationErrors:
        return self._change(self._errors[precision])

    def __contains__(self, precision: object) -> bool:
        return precision in self._errors

    def __iter__(self) -> Iterator[str]:
        return iter(self._errors)

    def __len__(self) -> int:
        return len(self._errors)


_PER_ROW = ("lse", "topk_ids", "topk_logprobs", "projections", "norm", "margin")
_ORDER = ("fp32", "bf16", "fp16")
# What rounding to float32 took away is at most half an ulp: 127 steps of 1/254 ulp, less one so that the sum
# rounds back to the same float32 and a loaded record has the digest it was saved with.
_RESIDUAL = 254.0


def tokens_digest(tokens: Iterable[int]) -> str:
    """sha256 (hex) of a token list."""
    return hashlib.sha256(np.asarray(tuple(tokens), "<i4").tobytes()).hexdigest()


def content_digest(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> str:
    """sha256 (hex) over canonical metadata, then name, dtype, shape and bytes of every array in name order.

    Not of the file: safetensors writes its header in an order of its own.
    """
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(json.dumps([name, little.dtype.str, list(array.shape)]).encode())
        digest.update(little.tobytes())
    return digest.hexdigest()


class _Trace(Protocol):
    """What is read from a run of the oracle."""

    @property
    def logits(self) -> np.ndarray: ...
    @property
    def ids(self) -> Mapping[int, np.ndarray]: ...
    @property
    def selection(self) -> Mapping[int, np.ndarray]: ...
    @property
    def margins(self) -> Mapping[int, np.ndarray]: ...


def make_record(
    oracle: Any,
    key: RecordKey,
    tokens: Iterable[int],
    precisions: Iterable[str],
    boundaries: Iterable[int] = (),
) -> Record:
    """Run the oracle and, following its experts, the emulation of each precision; keep sketches of both.

    ``oracle`` is a `pytest_adapt.oracle.Oracle`; ``boundaries`` are positions to keep besides those of the model.
    Raises RecordError for an empty prompt, and where an emulation overflows.
    """
    from pytest_adapt.oracle import Rounding

    sequence = np.asarray(tuple(tokens), np.int32)
    if not len(sequence):
        raise RecordError(f"prompt {key.prompt}: no tokens; a record needs at least one")
    positions = positions_of(len(sequence), (*oracle.spec.boundaries(), *boundaries))
    exact: _Trace = oracle.run(tuple(int(t) for t in sequence), rows=positions)
    logits = np.asarray(exact.logits, np.float64)
    if not np.isfinite(logits).all():
        raise RecordError(
            f"model {key.model}, prompt {key.prompt}: the oracle's logits are not finite; check the weights"
        )
    logprobs, lse = log_softmax(logits)
    ids = top_ids(logits)
    projections, norm = project(logits)
    follow = np.append(sequence[1:], -1)[positions]
    errors = {}
    for precision in precisions:
        emulated: _Trace = oracle.run(
            tuple(int(t) for t in sequence), rounding=Rounding.of(precision), replay=dict(exact.ids), rows=positions
        )
        if not np.isfinite(emulated.logits).all():
            raise RecordError(
                f"model {key.model}, prompt {key.prompt}: eager code overflows in {precision}, there is nothing to "
                f"compare with; leave {precision} out for this model"
            )
        errors[precision] = _errors(exact, emulated, ids, follow, positions, len(oracle.spec.layers))
    margins = [np.asarray(margin)[positions] for margin in exact.margins.values()]
    return Record(
        key=key,
        vocab=logits.shape[1],
        tokens=sequence,
        positions=positions,
        lse=lse,
        topk_ids=ids,
        topk_logprobs=np.take_along_axis(logprobs, ids.astype(np.int64), axis=1),
        next_logprob=_at(logprobs, follow),
        projections=projections.astype(np.float32),
        norm=norm.astype(np.float32),
        margin=(np.min(margins, axis=0) if margins else np.full(len(positions), np.inf)).astype(np.float32),
        expert_ids={layer: np.asarray(chosen)[positions].astype(np.uint16) for layer, chosen in exact.ids.items()},
        errors=errors,
    )


def live_record(oracle: Any, prompt: str, tokens: Iterable[int], precision: str) -> Record:
    """The record of tokens that a target generated, which no store has."""
    fed = tuple(tokens)
    return make_record(oracle, RecordKey("live", "generated", "", "", tokens_digest(fed)), fed, (precision,))


def _errors(
    exact: _Trace,
    emulated: _Trace,
    ids: np.ndarray,
    follow: np.ndarray,
    positions: np.ndarray,
    layers: int,
) -> EmulationErrors:
    count = len(next(iter(exact.selection.values()))) if exact.selection else int(positions[-1]) + 1
    ratio, last = np.zeros(count), np.zeros(count)
    for layer, scores in exact.selection.items():
        error = row_error(np.asarray(emulated.selection[layer], np.float64) - scores)
        margin = np.asarray(exact.margins[layer], np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(margin > 0, error / margin, np.inf)
        if layer == layers - 1:
            last = share
        else:
            ratio = np.maximum(ratio, share)
    return EmulationErrors(
        score=np.maximum(ratio, last)[positions],
        certified=certified_positions(ratio, last)[positions],
        **answer_errors(np.asarray(exact.logits, np.float64), emulated.logits, ids, follow),
    )


def answer_errors(exact: np.ndarray, emulated: np.ndarray, ids: np.ndarray, follow: np.ndarray) -> dict[str, Any]:
    """The errors of emulated logits [R, V] against exact ones, as fields of `EmulationErrors` (all but the routing's).

    ``ids`` [R, k] are the tokens that are listed, ``follow`` [R] the token that comes next (-1: none).
    """
    logprobs, _ = log_softmax(exact)
    # The answer is rounded too: engines take the softmax of their logits in float32.
    answered = log_softmax(emulated, np.float32)[0].astype(np.float64)
    reference = np.take_along_axis(logprobs, ids.astype(np.int64), axis=1)
    difference = np.take_along_axis(answered, ids.astype(np.int64), axis=1) - reference
    return {
        "rms": np.sqrt(np.mean(difference**2, axis=1)),
        "largest": np.max(np.abs(difference), axis=1),
        "follow": np.abs(_at(answered, follow) - _at(logprobs, follow)),
        "kl": np.sum(np.exp(reference) * divergence_terms(difference), axis=1),
        "gap": _cosine_gap(exact, emulated),
    }


def divergence_terms(difference: np.ndarray) -> np.ndarray:
    """exp(d) - 1 - d for d = log q - log p, without cancellation.

    Weighted by p and summed over a whole vocabulary this is KL(p || q); over part of it every term is still
    positive and of second order in the error.
    """
    d = np.asarray(difference, np.float64)
    small = np.abs(d) < 1e-4
    with np.errstate(over="ignore"):
        return np.where(small, d * d * (0.5 + d / 6.0), np.expm1(d) - d)


def _cosine_gap(exact: np.ndarray, other: np.ndarray) -> np.ndarray:
    """1 - cosine of centred rows, from their difference: |a/|a| - b/|b||^2 / 2."""
    a, b = (np.asarray(x, np.float64) - np.mean(x, axis=-1, keepdims=True, dtype=np.float64) for x in (exact, other))
    a, b = (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.finfo(np.float64).tiny) for x in (a, b))
    return np.asarray(np.sum((a - b) ** 2, axis=-1) / 2)


def _at(logprobs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Log-probability of one id per row; nan where the id is -1."""
    rows = np.arange(len(ids))
    return np.where(ids >= 0, logprobs[rows, np.maximum(ids, 0)], np.nan)


def _to_bits(values: np.ndarray) -> np.ndarray:
    """Nearest bfloat16 as uint16: the high half of the float32, rounded half up in magnitude."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x8000)) >> np.uint32(16)
    special = bits >> np.uint32(16)
    return np.where(np.isfinite(values), rounded, special | np.where(np.isnan(values), 0x40, 0)).astype(np.uint16)


def _from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
