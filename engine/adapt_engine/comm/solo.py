"""One rank alone: every group is itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import EngineError
from .communicator import Call, Communicator, Shape

__all__ = ["SoloCommunicator"]


class SoloCommunicator(Communicator):
    """Rank 0 of a world of one."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _exchange(
        self, call: Call, outgoing: Sequence[torch.Tensor | None], incoming: Sequence[Shape | None]
    ) -> list[torch.Tensor | None]:
        return list(outgoing)

    def _transfer(self, call: Call, peer: int, tensor: torch.Tensor | None, shape: Shape | None) -> torch.Tensor | None:
        raise EngineError(f"{self.name}: {call}: a world of one rank has nobody to talk to")
