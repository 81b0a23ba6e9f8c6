"""Parameter counts: against published models, and tensor by tensor against checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_adapt.inspect import analyse, count
from pytest_adapt.inspect.checkpoint import sharding, sum_by_layer, tensors_of
from pytest_adapt.inspect.parameters import layer_parts
from pytest_adapt.inspect.presets import presets
from pytest_adapt.inspect.structure import InspectError
from pytest_adapt.models import catalogue, materialise

COMPUTED = {name: raw["computed"] for name, raw in presets().items() if "computed" in raw}
PROCEDURAL = [name for name, entry in catalogue().items() if entry.kind == "procedural"]


@pytest.mark.requirement(2)
@pytest.mark.parametrize("name", COMPUTED)
def test_published_models_are_reproduced(name: str) -> None:
    found = count(analyse(name))
    expected = COMPUTED[name]
    assert found.total / 1e9 == pytest.approx(expected["total_B"], rel=0.005)
    # Stated to a tenth of a billion. GLM-5.2's figure leaves out the index of its sparse attention (0.7 B).
    structure = analyse(name)
    parts = [part for layer in structure.layers for part in layer_parts(structure, layer)]
    index = sum(part.params for part in parts if part.name == "index")
    assert (found.active - index) / 1e9 == pytest.approx(expected["active_B"], rel=0.01, abs=0.051)
    assert found.ratio == found.active / found.total


@pytest.mark.requirement(2)
@pytest.mark.parametrize("name", PROCEDURAL)
def test_totals_equal_the_sum_over_tensors(name: str, tmp_path: Path) -> None:
    directory = materialise(name, tmp_path)
    found = count(analyse(directory))
    layers, outer = sum_by_layer(tensors_of(directory))
    assert found.layers == tuple(layers[i] for i in range(len(found.layers)))
    assert found.outer == outer
    assert found.total == sum(layers.values()) + outer
    assert found.active < found.total


def test_active_parameters_count_chosen_experts_only() -> None:
    found = count(analyse("mixtral-8x7b"))
    expert = COMPUTED["mixtral-8x7b"]["expert_params"]
    assert found.total - found.active == 32 * 6 * expert + 32000 * 4096, "six idle experts a layer, and the embedding"


@pytest.mark.requirement(8)
def test_sharding_is_recovered(tmp_path: Path) -> None:
    directory = materialise("qwen3-moe-odd", tmp_path)
    found = sharding(directory)
    assert found.naming == "numbered" and len(found.shards) == 2 and not found.presharded
    assert set().union(*found.layers) == {0, 1, 2, 3}
    assert max(found.layers[0]) <= min(found.layers[1]), "layers keep their order over the files"


@pytest.mark.requirement(8)
@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"), "tensor-parallel ranks (Megatron"),
        (("consolidated.00.pth", "consolidated.01.pth"), "tensor-parallel ranks (original Llama"),
        (("model0-mp8.safetensors", "model1-mp8.safetensors"), "tensor-parallel ranks (original DeepSeek"),
        (("model_pp_rank_0.bin", "model_pp_rank_1.bin"), "pipeline stages"),
        (("ep_rank_3.bin", "ep_rank_4.bin"), "expert-parallel ranks"),
        (("model-rank-0-part-0.bin",), "ranks (vLLM"),
    ],
)
def test_checkpoints_cut_for_ranks_are_recognised(names: tuple[str, ...], what: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    for name in (*names, "optimizer.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"x")
    found = sharding(tmp_path)
    assert found.presharded.startswith(what)
    assert found.shards == tuple(sorted(names))
    assert len(found.ignored) == 3


@pytest.mark.requirement(8)
def test_incomplete_sharding_is_refused(tmp_path: Path) -> None:
    directory = materialise("qwen3-moe-odd", tmp_path)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InspectError, match="the index names model-00002-of-00002.safetensors, which is absent"):
        sharding(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(InspectError, match="shard 2 of 2 is missing"):
        sharding(directory)


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content, cause in (
        (b"\xff" * 16, "claims .* bytes, the file has 16"),
        ((20).to_bytes(8, "little") + b"{", "truncated"),
        ((2).to_bytes(8, "little") + b"[]", "header is damaged"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "header is damaged"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "header is damaged"),
    ):
        file.write_bytes(content)
        with pytest.raises(InspectError, match=cause):
            tensors_of(tmp_path)
