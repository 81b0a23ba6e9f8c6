"""Precision int8: matrices of one byte an element, and everything that holds for the other precisions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import Engine, EngineError, EngineOptions, SequenceResult
from adapt_engine.kernels import native
from adapt_engine.kernels.packed import PackedMatrix

from .conftest import FAMILIES
from .test_kernels import needs_native

pytestmark = needs_native


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).square().mean().sqrt() / right.square().mean().sqrt())


@pytest.mark.requirement(51, 66)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_it_is_further_from_float64_than_bfloat16_and_near_what_rounding_to_int8_gives(
    family: str,
    opened: Any,
    prompt: tuple[int, ...],
    answer: Callable[..., SequenceResult],
    official: Callable[[str, torch.dtype], torch.Tensor],
) -> None:
    """Against the same model whose products are those of rounded matrices and rows, computed by the plain ops: the
    error is that of rounding to int8, no more than half as large again. Dense models, whose choices cannot flip."""
    right = official(family, torch.float64)
    found = answer(opened(family, precision="int8"), prompt, max_new_tokens=0, want_logits=True).logits
    plain = answer(opened(family, precision="bf16"), prompt, max_new_tokens=0, want_logits=True).logits

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        return (x.float() / scale).round() * scale

    twin = opened(family, precision="bf16", native=False)
    for op in ("linear", "lm_head"):

        def wrapper(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def product(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor | None) -> torch.Tensor:
                wide = [None if one is None else one.float() for one in bias]
                return call(rounded(x), rounded(weight), *wide).to(x.dtype if bias else torch.float32)

            return product

        if not (op == "lm_head" and twin.spec.tied):  # the table is no int8 matrix
            twin.kernels_registry.wrap(op, wrapper)
    emulated = answer(twin, prompt, max_new_tokens=0, want_logits=True).logits
    assert relative(plain, right) < relative(found, right) < 1.5 * relative(emulated, right)


@pytest.mark.requirement(46, 66)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_has_the_bits_of_one_prefill(
    family: str, opened: Any, prompt: tuple[int, ...], answer: Callable[..., SequenceResult]
) -> None:
    once = answer(opened(family, precision="int8"), prompt, max_new_tokens=0, want_logits=True).logits
    chunks = answer(opened(family, precision="int8", prefill_chunk=1), prompt, max_new_tokens=0, want_logits=True)
    if family == "deepseek_v3":
        # Latent attention is not computed natively yet, and torch's products depend on the number of rows.
        assert chunks.logits.shape == once.shape
        return
    assert torch.equal(once, chunks.logits)


@pytest.mark.requirement(66)
def test_what_decides_choices_is_not_rounded(opened: Any) -> None:
    parameters = opened("deepseek_v3", precision="int8").executor.workers[0].transformer.parameters
    small = {name for name, one in parameters.items() if isinstance(one, PackedMatrix) and one.quantised}
    assert {"head", "layer.1.moe.experts.down", "layer.1.moe.shared.up.weight", "layer.0.ffn.gate.weight"} <= small
    assert not any("router" in name or "norm" in name or name == "embed" for name in small)
    tied = opened("qwen3", precision="int8").executor.workers[0].transformer.parameters["embed"]
    assert isinstance(tied, PackedMatrix) and not tied.quantised


@pytest.mark.requirement(66)
def test_without_native_kernels_it_is_refused(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="precision int8 needs the native kernels, and the option native is off"):
        Engine.open(checkpoints("llama"), EngineOptions(precision="int8", native=False))
    monkeypatch.setattr(native, "load", lambda: None)
    with pytest.raises(EngineError, match="install with a C.. compiler"):
        Engine.open(checkpoints("llama"), EngineOptions(precision="int8"))
