"""Counters on record: exact, one line a case, changed by people alone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pytest_adapt.perf.ledger import Change, Ledger, LedgerError, Proposal, Row, accept, changes, pending, propose
from pytest_adapt.perf.ledger_cli import findings, main

BUILT = {"torch": "2.13", "native_ops": "swiglu"}
ROW = Row("llama-odd single fp32 decode", {"steps": 12, "op.linear.calls": 96, "weight_bytes": 4096}, BUILT, "spec")
WHO = {"reason": "first", "dirty": False}


@pytest.mark.requirement(30, 108)
def test_every_difference_is_one_with_both_numbers() -> None:
    now = replace(ROW, counters={"steps": 12, "op.linear.calls": 120, "allocations": 3})
    differing, left = changes(ROW, now)
    assert left == ""
    assert [str(one) for one in differing] == [
        "allocations is new: 3",
        "op.linear.calls 96 -> 120 (+25.0%)",
        "weight_bytes is gone, it was 4096",
    ]
    assert changes(ROW, ROW) == ([], "")
    assert str(Change("drifts", 0, 4)) == "drifts 0 -> 4"


def test_another_build_leaves_out_what_depends_on_it_and_says_so() -> None:
    other = replace(
        ROW, counters={**ROW.counters, "op.linear.calls": 7}, build={"torch": "2.14", "native_ops": "swiglu"}
    )
    differing, left = changes(ROW, other)
    assert differing == [] and left == (
        "1 counters of operations and framework not compared: recorded with another build (torch '2.13' -> '2.14')"
    )
    (found,), _ = changes(ROW, replace(other, counters={**other.counters, "steps": 13}))
    assert found.name == "steps"
    (found,), _ = changes(ROW, other, every=True)
    assert found.name == "op.linear.calls"


@pytest.mark.requirement(108)
def test_a_proposal_is_taken_in_once_and_the_same_numbers_change_nothing(tmp_path: Path) -> None:
    waiting, store = tmp_path / "pending", tmp_path / "store"
    propose(waiting, Proposal("spin/1", "new", ROW, "case", "why"))
    (one,) = pending(waiting)
    assert (one.row, one.target, one.kind) == (ROW, "spin/1", "new")
    assert accept(store, [one], WHO) == ["spin/1 llama-odd single fp32 decode: new"]
    assert pending(waiting) == []
    ledger = Ledger.find([tmp_path / "none", store], "spin/1")
    assert ledger is not None and ledger.rows[ROW.key].provenance["proposed"] == "why"
    before = ledger.path.read_bytes()
    assert accept(store, [replace(one, reason="again")], {**WHO, "reason": "later"}) == [
        "spin/1 llama-odd single fp32 decode: same"
    ]
    assert ledger.path.read_bytes() == before
    assert len(ledger.path.read_text().splitlines()) == 3  # one line a case, between head and tail
    assert [row.key for row in ledger.gone("llama-odd single fp32", ["prefill"])] == [ROW.key]
    assert ledger.gone("llama-odd single fp32", ["decode"]) == ledger.gone("llama-odd single bf16", []) == []


def test_refusals(tmp_path: Path) -> None:
    rows = [replace(ROW, key=f"llama-odd single fp32 {number}") for number in range(10)]
    new = [Proposal("spin", "new", row, "case", "") for row in rows]
    with pytest.raises(LedgerError, match="--allow-dirty"):
        accept(tmp_path, new, {"dirty": True})
    assert not (tmp_path / "counters").exists()
    accept(tmp_path, new, WHO)
    changed = [replace(one, row=replace(one.row, counters={"steps": 1})) for one in new]
    with pytest.raises(LedgerError, match="10 of 10 cases of spin would change at once; --allow-many"):
        accept(tmp_path, changed, WHO)
    assert accept(tmp_path, changed[:2], WHO)[0].endswith("changed")
    assert len(accept(tmp_path, changed, WHO, allow_many=True)) == 10


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 9, "target": "a", "cases": []}', '{"schema": 1, "cases": [1]}'])
def test_a_ledger_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counters" / "spin.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(LedgerError, match=r"spin\.json: "):
        Ledger.find([tmp_path], "spin")


def written(store: Path, *rows: object, target: str = "spin", name: str = "spin") -> Path:
    path = store / "counters" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "target": target, "cases": rows}))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"counters": {"steps": -5}}, "steps is -5; counters are whole numbers from 0 on"),
        ({"counters": {"steps": 1.5}}, "steps is 1.5"),
        ({"counters": {"steps": float("nan")}}, "steps is nan"),
        ({"counters": {"steps": True}}, "steps is True"),
        ({"counters": {"steps": "x"}}, "steps is 'x'"),
        ({"counters": {"steps": None}}, "steps is None"),
        ({"counters": [1]}, "counters are [1], and no object that holds any"),
        ({"counters": None}, "counters are None"),
        ({"counters": {}}, "counters are {}"),
        ({"key": 7}, "has no key of model, layout, precision and load"),
        ({"key": "llama-odd decode"}, "has no key of model"),
        ({"build": {"torch": 2}}, "build is {'torch': 2}, and no object of texts"),
        ({"spec": None}, "spec must be text"),
        ({"provenance": "me"}, "provenance an object"),
    ],
)
def test_counters_of_another_form_are_refused_wherever_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], says: str
) -> None:
    """In a run, by verify, and before they are taken in."""
    store, waiting = tmp_path / "store", tmp_path / "pending"
    path = written(store, {**asdict(ROW), **change})
    with pytest.raises(LedgerError) as caught:
        Ledger.find([store], "spin")
    assert str(path) in str(caught.value) and says in str(caught.value)
    assert main(["--store", str(store), "verify"]) == 1
    assert f"damaged: {path}" in (said := capsys.readouterr().out) and says in said and "1 findings" in said
    place = propose(waiting, Proposal("spin", "new", ROW, "case", "why"))
    raw = json.loads(place.read_text())
    place.write_text(json.dumps({**raw, "row": {**raw["row"], **change}}))
    assert main(["--store", str(tmp_path / "new"), "--pending", str(waiting), "accept", "--all", "--reason", "x"]) == 1
    assert str(place) in (said := capsys.readouterr().err) and says in said
    assert place.exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", [{"target": None}, {"target": ""}, {"kind": 7}, {"case": None}, {"reason": None}])
def test_a_proposal_of_another_form_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    place = propose(tmp_path, Proposal("spin", "new", ROW, "case", "why"))
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    with pytest.raises(LedgerError, match="must be text") as caught:
        pending(tmp_path)
    assert str(place) in str(caught.value)


def test_a_ledger_says_one_thing_of_one_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = written(tmp_path, asdict(ROW), {**asdict(ROW), "counters": {"steps": 13}}, name="spin")
    other = written(tmp_path, asdict(ROW), target="spin", name="spun")
    assert main(["--store", str(tmp_path), "verify"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert f"damaged: {twice}" in said[0] and f"{ROW.key}: listed twice" in said[0]
    assert f"damaged: {other}" in said[1] and "target is 'spin', which is not kept under this name" in said[1]
    assert "2 findings (2 files)" in said[2]
    # Two names that are written alike as a file do not share their counts.
    shared = written(tmp_path, asdict(ROW), target="spin/1", name="spin_1")
    assert Ledger.find([tmp_path], "spin/1") is not None
    with pytest.raises(LedgerError, match=r"spin_1\.json: holds the counters of spin/1, and spin_1"):
        Ledger.find([tmp_path], "spin_1")
    with pytest.raises(LedgerError, match="holds the counters of spin/1"):
        accept(tmp_path, [Proposal("spin_1", "new", ROW, "case", "why")], WHO)
    assert Ledger.read(shared).target == "spin/1"


def test_where_nothing_is_read_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for place, why in (("absent", "is no directory"), ("file", "is no directory")):
        with pytest.raises(SystemExit, match="2"):
            main(["--store", str(tmp_path / place), "verify"])
        assert f"{tmp_path / place} {why}" in capsys.readouterr().err
    assert main(["--store", str(tmp_path), "verify"]) == 0
    assert "0 findings (nothing was read: it holds no counters)" in capsys.readouterr().out
    words = ["--store", str(tmp_path), "--pending", str(tmp_path / "pending"), "accept", "--all", "--reason"]
    assert main([*words, "x"]) == 0
    assert capsys.readouterr().out == f"nothing is pending in {tmp_path / 'pending' / 'counters'}\n"
    with pytest.raises(SystemExit, match="2"):
        main([*words, " "])
    assert "argument --reason: is empty" in capsys.readouterr().err


def test_the_command_lists_rejects_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting, store = tmp_path / "pending", tmp_path / "store"
    words = ["--store", str(store), "--pending", str(waiting)]
    assert main([*words, "list"]) == 0 and "nothing is pending" in capsys.readouterr().out
    propose(waiting, Proposal("spin", "new", ROW, "case", "because"))
    assert main([*words, "list"]) == 0
    assert "- **spin** llama-odd single fp32 decode (new): because" in capsys.readouterr().out
    assert main([*words, "accept", "--reason", "x"]) == 1 and "name the cases, or --all" in capsys.readouterr().err
    assert main([*words, "accept", "nothing", "--reason", "x"]) == 1
    assert main([*words, "accept", "*decode", "--reason", "x", "--allow-dirty"]) == 0
    propose(waiting, Proposal("spin", "update", replace(ROW, counters={"steps": 13}), "case", ""))
    capsys.readouterr()
    assert main([*words, "list"]) == 0
    assert "    - steps 12 -> 13 (+8.3%)" in capsys.readouterr().out
    # Whoever accepts another build sees what depends on it too.
    propose(
        waiting,
        Proposal("spin", "update", replace(ROW, counters={"op.linear.calls": 9}, build={"torch": "2.14"}), "case", ""),
    )
    assert main([*words, "list"]) == 0
    shown = capsys.readouterr().out
    assert "    - native_ops 'swiglu' -> 'none'\n    - torch '2.13' -> '2.14'\n    - op.linear.calls 96 -> 9" in shown
    assert main([*words, "reject", "--all"]) == 0 and pending(waiting) == []
    assert main([*words, "verify"]) == 0
    path = Ledger.place(store, "spin")
    raw = json.loads(path.read_text())
    raw["cases"] += [
        {**raw["cases"][0], "key": key} for key in ("llama-odd single fp32 sprint", "lama single fp32 decode")
    ]
    path.write_text(json.dumps(raw))
    assert [line.partition(": ")[0] for line in findings(store)] == ["gone", "gone"]
    (waiting / "counters" / "0.json").write_text("no")
    assert main([*words, "list"]) == 1 and "no proposal of counters" in capsys.readouterr().err


@pytest.mark.requirement(108)
def test_the_shipped_counters_are_about_loads_and_models_that_exist() -> None:
    from pytest_adapt.perf.loads import LOADS
    from pytest_adapt.shipped import goldens_dir

    assert findings(goldens_dir()) == []
    ledger = Ledger.find([goldens_dir()], "adapt-engine")
    assert ledger is not None and len(ledger.rows) >= 40
    assert all(row.counters["steps"] > 0 and row.provenance["reason"] for row in ledger.rows.values())
    # A cell without any record is unchecked, so that none may get lost.
    for model in ("llama-odd", "mixtral-odd", "qwen3-moe-odd", "deepseek-v3-odd-pos", "deepseek-v3-odd-neg"):
        for precision in ("fp32", "bf16"):
            loads = {row.load for row in ledger.rows.values() if row.cell == f"{model} single {precision}"}
            assert loads == set(LOADS)
        assert any(row.cell == f"{model} pp2 fp32" for row in ledger.rows.values())
