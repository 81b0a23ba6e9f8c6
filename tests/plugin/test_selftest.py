"""``--adapt-selftest`` as a user meets it: what it refuses, and that what is done is not done again."""

from __future__ import annotations

import json
from typing import Any

import pytest

FAULT = ("--adapt-target=builtin", "--adapt-precisions=fp32", "--adapt-observables=taps", "--adapt-selftest=NM05")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--adapt-target=py:targets:Echo", "--adapt-selftest"), "it needs --adapt-target=builtin"),
        (("--adapt-target=builtin", "--adapt-selftest=XX99"), "nothing is called XX99; write ids of faults"),
        (("--adapt-target=builtin", "--adapt-selftest", "--adapt-time=soon"), "'soon' is no time; write 90s"),
        (("--adapt-target=builtin", "--adapt-selftest", "--adapt-time=0s"), "write 90s, 10m or 1h"),
        (("--adapt-selftest",), "does nothing without --adapt-target"),
        (("--adapt-target=builtin", "--adapt-selftest=AT02"), "fault AT02 waits for KV transfer between engines"),
        (("--adapt-target=builtin", "--adapt-selftest=,"), "--adapt-selftest=',' names nothing; write ID,KIND*"),
        *(
            (
                ("--adapt-target=builtin", "--adapt-selftest=RT04", word),
                f"does not take {word.partition('=')[0]}: it ch",
            )
            for word in (
                "--adapt-inject=RT04",
                "--adapt-plan",
                "--adapt-models=llama-odd",
                "--adapt-layouts=tp2",
                "--adapt-contexts=64",
                "--adapt-goldens=new",
                "--adapt-profile=smoke",
                "--adapt-report=there",
            )
        ),
        (
            ("--adapt-target=builtin", "--adapt-selftest=RT04", "--adapt-gate", "--adapt-baseline=HEAD"),
            "does not take --adapt-gate, --adapt-baseline: it chooses by --adapt-selftest=ID,KIND*",
        ),
        (("--adapt-target=builtin", "--adapt-selftest=RT04", "correctness"), "does not take the path correctness"),
    ],
)
def test_wrong_usage_is_refused(folder: Any, given: tuple[str, ...], says: str) -> None:
    result = folder.run_bare(*given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any(says in line for line in result.errlines + result.outlines)


def test_items_are_named_after_fault_and_precision(folder: Any) -> None:
    result = folder.run_bare("--adapt-target=builtin", "--adapt-selftest=rt0*,limits", "--collect-only", "-q")
    found = [line for line in result.outlines if line.startswith("selftest/")]
    assert found[0] == "selftest/limit[weight-bf16]", "what takes longest comes first"
    assert found[6] in ("selftest/RT01[bf16]", "selftest/RT09[bf16]"), "then what is hardest to judge"
    assert "selftest/RT04[fp32]" in found and "selftest/limit[softmax-fp32]" in found
    assert not any("AT" in name for name in found)


@pytest.mark.requirement(113, 116)
def test_a_fault_is_tried_once(folder: Any) -> None:
    first = folder.run_subprocess(*FAULT)
    first.assert_outcomes(passed=1)
    assert "adapt selftest: 1 items, 0 known from an earlier run (.adapt/selftest)" in first.outlines
    file = folder.path / ".adapt" / "selftest" / "kill_matrix.json"
    matrix = json.loads(file.read_text())
    (row,) = matrix["rows"]
    assert (row["fault"], row["owner"], row["located"]) == ("NM05", True, True)
    assert matrix["made"]["seconds"] == pytest.approx(row["seconds"], abs=0.1)
    whole = json.dumps({**matrix, "rows": [row, row]})
    file.write_text(whole)
    again = folder.run_subprocess(*FAULT, "--adapt-time=1s")
    again.assert_outcomes(passed=1)
    assert "adapt selftest: 1 items, 1 known from an earlier run (.adapt/selftest)" in again.outlines
    assert "kept: kill_matrix.json of earlier sources, which knows 2 rows; 1 are known of these" in again.outlines
    assert file.read_text() == whole and file.with_name("kill-matrix.part.md").is_file()
    assert json.loads(file.with_name("kill_matrix.part.json").read_text())["rows"] == [row]


def test_a_matrix_that_cannot_be_written_costs_no_summary(folder: Any) -> None:
    (folder.path / ".adapt" / "selftest" / "kill_matrix.json").mkdir(parents=True)
    result = folder.run_bare(*FAULT, "--adapt-time=0.000001s")
    assert "1 of 1 items are left: the same command goes on" in result.outlines
    assert "not written: .adapt/selftest/kill_matrix.json: Is a directory" in result.outlines
    assert "INTERNALERROR" not in result.stdout.str() and "Traceback" not in result.stderr.str()


def test_a_place_that_cannot_hold_what_is_done_is_refused_at_once(folder: Any) -> None:
    (folder.path / ".adapt" / "selftest").write_text("a file")
    result = folder.run_bare(*FAULT)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any("keeps what is done in .adapt/selftest: " in line and "is a file" in line for line in result.errlines)


@pytest.mark.requirement(113)
def test_the_time_that_is_given_ends_the_run(folder: Any) -> None:
    result = folder.run_bare(*FAULT, "--adapt-time=0.000001s")
    result.assert_outcomes(skipped=1)
    assert "1 of 1 items are left: the same command goes on" in result.outlines
