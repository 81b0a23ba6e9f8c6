"""Write a Hugging Face checkpoint (Llama, Mixtral, Qwen3-MoE) as GGUF for llama.cpp, exactly.

    python to_gguf.py CHECKPOINT_DIR OUT.gguf [--type f32|bf16|q8_0]

Needs numpy alone. Weights keep their values: bf16 to F32 is exact, and one-dimensional tensors and routers are
always F32, as llama.cpp expects. q8_0 rounds each block of 32 values to a scale of its own, as llama.cpp's quantiser
does. Tokenizers: byte-level BPE, and the conformance models' one character per token.
Layout of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
U32, I32, F32_VALUE, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
GGML_F32, GGML_Q8_0, GGML_BF16 = 0, 8, 30
KINDS = {"f32": GGML_F32, "bf16": GGML_BF16, "q8_0": GGML_Q8_0}
BLOCK = 32  # values that share a scale in Q8_0
NORMAL, UNUSED, USER_DEFINED = 1, 5, 4
ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}


class Checkpoint:
    """config.json and tensors of a directory; tensors come as float32."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
        self._where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    self._where[name] = (path, 8 + length, entry)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._where:
            raise SystemExit(f"{self.directory}: tensor {name} is missing")
        path, base, entry = self._where[name]
        start, stop = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(base + start)
            raw = file.read(stop - start)
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] in ("F32", "F16"):
            array = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]]).astype(np.float32)
        else:
            raise SystemExit(f"{path.name}: tensor {name} has dtype {entry['dtype']}; F32, F16 and BF16 are read")
        return array.reshape(entry["shape"])


def rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in either spelling of config.json."""
    found = dict(config.get("rope_scaling") or {})
    found.update(config.get("rope_parameters") or {})
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def head_width(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def metadata(checkpoint: Checkpoint) -> Iterator[tuple[str, int, Any]]:
    config = checkpoint.config
    family = config["model_type"]
    arch = ARCHITECTURES[family]
    width = head_width(config)
    yield "general.architecture", STRING, arch
    yield "general.name", STRING, checkpoint.directory.name
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "vocab_size": config["vocab_size"],
    }
    if family == "mixtral":
        numbers.update(
            {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
        )
    if family == "qwen3_moe":
        numbers.update({"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]})
        numbers["expert_feed_forward_length"] = config["moe_intermediate_size"]
    for key, value in numbers.items():
        yield f"{arch}.{key}", U32, value
    yield f"{arch}.attention.layer_norm_rms_epsilon", F32_VALUE, config["rms_norm_eps"]
    yield f"{arch}.rope.freq_base", F32_VALUE, rope(config)["rope_theta"]
    yield from tokenizer(checkpoint)


def tokenizer(checkpoint: Checkpoint) -> Iterator[tuple[str, int, Any]]:
    content = json.loads((checkpoint.directory / "tokenizer.json").read_bytes())
    model, added = content["model"], content.get("added_tokens", [])
    size = checkpoint.config["vocab_size"]
    texts = [f"<|unused{i}|>" for i in range(size)]
    kinds = [UNUSED] * size
    for text, number in model["vocab"].items():
        texts[number], kinds[number] = text, NORMAL
    for item in added:  # special ones too: llama.cpp shows control tokens as empty text, which no reader can tell apart
        texts[item["id"]], kinds[item["id"]] = item["content"], USER_DEFINED
    merges = [item if isinstance(item, str) else " ".join(item) for item in model.get("merges") or []]
    unknown = next((i for i, text in enumerate(texts) if text == model.get("unk_token")), None)
    yield "tokenizer.ggml.model", STRING, "gpt2" if merges else "llama"
    yield "tokenizer.ggml.pre", STRING, "smollm" if merges else "default"
    yield "tokenizer.ggml.tokens", ARRAY, (STRING, texts)
    if merges:
        yield "tokenizer.ggml.merges", ARRAY, (STRING, merges)
    else:
        yield "tokenizer.ggml.scores", ARRAY, (F32_VALUE, [0.0] * size)
    yield "tokenizer.ggml.token_type", ARRAY, (I32, kinds)
    # No begin token is added, so its id means nothing to the model; but llama-cpp-python leaves every token with that
    # id out of its log-probabilities. The last id of the vocabulary is seldom used.
    yield "tokenizer.ggml.bos_token_id", U32, size - 1
    for name in ("eos", "pad"):
        value = checkpoint.config.get(f"{name}_token_id")
        if isinstance(value, int):
            yield f"tokenizer.ggml.{name == 'pad' and 'padding' or name}_token_id", U32, value
    if unknown is not None:
        yield "tokenizer.ggml.unknown_token_id", U32, unknown
    yield "tokenizer.ggml.add_bos_token", BOOL, False
    yield "tokenizer.ggml.add_eos_token", BOOL, False
    yield "tokenizer.ggml.add_space_prefix", BOOL, False


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection from the half-split rotary order of Hugging Face to llama.cpp's interleaved one."""
    width = weight.shape[0] // heads
    return weight.reshape(heads, 2, width // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    config = checkpoint.config
    permuted = ARCHITECTURES[config["model_type"]] == "llama"
    yield "token_embd.weight", checkpoint.tensor("model.embed_tokens.weight")
    yield "output_norm.weight", checkpoint.tensor("model.norm.weight")
    if not config.get("tie_word_embeddings") and "lm_head.weight" in checkpoint:
        yield "output.weight", checkpoint.tensor("lm_head.weight")
    factors = frequency_factors(config)
    if factors is not None:
        yield "rope_freqs.weight", factors
    for number in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{number}", f"blk.{number}"
        yield f"{ours}.attn_norm.weight", checkpoint.tensor(f"{theirs}.input_layernorm.weight")
        yield f"{ours}.ffn_norm.weight", checkpoint.tensor(f"{theirs}.post_attention_layernorm.weight")
        for letter, name in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
            for part in ("weight", "bias"):
                full = f"{theirs}.self_attn.{letter}_proj.{part}"
                if part == "bias" and full not in checkpoint:
                    continue
                value = checkpoint.tensor(full)
                if permuted and letter in "qk":
                    heads = config["num_attention_heads"] if letter == "q" else config["num_key_value_heads"]
                    value = interleaved(value, heads)
                yield f"{ours}.{name}.{part}", value
        for name in ("q_norm", "k_norm"):
            if f"{theirs}.self_attn.{name}.weight" in checkpoint:
                yield f"{ours}.attn_{name}.weight", checkpoint.tensor(f"{theirs}.self_attn.{name}.weight")
        yield from feed_forward(checkpoint, theirs, ours)


def feed_forward(checkpoint: Checkpoint, theirs: str, ours: str) -> Iterator[tuple[str, np.ndarray]]:
    if f"{theirs}.mlp.gate_proj.weight" in checkpoint:
        for name in ("gate", "up", "down"):
            yield f"{ours}.ffn_{name}.weight", checkpoint.tensor(f"{theirs}.mlp.{name}_proj.weight")
        return
    old = f"{theirs}.block_sparse_moe.gate.weight" in checkpoint
    block = f"{theirs}.block_sparse_moe" if old else f"{theirs}.mlp"
    spelled = {"gate": "w1", "up": "w3", "down": "w2"} if old else {n: f"{n}_proj" for n in ("gate", "up", "down")}
    yield f"{ours}.ffn_gate_inp.weight", checkpoint.tensor(f"{block}.gate.weight")
    count = checkpoint.tensor(f"{block}.gate.weight").shape[0]
    for name, spelling in spelled.items():
        stacked = [checkpoint.tensor(f"{block}.experts.{expert}.{spelling}.weight") for expert in range(count)]
        yield f"{ours}.ffn_{name}_exps.weight", np.stack(stacked)


def frequency_factors(config: dict[str, Any]) -> np.ndarray | None:
    """Divisors of the rotary frequencies for the llama3 scaling; None for plain rotation."""
    parameters = rope(config)
    if parameters["rope_type"] == "default":
        return None
    if parameters["rope_type"] != "llama3":
        raise SystemExit(f"rope type {parameters['rope_type']} is not converted; default and llama3 are")
    width, factor = head_width(config), parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    factors = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (i / width)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(float(factor))
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def kind_of(name: str, value: np.ndarray, wanted: int) -> int:
    if wanted == GGML_Q8_0 and value.shape[-1] % BLOCK:
        raise SystemExit(f"{name}: rows of {value.shape[-1]} values have no whole blocks of {BLOCK}, which q8_0 takes")
    return GGML_F32 if value.ndim == 1 or "ffn_gate_inp" in name else wanted


def encoded(value: np.ndarray, kind: int) -> bytes:
    if kind == GGML_F32:
        return np.ascontiguousarray(value, "<f4").tobytes()
    if kind == GGML_Q8_0:
        blocks = np.ascontiguousarray(value, np.float32).reshape(-1, BLOCK)
        scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        whole = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)).astype(np.int8)
        return np.hstack([scale.astype("<f2").view(np.int8), whole]).tobytes()
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    return rounded.astype("<u2").tobytes()


