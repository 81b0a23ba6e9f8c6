"""Checkpoints that must not be believed: each is refused, and the message names the file and the tensor or key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import CheckpointError, Engine, EngineOptions
from adapt_engine.config import ModelSpec
from adapt_engine.families import read_config, spec_from_config
from adapt_engine.weights.index import DTYPE_BYTES, WeightIndex
from adapt_engine.weights.loader import Loader
from adapt_engine.weights.parameters import ShardSlice, expected_parameters
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], tuple[str, ...]]


def mapping(directory: Path) -> dict[str, str]:
    return json.loads((directory / INDEX).read_text())["weight_map"]


def remap(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    content = json.loads((directory / INDEX).read_text())
    change(content["weight_map"])
    (directory / INDEX).write_text(json.dumps(content))


def rewrite(directory: Path, tensor: str, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """Change the tensors of the file that holds ``tensor``; returns the file's name."""
    name = mapping(directory)[tensor]
    content = {key: value.clone() for key, value in load_file(directory / name).items()}
    change(content)
    save_file(content, directory / name)
    return name


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def patch_header(directory: Path, tensor: str, change: Callable[[dict[str, Any]], None]) -> str:
    """Change the header of the file that holds ``tensor`` without touching its data; returns the file's name."""
    name = mapping(directory)[tensor]
    header, data = split((directory / name).read_bytes())
    change(header)
    text = json.dumps(header).encode()
    (directory / name).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return name


UP = "model.layers.2.mlp.experts.4.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def truncated_tail(directory: Path) -> tuple[str, ...]:
    path = directory / mapping(directory)[UP]
    path.write_bytes(path.read_bytes()[:-5])
    return path.name, "truncated"


def truncated_header(directory: Path) -> tuple[str, ...]:
    path = directory / mapping(directory)[UP]
    path.write_bytes(path.read_bytes()[:40])
    return path.name, "truncated"


def empty_file(directory: Path) -> tuple[str, ...]:
    path = directory / mapping(directory)[UP]
    path.write_bytes(b"")
    return path.name, "truncated"


def absurd_header_length(directory: Path) -> tuple[str, ...]:
    path = directory / mapping(directory)[UP]
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])
    return path.name, "absurd"


def metadata_no_object(directory: Path) -> tuple[str, ...]:
    return patch_header(directory, UP, lambda header: header.update(__metadata__=[1])), "__metadata__"


def header_not_json(directory: Path) -> tuple[str, ...]:
    path = directory / mapping(directory)[UP]
    raw = bytearray(path.read_bytes())
    raw[8:12] = b"\xff\xff{{"
    path.write_bytes(raw)
    return path.name, "JSON"


def trailing_bytes(directory: Path) -> tuple[str, ...]:
    path = directory / mapping(directory)[UP]
    path.write_bytes(path.read_bytes() + b"12345678")
    return path.name, "after the last tensor"


def missing_file(directory: Path) -> tuple[str, ...]:
    path = directory / mapping(directory)[UP]
    path.unlink()
    return path.name, "not there"


def missing_tensor(directory: Path) -> tuple[str, ...]:
    return rewrite(directory, UP, lambda tensors: tensors.pop(UP)), UP, "missing"


def missing_from_index_and_file(directory: Path) -> tuple[str, ...]:
    rewrite(directory, UP, lambda tensors: tensors.pop(UP))
    remap(directory, lambda names: names.pop(UP))
    return UP, "missing"


def stale_copy(directory: Path) -> tuple[str, ...]:
    other = next(key for key, file in mapping(directory).items() if file != mapping(directory)[NORM])
    file = rewrite(directory, other, lambda tensors: tensors.update({NORM: torch.ones(48)}))
    return file, NORM, "stale"


def surplus_tensor(directory: Path) -> tuple[str, ...]:
    file = rewrite(directory, NORM, lambda tensors: tensors.update({"model.layers.1.extra.weight": torch.ones(3)}))
    remap(directory, lambda names: names.update({"model.layers.1.extra.weight": file}))
    return file, "model.layers.1.extra.weight", "no parameter"


def unindexed_tensor(directory: Path) -> tuple[str, ...]:
    file = rewrite(directory, NORM, lambda tensors: tensors.update({"model.extra": torch.ones(3)}))
    return file, "model.extra", "stale"


def wrong_shape(directory: Path) -> tuple[str, ...]:
    return rewrite(directory, UP, lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()})), UP, "[48, 28]"


def integer_weight(directory: Path) -> tuple[str, ...]:
    return rewrite(directory, UP, lambda tensors: tensors.update({UP: tensors[UP].int()})), UP, "I32"


