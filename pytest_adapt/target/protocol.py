"""The contract between the judge and whatever it judges.

A target opens a Deployment (one checkpoint, one layout, one precision), answers Requests in any order,
and closes. Everything else is optional and declared in Info; a declared capability counts only once a
probe has shown it (`pytest_adapt.target.probe`).

This module imports nothing heavy: numpy arrays appear only in annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "OBSERVABLES",
    "PRECISIONS",
    "Deployment",
    "Info",
    "Request",
    "Response",
    "Sampling",
    "Spoilt",
    "Target",
    "TargetError",
    "TopK",
    "UnsupportedDeployment",
    "UnsupportedOp",
]

# Strongest first. A suite asks for the weakest one that can answer its question.
OBSERVABLES: tuple[str, ...] = ("taps", "logits", "score", "topk", "text")
PRECISIONS: tuple[str, ...] = ("fp32", "bf16", "fp16")


class TargetError(Exception):
    """A target cannot be used: wrong spec, missing extra, dead server. The message is the whole story:
    one line of cause and way out, then (where there is one) the tail of the target's log."""


class UnsupportedDeployment(TargetError):
    """The target is healthy but declines this deployment (layout, precision, architecture), with the reason."""


class UnsupportedOp(TargetError):
    """`run_op` declines these shapes or attributes of an operator that it computes otherwise, with the reason."""


@dataclass(frozen=True)
class Deployment:
    """One way to run one model. Frozen and hashable: items that share a Deployment share one opened target."""

    model: str
    """Checkpoint directory (config.json, safetensors + index, tokenizer.json)."""
    layout: str = "single"
    precision: str = "fp32"
    max_context: int = 4096
    """Tokens of prompt plus output that the target must accept."""
    kv_precision: str = "auto"
    kv_tokens: int = 0
    """Capacity of the KV cache in tokens; 0 lets the target choose."""
    seed: int = 0
    taps: tuple[str, ...] = ()
    """Shell patterns of wanted sites (`pytest_adapt.sites`)."""
    features: tuple[tuple[str, int], ...] = ()
    """Declared features and their setting, sorted by name: 0 off, 1 on, or a size
    (``("prefix_cache", 1)``, ``("prefill_chunk", 7)``)."""

    def feature(self, name: str, default: int = 0) -> int:
        return dict(self.features).get(name, default)


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1.0 switch the filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One sequence. ``want`` names observables; a target answers with those and may add others.

    Row i of every per-position answer is what the model says after token i. Rows cover each token that
    was fed: the prompt, then all generated tokens but the last (which was never fed).
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int = 0
    """0 scores the prompt only (teacher forcing)."""
    want: frozenset[str] = frozenset({"text"})
    topk: int = 20
    sampling: Sampling = Sampling()
    stop: tuple[int, ...] = ()
    """Token ids that end the output; the stop token itself is included in ``Response.tokens``."""
    ignore_eos: bool = True
    timed: bool = False
    """``first_token_seconds`` is wanted: a server streams its answer."""
    first_row: int = 0
    """Rows before this one are not needed (they may be omitted). All others are, `Info.first_row` apart."""


@dataclass(frozen=True)
class TopK:
    """The k most probable next tokens of each row, most probable first; -1 and nan where absent."""

    ids: np.ndarray
    """int64 [rows, k]."""
    logprobs: np.ndarray
    """float64 [rows, k], natural logarithm."""


