"""The oracle's own reader of safetensors, against the library's, and on files that are not what they say."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pytest_adapt.oracle import Checkpoint, OracleError


def write(directory: Path, shards: list[dict[str, np.ndarray]]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    names = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, directory / f"part-{number}.safetensors")
        names |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return directory


def tensors() -> dict[str, np.ndarray]:
    source = np.random.default_rng(0)
    return {
        "a": source.normal(size=(3, 5)).astype(np.float32),
        "b": source.normal(size=7).astype(np.float16),
        "c": source.normal(size=(2, 2)),
        "d": source.integers(-100, 100, (4, 1, 3)),
        "e": np.zeros((0, 4), np.float32),
        "f": np.array(3.5, np.float32),
    }


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    written = tensors()
    checkpoint = Checkpoint(write(tmp_path, [{"a": written["a"], "b": written["b"]}, {k: written[k] for k in "cdef"}]))
    assert checkpoint.names() == tuple("abcdef")
    for name, value in written.items():
        got = checkpoint.tensor(name)
        assert got.dtype == (np.float32 if value.dtype == np.float16 else value.dtype)
        assert np.array_equal(got, value)
        assert checkpoint.shape(name) == value.shape


def test_reads_bf16_bit_for_bit(tmp_path: Path, torch_stack: None) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    stored = torch.randn(40, 9).to(torch.bfloat16)
    save_torch({"w": stored}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    got = Checkpoint(tmp_path).tensor("w")
    assert got.dtype == np.float32
    assert np.array_equal(got, stored.float().numpy())


def test_digest_ignores_shards_and_sees_every_byte(tmp_path: Path) -> None:
    written = tensors()
    one = Checkpoint(write(tmp_path / "one", [written])).weight_digest()
    two = Checkpoint(write(tmp_path / "two", [{"f": written["f"]}, {k: written[k] for k in "dcabe"}])).weight_digest()
    assert one == two
    for change in (
        {"a": np.nextafter(written["a"], 9)},
        {"a": written["a"].reshape(5, 3)},
        {"b": written["b"].view(np.int16)},
        {"z": written["a"]},
    ):
        assert Checkpoint(write(tmp_path / "other", [{**written, **change}])).weight_digest() != one


def _truncate(directory: Path) -> None:
    path = directory / "part-0.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _header(directory: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    path = directory / "part-0.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + data[8 + length :])


MALFORMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "config no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json.*JSON"),
    "config of brackets": (lambda d: (d / "config.json").write_text("[" * 200_000), "config.json.*recursion"),
    "header of brackets": (
        lambda d: (d / "part-0.safetensors").write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000),
        "part-0.safetensors.*recursion",
    ),
    "metadata a list": (
        lambda d: _header(d, lambda h: h.update(json.loads('{"__metadata__": [1]}'))),
        "part-0.safetensors.*__metadata__",
    ),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), "config.json.*object"),
    "no weights": (lambda d: (d / "model.safetensors.index.json").unlink(), "neither model.safetensors.index.json"),
    "empty index": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "weight_map"),
    "absent file": (lambda d: (d / "part-0.safetensors").unlink(), "part-0.safetensors"),
    "path out of the folder": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        "'a'.*../x.safetensors",
    ),
    "stale index": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"zz": "part-0.safetensors"}}'),
        "'zz'.*part-0.safetensors",
    ),
    "truncated": (_truncate, "part-0.safetensors.*truncated"),
    "empty file": (lambda d: (d / "part-0.safetensors").write_bytes(b""), "part-0.safetensors.*too few"),
    "header length": (lambda d: (d / "part-0.safetensors").write_bytes(b"\xff" * 64), "part-0.safetensors.*header"),
    "unknown dtype": (lambda d: _header(d, lambda h: h["a"].update(dtype="F4")), "'a' has dtype F4.*F32"),
    "wrong shape": (lambda d: _header(d, lambda h: h["a"].update(shape=[3, 6])), r"'a'.*\[3, 6\].*72 bytes"),
    "negative shape": (lambda d: _header(d, lambda h: h["a"].update(shape=[-3, -5])), "'a'"),
    "no offsets": (lambda d: _header(d, lambda h: h["a"].pop("data_offsets")), "'a'.*malformed"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_checkpoints_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    spoil, message = MALFORMED[case]
    write(tmp_path / "model", [tensors()])
    spoil(tmp_path / "model")
    with pytest.raises(OracleError, match=message) as caught:
        Checkpoint(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_unknown_tensor_and_folder(tmp_path: Path) -> None:
    with pytest.raises(OracleError, match="'nothing'"):
        Checkpoint(write(tmp_path, [tensors()])).tensor("nothing")
    with pytest.raises(OracleError, match="not a checkpoint directory"):
        Checkpoint(tmp_path / "absent")
