"""What callers hand in and get back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import EngineError
from ..kernels.registry import MODES

__all__ = [
    "DTYPES",
    "OPTION_RULES",
    "QUANTISED",
    "REQUEST_RULES",
    "EngineOptions",
    "SequenceRequest",
    "SequenceResult",
    "SequenceUpdate",
    "problem_of",
    "shown",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}
"""Precision -> dtype of what lies between products."""
QUANTISED = frozenset({"int8"})
"""Precisions whose matrices are held as int8, one scale for each output, and multiplied with rows brought to int8, one
scale for each row. Embedding, norms, biases and router are as in the dtype above."""


Rule = tuple[Callable[[Any], bool], str]
"""What must hold of a value, and the same in words: ``must be ...``."""

_LARGEST = 1 << 62
"""Integers go up to it: what is counted with them fits into 64 bits, and they can be written out."""
_MOST_THREADS = 4 * (os.cpu_count() or 1)
_LONGEST_TIMEOUT = 1e6
_SHOWN = 72
"""Most characters of a value in a message."""
_COLDEST = 1e-100
"""Logits divided by less than this may be infinite, even in float64."""


def _integer(low: int = 0, high: int = _LARGEST) -> Rule:
    most = "2**62" if high == _LARGEST else str(high)
    return (lambda value: type(value) is int and low <= value <= high), f"an integer in {low}..{most}"


def _one_of(*names: str) -> Rule:
    return (lambda value: type(value) is str and value in names), f"one of {', '.join(names)}"


def _within(low: float, high: float, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _all(kinds: tuple[type, ...], element: Callable[[Any], bool], value: object) -> bool:
    return isinstance(value, kinds) and all(element(one) for one in value)  # type: ignore[attr-defined]


_ANY_INTEGER: Rule = (lambda value: type(value) is int), "an integer"
_FLAG: Rule = (lambda value: type(value) is bool), "True or False"

OPTION_RULES: Mapping[str, Rule] = {
    "precision": _one_of(*DTYPES),
    "max_context": _integer(1),
    "kv_tokens": _integer(),
    "page_size": _integer(1),
    "prefill_chunk": _integer(),
    "step_tokens": _integer(),
    "max_batch": _integer(1),
    "max_waiting": _integer(),
    "preemption": _FLAG,
    "prefix_cache": _FLAG,
    "mode": _one_of(*MODES),
    "threads": (_integer(0, _MOST_THREADS)[0], f"{_integer(0, _MOST_THREADS)[1]} (4 for each processor)"),
    "native": _FLAG,
    "seed": _ANY_INTEGER,
    "memory_limit": _integer(),
    "measure_memory": _FLAG,
    "taps": (
        lambda value: _all((tuple, list), lambda one: type(one) is str, value),
        "a tuple of patterns of site names, such as ('layer.*.attn.out',)",
    ),
    "layout": ((lambda value: type(value) is str), "text, such as 'single' or 'tp2.pp2'"),
    "micro_batches": _integer(),
    "placement": (
        lambda value: _all((tuple, list), lambda one: type(one) is int and 0 <= one < _LARGEST, value),
        "a tuple of integers, the ep rank of each expert, or ()",
    ),
    "communicator": _one_of("virtual", "gloo"),
    "timeout": (
        lambda value: _within(1, _LONGEST_TIMEOUT, value),
        f"a number in 1..{_LONGEST_TIMEOUT:.0f} (seconds)",
    ),
}
"""For every field of `EngineOptions`."""

REQUEST_RULES: Mapping[str, Rule] = {
    "id": ((lambda value: isinstance(value, str)), "text"),
    "prompt": (
        lambda value: isinstance(value, tuple | list | range),
        "a tuple or list of token ids; an array gives one with tolist()",
    ),
    "max_new_tokens": _integer(),
    "want_logits": _FLAG,
    "temperature": (
        lambda value: _within(_COLDEST, sys.float_info.max, value) or _within(0, 0, value),
        f"0 or a finite number of at least {_COLDEST:g}",
    ),
    "top_k": _integer(),
    "top_p": ((lambda value: _within(0, 1, value) and value > 0), "a number that lies in (0, 1]"),
    "seed": _ANY_INTEGER,
    "stop": (
        lambda value: _all((tuple, list, set, frozenset), lambda one: type(one) is int, value),
        "a tuple of token ids",
    ),
    "first_row": _integer(),
}
"""For every field of `SequenceRequest`; what a prompt holds is checked by `SequenceRequest.problem`."""


def shown(value: object) -> str:
    """A value as messages show it: short and on one line, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of 5000 digits cannot be written, a foreign __repr__ may do anything
        text = f"some {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


