"""Emulated formats are bit-exact, and tables say what the eager code materialises."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_adapt.oracle import OracleError, Rounding
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.oracle.rounding import round_bf16, round_fp16


def patterns() -> np.ndarray:
    """Float32 values around every bfloat16: each upper half with lower halves at, beside and between the ties."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)
    return (upper[:, None] | lower).reshape(-1).view(np.float32)


def test_bf16_rounds_as_torch_does_bit_for_bit(torch_stack: None) -> None:
    import torch

    x = patterns()
    expected = torch.from_numpy(x.copy()).to(torch.bfloat16).float().numpy()
    got = round_bf16(x)
    finite = ~np.isnan(x)
    assert np.array_equal(got[finite].view(np.uint32), expected[finite].view(np.uint32))
    assert np.isnan(got[~finite]).all()


def test_fp16_rounds_as_torch_does_bit_for_bit(torch_stack: None) -> None:
    import torch

    x = patterns()
    finite = ~np.isnan(x)
    expected = torch.from_numpy(x.copy()).to(torch.float16).float().numpy()
    assert np.array_equal(round_fp16(x)[finite].view(np.uint32), expected[finite].view(np.uint32))


@pytest.mark.parametrize("shape", [(5, 7, 3), (300, 130, 290)], ids=str)
def test_fp32_products_add_term_by_term(shape: tuple[int, int, int]) -> None:
    """The emulated product equals a plain loop in float32, bit for bit, across its cache blocks."""
    m, depth, width = shape
    source = np.random.default_rng(0)
    a, b = (source.normal(size=size).astype(np.float32) for size in ((2, m, depth), (2, depth, width)))
    n = Numerics({}.__getitem__, "LlamaForCausalLM", Rounding.of("fp32"))
    got = n.matmul(a, b)
    for batch, row, column in ((0, 0, 0), (1, m - 1, width - 1), (0, m // 2, width // 3)):
        total = np.float32(0)
        for k in range(depth):
            total = np.float32(total + np.float32(a[batch, row, k] * b[batch, k, column]))
        assert got[batch, row, column] == total
    assert not np.array_equal(got, a @ b) or depth < 8


def test_fp32_sums_add_term_by_term() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 1000)).astype(np.float32)
    n = Numerics({}.__getitem__, "LlamaForCausalLM", Rounding.of("fp32"))
    total = np.float32(0)
    for value in x[1, 2]:
        total = np.float32(total + value)
    assert n.total(x)[1, 2, 0] == total
    assert n.total(x).shape == (3, 4, 1)


@pytest.mark.parametrize(
    ("name", "architecture", "expected"),
    [
        ("layer.3.attn.q", "LlamaForCausalLM", "bf16"),
        ("layer.3.attn.norm.unit", "LlamaForCausalLM", "bf16"),
        ("rope.cos", "LlamaForCausalLM", "bf16"),
        ("logits", "LlamaForCausalLM", "bf16"),
        ("layer.0.moe.router.logits", "Qwen3MoeForCausalLM", "fp32"),
        ("layer.0.moe.router.scores", "DeepseekV3ForCausalLM", "fp32"),
        ("layer.0.moe.router.selection", "DeepseekV3ForCausalLM", "fp32"),
        ("layer.0.moe.router.weights", "Qwen3MoeForCausalLM", "bf16"),
        ("layer.0.moe.router.weights", "MixtralForCausalLM", "fp32"),
        ("layer.0.moe.router.weights", "DeepseekV3ForCausalLM", "fp32"),
        ("parameter.model.layers.1.mlp.gate.weight", "DeepseekV3ForCausalLM", "fp32"),
        ("parameter.model.layers.1.mlp.gate.weight", "Qwen3MoeForCausalLM", "bf16"),
        ("parameter.model.layers.1.mlp.gate_proj.weight", "DeepseekV3ForCausalLM", "bf16"),
    ],
)
def test_table(name: str, architecture: str, expected: str) -> None:
    assert Rounding.of("bf16").format_of(name, architecture) == expected


def test_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(OracleError, match="'fp8'.*fp32, bf16, fp16"):
        Rounding.of("fp8")
