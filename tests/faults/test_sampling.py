"""Faults of sampling: the shipped suites themselves turn red on text alone, and say what leads to the cause."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.faults import Fault
from pytest_adapt.faults.sampling import FAULTS
from pytest_adapt.golden.reference import OracleReference
from pytest_adapt.handle import ModelHandle
from pytest_adapt.matrix import RESERVE, Mark, Model
from pytest_adapt.models import catalogue as models
from pytest_adapt.open_target import OpenTarget
from pytest_adapt.options import Settings
from pytest_adapt.session import Host
from pytest_adapt.target.protocol import Deployment
from pytest_adapt.target.registry import resolve
from pytest_adapt.verdict.judge import Judge

SUITES = Path(__file__).resolve().parents[2] / "suites"
FILES = ("correctness/test_samples.py", "consistency/test_paths.py")
CASES = [(fault, precision) for fault in FAULTS for precision in fault.precisions]


def suite() -> dict[str, Callable[..., None]]:
    found: dict[str, Callable[..., None]] = {}
    for file in FILES:
        spec = importlib.util.spec_from_file_location(f"adapt_suite_{Path(file).stem}", SUITES / file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= {name: value for name, value in vars(module).items() if name.startswith("test_")}
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def run(root: Path, words: str, name: str, precision: str, fault: Fault | None) -> Judge:
    """One test of the suite on a target that shows text alone; the judge has what it found."""
    (function,) = (value for test, value in suite().items() if words in test)
    entry = models()[name]
    model = ModelHandle(Model(name, entry, None, entry.contexts, entry.precisions, entry.config, explicit=True), root)
    host = Host(resolve("builtin"), Settings("builtin", inject=fault.id if fault else "", observables=("text",)))
    try:
        deployment = Deployment(str(model.directory), precision=precision, max_context=512 + RESERVE)
        judge = Judge(precision)
        offered = {
            "target": OpenTarget(host, deployment, Mark(needs=("text",))),
            "model": model,
            "precision": precision,
            "reference": OracleReference(model.directory, entry.precisions, name),
            "judge": judge,
        }
        function(**{one: offered[one] for one in inspect.signature(function).parameters})
    finally:
        host.close()
    return judge


@pytest.mark.requirement(50, 98, 113)
@pytest.mark.parametrize(("fault", "precision"), CASES, ids=lambda value: getattr(value, "id", value))
def test_a_fault_is_caught_and_its_cause_is_said(root: Path, fault: Fault, precision: str) -> None:
    judge = run(root, fault.where, fault.models[0], precision, fault)
    failed = [one for one in judge.failures() if one.settled]
    assert failed, f"{fault.id} ({fault.title}) passed in {precision}: {[one.detail for one in judge.measurements]}"
    said = [f"{one.metric} {one.prompt}: {one.detail}" for one in failed]
    assert any(fault.says in line for line in said), said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama-odd", "deepseek-v3-odd-neg"])
def test_without_a_fault_nothing_is_red(root: Path, name: str, precision: str) -> None:
    wanted: Any = sorted({fault.where for fault in FAULTS})
    assert len(wanted) == 5
    for words in wanted:
        judge = run(root, words, name, precision, None)
        assert judge.measurements and not judge.failures(), judge.message()
