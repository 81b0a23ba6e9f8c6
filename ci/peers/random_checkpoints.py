"""Let transformers write one small random checkpoint of each family, in two or more shards.

    python ci/peers/random_checkpoints.py DIR
    pytest --adapt-target=builtin --adapt-models=DIR/qwen3_moe,DIR/mixtral,DIR/deepseek_v3,DIR/llama
    pytest --adapt-target=hf:     --adapt-models=DIR/qwen3_moe,DIR/mixtral,DIR/deepseek_v3,DIR/llama

Nothing in them comes from this project: the live oracle judges a format and weights that it did not make. Norm scales
have both signs and biases are not zero, so that none of them can be left out unnoticed.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import transformers

COMMON = {
    "vocab_size": 320,
    "hidden_size": 96,
    "max_position_embeddings": 640,
    "bos_token_id": 317,
    "eos_token_id": 318,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 80,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 80,
}


def configurations() -> dict[str, transformers.PretrainedConfig]:
    return {
        "llama": transformers.LlamaConfig(
            **COMMON, intermediate_size=136, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
            attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3,
        ),
        "mixtral": transformers.MixtralConfig(
            **COMMON, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
            num_local_experts=7, num_experts_per_tok=2, sliding_window=53, rope_parameters=ROPE,
        ),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **COMMON, intermediate_size=136, moe_intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, head_dim=20, num_experts=9, num_experts_per_tok=3, norm_topk_prob=True,
            mlp_only_layers=[1], rope_parameters=ROPE,
        ),
        "deepseek_v3": transformers.DeepseekV3Config(
            **COMMON, intermediate_size=136, moe_intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=6, q_lora_rank=36, kv_lora_rank=28, qk_nope_head_dim=14, qk_rope_head_dim=12,
            v_head_dim=18, n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, n_group=3, topk_group=2,
            first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, rope_parameters=YARN,
        ),
    }  # fmt: skip


def write(directory: Path) -> None:
    for number, (name, config) in enumerate(configurations().items()):
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter, values in (*model.named_parameters(), *model.named_buffers()):
                if "inv_freq" in parameter:
                    continue
                if values.ndim == 1 and "norm" in parameter:
                    sign = torch.where(torch.rand_like(values) < 0.1, -1.0, 1.0)
                    values.copy_((1.0 + 0.3 * torch.randn_like(values)) * sign)
                elif values.ndim == 1:
                    values.normal_(0.0, 0.1)
                else:
                    values.normal_(0.0, 1.0 / math.sqrt(values.shape[-1]))
        model.save_pretrained(directory / name, max_shard_size="200KB")
        shards = len(list((directory / name).glob("*.safetensors")))
        print(f"{directory / name}: {shards} shards, {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    write(parser.parse_args().directory)
