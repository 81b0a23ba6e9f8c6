"""The judge's own trial: rows of the kill matrix, targets whose answers are remembered, and what is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt.documents import named, whole
from pytest_adapt.faults import Fault, catalogue, cli, get
from pytest_adapt.faults.cli import main
from pytest_adapt.faults.matrix import ROW, KillMatrix, MatrixError, load
from pytest_adapt.faults.waiting import waiting
from pytest_adapt.selftest import memo
from pytest_adapt.selftest.kept import Kept, KeptError, sources
from pytest_adapt.selftest.memo import Memory, RememberedTarget
from pytest_adapt.selftest.nested import Bench, NestedError, Setting
from pytest_adapt.selftest.page import page, summary_lines
from pytest_adapt.selftest.trial import RedControl, run_trial, trial_of
from pytest_adapt.shipped import suites_dir
from pytest_adapt.target.protocol import Deployment, Info, Request, Response
from pytest_adapt.verdict import sampling, statistics
from pytest_adapt.verdict.pattern import function_of


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def controls(tmp_path: Path) -> Kept:
    return Kept(tmp_path, "digest")


@pytest.mark.requirement(113, 116)
def test_a_fault_is_seen_and_placed(bench: Bench, controls: Kept) -> None:
    trial = trial_of(get("WL91"), "fp32")
    rows = run_trial(trial, bench, controls, ("taps", "topk", "text"))
    assert list(rows) == ["taps", "topk", "text"]
    first = rows["taps"]
    assert first["differs"] and first["killed"] and first["owner"] and first["located"] and first["alone"]
    assert rows["topk"]["killed"] and rows["topk"]["alone"] and rows["topk"]["located"] is None
    (site,) = {case["divergence"]["site"] for case in first["red"] if case["suite"] == "correctness"}
    assert site == "layer.1.ffn.norm"
    assert all(case["divergence"] is None for case in rows["topk"]["red"]), "a masked target shows no site"
    assert len(first["red"]) == len({function_of(case["case"]) for case in first["red"]})
    assert all(len(case["measurements"]) <= 8 for case in first["red"])
    assert first["green"]["determinism/test_repeat.py::test_a_restart_gives_the_same_bits"] == 1
    json.dumps(rows, allow_nan=False)
    again = run_trial(trial, bench, controls, ("taps",))["taps"]
    assert {**again, "seconds": 0} == {**first, "seconds": 0}, "a trial repeats itself"


@pytest.mark.requirement(113)
def test_operators_see_what_values_of_a_model_hide(bench: Bench, controls: Kept) -> None:
    row = run_trial(trial_of(get("NM02"), "bf16"), bench, controls, ("taps",))["taps"]
    assert row["differs"] and row["killed"] and not row["owner"]
    assert {case["suite"] for case in row["red"]} == {"operators"}
    assert any("rms_norm" in case["case"] for case in row["red"])


def test_what_a_sound_engine_does_is_no_fault(bench: Bench, controls: Kept) -> None:
    """Tables of angles in the type of the activations: transformers' own, asked here."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    tables = llama.LlamaRotaryEmbedding(config)(torch.ones(1, 3, 64, dtype=torch.bfloat16), torch.arange(3)[None])
    assert {table.dtype for table in tables} == {torch.bfloat16}
    rows = run_trial(trial_of(get("RP07"), "bf16"), bench, controls)
    assert list(rows) == ["taps"] and rows["taps"]["differs"] and "transformers" in rows["taps"]["healthy"]
    assert run_trial(trial_of(get("RP07"), "fp32"), bench, controls, ("taps",))["taps"]["owner"]


@pytest.mark.requirement(113)
def test_a_fault_that_changes_nothing_is_equivalent(bench: Bench, controls: Kept) -> None:
    idle = Fault("XX01", "Nothing is done", "own", 56, "correctness", "attn.q", ("llama-odd",), lambda seams: None, 0)
    trial = trial_of(idle, "fp32")
    trial = type(trial)(idle, "fp32", _without_fault(trial.setting), idle.install)
    rows = run_trial(trial, bench, controls)
    assert list(rows) == ["taps"]
    assert not rows["taps"]["differs"] and not rows["taps"]["killed"]


