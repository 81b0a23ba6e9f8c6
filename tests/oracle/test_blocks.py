"""Norms, activations and attention against closed forms and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytest_adapt.oracle import Rounding, blocks
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.oracle.rounding import round_bf16

ROUNDINGS = 64 * 2.0**-53
"""A few dozen float64 roundings, relative to the values compared."""


def exact(**weights: np.ndarray) -> Numerics:
    return Numerics(weights.__getitem__, "LlamaForCausalLM")


def norm(x: np.ndarray, weight: np.ndarray, eps: float, rounding: Rounding | None = None) -> np.ndarray:
    n = Numerics({"w": weight}.__getitem__, "LlamaForCausalLM", rounding)
    return blocks.rms_norm(n, "layer.0.attn.norm", x, "w", eps)


def check_norm_closed_form() -> None:
    """A constant row c becomes w c / sqrt(c^2 + eps): tells eps inside the root from eps beside it."""
    weight = np.array([1.5, -0.5, 2.0, -3.0, 0.25])
    for c, eps in ((1e-3, 1e-5), (2.0, 1e-5), (1e-4, 1e-6), (-3.0, 0.5)):
        got = norm(np.full((2, 5), c), weight, eps)
        assert np.abs(got - weight * c / math.sqrt(c * c + eps)).max() <= ROUNDINGS * np.abs(got).max()


def check_norm_mean() -> None:
    """The mean of squares, not the variance about the mean, not their sum: a known row of unequal values."""
    got = norm(np.array([[3.0, 4.0, 0.0, 0.0]]), np.ones(4), 0.0)
    assert np.abs(got - np.array([[3.0, 4.0, 0.0, 0.0]]) / 2.5).max() <= ROUNDINGS


def check_norm_rounds_before_weight() -> None:
    """In bf16 the unit row is rounded, then multiplied by the weight and rounded again; squares never are."""
    source = np.random.default_rng(0)
    x = round_bf16(source.normal(size=(40, 96)).astype(np.float32))
    weight = round_bf16(source.normal(size=96).astype(np.float32))
    wide = x.astype(np.float64)
    unit = round_bf16((wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(np.float32))
    got = norm(x, weight, 1e-5, Rounding.of("bf16"))
    # float32 sums may fall on the other side of a rounding boundary, here and there.
    assert (got != round_bf16(unit * weight)).mean() < 0.01


def check_silu() -> None:
    assert blocks.silu(np.array([0.0, -1e4]))[1] == 0
    assert abs(blocks.silu(np.array([1.0]))[0] - 1 / (1 + math.exp(-1))) <= ROUNDINGS
    assert abs(blocks.silu(np.array([-2.0]))[0] + 2 / (1 + math.exp(2))) <= ROUNDINGS


def inputs(tokens: int = 530) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [T, 6, 10], k [T, 2, 10], v [T, 2, 7]: more tokens than two row blocks."""
    source = np.random.default_rng(4)
    return source.normal(size=(tokens, 6, 10)), source.normal(size=(tokens, 2, 10)), source.normal(size=(tokens, 2, 7))


def naive(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int) -> np.ndarray:
    """Softmax attention as a loop over queries and heads."""
    out = np.empty((len(q), q.shape[1], v.shape[-1]))
    for t in range(len(q)):
        for head in range(q.shape[1]):
            seen = slice(max(0, t + 1 - window) if window else 0, t + 1)
            group = head // (q.shape[1] // k.shape[1])
            scores = k[seen, group] @ q[t, head] * scale
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ v[seen, group] / weights.sum()
    return out


def check_rows_equal_full_softmax(window: int) -> None:
    q, k, v = inputs()
    got = blocks.attend(exact(), "layer.0.attn", q, k, v, 0.37, window)
    assert np.abs(got - naive(q, k, v, 0.37, window)).max() <= ROUNDINGS * 10


def check_window_is_exactly_w_keys() -> None:
    """With equal scores and one-hot values the context shows which keys were seen, and with what weight."""
    tokens, window = 300, 37
    values = np.eye(tokens)[:, None, :]
    zeros = np.zeros((tokens, 1, 4))
    seen = blocks.attend(exact(), "layer.0.attn", zeros, zeros, values, 1.0, window)[:, 0]
    assert ((seen > 0).sum(axis=-1) == np.minimum(np.arange(tokens) + 1, window)).all()
    assert (seen.diagonal() > 0).all()
    assert np.abs(seen.sum(axis=-1) - 1).max() <= ROUNDINGS


