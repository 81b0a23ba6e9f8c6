"""The oracle against code that nobody here wrote: transformers' own Llama, Qwen3, Qwen3-MoE, Mixtral, DeepSeek-V3.

No tolerance is set by hand: the yardstick is the error of the oracle's own emulation of the precision, with the
budgets of the verdict (1.3 times its rms error, twice its largest one). Run with -s to see the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pytest_adapt.oracle import Oracle, Rounding, Trace

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


def compare(written, precision: str) -> Compared:
    oracle, heard = Oracle(written.directory), written.hear(precision)
    exact = oracle.run(written.tokens, replay=heard.ids)
    emulated = oracle.run(written.tokens, replay=heard.ids, rounding=Rounding.of(precision))
    compared = Compared(exact, emulated, heard.logits - exact.logits, emulated.logits - exact.logits)
    flips = sum(len(found) for found in exact.replayed.values())
    print(
        f"\n{written.name:36} {precision}  largest {np.abs(compared.theirs).max():.2e}"
        f"  of emulation's: largest {compared.largest:.2f}, rms {compared.rms:.2f}"
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
