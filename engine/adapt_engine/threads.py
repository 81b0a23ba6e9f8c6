"""Threads that torch and the native kernels use: the same number, so that neither fights the other for cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .kernels import native

__all__ = ["follow", "limited", "use"]


def use(count: int) -> None:
    """Compute on ``count`` threads from now on."""
    torch.set_num_threads(count)
    follow()


def follow() -> None:
    """Give the native kernels as many threads as torch has."""
    module = native.load()
    if module is not None:
        module.set_threads(torch.get_num_threads())


@contextmanager
def limited(count: int) -> Iterator[None]:
    """``count`` threads within, as many as before afterwards."""
    before = torch.get_num_threads()
    use(count)
    try:
        yield
    finally:
        use(before)
