"""The life of a record, through the commands: damage is refused, another library is drift, another engine is behaviour,
and a refresh that would hide a regression is refused by the second witness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt.__main__ import main
from pytest_adapt.golden.diff import classify
from pytest_adapt.golden.make import environment
from pytest_adapt.golden.record import OBSERVED, Record, make_record
from pytest_adapt.golden.review import classified, list_pending, propose
from pytest_adapt.golden.store import Store, shipped_store
from pytest_adapt.oracle import Oracle, blocks

NAME = "llama-odd.random-37.exact"
Run = Callable[..., int]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of one's own with one of the shipped records, made here as far as it says."""
    shipped, made = shipped_store(), Store(tmp_path / "goldens")
    made.write(Record.load(shipped.path(NAME)), {**shipped.entries[NAME]["provenance"], "environment": environment()})
    return Store(made.directory)


@pytest.fixture
def run(store: Store, tmp_path: Path, models_root: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``python -m pytest_adapt goldens ...`` with that store."""
    monkeypatch.chdir(tmp_path)
    base = ("goldens", "--store", str(store.directory), "--models-root", str(models_root))
    return lambda *arguments: main([*base, *arguments])


def told(store: Store, **changes: Any) -> None:
    """Change what the store says about the record's environment."""
    record, said = Record.load(store.path(NAME)), store.entries[NAME]["provenance"]
    store.remove(NAME)
    store.write(record, {**said, "environment": {**environment(), **changes}})


@pytest.mark.requirement(118)
@pytest.mark.parametrize("place", ["values", "header", "last"])
def test_a_record_edited_by_one_bit_is_refused(
    store: Store, run: Run, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    assert run("verify") == 0
    data = bytearray(store.path(NAME).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[{"values": start + (len(data) - start) // 2, "header": start // 2, "last": len(data) - 1}[place]] ^= 1
    store.path(NAME).write_bytes(data)
    assert run("verify") == 1
    out = capsys.readouterr().out
    assert "damaged: " in out and NAME in out and "1 records, 1 expected" in out


@pytest.mark.requirement(118)
def test_another_version_of_a_library_is_drift_and_no_finding(
    store: Store, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    told(store, numpy="1.0")
    assert run("verify") == 0
    out = capsys.readouterr().out
    assert f"drift: numpy: 1.0 -> {environment()['numpy']} (1 records)" in out and "0 findings" in out


def test_a_sample_is_computed_again(
    store: Store, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("verify", "--sample", "5%", "--seed", "3") == 0
    assert f"computed again: {NAME}: the same" in capsys.readouterr().out
    shipped = shipped_store()
    for name in (NAME.replace("-37", "-1"), NAME.replace("-37", "-150")):
        store.write(Record.load(shipped.path(name)), shipped.entries[name]["provenance"])
    for size, count in (("1", 1), ("2", 2), ("3", 3), ("40", 3), ("1%", 1), ("40%", 2), ("100%", 3)):
        assert run("verify", "--sample", size) == 0
        assert capsys.readouterr().out.count("computed again: ") == count, size
    for name in store.entries.keys() - {NAME}:
        store.remove(name)
    plant_regression(monkeypatch)
    assert run("verify") == 0, "nothing is computed unless asked for"
    assert run("verify", "--sample", "1") == 1
    out = capsys.readouterr().out
    assert f"changed: {NAME} computed again gives other numbers (behaviour)" in out
    for size in ("0", "-1", "5.5%", "101%", "all", "%"):
        assert run("verify", "--sample", size) == 1
        assert "write a number of records" in capsys.readouterr().err


def plant_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activation of every feed-forward block is 2% steeper than it should be."""
    monkeypatch.setattr(blocks, "silu", lambda x: x * blocks.sigmoid(1.02 * x))


def regressed(models_root: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """The record as the regressed code makes it."""
    stored = Record.load(shipped_store().path(NAME))
    from pytest_adapt.models import materialise

    with monkeypatch.context() as patched:
        plant_regression(patched)
        oracle = Oracle(materialise("llama-odd", models_root))
        return make_record(oracle, stored.key, stored.tokens.tolist(), stored.precisions)


@pytest.mark.requirement(118)
def test_a_refresh_that_hides_a_regression_is_refused_by_the_second_witness(
    store: Store,
    run: Run,
    tmp_path: Path,
    models_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    before = store.path(NAME).read_bytes()
    pending = tmp_path / ".adapt" / "pending"
    propose(pending, regressed(models_root, monkeypatch), "update", reason="refresh", provenance={"environment": {}})
    assert run("review", "--markdown") == 1
    assert f"| {NAME} | behaviour | " in capsys.readouterr().out
    everything = [f"--allow-{name}" for name in ("structure", "many", "observed", "dirty")]
    assert run("accept", "--all", "--reason", "new numbers", *everything) == 1
    assert f"{NAME}: the witness transformers" in capsys.readouterr().err
    assert store.path(NAME).read_bytes() == before and len(list_pending(pending)) == 1

    with monkeypatch.context() as patched:
        plant_regression(patched)
        store.remove(NAME)
        assert run("make", "--models", "llama-odd", "--prompts", "random-37", "--reason", "refresh") == 1
        assert "disagrees" in capsys.readouterr().err
    assert not store.path(NAME).exists()
    assert run("make", "--models", "llama-odd", "--prompts", "random-37", "--reason", "as it should be") == 0
    assert run("accept", "--all", "--reason", "new numbers", *everything) == 1, "the bad one still waits, still refused"


def test_a_record_that_was_accepted_says_who_confirmed_it(
    store: Store, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    record = Record.load(store.path(NAME))
    store.remove(NAME)
    propose(tmp_path / ".adapt" / "pending", record, "new")
    assert run("accept", NAME, "--reason", "first", "--allow-dirty") == 0
    witness = Store(store.directory).entries[NAME]["provenance"]["witness"]
    assert witness["name"] == "transformers" and witness["use_of_budget"] <= 1
    stranger = replace(record, key=replace(record.key, model="mine"))
    propose(tmp_path / ".adapt" / "pending", stranger, "new")
    assert run("accept", "--all", "--reason", "first", "--allow-dirty") == 1
    assert "no witness knows model mine; --allow-unwitnessed" in capsys.readouterr().err
    assert run("accept", "--all", "--reason", "first", "--allow-dirty", "--allow-unwitnessed") == 0
    assert run("verify") == 1
    assert "unwitnessed: mine.random-37.exact has no second witness" in capsys.readouterr().out


# Classes of a change ----------------------------------------------------------------------------------------------


def shifted(record: Record, by: float) -> Record:
    """Every log-probability off by ``by`` times the finest yardstick."""
    yard = min(float(np.sqrt(np.mean(errors.rms**2))) for errors in record.errors.values())
    return replace(record, topk_logprobs=record.topk_logprobs - by * yard)


@pytest.mark.parametrize(
    ("by", "another", "kind"),
    [
        (0.0, False, "noise"),
        (0.005, False, "noise"),
        (0.005, True, "noise"),
        (0.5, True, "environment"),
        (0.5, False, "behaviour"),  # nothing explains it
        (50.0, True, "behaviour"),  # no library may do this
    ],
)
def test_a_change_has_a_class(store: Store, tmp_path: Path, by: float, another: bool, kind: str) -> None:
    record = Record.load(store.path(NAME))
    now = {**environment(), "numpy": "99.0"} if another else environment()
    found, why = classify(record, shifted(record, by), environment(), now)
    assert found == kind and ("numpy" in why) == (kind == "environment")
    pending = propose(tmp_path / "pending", shifted(record, by), "update", provenance={"environment": now})
    assert classified(store, pending)[0] == kind


def test_structure_and_yardsticks_have_classes_too(store: Store) -> None:
    record = Record.load(store.path(NAME))
    other = {"numpy": "99.0"}
    assert classify(record, record.prefix(20), {"numpy": "1"}, other)[0] == "behaviour"
    for share, kind in ((0.01, "noise"), (0.1, "environment"), (0.5, "behaviour")):
        errors = {p: replace(one, rms=one.rms * (1 + share)) for p, one in record.errors.items()}
        assert classify(record, replace(record, errors=errors), {"numpy": "1"}, other)[0] == kind


def test_a_pull_request_is_told_the_worst_first(
    store: Store, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, pending = Record.load(store.path(NAME)), tmp_path / ".adapt" / "pending"
    seen = replace(record, key=replace(record.key, math_class=f"{OBSERVED}fp32"), source="target mine")
    store.write(seen, {"environment": {"torch": "2.12", "device": "cpu"}})
    assert run("review", "--markdown") == 0
    assert "### Golden records: nothing" in capsys.readouterr().out
    propose(pending, shifted(seen, 0.5), "observed", provenance={"environment": {"torch": "2.13", "device": "cpu"}})
    propose(pending, record, "update")
    assert run("review", "--markdown") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "### Golden records: 1 environment, 1 noise"
    assert out[4].startswith("| llama-odd.random-37.seen-fp32 | environment | torch: 2.12 -> 2.13; topk_logprobs")
    assert out[5].startswith(f"| {NAME} | noise |") and "- environment: torch: 2.12 -> 2.13" in out
    propose(pending, shifted(record, 50), "update")
    assert run("review", "--markdown") == 1
    assert capsys.readouterr().out.startswith("### Golden records: 1 behaviour, 1 environment")


def test_what_a_target_answered_is_kept_beside_the_reference(
    store: Store, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record.load(store.path(NAME))
    key = replace(record.key, math_class=f"{OBSERVED}fp32")
    seen = replace(shifted(record, 0.2), key=key, source="target mine")
    propose(tmp_path / ".adapt" / "pending", seen, "observed")
    assert run("accept", "--all", "--reason", "as of today", "--allow-dirty") == 0
    assert Store(store.directory).entries["llama-odd.random-37.seen-fp32"]["kind"] == "observed"
    assert run("prune", "--yes") == 0
    assert Store(store.directory).lookup(record.key).status == "ok"
    capsys.readouterr()
    assert run("verify") == 0
    assert "2 records" in capsys.readouterr().out
