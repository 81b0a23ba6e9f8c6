"""The comparators themselves are planted with errors: each must make a check of this file fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from pytest_adapt.golden import record as record_module
from pytest_adapt.golden import sketch
from pytest_adapt.target.protocol import TopK
from pytest_adapt.verdict import budget, discrete, judge, localise, pooling, views
from pytest_adapt.verdict.judge import Judge

TOKENS = 40


def functions(module: ModuleType) -> dict[str, FunctionType]:
    """Every function and method that a module defines, by qualified name."""
    found: dict[str, FunctionType] = {}
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                found[function.__qualname__] = function
    return found


def plant(monkeypatch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> None:
    """Replace source text of a module that is loaded already, wherever its functions are used."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{source.count(old)} places in {module.__name__} read {old!r}"
    mutant = ModuleType(module.__name__)
    mutant.__dict__["__name__"] = module.__name__
    monkeypatch.setitem(__import__("sys").modules, module.__name__, mutant)
    exec(compile(source.replace(old, new), module.__file__ or "", "exec"), mutant.__dict__)
    monkeypatch.undo()
    changed = 0
    for name, function in functions(mutant).items():
        original = functions(module)[name]
        if original.__code__ != function.__code__:
            monkeypatch.setattr(original, "__code__", function.__code__)
            changed += 1
    assert changed, "the mutant changed no function"


@pytest.fixture(scope="module")
def world(bench: Any) -> dict[str, Any]:
    model = bench("qwen3-moe-odd")
    tokens = model.tokens(TOKENS)
    return {
        "model": model,
        "tokens": tokens,
        "record": model.record(tokens, "fp32"),
        "answer": model.answer(tokens, "fp32"),
    }


def against(world: dict[str, Any], **changes: Any) -> Judge:
    found = Judge("fp32")
    found.against_record("p", replace(world["answer"], **changes), world["record"])
    return found


def sites(world: dict[str, Any], name: str, change: Callable[[np.ndarray], np.ndarray]) -> Judge:
    model, tokens = world["model"], world["tokens"]
    value = change(world["answer"].taps[name].copy())
    found = Judge("fp32")
    found.against_sites("p", model.answer(tokens, "fp32", forced={name: value}), model.oracle, tokens)
    return found


def healthy(world: dict[str, Any]) -> None:
    assert not against(world).failures()
    assert not sites(world, "embed", lambda x: x).failures()


def every_row_counts(world: dict[str, Any]) -> None:
    for row in (0, 1, TOKENS - 1):
        for sign in (1.0, -1.0):
            logits = world["answer"].logits.copy()
            logits[row, world["record"].topk_ids[row, 2]] += sign
            failed = {one.metric: one for one in against(world, logits=logits, topk=None, scores=None).failures()}
            assert failed["logprob.max"].position == row
            before = {0: "wrong from the first row on", 1: "only the row before this one agrees"}
            assert before.get(row, f"the {row} rows before this one agree") in failed["logprob.max"].detail
            assert {"logprob.rms", "kl", "cosine"} <= failed.keys()


def every_listed_token_counts(world: dict[str, Any]) -> None:
    for column in (0, 7, 19):
        logprobs = world["answer"].topk.logprobs.copy()
        logprobs[5, column] += 0.01
        wrong = TopK(world["answer"].topk.ids, logprobs)
        failed = {one.metric: one for one in against(world, topk=wrong, logits=None, scores=None).failures()}
        assert failed["logprob.max"].position == 5


def a_token_left_out_counts(world: dict[str, Any]) -> None:
    ids = world["answer"].topk.ids.copy()
    stranger = int(np.setdiff1d(np.arange(world["record"].vocab), ids[5])[0])
    ids[5, 1] = stranger
    wrong = TopK(ids, world["answer"].topk.logprobs)
    failed = {one.metric for one in against(world, topk=wrong, logits=None, scores=None).failures()}
    assert "logprob.max" in failed
    longer = world["answer"].topk
    ids = np.concatenate([longer.ids, np.full((TOKENS, 1), -1)], axis=1)
    logprobs = np.concatenate([longer.logprobs, np.full((TOKENS, 1), np.nan)], axis=1)
    ids[5, 20], logprobs[5, 20] = stranger, longer.logprobs[5, 19] + 1e-3
    failed = {one.metric for one in against(world, topk=TopK(ids, logprobs), logits=None, scores=None).failures()}
    assert "logprob.max" in failed
    for column in (0, 1):
        ids = world["answer"].topk.ids.copy()
        ids[5, column] = stranger
        logprobs = world["answer"].topk.logprobs.copy()
        logprobs[5, column] = logprobs[5, 19] - 1e-3
        wrong = TopK(ids, logprobs)
        failed = {one.metric for one in against(world, topk=wrong, logits=None, scores=None).failures()}
        assert "logprob.max" in failed