def test_a_permutation_test_of_the_same_draws_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    monkeypatch.setattr(memo, "permutation_test", lambda *samples, **named: computed.append(named) or len(computed))
    memory, draws = Memory(), {"p": np.array([1, 2])}
    with memory.of_tests({}):
        found = [sampling.permutation_test(draws, draws, {"p": np.ones(3)}, alpha=alpha) for alpha in (0.1, 0.1, 0.2)]
    assert found == [1, 1, 2] and [one["alpha"] for one in computed] == [0.1, 0.2]
    assert sampling.permutation_test is statistics.permutation_test


def test_settings_for_the_same_places_are_found_once_for_all_sessions() -> None:
    places, plans, plain = [sampling.Place("p", (1, 2), np.arange(9.0), 1e-3, 1e-4, 1e-6)], {}, sampling.sharpest
    expected = plain(places)
    for _ in range(2):
        with Memory().of_tests(plans):
            assert sampling.sharpest(places) == expected
            sampling.sharpest([replace(places[0], error=0.5)])
    assert len(plans) == 2 and sampling.sharpest is plain
    with Memory().of_tests(dict.fromkeys(plans, {"top_k": 0})):
        assert sampling.sharpest(places) == {"top_k": 0}


def test_a_run_until_red_begins_no_case_after_it(bench: Bench) -> None:
    setting = trial_of(get("WL91"), "fp32").setting
    whole, cut = bench.run(setting), bench.run(setting, until_red=True)
    assert len(cut.cases) < len(whole.cases)
    assert cut.red == [cut.cases[-1]] and cut.red[0].case == whole.red[0].case


def test_a_row_keeps_a_case_of_every_red_test(bench: Bench, controls: Kept) -> None:
    row = run_trial(trial_of(get("NM05"), "fp32"), bench, controls, ("taps",))["taps"]
    tests = [function_of(case["case"]) for case in row["red"]]
    assert len(set(tests)) == len(tests) > 6
    assert "correctness/test_sites.py::test_each_operation_matches_its_definition" in tests
    assert not any("detail" in one for case in row["red"] for one in case["measurements"] if one.get("site"))


def test_red_without_a_fault_proves_nothing(bench: Bench, controls: Kept) -> None:
    trial = trial_of(get("WL91"), "fp32")
    setting = _without_fault(trial.setting)
    name = "control " + " ".join([*setting.arguments()[1:], *setting.suites])
    controls.write(name, {"statuses": {}, "answers": {}, "red": ["a case"], "seconds": 0})
    with pytest.raises(RedControl, match="red without any fault: a case"):
        run_trial(trial, bench, controls, ("taps",))


def test_a_session_without_cases_says_why(bench: Bench) -> None:
    with pytest.raises(NestedError, match="no case was run with .*--adapt-models=llama-odd"):
        bench.run(Setting("llama-odd", "single", "fp32", suites=("stress",)))


