"""Faults of long context and service: the shipped suites themselves turn red, and say what leads to the cause."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.faults import Fault, catalogue, leaks, long_context
from pytest_adapt.golden.reference import ClosedReference, OracleReference
from pytest_adapt.handle import ModelHandle
from pytest_adapt.matrix import RESERVE, Mark, Model
from pytest_adapt.models import catalogue as models
from pytest_adapt.open_target import OpenTarget
from pytest_adapt.options import Settings
from pytest_adapt.perf.timing import Stopwatch
from pytest_adapt.session import Host
from pytest_adapt.target.protocol import Deployment
from pytest_adapt.target.registry import resolve
from pytest_adapt.verdict.judge import Judge

SUITES = Path(__file__).resolve().parents[2] / "suites"
# A border of 2^15 is met by no prompt that a test of seconds can run: those two are in no test, and
# here with narrower numbers. Memory needs a length at which a matrix stands out.
SLOW = ("LC02", "RP10", "LC89")
FAULTS = tuple(fault for fault in (*long_context.FAULTS, *leaks.FAULTS) if fault.id not in SLOW)
CASES = [(fault, precision) for fault in FAULTS for precision in fault.precisions]


def items(suite: str, words: str) -> list[Callable[..., None]]:
    """Test functions of a shipped suite whose names hold ``words``."""
    found = []
    for file in sorted((SUITES / suite).glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"adapt_suite_{suite}_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [value for name, value in vars(module).items() if name.startswith("test_") and words in name]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def run(root: Path) -> Iterator[Callable[..., Judge]]:
    """Runs one item on one model and context, in this process; the judge has what it found."""
    hosts: list[Host] = []

    def item(
        function: Callable[..., None], name: str, precision: str, context: int = 1024, install: Any = None
    ) -> Judge:
        entry = models()[name]
        model = ModelHandle(
            Model(name, entry, None, entry.contexts, entry.precisions, entry.config, explicit=True), root
        )
        spec = resolve("builtin")
        host = Host(spec, Settings("builtin"))
        create = host._create

        def created() -> Any:
            target = create()
            if install is not None:
                install(target.seams)  # type: ignore[attr-defined]
            return target

        host._create = created  # type: ignore[method-assign]
        hosts.append(host)
        deployment = Deployment(str(model.directory), precision=precision, max_context=context + RESERVE)
        (mark,) = [one for one in function.pytestmark if one.name == "adapt"]  # type: ignore[attr-defined]
        target = OpenTarget(host, deployment, Mark(needs=tuple(mark.kwargs["needs"])))
        judge = Judge(precision, rounds=target.info.rounds, router=target.info.router)
        offered = {
            "target": target,
            "model": model,
            "precision": precision,
            "context_length": context,
            "reference": ClosedReference(OracleReference(model.directory, entry.precisions, name), entry),
            "judge": judge,
            "stopwatch": Stopwatch(),
        }
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        function(**{one: offered[one] for one in names})
        return judge

    yield item
    for host in hosts:
        host.close()


@pytest.mark.requirement(75, 77, 102, 104, 105)
@pytest.mark.parametrize(("fault", "precision"), CASES, ids=lambda value: getattr(value, "id", value))
def test_a_fault_is_caught_and_its_cause_is_said(run: Any, fault: Fault, precision: str) -> None:
    (function,) = items(fault.suite, fault.where)
    context = fault.contexts[0] if fault.contexts else 1024
    try:
        judge = run(function, fault.models[0], precision, context, fault.install)
    except Exception as error:  # a target that breaks says so itself
        assert fault.says in str(error)
        return
    assert judge.failures(), f"{fault.id} ({fault.title}) passed in {precision}"
    said = [f"{one.metric} {one.prompt}: {one.detail}" for one in judge.failures()]
    assert any(fault.says in line for line in said), said


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["needle-llama", "needle-mixtral"])
def test_without_a_fault_nothing_is_red(run: Any, name: str, precision: str) -> None:
    wanted = sorted({(fault.suite, fault.where) for fault in FAULTS})
    assert len(wanted) >= 5
    for suite, words in wanted:
        (function,) = items(suite, words)
        judge = run(function, name, precision)
        assert judge.measurements and not judge.failures(), judge.message()


@pytest.mark.requirement(104)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_index_that_is_too_narrow_shows_at_its_border(run: Any, precision: str) -> None:
    (function,) = items("long_context", "recalled")
    judge = run(function, "needle-llama", precision, 4096, lambda seams: long_context.narrow_slots(seams, 11))
    needles = [one.detail for one in judge.failures() if one.metric == "needles"]
    assert any("2048 asked at" in line or "2047 asked at" in line for line in needles), judge.message()


@pytest.mark.requirement(104)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_positions_that_are_too_narrow_show_in_what_reads_phases(run: Any, precision: str) -> None:
    (function,) = items("long_context", "recalled")
    judge = run(function, "needle-llama", precision, 4096, lambda seams: long_context.narrow_positions(seams, 12))
    assert any(one.metric.startswith("ruler.") for one in judge.failures()), judge.message()


def test_the_slow_ones_are_in_the_registry() -> None:
    assert set(SLOW) < set(catalogue())
