"""The lint finds what is planted, and nothing in what ships."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt.audit import budgets
from pytest_adapt.audit.lint import lint_budgets, lint_goldens, lint_requirements, lint_waivers, main
from pytest_adapt.audit.marks import Claim, claims, sources
from pytest_adapt.golden.lint import catalogue_keys, served_lengths
from pytest_adapt.golden.record import Record
from pytest_adapt.golden.store import Store, shipped_store

TODAY = datetime.date(2026, 5, 1)
NAMES = ("llama-odd.random-37.exact", "qwen3-moe-odd.random-37.exact", "qwen3-moe-odd.random-150.exact")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A user's own store with a few good records."""
    shipped = shipped_store()
    made = Store(tmp_path / "goldens")
    for name in NAMES:
        made.write(Record.load(shipped.path(name)), shipped.entries[name]["provenance"])
    return Store(made.directory)


def kinds(store: Store) -> set[str]:
    return {one.message.partition(":")[0] for one in lint_goldens(store.directory)}


def test_what_ships_is_clean(models_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models-root", str(models_root)]) == 0
    out = capsys.readouterr().out
    assert "requirements, goldens, budgets: 0 findings" in out


def test_the_catalogue_is_known_without_a_checkpoint() -> None:
    """The records that lint expects are those that ship, and each serves a prompt."""
    store = shipped_store()
    assert catalogue_keys(store).keys() == store.entries.keys()
    served = served_lengths()
    assert all(max(served[name]) == store.entries[name]["tokens"] for name in store.entries)


def test_requirements() -> None:
    every = [
        Claim("a/test_x.py::test_1", (1, 200), 1),
        Claim("a/test_x.py::test_2", (), 2),
        Claim("tests/t.py::t", (), 3),
    ]
    found = lint_requirements(every, {"AA01": 1, "AA02": 0}, range(1, 131))
    assert [str(one) for one in found] == [
        "requirements: a/test_x.py::test_1 claims requirement 200; they are 1 to 130",
        "requirements: a/test_x.py::test_2 carries no requirement; mark it with the numbers that it proves",
        "requirements: fault AA02 belongs to requirement 0; they are 1 to 130",
    ]
    (note,) = lint_requirements([Claim("a/test_x.py::test_1", (1, 2), 1)], {"AA01": 1}, range(1, 131))
    assert note.note and str(note).endswith("no fault that proves them: 2")


WAIVER = '[[waiver]]\ncases = "{cases}"\nowner = "ana"\nlink = "l"\nexpires = {expires}\nquota = 1\n'


@pytest.mark.parametrize(
    ("cases", "expires", "says"),
    [
        ("correctness/*[llama-odd-*]", "2026-06-01", ""),
        ("correctness/*[llama-odd-*]", "2026-04-01", "expired on 2026-04-01"),
        ("correctnes/*[llama-odd-*]", "2026-06-01", "matches no case"),
        ("test_mine.py::*", "2026-06-01", ""),
        ("consistency/*", "2026-06-01", "was not needed by the run"),
        ("correctness/*[llama-odd-*]", '"soon"', "expires must be a date"),
        ('correctness/*"\nquota = "x', "2026-06-01", "known.toml"),
    ],
)
def test_waivers(tmp_path: Path, cases: str, expires: str, says: str) -> None:
    path, report = tmp_path / "known.toml", tmp_path / "report.json"
    path.write_text(WAIVER.format(cases=cases, expires=expires))
    used = {"number": 1, "cases": "consistency/*", "state": "unused"}
    report.write_text(json.dumps({"cases": [{"case": "test_mine.py::test_it"}], "waivers": [used]}))
    found = lint_waivers(path, report, claims(sources()), TODAY)
    assert [says in str(one) for one in found] == ([True] if says else [])
    if "no case" in says:
        (note,) = lint_waivers(path, tmp_path / "absent.json", claims(sources()), TODAY)
        assert note.note and "known after a run" in str(note)


def test_what_is_not_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for place, why in (("absent", "is not there"), ("file", "is no directory")):
        with pytest.raises(SystemExit, match="2"):
            main(["--only", "goldens", "--goldens", str(tmp_path / place)])
        assert f"argument --goldens: {tmp_path / place} {why}" in capsys.readouterr().err
    assert main(["--only", "goldens", "--goldens", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"note: goldens: nothing was read: {tmp_path} holds no record and no counters" in said
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "waivers"])
    assert "waivers needs --waivers FILE, which adapt_waivers in your ini file names" in capsys.readouterr().err


def test_a_sound_store_is_clean(store: Store) -> None:
    assert lint_goldens(store.directory) == []


def change(store: Store, name: str, edit: Callable[[Record], Record], **entry: Any) -> None:
    """Write another record in place of one, as someone would who knows how: with its digest and its line."""
    record, told = edit(Record.load(store.path(name))), store.entries[name]["provenance"]
    store.remove(name)
    store.write(record, {**told, **entry})


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("placeholder", lambda one: replace(one, lse=np.zeros_like(one.lse))),
        ("placeholder", lambda one: replace(one, lse=one.lse * np.nan)),
        ("placeholder", lambda one: replace(one, topk_logprobs=np.full_like(one.topk_logprobs, -5.8))),
        ("placeholder", lambda one: replace(one, topk_logprobs=one.topk_logprobs[:, :1].repeat(20, 1))),
        ("placeholder", lambda one: replace(one, projections=np.zeros_like(one.projections))),
        ("placeholder", lambda one: replace(one, source="target t", projections=np.zeros_like(one.projections))),
        (
            "placeholder",
            lambda one: replace(one, errors={p: replace(e, rms=e.rms * 0) for p, e in one.errors.items()}),
        ),
        ("orphan", lambda one: replace(one, key=replace(one.key, model="nobody"))),
        ("orphan", lambda one: replace(one, key=replace(one.key, prompt="random-2"))),
        ("stale", lambda one: replace(one, key=replace(one.key, spec_hash="older"))),
    ],
)
def test_records_that_are_none(store: Store, kind: str, edit: Callable[[Record], Record]) -> None:
    change(store, NAMES[0], edit)
    assert kinds(store) == {f"goldens: {kind}".removeprefix("goldens: ")}


