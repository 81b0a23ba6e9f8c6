"""What callers hand in and get back."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass, field

import torch

from ..errors import EngineError

__all__ = ["DTYPES", "EngineOptions", "SequenceRequest", "SequenceResult", "SequenceUpdate"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
    """torch's intra-op threads; 0 leaves torch's setting."""
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
    """Parts into which pipeline stages cut the sequences of a step; 0: as many as there are stages."""
    placement: tuple[int, ...] = ()
    """ep rank of each expert; () divides them in runs."""
    communicator: str = "virtual"
    """virtual: all ranks in this process, in turn. gloo: a process for each rank, connected by torch.distributed."""
    timeout: float = 30.0
    """Seconds after which a rank process that shows no sign of life, or ranks that wait for one another, count as
    stuck. A rank that computes may take longer."""

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise EngineError(f"option precision: {self.precision!r} is not one of {', '.join(DTYPES)}")
        if self.communicator not in ("virtual", "gloo"):
            raise EngineError(f"option communicator: {self.communicator!r} is not one of virtual, gloo")
        if not _number(self.timeout) or self.timeout < 1:
            raise EngineError(f"option timeout: {self.timeout!r} must be a number of at least 1 (seconds)")
        for name, low in (
            ("max_context", 1),
            ("kv_tokens", 0),
            ("page_size", 1),
            ("prefill_chunk", 0),
            ("step_tokens", 0),
            ("max_batch", 1),
            ("max_waiting", 0),
            ("threads", 0),
            ("memory_limit", 0),
            ("micro_batches", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise EngineError(f"option {name}: {value!r} must be an integer of at least {low}")

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
        if not _text(self.id):
            return f"id is {self.id!r}: must be text"
        if not isinstance(self.prompt, Sized) or not self.prompt:
            return "prompt is empty: at least one token is needed"
        for place, token in enumerate(self.prompt):
            if not _natural(token) or token >= vocab:
                return f"prompt token {place} is {token!r}: must be an integer in 0..{vocab - 1}"
        if not _natural(self.max_new_tokens):
            return f"max_new_tokens is {self.max_new_tokens!r}: must be an integer of at least 0"
        total = len(self.prompt) + self.max_new_tokens
        if total > options.max_context:
            return f"prompt and output need {total} tokens: max_context is {options.max_context}"
        if not _number(self.temperature) or self.temperature < 0:
            return f"temperature is {self.temperature!r}: must be finite and at least 0"
        if not _natural(self.top_k):
            return f"top_k is {self.top_k!r}: must be an integer of at least 0"
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            return f"top_p is {self.top_p!r}: must lie in (0, 1]"
        if not _integer(self.seed):
            return f"seed is {self.seed!r}: must be an integer"
        if not _natural(self.first_row):
            return f"first_row is {self.first_row!r}: must be an integer of at least 0"
        return None


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
