"""The layout grammar and its structural rules.

A layout says how one model is spread over ranks: ``tp2.pp2.ep4``. Axes come in the order tp (tensor),
pp (pipeline), ep (expert), sp (sequence, also called context, parallel), dp (data), etp (expert tensor
parallel). A missing axis is 1, except that a missing dp is the smallest one that lets the expert mesh fold
over the attention ranks: (ep x etp) / gcd(ep x etp, tp x sp).

World = pp x (dp x sp x tp). The expert mesh (ep x etp x edp) folds over the same dp x sp x tp ranks: tp8.ep16
is 16 ranks, attention dp2 x tp8, experts ep16. The canonical form drops axes of 1 and an inferred dp; one
rank is ``single``. A size has at most four digits, and a layout at most 65536 ranks.

Standard library only: collection imports this module, never an engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

__all__ = ["AXES", "SINGLE", "Layout", "LayoutError", "check", "legal_layouts", "parse"]

AXES: tuple[str, ...] = ("tp", "pp", "ep", "sp", "dp", "etp")

_PART = re.compile(r"(etp|tp|pp|ep|sp|dp)([1-9][0-9]{0,3})")
_LARGEST = 9999
"""Of an axis."""
_MOST_RANKS = 1 << 16
_GRAMMAR = (
    "a layout is 'single' or axes in the order tp, pp, ep, sp, dp, etp, each with a size of 1 to 9999, joined by dots "
    "(tp2.pp2.ep4)"
)


class LayoutError(ValueError):
    """A layout breaks a rule. The message names the layout, the rule and the nearest legal ones;
    ``nearest`` holds them."""

    def __init__(self, layout: str, rule: str, nearest: Iterable[Layout] = ()) -> None:
        self.layout = layout
        self.rule = rule
        self.nearest = tuple(nearest)
        way_out = f"; nearest legal: {', '.join(str(near) for near in self.nearest)}" if self.nearest else ""
        super().__init__(f"layout {layout}: {rule}{way_out}")


@dataclass(frozen=True)
class Layout:
    """Sizes of the six axes. ``dp=0`` asks for the inferred one. Raises LayoutError where the expert mesh does
    not fold over the attention ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sp: int = 1
    dp: int = 0
    etp: int = 1

    def __post_init__(self) -> None:
        if not self.dp:
            object.__setattr__(self, "dp", self.inferred_dp)
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise LayoutError(f"{axis}{size}", f"axis {axis} must be a whole number of at least 1")
        if (self.dp * self.sp * self.tp) % (self.ep * self.etp):
            raise LayoutError(
                self._spell(self.dp),
                f"the expert mesh of ep x etp = {self.ep * self.etp} ranks does not fold over the dp x sp x tp = "
                f"{self.dp * self.sp * self.tp} attention ranks",
                self._foldable(),
            )

    @property
    def inferred_dp(self) -> int:
        """The smallest dp that holds the expert mesh a whole number of times."""
        mesh = self.ep * self.etp
        return mesh // math.gcd(mesh, self.tp * self.sp)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.sp * self.tp

    @property
    def edp(self) -> int:
        """Replicas of each expert shard (what is left of the attention ranks)."""
        return self.dp * self.sp * self.tp // (self.ep * self.etp)

    def __str__(self) -> str:
        return self._spell(0 if self.dp == self.inferred_dp else self.dp)

    def _spell(self, dp: int) -> str:
        sizes = {axis: getattr(self, axis) for axis in AXES} | {"dp": dp}
        kept = [f"{axis}{size}" for axis, size in sizes.items() if size > 1 or (axis == "dp" and size == 1)]
        return ".".join(kept) or "single"

    def _foldable(self) -> list[Layout]:
        """The two repairs of a fold: fewer expert ranks under this dp, or the dp that these experts need."""
        ranks = self.dp * self.sp * self.tp
        etp = self.etp if ranks % self.etp == 0 else 1
        fewer = max(ep for ep in range(1, self.ep + 1) if ranks % (ep * etp) == 0)
        return [
            Layout(self.tp, self.pp, fewer, self.sp, self.dp, etp),
            Layout(self.tp, self.pp, self.ep, self.sp, 0, self.etp),
        ]


SINGLE = Layout()


