"""Records survive their file bit for bit, and a file that was touched is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt.golden.record import Record, RecordError, RecordKey, answer_errors, divergence_terms, make_record
from pytest_adapt.golden.sketch import PROJECTIONS, log_softmax, positions_of, project, top_ids


@pytest.mark.requirement(14)
def test_a_file_gives_back_what_was_recorded(make: Any, tokens: Any, tmp_path: Path) -> None:
    record = make("p", tokens(60), ("fp32", "bf16", "fp16"))
    record.save(tmp_path / "a.safetensors")
    loaded = Record.load(tmp_path / "a.safetensors")
    assert loaded.key == record.key
    assert loaded.precisions == ("fp32", "bf16", "fp16")
    assert loaded.digest() == record.digest()
    for name in ("tokens", "positions", "lse", "topk_ids", "next_logprob", "projections", "norm", "margin"):
        one, two = getattr(record, name), getattr(loaded, name)
        assert one.dtype == two.dtype and one.tobytes() == two.tobytes(), name
    assert record.expert_ids.keys() == loaded.expert_ids.keys()
    assert all(np.array_equal(record.expert_ids[layer], loaded.expert_ids[layer]) for layer in record.expert_ids)
    # Far below the smallest budget (10^-7 and up).
    assert np.abs(loaded.topk_logprobs - record.topk_logprobs).max() < 4e-9
    for precision, errors in record.errors.items():
        for name, values in vars(errors).items():
            found = getattr(loaded.errors[precision], name)
            assert np.allclose(found, values, rtol=2**-8, atol=0, equal_nan=True), name
            assert name != "certified" or np.array_equal(found, values)


def test_saving_twice_gives_the_same_digest_and_again_the_same_bytes_inside(
    make: Any, tokens: Any, tmp_path: Path
) -> None:
    record = make("p", tokens(40))
    for name in "abc":
        record.save(tmp_path / name)
        record = Record.load(tmp_path / name)
    assert len({Record.load(tmp_path / name).digest() for name in "abc"}) == 1
    assert make("p", tokens(40)).digest() == record.digest(), "making it again changes nothing"


def test_a_prompt_of_512_tokens_is_below_150_kb(make: Any, tokens: Any, tmp_path: Path) -> None:
    record = make("p", tokens(512), ("fp32", "bf16", "fp16"))
    record.save(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size < 150 * 1024


@pytest.mark.parametrize("where", ["tensor", "metadata", "cut", "empty", "nothing", "schema", "foreign", "words"])
def test_a_touched_file_is_refused_with_a_way_out(make: Any, tokens: Any, tmp_path: Path, where: str) -> None:
    path = tmp_path / "a.safetensors"
    make("p", tokens(20)).save(path)
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + size], data[8 + size :]
    if where == "tensor":
        body = body[:-1] + bytes([body[-1] ^ 1])
    elif where == "metadata":
        header = header.replace(b'\\"prompt\\":\\"p\\"', b'\\"prompt\\":\\"q\\"')
        assert header != data[8 : 8 + size]
    elif where == "schema":
        header = header.replace(b'\\"schema\\":1', b'\\"schema\\":9')
    elif where == "foreign":
        header = header.replace(b'"adapt"', b'"other"')
    elif where == "words":
        header = header.replace(b'\\"schema\\":1', b'\\"schema\\":x')
    elif where == "cut":
        body = body[: len(body) // 2]
    if where == "nothing":
        path.unlink()
    else:
        path.write_bytes(b"" if where == "empty" else data[:8] + header + body)
    with pytest.raises(RecordError, match=r"a\.safetensors") as caught:
        Record.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert any(way in message for way in ("make it again", "restore it", "not a golden record"))


def test_metadata_is_one_key_of_canonical_json(make: Any, tokens: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    make("p", tokens(5)).save(path)
    data = path.read_bytes()
    metadata = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
    assert list(metadata) == ["adapt"]
    assert json.dumps(json.loads(metadata["adapt"]), sort_keys=True, separators=(",", ":")) == metadata["adapt"]


def test_a_prefix_is_the_record_of_the_prefix(make: Any, tokens: Any) -> None:
    whole, part = make("p", tokens(50)).prefix(20), make("p", tokens(50)[:20])
    assert np.array_equal(whole.tokens, part.tokens) and np.array_equal(whole.positions, part.positions)
    assert np.allclose(whole.topk_logprobs, part.topk_logprobs, rtol=0, atol=1e-12)
    assert np.array_equal(np.isnan(whole.next_logprob), np.isnan(part.next_logprob))
    assert np.isnan(whole.emulation("bf16").follow[-1])
    for layer in part.expert_ids:
        assert np.array_equal(whole.expert_ids[layer], part.expert_ids[layer])
    for name in ("rms", "largest", "kl", "gap", "follow"):
        one, two = (getattr(record.emulation("bf16"), name) for record in (whole, part))
        assert np.allclose(one, two, rtol=1e-3, atol=0, equal_nan=True), name


def test_certified_positions_are_a_beginning_up_to_the_last_layer(make: Any, tokens: Any) -> None:
    record = make("p", tokens(60))
    assert record.certified("fp32").all()
    assert not record.certified("bf16").all()
    with pytest.raises(RecordError, match="no budgets for fp16"):
        record.certified("fp16")


@pytest.mark.parametrize("layer", ["first", "last"])
def test_where_experts_may_flip_only_the_last_layer_spares_later_rows(live: Any, tokens: Any, layer: str) -> None:
    class Tied:
        """The oracle, but that two experts of one layer are as good as each other at one position."""

        spec = live.oracle.spec

        def run(self, *arguments: Any, **named: Any) -> Any:
            trace = live.oracle.run(*arguments, **named)
            at = {"first": min, "last": max}[layer](trace.margins)
            trace.margins[at] = trace.margins[at].copy()
            trace.margins[at][5] = 0.0
            return trace

    key = RecordKey("m", "p", "", "", "")
    certified = make_record(Tied(), key, tokens(12), ("fp32",)).certified("fp32")
    assert np.flatnonzero(~certified).tolist() == ([5] if layer == "last" else list(range(5, 12)))


def test_an_empty_prompt_has_no_record(make: Any) -> None:
    with pytest.raises(RecordError, match="at least one"):
        make("p", ())


@pytest.mark.parametrize("name", ["a/b", "", "../x", "a b"])
def test_names_that_are_no_file_names(name: str) -> None:
    with pytest.raises(RecordError, match="letters"):
        _ = RecordKey("m", name, "", "", "").id


def test_positions_of_long_prompts() -> None:
    assert positions_of(3).tolist() == [0, 1, 2]
    found = positions_of(4096, (700, 9000))
    assert found[:512].tolist() == list(range(512))
    assert found[-1] == 4095
    assert {699, 700, 701} <= set(found.tolist())
    assert len(found) < 512 + 256 + 8
    assert (np.diff(found) > 0).all()


def test_sketches_of_known_rows() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]])) + 7.0
    logprobs, lse = log_softmax(logits)
    assert np.allclose(np.exp(logprobs), [[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]])
    assert np.allclose(lse, 7.0)
    assert top_ids(logits, 3).tolist() == [[0, 1, 2], [3, 2, 1]], "value descending, then id ascending"
    assert top_ids(np.zeros((1, 100)), 5).tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("count", [20, 300])
def test_the_top_of_a_large_vocabulary_is_that_of_a_full_sort(count: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (20, 5000)).round(2)  # with ties
    assert top_ids(logits, count).tolist() == np.argsort(-logits, axis=1, kind="stable")[:, :count].tolist()


def test_projections_measure_distances() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(300, 500))
    b = a + 0.01 * rng.normal(size=a.shape)
    (pa, na), (pb, _) = project(a), project(b)
    assert pa.shape == (300, PROJECTIONS)
    assert np.sqrt(np.mean((pa - pb) ** 2)) == pytest.approx(0.01, rel=0.05)
    assert na == pytest.approx(np.sqrt(((a - a.mean(axis=1, keepdims=True)) ** 2).mean(axis=1)))
    shifted, _ = project(a + 5.0)
    assert np.allclose(shifted, pa, atol=1e-12), "an offset of all logits changes no probability"
    assert np.allclose(project(a[:1])[0], pa[:1], atol=1e-12), "signs depend on nothing but their index"


def test_divergence_terms_without_cancellation() -> None:
    for d in (1e-9, -3e-6, 1e-4, -0.7, 3.0):
        expected = float(np.expm1(np.longdouble(d)) - np.longdouble(d))
        tolerance = 1e-3 if abs(d) < 1e-8 else 1e-6
        assert float(divergence_terms(np.array([d]))[0]) == pytest.approx(expected, rel=tolerance)
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    assert np.sum(p * divergence_terms(np.log(q / p))) == pytest.approx(np.sum(p * np.log(p / q)))


def test_a_large_vocabulary_needs_wide_ids(make: Any, tokens: Any, tmp_path: Path) -> None:
    record = make("p", tokens(4))
    ids = record.topk_ids.copy()
    ids[0, 0] = 150_000
    wide = replace(record, vocab=151_936, topk_ids=ids)
    wide.save(tmp_path / "a")
    assert Record.load(tmp_path / "a").topk_ids[0, 0] == 150_000


def test_errors_that_are_no_numbers_survive_the_file(make: Any, tokens: Any, tmp_path: Path) -> None:
    """A margin of 0 makes a score infinite, and nothing follows the last token."""
    record = make("p", tokens(4), ("bf16",))
    special = np.array([0.0, np.inf, np.nan, 1.5])
    errors = replace(record.errors["bf16"], score=special, follow=-special)
    replace(record, errors={"bf16": errors}).save(tmp_path / "a")
    found = Record.load(tmp_path / "a").errors["bf16"]
    assert np.array_equal(found.score, special, equal_nan=True)
    assert np.array_equal(found.follow, -special, equal_nan=True)


def test_errors_of_an_answer_are_those_of_its_definitions() -> None:
    rng = np.random.default_rng(0)
    exact = rng.normal(0, 2, (6, 50))
    other = exact + rng.normal(0, 0.05, exact.shape)
    ids, follow = top_ids(exact, 8), np.array([3, 0, 49, 7, 1, -1])
    found = answer_errors(exact, other, ids, follow)
    rows = np.arange(6)[:, None]
    log_p, log_q = log_softmax(exact)[0], log_softmax(other)[0]
    off = (log_q - log_p)[rows, ids]
    assert found["rms"] == pytest.approx(np.sqrt((off**2).mean(axis=1)), rel=1e-4)
    assert found["largest"] == pytest.approx(np.abs(off).max(axis=1), rel=1e-4)
    assert found["follow"][:5] == pytest.approx(np.abs(log_q - log_p)[range(5), follow[:5]], rel=1e-4)
    assert np.isnan(found["follow"][5])
    assert found["kl"] == pytest.approx((np.exp(log_p[rows, ids]) * (np.exp(off) - 1 - off)).sum(axis=1), rel=1e-3)
    a, b = (one - one.mean(axis=1, keepdims=True) for one in (exact, other))
    cosine = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert found["gap"] == pytest.approx(1 - cosine, rel=1e-9)