def quantised_weight(directory: Path) -> tuple[str, ...]:
    file = rewrite(directory, UP, lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)}))
    return file, UP, "F8_E4M3"


def not_a_number(directory: Path) -> tuple[str, ...]:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][3, 5] = float("nan")

    return rewrite(directory, UP, poison), UP, "NaN"


def infinity(directory: Path) -> tuple[str, ...]:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NORM][7] = float("-inf")

    return rewrite(directory, NORM, poison), NORM, "infinite"


def unknown_dtype(directory: Path) -> tuple[str, ...]:
    return patch_header(directory, NORM, lambda header: header[NORM].update(dtype="F12")), NORM, "F12"


def negative_shape(directory: Path) -> tuple[str, ...]:
    return patch_header(directory, NORM, lambda header: header[NORM].update(shape=[-48])), NORM, "shape"


def overlapping_offsets(directory: Path) -> tuple[str, ...]:
    def shift(header: dict[str, Any]) -> None:
        begin, end = header[NORM]["data_offsets"]
        header[NORM]["data_offsets"] = [begin - 4, end - 4] if begin else [begin + 4, end + 4]

    return patch_header(directory, NORM, shift), NORM


def span_too_short(directory: Path) -> tuple[str, ...]:
    def shrink(header: dict[str, Any]) -> None:
        begin, end = header[NORM]["data_offsets"]
        header[NORM]["data_offsets"] = [begin, end - 4]

    return patch_header(directory, NORM, shrink), NORM, "needs 192"


def duplicate_key(directory: Path) -> tuple[str, ...]:
    path = directory / INDEX
    text = path.read_text()
    line = f'"{NORM}": "{mapping(directory)[NORM]}"'
    path.write_text(text.replace(line, f"{line}, {line}"))
    return INDEX, NORM, "twice"


def path_traversal(directory: Path) -> tuple[str, ...]:
    remap(directory, lambda names: names.update({NORM: "../outside.safetensors"}))
    return INDEX, NORM, "../outside.safetensors"


def absolute_path(directory: Path) -> tuple[str, ...]:
    remap(directory, lambda names: names.update({NORM: "/etc/model.safetensors"}))
    return INDEX, NORM, "plain"


def empty_index(directory: Path) -> tuple[str, ...]:
    (directory / INDEX).write_text("{}")
    return INDEX, "weight_map"


def index_not_json(directory: Path) -> tuple[str, ...]:
    (directory / INDEX).write_text("{" * 100000)
    return INDEX, "not a valid index"


def second_checkpoint(directory: Path) -> tuple[str, ...]:
    save_file({NORM: torch.ones(48)}, directory / "model.safetensors")
    return "model.safetensors", "second checkpoint"


def no_weights(directory: Path) -> tuple[str, ...]:
    (directory / INDEX).unlink()
    return INDEX, "neither"


DAMAGES: tuple[Damage, ...] = (
    truncated_tail, truncated_header, empty_file, absurd_header_length, metadata_no_object,
    header_not_json, trailing_bytes, missing_file,
    missing_tensor, missing_from_index_and_file, stale_copy, surplus_tensor, unindexed_tensor, wrong_shape,
    integer_weight, quantised_weight, not_a_number, infinity, unknown_dtype, negative_shape,
    overlapping_offsets, span_too_short,
    duplicate_key, path_traversal, absolute_path, empty_index, index_not_json, second_checkpoint, no_weights,
)  # fmt: skip