def test_a_target_that_shows_log_probabilities_has_no_log_sum_exp(store: Store) -> None:
    change(store, NAMES[0], lambda one: replace(one, source="target t", lse=np.zeros_like(one.lse)))
    assert kinds(store) == set()


def test_a_copy_under_another_key(store: Store) -> None:
    other = Record.load(store.path(NAMES[1]))
    change(store, NAMES[0], lambda one: replace(other, key=one.key))
    (found,) = lint_goldens(store.directory)
    assert "copy" in str(found) and NAMES[0] in str(found) and NAMES[1] in str(found)


def test_a_record_that_is_too_large_for_its_prompts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    size = store.path(NAMES[2]).stat().st_size
    monkeypatch.setattr("pytest_adapt.golden.lint.LARGEST", size)
    assert lint_goldens(store.directory) == []
    monkeypatch.setattr("pytest_adapt.golden.lint.LARGEST", size - 1)
    (found,) = lint_goldens(store.directory)
    assert f"large: {NAMES[2]} has {size} bytes for 1 prompts" in str(found)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"reason": ""}, "unprovenanced: llama-odd.random-37.exact does not say its reason"),
        ({"environment": {}}, "does not say its environment"),
        ({"witness": {}}, "unwitnessed: llama-odd.random-37.exact has no second witness"),
        ({"witness": {"name": "builtin", "use_of_budget": 0.1}}, "not independent"),
        ({"witness": {"name": "transformers", "use_of_budget": 1.2}}, "1.2 of the budget away"),
        ({"witness": {"name": "transformers", "use_of_budget": float("nan")}}, "confirms nothing"),
        ({"witness": {"name": "transformers", "use_of_budget": -0.1}}, "-0.1 of the budget away, which confirms"),
        ({"witness": {"name": "transformers", "use_of_budget": "0.1"}}, "confirms nothing"),
        ({"witness": {"name": "transformers", "use_of_budget": None}}, "confirms nothing"),
        ({"witness": {"name": "transformers"}}, "is not told (use_of_budget)"),
        ({"witness": {"name": " builtin", "use_of_budget": 0.1}}, "' builtin' is no name, or has stray spaces"),
        ({"witness": {"name": 7, "use_of_budget": 0.1}}, "its witness 7 is no name"),
        ({"reason": "  "}, "does not say its reason"),
    ],
)
def test_where_a_record_comes_from(store: Store, told: dict[str, Any], says: str) -> None:
    change(store, NAMES[0], lambda one: one, **told)
    (found,) = lint_goldens(store.directory)
    assert says in str(found)


def test_damage(store: Store) -> None:
    data = bytearray(store.path(NAMES[0]).read_bytes())
    data[-9] ^= 1
    store.path(NAMES[0]).write_bytes(data)
    assert kinds(store) == {"damaged"}
    (store.directory / "index.json").write_text("{")
    assert "cannot be read as an index" in str(lint_goldens(store.directory)[0])


def test_budgets(store: Store, models_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that decides too little is refused in the profiles that everybody runs."""
    for name in NAMES[1:]:
        store.remove(name)  # of a sparse model with little that is certain
    assert lint_budgets(store.directory, models_root) == []
    change(store, NAMES[0], lambda one: one.take(np.arange(len(one.positions)) < 4))
    found = [one for one in lint_budgets(store.directory, models_root) if not one.note]
    assert sum("consistency, day0: llama-odd" in str(one) for one in found) == 2
    found = [one for one in found if "consistency" not in str(one)]
    assert [str(one).partition(":")[2].partition(")")[0] for one in found] == [
        f" day0: llama-odd {precision} up to 512 tokens (4 certified positions" for precision in ("fp32", "bf16")
    ]
    shutil.rmtree(store.directory)
    monkeypatch.setattr("pytest_adapt.verdict.budget.MAX_FACTOR", 100.0)
    found = lint_budgets(store.directory, models_root)
    assert found and all("one element at" in str(one) for one in found)


def test_rates_are_stated_for_each_kind_of_comparison(store: Store, models_root: Path) -> None:
    for name in NAMES[1:]:
        store.remove(name)
    lines = budgets.rates(store, models_root, 5)
    assert lines[0] == "| comparison | healthy | 1.5 x | 2 x | 4 x |" and len(lines) == 5
    assert all("| 0.0% |" in line for line in lines[2:])
    assert all(line.endswith("100.0% |") for line in lines[2:])
