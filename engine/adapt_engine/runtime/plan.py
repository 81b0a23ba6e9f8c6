"""What the controller tells the ranks to do in one step, and what they answer. Plain data: it may cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..layout import span

__all__ = ["Answer", "Batch", "BatchPlan", "RankAnswer", "SequencePlan", "StepPlan", "owners_of", "pack"]


@dataclass(frozen=True)
class SequencePlan:
    """Tokens at positions [first, last) of one sequence."""

    ids: tuple[int, ...]
    first: int
    last: int
    slots: torch.Tensor
    """int64 [last]: slot of every position in the replica's pool; a rank of several keeps some of its blocks."""
    head: int
    """Logits are wanted of positions [head, last)."""


BatchPlan = tuple[SequencePlan, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step of all ranks. A replica without work has no sequences and takes part all the same."""

    number: int
    replicas: tuple[BatchPlan, ...]
    """By dp place."""
    micro_batches: int = 1
    """Parts into which pipeline stages cut a step; the same for every replica, some may be empty."""

    def batch(self, replica: int, index: int) -> BatchPlan:
        """Sequences of one replica's micro-batch."""
        sequences = self.replicas[replica]
        return sequences[slice(*span(len(sequences), self.micro_batches, index))]


@dataclass(frozen=True)
class Batch:
    """A micro-batch, packed: rows of all its sequences one after the other."""

    ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]"""
    starts: tuple[int, ...]
    """First row of each sequence."""
    head: torch.Tensor
    """bool [T]: rows whose logits are wanted."""


def pack(sequences: BatchPlan) -> Batch:
    """Rows of ``sequences`` in order."""
    ids: list[int] = []
    starts = []
    positions = [torch.empty(0, dtype=torch.int64)]
    slots = [torch.empty(0, dtype=torch.int64)]
    for sequence in sequences:
        starts.append(len(ids))
        ids.extend(sequence.ids)
        positions.append(torch.arange(sequence.first, sequence.last))
        slots.append(sequence.slots[sequence.first : sequence.last])
    where = torch.cat(positions)
    head = torch.zeros(len(ids), dtype=torch.bool)
    for start, sequence in zip(starts, sequences, strict=True):
        head[start + sequence.head - sequence.first : start + sequence.last - sequence.first] = True
    return Batch(torch.tensor(ids, dtype=torch.int64), where, torch.cat(slots), tuple(starts), head)


def owners_of(positions: torch.Tensor, page_size: int, sp: int) -> torch.Tensor:
    """The sp place that stores and computes each position: pages in turn, so that every rank's share of a sequence
    grows alike, at prefill and at decode, and a block of the cache lies on one rank."""
    return positions // page_size % sp


@dataclass
class Answer:
    """What one rank has of one micro-batch, for the rows that it computed."""

    logits: torch.Tensor | None
    """float32 [R, V] of the rows whose logits are wanted; None from all but the last stage."""
    taps: dict[str, torch.Tensor] = field(default_factory=dict)
    """Site -> what this rank saw of it."""


@dataclass
class RankAnswer:
    """A rank's answers to a step, by micro-batch."""

    batches: list[Answer]
