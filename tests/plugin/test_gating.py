"""--adapt-gate in a run: its verdict is the item's, so JUnit, -x, the exit code and the report agree."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pytest_adapt.perf.gate as gate_module
from pytest_adapt.perf.clocks import Clock
from pytest_adapt.perf.rounds import Benchmark, Round, Seen
from pytest_adapt.perf.sides import Side
from pytest_adapt.perf.trend import FILE, read

if TYPE_CHECKING:
    from conftest import Folder

SPIN = '''
import os, time
from pytest_adapt.target.protocol import Info, Response, TargetError, UnsupportedDeployment

class Steady:
    """Costs a fixed number of loops of the interpreter for each token."""
    defaults = {"observables": ("text",)}
    loops = 3000
    def __init__(self, *given): self.sums = {}
    def open(self, deployment):
        return Info("spin", "1", observables=frozenset({"text"}), vocab_size=331)
    def run(self, requests):
        for request in requests:
            for token in range(request.max_new_tokens):
                self.token(len(request.prompt))
            yield Response(request.id, len(request.prompt), tuple(range(request.max_new_tokens)), text="t")
    def token(self, length):
        table = {}
        for i in range(self.loops): table[i % 97] = i * i
    def close(self): pass

class Slower(Steady):
    loops = 4200

class Quicker(Steady):
    loops = 2100

class Declines(Steady):
    def open(self, deployment): raise UnsupportedDeployment("no such kernel")

class Breaks(Steady):
    def token(self, length): raise TargetError("the card fell out")

class Dies(Steady):
    def token(self, length): os._exit(7)

class Short(Steady):
    def run(self, requests):
        for one in super().run(requests):
            one.tokens = one.tokens[:-1]
            yield one

class Served(Steady):
    defaults = {"observables": ("text",), "kind": "endpoint"}
    def open(self, deployment):
        return Info("spin", "1", kind="endpoint", observables=frozenset({"text"}), vocab_size=331)
'''
CASE = "benchmark/test_gate.py::test_no_slower_than_the_baseline[llama-odd-single-fp32-decode]"
CPU = Clock("cpu", "one thread of the measuring process computes")
NARROW = ("--adapt-models=llama-odd", "--adapt-precisions=fp32")


@pytest.fixture
def gated(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A folder with targets of known cost, and few pairs (what they come to is tested elsewhere)."""
    folder.pytester.makepyfile(spin=SPIN)
    monkeypatch.setattr(gate_module, "PAIRS", 2)
    monkeypatch.setattr(gate_module, "CONFIRMING", 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def run(
    folder: Folder, target: str, *args: str, baseline: str = "py:spin:Steady", case: str = CASE
) -> pytest.RunResult:
    own = () if any(word.startswith("--adapt-gate") for word in args) else ("--adapt-gate=times",)
    return folder.run_bare(
        f"--adapt-target=py:spin:{target}", f"--adapt-baseline={baseline}", *own, *NARROW, *args, case
    )


def settled(folder: Folder, target: str, *args: str, **named: str) -> pytest.RunResult:
    """A run that could decide: two pairs on a machine with busy neighbours may not, and that is no fault of theirs."""
    for _ in range(4):
        result = run(folder, target, *args, **named)
        if not {"inconclusive", "invalid machine"} & set(folder.statuses().values()):
            break
    return result


@pytest.mark.requirement(105)
def test_a_regression_fails_its_item_in_junit_in_the_exit_code_and_in_the_report(gated: Folder) -> None:
    result = run(gated, "Slower", "--junitxml=junit.xml", "-x")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes() == {"failed": 1}
    text = result.stdout.str()
    assert f"regression: {CASE}" in text and "Traceback" not in text
    assert "cpu time (one thread of the measuring process computes)" in text
    suite = ElementTree.parse(gated.path / "junit.xml").getroot().find("testsuite")
    assert suite is not None and suite.get("failures") == "1"
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert properties["adapt_status"] == "regression"
    report = gated.report()
    (case,), (compared,) = report["cases"], report["gate"]["comparisons"]
    assert (case["status"], case["required"], report["exit"]) == ("regression", True, 1)
    assert compared["verdict"] == "regression" and 1.2 < compared["confirming"]["ratio"] < 1.6
    assert len(compared["first"]["pairs"]) == 2 and len(compared["confirming"]["pairs"]) == 3
    assert report["gate"]["baseline"] == "py:spin:Steady" and report["gate"]["control"]["case"] == CASE
    assert "gate: py:spin:Slower against py:spin:Steady: 1 regression; control x" in text


@pytest.mark.requirement(105)
@pytest.mark.parametrize(
    ("first", "confirming", "control", "status", "red"),
    [
        (1.0, 1.0, 1.0, "same", 0),
        (1.2, 1.0, 1.0, "same", 0),
        (0.8, 0.8, 1.0, "improvement", 0),
        (1.2, 1.2, 1.0, "regression", 1),
        (1.2, 0.8, 1.0, "inconclusive", 1),
        (1.0, 1.0, 1.2, "invalid machine", 1),
        (1.2, 1.2, 0.8, "invalid machine", 1),
    ],
)
def test_each_verdict_is_the_outcome_of_its_item(
    gated: Folder,
    monkeypatch: pytest.MonkeyPatch,
    first: float,
    confirming: float,
    control: float,
    status: str,
    red: int,
) -> None:
    ratios = iter((first, confirming))

    def scripted(a: Side, b: Side, benchmarks: list[Benchmark], pairs: int, **more: Any) -> Round:
        log = math.log(next(ratios))
        found = {one.case: Seen({"cpu": [log] * pairs, "wall": [log] * pairs}, [CPU]) for one in benchmarks}
        kept = Seen({"cpu": [math.log(control)] * pairs, "wall": [0.0] * pairs}, [CPU])
        return Round(found, kept, benchmarks[0].case)

    monkeypatch.setattr(gate_module, "measure_round", scripted)
    result = run(gated, "Steady", "--junitxml=junit.xml")
    assert (result.ret, list(gated.statuses().values())) == (red, [status])
    assert result.parseoutcomes() == {"failed" if red else "passed": 1}
    suite = ElementTree.parse(gated.path / "junit.xml").getroot().find("testsuite")
    assert suite is not None and suite.get("failures") == str(red)
    (measured,) = gated.report()["cases"][0]["measurements"]
    assert (measured["ok"], measured["settled"]) == (not red, status not in ("inconclusive", "invalid machine"))


@pytest.mark.requirement(105)
def test_what_is_the_same_passes_and_is_kept_for_the_trend(gated: Folder) -> None:
    case = CASE.replace("-decode]", "-prefill]").partition("::")[0]
    result = settled(gated, "Steady", "-k", "baseline and not company and not instructions", case=case)
    assert (result.ret, result.parseoutcomes()["passed"]) == (0, 2)
    assert set(gated.statuses().values()) == {"same"}
    series, _ = read(gated.path / FILE)
    assert [one.case for one in series] == sorted(gated.statuses())
    assert all(one.baseline == "py:spin:Steady" and one.points[-1].clock == "cpu" for one in series)


@pytest.mark.requirement(105)
def test_it_looks_both_ways_and_a_server_is_judged_by_the_wall(gated: Folder) -> None:
    result = settled(gated, "Served", baseline="py:spin:Slower")
    assert (result.ret, set(gated.statuses().values())) == (0, {"improvement"})
    assert gated.report()["gate"]["comparisons"][0]["clock"] == "wall"


@pytest.mark.requirement(105)
@pytest.mark.parametrize(
    ("target", "baseline", "status", "said"),
    [
        ("Steady", "Declines", "new", "the baseline does not run it: no such kernel"),
        ("Declines", "Steady", "gone", "the baseline runs it, the target does not: no such kernel"),
        ("Breaks", "Steady", "gone", "TargetError: the card fell out"),
        ("Dies", "Steady", "gone", "exited with status 7 before it answered warm"),
        ("Short", "Steady", "gone", "12 tokens were asked for after a prompt of 8: 11 came"),
        ("Breaks", "Dies", "fail", "neither side runs it; the target"),
    ],
)
def test_a_benchmark_of_one_side_alone_is_never_green(
    gated: Folder, target: str, baseline: str, status: str, said: str
) -> None:
    result = run(gated, target, baseline=f"py:spin:{baseline}")
    assert (result.ret, list(gated.statuses().values())) == (1, [status])
    assert said in result.stdout.str()


def test_what_both_decline_is_unsupported(gated: Folder) -> None:
    result = run(gated, "Declines", baseline="py:spin:Declines")
    assert (result.ret, result.parseoutcomes()) == (1, {"skipped": 1})  # nothing passed: nothing is proven
    assert list(gated.statuses().values()) == ["unsupported"]


def test_a_waiver_acknowledges_a_benchmark_that_is_new(gated: Folder) -> None:
    gated.pytester.makeini("[pytest]\nadapt_waivers = known.toml\n")
    (gated.path / "known.toml").write_text(
        '[[waiver]]\ncases = "benchmark/test_gate.py::*"\nowner = "ana"\nlink = "https://example.org/1"\n'
        "expires = 2999-01-01\nquota = 1\n"
    )
    result = run(gated, "Steady", baseline="py:spin:Declines")
    assert result.parseoutcomes() == {"xfailed": 1}


@pytest.mark.requirement(105)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--adapt-gate",), "--adapt-gate needs --adapt-baseline=REF"),
        (("--adapt-baseline=v1",), "--adapt-baseline=v1 does nothing without --adapt-gate"),
        (("--adapt-gate=fast", "--adapt-baseline=builtin"), "'fast' is not allowed; allowed: times, instructions, all"),
        (("--adapt-gate", "--adapt-baseline=v9.9"), "'v9.9' is no commit of the repository"),
        (("--adapt-gate", "--adapt-baseline=old.whl"), "old.whl does not exist"),
        (("--adapt-gate", "--adapt-baseline=py:absent:Target"), "importing absent failed"),
    ],
)
def test_a_baseline_that_is_missing_is_wrong_usage(gated: Folder, args: tuple[str, ...], said: str) -> None:
    result = gated.run_bare("--adapt-target=py:spin:Steady", *args, *NARROW)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (error,) = [line for line in result.errlines if line.startswith("ERROR:")]
    assert said in error


