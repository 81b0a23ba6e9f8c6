"""Scripts for foreign engines: the conversion keeps every value, a planted difference is the one that was asked for."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt.models import materialise
from pytest_adapt.models.gguf import Gguf
from pytest_adapt.oracle.checkpoint import Checkpoint
from pytest_adapt.target import tokenizer as tokenizers
from pytest_adapt.target.protocol import TargetError
from pytest_adapt.target.tokenizer import ids_of_strings, load_tokenizer

PEERS = Path(__file__).resolve().parents[2] / "ci" / "peers"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(PEERS / f"{name}.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialise("mixtral-odd", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", ["experts", "rope", "norm", "layer"])
def test_a_planted_copy_differs_in_just_that(kind: str, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    script("plant")["plant"](kind, model, copy)
    before, after = Checkpoint(model), Checkpoint(copy)
    last = before.config["num_hidden_layers"] - 1
    names = set(before.names())
    gone = names - set(after.names())
    changed = {name for name in after.names() if not np.array_equal(before.tensor(name), after.tensor(name))}
    options = {key for key in before.config if before.config[key] != after.config.get(key)}
    if kind == "rope":
        assert (gone, changed) == (set(), set()) and "rope_theta" in options
    elif kind == "layer":
        assert gone == {name for name in names if name.startswith(f"model.layers.{last}.")}
        assert (changed, options) == (set(), {"num_hidden_layers"})
    elif kind == "norm":
        (name,) = changed
        assert name.endswith("input_layernorm.weight") and not gone and not options
        np.testing.assert_allclose(after.tensor(name), before.tensor(name) * 1.05, rtol=2**-8)
    else:
        assert changed and not gone and not options
        assert all(f"layers.{last}." in name and (".experts.0." in name or ".experts.1." in name) for name in changed)
        for name in changed:
            other = (
                name.replace(".experts.0.", ".experts.x.").replace(".experts.1.", ".experts.0.").replace(".x.", ".1.")
            )
            np.testing.assert_array_equal(after.tensor(name), before.tensor(other))


def test_a_converted_checkpoint_has_the_same_values(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    script("to_gguf")["convert"](model, out, 0)
    source = Checkpoint(model)
    heads, width = source.config["num_attention_heads"], source.config["head_dim"]
    with Gguf(out) as file:
        assert file.metadata["llama.rope.freq_base"] == source.config["rope_theta"]
        assert file.metadata["tokenizer.ggml.add_bos_token"] is False
        assert file.metadata["tokenizer.ggml.tokens"][7] == chr(0x4E00 + 7)
        for ours, theirs in (
            ("token_embd", "model.embed_tokens"),
            ("blk.1.attn_v", "model.layers.1.self_attn.v_proj"),
            ("blk.1.attn_norm", "model.layers.1.input_layernorm"),
        ):
            np.testing.assert_array_equal(file.read(f"{ours}.weight"), source.tensor(f"{theirs}.weight"))
        query = file.read("blk.1.attn_q.weight").reshape(heads, width // 2, 2, -1)  # interleaved pairs
        halves = source.tensor("model.layers.1.self_attn.q_proj.weight").reshape(heads, 2, width // 2, -1)
        np.testing.assert_array_equal(query, halves.swapaxes(1, 2))
        down = file.read("blk.2.ffn_down_exps.weight")
        ends = (".experts.3.down_proj.weight", ".experts.3.w2.weight")
        (name,) = (name for name in source.names() if "layers.2." in name and name.endswith(ends))
        np.testing.assert_array_equal(down[3], source.tensor(name))


def test_what_cannot_be_converted_is_refused(model: Path, tmp_path: Path) -> None:
    convert = script("to_gguf")["convert"]
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    with pytest.raises(SystemExit, match="model_type deepseek_v3 is not converted"):
        convert(tmp_path, tmp_path / "out.gguf", 0)
    assert not (tmp_path / "out.gguf").exists()


def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    encoded = script("to_gguf")["encoded"]
    values = np.array([[1.0, 1.00390625, 1.01171875, -3.14159274]], np.float32)  # two ties, one down and one up
    bits = np.frombuffer(encoded(values, 30), "<u2").astype(np.uint32) << 16
    assert bits.view(np.float32).tolist() == [1.0, 1.0, 1.015625, -3.140625]


# The tokenizer of text servers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [True, False], ids=["tokenizers", "standard library"])
def test_one_character_per_token_needs_no_package(
    library: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library:
        pytest.importorskip("tokenizers")
    else:
        monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: None)
    reader = load_tokenizer(checkpoint)
    assert reader.encode(reader.decode([5, 9, 5])) == [5, 9, 5]
    strings = ids_of_strings(reader)
    assert strings[chr(0x4E00 + 7)] == 7
    assert len(strings) == reader.size == 64


def test_merges_need_the_package(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: None)
    path = checkpoint / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = [["a", "b"]]
    path.write_text(json.dumps(content))
    with pytest.raises(TargetError, match="pip install tokenizers"):
        load_tokenizer(checkpoint)
    path.write_text("{")
    with pytest.raises(TargetError, match="cannot be read"):
        load_tokenizer(checkpoint)
    path.unlink()
    with pytest.raises(TargetError, match="no tokenizer.json"):
        load_tokenizer(checkpoint)
