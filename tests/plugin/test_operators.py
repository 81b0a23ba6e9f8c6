"""The suite of operators on a user's own target: what it declares is judged, what it lacks is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

SUITE = "operators/test_operators.py"
TARGET = '''
import numpy as np
from pytest_adapt.target.protocol import Info, UnsupportedOp
from targets import Echo

class Single(Echo):
    """Three operators in NumPy: a norm, an activation that declines odd widths, a combination that does not exist."""
    offered = {"rms_norm": ("fused", "reference"), "swiglu": ("reference",)}

    def open(self, deployment):
        super().open(deployment)
        return Info("single", "1", observables=self.observables, vocab_size=331, ops=self.offered)

    def run_op(self, name, inputs, attributes):
        if name == "rms_norm":
            x, weight = inputs["x"], inputs["weight"]
            return {"out": self.norm(x, weight, np.float32(attributes["eps"]))}
        if name == "swiglu":
            if inputs["gate"].shape[1] % 2:
                raise UnsupportedOp("odd widths")
            gate = inputs["gate"]
            with np.errstate(over="ignore"):
                return {"out": gate / (1 + np.exp(-gate)) * inputs["up"]}
        raise NotImplementedError(name)

    def norm(self, x, weight, eps):
        return weight * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))

class Lanes(Single):
    def norm(self, x, weight, eps):
        whole = x.shape[-1] // 8 * 8 or x.shape[-1]
        return weight * (x / np.sqrt(np.mean(x[..., :whole] ** 2, axis=-1, keepdims=True) + eps))

class Misnamed(Single):
    offered = {"rmsnorm": ("fused",)}

class Promises(Single):
    offered = {"combine": ("fused",)}
'''
ARGS = ("--adapt-models=llama-odd", "--adapt-precisions=fp32")


@pytest.fixture
def single(folder: Folder, write: Callable[..., object]) -> Folder:
    write(singles=TARGET)
    return folder


def run(folder: Folder, target: str, *args: str) -> pytest.RunResult:
    return folder.run_bare(f"--adapt-target=py:singles:{target}", *ARGS, *args)


@pytest.mark.requirement(50, 57)
def test_operators_that_a_target_shows_are_judged_and_all_are_counted(single: Folder) -> None:
    result = run(single, "Single", SUITE)
    statuses = {case.rpartition("-")[2].rstrip("]"): status for case, status in single.statuses().items()}
    assert result.ret == 0
    assert statuses["rms_norm"] == statuses["swiglu"] == statuses["fp32"] == "pass"
    assert {status for name, status in statuses.items() if name not in ("rms_norm", "swiglu", "fp32")} == {
        "unsupported"
    }
    table = single.report()["operators"]
    assert table["rms_norm"] == {"fp32": "native: fused, reference"}
    assert table["swiglu"] == {"fp32": "fallback: reference"}
    assert table["linear"] == {"fp32": "missing"}
    result.stdout.fnmatch_lines(["operators: 1 native (rms_norm), 1 fallback, 14 missing (linear, *"])
    (declined,) = [
        one for case in single.report()["cases"] for one in case["measurements"] if one["metric"] == "op.declined"
    ]
    assert 0 < declined["value"] < declined["budget"] and declined["detail"].endswith("cases are declined: odd widths")
    figures = {figure["name"] for case in single.report()["cases"] for figure in case["figures"]}
    assert figures == {"time of fused", "time of reference"}


@pytest.mark.requirement(56)
def test_a_failure_prints_the_case_that_repeats_it(single: Folder) -> None:
    result = run(single, "Lanes", SUITE, "-k", "rms_norm")
    assert result.ret == 1
    repeat = "--adapt-op='rms_norm(dtype=fp32,rows=1,heads=0,width=9,eps=1e-06,values=normal,memory=dense,seed=0)'"
    result.stdout.fnmatch_lines([f"*{repeat.replace('[', '[[]')}*"])
    again = run(single, "Lanes", repeat.replace("'", ""), SUITE)
    assert again.ret == 1 and again.parseoutcomes()["failed"] == 1
    again.stdout.fnmatch_lines(["adapt: 1 case on 1 deployment"])
    assert list(single.statuses().values()) == ["fail"]
    healthy = run(single, "Single", repeat.replace("'", ""), SUITE)
    assert healthy.ret == 0 and healthy.parseoutcomes()["passed"] == 1


def test_a_declared_operator_that_does_not_answer_is_a_failure(single: Folder) -> None:
    result = run(single, "Promises", SUITE, "-k", "combine")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*operator combine is declared, but a probe of it raised NotImplementedError: combine*"]
    )


def test_a_name_that_is_no_operators_is_a_failure(single: Folder) -> None:
    result = run(single, "Misnamed", SUITE, "-k", "known and not time")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no operator is called rmsnorm; operators are linear, *"])


def test_a_target_without_operators_is_unsupported(folder: Folder) -> None:
    folder.run("Echo", *ARGS, SUITE, profile="day0")
    assert set(folder.statuses().values()) == {"unsupported"}


def test_masked_observables_hide_the_operators(single: Folder) -> None:
    run(single, "Single", "--adapt-observables=logits", SUITE)
    assert set(single.statuses().values()) == {"unsupported"}


def test_a_wrong_case_is_wrong_usage(single: Folder) -> None:
    result = run(single, "Single", "--adapt-op=rms_norm(width=none)", SUITE)
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --adapt-op: operator rms_norm: width 'none' is no number from 1 on"])


def test_operators_are_judged_once_however_many_models_run(single: Folder) -> None:
    result = single.run_bare(
        "--adapt-target=py:singles:Single", "--adapt-models=llama-odd,mixtral-odd", "--adapt-precisions=fp32", SUITE
    )
    assert {case["model"] for case in single.report()["cases"]} == {"llama-odd"}
    assert result.ret == 0