@dataclass
class Response:
    """What a target showed for one Request. Arrays are numpy; None means not shown."""

    id: str
    prompt_tokens: int
    """Length of the prompt as the target counted it; checked before anything else is believed."""
    tokens: tuple[int, ...] = ()
    """Generated token ids."""
    finish: str = "length"
    """length, stop, or abort."""
    completion_tokens: int | None = None
    """Generated tokens as the target counted them, where ``tokens`` was made out of its text; else None."""
    text: str | None = None
    logits: np.ndarray | None = None
    """float32 [rows, V]."""
    scores: np.ndarray | None = None
    """float64 [rows]: log-probability of the token that follows row i; nan for the last row."""
    topk: TopK | None = None
    taps: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Full site name -> [rows, ...], float32 (int64 for expert ids)."""
    first_row: int = 0
    """Token index of row 0 of the arrays."""
    cached_tokens: int | None = None
    """Prompt tokens that came from a prefix cache, where the target reports it."""
    error: str | None = None
    """Set when the target refused this request (abnormal input); then nothing else is."""
    seconds: float | None = None
    """From the moment the target was given the request to its last token."""
    first_token_seconds: float | None = None
    """From the same moment to its first new token; None where that cannot be told (then it was not ``timed``)."""
    origin: Callable[[str, int, tuple[int, ...], int | None], tuple[str, ...]] | None = None
    """(site, position, index within the row, expert) -> names of the ranks where that element came about; None where
    there is one rank, or the target cannot tell."""
    drift: tuple[str, ...] = ()
    """Copies of the same numbers on several ranks that differed, each in one line (site, ranks, how far)."""


class Spoilt(str):
    """Why an observable cannot be right as it is shown. Not to show it at all is another thing: that may be allowed."""


@dataclass(frozen=True)
class Info:
    """What an opened target says about itself."""

    name: str
    version: str
    kind: str = "engine"
    """engine (white box, required to show more) or endpoint (a server)."""
    observables: frozenset[str] = frozenset({"text"})
    features: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Feature -> settings that may be asked for in ``Deployment.features``."""
    token_prompts: bool = True
    """Accepts token ids; otherwise the prompt is decoded with the checkpoint's tokenizer."""
    max_context: int = 0
    vocab_size: int = 0
    first_row: int = 0
    """First row of a prompt that it can show in scores and top-k lists; -1: none before the prompt's last token."""
    topk: int = 0
    """Most candidates that its top-k lists hold; 0: as many as are asked for."""
    sites: tuple[str, ...] = ()
    """Patterns of sites that it can tap."""
    ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operator -> names of the implementations that `run_op` can run, the one in use first; a name that begins with
    "reference" is composed of basic operations."""
    gradients: frozenset[str] = frozenset()
    """Operators whose gradient `run_op` computes."""
    rounds: str = "eager"
    """eager: rounds every materialised tensor, as transformers' eager code does; fused: rounds less."""
    router: str = "fp32"
    """How router logits are held: fp32 whatever the precision, or eager (in the format of the router's weight)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Versions and settings worth a line in the report (device, framework, threads)."""
    load: Mapping[str, Any] = field(default_factory=dict)
    """Load report where there is one: seconds, bytes, bytes per second, tensors, warnings."""


@runtime_checkable
class Target(Protocol):
    """A platform under test. One instance serves one Deployment at a time; open may be called again after close."""

    def open(self, deployment: Deployment) -> Info:
        """Load the model. Raises UnsupportedDeployment (declined, with the reason) or TargetError."""
        ...

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Answer every request once, in any order. All requests may be in flight together."""
        ...

    def close(self) -> None:
        """Release everything: memory, processes, ports. Safe to call twice and after a failed open."""
        ...

    # Optional methods, looked up by name: peak_memory(reset: bool) -> int | None, largest number of bytes held since
    # the last reset, where the model lies (None: it cannot tell); tokenize(text) -> list[int]; detokenize(ids) -> str;
    # stats() -> Mapping[str, float]; control(name, **arguments).
    # profile(what, clock="wall"): from now on sum up what runs, by operation, until profile("off"); `stats` tells the
    # sums, op.NAME.calls and, with what "time", op.NAME.seconds by clock "cpu" or "wall" (those of operations inside
    # another are not its own); with "counts" exact counters alone. Off, nothing is paid for it.
    # run_op(name, inputs: Mapping[str, ndarray], attributes) -> Mapping[str, ndarray] computes one operator of
    # Info.ops in the deployment's precision (`pytest_adapt.operators`). Arrays lie in the format of the precision:
    # float32, float16, or uint16 with the bits of a bfloat16; views with strides, not to be written to. The attribute
    # "implementation" names one of Info.ops[name]; "gradient" names inputs: "grad.OUTPUT" are then among the inputs,
    # and "grad.INPUT" is answered. Raises UnsupportedOp for shapes that it does not compute.
    # control("abort", id=...) ends one request of the run in progress, from any thread: it is answered with finish
    # "abort", the tokens it has by then, no rows and no error. An id that is not in flight is ignored.
    # Optional class attributes, read before open: defaults() -> TargetDefaults-like mapping (see registry).
