"""NumPy arrays of `run_op` as torch tensors and back: nothing is copied, strides stay.

bfloat16, which NumPy does not have, travels as its bits in uint16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["differentiated", "from_torch", "to_torch"]

_GRADIENT = "grad."


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's own memory: float32, float16, int64, or bfloat16 from uint16."""
    import torch

    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    """The inverse of `to_torch`; a tensor of another device is fetched."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.contiguous().view(torch.int16).numpy()).view(np.uint16)
    return np.asarray(tensor.numpy())


def differentiated(
    compute: Any, inputs: Mapping[str, np.ndarray], wrt: tuple[str, ...], outputs: tuple[str, ...] = ("out",)
) -> dict[str, np.ndarray]:
    """``grad.NAME`` of the inputs ``wrt`` by autograd: ``compute`` takes tensors and returns tensors by name, and the
    gradients of its ``outputs`` are among the inputs as ``grad.OUTPUT``."""
    import torch

    with torch.enable_grad():
        tensors = {name: to_torch(array) for name, array in inputs.items() if not name.startswith(_GRADIENT)}
        for name in wrt:
            tensors[name] = tensors[name].clone().requires_grad_()
        found = compute(tensors)
        given = [to_torch(inputs[f"{_GRADIENT}{name}"]) for name in outputs]
        gradients = torch.autograd.grad([found[name] for name in outputs], [tensors[name] for name in wrt], given)
    return {f"{_GRADIENT}{name}": from_torch(value) for name, value in zip(wrt, gradients, strict=True)}
