"""Use of budgets over time: one line a run, none lost, none for ever."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_adapt.audit import headroom
from pytest_adapt.audit.headroom import Trend, append, main, read, trends, uses_of
from pytest_adapt.verdict.result import CaseResult, Measurement, Status

CELL = "correctness/test_x.py::test_it | m | single | bf16 | kl"


def measured(metric: str, value: float, budget: float, compared: int = 1) -> Measurement:
    return Measurement(metric, value, budget, value <= budget, compared=compared)


def test_cells_pool_contexts_and_leave_promises_out() -> None:
    def case(context: int, *found: Measurement) -> CaseResult:
        name = f"correctness/test_x.py::test_it[m-single-bf16-{context}]"
        made = CaseResult(name, Status.PASS, "correctness", "correct", model="m", layout="single", precision="bf16")
        made.measurements.extend(found)
        return made

    cases = [
        case(16, measured("kl", 1.0, 4.0), measured("kl", 3.0, 4.0), measured("tokens", 0.0, 0.0)),
        case(64, measured("kl", 2.0, 4.0), measured("logprob.max", math.inf, 1.0), measured("none", 1.0, 2.0, 0)),
    ]
    assert uses_of(cases) == {CELL: 0.75}


def test_trend() -> None:
    assert (Trend("a", (0.5,)).last, Trend("a", (0.5,)).change) == (0.5, None)
    assert Trend("a", (0.2, 0.4, 0.3, 0.9)).change == pytest.approx(0.6)
    runs = [
        {"at": "", "target": "builtin", "cells": {"a": 0.1, "gone": 0.9}},
        {"at": "", "target": "hf:", "cells": {"a": 0.7}},
        {"at": "", "target": "builtin", "cells": {"a": 0.2, "b": 0.3}},
    ]
    assert trends(runs, "builtin") == [Trend("b", (0.3,)), Trend("a", (0.1, 0.2))]
    assert trends(runs, "nobody") == []


@pytest.mark.parametrize(("runs", "size"), [(5, 10**6), (10**6, 700)])
def test_the_file_is_bounded_and_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int, size: int
) -> None:
    monkeypatch.setattr(headroom, "KEPT_RUNS", runs)
    monkeypatch.setattr(headroom, "KEPT_BYTES", size)
    path = tmp_path / "below" / "headroom.jsonl"
    for number in range(1, 13):
        append(path, "t", {CELL: number / 100})
    kept = [run["cells"][CELL] for run in read(path)[0]]
    assert kept == [number / 100 for number in range(13 - len(kept), 13)]
    assert (len(kept) == 5) if runs == 5 else (1 < len(kept) < 12 and path.stat().st_size <= size + len(kept))
    append(path, "t", {})
    assert len(read(path)[0]) == len(kept), "a run that compared nothing is no run"


def test_runs_that_end_together_are_all_kept(tmp_path: Path) -> None:
    """Each in a process of its own, at the limit, where the file is written anew."""
    code = (
        "import sys; from pathlib import Path; from pytest_adapt.audit import headroom as h; h.KEPT_RUNS = 12\n"
        "[h.append(Path(sys.argv[1]), sys.argv[2], {str(n): 0.5}) for n in range(5)]"
    )
    path = tmp_path / "headroom.jsonl"
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in ("one", "two")]
    assert [child.wait() for child in children] == [0, 0]
    assert sorted(run["target"] for run in read(path)[0]) == ["one"] * 5 + ["two"] * 5
    assert [next(iter(run["cells"])) for run in read(path)[0] if run["target"] == "two"] == ["0", "1", "2", "3", "4"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "headroom.jsonl"
    assert main(["--file", str(path)]) == 2
    assert "holds no run; run pytest" in capsys.readouterr().err
    for use in (0.3, 0.4, 0.88):
        append(path, "builtin", {CELL: use, "other": 0.1})
    with path.open("a") as file:
        file.write('{"at": "cut')
    assert main(["--file", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("builtin: 3 runs, 2 cells in the last")
    append(tmp_path / "one.jsonl", "builtin", {CELL: 0.3})
    assert main(["--file", str(tmp_path / "one.jsonl")]) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[0].startswith("builtin: 1 run, 1 cell in") and first[2] == f" 30.0%   first  30.0%     1  {CELL}"
    assert lines[2] == f" 88.0%  +53.0%  88.0%     3  {CELL}"
    assert lines[-1] == "cells <= 25%: 1, <= 50%: 0, <= 75%: 0, <= 90%: 1, <= 100%: 0, more: 0; 0 above 90%"
    assert main(["--file", str(path), "--above", "0.5", "--count", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("<- above") and len(lines) == 4
    assert main(["--file", str(path), "--target", "hf:"]) == 2
    append(path, "builtin", {CELL: 0.2})
    assert len(read(path)[0]) == 4, "a line that was cut costs no other"
    assert json.loads(path.read_text().splitlines()[0])["cells"][CELL] == 0.3


BROKEN = {
    "one bad byte": b"\xff\xfe\x00\n",
    "UTF-16": "a text\n".encode("utf-16"),
    "200,000 brackets": b"[" * 200_000,
    "half a character": b"\xc3",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_run_costs_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / "headroom.jsonl"
    path.write_bytes(BROKEN[name])
    assert main(["--file", str(path)]) == 2
    message = capsys.readouterr().err
    assert " left out: no JSON" in message and "holds no run" in message
    append(path, "builtin", {CELL: 0.3})
    assert path.read_bytes().startswith(BROKEN[name]), "nothing is lost in silence"
    assert main(["--file", str(path)]) == 0
    said = capsys.readouterr()
    assert "1 run, 1 cell" in said.out and " left out: no JSON" in said.err


@pytest.mark.parametrize("cell", ["NaN", "Infinity", "null", '"0.1"', "true", "[]", "1" + "0" * 400])
def test_a_cell_that_is_no_number_does_not_read_as_fine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    path = tmp_path / "headroom.jsonl"
    append(path, "builtin", {CELL: 0.3})
    with path.open("a") as file:
        file.write(f'{{"at": "", "target": "builtin", "cells": {{"a": {cell}}}}}\n')
    assert main(["--file", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"{path}: line 2: cells.a is ") and "must be a finite number" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("share", ["nan", "-0.5", "inf", "much"])
def test_a_limit_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], share: str) -> None:
    with pytest.raises(SystemExit) as found:
        main([f"--above={share}"])
    assert found.value.code == 2 and share in capsys.readouterr().err