@pytest.mark.requirement(105)
def test_under_xdist_it_is_deferred_and_fails(gated: Folder) -> None:
    pytest.importorskip("xdist")
    args = ("--adapt-target=py:spin:Slower", "--adapt-gate=times", "--adapt-baseline=py:spin:Steady", *NARROW)
    result = gated.run_subprocess(*args, "-p", "xdist.plugin", "-n", "1", CASE)
    assert (result.ret, result.parseoutcomes()) == (1, {"failed": 1})
    assert list(gated.statuses().values()) == ["deferred"]
    assert "measures time; run it without xdist: " in result.stdout.str()


def test_without_the_gate_nothing_of_it_is_collected_and_with_it_nothing_else(gated: Folder) -> None:
    def collected(*args: str) -> set[str]:
        result = gated.run_bare("--adapt-target=py:spin:Steady", *NARROW, "--co", "-q", *args)
        return {line.partition("[")[0] for line in result.outlines if "::" in line}

    plain = collected()
    gate = collected("--adapt-gate=times", "--adapt-baseline=py:spin:Steady")
    assert not any("test_gate.py" in name for name in plain)
    assert {name.partition("::")[0] for name in gate} == {"benchmark/test_gate.py", "benchmark/test_counters.py"}
    assert {name for name in plain if "counters" in name} == {name for name in gate if "counters" in name}


