"""Which rank holds which part of which parameter: one table from logical axes to mesh axes.

Heads, KV heads, feed-forward and vocabulary rows are divided over tp, the rows of an expert over etp, experts over ep,
layers over pp; dp and sp hold copies. Everything here is in logical coordinates and known before a byte is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..comm.tree import Tree
from ..config import DenseSpec, LayerSpec, ModelSpec, MoESpec
from ..errors import EngineError
from ..layout import check, span
from ..mesh import Mesh, Place
from .parameters import Axis, ParameterSpec, ShardSlice, expected_parameters, segment_along, segment_of

__all__ = ["CUTS", "Piece", "ShardPlan", "check_cover", "unshard"]

CUTS: Mapping[str, str] = {
    "heads": "tp",
    "kv_heads": "tp",
    "inter": "tp",
    "vocab": "tp",
    "expert_inter": "etp",
}
"""Logical axis of a parameter -> mesh axis that divides it."""
SUMMED = frozenset({"inter", "expert_inter"})
"""Axes that products add up and whose segments are several units; of heads each is a segment of its own."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one parameter, and where in its buffer."""

    parameter: ParameterSpec
    part: ShardSlice
    slot: int = -1
    """Row of the rank's own stack of experts; -1 where the buffer is the parameter itself."""
    stack: int = 0
    """Experts of that layer on this rank."""


