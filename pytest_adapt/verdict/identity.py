"""Bit equality of two responses, and the first place where it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_adapt.sites import layer_of, order_key
from pytest_adapt.target.protocol import Response
from pytest_adapt.verdict.result import Divergence

__all__ = ["Bits", "compare_bits", "contents"]

_TAPS = "taps."


@dataclass(frozen=True)
class Bits:
    """Two responses, bit by bit."""

    observables: frozenset[str]
    """What was compared; empty where both show nothing."""
    kind: str = ""
    """Observable that differs; "" where none does."""
    position: int | None = None
    compared: int = 0
    detail: str = ""
    divergence: Divergence | None = None
    """Where a site differs."""


def compare_bits(what: str, first: Response, second: Response) -> Bits:
    """Everything that two responses show, and the first place where it differs: of sites the one whose row is the
    earliest, in the order in which they are computed (another token, written for it, is another embedding in a later
    row); then what comes of them."""
    one, two = contents(first), contents(second)
    if not (one.keys() | two.keys()) - {"finish"}:
        return Bits(frozenset())
    seen: set[str] = set()
    sites: list[tuple[int, str, str]] = []
    for name in sorted(sorted(one.keys() | two.keys()), key=dataflow_key):
        kind = observable_of(name)
        if sites and kind != "taps":
            break
        seen.add(kind)
        if name not in one or name not in two:
            return Bits(frozenset(seen), kind, detail=f"{name} is shown by only one of the two answers")
        problem = first_difference(one[name], two[name], first.first_row, second.first_row)
        if problem is None:
            continue
        position, reason = problem
        if kind != "taps" or position is None:
            return Bits(frozenset(seen), kind, position, 1, f"{name}: {reason}")
        sites.append((position, name, reason))
    if sites:
        position, name, reason = min(sites, key=lambda site: site[0])
        where = site_difference(what, name, one[name], two[name], position, position - first.first_row)
        return Bits(frozenset(seen), "taps", position, 1, f"{name}: {reason}", where)
    compared = sum(size_of(value) for value in one.values())
    return Bits(frozenset(seen), compared=compared, detail=", ".join(sorted(one)))


def contents(response: Response) -> dict[str, Any]:
    """Everything that a response shows, by name."""
    shown: dict[str, Any] = {"finish": response.finish}
    if response.tokens:
        shown["tokens"] = response.tokens
    if response.text is not None:
        shown["text"] = response.text
    for name, array in (("logits", response.logits), ("score", response.scores)):
        if array is not None:
            shown[name] = np.asarray(array)
    if response.topk is not None:
        shown["topk.ids"], shown["topk.logprobs"] = np.asarray(response.topk.ids), np.asarray(response.topk.logprobs)
    return shown | {f"{_TAPS}{name}": np.asarray(value) for name, value in response.taps.items()}


def first_difference(one: Any, two: Any, first_row: int, second_row: int) -> tuple[int | None, str] | None:
    if not isinstance(one, np.ndarray):
        if one == two:
            return None
        if isinstance(one, tuple):
            place = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
            return (
                None,
                f"generated token {place} differs ({list(one[place : place + 1])} and {list(two[place : place + 1])})",
            )
        return None, f"{one!r:.60} and {two!r:.60}"
    if one.dtype != two.dtype or one.shape != two.shape or first_row != second_row:
        return (
            None,
            f"{one.dtype} {one.shape} from token {first_row} and {two.dtype} {two.shape} from token {second_row}",
        )
    if one.tobytes() == two.tobytes():
        return None
    width = one[0].nbytes if one.ndim > 1 else one.itemsize
    bits = [np.frombuffer(np.ascontiguousarray(a).tobytes(), np.uint8).reshape(-1, width) for a in (one, two)]
    different = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    row = int(different[0])
    return (
        first_row + row,
        f"{len(different)} of {len(one)} rows differ in their bits, the first at token {first_row + row}",
    )


def site_difference(what: str, name: str, one: np.ndarray, two: np.ndarray, position: int, row: int) -> Divergence:
    """Where ``one`` leaves the bits of ``two`` first, at a site that both show, in ``row`` of the arrays."""
    site = name.removeprefix(_TAPS)
    got, expected = (np.ascontiguousarray(array[row]) for array in (one, two))
    same = [array.view(np.uint8).reshape(*array.shape, array.itemsize) for array in (got, expected)]
    element = tuple(int(index) for index in np.argwhere((same[0] != same[1]).any(axis=-1))[0])
    return Divergence(
        site=site,
        layer=layer_of(site)[0],
        position=position,
        got=f"{got[element]:.9g}",
        expected=f"{expected[element]:.9g}",
        error=float(abs(np.float64(got[element]) - np.float64(expected[element]))),
        budget=0.0,
        prompt=what,
        element=element,
        note=f"element {list(element)}; the same bits were promised",
    )


def observable_of(name: str) -> str:
    head = name.split(".")[0]
    return {"tokens": "text", "finish": "text"}.get(head, head)


def dataflow_key(name: str) -> tuple[int, int, int]:
    """Sites in the order in which they are computed, then what comes of them."""
    return (0, *order_key(name.removeprefix(_TAPS))) if name.startswith(_TAPS) else (1, 0, 0)


def size_of(value: Any) -> int:
    return int(value.size) if isinstance(value, np.ndarray) else 1
