"""config.json in both spellings, and the options that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_adapt.oracle import ModelSpec, OracleError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 60,
    "intermediate_size": 92,
    "max_position_embeddings": 8192,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 211,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 60,
    "intermediate_size": 92,
    "moe_intermediate_size": 26,
    "max_position_embeddings": 512,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 15,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 5,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 28,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 12,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 199,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "ep_size": 1,
    "torch_dtype": "bfloat16",
}
QWEN_MOE: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key != "rope_parameters"},
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 13,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 26,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": True,
}


def respelt(config: dict[str, Any]) -> dict[str, Any]:
    """The same model in the other spelling."""
    config = dict(config)
    if "rope_parameters" in config:
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        return {**config, "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    rope = dict(config.pop("rope_scaling"))
    rope["rope_type"] = rope.pop("type")
    return {**config, "rope_parameters": {**rope, "rope_theta": config.pop("rope_theta")}, "dtype": "bfloat16"}


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_both_spellings_are_one_model(config: dict[str, Any]) -> None:
    assert ModelSpec.from_config(config) == ModelSpec.from_config(respelt(config))
    assert ModelSpec.from_config(config).canonical() == ModelSpec.from_config(respelt(config)).canonical()


def test_canonical_form_sees_what_matters_and_nothing_else() -> None:
    plain = ModelSpec.from_config(LLAMA).canonical()
    assert ModelSpec.from_config({**LLAMA, "bos_token_id": 9, "use_cache": False}).canonical() == plain
    assert ModelSpec.from_config({**LLAMA, "rms_norm_eps": 1e-6}).canonical() != plain


def test_boundaries_come_from_windows_and_rotary_ranges() -> None:
    assert ModelSpec.from_config(LLAMA).boundaries() == (2048, 8192)
    assert ModelSpec.from_config(DEEPSEEK).boundaries() == (64, 512)
    windowed = {**QWEN_MOE, "use_sliding_window": True, "sliding_window": 100}
    assert ModelSpec.from_config(windowed).boundaries() == (100, 8192)
    assert ModelSpec.from_config({**windowed, "use_sliding_window": False}).boundaries() == (8192,)


def test_sparse_and_dense_layers() -> None:
    spec = ModelSpec.from_config(QWEN_MOE)
    assert [layer.mixture for layer in spec.layers] == [False, True, False, False, False, True]
    assert [layer.mixture for layer in ModelSpec.from_config(DEEPSEEK).layers] == [False, True, True]


def test_kimi_k2_is_deepseek_v3_under_its_own_name() -> None:
    kimi = ModelSpec.from_config({**DEEPSEEK, "architectures": ["KimiK2ForCausalLM"], "n_group": 1, "topk_group": 1})
    plain = ModelSpec.from_config({**DEEPSEEK, "n_group": 1, "topk_group": 1})
    assert replace(kimi, architecture=plain.architecture) == plain


def test_experts_in_either_spelling() -> None:
    other = dict(QWEN_MOE)
    other["num_local_experts"] = other.pop("num_experts")
    assert ModelSpec.from_config(other) == ModelSpec.from_config(QWEN_MOE)
    with pytest.raises(OracleError, match="num_experts.*disagree"):
        ModelSpec.from_config({**QWEN_MOE, "num_local_experts": 12})


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*known are LlamaForCausalLM"),
        (LLAMA, {"architectures": None}, "architectures: None"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act: 'gelu'.*known: 'silu'"),
        (LLAMA, {"logit_scale": 0.5}, "logit_scale: 0.5 is no known option.*known are"),
        (LLAMA, {"sliding_window": 100}, "sliding_window: 100"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA, {"num_key_value_heads": 4}, "4 does not divide 6"),
        (LLAMA, {"hidden_size": "sixty"}, "hidden_size: 'sixty'"),
        (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5'"),
        (LLAMA, {"head_dim": 11}, "11.*odd"),
        (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "longrope.*default, yarn, llama3"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor: missing"),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method: 'greedy'"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
        (DEEPSEEK, {"n_group": 4}, "n_group: 4"),
        (DEEPSEEK, {"topk_group": 1}, "topk_group: 1"),
        (DEEPSEEK, {"index_topk": 2048}, "index_topk: 2048"),
        (DEEPSEEK, {"n_routed_experts": None}, "n_routed_experts: None"),
        (QWEN_MOE, {"num_experts_per_tok": 14}, "14 of 13 experts"),
        (QWEN_MOE, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, "max_window_layers: 3"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(OracleError, match=message):
        ModelSpec.from_config({**config, **change})
