"""What a machine could do and what a model needs: the two sides of a utilisation estimate.

Bytes of a decode step: every weight that the step reads once, experts as many as the batch is expected to choose
(E (1 - (1 - k / E)^B) of E at batch B), and the cached keys and values of each sequence. Operations of a prompt: two
for each active parameter of the layers and token, two for each of the head once (what comes next is asked of the last
token alone), and attention's products over the keys that each token sees.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pytest_adapt.inspect import analyse
from pytest_adapt.inspect.memory import BITS, kv_bytes
from pytest_adapt.inspect.parameters import layer_parts, outer_parts
from pytest_adapt.inspect.structure import Attention, Structure

__all__ = ["Peaks", "Work", "declared_peaks", "measured_peaks", "work"]

_READ = 1 << 26
_SIDE = 1024
_REPEATS = 5


@dataclass(frozen=True)
class Peaks:
    """Bytes read and operations done per second at best, and who says so."""

    bandwidth: float
    operations: float
    source: str


@dataclass(frozen=True)
class Work:
    """Bytes that one decode step of a batch reads, and operations of its prompts."""

    decode_bytes: float
    prefill_operations: float


def declared_peaks() -> Peaks | None:
    """From ADAPT_PEAK_GBS (gigabytes a second) and ADAPT_PEAK_GFLOPS; None where they are not set, or no numbers."""
    try:
        bandwidth, operations = float(os.environ["ADAPT_PEAK_GBS"]), float(os.environ["ADAPT_PEAK_GFLOPS"])
    except (KeyError, ValueError):
        return None
    return Peaks(bandwidth * 1e9, operations * 1e9, "declared") if bandwidth > 0 and operations > 0 else None


def measured_peaks() -> Peaks:
    """Of this machine's CPU as NumPy reaches them in float32: a large sum, and a product of square matrices."""
    values = np.ones(_READ // 4, np.float32)
    matrix = np.ones((_SIDE, _SIDE), np.float32)
    read = _usual(lambda: values.sum())
    multiplied = _usual(lambda: matrix @ matrix)
    return Peaks(_READ / read, 2.0 * _SIDE**3 / multiplied, "this CPU, as NumPy reaches it in float32")


def work(directory: Path, precision: str, prompt: int, batch: int) -> Work:
    """For ``batch`` prompts of ``prompt`` tokens. Raises InspectError for a structure that is not known."""
    structure = analyse(directory)
    value_bytes = BITS[precision] / 8
    weights: float = sum(part.params for part in outer_parts(structure) if part.used)
    head: float = sum(part.used for part in outer_parts(structure))
    active = 0.0
    for layer in structure.layers:
        for part in layer_parts(structure, layer):
            active += part.used
            missed = (1.0 - part.used / part.params) ** batch if part.params else 0.0
            weights += part.params * (1.0 - missed)
    cached = kv_bytes(structure, prompt, precision) * batch
    operations = 2.0 * (active * prompt + head) + _attention(structure, prompt)
    return Work(weights * value_bytes + cached, batch * operations)


def _attention(structure: Structure, prompt: int) -> float:
    """Operations of both products of causal attention over one prompt, all layers."""
    total = 0.0
    for layer in structure.layers:
        a = layer.attention
        if not isinstance(a, Attention):
            continue
        reach = min(prompt, a.reach) if a.scheme in ("window", "chunked") else prompt
        seen = reach * (reach + 1) / 2 + (prompt - reach) * reach
        total += 2.0 * a.heads * (a.head_dim + a.value_dim) * seen
    return total


def _usual(function: Callable[[], object]) -> float:
    """Median seconds of a call, after one that is not counted."""
    function()
    found = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return statistics.median(found)