@pytest.mark.requirement(15)
@pytest.mark.requirement(11)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_checkpoint_is_refused_with_file_and_tensor(damage: Damage, copied: Callable[[str], Path]) -> None:
    directory = copied("qwen3_moe")
    expected = damage(directory)
    with pytest.raises(CheckpointError) as refusal:
        Engine.open(directory)
    message = str(refusal.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


@pytest.mark.requirement(15)
def test_value_beyond_float16_is_refused_in_float16_only(copied: Callable[[str], Path]) -> None:
    directory = copied("qwen3_moe")

    def stretch(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NORM][7] = 1e5

    rewrite(directory, NORM, stretch)
    Engine.open(directory, EngineOptions(precision="bf16")).close()
    with pytest.raises(CheckpointError, match="beyond the range"):
        Engine.open(directory, EngineOptions(precision="fp16"))


def test_tied_head_must_equal_the_embedding(copied: Callable[[str], Path]) -> None:
    directory = copied("qwen3")
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    file = rewrite(directory, embed, lambda tensors: tensors.update({head: tensors[embed].clone()}))
    remap(directory, lambda names: names.update({head: file}))
    with Engine.open(directory) as engine:
        assert any(head in warning for warning in engine.load_report.warnings)
    rewrite(directory, embed, lambda tensors: tensors.update({head: tensors[head] + 1}))
    with pytest.raises(CheckpointError, match=f"{file}.*{head}.*tie_word_embeddings"):
        Engine.open(directory)


def spec_of(directory: Path) -> ModelSpec:
    return spec_from_config(read_config(directory))


@pytest.mark.requirement(11)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_index_lists_every_tensor_once_with_place_and_size(family: str, checkpoints: Callable[[str], Path]) -> None:
    """Against the safetensors library's own reading of the same files."""
    directory = checkpoints(family)
    index = WeightIndex.read(directory)
    stored = {
        name: (file, tensor)
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    assert set(index.entries) == set(stored) and len(index.files) >= 2
    for name, entry in index.entries.items():
        file, tensor = stored[name]
        assert (entry.file, entry.shape, entry.nbytes) == (file, tuple(tensor.shape), tensor.nbytes)
        assert entry.nbytes == tensor.numel() * DTYPE_BYTES[entry.dtype]
        raw = file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        assert raw == tensor.numpy().tobytes()


@pytest.mark.requirement(17)
@pytest.mark.parametrize("workers", [1, 4])
def test_load_places_every_parameter_and_reports_what_it_did(workers: int, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("deepseek_v3")
    index = WeightIndex.read(directory)
    loader = Loader(index, spec_of(directory), torch.float32, workers)
    report = loader.load()
    stored = {name: tensor for file in index.files for name, tensor in load_file(file).items()}
    for parameter in expected_parameters(spec_of(directory)):
        buffer = loader.parameters[parameter.buffer]
        held = buffer if parameter.expert < 0 else buffer[parameter.expert]
        assert torch.equal(held, stored[parameter.source]), parameter.name
    assert report.tensors == len(stored) and report.files == len(index.files)
    assert report.bytes == index.nbytes
    assert report.seconds > 0
    assert 0 < report.io_share < 1
    assert report.bytes_per_second == pytest.approx(report.bytes / report.seconds)
    assert report.largest == max(float(tensor.abs().max()) for tensor in stored.values())


@pytest.mark.requirement(15)
def test_a_parameter_that_is_skipped_or_written_twice_is_noticed(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoints("mixtral")
    assign = Loader.assign
    victim = "layer.1.moe.experts.3.up"

    def skipping(loader: Loader, parameter: str, tensor: torch.Tensor) -> None:
        if parameter != victim:
            assign(loader, parameter, tensor)

    def repeating(loader: Loader, parameter: str, tensor: torch.Tensor) -> None:
        assign(loader, parameter, tensor)
        if parameter == victim:
            assign(loader, parameter, tensor)

    for wrapped, rule in ((skipping, "never written"), (repeating, "twice")):
        monkeypatch.setattr(Loader, "assign", wrapped)
        with pytest.raises(CheckpointError, match=rf"layers\.1\..*experts\.3\.w3\.weight.*{rule}"):
            Engine.open(directory)


@pytest.mark.requirement(15)
def test_selection_bias_and_router_stay_in_float32(checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("deepseek_v3")
    loader = Loader(WeightIndex.read(directory), spec_of(directory), torch.bfloat16)
    loader.load()
    assert loader.parameters["layer.1.moe.router.bias"].dtype == torch.float32
    assert loader.parameters["layer.1.moe.router.weight"].dtype == torch.float32
    assert loader.parameters["layer.1.moe.experts.up"].dtype == torch.bfloat16
    stored = load_file(directory / mapping(directory)["model.layers.1.mlp.gate.e_score_correction_bias"])
    bias = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(loader.parameters["layer.1.moe.router.bias"], bias)
    assert not torch.equal(bias, bias.bfloat16().float())


def test_draft_layers_are_left_unread_with_a_warning(copied: Callable[[str], Path]) -> None:
    directory = copied("deepseek_v3")
    file = rewrite(directory, NORM, lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(48)}))
    remap(directory, lambda names: names.update({"model.layers.3.enorm.weight": file}))
    with Engine.open(directory) as engine:
        assert any("multi-token" in warning for warning in engine.load_report.warnings)


def test_whole_slice_covers_the_parameter() -> None:
    whole = ShardSlice.whole((3, 5))
    assert whole.shape == (3, 5)
    assert torch.equal(torch.arange(15).view(3, 5)[whole.index()], torch.arange(15).view(3, 5))