def test_what_the_chosen_tier_leaves_out_is_said(gated: Folder) -> None:
    case = CASE.replace("no_slower_than", "no_more_instructions_than")
    result = run(gated, "Steady", case=case)
    assert list(gated.statuses().values()) == ["deferred"]
    assert "instructions are no part of --adapt-gate=times" in result.stdout.str()


def test_without_valgrind_instructions_are_unknown_and_fail(gated: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(gated.path))
    case = CASE.replace("no_slower_than", "no_more_instructions_than")
    result = run(gated, "Steady", "--adapt-gate=instructions", case=case)
    assert (result.ret, list(gated.statuses().values())) == (1, ["unknown"])
    assert "valgrind is not installed" in result.stdout.str()


@pytest.mark.requirement(105)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_instructions_are_counted_on_both_sides(gated: Folder) -> None:
    case = CASE.replace("no_slower_than", "no_more_instructions_than")
    result = run(gated, "Slower", "--adapt-gate=instructions", case=case)
    assert (result.ret, list(gated.statuses().values())) == (1, ["regression"])
    assert "instructions a run (+" in result.stdout.str()
    (found,) = gated.report()["cases"][0]["measurements"]
    assert 0.2 < found["value"] < 0.6


def commit(path: Path, *words: str) -> str:
    git = ("git", "-C", str(path), "-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    for word in words:
        subprocess.run([*git, "tag", word], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.requirement(105)
def test_a_tag_is_compared_with_the_working_tree(gated: Folder) -> None:
    """The user's own module at the tag, against what lies uncommitted in the folder; at paths of equal length."""
    subprocess.run(["git", "init", "-q", str(gated.path)], check=True)
    (gated.path / ".gitignore").write_text(".adapt\n*.log\n")
    commit(gated.path, "v1")
    module = gated.path / "spin.py"
    module.write_text(module.read_text().replace("loops = 3000", "loops = 4500"))
    result = run(gated, "Steady", baseline="v1")
    assert (result.ret, list(gated.statuses().values())) == (1, ["regression"])
    assert "adapt gate: times against v1 (" in result.stdout.str()
    assert gated.report()["gate"]["target"] == "the working tree" and gated.report()["gate"]["pinned"]
    (a,), (b,) = ([*(gated.path / ".adapt" / "gate" / side).iterdir()] for side in ("side-a", "side-b"))
    assert len(str(a)) == len(str(b)) and "3000" in (a / "src" / "spin.py").read_text()
    # The pin does not move: committed, the regression stays one.
    commit(gated.path)
    result = run(gated, "Steady", baseline="v1")
    assert list(gated.statuses().values()) == ["regression"]
    head = run(gated, "Steady", "--co", baseline="HEAD")
    assert "HEAD (" in head.stdout.str() and "which moves" in head.stdout.str()


def test_a_side_that_cannot_be_built_is_an_error_with_its_log(gated: Folder) -> None:
    subprocess.run(["git", "init", "-q", str(gated.path)], check=True)
    gated.pytester.makeini("[pytest]\nadapt_gate_build = echo no compiler here && false\n")
    (gated.path / ".gitignore").write_text(".adapt\n")
    commit(gated.path, "v1")
    result = run(gated, "Steady", baseline="v1")
    assert (result.ret, list(gated.statuses().values())) == (1, ["error"])
    assert "side-a cannot be built" in result.stdout.str() and "no compiler here" in result.stdout.str()


def test_counters_are_proposed_accepted_and_then_held(gated: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_adapt.perf.ledger_cli import main

    gated.pytester.makepyfile(
        counts="""
        import os
        from spin import Steady
        class Counting(Steady):
            made = 0
            def token(self, length): self.made += int(os.environ.get("EACH", "1"))
            def stats(self):
                made = float(self.made)
                return {"made": made, "op.draw.calls": made, "held_bytes": 64.0, "busy_share": 0.25, "free": 99 - made}
        """
    )
    gated.pytester.makeini("[pytest]\nadapt_goldens_dir = mine\n")
    (gated.path / "mine").mkdir()
    case = "benchmark/test_counters.py::test_work_is_what_is_on_record"
    args = ("--adapt-target=py:counts:Counting", "--adapt-profile=smoke", *NARROW, case)
    monkeypatch.chdir(gated.path)

    def statuses(*more: str) -> set[str]:
        gated.run_bare(*args, *more)
        return set(gated.statuses().values())

    store = ["--store", "mine"]
    assert statuses() == {"unchecked"}
    assert statuses("--adapt-goldens=new") == {"unchecked"}
    assert main([*store, "accept", "--all", "--reason", "first", "--allow-dirty"]) == 0
    assert statuses() == {"pass"}
    ledger = gated.path / "mine" / "counters" / "spin.json"
    rows = {row["key"]: row["counters"] for row in json.loads(ledger.read_text())["cases"]}
    counted = {"held_bytes": 64, "made": 12, "op.draw.calls": 12}  # what falls is no counter
    assert rows["llama-odd single fp32 decode"] == counted
    before = ledger.read_text()
    assert statuses("--adapt-goldens=new") == {"pass"} and ledger.read_text() == before
    ledger.write_text(before.replace(f'"counters": {json.dumps(counted)}', '"counters": null'))
    result = gated.run_bare(*args, "-k", "decode")
    assert set(gated.statuses().values()) == {"fail"}
    assert "spin.json: cannot be read as counters (llama-odd single fp32 decode: counters are None" in (
        result.stdout.str()
    )
    ledger.write_text(before)
    monkeypatch.setenv("EACH", "2")
    result = gated.run_bare(*args)
    assert result.ret == 1 and set(gated.statuses().values()) == {"mismatch"}
    assert "made 12 -> 24 (+100.0%)" in result.stdout.str()
    update = ("--adapt-goldens=update", "--adapt-reason=twice", "-k", "decode")
    assert statuses(*update) == {"mismatch"} and ledger.read_text() == before
    assert main([*store, "accept", "*decode", "--reason", "meant", "--allow-dirty"]) == 0
    assert statuses("-k", "decode") == {"pass"}
    # What another build leaves out is not checked, and says so; an update brings the record to the build at hand.
    raw = json.loads(ledger.read_text())
    for row in raw["cases"]:
        row["build"], row["counters"]["op.draw.calls"] = {"torch": "0.4"}, 7
    ledger.write_text(json.dumps(raw))
    assert statuses(*update) == {"unchecked"}
    assert main([*store, "accept", "*decode", "--reason", "rebuilt", "--allow-dirty"]) == 0
    rows = {row["key"]: (row["build"], row["counters"]) for row in json.loads(ledger.read_text())["cases"]}
    assert rows["llama-odd single fp32 decode"] == ({}, {"held_bytes": 64, "made": 24, "op.draw.calls": 24})
    # A load that nobody runs any more is gone.
    raw = json.loads(ledger.read_text())
    raw["cases"].append({**raw["cases"][0], "key": "llama-odd single fp32 sprint"})
    ledger.write_text(json.dumps(raw))
    gone = gated.run_bare(*args[:-1], case.replace("work_is_what_is_on_record", "every_load_on_record_is_still_run"))
    assert (gone.ret, list(gated.statuses().values())) == (1, ["gone"])
    assert "llama-odd single fp32 sprint" in gone.stdout.str()
    assert main([*store, "verify"]) == 1
    # Of a cell that has records a load without one is new; a cell without any is unchecked: no false alarm.
    raw["cases"] = [row for row in raw["cases"] if not row["key"].endswith((" sprint", " decode"))]
    ledger.write_text(json.dumps(raw))
    assert statuses("-k", "decode") == {"new"}
    raw["cases"] = [{**row, "key": row["key"].replace("llama", "mixtral")} for row in raw["cases"]]
    ledger.write_text(json.dumps(raw))
    assert gated.run_bare(*args[:-1], "benchmark/test_counters.py", "-k", "record").ret == 1, "nothing was judged"
    assert set(gated.statuses().values()) == {"unchecked"}


@pytest.mark.requirement(30, 46, 108)
def test_the_built_in_engine_does_the_work_that_is_on_record(gated: Folder) -> None:
    args = ("--adapt-target=builtin", "--adapt-profile=smoke", "benchmark/test_counters.py")
    # In processes of their own: torch cannot be imported twice in one.
    result = gated.run_subprocess(*args)
    assert (result.ret, set(gated.statuses().values())) == (0, {"pass"}), result.stdout.str()
    # Products that are computed twice give the same answers, and other counts.
    result = gated.run_subprocess(*args, "--adapt-inject=PF03", "-k", "on_record and work and decode and fp32")
    assert (result.ret, set(gated.statuses().values())) == (1, {"mismatch"})
    assert "framework.calls " in result.stdout.str()
    way = (
        "   if that is meant: --adapt-goldens=update --adapt-reason='why', then python -m pytest_adapt counters accept"
    )
    assert way in result.outlines, "the summary gives the way out whole, in a line of its own"
