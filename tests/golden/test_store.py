"""A store says ok, missing, stale or damaged, and only the command line changes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_adapt.golden import review
from pytest_adapt.golden.cli import main
from pytest_adapt.golden.diff import compare, invisible
from pytest_adapt.golden.lint import drift, orphans, served_lengths, verify
from pytest_adapt.golden.make import catalogue_tasks, environment, provenance
from pytest_adapt.golden.record import Record, RecordError
from pytest_adapt.golden.reference import (
    ClosedReference,
    GoldenProblem,
    GoldenReference,
    OracleReference,
    TargetReference,
    carriers,
)
from pytest_adapt.golden.review import ReviewError, accept, list_pending, propose
from pytest_adapt.golden.sketch import log_softmax
from pytest_adapt.golden.store import INDEX, Store, StoreError, shipped_store
from pytest_adapt.models import catalogue
from pytest_adapt.models.recall import words_of
from pytest_adapt.models.walks import walks
from pytest_adapt.target.protocol import Response

WHY = {
    "reason": "test",
    "dirty": False,
    "made_at": "2026-01-01",
    "generator": "by hand",
    "environment": {"numpy": "9.9"},
    "witness": {"name": "somebody", "use_of_budget": 0.5},
}


@pytest.fixture
def record(make: Any, tokens: Any) -> Record:
    made: Record = make("p", tokens(16))
    return made


@pytest.fixture
def store(tmp_path: Path, record: Record) -> Store:
    made = Store(tmp_path / "goldens")
    assert made.write(record, WHY) == "new"
    return Store(made.directory)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_lookup(store: Store, record: Record, make: Any, tokens: Any) -> None:
    assert store.lookup(record.key).status == "ok"
    found = store.lookup(replace(record.key, prompt="q"))
    assert found.status == "missing" and "--adapt-goldens=new" in found.reason
    for part, label in (("spec_hash", "specification"), ("weight_digest", "weights"), ("prompts_digest", "prompt")):
        found = store.lookup(replace(record.key, **{part: "other"}))
        assert found.status == "stale"
        assert label in found.reason and "goldens make" in found.reason and "\n" not in found.reason


@pytest.mark.parametrize("what", ["edited", "cut", "gone", "unlisted", "exchanged", "schema", "index", "deep", "twice"])
def test_damage_is_named(store: Store, record: Record, make: Any, tokens: Any, what: str) -> None:
    path, index = store.path(record.key.id), store.directory / INDEX
    data = path.read_bytes()
    raw = json.loads(index.read_text())
    if what == "edited":
        path.write_bytes(data[:-3] + b"\x07" + data[-2:])
    elif what == "cut":
        path.write_bytes(data[:-100])
    elif what == "gone":
        path.unlink()
    elif what == "unlisted":
        index.write_text('{"schema": 1, "records": []}')
    elif what == "exchanged":
        replace(make("p", tokens(16, seed=5)), key=record.key).save(path)
    elif what == "schema":
        raw["records"][0]["schema"] = 0
        index.write_text(json.dumps(raw))
    elif what == "index":
        index.write_text("{")
    elif what == "deep":
        index.write_text("[" * 200_000)
    else:
        raw["records"] *= 2
        index.write_text(json.dumps(raw))
    fresh = Store(store.directory)
    if what in ("index", "deep", "twice"):
        with pytest.raises(StoreError, match="version control"):
            fresh.lookup(record.key)
        return
    found = fresh.lookup(record.key)
    assert found.status == ("stale" if what == "schema" else "damaged")
    assert found.record is None and "\n" not in found.reason
    findings = verify(Store(store.directory), {record.key.id: record.key})
    assert [one.kind for one in findings][0] == found.status


@pytest.mark.parametrize(
    "name", ["../outside", "", "/outside", "a/../../outside", "..", "a\\outside", ".hidden", 7, None]
)
def test_nothing_outside_a_store_is_touched(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: object
) -> None:
    """Whatever an index lists, only files of the store itself are deleted."""
    index = store.directory / INDEX
    raw = json.loads(index.read_text())
    index.write_text(json.dumps({**raw, "records": [*raw["records"], {**raw["records"][0], "id": name}]}))
    (store.directory.parent / "outside.safetensors").write_text("of somebody else")
    before = snapshot(store.directory.parent)
    monkeypatch.setattr("pytest_adapt.golden.cli.catalogue_tasks", lambda root: ({}, {}))
    assert main(["--store", str(store.directory), "prune", "--yes"]) == 1
    said = capsys.readouterr().err
    assert f"{index}: entry 2: id {name!r} is no record's name" in said and said.count("\n") == 1
    assert snapshot(store.directory.parent) == before


def test_what_a_target_answered_is_no_reference_under_its_name(store: Store, record: Record) -> None:
    """Not even with its digest in the index: what a record is of stands in it."""
    seen = replace(record, key=replace(record.key, math_class="seen-fp32"))
    seen.save(store.path(record.key.id))
    index = store.directory / INDEX
    raw = json.loads(index.read_text())
    raw["records"][0]["digest"] = seen.digest()
    index.write_text(json.dumps(raw))
    assert Store(store.directory).lookup(record.key).status == "damaged"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "truth"}, "kind 'truth'; kinds are reference and observed"),
        ({"digest": None}, "digest is None"),
        ({"tokens": "many"}, "tokens is 'many', and not a whole number"),
        ({"tokens": True}, "tokens is True"),
        ({"precisions": "fp32"}, "precisions is 'fp32', and not a list"),
        ({"precisions": [7]}, "precision 7 is no name"),
        ({"provenance": 7}, "provenance is 7, and not an object"),
        ({"provenance": "me"}, "provenance is 'me'"),
        ({"provenance": {**WHY, "witness": ["a"]}}, "its witness is ['a'], and not an object"),
        ({"provenance": {**WHY, "environment": "here"}}, "its environment is 'here', and not an object"),
    ],
)
def test_an_entry_of_another_form_is_named(store: Store, record: Record, change: dict[str, Any], says: str) -> None:
    index = store.directory / INDEX
    raw = json.loads(index.read_text())
    raw["records"][0] |= change
    index.write_text(json.dumps(raw))
    with pytest.raises(StoreError) as caught:
        verify(Store(store.directory), {record.key.id: record.key})
    assert str(caught.value).startswith(f"{index}: entry 1: {record.key.id}: {says}")


def test_the_index_of_another_version_is_named(store: Store, record: Record) -> None:
    index = store.directory / INDEX
    index.write_text(json.dumps({**json.loads(index.read_text()), "schema": 9}))
    with pytest.raises(StoreError, match="schema 9, this version reads 1"):
        Store(store.directory).lookup(record.key)


def test_the_same_numbers_leave_the_old_bytes(store: Store, record: Record) -> None:
    before = snapshot(store.directory)
    assert store.write(record, {**WHY, "made_at": "later"}) == "same"
    nudged = replace(record, topk_logprobs=record.topk_logprobs + 1e-13, lse=record.lse - 1e-13)
    assert store.write(nudged, WHY) == "same"
    assert snapshot(store.directory) == before
    assert store.write(replace(record, topk_logprobs=record.topk_logprobs + 1e-6), WHY) == "changed"
    assert snapshot(store.directory) != before


def test_the_index_is_sorted_and_has_one_line_a_record(store: Store, make: Any, tokens: Any) -> None:
    for prompt in ("z", "a", "m"):
        store.write(make(prompt, tokens(4)), WHY)
    lines = (store.directory / INDEX).read_text().splitlines()
    ids = [json.loads(line.rstrip(","))["id"] for line in lines[1:-1]]
    assert ids == sorted(ids) and len(ids) == 4


def test_the_shipped_store_is_not_written(store: Store, record: Record) -> None:
    shipped = Store(store.directory, read_only=True)
    for change in (lambda: shipped.write(record, WHY), lambda: shipped.remove(record.key.id)):
        with pytest.raises(StoreError, match="read-only"):
            change()


def test_static_check(store: Store, record: Record, make: Any, tokens: Any) -> None:
    expected = {record.key.id: record.key}
    assert verify(store, expected) == []
    store.write(make("extra", tokens(3)), WHY)
    (store.directory / "loose.p.exact.safetensors").write_bytes(store.path(record.key.id).read_bytes())
    kinds = {(one.kind, one.record_id) for one in verify(Store(store.directory), expected)}
    assert ("orphan", "qwen3-moe-odd.extra.exact") in kinds
    assert ("damaged", "loose.p.exact") in kinds
    assert orphans(store, expected) == ["loose.p.exact", "qwen3-moe-odd.extra.exact"]
    assert not any(one.kind == "orphan" for one in verify(store, expected, partial=True))
    (finding,) = (
        one
        for one in verify(store, {"x.y.exact": replace(record.key, prompt="y", model="x")}, partial=True)
        if one.kind == "missing"
    )
    assert finding.record_id == "x.y.exact"


def test_every_reference_needs_a_witness(store: Store, record: Record) -> None:
    store.remove(record.key.id)
    store.write(record, {**WHY, "witness": {}})
    assert [one.kind for one in verify(store, {record.key.id: record.key})] == ["unwitnessed"]


@pytest.mark.requirement(118)
def test_the_environment_is_recorded_and_its_drift_reported(store: Store, record: Record) -> None:
    told = provenance("why", store.directory)
    assert told["reason"] == "why" and told["environment"] == environment()
    assert {"python", "numpy", "blas", "isa", "threads"} <= told["environment"].keys()
    store.remove(record.key.id)
    store.write(record, {**WHY, "environment": {**environment(), "numpy": "1.0", "threads": "64"}})
    now = environment()
    assert drift(store, now) == [
        f"numpy: 1.0 -> {now['numpy']} (1 records)",
        f"threads: 64 -> {now['threads']} (1 records)",
    ]
    assert drift(store, {**now, "numpy": "1.0", "threads": "64"}) == []
    assert verify(store, {record.key.id: record.key}) == [], "another environment alone is no finding"


def test_drift_counts_the_records(store: Store, make: Any, tokens: Any) -> None:
    for prompt in ("a", "b"):
        store.write(make(prompt, tokens(4)), WHY)
    assert drift(store, {"numpy": "1.0"}) == ["numpy: 9.9 -> 1.0 (3 records)"]


def test_who_makes_a_record_names_the_commit(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    monkeypatch.chdir(tmp_path)
    store = tmp_path / "goldens"
    assert provenance("why", store)["commit"] == "", "no repository"
    git("init", "-q")
    git("-c", "user.name=ana", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "first")
    store.mkdir()
    (store / "a").touch()
    told = provenance("why", store)
    assert told["commit"] == git("rev-parse", "HEAD").strip() and not told["dirty"]
    (tmp_path / "b").touch()
    assert provenance("why", store)["dirty"] and provenance("why", Path("goldens"))["dirty"]
    # The folder that one stands in is another matter.
    elsewhere = provenance("why", tmp_path_factory.mktemp("elsewhere") / "new")
    assert elsewhere["commit"] == "" and not elsewhere["dirty"]
    monkeypatch.setenv("PATH", "")
    assert provenance("why", store)["commit"] == "", "no git"


def test_difference_of_two_records(record: Record, make: Any, tokens: Any) -> None:
    assert compare(record, record).same
    logprobs = record.topk_logprobs.copy()
    logprobs[3, 5] += 3.1e-3
    found = compare(record, replace(record, topk_logprobs=logprobs))
    (array,) = found.arrays
    assert (array.name, array.worst, array.changed) == ("topk_logprobs", (3, 5), 1)
    assert array.largest == pytest.approx(3.1e-3) and array.mean > 0
    assert sum(array.buckets) == array.size and array.buckets[4] == 1
    assert "[3, 5]" in str(array) and "ulp" in str(array)
    ids = record.topk_ids.copy()
    ids[2, 0] += 1
    assert "topk_ids: 1 of" in compare(record, replace(record, topk_ids=ids)).structure[0]
    holes = record.lse.copy()
    holes[1] = np.nan
    assert "NaN" in compare(record, replace(record, lse=holes)).structure[0]
    assert compare(record, make("p", tokens(15))).structure
    assert "precisions" in compare(record, make("p", tokens(16), ("fp32",))).structure[0]
    assert not invisible(record, replace(record, topk_ids=ids))


def test_differences_are_counted_by_size(record: Record) -> None:
    """0, then below 1e-6, 1e-4, 1e-3 and 1e-2, then the rest; a bound belongs to what is above it."""
    before = replace(record, lse=np.zeros(16))
    after = replace(record, lse=np.array([*[0.0] * 9, 5e-7, 1e-6, -5e-5, 1e-4, -1e-3, 5e-3, 0.5]))
    (array,) = compare(before, after).arrays
    assert array.buckets == (9, 1, 2, 1, 2, 1)
    assert (array.changed, array.worst, array.old, array.new) == (7, (15,), 0.0, 0.5)


# What a run may do ------------------------------------------------------------------------------------------------


def reference(live: Any, store: Store, prompts: Any, mode: str = "check", **how: Any) -> GoldenReference:
    return GoldenReference(live, (store,), prompts, "spec", mode=mode, **how)


@pytest.fixture
def prompts(tokens: Any) -> dict[str, tuple[int, ...]]:
    return {"p": tokens(16), "short": tokens(5), "q": tokens(9, seed=3)}


def test_shorter_prompts_are_served_by_the_longest(prompts: Any, live: Any, store: Store) -> None:
    assert carriers(prompts) == {"p": "p", "short": "p", "q": "q"}
    golden = reference(live, store, prompts)
    assert len(golden.record("short", prompts["short"]).tokens) == 5
    assert len(golden.record("p", prompts["p"][:7]).tokens) == 7
    longer = (*prompts["p"], 1, 2)
    assert golden.record("p", longer).source == "oracle", "what the target wrote is judged by the live oracle"
    assert len(golden.record("p", longer).tokens) == 18


def test_check_reads_and_never_writes(prompts: Any, live: Any, store: Store, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    golden = reference(live, store, prompts)
    assert golden.record("p", prompts["p"]).key.id == "qwen3-moe-odd.p.exact"
    with pytest.raises(GoldenProblem, match="--adapt-goldens=new") as caught:
        golden.record("q", prompts["q"])
    assert caught.value.status == "fail"
    with pytest.raises(GoldenProblem) as caught:
        GoldenReference(live, (store,), prompts, "another spec").record("p", prompts["p"])
    assert caught.value.status == "stale"
    assert reference(live, store, prompts, required=False).record("q", prompts["q"]).source == "oracle"
    assert snapshot(tmp_path) == before


def test_off_is_unchecked_and_never_a_pass(prompts: Any, live: Any, store: Store) -> None:
    with pytest.raises(GoldenProblem, match="off") as caught:
        reference(live, store, prompts, "off").record("p", prompts["p"])
    assert caught.value.status == "unchecked"


@pytest.mark.parametrize("mode", ["new", "update"])
def test_new_and_update_propose_outside_the_store(
    prompts: Any, live: Any, store: Store, tmp_path: Path, mode: str
) -> None:
    before = snapshot(store.directory)
    pending = tmp_path / "pending"
    golden = reference(live, store, prompts, mode, propose=lambda record, kind: propose(pending, record, kind))
    golden.record("p", prompts["p"])
    assert golden.proposed == [], "what is as it was is not proposed"
    golden.record("q", prompts["q"])
    assert golden.proposed == ["qwen3-moe-odd.q.exact"]
    assert [one.record_id for one in list_pending(pending)] == golden.proposed
    assert snapshot(store.directory) == before
    assert accept(store, list_pending(pending), WHY) == ["qwen3-moe-odd.q.exact: new"]
    assert list_pending(pending) == []
    assert reference(live, Store(store.directory), prompts).record("q", prompts["q"]).source == "oracle"


def test_own_store_comes_first(prompts: Any, live: Any, store: Store, record: Record, tmp_path: Path) -> None:
    own = Store(tmp_path / "own")
    own.write(replace(record, source="target mine"), WHY)
    golden = GoldenReference(live, (own, store), prompts, "spec")
    assert golden.record("p", prompts["p"]).source == "target mine"
    assert own.entries[record.key.id]["kind"] == "observed"


@pytest.mark.parametrize("how", ["damaged", "gone", "stale"])
def test_a_bad_own_record_is_never_replaced_by_another_store(
    prompts: Any, live: Any, store: Store, record: Record, tmp_path: Path, how: str
) -> None:
    own = Store(tmp_path / "own")
    own.write(replace(record, key=replace(record.key, spec_hash="older")) if how == "stale" else record, WHY)
    if how != "stale":
        path = own.path(record.key.id)
        path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(GoldenProblem, match=record.key.id) as caught:
        GoldenReference(live, (own, store), prompts, "spec").record("p", prompts["p"])
    assert caught.value.status == ("stale" if how == "stale" else "fail")


def test_the_record_of_a_prompt_serves_the_shorter_ones(models_root: Path) -> None:
    served, (tasks, absent) = served_lengths(), catalogue_tasks(models_root, ["llama-odd"])
    assert {name: sorted(task.inside) for name, task in tasks.items()} == {name: sorted(served[name]) for name in tasks}
    assert not absent and any(len(task.inside) > 1 for task in tasks.values())


def test_a_closed_form_records_questions_borders_and_the_last_token(models_root: Path) -> None:
    entry = catalogue()["needle-llama"]
    (walk,) = walks(entry, 1, shortest=48, longest=48)
    words, tokens = words_of(entry), (*walk.tokens, walk.tokens[0])
    assert 16 in entry.contexts and not words.is_question(tokens[-1])
    found = ClosedReference(OracleReference(models_root, entry.precisions), entry).record("p", tokens)
    questions = {row for row in range(49) if words.is_question(tokens[row])}
    assert questions and found.positions.tolist() == sorted(questions | {15, 16, 17, 48})


def test_another_target_as_reference_errs_as_much_as_the_one_that_is_judged(live: OracleReference, tokens: Any) -> None:
    sequence = tokens(12)
    shown = Response("r", 12, logits=np.asarray(live.oracle.run(sequence).logits))
    other = TargetReference("other", lambda sent: shown, "bf16", 331, live)
    assert other.oracle is live.oracle and TargetReference("other", lambda sent: shown, "bf16", 331).oracle is None
    found = other.record("p", sequence)
    exact = live.record("p", sequence)
    assert np.allclose(found.next_logprob, exact.next_logprob, equal_nan=True)
    assert np.array_equal(found.topk_ids, exact.topk_ids)
    for name, times in (
        ("rms", 2**0.5),
        ("largest", 2**0.5),
        ("follow", 2**0.5),
        ("kl", 2.0),
        ("gap", 2.0),
        ("score", 1.0),
    ):
        one, two = (getattr(record.emulation("bf16"), name) for record in (found, exact))
        assert np.allclose(one, two * times, equal_nan=True), name


def test_a_reference_that_nobody_knows_has_the_noise_of_its_own_repeats(tokens: Any) -> None:
    rng, sequence = np.random.default_rng(0), tokens(6)
    logits = rng.normal(0, 2, (6, 40))
    answers = [Response("r", 6, logits=logits), Response("r", 6, logits=logits + 1e-5 * rng.normal(size=logits.shape))]
    sequence = tuple(token % 40 for token in sequence)
    said = iter(answers)
    found = TargetReference("other", lambda sent: next(said), "bf16", 40).record("p", sequence)
    one, two = (log_softmax(answer.logits)[0] for answer in answers)
    off = np.take_along_axis(one - two, found.topk_ids.astype(np.int64), axis=1)
    noise = found.emulation("bf16")
    assert noise.rms == pytest.approx(np.sqrt((off**2).mean(axis=1))) and noise.certified.all()
    assert noise.largest == pytest.approx(np.abs(off).max(axis=1))
    assert noise.follow[:-1] == pytest.approx(np.abs(one - two)[range(5), sequence[1:]]) and np.isnan(noise.follow[-1])


# Review -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pending(tmp_path: Path, record: Record) -> Path:
    folder = tmp_path / "pending"
    propose(folder, replace(record, topk_logprobs=record.topk_logprobs + 1e-3), "update", "case-1", "because")
    return folder


def test_a_change_is_shown_and_taken_in_for_a_reason(store: Store, pending: Path, record: Record) -> None:
    lines = review.table(store, list_pending(pending))
    assert any("topk_logprobs" in line and "->" in line for line in lines)
    assert any(line.startswith("- differences by size") for line in lines)
    accept(store, list_pending(pending), {**WHY, "reason": "better"})
    assert Store(store.directory).entries[record.key.id]["provenance"]["reason"] == "better"
    assert Store(store.directory).lookup(record.key).status == "ok"


def test_new_records_are_listed_beside_changed_ones(store: Store, pending: Path, make: Any, tokens: Any) -> None:
    """Whatever their order: a new record has no differences, and ends no list."""
    propose(pending, make("a", tokens(4)), "new", "case-0")
    propose(pending, make("z", tokens(4)), "new", "case-2")
    lines = review.table(store, list_pending(pending))
    assert [line.split("**")[1].split(".")[1] for line in lines if "**" in line] == ["a", "p", "z"]
    assert sum(line.startswith("    - new: 4 tokens") for line in lines) == 2
    assert any("topk_logprobs" in line and "->" in line for line in lines)


def test_rejecting_leaves_everything_as_it_was(store: Store, pending: Path) -> None:
    before = snapshot(store.directory)
    review.reject(list_pending(pending))
    assert list_pending(pending) == [] and snapshot(store.directory) == before


def refused(store: Store, folder: Path, match: str, provenance: Any = WHY, **allowed: bool) -> None:
    before = snapshot(store.directory)
    with pytest.raises(ReviewError, match=match):
        accept(store, list_pending(folder), provenance)
    assert snapshot(store.directory) == before
    accept(store, list_pending(folder), provenance, **allowed)
    assert snapshot(store.directory) != before


def test_a_dirty_tree_needs_a_word(store: Store, pending: Path) -> None:
    refused(store, pending, "--allow-dirty", {**WHY, "dirty": True}, allow_dirty=True)


def test_a_change_of_structure_needs_a_word(store: Store, tmp_path: Path, record: Record) -> None:
    ids = record.topk_ids.copy()
    ids[0, 0] += 1
    propose(tmp_path / "pending", replace(record, topk_ids=ids, source="target t"), "update")
    found = review.difference(store, list_pending(tmp_path / "pending")[0])
    assert found is not None and len(found.structure) == 2
    refused(
        store,
        tmp_path / "pending",
        re.escape(f"({found.structure[0]}); --allow-structure"),
        allow_structure=True,
    )


def test_a_targets_answers_do_not_become_the_truth_by_habit(store: Store, tmp_path: Path, record: Record) -> None:
    propose(tmp_path / "pending", replace(record, norm=record.norm * 2), "observed", "case", "they differ")
    refused(store, tmp_path / "pending", "--allow-observed", allow_observed=True)


def test_a_beginning_does_not_take_the_place_of_the_whole(store: Store, tmp_path: Path, record: Record) -> None:
    """What a target answered to a shorter prompt is shown against the beginning of the record, and never accepted."""
    propose(tmp_path / "pending", replace(record.prefix(5), source="target t"), "observed", "case")
    found = review.difference(store, list_pending(tmp_path / "pending")[0])
    assert found is not None and found.structure == ("source: oracle -> target t",)
    with pytest.raises(ReviewError, match="covers 5 of 16 tokens"):
        accept(store, list_pending(tmp_path / "pending"), WHY, allow_observed=True, allow_structure=True)


def test_many_changes_at_once_need_a_word(store: Store, tmp_path: Path, make: Any, tokens: Any) -> None:
    for prompt in ("a", "b", "c"):
        record = make(prompt, tokens(4))
        store.write(record, WHY)
        propose(tmp_path / "pending", replace(record, norm=record.norm * 2), "update")
    refused(store, tmp_path / "pending", "--allow-many", allow_many=True)


def test_two_answers_for_one_record_are_not_both_taken(store: Store, tmp_path: Path, record: Record) -> None:
    for case in ("one", "two"):
        propose(tmp_path / "pending", replace(record, norm=record.norm * 2), "observed", case)
    assert len(list_pending(tmp_path / "pending")) == 2
    with pytest.raises(ReviewError, match="two cases"):
        accept(store, list_pending(tmp_path / "pending"), WHY, allow_observed=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"record_id": "../outside"}, "record_id '../outside' is no record's name"),
        ({"record_id": None}, "record_id None"),
        ({"kind": "truth"}, "kind 'truth'; kinds are new, update, observed"),
        ({"provenance": None}, "provenance None is no object"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_a_note_that_cannot_be_read_is_named(pending: Path, change: dict[str, Any], says: str) -> None:
    (note,) = pending.glob("*.json")
    note.write_text(json.dumps({**json.loads(note.read_text()), **change}))
    with pytest.raises(RecordError) as caught:
        list_pending(pending)
    assert str(note) in str(caught.value) and says in str(caught.value)


# The command line -------------------------------------------------------------------------------------------------


def test_commands(
    store: Store, pending: Path, record: Record, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.directory.parent)
    base = ["--store", str(store.directory), "--pending", str(pending)]
    assert main([*base, "list"]) == 0
    assert "1 records" in capsys.readouterr().out
    assert main([*base, "review"]) == 2
    assert "goldens accept" in capsys.readouterr().err
    before = snapshot(store.directory)
    assert main([*base, "accept", "--reason", "x"]) == 1
    assert "name the records" in capsys.readouterr().err
    assert main([*base, "accept", "nobody.*", "--reason", "x"]) == 1
    assert "nothing pending" in capsys.readouterr().err
    assert snapshot(store.directory) == before
    assert main([*base, "accept", record.key.id, "--reason", "x", "--allow-dirty", "--allow-unwitnessed"]) == 0
    assert f"{record.key.id}: changed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*base, "accept", "--all"])  # no reason
    propose(pending, record, "update")
    assert main([*base, "reject", "--all"]) == 0
    assert list_pending(pending) == []


def test_where_nothing_is_read_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "absent", tmp_path / "file"):
        for words in (["list"], ["verify"], ["prune"], ["review", "--markdown"]):
            with pytest.raises(SystemExit, match="2"):
                main(["--store", str(place), *words])
            assert f"{place} is no directory" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--store", str(tmp_path / "file"), "accept", "--all", "--reason", "x"])
    base = ["--store", str(tmp_path), "--pending", str(tmp_path / "pending")]
    for command in ("list", "verify"):
        assert main([*base, command]) == 0
        assert "nothing was read: the store holds no record" in capsys.readouterr().out
    assert main([*base, "accept", "--all", "--reason", "x"]) == 0
    assert capsys.readouterr().out == f"nothing is pending in {tmp_path / 'pending'}\n"
    for words in (["accept", "--all"], ["make"]):
        with pytest.raises(SystemExit, match="2"):
            main([*base, *words, "--reason", "  "])
        assert "argument --reason: is empty" in capsys.readouterr().err


def test_review_asks_about_each_pending_record(
    store: Store, make: Any, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    @contextmanager
    def witness(root: Path) -> Iterator[Any]:
        yield lambda record: {"name": "somebody"}

    pending = tmp_path / "pending"
    for prompt in ("a", "b", "c", "d"):
        propose(pending, make(prompt, tokens(4)), "new")
    said = iter(["a", "better", "r", "s", "a", ""])  # the last one without a reason
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pytest_adapt.golden.cli._witness", witness)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert main(["--store", str(store.directory), "--pending", str(pending), "review"]) == 0
    assert [one.record_id[-7:] for one in list_pending(pending)] == ["c.exact", "d.exact"]
    taken = Store(store.directory).entries
    assert taken["qwen3-moe-odd.a.exact"]["provenance"]["reason"] == "better"
    assert len(taken) == 2 and next(said, None) is None
    assert "a record changes only for a reason; skipped" in capsys.readouterr().out


def test_the_shipped_records_are_whole_and_witnessed() -> None:
    """Digests, index and witnesses of the records in this checkout; what they say is the suites' matter."""
    store = shipped_store()
    assert store.entries, f"no records in {store.directory}"
    assert store.files().keys() == store.entries.keys()
    for record_id, entry in store.entries.items():
        loaded = Record.load(store.path(record_id))
        assert loaded.digest() == entry["digest"]
        assert loaded.key.id == record_id
        assert entry["provenance"]["witness"]["use_of_budget"] <= 1.0
        assert entry["provenance"]["environment"]["numpy"]
    assert sum(path.stat().st_size for path in store.files().values()) < 15e6


