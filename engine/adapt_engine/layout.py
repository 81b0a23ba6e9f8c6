"""The layout of a run: six axes, their grammar, and which of them a model can take.

``tp2.pp2.ep4`` names the axes in the order tp (tensor), pp (pipeline), ep (expert), sp (sequence), dp (data), etp
(expert tensor). A missing axis is 1, except that a missing dp is the smallest one over which the expert ranks
fold. One rank is ``single``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice

from .config import DenseSpec, ModelSpec, MoESpec
from .errors import LayoutError
from .weights.parameters import Axis, segment_along

__all__ = ["Layout", "check", "span"]

_PART = re.compile(r"(etp|tp|pp|ep|sp|dp)([1-9][0-9]{0,3})")
_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; ``dp=0`` infers the smallest that fits. Raises LayoutError where experts do not fold."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sp: int = 1
    dp: int = 0
    etp: int = 1

    def __post_init__(self) -> None:
        if not self.dp:
            object.__setattr__(self, "dp", self.least_dp)
        if self.block % (self.ep * self.etp):
            raise LayoutError(
                f"layout {self}: ep x etp = {self.ep * self.etp} expert ranks do not fold over the "
                f"dp x sp x tp = {self.block} ranks of a stage; use dp{self.least_dp}"
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``tp2.pp2`` or ``single``. Raises LayoutError naming what cannot be read."""
        if text == "single":
            return cls()
        axes = [field.name for field in fields(cls)]
        sizes: dict[str, int] = {}
        for part in text.split("."):
            found = _PART.fullmatch(part)
            if found is None or found[1] in sizes or any(axes.index(name) > axes.index(found[1]) for name in sizes):
                order = ", ".join(axes)
                raise LayoutError(
                    f"layout {text!r}: {part!r} is not an axis of {order}, each once, in this order, with its size "
                    "(1 to 9999); write for example tp2.ep4"
                )
            sizes[found[1]] = int(found[2])
        layout = cls(**sizes)
        if layout.world > _MOST_RANKS:
            raise LayoutError(f"layout {text!r}: {layout.world} ranks are more than {_MOST_RANKS}")
        return layout

    @property
    def least_dp(self) -> int:
        """The smallest dp over which the expert ranks fold."""
        return self.ep * self.etp // math.gcd(self.ep * self.etp, self.tp * self.sp)

    @property
    def block(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.sp * self.tp

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.block

    @property
    def edp(self) -> int:
        """Copies of each expert shard within a stage."""
        return self.block // (self.ep * self.etp)

    def __str__(self) -> str:
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.dp == self.least_dp:
            del sizes["dp"]
        shown = [f"{axis}{size}" for axis, size in sizes.items() if size > 1 or axis == "dp"]
        return ".".join(shown) or "single"


def span(length: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of part ``index`` of ``length`` things in ``parts`` runs, the first ones one longer."""
    size, longer = divmod(length, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def check(spec: ModelSpec, layout: Layout, *, whole_segments: bool = False) -> None:
    """Raises LayoutError where a model cannot be laid out so; the message names the nearest layouts that can.

    Query heads divide by tp. KV heads divide by tp, or tp divides by them and each is held whole by several ranks,
    so that a query head always finds its own beside it. Layers, experts, feed-forward and vocabulary rows may be
    uneven, but no rank goes without. ``whole_segments`` (mode strict): nor without a whole segment of the feed-forward
    rows, in the canonical order of accumulation.
    """
    broken = next(_broken(spec, layout, whole_segments), None)
    if broken is None:
        return
    axis, rule = broken
    size, limit = getattr(layout, axis), _largest(spec)
    near = []
    # No size beyond the limit is legal: one far above it must not be walked down from.
    for sizes in (range(min(size - 1, limit), 0, -1), range(size + 1, limit + 1)):
        others = _resized(layout, axis, sizes)
        near += [
            str(other) for other in islice((one for one in others if not any(_broken(spec, one, whole_segments))), 1)
        ]
    raise LayoutError(f"layout {layout}: {rule}; nearest legal: {', '.join(near) or 'single'}")


def _largest(spec: ModelSpec) -> int:
    """More ranks than this no axis of a model can have."""
    sparse = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoESpec)]
    heads = (layer.attention.heads for layer in spec.layers)
    return max(len(spec.layers), *heads, *(max(ffn.experts, ffn.inter) for ffn in sparse))


def _resized(layout: Layout, axis: str, sizes: Iterable[int]) -> Iterator[Layout]:
    """The same layout with other sizes of one axis; an inferred dp is inferred again."""
    dp = 0 if layout.dp == layout.least_dp else layout.dp
    for size in sizes:
        try:
            yield replace(layout, **{"dp": dp, axis: size})
        except LayoutError:
            continue


def _segments(rows: int, cut: str, ranks: int) -> str | None:
    """The rule that is broken where ranks cannot have a whole segment each of the feed-forward rows that they share."""
    segment = segment_along(Axis(cut, rows), rows) if rows else 1
    count = -(-rows // segment)
    if not 0 < count < ranks:
        return None
    what = "rows of an expert" if cut == "expert_inter" else "feed-forward rows"
    return f"mode strict adds {rows} {what} up in {count} segments of {segment}, too few for {ranks} ranks"


def _broken(spec: ModelSpec, layout: Layout, whole_segments: bool = False) -> Iterator[tuple[str, str]]:
    """(axis, rule) of everything that does not fit."""
    if layout.pp > len(spec.layers):
        yield "pp", f"{len(spec.layers)} layers cannot fill {layout.pp} stages"
    if layout.tp > spec.vocab:
        yield "tp", f"{spec.vocab} vocabulary rows cannot fill {layout.tp} ranks"
    for layer in spec.layers:
        attention, ffn = layer.attention, layer.ffn
        if attention.heads % layout.tp:
            yield "tp", f"{attention.heads} query heads do not divide by {layout.tp}"
        kv = attention.kv_heads
        if attention.kind != "mla" and kv % layout.tp and layout.tp % kv:
            yield "tp", f"{kv} KV heads neither divide by {layout.tp} nor are held whole by equally many ranks"
        dense = ffn.inter if isinstance(ffn, DenseSpec) else ffn.shared_inter
        if 0 < dense < layout.tp:
            yield "tp", f"{dense} feed-forward rows cannot fill {layout.tp} ranks"
        if whole_segments and (rule := _segments(dense, "inter", layout.tp)):
            yield "tp", rule
        if whole_segments and isinstance(ffn, MoESpec) and (rule := _segments(ffn.inter, "expert_inter", layout.etp)):
            yield "etp", rule
        if isinstance(ffn, MoESpec):
            if ffn.experts < layout.ep:
                yield "ep", f"{ffn.experts} experts cannot fill {layout.ep} ranks"
            if ffn.inter < layout.etp:
                yield "etp", f"{ffn.inter} rows of an expert cannot fill {layout.etp} ranks"
    if not any(isinstance(layer.ffn, MoESpec) for layer in spec.layers):
        for axis in ("ep", "etp"):
            if getattr(layout, axis) > 1:
                yield axis, "a dense model has no experts to spread"
