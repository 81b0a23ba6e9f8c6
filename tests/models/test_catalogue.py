"""The conformance models: what they promise about their weights, sizes and files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pytest_adapt.models import ModelEntry, ModelError, catalogue, materialise, prompts, spec_hash
from pytest_adapt.models.prompts import lengths_of
from pytest_adapt.models.weights import TensorSpec, draw, tensors

PROCEDURAL = [entry for entry in catalogue().values() if entry.kind == "procedural"]
BY_NAME = {entry.name: entry for entry in PROCEDURAL}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_catalogue_costs_the_standard_library_only() -> None:
    code = (
        "import sys; from pytest_adapt.models import catalogue; catalogue();"
        "print([m for m in ('numpy', 'torch', 'safetensors', 'adapt_engine') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.requirement(115)
@pytest.mark.parametrize("entry", PROCEDURAL, ids=lambda e: e.name)
def test_every_weight_is_exact_in_bf16_and_fp16(entry: ModelEntry) -> None:
    for spec in tensors(entry):
        value = draw(spec, entry.recipe["seed"])
        if spec.draw == "selection":
            assert (value.view(np.uint32) & 0xFFFF).all(), "selection biases must lie off the bfloat16 grid"
            assert np.abs(value - spec.offset).max() <= 0.1201
            continue
        assert not (value.view(np.uint32) & 0xFFFF).any(), spec.name
        assert np.array_equal(value.astype(np.float16).astype(np.float32), value), spec.name
        if spec.draw == "norm":
            assert (value != 0).all() and len(np.unique(value)) > 5
        elif value.size > 500:
            assert value.std() == pytest.approx(spec.std, rel=0.12), spec.name


def test_weights_are_the_same_bits_everywhere() -> None:
    # Written down once: a generator that drifts would silently invalidate every golden.
    spec = TensorSpec("model.layers.0.self_attn.q_proj.weight", (2, 3), 0.1)
    assert (draw(spec, 7) * 2**9).astype(int).tolist() == [[-38, 47, 45], [-85, 65, 41]]


def test_two_tensors_and_two_seeds_share_no_stream() -> None:
    a = draw(TensorSpec("a", (4096,), 1.0), 1)
    for other in (draw(TensorSpec("b", (4096,), 1.0), 1), draw(TensorSpec("a", (4096,), 1.0), 2)):
        assert abs(np.corrcoef(a, other)[0, 1]) < 0.06


@pytest.mark.parametrize("entry", [e for e in PROCEDURAL if e.shape_class == "odd"], ids=lambda e: e.name)
def test_odd_models_have_no_coincident_sizes(entry: ModelEntry) -> None:
    c = entry.config
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    if "kv_lora_rank" in c:
        sizes = ["hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "q_lora_rank"]
        sizes += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts"]
        widths = [c[name] for name in sizes]
        widths += [heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]), heads * c["v_head_dim"]]
    else:
        widths = [c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["head_dim"]]
        widths += [heads * c["head_dim"], kv * c["head_dim"], 2 * c["intermediate_size"]]
        widths += [c[name] for name in ("moe_intermediate_size", "num_experts", "num_local_experts") if name in c]
        assert heads // kv != kv
        assert heads % 4 or kv % 4, "some small tensor-parallel size must not divide the heads"
    assert len(set(widths)) == len(widths), sorted(widths)
    experts = c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts")
    if experts:
        assert experts % 4, "experts must divide unevenly over four ranks"


def test_models_cover_both_signs_of_selection_bias_renormalisation_and_tying() -> None:
    configs = [entry.config for entry in PROCEDURAL]
    assert {math.copysign(1, e.recipe["selection_bias"]) for e in PROCEDURAL if "selection_bias" in e.recipe} == {1, -1}
    for model_type in ("qwen3_moe", "deepseek_v3"):
        assert {c["norm_topk_prob"] for c in configs if c["model_type"] == model_type} == {True, False}
    assert {c["tie_word_embeddings"] for c in configs} == {True, False}
    assert all(c["routed_scaling_factor"] != 1 for c in configs if "routed_scaling_factor" in c)


@pytest.mark.parametrize("name", ["deepseek-v3-odd-pos", "qwen3-moe-odd-raw"])
def test_files_hold_exactly_the_tensors_of_the_index(name: str, root: Path) -> None:
    from safetensors import safe_open

    directory = materialise(name, root)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) >= 2
    expected = {spec.name: spec for spec in tensors(BY_NAME[name])}
    assert set(index["weight_map"]) == set(expected)
    total = 0
    for shard in shards:
        with safe_open(directory / shard, "numpy") as file:
            assert {key for key, value in index["weight_map"].items() if value == shard} == set(file.keys())
            for key in set(file.keys()):
                part = file.get_slice(key)
                assert tuple(part.get_shape()) == expected[key].shape
                assert part.get_dtype() == expected[key].dtype
                total += math.prod(part.get_shape()) * (4 if part.get_dtype() == "F32" else 2)
    assert index["metadata"]["total_size"] == total


def test_a_directory_is_reused_and_a_damaged_one_is_replaced(root: Path) -> None:
    directory = materialise("mixtral-odd", root)
    shard = directory / "model-00001-of-00002.safetensors"
    stamp = shard.stat().st_mtime_ns
    assert materialise("mixtral-odd", root) == directory
    assert shard.stat().st_mtime_ns == stamp
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert materialise("mixtral-odd", root) == directory
    assert shard.read_bytes() == whole
    assert not [path for path in root.iterdir() if path.name.startswith(".")], "scratch folders are removed"


def test_many_processes_materialise_the_same_model_at_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        found = set(pool.map(materialise, ["qwen3-moe-odd"] * 8, [tmp_path] * 8))
    assert len(found) == 1
    assert [path.name for path in tmp_path.iterdir()] == [found.pop().name]


def test_spec_hash_follows_weights_not_prompts() -> None:
    entry = BY_NAME["mixtral-odd"]
    fields = {name: getattr(entry, name) for name in entry.__dataclass_fields__}
    assert spec_hash(ModelEntry(**{**fields, "prompts": ("random",)})) == spec_hash(entry)
    assert spec_hash(ModelEntry(**{**fields, "recipe": {"seed": 9}})) != spec_hash(entry)
    assert spec_hash(ModelEntry(**{**fields, "config": {**entry.config, "rms_norm_eps": 1e-3}})) != spec_hash(entry)
    assert len({spec_hash(e) for e in PROCEDURAL}) == len(PROCEDURAL)


def test_an_unknown_model_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unknown model 'qwen9'; the catalogue has .*mixtral-odd"):
        materialise("qwen9", tmp_path)


@pytest.mark.parametrize("entry", PROCEDURAL, ids=lambda e: e.name)
def test_prompts_stay_inside_vocabulary_and_context(entry: ModelEntry, root: Path) -> None:
    found = prompts(entry, materialise(entry.name, root))
    assert {name: len(ids) for name, ids in found.items()} == lengths_of(entry)
    assert any(len(value) % 16 for value in found.values())
    for name, tokens in found.items():
        assert name.split("-")[0] in entry.prompts
        assert 0 < len(tokens) <= 4096
        assert min(tokens) >= 0 and max(tokens) < entry.config["vocab_size"] - 4, "no special tokens"
    longest = found.get("boundary-4096", ())
    for boundary in entry.contexts if longest else ():
        for length in (boundary - 1, boundary, boundary + 1):
            if length <= 4096:
                assert found[f"boundary-{length}"] == longest[:length]
    assert prompts(entry, materialise(entry.name, root)) == found


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".qwen3-moe-odd-old", tmp_path / ".qwen3-moe-odd-young"
    for folder in (old, young):
        (folder / "new").mkdir(parents=True)
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    materialise("qwen3-moe-odd", tmp_path)
    assert not old.exists()
    assert young.exists()
