"""What wrong values look like: which of a row are off, what they are instead, and how far that reaches.

Nothing here judges. A comparison has found a row of a site to be beyond its budget; a reader who is to mend the engine
asks at once whether the values are zero, a multiple, in another order, those of another place, or coarser than they
should be, and whether it is so in one head, from one position on, or everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

__all__ = ["among", "coarseness", "likeness", "listed", "reach", "together", "which"]

_FEW = 8
"""A row of so many values is shown whole; and so many values on a grid are no accident."""
_LIST = 6
_LEFT = 0.25
"""Part of an error that what explains it may leave."""
_ALIKE = 0.9995
"""Cosine from which on two rows have one direction, but for a rounding on the way."""
_TWO = 2
"""So few values have a factor, or are near those of some other row, by chance."""
_SAMPLE = 1 << 16
"""Values of a whole site that are looked at together."""
_COARSE = 3
"""Significand bits that values must lack, of those that their format has, to be called coarse."""
_SIGNIFICAND: Mapping[str, int] = {"fp32": 24, "fp16": 11, "bf16": 8}


def likeness(
    value: np.ndarray,
    own: np.ndarray,
    allowed: np.ndarray,
    others: Iterable[tuple[str, np.ndarray]] = (),
    form: str = "fp32",
) -> str:
    """One row ``value`` beside what it should be, ``own``; float64 [n], with what a healthy target errs at most there,
    ``allowed`` [n], in a format ``form``. ``others``: (name, row [n]) that it may be instead."""
    off = np.abs(value - own) > allowed
    rows = list(others)
    words = which(off, "value")
    if found := _instead(value[off], own[off], allowed[off], [(name, row[off]) for name, row in rows], form):
        words += f": {found}"
    elif found := _instead(value, own, allowed, rows, form):
        words += f" beyond the budget, and the whole row: {found}"
    else:
        words += f": {_roughly(value[off], own[off])}"
    if len(own) <= _FEW:
        words += f"; the row is {_shown(value)}, expected {_shown(own)}"
        if (own >= 0).all() and len(own) > 1:
            words += f", sum {value.sum():.4g} instead of {own.sum():.4g}"
    return words


def together(value: np.ndarray, own: np.ndarray, allowed: np.ndarray, form: str = "fp32") -> str:
    """All rows of a site, of which none stands out; float64 [rows, n] each."""
    v, o, a = (array.ravel()[:_SAMPLE] for array in (value, own, allowed))
    found = _instead(v, o, a, (), form)
    return f"no value stands out; all of them together: {found}" if found else "no value stands out: all err too much"


def _instead(v: np.ndarray, o: np.ndarray, a: np.ndarray, others: Iterable[tuple[str, np.ndarray]], form: str) -> str:
    """What the values ``v`` are that should be ``o``, and may err by ``a``; "" where nothing explains them."""
    error = math.sqrt(float(np.mean((v - o) ** 2)))

    def explains(rest: np.ndarray, room: float = 2.0) -> bool:
        """Whether what is left of the error is a healthy one, and little of what it was."""
        return bool((np.abs(rest) <= room * a).all()) and math.sqrt(float(np.mean(rest**2))) < _LEFT * error

    if not v.any():
        return "0"
    if len(v) > _TWO and (v == v[0]).all():
        return f"all {v[0]:.4g}"
    sizes = np.abs(v)
    if len(v) >= _FEW and (sizes == sizes[0]).all():
        clipped = ", with the signs that they should have (clipped)" if (np.sign(v) == np.sign(o)).all() else ""
        return f"all of magnitude {sizes[0]:.4g}{clipped}"
    if len(v) > _TWO:
        for name, row in others:
            if explains(v - row):
                return f"those of {name}"
        if o.any():
            factor = float(v @ o / (o @ o))
            if explains(v - factor * o, 2.0 * max(1.0, abs(factor))):
                return f"{factor:.{4 if abs(factor - 1) > 1e-3 else 9}g} times the expected"
        offset = float(np.median(v - o))
        if explains(v - o - offset):
            return f"the expected {offset:+.4g}"
        if explains(np.sort(v) - np.sort(o)):
            return "the expected ones in another order"
    if len(v) >= _FEW and (bits := coarseness(v)) <= min(_SIGNIFICAND.get(form, 24), coarseness(o)) - _COARSE:
        return f"rounded to {bits} significant bit{'s' * (bits > 1)}"
    return ""


def _roughly(v: np.ndarray, o: np.ndarray) -> str:
    """What is left to say where nothing explains the values."""
    length = math.sqrt(float(v @ v) * float(o @ o))
    if len(v) < 3 or not length:
        return "no simple change"
    cosine, factor = float(v @ o) / length, float(v @ o) / float(o @ o)
    if cosine > _ALIKE and math.sqrt(np.mean((v - factor * o) ** 2)) < 2 * _LEFT * math.sqrt(np.mean((v - o) ** 2)):
        return f"about {factor:.4g} times the expected (cosine {cosine:.6f})"
    return f"no simple change (cosine {cosine:.3f} with the expected)"


def coarseness(values: np.ndarray) -> int:
    """Significand bits, the leading one included, that hold all of the values."""
    fractions = np.frexp(np.asarray(values, np.float64))[0]
    bits = 1
    while bits < 53 and not (np.ldexp(fractions, bits) == np.rint(np.ldexp(fractions, bits))).all():
        bits += 1
    return bits


def which(off: np.ndarray, noun: str) -> str:
    """``values 24 to 47 of 48``: in words, where ``off`` bool [n] is true."""
    places, count = np.flatnonzero(off), len(off)
    if len(places) == count:
        return f"all {count} {noun}s" if count > 1 else f"the one {noun}"
    if len(places) == 1:
        last = ", the last," if places[0] == count - 1 else ""
        return f"{noun} {places[0]}{last} alone of {count}"
    steps = np.diff(places)
    if (steps == 1).all():
        return f"{noun}s {places[0]} to {places[-1]} of {count}"
    if len(places) > 2 and (steps == steps[0]).all():
        return f"one {noun} in {steps[0]}, {places[0]} to {places[-1]}, of {count}"
    return f"{len(places)} of {count} {noun}s ({listed(places)})"


def reach(
    over: np.ndarray,
    positions: np.ndarray,
    per_position: int,
    prompt_tokens: int,
    experts: np.ndarray | None,
    noun: str = "head",
) -> str:
    """How far one site of one prompt is off. ``over`` bool [rows], where rows are ``positions`` int64 [T] x slots (each
    a ``noun``, or one of the chosen ``experts`` [T, slots])."""
    grid = over.reshape(len(positions), per_position)
    bad = np.asarray(grid.any(axis=1))
    if not bad.any():
        return ""
    words = _where(bad, positions, prompt_tokens)
    if experts is not None:
        chosen, wrong = np.unique(experts), np.unique(experts[grid])
        if len(wrong) < len(chosen):
            words += f", in expert{'s' * (len(wrong) > 1)} {listed(wrong)} alone ({len(chosen)} were chosen)"
    elif not (heads := np.asarray(grid[bad].any(axis=0))).all():
        words += f", {which(heads, noun)}"
    return words


def _where(bad: np.ndarray, positions: np.ndarray, prompt_tokens: int) -> str:
    wrong, decode = positions[bad], positions >= prompt_tokens
    if len(wrong) == len(bad):
        return f"at all {len(bad)} positions"
    if len(wrong) == 1:
        words = f"at position {wrong[0]} alone of {len(bad)}"
    elif bad[int(np.argmax(bad)) :].all():
        words = f"at all positions from {wrong[0]} on"
    else:
        words = f"at {len(wrong)} of {len(bad)} positions, {wrong[0]} the first"
    stages = set(decode[bad].tolist())
    if len(set(decode.tolist())) > len(stages):  # both were judged
        words += f" (in {'decode' if True in stages else 'prefill'} alone)"
    return words


def among(layers: Sequence[int], judged: Sequence[int]) -> str:
    """In which of the layers that were judged a site is off; "" where there is but one."""
    if len(judged) < 2:
        return ""
    if len(layers) == len(judged):
        return f"in all {len(judged)} layers"
    return f"in layer{'s' if len(layers) > 1 else ''} {listed(layers)} of {listed(judged)}"


def listed(numbers: Sequence[int] | np.ndarray) -> str:
    """``0-3, 7``: ascending numbers, runs joined, the first few."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words[:_LIST]) + (" ..." if len(words) > _LIST else "")


def _shown(row: np.ndarray) -> str:
    return "[" + ", ".join(f"{one:.4g}" for one in row) + "]"
