"""Answers of all ranks -> what one rank would have given: logical, unsharded rows in packed order.

Copies that ranks hold of the same rows (tp ranks of the residual stream, ranks that share a KV head) are compared bit
for bit on the way; a difference is a `Drift`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import MoESpec
from ..moe.dispatch import Route
from ..weights.shards import ShardPlan
from .plan import Answer, BatchPlan, RankAnswer, StepPlan, owners_of, pack

__all__ = ["Assembler", "Drift"]

_LAYER = re.compile(r"layer\.(\d+)\.(.+)")
HEADS = frozenset({"attn.q", "attn.q_norm", "attn.q_rope", "attn.context", "attn.kv_b"})
KV_HEADS = frozenset({"attn.k", "attn.v", "attn.k_norm", "attn.k_rope"})
INTER = frozenset({"ffn.gate", "ffn.up", "ffn.act"})
_TRAVELLING = frozenset({"moe.experts.gate", "moe.experts.up", "moe.experts.act"})


@dataclass(frozen=True)
class Drift:
    """Two ranks that should hold the same numbers do not."""

    step: int
    site: str
    first: str
    """Name of the rank that is taken as right."""
    second: str
    rows: int
    """Rows that differ."""
    largest: float
    """Largest absolute difference."""

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.site} differs between {self.first} and {self.second} "
            f"in {self.rows} rows, by up to {self.largest:.3g}"
        )


class Assembler:
    """Puts answers together. ``drifts`` collects what should have been equal (at most ``_KEPT`` of them)."""

    _KEPT = 100

    def __init__(self, plan: ShardPlan, page_size: int) -> None:
        self.plan = plan
        self.mesh = plan.mesh
        self.page_size = page_size
        self.drifts: list[Drift] = []

    def replica(
        self, step: StepPlan, answers: Sequence[RankAnswer], dp: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits [R, V] and taps [T, ...] of the rows of one replica that has some, in the order of its sequences."""
        if self.mesh.layout.world == 1:
            # What one rank has is whole and in order.
            (only,) = (answer.batches[0] for answer in answers)
            assert only.logits is not None and step.micro_batches == 1
            return only.logits, only.taps
        logits, taps = [], []
        for index in range(step.micro_batches):
            sequences = step.batch(dp, index)
            if sequences:
                found = _Found(self, step, [answer.batches[index] for answer in answers], index, dp, sequences)
                logits.append(found.logits())
                taps.append(found.taps())
        joined = {
            site: torch.cat([part[site] for part in taps]) if len(taps) > 1 else taps[0][site] for site in taps[0]
        }
        return torch.cat(logits) if len(logits) > 1 else logits[0], joined

    def compare(self, step: int, site: str, ranks: Sequence[int], copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """The first of several copies, after noting where others differ from it."""
        for rank, copy in zip(ranks[1:], copies[1:], strict=True):
            if not torch.equal(copies[0], copy) and not _same_bits(copies[0], copy) and len(self.drifts) < self._KEPT:
                gap = (copies[0].double() - copy.double()).abs().flatten(1)
                names = self.mesh.name(ranks[0]), self.mesh.name(rank)
                rows, largest = int((gap != 0).any(1).sum()), float(gap.nan_to_num(float("inf")).max())
                self.drifts.append(Drift(step, site, *names, rows, largest))
        return copies[0]


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return one.shape == two.shape and bool(((one == two) | (one.isnan() & two.isnan())).all())


@dataclass
class _Found:
    """One micro-batch of one replica, in pieces."""

    home: Assembler
    step: StepPlan
    answers: list[Answer]
    index: int
    dp: int
    sequences: BatchPlan

    def __post_init__(self) -> None:
        layout = self.home.mesh.layout
        packed = pack(self.sequences)
        owners = owners_of(packed.positions, self.home.page_size, layout.sp)
        self.owned = [(owners == sp).nonzero().flatten() for sp in range(layout.sp)]
        heads = packed.head.nonzero().flatten()
        place = torch.full((len(packed.ids),), -1)
        place[heads] = torch.arange(len(heads))
        self.head_owned = [place[rows][place[rows] >= 0] for rows in self.owned]
        self._routes: dict[tuple[int, int], Route] = {}

    def _ranks(self, pp: int, sp: int) -> list[int]:
        """tp ranks that hold the same rows."""
        mesh = self.home.mesh
        return [mesh.at(pp=pp, dp=self.dp, sp=sp, tp=tp).rank for tp in range(mesh.layout.tp)]

    def logits(self) -> torch.Tensor:
        layout = self.home.mesh.layout
        parts = []
        for sp in range(layout.sp):
            ranks = self._ranks(layout.pp - 1, sp)
            copies = [found for rank in ranks if (found := self.answers[rank].logits) is not None]
            parts.append(self.home.compare(self.step.number, "logits", ranks, copies))
        return _spread(parts, self.head_owned)

    def taps(self) -> dict[str, torch.Tensor]:
        sites = {site: None for answer in self.answers for site in answer.taps}
        return {site: self._site(site) for site in sites}

    def _site(self, site: str) -> torch.Tensor:
        mesh = self.home.mesh
        found = _LAYER.fullmatch(site)
        if found is None:
            pp = 0 if site == "embed" else mesh.layout.pp - 1
            layer, local = -1, site
        else:
            layer, local = int(found[1]), found[2]
            pp = next(pp for pp in range(mesh.layout.pp) if layer in self.home.plan.layers(pp))
        parts = [self._part(site, layer, local, self._ranks(pp, sp)) for sp in range(mesh.layout.sp)]
        return _spread(parts, self.owned)

    def _part(self, site: str, layer: int, local: str, ranks: list[int]) -> torch.Tensor:
        """Rows of one sp place from its tp ranks."""
        kind = self.home.plan.spec.layers[layer].attention if layer >= 0 else None
        copies = [self.answers[rank].taps.get(site) for rank in ranks]
        if local in _TRAVELLING and self.home.mesh.layout.ep * self.home.mesh.layout.etp > 1:
            return torch.cat([self._travelled(site, layer, rank) for rank in ranks])
        values = [value for value in copies if value is not None]
        if local in HEADS:
            return _joined(values, 1)
        if local in KV_HEADS and kind is not None and kind.kind != "mla":
            return self._kv_heads(site, ranks, values, kind.kv_heads)
        if local in INTER:
            return _joined(values, -1)
        if local.startswith(("moe.router.", "moe.experts.")):
            return _joined(values, 0)
        return self.home.compare(self.step.number, site, ranks, values)

    def _kv_heads(self, site: str, ranks: list[int], values: list[torch.Tensor], heads: int) -> torch.Tensor:
        copies = max(1, len(ranks) // heads)
        groups = range(0, len(ranks), copies)
        return _joined(
            [
                self.home.compare(self.step.number, site, ranks[at : at + copies], values[at : at + copies])
                for at in groups
            ],
            1,
        )

    def _travelled(self, site: str, layer: int, owner: int) -> torch.Tensor:
        """What experts on other ranks computed for the slots [T, k, inter] that one owner sent out."""
        mesh, plan = self.home.mesh, self.home.plan
        ffn = plan.spec.layers[layer].ffn
        assert isinstance(ffn, MoESpec)
        group = mesh.group("expert", owner)
        routes = {rank: self._route(layer, rank, ffn.experts) for rank in group.ranks}
        chunks = []
        for ep in range(mesh.layout.ep):
            before = sum(routes[rank].totals[ep] for rank in group.ranks[: group.index(owner)])
            rows = slice(before, before + routes[owner].totals[ep])
            members = group.ranks[ep * mesh.layout.etp : (ep + 1) * mesh.layout.etp]
            chunks.append(torch.cat([self.answers[member].taps[site][rows] for member in members], dim=-1))
        ids = self.answers[owner].taps[f"layer.{layer}.moe.router.ids"]
        values = torch.cat(chunks)
        out = torch.empty_like(values)
        out[routes[owner].order] = values
        return out.view(*ids.shape, values.shape[-1])

    def _route(self, layer: int, rank: int, experts: int) -> Route:
        if (layer, rank) not in self._routes:
            ids = self.answers[rank].taps[f"layer.{layer}.moe.router.ids"]
            self._routes[layer, rank] = Route.of(ids, self.home.plan.owners(experts), self.home.mesh.layout.ep)
        return self._routes[layer, rank]


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _spread(parts: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of several owners, each at its place."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.empty((sum(map(len, rows)), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for part, where in zip(parts, rows, strict=True):
        whole[where] = part
    return whole
