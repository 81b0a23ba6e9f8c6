"""ci/gate_trials.py: what is done is not done again, and the tables say what the lines say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "gate_trials.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gate_trials", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gate_trials"] = module
    spec.loader.exec_module(module)
    return module


def equal(number: int, verdict: str = "same", suspected: tuple[str, ...] = ()) -> dict[str, Any]:
    cases = ("a prefill", "a decode")
    return {
        "kind": "equal",
        "number": number,
        "verdicts": dict.fromkeys(cases, verdict),
        "ratios": {"a prefill": 1.01 if number % 2 else 1 / 1.01, "a decode": 1.0},
        "noise": dict.fromkeys(cases, 0.012),
        "suspected": list(suspected),
        "control": 1.0,
        "seconds": 30.0,
    }


def planted(number: int, size: int, verdict: str, blamed: str) -> dict[str, Any]:
    row = {"kind": "planted", "size": size, "number": number, "verdict": verdict, "op": "linear", "blamed": blamed}
    return {**row, "suspected": verdict != "same"}


def test_tables_count_what_was_kept(script: Any, tmp_path: Path) -> None:
    rows = [equal(0), equal(1, suspected=("a decode",)), equal(2, "invalid machine"), equal(3, "inconclusive")]
    rows += [planted(0, 10, "regression", "linear"), planted(1, 10, "regression", "route"), planted(2, 10, "same", "")]
    rows.append({"kind": "twenty", "seconds": 120.0, "statuses": {"same": 20}, "exit": 0})
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "equ')
    lines = list(script.Trials(tmp_path).tables())
    assert "4 measurements of equal code, 8 benchmarks in them:" in lines
    assert "| 1 of 4 | 1 of 8 | 0 | 2 | 30 |" in lines
    assert "| a prefill | 1.0000 | 1.00% | 1.00% | 1.20% | 0 |" in lines
    assert "| +10 % | 3 | 2 | 2 | 1 | 0 | 0 |" in lines
    assert lines[-1] == "twenty benchmarks through pytest: 120.0 s (20 same)"


def test_what_is_done_is_not_done_again(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"linear": 100, "route": 4, "add": 100_000}
    asked: list[tuple[tuple[Any, ...], str, tuple[Any, ...]]] = []

    def gate(self: Any, baseline: Any, target: Any, benchmarks: Any, seed: int) -> Any:
        asked.append((baseline.plant, target.label, target.plant))
        found = SimpleNamespace(status="same", first=None, confirming=None, op="", why="")
        return SimpleNamespace(times=lambda one: found, suspected=[], control=None)

    monkeypatch.setattr(script.Trials, "gate", gate)
    trials = script.Trials(tmp_path)
    cases = [one.case for one in trials.benchmarks()]
    assert len(cases) == len(set(cases)) == 8
    trials.keep(kind="calibration", costs={case: {"seconds": 0.02, "calls": calls} for case in cases})
    for _ in range(2):
        again = script.Trials(tmp_path)
        again.calibrate()
        again.equal(0)
        again.planted(10, 0)
        again.planted(10, 1)
    assert len(asked) == 3 and asked[0] == ((), "the engine", ())
    for before, label, (*alike, (place, given)) in asked[1:]:
        # Both run their operations one by one: else a plant would cost what fused kernels win, too.
        assert [one for one, _ in before] == ["pytest_adapt.faults.slowness:single_ops"] and list(before) == alike
        assert label == "the engine, slowed" and place.endswith(":slow_op")
        # A tenth of 20 ms over all calls of that operation; not where a call would cost next to nothing.
        assert given["op"] in ("linear", "route")
        assert given["seconds"] == pytest.approx(0.002 / calls[given["op"]])