@pytest.mark.requirement(56)
def test_rms_norm_closed_forms() -> None:
    check_norm_closed_form()
    check_norm_mean()


@pytest.mark.requirement(56)
def test_rms_norm_rounds_the_unit_row_before_its_weight() -> None:
    check_norm_rounds_before_weight()


@pytest.mark.requirement(56)
def test_silu_closed_form() -> None:
    check_silu()


@pytest.mark.parametrize("window", [0, 1, 37, 256, 529])
def test_row_blocks_equal_full_softmax(window: int) -> None:
    check_rows_equal_full_softmax(window)


def test_window_is_exactly_w_keys() -> None:
    check_window_is_exactly_w_keys()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_attention_rounds_what_eager_code_materialises(torch_stack: None, precision: str) -> None:
    """Against transformers' own eager attention on one block: nearer to it than exact arithmetic is."""
    import torch
    from transformers.models.llama.modeling_llama import eager_attention_forward

    q, k, v = inputs(120)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    rounding = Rounding.of(precision)
    q, k, v = (rounding.apply("layer.0.attn.q", x.astype(np.float32), "LlamaForCausalLM") for x in (q, k, v))
    heads = [torch.from_numpy(x).to(dtype).transpose(0, 1)[None] for x in (q, k, v)]

    class Module:
        num_key_value_groups = 3
        training = False

    mask = torch.full((120, 120), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    theirs = eager_attention_forward(Module(), *heads, mask, 0.37)[0][0].float().numpy()
    ours = blocks.attend(Numerics({}.__getitem__, "LlamaForCausalLM", rounding), "layer.0.attn", q, k, v, 0.37, 0)
    truth = blocks.attend(exact(), "layer.0.attn", *(x.astype(np.float64) for x in (q, k, v)), 0.37, 0)
    apart, error = np.sqrt(np.mean((ours - theirs) ** 2)), np.sqrt(np.mean((theirs - truth) ** 2))
    assert apart < error
    assert 1 / 1.3 < np.sqrt(np.mean((ours - truth) ** 2)) / error < 1.3


def _eps_outside(n: Numerics, name: str, x: np.ndarray, weight: str, eps: float) -> np.ndarray:
    return n.site(
        name, n.parameter(weight) * n.inner(f"{name}.unit", x / (np.sqrt((x * x).mean(-1, keepdims=True)) + eps))
    )


def _eps_lost(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, name, x, weight, eps: original(n, name, x, weight, 0.0)


def _centred(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, name, x, weight, eps: original(n, name, x - x.mean(-1, keepdims=True), weight, eps)


def _weight_first(n: Numerics, name: str, x: np.ndarray, weight: str, eps: float) -> np.ndarray:
    return n.site(name, n.parameter(weight) * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def _wider_window(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, attn, q, k, v, scale, window: original(n, attn, q, k, v, scale, window and window + 1)


def _no_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, attn, q, k, v, scale, window: original(n, attn, q, k, v, 1.0, window)


def _heads_interleaved(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(n: Any, attn: str, q: Any, k: Any, v: Any, scale: float, window: int) -> Any:
        repeats = q.shape[1] // k.shape[1]
        return original(n, attn, q, np.tile(k, (1, repeats, 1)), np.tile(v, (1, repeats, 1)), scale, window)

    return attend


FAULTS: dict[str, tuple[str, Callable[..., Any], Callable[[], None]]] = {
    "eps outside the root": ("rms_norm", lambda original: _eps_outside, check_norm_closed_form),
    "eps lost": ("rms_norm", _eps_lost, check_norm_closed_form),
    "mean subtracted": ("rms_norm", _centred, check_norm_mean),
    "weight before rounding": ("rms_norm", lambda original: _weight_first, check_norm_rounds_before_weight),
    "sigmoid for silu": ("silu", lambda original: blocks.sigmoid, check_silu),
    "window of one key more": ("attend", _wider_window, check_window_is_exactly_w_keys),
    "scale lost": ("attend", _no_scale, lambda: check_rows_equal_full_softmax(0)),
    "heads mapped the other way": ("attend", _heads_interleaved, lambda: check_rows_equal_full_softmax(0)),
}


@pytest.mark.requirement(56)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, check = FAULTS[fault]
    monkeypatch.setattr(blocks, name, plant(getattr(blocks, name)))
    with pytest.raises(AssertionError):
        check()
