"""Rotary embedding: right at long positions, in both pairings, with both frequency scalings."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, getcontext

import numpy as np
import pytest

from pytest_adapt.oracle import Rounding, blocks
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.oracle.spec import RopeSpec

PLAIN = RopeSpec("default", dim=14, theta=1234.0)
INTERLEAVED = RopeSpec("default", dim=14, theta=1234.0, interleaved=True)
YARN = RopeSpec("yarn", dim=64, theta=10_000.0, scale=1.25, factor=40.0, original_max_position=4096)
LLAMA3 = RopeSpec("llama3", dim=64, theta=500_000.0, factor=8.0, original_max_position=8192)
POSITIONS = np.array([0, 1, 2, 17, 4095, 4096, 65_537, 131_071, 999_999, 1_000_000])


def exact() -> Numerics:
    return Numerics({}.__getitem__, "LlamaForCausalLM")


def rotated(rope: RopeSpec, x: np.ndarray, n: Numerics | None = None) -> np.ndarray:
    n = n or exact()
    return blocks.rotate(n, "layer.0.attn.q_rope", x, blocks.rotary_tables(n, rope, POSITIONS), rope.interleaved)


def turned(rope: RopeSpec, pair: int, position: int) -> complex:
    """exp(i x position x theta^(-2 pair / dim)) with the angle reduced in 60-digit decimals: independent of NumPy."""
    getcontext().prec = 60
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    frequency = (Decimal(-2 * pair) / Decimal(rope.dim) * Decimal(rope.theta).ln()).exp()
    angle = float((Decimal(position) * frequency) % (2 * pi))
    return complex(math.cos(angle), math.sin(angle))


def check_complex_form(rope: RopeSpec) -> None:
    """Each channel pair, as a complex number, is multiplied by the unit number of its angle."""
    x = np.random.default_rng(1).normal(size=(len(POSITIONS), 3, rope.dim))
    half = rope.dim // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else (x[..., :half], x[..., half:])
    turns = np.array([[turned(rope, pair, int(p)) for pair in range(half)] for p in POSITIONS])
    expected = (first + 1j * second) * turns[:, None, :]
    got = rotated(rope, x)
    # A float64 angle up to a million is off by at most three of its roundings.
    bound = 3 * 2.0**-53 * POSITIONS.max() * np.abs(x).max() * 2
    assert np.abs(got - np.concatenate([expected.real, expected.imag], axis=-1)).max() < bound


def check_only_distance_matters() -> None:
    """<rotate(q, m), rotate(k, n)> depends on m - n alone, a million tokens in."""
    source = np.random.default_rng(2)
    q, k = source.normal(size=14), source.normal(size=14)

    def product(m: int, n: int) -> float:
        tables = blocks.rotary_tables(exact(), PLAIN, np.array([m, n]))
        both = blocks.rotate(exact(), "layer.0.attn.q_rope", np.stack([q, k])[:, None, :], tables, False)
        return float(both[0, 0] @ both[1, 0])

    bound = 4 * 2.0**-53 * 1_000_000 * np.linalg.norm(q) * np.linalg.norm(k)
    for distance in (0, 1, 5, 4096):
        assert abs(product(1_000_000, 1_000_000 - distance) - product(distance, 0)) < bound


def check_yarn_ends() -> None:
    """Pairs that turn often within the original range keep their frequency, rare ones are divided, others between."""
    plain = 10_000.0 ** -(np.arange(0, 64, 2) / 64)
    ratio = blocks.frequencies(YARN) / plain
    turns = 4096 * plain / (2 * math.pi)
    assert np.abs(ratio[turns > 32 * 1.4] - 1).max() < 1e-14
    assert np.abs(ratio[turns < 1 / 1.4] * 40 - 1).max() < 1e-14
    between = (turns < 32 / 1.4) & (turns > 1.4)
    assert between.sum() > 5
    assert ((ratio[between] < 1) & (ratio[between] > 1 / 40)).all()
    assert (np.diff(ratio) <= 1e-14).all()


def check_yarn_scales_tables() -> None:
    """Cosine and sine carry YaRN's attention factor: a rotated row is longer by just that."""
    x = np.random.default_rng(3).normal(size=(len(POSITIONS), 2, 64))
    lengths = np.linalg.norm(rotated(YARN, x), axis=-1) / np.linalg.norm(x, axis=-1)
    assert np.abs(lengths - 1.25).max() < 1e-14


