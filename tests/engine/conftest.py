"""Small random checkpoints of every family, written by transformers itself, and its logits on a random prompt."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapt_engine import Engine, EngineOptions, SequenceRequest, SequenceResult

VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
# Every dimension distinct and awkward, biases non-zero, scales not one: what coincides cannot be told apart.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {
            "intermediate_size": 72,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {"intermediate_size": 72, "num_hidden_layers": 2, "head_dim": 10, "tie_word_embeddings": True},
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 11,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "intermediate_size": 72,
            "moe_intermediate_size": 28,
            "num_hidden_layers": 3,
            "head_dim": 10,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "intermediate_size": 72,
            "moe_intermediate_size": 28,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": 22,
            "kv_lora_rank": 18,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 14,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
}
# Sizes that many ranks can share: query heads for tp up to 8 (over fewer KV heads), more experts than 16, and
# neither layers, experts, feed-forward nor vocabulary rows divide evenly.
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe_wide": (
        "Qwen3MoeConfig",
        {
            **FAMILIES["qwen3_moe"][1],
            "num_attention_heads": 8,
            "num_hidden_layers": 5,
            "num_experts": 19,
            "intermediate_size": 71,
            "moe_intermediate_size": 27,
        },
    ),
    "qwen3_moe_three": (
        "Qwen3MoeConfig",
        {**FAMILIES["qwen3_moe"][1], "num_key_value_heads": 3, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "deepseek_v3_wide": (
        "DeepseekV3Config",
        {
            **FAMILIES["deepseek_v3"][1],
            "num_attention_heads": 24,
            "num_key_value_heads": 24,
            "num_hidden_layers": 5,
            "n_routed_experts": 20,
            "attention_bias": True,
        },
    ),
}
# Feed-forward rows in eight segments or more, the last of them short: what mode strict needs for eight ranks.
WIDE |= {
    "qwen3_moe_eight": ("Qwen3MoeConfig", {**WIDE["qwen3_moe_wide"][1], "intermediate_size": 125}),
    "deepseek_v3_eight": (
        "DeepseekV3Config",
        {**WIDE["deepseek_v3_wide"][1], "intermediate_size": 125, "moe_intermediate_size": 61, "num_hidden_layers": 3},
    ),
}
MOE_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requirement(number): requirement of the project that the test proves")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def write_checkpoint(family: str, directory: Path) -> None:
    """A random model of ``family`` in several shards. Weights lie on the grid of float16 and bfloat16 alike."""
    torch.manual_seed(len(family))
    name, own = (FAMILIES | WIDE)[family]
    config = getattr(transformers, name)(**{**_COMMON, **own})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for label, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in label:
                continue
            noise = torch.randn(value.shape)
            if value.dim() == 1:
                value.copy_((0.3 * noise + (1.0 if "norm" in label else 0.0)).bfloat16().float())
            else:
                # Router matrices are wide so that near ties, which rounding may flip, are rare.
                spread = 0.8 if label.endswith("gate.weight") else 0.1
                value.copy_((spread * noise).bfloat16().float())
            if label.endswith("e_score_correction_bias"):
                value.copy_(7.0 + 0.12 * noise)
    model.save_pretrained(directory, max_shard_size="60KB")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoints(family)``: directory of that family's checkpoint, written once a session."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(family: str) -> Path:
        path = root / family
        if not path.is_dir():
            write_checkpoint(family, path)
        return path

    return get


@pytest.fixture
def copied(checkpoints: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """``copied(family)``: a private copy that a test may damage."""

    def get(family: str) -> Path:
        return Path(shutil.copytree(checkpoints(family), tmp_path / family))

    return get


@pytest.fixture(scope="session")
def prompt() -> tuple[int, ...]:
    """70 random tokens: past the window of the Mixtral and the original context of the scaled rotary models."""
    torch.manual_seed(99)
    return tuple(torch.randint(0, VOCAB, (70,)).tolist())


@pytest.fixture(scope="session")
def official(checkpoints: Callable[[str], Path], prompt: tuple[int, ...]) -> Callable[[str, torch.dtype], torch.Tensor]:
    """``official(family, dtype)``: transformers' eager logits at every position of the prompt, float64 [70, V]."""
    kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(family: str, dtype: torch.dtype) -> torch.Tensor:
        if (family, dtype) not in kept:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoints(family), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            )
            with torch.inference_mode():
                kept[family, dtype] = model(torch.tensor([prompt])).logits[0].double()
        return kept[family, dtype]

    return get


@pytest.fixture
def rounding(official: Callable[[str, torch.dtype], torch.Tensor]) -> Callable[[str], float]:
    """``rounding(family)``: how far two correct float32 evaluations may lie apart.

    Each may be twice as far from float64 as transformers' own float32 is (test_families proves that of ours), so
    two of them are within four times.
    """

    def get(family: str) -> float:
        return 4 * float((official(family, torch.float32) - official(family, torch.float64)).abs().max())

    return get


@pytest.fixture
def opened(checkpoints: Callable[[str], Path]) -> Any:
    """``opened(family, **options)``: an engine, closed when the test ends."""
    engines: list[Engine] = []

    def get(family: str, **options: Any) -> Engine:
        engine = Engine.open(checkpoints(family), EngineOptions(**{"max_context": 256, **options}))
        engines.append(engine)
        return engine

    yield get
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def answer() -> Callable[..., SequenceResult]:
    """``answer(engine, prompt, **request)``: result of one request, which must succeed."""

    def get(engine: Engine, tokens: tuple[int, ...], **request: Any) -> SequenceResult:
        (result,) = engine.run([SequenceRequest("only", tokens, **request)])
        assert result.error is None, result.error
        return result

    return get


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """``edit_config(directory, key=value)``: rewrite config.json; a value of ``...`` removes the key."""

    def edit(directory: Path, **changes: Any) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        for key, value in changes.items():
            if value is ...:
                config.pop(key, None)
            else:
                config[key] = value
        path.write_text(json.dumps(config))

    return edit
