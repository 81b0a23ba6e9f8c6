"""Answers of code that nobody here wrote, brought to the types of the protocol or refused in one line."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from pytest_adapt.target.protocol import OBSERVABLES, Info, Request, Response, TargetError, TopK

__all__ = ["checked_counters", "checked_info", "checked_response", "checked_responses", "decode_array", "encode_array"]

_LONGEST = 1 << 24
"""Tokens of the longest context that a target may declare; --adapt-contexts ends there too."""

_NOTHING = type(None)
_WORDS: Mapping[type, str] = {_NOTHING: "None", Integral: "an integer", Real: "a number", str: "text"}
_INFO: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "version": (str,),
    "kind": (str,),
    "features": (Mapping,),
    "token_prompts": (bool,),
    "max_context": (Integral,),
    "vocab_size": (Integral,),
    "first_row": (Integral,),
    "topk": (Integral,),
    "sites": (tuple, list),
    "ops": (Mapping,),
    "gradients": (frozenset, set, tuple, list),
    "rounds": (str,),
    "router": (str,),
    "environment": (Mapping,),
    "load": (Mapping,),
}
_RESPONSE: Mapping[str, tuple[type, ...]] = {
    "id": (str,),
    "prompt_tokens": (Integral,),
    "tokens": (Sequence, np.ndarray),
    "finish": (str,),
    "text": (str, _NOTHING),
    "topk": (TopK, _NOTHING),
    "taps": (Mapping,),
    "first_row": (Integral,),
    "cached_tokens": (Integral, _NOTHING),
    "error": (str, _NOTHING),
    "seconds": (Real, _NOTHING),
    "first_token_seconds": (Real, _NOTHING),
    "completion_tokens": (Integral, _NOTHING),
    "drift": (tuple, list),
}
_LARGEST_ID = 2**31
_LOAD = ("tensors", "seconds", "bytes")
_ALLOWED: Mapping[str, tuple[str, ...]] = {"rounds": ("eager", "fused"), "router": ("fp32", "eager")}


def checked_info(who: str, info: Info) -> Info:
    """``info``; TargetError for a field of another type than the protocol's, or an unknown observable."""
    _fields(f"{who}: info", info, _INFO)
    if not 0 <= info.max_context <= _LONGEST:
        raise TargetError(
            f"{who}: info: max_context is {_brief(info.max_context)}, expected 1 to {_LONGEST} tokens (0: not said)"
        )
    names: Any = info.observables
    if isinstance(names, str) or not isinstance(names, Collection) or not set(names) <= set(OBSERVABLES):
        raise TargetError(f"{who}: info: observables is {_brief(names)}, expected some of {', '.join(OBSERVABLES)}")
    for name, levels in info.features.items():
        if not isinstance(levels, Sequence) or not all(isinstance(level, Integral) for level in levels):
            raise TargetError(f"{who}: info: feature {name} is {_brief(levels)}, expected a list of settings (numbers)")
    for name, words in _ALLOWED.items():
        if getattr(info, name) not in words:
            raise TargetError(f"{who}: info: {name} is {_brief(getattr(info, name))}, expected {' or '.join(words)}")
    if info.vocab_size < 0 or info.topk < 0:
        raise TargetError(f"{who}: info: vocab_size is {info.vocab_size} and topk {info.topk}; 0 means not known")
    if info.first_row and {"taps", "logits"} & set(names):
        raise TargetError(f"{who}: info: first_row is {info.first_row}, but taps and logits are shown of every token")
    lacks = (
        [name for name in _LOAD if not isinstance(info.load.get(name), Real)] if "load_audit" in info.features else []
    )
    if lacks:
        raise TargetError(
            f"{who}: info: load[{lacks[0]!r}] is {_brief(info.load.get(lacks[0]))}; a target with the feature "
            f"load_audit says in numbers what it loaded: {', '.join(_LOAD)}"
        )
    implementations: Any
    for name, implementations in info.ops.items():
        if isinstance(implementations, str) or not isinstance(implementations, Sequence) or not implementations:
            raise TargetError(
                f"{who}: info: op {name} is {_brief(implementations)}, expected names of implementations, "
                "the one in use first"
            )
    return info


def checked_counters(who: str, counters: object) -> dict[str, float]:
    """What `stats` gave; TargetError where that is no mapping of names to numbers."""
    if not isinstance(counters, Mapping):
        raise TargetError(f"{who}: stats returned {_brief(counters)}, expected a mapping of names to numbers")
    for name, value in counters.items():
        if not isinstance(value, Real):
            raise TargetError(f"{who}: stats: {name} is {_brief(value)}, expected a number")
    return {str(name): float(value) for name, value in counters.items()}


