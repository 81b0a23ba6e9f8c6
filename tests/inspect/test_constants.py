"""Constants that the requirements state, computed by the code that users see."""

from __future__ import annotations

import pytest

from pytest_adapt.inspect import reference_scores
from pytest_adapt.inspect.config import from_config
from pytest_adapt.inspect.memory import Load, budget, kv_bytes_per_token, weight_bytes
from pytest_adapt.inspect.structure import Structure
from pytest_adapt.layout import SINGLE


@pytest.fixture(scope="module")
def large() -> Structure:
    """The shape that the requirements compute with: hidden 8192, 128 layers, 8 KV heads of width 128."""
    return from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 1 << 20,
        }
    )


@pytest.mark.requirement(26)
def test_kv_bytes_per_token(large: Structure) -> None:
    assert kv_bytes_per_token(large) == 2 * 128 * 8 * 128 * 2 == 524_288
    assert kv_bytes_per_token(large, "fp8") == kv_bytes_per_token(large, "int8") == 262_144


@pytest.mark.requirement(26)
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1_024, 512 * 2**20),
        (10_000, 5_242_880_000),
        (100_000, 52_428_800_000),
        (1_000_000, 524_288_000_000),
        (1 << 20, 512 * 2**30),
    ],
)
def test_kv_of_one_request(large: Structure, tokens: int, expected: int) -> None:
    assert budget(large, SINGLE, Load(tokens)).kv == expected


@pytest.mark.requirement(26)
def test_kv_at_the_baseline_point(large: Structure) -> None:
    assert budget(large, SINGLE, Load(1024 + 128, batch=4)).kv == 2_415_919_104


@pytest.mark.requirement(24)
@pytest.mark.parametrize(("precision", "terabytes"), [("bf16", 6.0), ("int8", 3.0), ("fp8", 3.0), ("int4", 1.5)])
def test_weights_of_three_trillion_parameters(precision: str, terabytes: float) -> None:
    assert weight_bytes(3 * 10**12, precision) == terabytes * 1e12


@pytest.mark.requirement(22)
@pytest.mark.parametrize("tokens", [100_000, 1_000_000])
def test_no_term_grows_with_the_square_of_the_context(large: Structure, tokens: int) -> None:
    """Naive scores of one head would take 20 GB at 100K and 2 TB at 1M."""
    naive = tokens * tokens * 2
    assert naive == {100_000: 20 * 10**9, 1_000_000: 2 * 10**12}[tokens]
    item = budget(large, SINGLE, Load(tokens))
    assert item.activations + item.temporary < naive / 10


@pytest.mark.requirement(128)
def test_reference_scores_carry_their_provenance() -> None:
    scores = {item["value"]: item for item in reference_scores()["scores"]}
    assert set(scores) == {65.7, 61.2, 55.95}
    assert all(item["provenance"] for item in scores.values())
    assert scores[55.95]["status"] == "unassigned", "the specification does not say which benchmark it belongs to"
