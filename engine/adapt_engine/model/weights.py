"""Parameters of one layer under short names (``attn.q.weight``)."""

from __future__ import annotations

from collections.abc import Mapping

from ..kernels.packed import Parameter

__all__ = ["Weights", "layer_weights"]

Weights = Mapping[str, Parameter]


def layer_weights(parameters: Mapping[str, Parameter], layer: int) -> Weights:
    """The parameters whose name starts with ``layer.<layer>.``, without that prefix."""
    prefix = f"layer.{layer}."
    return {name[len(prefix) :]: tensor for name, tensor in parameters.items() if name.startswith(prefix)}