def every_score_counts(world: dict[str, Any]) -> None:
    for row in (0, TOKENS - 2):
        scores = world["answer"].scores.copy()
        scores[row] -= 0.01
        failed = {one.metric: one for one in against(world, scores=scores, logits=None, topk=None).failures()}
        assert failed["logprob.max"].position == row


def the_first_choice_counts(world: dict[str, Any]) -> None:
    logits = world["answer"].logits.copy()
    best, other = world["record"].topk_ids[7, [0, 15]]
    logits[7, [best, other]] = logits[7, [other, best]]
    (failed,) = (one for one in against(world, logits=logits).failures() if one.metric == "token_match")
    assert failed.position == 7
    assert f"token {other} instead of {best}" in failed.detail


def every_element_of_a_site_counts(world: dict[str, Any]) -> None:
    """One element beyond its budget is red and named; within what is left of the budget it is not."""
    name = "layer.2.attn.context"
    for index in ((0, 0, 0), (TOKENS - 1, 5, 19), (13, 2, 7)):

        def judged(error: float, index: Any = index) -> Judge:
            """With ``error`` added to one element, in units of the rms of its row (an outlier: of its own part)."""

            def change(value: np.ndarray) -> np.ndarray:
                row = np.asarray(value[index[:-1]], np.float64)
                value[index] += error * max(np.sqrt(np.mean(row**2)), abs(row[index[-1]]) / localise.OUTLIER)
                return value

            return sites(world, name, change)

        (large,) = (one for one in judged(1e-3).failures() if one.metric == "site.max")
        assert large.value == pytest.approx(1e-3, rel=0.01)
        for sign in (1.0, -1.0):
            judge = judged(sign * 1.6 * large.budget)
            assert {one.metric for one in judge.failures()} == {"site.max"}, "no other statistic sees one element"
            found = judge.divergence
            assert found is not None
            assert (found.site, found.position, found.layer) == (name, index[0], 2)
            assert str(list(index[1:])) in found.note
            assert not judged(sign * 0.4 * large.budget).failures()


def small_rows_count(world: dict[str, Any]) -> None:
    """An error that is small beside the largest row but not beside its own."""
    rng = np.random.default_rng(0)
    own = rng.normal(size=(50, 30))
    own[0] *= 1e4
    value, emulated = (own * (1.0 + 1e-6 * rng.normal(size=own.shape)) for _ in range(2))
    value[7] *= 1.001
    results = localise.SiteView("p", "layer.0.attn.out", value, own, emulated, "fp32", None, 50).judge(1.0)
    assert all(found is not None and found.position == 7 for _, found in results)


def a_site_that_is_wrong_everywhere(world: dict[str, Any]) -> None:
    for factor in (1.0 + 4e-7, 1.0 - 4e-7):
        failed = sites(world, "layer.3.moe.routed", lambda x, f=factor: x * f).failures()
        assert "site.rms" in {one.metric for one in failed}
    sign = np.random.default_rng(3).choice([-1e-3, 1e-3], size=20)  # a head's width
    own = world["answer"].taps["layer.3.attn.context"].astype(np.float64)
    scale = np.maximum(np.sqrt(np.mean(own**2, axis=-1, keepdims=True)), np.abs(own) / localise.OUTLIER)
    failed = sites(world, "layer.3.attn.context", lambda x: (own + sign * scale).astype(np.float32)).failures()
    assert next(one.value for one in failed if one.metric == "site.rms") == pytest.approx(1e-3, rel=0.01)