@pytest.mark.parametrize("name", sorted({key.split(".")[0] for key in shipped_store().entries}))
def test_of_every_model_some_short_prompt_ends_with_certain_routing(name: str) -> None:
    """Else what it generates could not be judged at all, and a healthy target would be `unknown`."""
    store = shipped_store()
    records = [Record.load(store.path(key)) for key in store.entries if key.startswith(f"{name}.")]
    for precision in catalogue()[name].precisions:
        assert any(record.certified(precision)[min(len(record.tokens), 64) - 1] for record in records), precision


def test_a_cached_record_is_what_it_says_and_not_what_its_file_is_called(
    live: OracleReference, tokens: Any, tmp_path: Path
) -> None:
    """Files that changed their names among each other cost time, and never a verdict."""

    def asked() -> dict[str, Record]:
        fresh = replace(live, cache=tmp_path, _kept={})
        return {
            f"{name} {precision}": fresh._cached(name, sequence, precision)
            for name, sequence in (("p", tokens(6)), ("q", tokens(6, seed=1)))
            for precision in ((), ("fp32",), ("bf16",))
        }

    first, files = asked(), sorted(tmp_path.iterdir())
    assert len(files) == len(first)
    kept = {path: path.read_bytes() for path in files}
    for path, other in zip(files, (*files[1:], files[0]), strict=True):
        path.write_bytes(kept[other])
    again = asked()
    assert {name: one.digest() for name, one in again.items()} == {name: one.digest() for name, one in first.items()}
    assert {path: path.read_bytes() for path in files} == kept, "each file is made again"


