"""Ranks and their places: the attention mesh pp x dp x sp x tp, and the expert mesh folded over each stage.

World = pp x (dp x sp x tp), tp innermost. The dp x sp x tp ranks of one stage are seen by experts as edp x ep x
etp, etp innermost (parallel folding: Liu et al. 2025, "MoE Parallel Folding").
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import Layout

__all__ = ["GROUPS", "Group", "Mesh", "Place"]

GROUPS: tuple[str, ...] = ("tp", "sp", "dp", "pp", "ep", "etp", "expert", "stage", "world")


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, in the order of their place along ``axis``."""

    axis: str
    """tp, sp, dp, pp, ep, etp, expert (ep x etp: all that hold one copy of the experts), stage or world."""
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def index(self, rank: int) -> int:
        """Place of a member. Raises ValueError for a rank that is none."""
        return self.ranks.index(rank)

    def __str__(self) -> str:
        return f"{self.axis}[{','.join(map(str, self.ranks))}]"


@dataclass(frozen=True)
class Place:
    """Coordinates of one rank on both meshes."""

    rank: int
    pp: int
    dp: int
    sp: int
    tp: int
    edp: int
    ep: int
    etp: int


class Mesh:
    """Rank <-> coordinates, and the groups of each rank."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.places = tuple(self._place(rank) for rank in range(layout.world))

    def _place(self, rank: int) -> Place:
        size = self.layout
        pp, within = divmod(rank, size.block)
        outer, tp = divmod(within, size.tp)
        dp, sp = divmod(outer, size.sp)
        expert, etp = divmod(within, size.etp)
        edp, ep = divmod(expert, size.ep)
        return Place(rank, pp, dp, sp, tp, edp, ep, etp)

    def group(self, axis: str, rank: int) -> Group:
        """The group of ``rank`` along an axis of `GROUPS`. Raises KeyError for another."""
        fixed = {
            "tp": ("pp", "dp", "sp"),
            "sp": ("pp", "dp", "tp"),
            "dp": ("pp", "sp", "tp"),
            "pp": ("dp", "sp", "tp"),
            "ep": ("pp", "edp", "etp"),
            "etp": ("pp", "edp", "ep"),
            "expert": ("pp", "edp"),
            "stage": ("pp",),
            "world": (),
        }[axis]
        own = self.places[rank]
        return Group(
            axis,
            tuple(place.rank for place in self.places if all(getattr(place, a) == getattr(own, a) for a in fixed)),
        )

    def at(self, *, pp: int = 0, dp: int = 0, sp: int = 0, tp: int = 0) -> Place:
        """The rank at these attention coordinates."""
        size = self.layout
        return self.places[((pp * size.dp + dp) * size.sp + sp) * size.tp + tp]

    def name(self, rank: int) -> str:
        """``rank 3 (pp1 tp1)``: coordinates along the axes that are split."""
        place, size = self.places[rank], self.layout
        split = [a for a in ("pp", "dp", "sp", "tp", "ep", "etp") if getattr(size, a) > 1]
        inside = " ".join(f"{axis}{getattr(place, axis)}" for axis in split)
        return f"rank {rank} ({inside})" if inside else f"rank {rank}"