class Counting:
    """Answers with how often it was asked since it was opened."""

    opened = 0
    asked = 0

    def __init__(self) -> None:
        self.count = 0

    def open(self, deployment: Deployment) -> Info:
        Counting.opened += 1
        self.count = 0
        return Info("counting", "1")

    def run(self, requests: Any) -> Iterator[Response]:
        for request in requests:
            Counting.asked += 1
            self.count += 1
            logits = np.full((len(request.prompt), 2), self.count, np.float32)
            yield Response(request.id, len(request.prompt), logits=logits, scores=logits[:, 0].astype(np.float64))

    def close(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {"count": self.count}

    def reset(self) -> int:
        self.count = 0
        return self.count


def _ask(target: RememberedTarget, name: str, *want: str) -> Response:
    (answer,) = target.run([Request(name, (1, 2), want=frozenset(want))])
    return answer


def test_answers_are_remembered_with_all_that_came_before() -> None:
    Counting.opened = Counting.asked = 0
    memory, deployment = Memory(), Deployment("m")
    first = RememberedTarget(Counting, memory)
    first.open(deployment)
    whole = [_ask(first, name, "logits", "score") for name in ("a", "b", "c")]
    assert [answer.logits[0, 0] for answer in whole] == [1, 2, 3]
    second = RememberedTarget(Counting, memory)
    second.open(deployment)
    masked = _ask(second, "a", "score")
    assert masked.logits is None and masked.scores[0] == 1
    assert (Counting.opened, Counting.asked) == (1, 3), "nothing was computed anew"
    other = _ask(second, "z", "logits")
    assert other.logits[0, 0] == 2, "the second request to this target"
    assert (Counting.opened, Counting.asked) == (2, 5), "what came before was asked again"
    assert second.stats() == {"count": 2}
    assert _ask(second, "b", "logits").logits[0, 0] == 3
    third = RememberedTarget(Counting, memory)
    third.open(deployment)
    assert _ask(third, "a").logits is None, "the probe of a target that declares text alone"
    assert _ask(third, "z", "score").scores[0] == 2 and third.stats() == {"count": 2}
    assert (Counting.opened, Counting.asked) == (2, 6), "counters are remembered too"
    assert _ask(third, "b").logits is None and Counting.asked == 9, "rows that nobody asks for are another request"
    assert third.reset() == 0 and third.stats() == {"count": 0}
    assert _ask(third, "b", "logits").logits[0, 0] == 1, "from here on it answers itself"


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    kept, shape = Kept(tmp_path, "one"), named(whole)
    assert kept.read("RT04[bf16]", shape) is None
    kept.write("RT04[bf16]", {"taps": 1})
    assert kept.read("RT04[bf16]", shape) == {"taps": 1}
    assert Kept(tmp_path, "two").read("RT04[bf16]", shape) is None, "other sources"
    (file,) = tmp_path.rglob("*.json")
    for broken in (
        "{torn",
        "[" * 200_000,
        '{"name": "RT04[bf16]"}',
        '{"name": "RT04[bf16]", "document": {"taps": "x"}}',
    ):
        file.write_text(broken)
        assert kept.read("RT04[bf16]", shape) is None
    file.unlink()
    file.mkdir()
    with pytest.raises(KeptError, match=r"RT04\[bf16\] cannot be kept: .*Is a directory"):
        kept.write("RT04[bf16]", {"taps": 1})


def test_rows_that_are_kept_and_broken_are_made_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "one")
    row = _row("RT04")
    for broken in (
        {"taps": "a text"},
        {"taps": {name: row[name] for name in row if name != "differs"}},
        {"taps": None},
    ):
        kept.write("RT04[bf16]", broken)
        assert kept.read("RT04[bf16]", named(ROW)) is None
    kept.write("RT04[bf16]", {"taps": row})
    assert kept.read("RT04[bf16]", named(ROW)) == {"taps": row}


def test_what_is_kept_depends_on_all_that_a_verdict_reads() -> None:
    hashed = {path.relative_to(root).as_posix() for root, path in sources(["routing.py"])}
    assert hashed >= {
        "faults/registry.py",
        "faults/routing.py",
        "perf/loads.py",
        "report/collector.py",
        "selftest/page.py",
    }
    assert hashed >= {"inspect/config.py", "inspect/data/presets.json", "strategies.json", "requirements.json"}
    assert hashed >= {"models/data/qwen3-moe-odd.prompts.json", "models/manifests/qwen3-moe-odd.json"}
    assert hashed >= {"correctness/test_sites.py"} and any(name.endswith(".safetensors") for name in hashed)
    assert "runtime/scheduler.py" in hashed and "report/collector.py" in hashed
    assert not hashed & {"faults/kill_matrix.json", "faults/attention.py"}
    assert not any("__pycache__" in name for name in hashed)


def _row(fault: str, observable: str = "taps", **changes: Any) -> dict[str, Any]:
    row = {"fault": fault, "precision": "bf16", "observable": observable, "model": "m", "layout": "single"}
    row |= {"differs": True, "killed": True, "owner": True, "located": True, "alone": True, "said": None}
    return {**row, "seconds": 1.5, "red": [], "green": {}, **changes}