class ShardPlan:
    """The parts of a model on the ranks of a mesh. Raises EngineError for a layout or placement that it cannot take.

    ``placement[expert]`` is the ep rank that holds an expert, in every routed layer; () divides them in runs, the
    first ranks one more. ``whole_segments``: no border cuts a segment of what products add up (mode strict).
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, placement: Sequence[int] = (), *, whole_segments: bool = False
    ) -> None:
        check(spec, mesh.layout, whole_segments=whole_segments)
        self.whole_segments = whole_segments
        self.spec = spec
        self.mesh = mesh
        self.placement = tuple(placement)
        self._stacks: dict[tuple[int, int], tuple[int, ...]] = {}
        if self.placement:
            self._check_placement()

    def _check_placement(self) -> None:
        ep = self.mesh.layout.ep
        counts = {layer.ffn.experts for layer in self.spec.layers if isinstance(layer.ffn, MoESpec)}
        if counts != {len(self.placement)}:
            raise EngineError(
                f"option placement: names {len(self.placement)} experts, the model's layers have "
                f"{', '.join(map(str, sorted(counts))) or 'none'}; give one ep rank for each"
            )
        if set(self.placement) != set(range(ep)):
            raise EngineError(
                f"option placement: uses ep ranks {sorted(set(self.placement))}, the layout has 0..{ep - 1}; "
                "each must hold at least one expert"
            )

    def layers(self, pp: int) -> range:
        """Layers of a pipeline stage."""
        return range(*span(len(self.spec.layers), self.mesh.layout.pp, pp))

    def owners(self, experts: int) -> tuple[int, ...]:
        """The ep rank of each expert of a layer that has so many."""
        if self.placement:
            return self.placement
        ep = self.mesh.layout.ep
        return tuple(rank for rank in range(ep) for _ in range(*span(experts, ep, rank)))

    def experts_of(self, experts: int, ep: int) -> tuple[int, ...]:
        """Experts on an ep rank, ascending: the order of its stack."""
        if (experts, ep) not in self._stacks:
            own = (expert for expert, owner in enumerate(self.owners(experts)) if owner == ep)
            self._stacks[experts, ep] = tuple(own)
        return self._stacks[experts, ep]

    def piece(self, parameter: ParameterSpec, rank: int) -> Piece | None:
        """What ``rank`` holds of a parameter; None where nothing."""
        place = self.mesh.places[rank]
        if not self._on_stage(parameter, place):
            return None
        part = self._part(parameter, place)
        if parameter.expert < 0:
            return Piece(parameter, part)
        own = self.experts_of(parameter.experts, place.ep)
        if parameter.expert not in own:
            return None
        return Piece(parameter, part, own.index(parameter.expert), len(own))

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Everything that ``rank`` holds, in dataflow order."""
        return (piece for one in expected_parameters(self.spec) if (piece := self.piece(one, rank)) is not None)

    def holders(self, parameter: ParameterSpec) -> dict[ShardSlice, list[int]]:
        """Each part of a parameter -> ranks that hold it, as copies of each other."""
        found: dict[ShardSlice, list[int]] = {}
        for rank in range(self.mesh.layout.world):
            piece = self.piece(parameter, rank)
            if piece is not None:
                found.setdefault(piece.part, []).append(rank)
        return found

    def range_of(self, cut: Axis, length: int, index: int) -> tuple[int, int]:
        """Elements [start, stop) of an axis of ``length`` on ranks at place ``index`` of the mesh axis that cuts it."""
        unit = length // cut.units
        if self.whole_segments and cut.name in SUMMED:
            unit = segment_along(cut, length)
        start, stop = self._units(-(-length // unit), getattr(self.mesh.layout, CUTS[cut.name]), index)
        return start * unit, min(stop * unit, length)

    def tree(self, parameter: ParameterSpec) -> Tree | None:
        """How ranks add up the products with their parts of a matrix whose depth they divide; None where they do not,
        or where segments may be cut and the sum has no canonical order."""
        cut, depth = parameter.cut, parameter.shape[-1]
        if cut is None or parameter.dimension != len(parameter.shape) - 1 or not self.whole_segments:
            return None
        size = getattr(self.mesh.layout, CUTS[cut.name])
        if size == 1:
            return None
        stops = (self.range_of(cut, depth, index)[1] for index in range(size))
        return Tree(segment_of(parameter), (0, *stops))

    def local_spec(self, rank: int) -> ModelSpec:
        """The model as the code of one rank sees it: layers of its stage, its heads and feed-forward rows.

        Experts, vocabulary and widths stay whole: routing and collectives deal in logical numbers.
        """
        place = self.mesh.places[rank]
        layers = tuple(self._local_layer(self.spec.layers[index]) for index in self.layers(place.pp))
        return replace(self.spec, layers=layers)

    def alike(self) -> dict[int, int]:
        """First rank of each kind -> ranks of that kind: their parts have the same shapes, so they take as much memory.

        A kind is a stage's layers and, for the tp, ep and etp place, how much of each uneven division it has.
        """
        size, parameters = self.mesh.layout, expected_parameters(self.spec)
        cuts, counts = set[tuple[str, str, int, int]](), set[int]()
        for one in parameters:
            if one.cut is not None:
                cuts.add((CUTS[one.cut.name], one.cut.name, one.cut.units, one.shape[one.dimension]))
            if one.expert >= 0:
                counts.add(one.experts)

        def shares(axis: str, index: int) -> tuple[int, ...]:
            ranges = (
                self.range_of(Axis(name, units), length, index)
                for by, name, units, length in sorted(cuts)
                if by == axis
            )
            return tuple(stop - start for start, stop in ranges)

        held = [Counter(self.owners(count)) for count in sorted(counts)]
        tp = [shares("tp", index) for index in range(size.tp)]
        etp = [shares("etp", index) for index in range(size.etp)]
        ep = [tuple(one[index] for one in held) for index in range(size.ep)]
        stages = [
            (pp == 0, pp == size.pp - 1, tuple(self.spec.layers[index] for index in self.layers(pp)))
            for pp in range(size.pp)
        ]
        stage = [stages.index(one) for one in stages]
        first: dict[tuple[object, ...], int] = {}
        found: dict[int, int] = {}
        for place in self.mesh.places:
            kind = (stage[place.pp], tp[place.tp], ep[place.ep], etp[place.etp])
            rank = first.setdefault(kind, place.rank)
            found[rank] = found.get(rank, 0) + 1
        return found

    def _local_layer(self, layer: LayerSpec) -> LayerSpec:
        tp, attention, ffn = self.mesh.layout.tp, layer.attention, layer.ffn
        heads = attention.heads // tp
        kv_heads = heads if attention.kind == "mla" else max(1, attention.kv_heads // tp)
        if isinstance(ffn, DenseSpec):
            # Only a label here: shapes come from the weights, whose rows may be divided unevenly.
            ffn = replace(ffn, inter=-(-ffn.inter // tp))
        return LayerSpec(replace(attention, heads=heads, kv_heads=kv_heads), ffn)

    def _on_stage(self, parameter: ParameterSpec, place: Place) -> bool:
        last = self.mesh.layout.pp - 1
        if parameter.layer >= 0:
            return parameter.layer in self.layers(place.pp)
        if parameter.name == "embed":
            return place.pp == 0 or (self.spec.tied and place.pp == last)
        return place.pp == last

    def _part(self, parameter: ParameterSpec, place: Place) -> ShardSlice:
        whole = ShardSlice.whole(parameter.shape)
        if parameter.cut is None:
            return whole
        axis = CUTS[parameter.cut.name]
        ranges = list(whole.ranges)
        length = parameter.shape[parameter.dimension]
        ranges[parameter.dimension] = self.range_of(parameter.cut, length, getattr(place, axis))
        return ShardSlice(tuple(ranges))

    @staticmethod
    def _units(units: int, parts: int, index: int) -> tuple[int, int]:
        if units < parts:
            # Fewer KV heads than ranks: neighbours hold the same one, beside the query heads that read it.
            own = index * units // parts
            return own, own + 1
        return span(units, parts, index)


def check_cover(spec: ModelSpec, placed: Iterable[Mapping[str, ShardSlice]]) -> None:
    """Every element of every parameter is held by some rank. Raises EngineError naming the parameter and the gap.

    ``placed``: for each rank, parameter name -> the part that was written there.
    """
    ranks = list(placed)
    for parameter in expected_parameters(spec):
        reached = 0
        length = parameter.shape[parameter.dimension]
        for start, stop in sorted(
            held[parameter.name].ranges[parameter.dimension] for held in ranks if parameter.name in held
        ):
            if start > reached:
                break
            reached = max(reached, stop)
        if reached < length:
            raise EngineError(f"parameter {parameter.name}: no rank holds rows from {reached} of {length}")


def unshard(parameter: ParameterSpec, parts: Iterable[tuple[ShardSlice, torch.Tensor]]) -> torch.Tensor:
    """The whole parameter from what ranks hold of it.

    Raises EngineError where copies differ or an element is missing.
    """
    whole: torch.Tensor | None = None
    filled = torch.zeros(parameter.shape, dtype=torch.bool)
    for part, tensor in parts:
        if whole is None:
            whole = torch.empty(parameter.shape, dtype=tensor.dtype)
        known = filled[part.index()]
        if not torch.equal(whole[part.index()][known], tensor[known]):
            raise EngineError(f"parameter {parameter.name}: ranks hold different copies of {part.ranges}")
        whole[part.index()] = tensor
        filled[part.index()] = True
    if whole is None or not bool(filled.all()):
        raise EngineError(f"parameter {parameter.name}: {int((~filled).sum())} elements are on no rank")
    return whole
