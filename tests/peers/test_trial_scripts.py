"""ci/clean_runs.py draws what can run and hides nothing; ci/mutation.py lets only green tests speak for a mutant."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import pytest_adapt

CI = Path(__file__).parents[2] / "ci"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", CI / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def drawing(**changed: Any) -> argparse.Namespace:
    given = {"seed": 0, "families": "", "shape": "odd", "precisions": "bf16,fp16", "concurrency": "1,4"}
    return argparse.Namespace(**{**given, "layouts": "single,tp2,ep2", **changed})


def test_drawn_settings_are_legal_varied_and_the_same_again() -> None:
    from pytest_adapt.models.entries import catalogue
    from pytest_adapt.strategies import fits

    clean = script("clean_runs")
    drawn = [clean.drawn(drawing(), number) for number in range(40)]
    assert drawn == [clean.drawn(drawing(), number) for number in range(40)]
    assert drawn != [clean.drawn(drawing(seed=1), number) for number in range(40)]
    assert not [one for one in drawn if fits(one["layout"], catalogue()[one["model"]].config)]
    assert {one["layout"] for one in drawn} == {"single", "tp2", "ep2"}
    assert len({one["weights"] for one in drawn}) == 40
    with pytest.raises(SystemExit, match="round"):
        clean.drawn(drawing(shape="round"), 0)


@pytest.mark.parametrize(
    ("code", "statuses", "use", "bad"),
    [
        (0, ("pass",), 0.9, 0),
        (0, ("pass",), 0.901, 1),
        (1, ("pass", "fail"), 0.1, 1),
        (1, ("unknown", "fail"), 0.1, 1),
        (1, ("unknown", "pass"), 0.1, 0),
        (1, ("pass",), 0.1, 1),
        (2, ("unknown", "pass"), 0.1, 1),
        (4, (), 0.1, 1),
    ],
)
def test_a_red_run_and_a_tight_cell_both_count(
    code: int, statuses: tuple[str, ...], use: float, bad: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = {"suite/test_a.py::test_b | m | single | bf16 | kl": use}
    numbers = dict.fromkeys(statuses, 1)
    runs = [{"target": "builtin", "precision": "bf16", "exit": code, "statuses": numbers, "cells": cells}]
    assert script("clean_runs").table(runs) == bad
    assert f"{use:.1%} test_b kl" in capsys.readouterr().out


def test_annotations_are_no_place_for_mutants() -> None:
    source = "def f(x: int | str = 1 + 2) -> list[int | None]:\n    y: int | None = x\n    return y\n"
    found = {
        tuple(source.splitlines()[line - 1][a:b] for (line, a), (_, b) in [span])
        for span in (script("mutation").spans(source))
    }
    assert found == {("int | str",), ("list[int | None]",), ("int | None",)}


@pytest.mark.parametrize(
    ("body", "end"), [("assert True", "survived"), ("assert False", "FAILED"), ("while True: pass", "timeout")]
)
def test_only_green_tests_let_a_mutant_survive(tmp_path: Path, body: str, end: str) -> None:
    (tmp_path / "pytest_adapt").symlink_to(Path(pytest_adapt.__file__).parent)
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    limit = 8 if end == "timeout" else 120
    assert script("mutation").survives(tmp_path, ("test_it.py",), limit).startswith(end)
    assert script("mutation").survives(tmp_path, ("test_absent.py",), 120) != "survived"
