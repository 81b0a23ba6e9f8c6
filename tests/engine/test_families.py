"""Every family by configuration alone, against transformers' own code, at every position."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapt_engine import Engine, EngineOptions, SequenceResult
from adapt_engine.families import spec_from_config
from adapt_engine.kernels import KernelRegistry, reference
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .conftest import FAMILIES, MOE_FAMILIES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Official = Callable[[str, torch.dtype], torch.Tensor]
Answer = Callable[..., SequenceResult]


def rms(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt())


@pytest.mark.requirement(130)
@pytest.mark.requirement(56)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_as_close_to_float64_as_transformers_is(
    family: str, native: bool, opened: Any, official: Official, prompt: tuple[int, ...], answer: Answer
) -> None:
    """Two float32 evaluations differ from float64 by sums of equally many roundings: twice is room for order alone."""
    result = answer(opened(family, native=native), prompt, want_logits=True)
    truth = official(family, torch.float64)
    own = result.logits.double() - truth
    theirs = official(family, torch.float32) - truth
    assert result.logits.shape == truth.shape
    assert rms(own) <= 2 * rms(theirs)
    assert float(own.abs().max()) <= 2 * float(theirs.abs().max())


@pytest.mark.requirement(56)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_rounds_no_more_than_transformers(
    family: str, precision: str, opened: Any, official: Official, prompt: tuple[int, ...], answer: Answer
) -> None:
    """Median over positions, so that a routing flip on either side (a legal near tie) does not decide."""
    result = answer(opened(family, precision=precision), prompt, want_logits=True)
    truth = official(family, torch.float64)
    own = (result.logits.double() - truth).square().mean(-1).sqrt().median()
    theirs = (official(family, DTYPES[precision]) - truth).square().mean(-1).sqrt().median()
    # The median of 70 rows carries a sampling error of about 1.25 / sqrt(70) = 15 % on either side.
    assert float(own) <= 1.3 * float(theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_old_spelling_of_the_configuration_gives_the_same_model(
    family: str,
    copied: Any,
    edit_config: Any,
    checkpoints: Callable[[str], Path],
    prompt: tuple[int, ...],
    answer: Answer,
) -> None:
    directory = copied(family)
    config = json.loads((directory / "config.json").read_text())
    rope = config["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    kind = rope["rope_type"]
    edit_config(
        directory,
        rope_parameters=...,
        dtype=...,
        torch_dtype="float32",
        rope_theta=rope["rope_theta"],
        rope_scaling=None if kind == "default" else {"type": kind, **scaling},
    )
    with Engine.open(directory) as old, Engine.open(checkpoints(family)) as new:
        assert old.spec == new.spec
        assert torch.equal(answer(old, prompt, want_logits=True).logits, answer(new, prompt, want_logits=True).logits)


@pytest.mark.requirement(56)
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 40.0},
        {"rope_type": "yarn", "factor": 16.0, "truncate": False, "beta_fast": 24.0, "beta_slow": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.5, "mscale_all_dim": 0.8},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    ],
    ids=str,
)
def test_rotary_frequencies_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    """Published shape: width 64, base 5e5, 4096 positions stretched."""
    config = transformers.LlamaConfig(
        head_dim=64,
        max_position_embeddings=4096 * 40,
        rope_parameters={"rope_theta": 5e5, "original_max_position_embeddings": 4096, **scaling},
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    spec = spec_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).layers[0].attention.rope
    own = reference.rope_frequencies(spec)
    # Theirs is float32: its rounded exponent moves theta ** x by ln(theta) / 2 units, a few operations add four.
    bound = (math.log(5e5) / 2 + 4) * torch.finfo(torch.float32).eps
    assert float(((theirs.double() - own) / own).abs().max()) <= bound
    assert spec.attention_factor == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_of_the_model_can_be_tapped_and_tapping_changes_nothing(
    family: str, opened: Any, prompt: tuple[int, ...], answer: Answer
) -> None:
    plain = answer(opened(family), prompt, want_logits=True)
    engine = opened(family, taps=("*",))
    tapped = answer(engine, prompt, want_logits=True, first_row=7)
    assert plain.taps == {}
    assert set(tapped.taps) == set(engine.spec.sites())
    assert {len(rows) for rows in tapped.taps.values()} == {len(prompt) - 7}
    assert torch.equal(tapped.logits, plain.logits[7:])
    assert torch.equal(tapped.taps["logits"], tapped.logits)


@pytest.mark.requirement(54)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_router_taps_are_consistent(family: str, opened: Any, prompt: tuple[int, ...], answer: Answer) -> None:
    """Ids ascend; weights belong to the ids and sum to the routed scale where renormalised."""
    engine = opened(family, taps=("layer.*.moe.router.*", "layer.*.moe.experts.down", "layer.*.moe.routed"))
    taps = answer(engine, prompt).taps
    spec = engine.spec.layers[-1].ffn
    name = f"layer.{len(engine.spec.layers) - 1}.moe"
    ids, weights = taps[f"{name}.router.ids"], taps[f"{name}.router.weights"]
    assert ids.dtype == torch.int64 and ids.shape == (len(prompt), spec.top_k)
    assert bool((ids.diff(dim=-1) > 0).all())
    scores = taps[f"{name}.router.scores"].gather(1, ids).double()
    expected = scores / scores.sum(-1, keepdim=True) * spec.routed_scale
    eps = torch.finfo(torch.float32).eps
    assert float(((weights - expected) / expected).abs().max()) <= (spec.top_k + 2) * eps
    routed = (weights.double()[..., None] * taps[f"{name}.experts.down"].double()).sum(1)
    # Each of top_k products and sums rounds once, relative to the magnitudes that went in.
    size = (weights.double()[..., None] * taps[f"{name}.experts.down"].double()).abs().sum(1)
    assert bool(((taps[f"{name}.routed"] - routed).abs() <= (spec.top_k + 1) * eps * size).all())


@pytest.mark.parametrize("family", ("qwen3_moe", "deepseek_v3"))
def test_wrapping_an_op_changes_the_named_layer_only_and_can_be_undone(
    family: str, opened: Any, prompt: tuple[int, ...], answer: Answer
) -> None:
    engine = opened(family, taps=("layer.*.residual",))
    before = answer(engine, prompt).taps
    registry: KernelRegistry = engine.kernels_registry

    def wrapper(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda gate, up: call(gate, up) * (1.25 if registry.layer == 1 else 1.0)

    with registry.wrap("swiglu", wrapper):
        during = answer(engine, prompt).taps
    after = answer(engine, prompt).taps
    assert torch.equal(before["layer.0.residual"], during["layer.0.residual"])
    assert not torch.equal(before["layer.1.residual"], during["layer.1.residual"])
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.requirement(57)
def test_every_op_has_a_reference_implementation() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        names = KernelRegistry(reference.offers(), dtype, "fast").names()
        assert set(names.values()) == {"reference"}


def test_options_default(checkpoints: Callable[[str], Path]) -> None:
    with Engine.open(checkpoints("llama")) as engine:
        assert engine.options == EngineOptions()