def check_llama3_ends() -> None:
    """Wavelengths under a quarter of the original range stay, those above it are divided by the factor."""
    plain = 500_000.0 ** -(np.arange(0, 64, 2) / 64)
    ratio = blocks.frequencies(LLAMA3) / plain
    wavelength = 2 * math.pi / plain
    assert np.abs(ratio[wavelength < 8192 / 4] - 1).max() < 1e-14
    assert np.abs(ratio[wavelength > 8192] * 8 - 1).max() < 1e-14
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    share = (8192 / wavelength[between] - 1) / 3
    assert between.any()
    assert np.abs(ratio[between] - ((1 - share) / 8 + share)).max() < 1e-14


@pytest.mark.requirement(53)
@pytest.mark.parametrize("rope", [PLAIN, INTERLEAVED], ids=["halves", "interleaved"])
def test_complex_and_trigonometric_forms_agree_to_a_million(rope: RopeSpec) -> None:
    check_complex_form(rope)


@pytest.mark.requirement(53)
def test_only_distance_matters_at_a_million() -> None:
    check_only_distance_matters()


@pytest.mark.requirement(53)
def test_frequency_scalings_have_their_closed_forms() -> None:
    check_yarn_ends()
    check_yarn_scales_tables()
    check_llama3_ends()


@pytest.mark.requirement(53)
@pytest.mark.parametrize("rope", [PLAIN, INTERLEAVED, YARN, LLAMA3], ids=["halves", "interleaved", "yarn", "llama3"])
def test_float32_emulation_is_no_nearer_than_float32_code(rope: RopeSpec, torch_stack: None) -> None:
    """Angles that torch forms in float32, power and all, err less than the emulation's do, at any distance."""
    import torch

    x = np.ones((len(POSITIONS), 1, rope.dim))
    n = Numerics({}.__getitem__, "LlamaForCausalLM", Rounding.of("fp32"))
    emulated = np.abs(rotated(rope, x.astype(np.float32), n) - rotated(rope, x)).max(axis=(1, 2))
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    exact_frequencies = torch.from_numpy(blocks.frequencies(rope))
    scaled = plain * (exact_frequencies / rope.theta ** -(torch.arange(0, rope.dim, 2).double() / rope.dim)).float()
    positions = torch.from_numpy(POSITIONS)[:, None]
    off = (positions.float() * scaled).double() - positions.double() * exact_frequencies
    theirs = (2**0.5 * rope.scale * 2 * torch.sin(off.abs().clamp(max=np.pi) / 2)).max(dim=-1).values.numpy()
    far = POSITIONS > 1000
    assert (theirs[far] <= emulated[far]).all()
    assert 1e-3 < emulated[-1] < 2.0


def _float32_angles(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda rope: original(rope).astype(np.float32).astype(np.float64)


def _off_by_one(original: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Callable[..., object]:
    return lambda n, rope, positions: original(n, rope, np.where(positions > 70_000, positions + 1, positions))


def _absolute_shift(original: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Callable[..., object]:
    return lambda n, rope, positions: original(n, rope, np.minimum(positions, 131_072))


def _wrong_pairing(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda n, name, x, tables, interleaved: original(n, name, x, tables, not interleaved)


def _backwards(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda n, name, x, tables, interleaved: original(n, name, x, (tables[0], -tables[1]), interleaved)


def _unscaled(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda rope, plain: plain


def _all_divided(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda rope, plain: plain / rope.factor


def _scale_dropped(original: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Callable[..., object]:
    return lambda n, rope, positions: tuple(table / rope.scale for table in original(n, rope, positions))


FAULTS = {
    "frequencies in float32": ("frequencies", _float32_angles, lambda: check_complex_form(PLAIN)),
    "position off by one far out": ("rotary_tables", _off_by_one, lambda: check_complex_form(PLAIN)),
    "positions clamped": ("rotary_tables", _absolute_shift, check_only_distance_matters),
    "pairs of the other kind": ("rotate", _wrong_pairing, lambda: check_complex_form(INTERLEAVED)),
    "rotation backwards": ("rotate", _backwards, lambda: check_complex_form(PLAIN)),
    "YaRN ignored": ("_yarn", _unscaled, check_yarn_ends),
    "YaRN divides all": ("_yarn", _all_divided, check_yarn_ends),
    "attention factor dropped": ("rotary_tables", _scale_dropped, check_yarn_scales_tables),
    "llama3 ignored": ("_llama3", _unscaled, check_llama3_ends),
    "llama3 divides all": ("_llama3", _all_divided, check_llama3_ends),
}


@pytest.mark.requirement(53)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, check = FAULTS[fault]
    monkeypatch.setattr(blocks, name, plant(getattr(blocks, name)))
    with pytest.raises(AssertionError):
        check()