def the_first_site_is_named(world: dict[str, Any]) -> None:
    model, tokens = world["model"], world["tokens"]
    names = ("layer.3.ffn.norm", "layer.0.attn.v", "layer.2.attn.q")
    forced = {name: world["answer"].taps[name] * 1.01 for name in names}
    found = Judge("fp32")
    found.against_sites("p", model.answer(tokens, "fp32", forced=forced), model.oracle, tokens)
    assert found.divergence is not None and found.divergence.site == "layer.0.attn.v"
    assert {one.site for one in found.failures()} == set(names)


def an_intruder_is_named(world: dict[str, Any]) -> None:
    model, tokens, answer = world["model"], world["tokens"], world["answer"]
    ids = answer.taps["layer.2.moe.router.ids"].copy()
    selection = answer.taps["layer.2.moe.router.selection"]
    for row in (0, 21):
        wrong = ids.copy()
        intruder = int(selection[row].argmin())
        runner_up = int(max(set(range(13)) - set(ids[row].tolist()), key=lambda e: selection[row, e]))
        wrong[row] = np.sort(np.append(ids[row, :-2], [intruder, runner_up]))
        found = Judge("fp32")
        found.against_sites("p", model.answer(tokens, "fp32", replay={2: wrong}), model.oracle, tokens)
        assert found.divergence is not None
        assert (found.divergence.site, found.divergence.position) == ("layer.2.moe.router.ids", row)
        assert found.divergence.expert == intruder


def certainty_has_a_margin(world: dict[str, Any]) -> None:
    ratio, nothing = np.array([0.3, 0.49, 0.51, 0.1]), np.zeros(4)
    assert discrete.certified_positions(ratio, nothing).tolist() == [True, True, False, False]
    assert discrete.certified_positions(nothing, ratio).tolist() == [True, True, False, True]
    bound = discrete.row_error(np.array([[0.0, -4.0], [0.0, 0.0]]))
    assert bound.tolist() == pytest.approx([4.0, 8**0.5])
    exact = world["record"].emulation("fp32")
    assert exact.certified.all() and (exact.score > 0).any()


def records_say_what_the_oracle_says(world: dict[str, Any]) -> None:
    model, tokens = world["model"], world["tokens"]
    record = model.record(tokens, "fp32")
    logits = model.oracle.run(tokens).logits
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    assert np.array_equal(record.topk_ids, order)
    assert np.allclose(record.topk_logprobs, np.take_along_axis(logprobs, order, axis=1), rtol=0, atol=1e-12)
    assert np.allclose(record.next_logprob[:-1], logprobs[np.arange(TOKENS - 1), tokens[1:]], rtol=0, atol=1e-12)
    assert np.isnan(record.next_logprob[-1])
    centred = logits - logits.mean(axis=1, keepdims=True)
    assert np.allclose(record.norm, np.sqrt((centred**2).mean(axis=1)), rtol=1e-6)
    distances = np.sqrt((record.projections.astype(float) ** 2).mean()) / record.norm.mean()
    assert 0.8 < distances < 1.2, "projections keep lengths"