def _some_matrix() -> KillMatrix:
    rows = (
        _row("RT04"),
        _row("RT03", owner=False, located=False),
        _row("PL03", located=None),
        _row("NM01", killed=False, owner=False, located=False, alone=False),
        _row("NM02", differs=False, killed=False, owner=False, located=False, alone=False),
        _row("RP07", killed=False, owner=False, located=False, alone=False, healthy="somebody does so"),
        _row("RT04", "topk", located=None, alone=False),
    )
    return KillMatrix(rows, ({"name": "no abs", "what": "x", "killed": False, "by": ""},), made={"seconds": 9})


def test_tallies_leave_out_what_is_equivalent() -> None:
    matrix = _some_matrix()
    tally = matrix.tally("taps", "bf16")
    assert (tally.rows, tally.equivalent, tally.judged) == (6, 2, 4)
    assert (tally.owner, tally.some, tally.alone) == (2, 3, 3)
    assert (tally.layered, tally.located) == (3, 1)
    assert matrix.survivors("taps", "bf16") == ["NM01"]
    assert matrix.tally("topk", "bf16").alone == 0


def test_the_summary_says_who_survives_and_why() -> None:
    lines = summary_lines(_some_matrix())
    assert len(lines) <= 40
    text = "\n".join(lines)
    assert "bf16 taps: not seen: NM01" in text
    assert "RP07[bf16]: no fault in bf16: somebody does so" in text
    assert "wrong comparators: 0 of 1 seen; alive: no abs" in text
    assert "| NM01 | Epsilon added outside the root | correctness |" in page(_some_matrix())


def test_a_matrix_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "kill_matrix.json"
    _some_matrix().save(path)
    assert load(path) == _some_matrix()
    assert json.loads(path.read_text())["schema"] == 1
    path.write_text('{"schema": 2}')
    with pytest.raises(MatrixError, match=r"schema 2, this version reads 1; make one with --adapt-selftest"):
        load(path)
    with pytest.raises(MatrixError, match="cannot be read"):
        load(tmp_path / "absent.json")