def parse(text: str) -> Layout:
    """Read a layout (``single``, ``tp2.pp2.ep4``). Raises LayoutError that names the rule and the nearest legal
    layouts."""
    if text == "single":
        return SINGLE
    sizes: dict[str, int] = {}
    order: list[str] = []
    for part in text.split("."):
        found = _PART.fullmatch(part)
        if found is None:
            raise LayoutError(text or "''", f"cannot read {part!r}: {_GRAMMAR}")
        axis, size = found[1], int(found[2])
        if axis in sizes:
            raise LayoutError(text, f"axis {axis} appears twice")
        sizes[axis] = size
        order.append(axis)
    layout = Layout(**sizes)
    if layout.world > _MOST_RANKS:
        raise LayoutError(text, f"{layout.world} ranks are more than {_MOST_RANKS}")
    if order != sorted(order, key=AXES.index):
        raise LayoutError(text, f"axes go in the order {', '.join(AXES)}", [layout])
    return layout


def check(layout: Layout, *, heads: int, kv_heads: int, experts: int, layers: int) -> None:
    """Refuse a layout that a model cannot take. ``experts`` is 0 for a dense model; MLA passes its query heads as
    ``kv_heads`` (the latent is one row that every rank holds).

    Query heads split evenly; KV heads split evenly or are replicated whole; experts and layers may be uneven, but
    no rank goes without one. Raises LayoutError.
    """
    broken = _first_broken(layout, heads, kv_heads, experts, layers)
    if broken is None:
        return
    axis, rule = broken

    def legal(other: Layout) -> bool:
        return _first_broken(other, heads, kv_heads, experts, layers) is None

    raise LayoutError(str(layout), rule, _nearest(layout, axis, legal, max(heads, experts, layers)))


def legal_layouts(
    *,
    heads: int,
    kv_heads: int,
    experts: int,
    layers: int,
    devices: int,
    axes: Iterable[str] = AXES,
    up_to: bool = False,
) -> list[Layout]:
    """Every legal layout of exactly ``devices`` ranks (``up_to``: of at most that many), over the given axes,
    sorted by world, then by axes. dp is free wherever it is among ``axes``, else inferred."""
    wanted = set(axes)
    if unknown := wanted - set(AXES):
        raise LayoutError(", ".join(sorted(unknown)), f"no such axis; axes are {', '.join(AXES)}")
    found: set[Layout] = set()
    for world in range(1, devices + 1) if up_to else [devices]:
        for layout in _layouts_of(world, wanted):
            if _first_broken(layout, heads, kv_heads, experts, layers) is None:
                found.add(layout)
    return sorted(found, key=lambda layout: (layout.world, *(getattr(layout, axis) for axis in AXES)))


def _first_broken(layout: Layout, heads: int, kv_heads: int, experts: int, layers: int) -> tuple[str, str] | None:
    """(offending axis, rule) or None."""
    if heads % layout.tp:
        return "tp", f"{heads} query heads do not divide by {layout.tp}"
    if kv_heads % layout.tp and layout.tp % kv_heads:
        return "tp", f"{kv_heads} KV heads neither split evenly over {layout.tp} ranks nor are replicated whole"
    if layout.pp > layers:
        return "pp", f"{layers} layers cannot fill {layout.pp} stages"
    if layout.ep > max(experts, 1):
        rule = (
            f"{experts} experts cannot fill {layout.ep} ranks" if experts else "a dense model has no experts to spread"
        )
        return "ep", rule
    if layout.etp > 1 and not experts:
        return "etp", "a dense model has no experts to split"
    return None


def _nearest(layout: Layout, axis: str, legal: Callable[[Layout], bool], limit: int) -> list[Layout]:
    """The closest legal sizes of one axis, below and above; one rank where there is none."""
    size = getattr(layout, axis)
    limit = min(limit, _LARGEST)
    found = []
    # No legal size is beyond the limit: a size far above it must not be walked down from.
    for sizes in (range(min(size - 1, limit), 0, -1), range(size + 1, limit + 1)):
        # dp is inferred anew: an explicit one may not fit the changed axis.
        near = next((other for other in (_with(layout, axis, new) for new in sizes) if other and legal(other)), None)
        if near is not None:
            found.append(near)
    return found or [SINGLE]


def _with(layout: Layout, axis: str, size: int) -> Layout | None:
    explicit = 0 if layout.dp == layout.inferred_dp else layout.dp
    try:
        return replace(layout, **{"dp": explicit, axis: size})
    except LayoutError:
        return None


def _layouts_of(world: int, axes: set[str]) -> Iterator[Layout]:
    def choices(axis: str, limit: int) -> list[int]:
        return _divisors(limit) if axis in axes else [1]

    for pp in choices("pp", world):
        ranks = world // pp
        for tp in choices("tp", ranks):
            for sp in choices("sp", ranks // tp):
                dp = ranks // tp // sp
                for etp in choices("etp", ranks):
                    for ep in choices("ep", ranks // etp):
                        layout = Layout(tp, pp, ep, sp, dp, etp)
                        if "dp" in axes or dp == layout.inferred_dp:
                            yield layout


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
