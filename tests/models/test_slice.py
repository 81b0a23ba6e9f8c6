"""Pieces of checkpoints: real weights, fewer layers, fewer experts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pytest_adapt.__main__ import main
from pytest_adapt.inspect import analyse, count
from pytest_adapt.inspect.checkpoint import sum_by_layer, tensors_of
from pytest_adapt.models import ModelError, materialise
from pytest_adapt.models.slice import numbers_of, slice_checkpoint
from pytest_adapt.oracle.checkpoint import Checkpoint


@pytest.mark.requirement(115)
def test_layers_and_experts_keep_their_values(tmp_path: Path) -> None:
    source = materialise("deepseek-v3-odd-pos", tmp_path)
    piece = slice_checkpoint(source, tmp_path / "piece", (1, 2, 4), 9)
    whole, part = Checkpoint(source), Checkpoint(piece)
    assert json.loads((piece / "config.json").read_text())["first_k_dense_replace"] == 1
    # 18 experts in 3 groups of 6; 3 of each group stay: 0 1 2, 6 7 8, 12 13 14.
    for new, old in ((0, 0), (3, 6), (8, 14)):
        name = "mlp.experts.{}.down_proj.weight"
        assert np.array_equal(
            part.tensor(f"model.layers.2.{name.format(new)}"), whole.tensor(f"model.layers.4.{name.format(old)}")
        )
    kept = [0, 1, 2, 6, 7, 8, 12, 13, 14]
    for gate in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
        assert np.array_equal(part.tensor(f"model.layers.1.{gate}"), whole.tensor(f"model.layers.2.{gate}")[kept])
    assert np.array_equal(part.tensor("lm_head.weight"), whole.tensor("lm_head.weight"))


@pytest.mark.parametrize(
    ("name", "layers", "experts"),
    [
        ("qwen3-moe-odd", (1, 3), 6),
        ("mixtral-odd", (2,), 3),
        ("llama-odd", (0, 3), None),
        ("deepseek-v3-odd-neg", (0, 4), 6),
    ],
)
def test_a_piece_is_a_whole_checkpoint(name: str, layers: tuple[int, ...], experts: int | None, tmp_path: Path) -> None:
    piece = slice_checkpoint(materialise(name, tmp_path), tmp_path / "piece", layers, experts)
    found = count(analyse(piece))
    by_layer, outer = sum_by_layer(tensors_of(piece))
    assert found.layers == tuple(by_layer[i] for i in range(len(layers)))
    assert found.outer == outer


def test_the_command_cuts_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = materialise("qwen3-moe-odd", tmp_path)
    assert main(["models", "slice", str(source), str(tmp_path / "a"), "--layers", "0-1", "--experts", "4"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"], config["mlp_only_layers"]) == (4, 4, [1])
    for arguments, cause in (
        (["--layers", "0-9"], "the model has layers 0 to 4"),
        (["--layers", "0", "--experts", "99"], "99 experts of 13"),
        (["--layers", "x"], "cannot read 'x'"),
    ):
        assert main(["models", "slice", str(source), str(tmp_path / "b"), *arguments]) == 1
        message = capsys.readouterr().err.strip()
        assert cause in message and "\n" not in message
    assert not (tmp_path / "b").exists()


def test_what_cannot_be_cut_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json: cannot be read"):
        slice_checkpoint(tmp_path, tmp_path / "x", (0,))
    with pytest.raises(ModelError, match="exists; name a new directory"):
        slice_checkpoint(tmp_path, tmp_path, (0,))
    with pytest.raises(ModelError, match="keep at least 6"):
        slice_checkpoint(materialise("deepseek-v3-odd-pos", tmp_path), tmp_path / "x", (0,), 3)
    with pytest.raises(ModelError, match="no experts"):
        slice_checkpoint(materialise("llama-odd", tmp_path), tmp_path / "x", (0,), 3)
    source = materialise("mixtral-odd", tmp_path)
    shard = source / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError, match="truncated"):
        slice_checkpoint(source, tmp_path / "x", (3,))
    for text in ("", "3-1", "1,1", "-2"):
        with pytest.raises(ModelError):
            numbers_of(text)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[" * 200_000, "config.json: cannot be read: maximum recursion depth"),
        ("config.json", '{"num_hidden_layers": 4, "num_experts": "x"}', "num_experts is 'x', expected a number"),
        ("model-00001-of-00002.safetensors", "[" * 200_000, "model-00001-of-00002.safetensors: is no safetensors file"),
    ],
)
def test_malformed_checkpoints_end_in_one_line(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = materialise("qwen3-moe-odd", tmp_path)
    raw = content.encode()
    (source / name).write_bytes(raw if name == "config.json" else len(raw).to_bytes(8, "little") + raw)
    assert main(["models", "slice", str(source), str(tmp_path / "piece"), "--layers", "0", "--experts", "4"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_place_that_cannot_be_written_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file")
    assert main(["models", "export", str(tmp_path / "taken"), "--models", "qwen3-moe-odd"]) == 1
    assert capsys.readouterr().err.splitlines() == [f"models: [Errno 17] File exists: '{tmp_path / 'taken'}'"]