def test_known_faults_are_injectable_or_wait_for_something(capsys: pytest.CaptureFixture[str]) -> None:
    from adapt_engine.kernels.registry import OPS

    from pytest_adapt.target.seams import _METHODS

    entries = waiting()
    assert not {one.id for one in entries} & set(catalogue())
    assert all(one.needs and one.title and one.report for one in entries)
    # What is there by now is nothing to wait for, and what an entry names is there.
    there = ("the performance gate", "a suite for sampled output", "operator tests", "strict mode", "quantised weights")
    assert not [one.id for one in entries if one.needs.startswith(there)]
    known = {path.name for path in suites_dir().iterdir()} | set(OPS) | set(_METHODS) | {"Info.rounds", "ci/drills.py"}
    assert {name for one in entries for name in re.findall(r"`([^`]+)`", one.needs)} <= known
    assert len(catalogue()) >= 90
    assert main(["list", "--waiting"]) == 0
    assert "WL13" in capsys.readouterr().out


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place that ships a matrix and a page."""
    shipped = tmp_path / "pytest_adapt" / "faults" / "kill_matrix.json"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "kill-matrix.md").write_text("the page\n")
    _some_matrix().save(shipped)
    monkeypatch.setattr(cli, "shipped_matrix", lambda: shipped)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_measured_matrix_the_shipped_one_is_shown(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = checkout / "pytest_adapt" / "faults" / "kill_matrix.json"
    assert main(["matrix"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"from {shipped}"
    measured = checkout / ".adapt" / "selftest" / "kill_matrix.json"
    KillMatrix(made={"seconds": 7}).save(measured)
    assert main(["matrix"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["7 s of CPU time", "from .adapt/selftest/kill_matrix.json"]
    measured.unlink()
    assert main(["matrix", "--write"]) == 2, "the shipped one is not written over itself"
    assert "make one with --adapt-selftest" in capsys.readouterr().err


def _whole_matrix(**parts: Any) -> KillMatrix:
    rows = tuple(_row(name, precision=precision) for name in catalogue() for precision in ("fp32", "bf16"))
    limit = {
        "value": "v",
        "precision": "bf16",
        "changes": None,
        "detected": {"taps": None},
        "token": None,
        "any_token": 1e-3,
    }
    mutant = {"name": "n", "what": "w", "killed": True, "by": "b"}
    return KillMatrix(**{"rows": rows, "mutants": (mutant,), "limits": (limit,), "made": {"seconds": 1.0}} | parts)


def test_a_whole_matrix_is_written_with_its_page(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _whole_matrix().save(checkout / "mine.json")
    assert main(["matrix", "--from", "mine.json", "--write"]) == 0
    assert load(checkout / "pytest_adapt" / "faults" / "kill_matrix.json") == _whole_matrix()
    assert (checkout / "docs" / "kill-matrix.md").read_text() == page(_whole_matrix())
    assert {path.name for path in (checkout / "docs").iterdir()} == {"kill-matrix.md"}, "no half of a file is left"


@pytest.mark.parametrize(
    ("parts", "lacks"),
    [
        ({"rows": ()}, "faults in bf16 (AT03 first)"),
        ({"rows": _whole_matrix().rows[1:]}, "faults in fp32 (AT03 first)"),
        ({"mutants": ()}, "lacks mutants"),
        ({"limits": ()}, "lacks limits"),
    ],
)
def test_a_part_of_a_matrix_replaces_no_whole_one(
    checkout: Path, capsys: pytest.CaptureFixture[str], parts: dict[str, Any], lacks: str
) -> None:
    shipped = checkout / "pytest_adapt" / "faults" / "kill_matrix.json"
    _whole_matrix(**parts).save(checkout / "mine.json")
    before = shipped.read_text()
    assert main(["matrix", "--from", "mine.json", "--write"]) == 2
    message = capsys.readouterr().err
    assert lacks in message and "finish pytest --adapt-selftest, or write it with --partial" in message
    with pytest.raises(SystemExit):
        main(["matrix", "--from", "mine.json", "--partial"])
    assert shipped.read_text() == before and (checkout / "docs" / "kill-matrix.md").read_text() == "the page\n"
    assert main(["matrix", "--from", "mine.json", "--write", "--partial"]) == 0
    assert load(shipped) == _whole_matrix(**parts)


def test_nothing_is_written_where_the_page_cannot_be_made(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(matrix: KillMatrix) -> str:
        raise KeyError("value")

    shipped = checkout / "pytest_adapt" / "faults" / "kill_matrix.json"
    before = shipped.read_text()
    _whole_matrix().save(checkout / "mine.json")
    monkeypatch.setattr("pytest_adapt.selftest.page.page", broken)
    with pytest.raises(KeyError):
        main(["matrix", "--from", "mine.json", "--write"])
    assert shipped.read_text() == before


def test_a_matrix_that_is_absent_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--from", str(tmp_path / "none.json")]) == 2
    assert "make one with --adapt-selftest" in capsys.readouterr().err


def _without_fault(setting: Setting) -> Setting:
    return Setting(setting.model, setting.layout, setting.precision, setting.contexts, setting.suites)


@pytest.mark.requirement(90)
def test_an_end_token_that_ends_nothing_is_red(bench: Bench) -> None:
    setting = Setting(
        "qwen3-moe-aligned", "single", "fp32", suites=("consistency/test_paths.py",), observables=("text",)
    )
    test = "test_the_end_token_ends_an_output_that_does_not_ignore_it"
    healthy, wrong = (
        [case for case in bench.run(replace(setting, fault=fault)).cases if function_of(case.case).endswith(test)]
        for fault in ("", "SV91")
    )
    assert [case.status for case in healthy] == ["pass"]
    failed = {one.metric for case in wrong for one in case.measurements if not one.ok}
    assert failed == {"end.last", "end.met"}