@dataclass(frozen=True)
class EngineOptions:
    """How to run a model. Raises EngineError on construction, naming the option and its rule."""

    precision: str = "fp32"
    """fp32, bf16 or fp16: weights and activations."""
    max_context: int = 4096
    """Tokens of prompt plus output that one request may have."""
    kv_tokens: int = 0
    """Token slots of the KV cache; 0 derives max(max_context, min(max_batch * max_context, 32768))."""
    page_size: int = 16
    """Token slots of a KV block."""
    prefill_chunk: int = 0
    """Most prompt tokens of one sequence in a step; 0 takes a prompt in one step."""
    step_tokens: int = 0
    """Most tokens of all sequences in a step; 0 derives max(max_context, 2048). Longer prompts are cut to fit."""
    max_batch: int = 32
    """Sequences that run together."""
    max_waiting: int = 0
    """Requests that may wait for their turn at each dp replica; more are refused. 0 sets no limit."""
    preemption: bool = True
    """Take KV blocks as tokens are computed, and take them from the youngest sequence when none is left (its tokens
    are computed again later). Off: reserve the longest possible length at admission."""
    prefix_cache: bool = False
    """Reuse the KV blocks of equal prompt beginnings."""
    mode: str = "fast"
    """fast, or strict (deterministic; needs kernels with the traits for it)."""
    threads: int = 0
    """torch's intra-op threads, at most 4 for each processor; 0 leaves torch's setting."""
    native: bool = True
    """Use the C++ kernels where they are built and the CPU can run them."""
    seed: int = 0
    """Added to each request's own sampling seed."""
    memory_limit: int = 0
    """Most bytes that weights and KV cache of one rank may take; opening is refused beyond it. 0 sets no limit."""
    measure_memory: bool = False
    """Count the tensors of each step, for the temporary memory in `Engine.memory`; slows it down."""
    taps: tuple[str, ...] = ()
    """Shell patterns of site names to record (``layer.*.attn.out``)."""
    layout: str = "single"
    """Ranks and what they share, as `adapt_engine.layout` writes it (``tp2.pp2``)."""
    micro_batches: int = 0
    """Most parts into which pipeline stages cut the sequences of a step, never more than it has sequences; 0: as many
    as there are stages."""
    placement: tuple[int, ...] = ()
    """ep rank of each expert; () divides them in runs."""
    communicator: str = "virtual"
    """virtual: all ranks in this process, in turn. gloo: a process for each rank, connected by torch.distributed."""
    timeout: float = 30.0
    """Seconds after which a rank process that shows no sign of life, or ranks that wait for one another, count as
    stuck. A rank that computes may take longer."""

    def __post_init__(self) -> None:
        for name, (holds, rule) in OPTION_RULES.items():
            value = getattr(self, name)
            if not holds(value):
                raise EngineError(f"option {name}: {shown(value)} must be {rule}")
        # Plain values only: options are sent to rank processes, and nobody may change them later.
        for name, plain in (("taps", tuple), ("placement", tuple), ("timeout", float)):
            object.__setattr__(self, name, plain(getattr(self, name)))

    @property
    def cache_tokens(self) -> int:
        """Token slots of the KV cache, derived where kv_tokens is 0."""
        return self.kv_tokens or max(self.max_context, min(self.max_batch * self.max_context, 32768))

    @property
    def step_budget(self) -> int:
        """Most tokens of a step, derived where step_tokens is 0."""
        return self.step_tokens or max(self.max_context, 2048)


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence. ``id`` is the caller's; results carry it back and may come in any order."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int = 0
    """0 scores the prompt only."""
    want_logits: bool = False
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    """1 keeps all."""
    seed: int = 0
    stop: tuple[int, ...] = ()
    """Token ids that end the output; the stop token is part of it."""
    first_row: int = 0
    """Logits and taps are kept from this row on; a prefix hit never covers a wanted row."""

    def problem(self, vocab: int, options: EngineOptions) -> str | None:
        """Why this request cannot be served, or None."""
        for name, (holds, rule) in REQUEST_RULES.items():
            value = getattr(self, name)
            if not holds(value):
                return f"{name} is {shown(value)}: must be {rule}"
        if not self.prompt:
            return "prompt is empty: at least one token is needed"
        total = len(self.prompt) + self.max_new_tokens
        if total > options.max_context:
            return f"prompt and output need {total} tokens: max_context is {options.max_context}"
        for place, token in enumerate(self.prompt):
            if type(token) is not int or not 0 <= token < vocab:
                return f"prompt token {place} is {shown(token)}: must be an integer in 0..{vocab - 1}"
        return None

    def settled(self) -> SequenceRequest:
        """The same request, as nobody can change it any more, in plain types. It must have no problem."""
        return replace(
            self,
            prompt=tuple(self.prompt),
            stop=tuple(self.stop),
            temperature=float(self.temperature),
            top_p=float(self.top_p),
        )


def problem_of(request: object, vocab: int, options: EngineOptions) -> str | None:
    """Why what a caller handed in as a request cannot be served, or None."""
    if isinstance(request, SequenceRequest):
        return request.problem(vocab, options)
    return f"request is {shown(request)}: must be a SequenceRequest"


@dataclass
class SequenceResult:
    """What one request gave. Row i of logits and taps belongs to token ``first_row + i``.

    After an abort ``tokens``, ``logits`` and ``taps`` hold what was there by then.
    """

    id: str
    tokens: tuple[int, ...] = ()
    """Generated ids."""
    finish: str = "length"
    """length, stop, abort or error."""
    error: str | None = None
    """Set when the request was refused or failed; then nothing else is."""
    logits: torch.Tensor | None = None
    """float32 [rows, V]: row i predicts what follows token i; one row for every token that was fed. None where not
    wanted, or where an abort came before the first row."""
    taps: dict[str, torch.Tensor] = field(default_factory=dict)
    """Site name -> [rows, ...], float32 (int64 for expert ids)."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    seconds: float = 0.0
    """Wall time from the first admission to completion; 0 where it was never admitted."""
    preemptions: int = 0
    """How often it had to give its blocks back and was computed again."""
    replica: int = 0
    """The dp place that served it."""
    drift: tuple[str, ...] = ()
    """Copies on several ranks that should have been equal and were not, seen while this run went on."""


@dataclass(frozen=True)
class SequenceUpdate:
    """What one step did for one request that drew a token or came to its end."""

    id: str
    tokens: tuple[int, ...] = ()
    """Tokens drawn in this step; over all updates of a request these are ``result.tokens``."""
    result: SequenceResult | None = None
    """Set in the last update of a request."""