def checked_responses(who: str, responses: Iterable[object], requests: Sequence[Request]) -> Iterator[Response]:
    """Pass on ``responses``, each checked; TargetError for an unknown, repeated or missing id."""
    waiting = {request.id: request for request in requests}
    for response in responses:
        if not isinstance(response, Response):
            raise TargetError(f"{who}: run yielded {type(response).__name__}, expected a Response")
        _fields(f"{who}: response", response, _RESPONSE)
        request = waiting.pop(response.id, None)
        if request is None:
            raise TargetError(f"{who}: answered id {response.id!r}, which is unknown or was answered before")
        if response.completion_tokens not in (None, len(response.tokens)):
            raise TargetError(
                f"{who}: request {response.id!r}: completion_tokens is {response.completion_tokens}, but "
                f"{len(response.tokens)} token ids came; only who reads ids out of a text may count otherwise"
            )
        yield checked_response(who, response, request)
    if waiting:
        some = ", ".join(sorted(waiting)[:3])
        raise TargetError(f"{who}: {len(waiting)} of {len(requests)} requests were never answered ({some})")


def checked_response(who: str, response: Response, request: Request) -> Response:
    """``response`` with arrays of the protocol's dtypes; TargetError for a shape that cannot be."""
    if response.error is not None:
        return replace(response, error=response.error.strip() or "without a reason")
    at = f"{who}: request {request.id!r}"
    rows: dict[str, int] = {}
    logits, scores, topk = response.logits, response.scores, response.topk
    if logits is not None:
        logits = _array(at, "logits", logits, np.float32, 2)
        rows["logits"] = len(logits)
    if scores is not None:
        scores = _array(at, "scores", scores, np.float64, 1)
        rows["scores"] = len(scores)
    if topk is not None:
        topk = TopK(
            _array(at, "topk.ids", topk.ids, np.int64, 2), _array(at, "topk.logprobs", topk.logprobs, np.float64, 2)
        )
        if topk.ids.shape != topk.logprobs.shape:
            raise TargetError(
                f"{at}: topk.ids is {topk.ids.shape}, topk.logprobs {topk.logprobs.shape}; they must be equal"
            )
        rows["topk"] = len(topk.ids)
    taps = {name: _tap(at, name, value) for name, value in response.taps.items()}
    rows.update({name: len(value) for name, value in taps.items()})
    fed = len(request.prompt) + max(0, len(response.tokens) - 1)
    for name, count in rows.items():
        if response.first_row + count != fed:
            raise TargetError(
                f"{at}: {name} has {count} rows from token {response.first_row}, but {fed} tokens were fed "
                f"({len(request.prompt)} of the prompt, {max(0, len(response.tokens) - 1)} generated)"
            )
    if len(response.tokens) > request.max_new_tokens:
        raise TargetError(
            f"{at}: {len(response.tokens)} tokens generated, at most {request.max_new_tokens} were asked for"
        )
    given: Sequence[Any] = response.tokens
    wrong = [token for token in given if not _is_id(token)]
    if wrong:
        raise TargetError(f"{at}: tokens holds {_brief(wrong[0])}, expected token ids: integers from 0 on")
    if response.origin is not None and not callable(response.origin):
        raise TargetError(f"{at}: origin is {_brief(response.origin)}, expected a function or None")
    drifted: Sequence[Any] = response.drift
    if not all(isinstance(line, str) for line in drifted):
        raise TargetError(f"{at}: drift is {_brief(drifted)}, expected a line of text for each copy that differs")
    tokens = tuple(int(token) for token in response.tokens)
    return replace(response, tokens=tokens, logits=logits, scores=scores, topk=topk, taps=taps)


def decode_array(value: Any, dtype: type[np.generic]) -> np.ndarray:
    """An array from nested lists (null is nan) or from ``{"dtype", "shape", "base64"}`` (little-endian, row-major).

    Raises ValueError.
    """
    if not isinstance(value, Mapping):
        try:
            return np.array(value, dtype=dtype)
        except TypeError as error:  # null among integers, a mapping among numbers
            raise ValueError(str(error)) from None
    try:
        raw = base64.b64decode(value["base64"], validate=True)
        kind = np.dtype(str(value["dtype"])).newbyteorder("<")
        if kind.kind not in "fiu":
            raise ValueError(f"dtype {value['dtype']} is no number")
        return np.frombuffer(raw, dtype=kind).reshape([int(size) for size in value["shape"]]).astype(dtype)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"an array is nested lists or has dtype, shape and base64 ({error})") from None


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """``array`` in the form that `decode_array` reads."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    text = base64.b64encode(little.tobytes()).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": text}


def _is_id(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= int(value) < _LARGEST_ID


def _fields(at: str, value: object, kinds: Mapping[str, tuple[type, ...]]) -> None:
    for name, allowed in kinds.items():
        given = getattr(value, name)
        if not isinstance(given, allowed):
            expected = " or ".join(_WORDS.get(kind, kind.__name__) for kind in allowed)
            raise TargetError(f"{at}: {name} is {_brief(given)}, expected {expected}")


def _brief(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def _array(at: str, name: str, value: object, dtype: type[np.generic], dimensions: int) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise TargetError(f"{at}: {name} is no array of {dtype.__name__}: {error}") from None
    if array.ndim != dimensions:
        raise TargetError(f"{at}: {name} has shape {array.shape}, expected {dimensions} dimensions")
    return array


def _tap(at: str, name: str, value: object) -> np.ndarray:
    array = np.asarray(value)
    if array.ndim < 2 or array.dtype.kind not in "fiu":
        raise TargetError(
            f"{at}: tap {name} has shape {array.shape} and dtype {array.dtype}; expected numbers [rows, ...]"
        )
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float32, copy=False)
