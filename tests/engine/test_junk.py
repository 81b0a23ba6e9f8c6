"""Nonsense in any field of options and requests: refused by name, in one line, before a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from adapt_engine import Engine, EngineError, EngineOptions, SequenceRequest
from adapt_engine.runtime.requests import OPTION_RULES, REQUEST_RULES
from hypothesis import given, settings
from hypothesis import strategies as st

from .tiny import VOCAB, open_tiny, write_tiny

GOOD: dict[str, Any] = {"prompt": (1, 2, 3), "max_new_tokens": 3}


class Odd:
    """Its text cannot be had."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


OPTIONS: list[tuple[str, Any]] = [
    *[("precision", value) for value in (["fp32"], None, "", "int4", 32)],
    *[("layout", value) for value in (None, 3, ("tp2",), b"tp2")],
    *[("seed", value) for value in ("x", None, 1.0, True)],
    *[("taps", value) for value in ((1,), None, "abc", {"a": 1}, (None,))],
    *[("placement", value) for value in (None, (0, 1.0), (0, True), "01", (-1,), {0, 1}, 1)],
    *[("timeout", value) for value in (10**400, float("inf"), float("nan"), 0.5, None, True, 1e9)],
    *[("threads", value) for value in (10**9, -1, True, 4 * (os.cpu_count() or 1) + 1)],
    *[
        (name, value)
        for name in ("native", "preemption", "prefix_cache", "measure_memory")
        for value in ("no", 7, None)
    ],
    *[("mode", value) for value in (["fast"], None, 1)],
    *[("communicator", value) for value in ({}, None, "nccl")],
    *[(name, value) for name in ("kv_tokens", "micro_batches", "memory_limit") for value in (10**5000, 1 << 80, "1")],
    ("max_context", np.zeros(3)),
    ("page_size", Odd()),
]
REQUESTS: list[tuple[str, Any]] = [
    *[("stop", value) for value in (None, "abc", 3, ([1],), (True,), (1.0,), {1: 2})],
    *[("prompt", value) for value in (np.array([1, 2]), torch.tensor([1, 2]), {1, 2}, {1: 2}, b"\1\2", "12", 3, None)],
    ("prompt", range(10**12)),
    ("prompt", (1, np.int64(2))),
    *[("want_logits", value) for value in ("no", 1, None)],
    *[("temperature", value) for value in (10**400, 5e-324, True, "1", float("nan"), Odd())],
    *[("top_p", value) for value in (10**400, True, np.ones(2))],
    *[("max_new_tokens", value) for value in (10**5000, True, 1.0)],
    *[("top_k", value) for value in (10**5000, None)],
    *[("first_row", value) for value in (10**5000, "0")],
    *[("seed", value) for value in (1.5, None, True)],
    *[("id", value) for value in (None, 5, ["a"], b"a")],
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with open_tiny(write_tiny(tmp_path_factory.mktemp("tiny")), prefix_cache=True) as engine:
        yield engine


@pytest.mark.requirement(102)
def test_every_field_has_a_rule() -> None:
    assert list(OPTION_RULES) and set(OPTION_RULES) == {field.name for field in fields(EngineOptions)}
    assert set(REQUEST_RULES) == {field.name for field in fields(SequenceRequest)}
    for rules, made in ((OPTION_RULES, EngineOptions()), (REQUEST_RULES, SequenceRequest("a", (1,)))):
        assert all(holds(getattr(made, name)) for name, (holds, _) in rules.items()), "a default breaks its rule"


@pytest.mark.requirement(102)
@pytest.mark.parametrize(
    ("name", "value"), OPTIONS, ids=lambda one: one if isinstance(one, str) else type(one).__name__
)
def test_options_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(EngineError) as refused:
        EngineOptions(**{name: value})
    text = str(refused.value)
    assert text.startswith(f"option {name}: ") and text.endswith(f" must be {OPTION_RULES[name][1]}")
    assert "\n" not in text and len(text) < 240


@pytest.mark.requirement(102)
def test_requests_that_make_no_sense_are_answered_and_reach_no_step(tiny: Engine) -> None:
    (healthy,) = tiny.run([SequenceRequest("healthy", **GOOD)])
    bad = [SequenceRequest(**{"id": f"bad {at}", **GOOD, name: value}) for at, (name, value) in enumerate(REQUESTS)]
    results = list(tiny.run([*bad, SequenceRequest("good", **GOOD), 5]))  # type: ignore[list-item]
    assert len(results) == len(bad) + 2
    for (name, _), result in zip(REQUESTS, results, strict=False):
        assert result.finish == "error" and result.error is not None
        assert name in result.error and "must" in result.error.replace("max_context is", "must")
        assert "\n" not in result.error and len(result.error) < 240
    by_id = {result.id: result for result in results if isinstance(result.id, str)}
    assert by_id["good"].tokens == healthy.tokens and by_id["good"].error is None
    assert by_id[""].error == "request is 5: must be a SequenceRequest"
    tiny.check_integrity()


@pytest.mark.requirement(102)
def test_a_request_cannot_be_changed_after_it_was_taken(tiny: Engine) -> None:
    (healthy,) = tiny.run([SequenceRequest("healthy", **GOOD)])
    prompt: Any = [1, 2, 3]
    stop: Any = [VOCAB]
    assert tiny.submit(SequenceRequest("a", prompt, max_new_tokens=3, stop=stop)) is None
    prompt.clear()
    stop.append("x")
    results = []
    while tiny.busy:
        results += [update.result for update in tiny.step() if update.result is not None]
    assert results[0].tokens == healthy.tokens


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([10**400, -(10**400)]),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.sampled_from([object(), int, np.float64(0.5), np.int64(3), np.array([1, 2]), torch.tensor([1]), ...]),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
        st.lists(st.integers(0, VOCAB), max_size=4).map(tuple),
        st.sets(st.integers(), max_size=2),
    ),
    max_leaves=4,
)


@pytest.mark.requirement(102)
@given(junk=st.dictionaries(st.sampled_from(sorted(OPTION_RULES)), JUNK, min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_no_option_whatever_it_is_gives_another_error(junk: dict[str, Any]) -> None:
    try:
        made = EngineOptions(**junk)
    except EngineError as refused:
        assert "\n" not in str(refused) and any(f"option {name}: " in str(refused) for name in junk)
    else:
        assert hash(made) == hash(EngineOptions(**junk)), "plain values only"
        assert made.cache_tokens > 0 and made.step_budget > 0


@pytest.mark.requirement(102)
@given(
    several=st.lists(
        st.dictionaries(st.sampled_from(sorted(set(REQUEST_RULES) - {"id"})), JUNK, max_size=2), min_size=1, max_size=4
    )
)
@settings(deadline=None, max_examples=60)
def test_no_request_whatever_it_holds_disturbs_the_others(several: list[dict[str, Any]], tiny: Engine) -> None:
    asked = [SequenceRequest(**{"id": str(at), **GOOD, **junk}) for at, junk in enumerate(several)]
    results = {result.id: result for result in tiny.run([SequenceRequest("good", **GOOD), *asked])}
    assert len(results) == len(several) + 1 and results["good"].error is None
    for request in asked:
        result, problem = results[request.id], request.problem(VOCAB, tiny.options)
        assert result.error == problem, "a request without a problem is served"
        assert problem is None or "\n" not in problem
    tiny.check_integrity()
