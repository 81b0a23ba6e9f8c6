"""What `inspect` predicts from config.json alone is what the built-in engine allocates."""

from pathlib import Path

import pytest

from pytest_adapt.inspect import analyse
from pytest_adapt.inspect.memory import Load, budget, kv_bytes_per_token
from pytest_adapt.layout import SINGLE
from pytest_adapt.models import materialise
from pytest_adapt.target.protocol import Deployment
from pytest_adapt.target.registry import resolve

MODELS = ("llama-odd", "mixtral-odd", "qwen3-moe-odd", "qwen3-moe-odd-raw", "deepseek-v3-odd-pos")
SLOTS = 512


@pytest.mark.requirement(22, 70)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_prediction_and_allocation_agree(name: str, precision: str, tmp_path: Path) -> None:
    directory = materialise(name, tmp_path)
    target = resolve("builtin").create()
    try:
        target.open(Deployment(str(directory), precision=precision, max_context=SLOTS, kv_tokens=SLOTS))
        found = target.stats()
    finally:
        target.close()
    structure = analyse(directory)
    predicted = budget(structure, SINGLE, Load(SLOTS, 1, precision, precision))
    # The engine keeps router matrices and selection biases in float32 whatever the precision.
    sparse = sum(layer.sparse for layer in structure.layers)
    biased = name.startswith("deepseek")
    routers = sparse * structure.experts * (structure.hidden + biased)
    extra = routers * (4 - 2) if precision == "bf16" else 0
    assert found["weight_bytes"] == predicted.weights + extra
    assert extra <= 0.05 * predicted.weights
    # It also keeps every token of layers with a window, which a cache could drop.
    assert found["kv_bytes"] == kv_bytes_per_token(structure, precision) * SLOTS
    windowed = any(layer.long_context != "full" for layer in structure.layers)
    assert windowed or found["kv_bytes"] == predicted.kv
