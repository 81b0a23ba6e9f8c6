"""Collectives between ranks: one abstract communicator, its implementations beside it.

``communicator.Communicator`` is what model code calls; ``solo`` is one rank, ``virtual`` is all ranks in one process,
``distributed`` is one process a rank (imported where it is used: it brings torch.distributed along).
"""

from __future__ import annotations

from .communicator import Call, Communicator
from .ledger import Entry, Ledger, Traffic
from .solo import SoloCommunicator
from .tree import Tree
from .virtual import VirtualWorld

__all__ = ["Call", "Communicator", "Entry", "Ledger", "SoloCommunicator", "Traffic", "Tree", "VirtualWorld"]
