"""Bits that depend on company, cuts or ranks: the shipped suite is red, and says at which site they left first."""

from __future__ import annotations

import pytest

from pytest_adapt.faults import get
from pytest_adapt.selftest.nested import Bench, Setting
from pytest_adapt.verdict.pattern import function_of
from pytest_adapt.verdict.result import Status

SUITE = ("determinism/test_layouts.py",)
SITES = {"DT02": "layer.0.moe.routed", "DT90": "layer.0.attn.q", "DT91": "layer.0.attn.out"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.requirement(99)
@pytest.mark.parametrize(("name", "precision"), [(name, one) for name in SITES for one in get(name).precisions])
def test_a_fault_is_seen_and_placed(bench: Bench, name: str, precision: str) -> None:
    fault = get(name)
    found = bench.run(Setting(fault.models[0], fault.layout, precision, suites=SUITE, fault=name))
    red = [case for case in found.red if fault.where in case.case]
    assert red, [case.case for case in found.cases]
    for case in red:
        assert any(fault.says in one.detail for one in case.measurements if not one.ok)
        assert case.divergence is not None and case.divergence.site == SITES[name]
        assert case.divergence.budget == 0.0 and case.divergence.element


@pytest.mark.requirement(99)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("model", "layout"), [("qwen3-moe-wide", "tp4"), ("deepseek-v3-wide", "tp3")])
def test_without_a_fault_nothing_is_red(bench: Bench, model: str, layout: str, precision: str) -> None:
    found = bench.run(Setting(model, layout, precision, suites=SUITE))
    passed = {function_of(case.case).partition("::")[2] for case in found.cases if case.status is Status.PASS}
    assert not found.red and "test_a_layout_changes_no_bit" in passed


@pytest.mark.requirement(60, 99)
def test_plain_kernels_promise_no_bits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without native kernels does not say that it could."""
    monkeypatch.setattr("adapt_engine.kernels.native.load", lambda: None)
    found = bench.run(Setting("qwen3-moe-wide", "single", "fp32", suites=SUITE))
    assert {case.status for case in found.cases} == {Status.UNSUPPORTED}