def test_a_cached_record_is_found(live: OracleReference, tokens: Any, tmp_path: Path) -> None:
    """By whatever name a model and a prompt go: two directories of one checkpoint share it."""
    first = replace(live, cache=tmp_path, _kept={})._cached("p", tokens(6), ("fp32",))
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    again = replace(live, cache=tmp_path, model="other", _kept={})._cached("q", tokens(6), ("fp32",))
    assert path.stat().st_mtime_ns == written and list(tmp_path.iterdir()) == [path]
    assert again.key == replace(first.key, model="other", prompt="q")
    assert np.array_equal(again.lse, first.lse)


def test_a_cache_that_cannot_be_written_is_done_without(live: OracleReference, tokens: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    uncached = replace(live, cache=tmp_path / "taken" / "below", _kept={})
    assert uncached._cached("p", tokens(6), ()).tokens.tolist() == list(tokens(6))


def test_two_processes_may_write_one_record(record: Record, tmp_path: Path) -> None:
    """The name of the partial file is this process's own: another's, half written, is not touched."""
    path = tmp_path / "a.safetensors"
    for name in (f"{path.name}.partial", f"{path.name}.{os.getpid() + 1}.partial"):
        (tmp_path / name).mkdir()
    record.save(path)
    assert Record.load(path).digest() == record.digest()
