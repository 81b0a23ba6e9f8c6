"""Trial scripts refuse what they cannot do; ci/clean_runs.py draws what can run and hides nothing; ci/mutation.py tries
a mutant on all that could see it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
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
    with_experts = [clean.drawn(drawing(layouts="ep2"), number) for number in range(20)]
    assert {one["layout"] for one in with_experts} == {"ep2"} and "llama-odd" not in {
        one["model"] for one in with_experts
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shape": "round"}, "shape 'round'.*aligned.*odd"),
        ({"families": "llama,lama"}, "family of 'llama,lama'.*deepseek_v3, llama"),
        ({"layouts": "single,zz"}, "--layouts: layout zz: cannot read 'zz'"),
        ({"layouts": "single,ep5", "families": "llama"}, "no model of the shape 'odd' can take ep5"),
        ({"precisions": "bf16,fp8"}, "--precisions: 'fp8' is none of fp32, bf16, fp16"),
        ({"concurrency": "4,0"}, "--concurrency: '0' is none of the numbers from 1 on"),
    ],
)
def test_settings_that_nothing_has_are_refused(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        script("clean_runs").models_of(drawing(**wrong))


def one_line(arguments: argparse.Namespace, number: int, options: list[str], exit_code: int = 0) -> dict[str, Any]:
    """What a run of ci/clean_runs.py leaves, without the run."""
    settings = script("clean_runs").settings_of(arguments, options)
    chosen = {"model": "llama-odd", "precision": "bf16", "layout": "single", "weights": 1}
    done = {"target": "builtin", "settings": settings, "number": number, **chosen, "exit": exit_code}
    return {**done, "seconds": 1.0, "statuses": {"fail": 1} if exit_code else {"pass": 1}, "cells": {}}


def test_a_red_run_stays_red_and_other_settings_are_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean, done = script("clean_runs"), []

    def run(arguments: argparse.Namespace, number: int, options: list[str]) -> dict[str, Any]:
        done.append((arguments.precisions, arguments.concurrency, options, number))
        return one_line(arguments, number, options, exit_code=int(len(done) == 1))

    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clean_runs.py", str(tmp_path), *words])
        return int(clean.main())

    monkeypatch.setattr(clean, "one_run", run)
    assert call("builtin", "--runs", "2") == 1
    assert call("builtin", "--runs", "2") == 1, "nothing is left to do, and what was red stays red"
    assert len(done) == 2
    runs = tmp_path / "runs.jsonl"
    whole = runs.read_text()
    for changed in (["--precisions", "fp32"], ["--concurrency", "1"], ["--", "-k", "sites"]):
        assert call("builtin", "--runs", "1", *changed) == 1
    assert [one[3] for one in done] == [0, 1, 0, 0, 0]
    runs.write_text(whole[:-20])  # it was stopped while it wrote
    assert call("builtin", "--runs", "2") == 1
    assert "its last line was cut off; it counts as not done" in capsys.readouterr().err
    assert len(done) == 6 and len(script("trial_lines").read(runs)) == 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(SystemExit, match="runs.jsonl:2: no JSON .*; remove the line"):
        script("trial_lines").read(path)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("clean_runs", ["nowhere"], "nowhere/runs.jsonl holds no run; give a SPEC to judge"),
        ("clean_runs", ["there", "builtin", "--runs", "0"], "argument --runs: '0' is not a number of at least 1"),
        ("clean_runs", ["there", "builtin", "--runs", "-3"], "argument --runs: '-3' is not a number of at least 1"),
        ("mutation", ["nowhere", "--table"], "nowhere/mutants.jsonl holds no mutant; leave --table out"),
        ("mutation", ["there", "--mutants", "0"], "argument --mutants: '0' is not a number of at least 1"),
        ("mutation", ["there"], "cannot be imported; install them: pip install cosmic-ray coverage"),
        ("blind", ["--faults", "0"], "argument --faults: '0' is not a number of at least 1"),
        ("blind", ["--observables", "foo"], "--observables: 'foo' is none of taps, logits, score, topk, text"),
        ("blind", ["--matrix", "nope.json"], "--matrix: kill matrix nope.json"),
        ("blind", ["--faults", "1", "--", "--no-such-option"], "pytest ended with 4 and without a report: "),
        ("limits", ["--models", ""], "--models: '' is none of "),
        ("limits", ["--models", "nope"], "--models: 'nope' is none of "),
        ("limits", ["--precisions", "fp8"], "--precisions: 'fp8' is none of fp32, bf16, fp16"),
        ("drills", ["--count", "0"], "--count: 0 is not a number of at least 1"),
        ("peers/judge", ["line", "model", "--runs", "0"], "--runs: 0 is not a number of at least 1"),
        ("museum/run", ["--json", "nowhere/found.json"], "--json=nowhere/found.json: no file can be written there"),
        ("museum/run", ["--venvs", "file"], "--venvs=file: no folder can be made there"),
    ],
)
def test_wrong_usage_is_said_at_once(name: str, words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    absent = "import sys; sys.modules['cosmic_ray'] = None; import runpy; sys.argv = sys.argv[1:]\n"
    code = f"{absent}runpy.run_path(sys.argv[0], run_name='__main__')"
    places = [str((CI / name).parent), str(CI.parent), str(CI.parent / "engine")]  # the script's own folder first
    done = subprocess.run(
        [sys.executable, "-c", code, str(CI / f"{name}.py"), *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode not in (0, 99) and said in done.stderr.replace("\n", " "), done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("there/runs.jsonl"))


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


def test_what_does_not_compile_is_no_mutant() -> None:
    compiles = script("mutation").compiles
    assert compiles("def f(x, *, y):\n    return x is y\n")
    assert not compiles("def f(x, %, y):\n    return x is y\n")
    assert not compiles("def f(x, *, y):\n    return x is 'y'\n"), "a warning is an error to pytest"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "pytest_adapt").symlink_to(Path(pytest_adapt.__file__).parent)
    return tree


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("assert True", "survived"),
        ("assert False", "FAILED"),
        ("exit(", "ERROR"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(600)", "timeout"),
    ],
)
def test_only_green_tests_let_a_mutant_survive(tree: Path, body: str, end: str) -> None:
    (tree / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    limit = 1 if end == "timeout" else 120
    assert script("mutation").survives(tree, ("test_it.py",), limit).startswith(end)
    assert script("mutation").survives(tree, ("test_absent.py",), 120) != "survived"


def test_what_a_run_started_ends_with_it(tree: Path) -> None:
    (tree / "test_it.py").write_text("import os\ndef test_it(): os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '30')\n")
    read, write = os.pipe()
    os.set_inheritable(write, True)
    assert script("mutation").survives(tree, ("test_it.py",), 120) == "survived"
    os.close(write)
    ended = time.monotonic()
    assert os.read(read, 1) == b""  # when the last process that could write has ended
    os.close(read)
    assert time.monotonic() - ended < 15


def test_a_mutant_is_tried_on_what_runs_its_statement_and_on_what_hides_its_lines() -> None:
    source = "A = (\n    1,\n    2,\n)\ndef f(x):\n    while x:\n        continue\n    return x\n"
    at = "pytest_adapt/verdict/gates.py"

    def one(test: str, seconds: float, lines: list[int], *, python: bool = False) -> dict[str, Any]:
        return {"test": f"tests/{test}", "seconds": seconds, "python": python, "lines": {at: lines} if lines else {}}

    known = [
        one("verdict/test_a.py::test_slow", 3, [1, 5, 6, 7, 8]),
        one("verdict/test_a.py::test_quick", 1, [1, 5, 6, 8]),
        one("golden/test_a.py::test_imports", 2, [1, 5]),
        one("golden/test_a.py::test_not", 1, []),
        one("golden/test_a.py::test_python", 0.5, [], python=True),
        one("plugin/test_matrix.py::test_of_another_part", 0.1, [1, 5, 6, 7, 8], python=True),
    ]

    def tried(line: int) -> list[str]:
        chosen = script("mutation").tests_of({"module": at, "line": line}, source, known)
        return [test.partition("::test_")[2] for test in chosen]

    assert tried(3) == ["quick", "imports", "slow", "python"]  # of a statement of many lines one counts
    assert tried(5) == ["quick", "imports", "slow", "python"]
    assert tried(8) == ["quick", "slow", "python"]
    assert tried(7) == ["quick", "slow", "python"]  # a jump may leave no code to run


@pytest.mark.parametrize("python", [False, True])
def test_lines_are_those_of_the_test_alone(tree: Path, python: bool) -> None:
    pytest.importorskip("coverage")
    (tree / "pytest_adapt").unlink()
    for name in ("plugin", "matrix", "__init__"):
        (tree / "pytest_adapt").mkdir(exist_ok=True)
        (tree / "pytest_adapt" / f"{name}.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    (tree / "test_it.py").write_text(
        "import subprocess, sys\n"
        f"def test_it():\n    from pytest_adapt.matrix import f\n    f({python})\n"
        f"    if {python}: subprocess.run([sys.executable, '--version'])\n"
        "def test_other():\n    assert False\n"
    )
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); import mutation, pathlib\n"
    code += "print(json.dumps(mutation.measured(pathlib.Path(sys.argv[2]), sys.argv[3], 60)))"
    command = [sys.executable, "-c", code, str(CI), str(tree)]
    done = subprocess.run([*command, "test_it.py::test_it"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["lines"] == {"pytest_adapt/matrix.py": [1, 2, 3] if python else [1, 2, 4]}
    assert found["python"] is python
    red = subprocess.run([*command, "test_it.py::test_other"], capture_output=True, text=True, check=False)
    assert red.returncode and "not green without a mutant: test_it.py::test_other" in red.stderr
