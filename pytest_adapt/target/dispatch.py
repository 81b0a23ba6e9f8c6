"""What torch does under a target: dispatched calls, and storages that come out of one and did not go in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["dispatch_watcher"]


def dispatch_watcher(add: Callable[[str, float], None]) -> Any:
    """A context manager: what torch dispatches in this thread while it lasts is added to ``framework.calls``,
    ``framework.allocations`` and ``framework.allocated_bytes``."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Counts dispatched calls, and storages that come out of a call and did not go in."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answer = func(*args, **(kwargs or {}))
            given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            add("framework.calls", 1)
            made = {_storage(leaf): leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)}
            for storage, leaf in made.items():
                if storage not in given:
                    add("framework.allocations", 1)
                    add("framework.allocated_bytes", leaf.untyped_storage().nbytes())
            return answer

    return Watcher()  # type: ignore[no-untyped-call]


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
