"""Configurations that this engine does not compute: refused by key, value and rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapt_engine import CheckpointError, ConfigError, Engine, EngineError, EngineOptions
from adapt_engine.config import MoESpec
from adapt_engine.families import read_config, spec_from_config

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}

REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, ("architectures", "GPT2LMHeadModel", "LlamaForCausalLM")),
    ("llama", {"architectures": ...}, ("architectures",)),
    ("llama", {"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
    ("llama", {"num_hidden_layers": ...}, ("num_hidden_layers", "missing")),
    ("llama", {"num_hidden_layers": "3"}, ("num_hidden_layers", "integer")),
    ("llama", {"num_hidden_layers": 10**9}, ("num_hidden_layers",)),
    ("llama", {"hidden_size": -48, "head_dim": 8}, ("hidden_size", "-48")),
    ("llama", {"num_key_value_heads": 4}, ("num_key_value_heads", "divide")),
    ("llama", {"num_attention_heads": 7, "head_dim": None}, ("num_attention_heads", "hidden_size")),
    ("llama", {"head_dim": 7}, ("head_dim", "even")),
    ("llama", {"rms_norm_eps": float("nan")}, ("rms_norm_eps", "finite")),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "fp8")),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, ("rope_type", "longrope", "yarn")),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ("factor", "missing")),
    ("llama", {"rope_theta": 5e5}, ("rope_theta", "rope_parameters")),
    ("llama", {"rope_parameters": {"rope_type": "default", "surprise": 1}}, ("surprise",)),
    ("llama", {"rope_parameters": [1]}, ("rope_parameters", "object")),
    ("llama", {"attn_temperature_tuning": True}, ("attn_temperature_tuning",)),
    ("llama", {"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "true or false")),
    ("llama", {"dtype": "int8"}, ("dtype", "int8")),
    ("llama", {"eos_token_id": "</s>"}, ("eos_token_id",)),
    ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, ("layer_types", "linear_attention")),
    ("mixtral", {"sliding_window": -3}, ("sliding_window", "-3")),
    ("mixtral", {"num_experts_per_tok": 6}, ("num_experts_per_tok", "1..5")),
    ("mixtral", {"num_local_experts": 1 << 30}, ("num_experts", "65536")),
    ("mixtral", {"num_experts": 6}, ("num_experts", "disagree")),
    ("qwen3_moe", {"decoder_sparse_step": 0}, ("decoder_sparse_step",)),
    ("qwen3_moe", {"mlp_only_layers": 1}, ("mlp_only_layers",)),
    ("deepseek_v3", {"n_group": 5}, ("n_group", "divide")),
    ("deepseek_v3", {"topk_group": 5}, ("topk_group", "1..4")),
    ("deepseek_v3", {"num_experts_per_tok": 7}, ("num_experts_per_tok", "groups")),
    ("deepseek_v3", {"scoring_func": "softmax"}, ("scoring_func", "sigmoid")),
    ("deepseek_v3", {"topk_method": "greedy"}, ("topk_method", "noaux_tc")),
    ("deepseek_v3", {"qk_rope_head_dim": 5}, ("qk_rope_head_dim", "even")),
    ("deepseek_v3", {"n_group": 12, "topk_group": 4}, ("n_group", "two best")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_configuration_is_refused_with_the_key_named(
    family: str, changes: dict[str, Any], named: tuple[str, ...], copied: Callable[[str], Path], edit_config: Any
) -> None:
    directory = copied(family)
    edit_config(directory, **changes)
    with pytest.raises(ConfigError) as refusal:
        Engine.open(directory)
    message = str(refusal.value)
    assert "\n" not in message and message.startswith("config.json")
    for part in named:
        assert part in message


@pytest.mark.parametrize("text", ["", "[]", "{" * 100_000, '{"a": }'], ids=["empty", "list", "deep", "broken"])
def test_unreadable_configuration(text: str, copied: Callable[[str], Path]) -> None:
    directory = copied("llama")
    (directory / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Engine.open(directory)


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json.*not found"):
        Engine.open(tmp_path)


def test_harmless_unknown_keys_are_accepted(copied: Callable[[str], Path], edit_config: Any) -> None:
    directory = copied("llama")
    before = spec_from_config(read_config(directory))
    edit_config(directory, is_llama_config=True, unsloth_version="2025.1", attn_logit_softcapping=None, use_mrope=False)
    assert spec_from_config(read_config(directory)) == before


@pytest.mark.requirement(130)
def test_a_published_configuration_is_read_as_its_authors_publish_it() -> None:
    """DeepSeek-V3's own config.json (old spelling, MTP layer, YaRN); numbers from its repository."""
    published = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    spec = spec_from_config(published)
    sparse = [isinstance(layer.ffn, MoESpec) for layer in spec.layers]
    assert sparse == [False] * 3 + [True] * 58
    attention = spec.layers[0].attention
    # mscale(40, 1) = 0.1 ln 40 + 1; attention logits carry its square, cos and sin their ratio (1).
    assert attention.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2, rel=1e-15)
    assert attention.rope.attention_factor == 1.0
    assert spec.draft_layers == 1 and spec.dtype == "bf16"


@pytest.mark.parametrize(
    ("option", "value"),
    [("precision", "int4"), ("max_context", 0), ("page_size", 0), ("prefill_chunk", -1), ("max_batch", 2.5)],
)
def test_options_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(EngineError, match=option):
        EngineOptions(**{option: value})


@pytest.mark.parametrize(("mode", "named"), [("turbo", "fast, strict"), ("strict", "needs batch_invariant")])
def test_modes_that_cannot_be_had_are_refused(mode: str, named: str, checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(EngineError, match=f"mode.*{named}"):
        # Strict needs the native kernels.
        Engine.open(checkpoints("llama"), EngineOptions(mode=mode, native=False))
