"""How two records differ: structure first and exactly, then values with sign, size, place and distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.verdict.budget import RMS_FACTOR, ulp

__all__ = ["BUCKETS", "CLASSES", "ArrayDiff", "RecordDiff", "classify", "compare", "environment_changes", "invisible"]

BUCKETS: tuple[float, ...] = (0.0, 1e-6, 1e-4, 1e-3, 1e-2)
"""Upper bounds of |difference|: equal, below each, and the rest."""
CLASSES: tuple[str, ...] = ("noise", "environment", "behaviour")
"""What a change can be, the harmless one first."""
# Smaller than a hundredth of the smallest yardstick: no verdict can depend on it.
_INVISIBLE = 0.01
_TENTH = (RMS_FACTOR - 1.0) / 10.0


@dataclass(frozen=True)
class ArrayDiff:
    """One array, where it differs. ``worst`` is an index, ``old`` and ``new`` the values there."""

    name: str
    largest: float
    ulps: float
    """Largest difference in float32 units in the last place."""
    worst: tuple[int, ...]
    old: float
    new: float
    mean: float
    """Mean signed difference: a drift has a sign, noise does not."""
    changed: int
    size: int
    buckets: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.name}: max|d|={self.largest:.2g} ({self.ulps:.3g} ulp) at {list(self.worst)}: "
            f"{self.old:.7g} -> {self.new:.7g}, {self.changed}/{self.size} differ, mean {self.mean:+.2g}"
        )


@dataclass(frozen=True)
class RecordDiff:
    """``structure``: differences of shape, ids or special values, one line each; ``arrays``: numeric ones."""

    structure: tuple[str, ...]
    arrays: tuple[ArrayDiff, ...]

    @property
    def same(self) -> bool:
        return not self.structure and not self.arrays

    def lines(self) -> list[str]:
        return [*self.structure, *(str(array) for array in self.arrays)]


def compare(old: Record, new: Record) -> RecordDiff:
    """Differences of what two records say, structure before values."""
    structure = [
        f"{name}: {before} -> {after}"
        for name, before, after in (
            ("vocabulary", old.vocab, new.vocab),
            ("tokens", len(old.tokens), len(new.tokens)),
            ("positions", len(old.positions), len(new.positions)),
            ("precisions", ", ".join(old.precisions), ", ".join(new.precisions)),
            ("source", old.source, new.source),
        )
        if before != after
    ]
    arrays: list[ArrayDiff] = []
    before, after = _values(old), _values(new)
    for name in sorted(before.keys() | after.keys()):
        one, two = before.get(name), after.get(name)
        if one is None or two is None:
            structure.append(f"{name}: {'new' if one is None else 'gone'}")
        elif one.shape != two.shape:
            structure.append(f"{name}: shape {list(one.shape)} -> {list(two.shape)}")
        elif one.dtype.kind in "iub":
            different = int((one != two).sum())
            if different:
                first = [int(i) for i in np.argwhere(one != two)[0]]
                structure.append(f"{name}: {different} of {one.size} differ, the first at {first}")
        elif (np.isfinite(one) != np.isfinite(two)).any():
            structure.append(f"{name}: another pattern of NaN or infinity")
        else:
            difference = _array(name, one, two)
            if difference is not None:
                arrays.append(difference)
    return RecordDiff(tuple(structure), tuple(arrays))


def invisible(old: Record, new: Record) -> bool:
    """Whether no verdict can tell two records apart.

    The same structure, values within a hundredth of the least yardstick, and yardsticks that are the same but for the
    luck of single roundings (another BLAS sums in another order): pooled, within a tenth of what budgets allow.
    """
    difference = compare(old, new)
    if difference.structure:
        return False
    least = min((_pooled(errors.rms) for errors in old.errors.values()), default=0.0)
    for array in difference.arrays:
        if array.name.startswith("errors."):
            _, precision, name = array.name.split(".")
            before, after = (_pooled(getattr(one.errors[precision], name)) for one in (old, new))
            if abs(after - before) > _TENTH * before:
                return False
        elif array.largest > _INVISIBLE * least * max(1.0, abs(array.old)):
            return False
    return True


def classify(
    old: Record, new: Record, before: Mapping[str, str] | None = None, after: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """(class, why) of a change from one record to another; ``before`` and ``after`` are the environments of both.

    noise: no verdict can tell them apart. environment: what made them differs (a library, an instruction set), and so
    do they, by no more than healthy implementations of the finest recorded precision differ. behaviour: everything
    else, which is another answer, or a change that nothing in the environment explains.
    """
    difference = compare(old, new)
    # Who gave the values is no value; a new precision is.
    structure = [line for line in difference.structure if not line.startswith("source: ")]
    if structure:
        return "behaviour", structure[0]
    if invisible(replace(old, source=""), replace(new, source="")):
        return "noise", "no verdict can tell them apart"
    least = min((_pooled(errors.rms) for errors in old.errors.values()), default=0.0)
    largest, worst = 0.0, ""
    for array in difference.arrays:
        if array.name.startswith("errors."):
            _, precision, name = array.name.split(".")
            one, two = (_pooled(getattr(record.errors[precision], name)) for record in (old, new))
            share = abs(two - one) / (one * (RMS_FACTOR - 1.0)) if one else float("inf")
        else:
            share = array.largest / (RMS_FACTOR * least * max(1.0, abs(array.old))) if least else float("inf")
        if share > largest:
            largest, worst = share, str(array)
    changed = environment_changes(before or {}, after or {})
    if largest > 1.0:
        return "behaviour", worst
    if not changed:
        return "behaviour", f"{worst}; nothing in the environment explains it"
    return "environment", f"{', '.join(changed)}; {worst}"


def environment_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """``name: old -> new`` of all that two inventories say differently; what only one of them says is left out."""
    both = sorted(before.keys() & after.keys())
    return [f"{name}: {before[name]} -> {after[name]}" for name in both if str(before[name]) != str(after[name])]


def _pooled(errors: np.ndarray) -> float:
    finite = errors[np.isfinite(errors)]
    return float(np.sqrt(np.mean(finite**2))) if len(finite) else 0.0


def _array(name: str, one: np.ndarray, two: np.ndarray) -> ArrayDiff | None:
    finite = np.isfinite(one)
    difference = np.where(finite, np.subtract(two, one, where=finite, out=np.zeros(one.shape)), 0.0)
    size = np.abs(difference)
    if not size.any():
        return None
    worst = tuple(int(i) for i in np.unravel_index(int(size.argmax()), size.shape))
    counts, left = [], np.ones(size.shape, bool)
    for bound in BUCKETS:
        inside = left & ((size <= bound) if bound == 0.0 else (size < bound))
        counts.append(int(inside.sum()))
        left &= ~inside
    units = size / ulp(np.where(finite, one, 0.0), "fp32")
    return ArrayDiff(
        name=name,
        largest=float(size[worst]),
        ulps=float(units.max()),
        worst=worst,
        old=float(one[worst]),
        new=float(two[worst]),
        mean=float(difference.mean()),
        changed=int((size > 0).sum()),
        size=one.size,
        buckets=(*counts, int(left.sum())),
    )


def _values(record: Record) -> Mapping[str, np.ndarray]:
    values = {name: np.asarray(getattr(record, name)) for name in _NAMES}
    values |= {f"experts.{layer}": np.asarray(ids).astype(np.int64) for layer, ids in record.expert_ids.items()}
    for precision, errors in record.errors.items():
        values |= {f"errors.{precision}.{name}": np.asarray(value) for name, value in vars(errors).items()}
    return {name: value if value.dtype.kind in "iub" else value.astype(np.float64) for name, value in values.items()}


_NAMES = (
    "tokens",
    "positions",
    "lse",
    "topk_ids",
    "topk_logprobs",
    "next_logprob",
    "projections",
    "norm",
    "margin",
)
