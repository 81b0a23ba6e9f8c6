"""Small random checkpoints written by transformers, and what transformers says about them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Crosses the oracle's row block (256), every window and every original rotary range below.
TOKENS = 300

LLAMA: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 60,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "rms_norm_eps": 2e-3,
    "max_position_embeddings": 512,
    "rope_theta": 1234.0,
}
QWEN: dict[str, Any] = dict(
    LLAMA,
    vocab_size=197,
    moe_intermediate_size=26,
    num_experts=13,
    num_experts_per_tok=3,
    attention_bias=True,
    num_hidden_layers=4,
)
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 60,
    "intermediate_size": 92,
    "moe_intermediate_size": 26,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_routed_experts": 15,
    "num_experts_per_tok": 4,
    "n_group": 5,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 28,
    "kv_lora_rank": 22,
    "qk_rope_head_dim": 12,
    "qk_nope_head_dim": 10,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 1234.0,
    "rms_norm_eps": 2e-3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 1.3,
    "beta_fast": 16,
    "beta_slow": 2,
}

# name -> (configuration class in transformers, its arguments, centre of the selection biases)
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama-tied-biases": (
        "LlamaConfig",
        dict(LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        0.0,
    ),
    "llama-llama3-rope": ("LlamaConfig", dict(LLAMA, rope_scaling=LLAMA3), 0.0),
    "qwen3-half-sliding": (
        "Qwen3Config",
        dict(LLAMA, use_sliding_window=True, sliding_window=37, max_window_layers=1),
        0.0,
    ),
    "qwen3moe-renorm-yarn-dense-layers": (
        "Qwen3MoeConfig",
        dict(QWEN, norm_topk_prob=True, rope_scaling=YARN, mlp_only_layers=[1]),
        0.0,
    ),
    "qwen3moe-plain-window-tied": (
        "Qwen3MoeConfig",
        dict(
            QWEN,
            norm_topk_prob=False,
            use_sliding_window=True,
            sliding_window=37,
            decoder_sparse_step=2,
            tie_word_embeddings=True,
        ),
        0.0,
    ),
    "mixtral-window": (
        "MixtralConfig",
        dict(LLAMA, num_local_experts=7, num_experts_per_tok=3, sliding_window=41),
        0.0,
    ),
    "mixtral-full": ("MixtralConfig", dict(LLAMA, num_local_experts=5, num_experts_per_tok=2), 0.0),
    "deepseek-groups-yarn-high-bias": ("DeepseekV3Config", dict(DEEPSEEK, rope_scaling=DEEPSEEK_YARN), 7.0),
    "deepseek-low-bias-no-qlora": (
        "DeepseekV3Config",
        dict(DEEPSEEK, q_lora_rank=None, rope_interleave=False, norm_topk_prob=False, attention_bias=True),
        -7.0,
    ),
    "deepseek-one-group": ("DeepseekV3Config", dict(DEEPSEEK, n_group=1, topk_group=1, attention_bias=True), 7.0),
}


@dataclass(frozen=True)
class Heard:
    """Logits float64 [T, V] and expert ids [T, k] by layer, as transformers gave them."""

    logits: np.ndarray
    ids: dict[int, np.ndarray]


@dataclass(frozen=True)
class Written:
    """A checkpoint that transformers wrote, and the tokens that it is run on."""

    name: str
    directory: Path
    tokens: tuple[int, ...]

    def hear(self, precision: str) -> Heard:
        """What transformers' eager code says about this checkpoint in a precision; run once, then remembered."""
        return _hear(self, precision)


@functools.cache
def _hear(written: Written, precision: str) -> Heard:
    import torch
    import transformers

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        written.directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    ids: dict[int, np.ndarray] = {}

    def listen(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            ids[layer] = np.sort(output[2].numpy(), axis=-1)

        return hook

    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(listen(number))
    with torch.no_grad():
        return Heard(model(torch.tensor([written.tokens])).logits[0].double().numpy(), ids)


def _randomise(model: Any, centre: float) -> None:
    """Fill every parameter: scales of both signs, biases far from 0, all on the grid that bf16 and fp16 share."""
    import torch

    source = torch.Generator().manual_seed(20)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        drawn = torch.randn(value.shape, generator=source, dtype=torch.float32)
        if "e_score_correction_bias" in name:
            drawn = centre + 0.12 * drawn
        elif "norm" in name:
            drawn = (0.6 + 0.8 * torch.rand(value.shape, generator=source)) * torch.sign(drawn)
        elif value.ndim == 1:
            drawn = 0.4 * drawn
        elif "embed" not in name:
            drawn = drawn * (1.1 / math.sqrt(value.shape[-1]))
        drawn = drawn.to(torch.bfloat16).float()
        drawn[drawn.abs() < 2.0**-17] = 0.0
        value.data.copy_(drawn)


@pytest.fixture(scope="session")
def torch_stack() -> None:
    """torch and transformers, which these tests measure against. Without them they fail: an oracle that was not
    checked is not checked."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        pytest.fail(f"the oracle's checks need torch and transformers: pip install -e '.[hf]' ({error})")
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=sorted(CASES))
def written(
    request: pytest.FixtureRequest, torch_stack: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Written]:
    """Each case of `CASES` as a checkpoint of several shards."""
    import torch
    import transformers

    kind, arguments, centre = CASES[request.param]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**arguments))
    _randomise(model, centre)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory, max_shard_size="100KB")
    tokens = np.random.default_rng(7).integers(0, arguments["vocab_size"], TOKENS)
    yield Written(request.param, directory, tuple(int(token) for token in tokens))