def size_of(value: np.ndarray, kind: int) -> int:
    """Bytes of `encoded`."""
    if kind == GGML_Q8_0:
        return value.size // BLOCK * (2 + BLOCK)
    return value.size * (4 if kind == GGML_F32 else 2)


def write_string(file: BinaryIO, text: str) -> None:
    raw = text.encode("utf-8")
    file.write(struct.pack("<Q", len(raw)) + raw)


def write_value(file: BinaryIO, kind: int, value: Any) -> None:
    if kind == STRING:
        write_string(file, value)
    elif kind == ARRAY:
        inner, items = value
        file.write(struct.pack("<IQ", inner, len(items)))
        for item in items:
            write_value(file, inner, item)
    else:
        file.write(struct.pack({U32: "<I", I32: "<i", F32_VALUE: "<f", BOOL: "<?"}[kind], value))


def convert(directory: Path, out: Path, wanted: int) -> None:
    checkpoint = Checkpoint(directory)
    family = checkpoint.config.get("model_type")
    if family not in ARCHITECTURES:
        raise SystemExit(f"{directory}: model_type {family} is not converted; {', '.join(ARCHITECTURES)} are")
    if family == "qwen3_moe" and not checkpoint.config.get("norm_topk_prob"):
        raise SystemExit(f"{directory}: llama.cpp always renormalises Qwen3-MoE weights, this model does not")
    values = list(metadata(checkpoint))
    contents = list(tensors(checkpoint))
    partial = out.with_name(f"{out.name}.{os.getpid()}.part")
    with partial.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(contents), len(values)))
        for key, kind, value in values:
            write_string(file, key)
            file.write(struct.pack("<I", kind))
            write_value(file, kind, value)
        offset = 0
        for name, value in contents:
            kind = kind_of(name, value, wanted)
            write_string(file, name)
            file.write(struct.pack("<I", value.ndim) + struct.pack(f"<{value.ndim}Q", *reversed(value.shape)))
            file.write(struct.pack("<IQ", kind, offset))
            offset += -(-size_of(value, kind) // ALIGNMENT) * ALIGNMENT
        for name, value in contents:
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(encoded(value, kind_of(name, value, wanted)))
        file.write(bytes(-file.tell() % ALIGNMENT))
    partial.replace(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=sorted(KINDS), default="f32")
    arguments = parser.parse_args()
    convert(arguments.checkpoint, arguments.out, KINDS[arguments.type])
