"""Records wanted sites during a step and hands each sequence its rows."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import torch

__all__ = ["LayerTap", "TapRecorder"]


class TapRecorder:
    """Keeps tensors of the current step whose site matches one of the patterns."""

    def __init__(self, sites: Iterable[str], patterns: tuple[str, ...]) -> None:
        self.wanted = frozenset(
            site for site in sites if any(fnmatch.fnmatchcase(site, pattern) for pattern in patterns)
        )
        # Where experts are on other ranks, their rows find their places again by the expert ids.
        self._kept = self.wanted | {
            f"{site.partition('.experts.')[0]}.router.ids" for site in self.wanted if ".moe.experts." in site
        }
        self.rows: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, value: torch.Tensor) -> None:
        """Keep ``value`` [T, ...] of site ``name`` where it, or one that needs it, is wanted."""
        if name in self._kept:
            self.rows[name] = value if value.dtype == torch.int64 else value.float()

    def layer(self, index: int) -> LayerTap:
        """The recorder as seen from inside one layer."""
        return LayerTap(self, index)

    def take(self) -> dict[str, torch.Tensor]:
        """Everything kept since the last call."""
        rows, self.rows = self.rows, {}
        return rows


class LayerTap:
    """Records sites of one layer under their short names (``attn.out``)."""

    def __init__(self, recorder: TapRecorder, layer: int) -> None:
        self._recorder = recorder
        self._prefix = f"layer.{layer}."

    def __call__(self, name: str, value: torch.Tensor) -> None:
        self._recorder(self._prefix + name, value)

    def wants(self, prefix: str) -> bool:
        """Whether any wanted site of this layer begins with ``prefix``."""
        return any(name.startswith(self._prefix + prefix) for name in self._recorder.wanted)
