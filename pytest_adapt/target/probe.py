"""What an opened target really shows: a declared capability counts only once it was seen.

One short request asks for everything that was declared. A server may decline it as a whole, so what is then
still open is asked for one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pytest_adapt import sites
from pytest_adapt.target.protocol import (
    OBSERVABLES,
    Deployment,
    Info,
    Request,
    Response,
    Spoilt,
    Target,
    TargetError,
    UnsupportedOp,
)
from pytest_adapt.target.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ProbeResult", "ask", "fault", "op_fault", "probe", "probe_prompt"]

_PROMPT = 12
_REPEATS = 8
_NEW = 2
_TOPK = 5
# A probability distribution may sum to this much more than 1 by rounding of its logarithms in bfloat16.
_SUM_SLACK = 0.05


@dataclass(frozen=True)
class ProbeResult:
    """``shown`` holds observables and features; ``missing`` says why a declared one does not count (`Spoilt`
    where it is there, and wrong)."""

    shown: frozenset[str]
    missing: Mapping[str, str] = field(default_factory=dict)


def probe(target: Target, deployment: Deployment, info: Info) -> ProbeResult:
    """Ask an opened ``target`` for each declared observable, and for the features of ``deployment``.

    Raises TargetError where the target does not even answer with text, or counts the prompt's tokens differently.
    """
    declared = [name for name in OBSERVABLES if name in info.observables]
    if "taps" in declared and not deployment.taps:
        declared.remove("taps")  # this deployment taps nothing; that says nothing about the target
    tokenizer = None if info.token_prompts else load_tokenizer(Path(deployment.model))
    prompt = probe_prompt(info.vocab_size or 64, tokenizer)
    missing: dict[str, str] = {}
    together = ask(target, prompt, declared)
    for name in declared:
        why = fault(name, together, len(prompt), deployment, info)
        if why and len(declared) > 1:
            why = fault(name, ask(target, prompt, [name]), len(prompt), deployment, info)
        if why:
            missing[name] = why
    if together.error is None and together.prompt_tokens != len(prompt):
        raise TargetError(
            f"{info.name} counted {together.prompt_tokens} prompt tokens where {len(prompt)} were sent: it adds, drops "
            "or splits tokens, so no position can be compared (does it serve the checkpoint of this deployment, "
            "with its tokenizer, and without a begin token of its own?)"
        )
    if set(missing) == set(declared) and "text" in missing:
        raise TargetError(f"{info.name} did not answer a prompt of {len(prompt)} tokens: {missing['text']}")
    features = [name for name, setting in deployment.features if setting]
    for name in features:
        why = _feature_fault(name, target, prompt, deployment, info)
        if why:
            missing[name] = why
    return ProbeResult(frozenset(name for name in [*declared, *features] if name not in missing), missing)


def op_fault(
    run_op: Callable[[str, Mapping[str, np.ndarray], Mapping[str, Any]], Mapping[str, np.ndarray]],
    name: str,
    precision: str,
) -> str:
    """Why a declared operator does not count: it does not answer its plain case with its outputs. "" where it does, or
    where it declines just these shapes."""
    from pytest_adapt.operators import catalogue
    from pytest_adapt.operators.draw import Draw, encode

    op = catalogue()[name]
    case = op.case(precision, **op.base)
    arrays = {key: encode(operand.values, operand.format) for key, operand in op.inputs(Draw(case)).items()}
    try:
        answer = run_op(name, arrays, op.attributes(case))
    except UnsupportedOp:
        return ""
    except Exception as error:  # the target's code may raise anything
        if hasattr(error, "adapt_status"):
            raise
        return f"a probe of it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    missing = [output for output in op.outputs if output not in answer]
    return f"its answer to a probe has no {', '.join(missing)}" if missing else ""


def probe_prompt(vocab: int, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Ordinary ids from the middle of the vocabulary, where special tokens seldom lie.

    With a ``tokenizer``, ids that a text stands for: what it makes of the text of those. Raises TargetError where
    no text keeps its ids.
    """
    ids = tuple(vocab // 4 + 5 * i % max(1, vocab // 2) for i in range(_PROMPT))
    if tokenizer is None:
        return ids
    for _ in range(_PROMPT):
        text = tokenizer.decode(ids)
        again = tuple(tokenizer.encode(text))
        if again == ids:
            return ids
        ids = again
    raise TargetError("the checkpoint's tokenizer gives a text other ids each time that it is read back")


def ask(target: Target, prompt: tuple[int, ...], want: list[str]) -> Response:
    """The answer to one short request for some observables. Raises TargetError where there is not one answer."""
    request = Request(
        "adapt-probe", prompt, max_new_tokens=_NEW, want=frozenset(want) or frozenset({"text"}), topk=_TOPK
    )
    answers = list(target.run([request]))
    if len(answers) != 1 or answers[0].id != request.id:
        raise TargetError(f"the target gave {len(answers)} answers to one request")
    return answers[0]


def fault(name: str, answer: Response, length: int, deployment: Deployment, info: Info) -> str:
    """Why ``answer`` does not show the observable; empty where it does."""
    if answer.error is not None:
        return f"the probe was refused: {answer.error}"
    rows = length + max(0, len(answer.tokens) - 1) - answer.first_row
    if name == "text":
        ended = answer.finish == "stop" and answer.text is not None  # the first choice was the end of the text
        return "" if answer.tokens or answer.text or ended else "no token and no text came back"
    if name == "taps":
        return _taps_fault(answer, deployment, rows)
    value: np.ndarray | None = answer.scores if name == "score" else answer.logits
    if name == "topk":
        value = answer.topk.logprobs if answer.topk is not None else None
    if value is None:
        return "declared, but absent from the answer"
    if len(value) != rows:
        return Spoilt(f"{len(value)} rows where {rows} were computed")
    if name == "logits":
        if info.vocab_size and value.shape[1] != info.vocab_size:
            return Spoilt(f"{value.shape[1]} columns, vocabulary of {info.vocab_size}")
        return "" if np.isfinite(value).all() else Spoilt("values that are not finite")
    if name == "score":
        known = value[:-1]
        right = known.size and np.isfinite(known).all() and (known <= _SUM_SLACK).all()
        return "" if right else Spoilt("scores that are no log-probabilities")
    known_rows = value[~np.isnan(value).all(axis=1)]
    if not known_rows.size:
        return "no row has a value"
    totals = np.nansum(np.exp(known_rows), axis=1)
    right = (totals <= 1 + _SUM_SLACK).all() and (totals > 0).all()
    return "" if right else Spoilt("top-k probabilities that sum to more than 1")


def _taps_fault(answer: Response, deployment: Deployment, rows: int) -> str:
    if not answer.taps:
        return "declared, but absent from the answer"
    for name, value in answer.taps.items():
        if not sites.matches(name, deployment.taps):
            return Spoilt(f"site {name} was not asked for")
        if len(value) != rows:
            return Spoilt(f"site {name} has {len(value)} rows where {rows} were computed")
        if not np.isfinite(value).all():
            return Spoilt(f"site {name} has values that are not finite")
    return ""


def _feature_fault(name: str, target: Target, prompt: tuple[int, ...], deployment: Deployment, info: Info) -> str:
    levels = info.features.get(name)
    if levels is None:
        return "asked for, but not declared"
    if deployment.feature(name) not in levels:
        return f"setting {deployment.feature(name)} is none of {', '.join(map(str, levels))}"
    if name != "prefix_cache":
        return ""
    prompt = (prompt * _REPEATS)[: max(1, (info.max_context or 1 << 20) - _NEW)]
    request = Request("adapt-probe-prefix", prompt, max_new_tokens=_NEW, first_row=len(prompt) - 1)
    answers = [next(iter(target.run([request]))) for _ in range(2)]
    cached = answers[1].cached_tokens
    if cached is None:
        return "the target does not report cached_tokens"
    return "" if cached > 0 else "a repeated prompt took nothing from the cache"