CHECKS: list[Callable[[dict[str, Any]], None]] = [
    healthy,
    every_row_counts,
    every_listed_token_counts,
    a_token_left_out_counts,
    every_score_counts,
    the_first_choice_counts,
    every_element_of_a_site_counts,
    small_rows_count,
    a_site_that_is_wrong_everywhere,
    the_first_site_is_named,
    an_intruder_is_named,
    certainty_has_a_margin,
    records_say_what_the_oracle_says,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_comparators_hold(world: dict[str, Any], check: Callable[[dict[str, Any]], None]) -> None:
    check(world)


MUTANTS: dict[str, tuple[ModuleType, str, str]] = {
    "abs dropped in largest": (budget, "largest=np.max(np.abs(errors), axis=1)", "largest=np.max(errors, axis=1)"),
    "square over the wrong axis": (budget, "square=np.mean(errors**2, axis=1)", "square=np.mean(errors**2, axis=0)"),
    "yardstick from the target": (
        budget,
        "yard_square=np.mean(yard**2, axis=1)",
        "yard_square=np.mean(errors**2, axis=1)",
    ),
    "rms budget ten times": (budget, "max(RMS_FACTOR, spread(self.positions, self.quantile)) * yard", "10 * yard"),
    "largest budget unlimited": (budget, "factor * np.maximum(yard, peak", "1e9 * np.maximum(yard, peak"),
    "last rows dropped": (budget, "getattr(self, one.name)[keep]", "getattr(self, one.name)[keep][:-1]"),
    "pooled mean instead of root": (
        budget,
        "return math.sqrt(float(np.average(squares",
        "return (float(np.average(squares",
    ),
    "worst row by its smallest": (budget, "row = int(np.argmax(use))", "row = int(np.argmin(use))"),
    "everything certified": (
        discrete,
        "np.asarray(ratio) * CANDIDATES < 1.0",
        "np.asarray(ratio) * CANDIDATES < np.inf",
    ),
    "no memory of flips": (discrete, "np.logical_and.accumulate(safe)", "np.asarray(safe)"),
    "last layer ignored": (discrete, "inner & (np.asarray(last) * CANDIDATES < 1.0)", "inner"),
    "score error without abs": (discrete, "np.abs(np.asarray(errors, np.float64))", "np.asarray(errors, np.float64)"),
    "any choice legal": (discrete, "not illegal and near_tie(margin, bounds[row])", "not illegal"),
    "intruder is the best": (discrete, "expert=int(min(intruders", "expert=int(max(intruders"),
    "absolute errors of sites": (localise, "(value - own) / scale", "(value - own) / scale.max()"),
    "emulation against itself": (
        localise,
        "(value - own) / scale, (emulated - own)",
        "(emulated - own) / scale, (emulated - own)",
    ),
    "position is the slot": (
        localise,
        "position, slot = divmod(row, per_token)",
        "slot, position = divmod(row, per_token)",
    ),
    "first site by name": (localise, "order_key(divergence.site) < order_key(self", "(divergence.site) > (self"),
    "choices not judged": (localise, "if local not in CHOICES or layer is None", "if True"),
    "only the best token": (
        views,
        "ids = record.topk_ids[rows].astype(np.int64)\n    if obs",
        "ids = record.topk_ids[rows][:, :1].astype(np.int64) * np.ones((1, 20), np.int64)\n    if obs",
    ),
    "tokens left out are free": (
        views,
        "error = np.where(absent, -np.maximum(",
        "error = np.where(absent, np.nan * np.maximum(",
    ),
    "strangers are free": (views, "np.where(np.isfinite(excess) & (excess > 0), excess, np.nan)", "np.nan"),
    "rows off by one": (
        views,
        "record.positions[rows].astype(np.int64) - response.first_row",
        "np.maximum(record.positions[rows].astype(np.int64) - response.first_row - 1, 0)",
    ),
    "scores unchecked": (
        views,
        "return np.where(needed, found, np.nan)",
        "return np.where(needed, record.next_logprob[rows], np.nan)",
    ),
    "argmin for argmax": (views, "logits.argmax(axis=1)", "logits.argmin(axis=1)"),
    "mismatches are ties": (judge, "if near_tie(margin, error):", "if True:"),
    "pooled verdict ignored": (pooling, "rms <= rms_budget", "True"),
    "largest verdict ignored": (pooling, "ok=largest <= largest_budget", "ok=True"),
    "divergence verdict ignored": (pooling, "value, budget, value <= budget, obs", "value, budget, True, obs"),
    "only certified by chance": (
        judge,
        "part = rows[certified]\n        floor",
        "part = rows[certified][:0]\n        floor",
    ),
    "softmax over rows": (
        sketch,
        "total = np.log(np.exp(shifted).sum(axis=-1",
        "total = np.log(np.exp(shifted).sum(axis=0",
    ),
    "projections of raw logits": (sketch, "z = z - z.mean(axis=-1, keepdims=True)", "z = z + 1.0"),
    "smallest tokens": (
        sketch,
        "order = np.lexsort((found, -values), axis=1)",
        "order = np.lexsort((found, values), axis=1)",
    ),
    "next token of the same row": (
        record_module,
        "np.append(sequence[1:], -1)[positions]",
        "np.append(sequence[:-1], -1)[positions]",
    ),
    "divergence of first order": (
        record_module,
        "np.where(small, d * d * (0.5 + d / 6.0), np.expm1(d) - d)",
        "np.zeros_like(d)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_comparator_is_caught(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, *MUTANTS[name])
    for check in CHECKS:
        try:
            check(world)
        except Exception:  # an exception is as loud as a failed assertion
            return
    pytest.fail(f"{name}: no check noticed")
