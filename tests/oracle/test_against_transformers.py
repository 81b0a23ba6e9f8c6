"""The oracle against code that nobody here wrote: transformers' own Llama, Qwen3, Qwen3-MoE, Mixtral, DeepSeek-V3.

No tolerance is set by hand: the yardstick is the error of the oracle's own emulation of the precision, with the
budgets of the verdict (1.3 times its rms error, twice its largest one). Run with -s to see the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pytest_adapt.oracle import ModelSpec, Oracle, Rounding, Trace

RMS_BUDGET = 1.3
LARGEST_BUDGET = 2.0


@dataclass(frozen=True)
class Compared:
    """Errors of transformers and of the emulation against the float64 run, all on transformers' expert ids."""

    exact: Trace
    emulated: Trace
    theirs: np.ndarray
    yardstick: np.ndarray

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(self.theirs**2) / np.mean(self.yardstick**2)))

    @property
    def largest(self) -> float:
        return float(np.abs(self.theirs).max() / np.abs(self.yardstick).max())

    @property
    def apart(self) -> float:
        """How far transformers is from the emulation, as a part of its distance from the float64 run."""
        return float(np.sqrt(np.mean((self.theirs - self.yardstick) ** 2) / np.mean(self.theirs**2)))


def compare(written, precision: str) -> Compared:
    oracle, heard = Oracle(written.directory), written.hear(precision)
    exact = oracle.run(written.tokens, replay=heard.ids)
    emulated = oracle.run(written.tokens, replay=heard.ids, rounding=Rounding.of(precision))
    compared = Compared(exact, emulated, heard.logits - exact.logits, emulated.logits - exact.logits)
    flips = sum(len(found) for found in exact.replayed.values())
    print(
        f"\n{written.name:36} {precision}  largest {np.abs(compared.theirs).max():.2e}"
        f"  of emulation's: largest {compared.largest:.2f}, rms {compared.rms:.2f}, apart {compared.apart:.2f}"
        f"  logits' rms {np.sqrt(np.mean(exact.logits**2)):.2f}  flips {flips}"
    )
    return compared


def test_several_shards(written):
    """The reader is tested on an index with more than one file."""
    assert len(list(written.directory.glob("*.safetensors"))) >= 2


def test_float32_agrees_at_every_position(written):
    """transformers in float32 is as near to the float64 oracle as float32 rounding allows, everywhere."""
    compared = compare(written, "fp32")
    per_row = np.abs(compared.theirs).max(axis=-1)
    assert compared.rms <= RMS_BUDGET
    assert per_row.max() <= LARGEST_BUDGET * np.abs(compared.yardstick).max(), f"worst row {per_row.argmax()}"


def test_expert_choices_agree(written):
    """In float32 every expert id is the oracle's, or excused by the error of the scores in that layer."""
    compared = compare(written, "fp32")
    for layer, found in compared.exact.replayed.items():
        error = np.abs(compared.emulated.selection[layer] - compared.exact.selection[layer]).max()
        assert not found["illegal"].any(), f"layer {layer}"
        assert (found["margin"] <= 2 * error).all(), f"layer {layer}: {found}"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_errs_as_the_emulation_does(written, precision):
    """The emulation is a yardstick: transformers' own low-precision error is as large, neither more nor far less."""
    compared = compare(written, precision)
    assert 1 / RMS_BUDGET <= compared.rms <= RMS_BUDGET
    assert compared.largest <= LARGEST_BUDGET
    if not written.name.startswith("qwen3moe"):
        # Qwen3-MoE's router runs in the low precision in transformers; the yardstick exempts it on purpose.
        assert compared.apart < 1


def _layers(spec: ModelSpec, **change: object) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, **change) for layer in spec.layers))


def _router(spec: ModelSpec, **change: object) -> ModelSpec:
    return replace(spec, mixture=replace(spec.mixture, router=replace(spec.mixture.router, **change)))


# Each reads one option of config.json wrongly; None where the model has no such option.
MISREADINGS: dict[str, Callable[[ModelSpec], ModelSpec | None]] = {
    "norm eps 1e-6": lambda s: replace(s, norm_eps=1e-6),
    "latent norms take the model's eps": lambda s: (
        replace(s, attention=replace(s.attention, norm_eps=s.norm_eps)) if hasattr(s.attention, "kv_lora") else None
    ),
    "rotary base 1% off": lambda s: replace(s, rope=replace(s.rope, theta=s.rope.theta * 1.01)),
    "rotary pairs of the other kind": lambda s: (
        replace(s, rope=replace(s.rope, interleaved=not s.rope.interleaved))
        if hasattr(s.attention, "kv_lora")
        else None
    ),
    "rotary scaling ignored": lambda s: (
        replace(s, rope=replace(s.rope, kind="default")) if s.rope.kind != "default" else None
    ),
    "rotary tables unscaled": lambda s: replace(s, rope=replace(s.rope, scale=1.0)) if s.rope.scale != 1 else None,
    "softmax scale without YaRN": lambda s: (
        replace(s, attention=replace(s.attention, scale=(s.attention.nope + s.attention.rope) ** -0.5))
        if hasattr(s.attention, "kv_lora") and s.rope.kind == "yarn"
        else None
    ),
    "window one key wider": lambda s: _layers(s, window=s.layers[-1].window + 1) if s.layers[-1].window else None,
    "no window": lambda s: _layers(s, window=0) if s.layers[-1].window else None,
    "renormalised the other way": lambda s: (
        _router(s, renormalise=not s.mixture.router.renormalise) if s.mixture else None
    ),
    "routed scale lost": lambda s: _router(s, scale=1.0) if s.mixture and s.mixture.router.scale != 1 else None,
    "groups ignored": lambda s: _router(s, groups=1) if s.mixture and s.mixture.router.groups > 1 else None,
}


def test_a_misread_option_is_seen(written, monkeypatch: pytest.MonkeyPatch):
    """The agreement above is not blind: each option of this model, read wrongly, puts transformers far outside."""
    oracle, theirs = Oracle(written.directory), written.hear("fp32").logits
    right = oracle.run(written.tokens)
    yardstick = oracle.run(written.tokens, rounding=Rounding.of("fp32")).logits - right.logits
    seen = {}
    for misreading, misread in MISREADINGS.items():
        wrong = misread(oracle.spec)
        if wrong is not None:
            with monkeypatch.context() as patch:
                patch.setattr(oracle, "spec", wrong)
                error = theirs - oracle.run(written.tokens).logits
            seen[misreading] = float(np.sqrt(np.mean(error**2) / np.mean(yardstick**2)))
    print("\n" + "\n".join(f"{written.name:36} {name:36} {ratio:8.0f}" for name, ratio in seen.items()))
    assert len(seen) >= 2
    assert min(seen.values()) > 100 * RMS_BUDGET, seen
