"""How xdist distributes the items: all items of one model, layout and precision go to one worker.

Imported only when xdist distributes.
"""

from __future__ import annotations

import re
from typing import Any

from xdist.scheduler import LoadScopeScheduling

__all__ = ["DeploymentScheduling", "scope_of"]

_CELL = re.compile(
    r"\[(?:.*?-)??(?P<cell>[^\[\]]+?-(?:single|(?:(?:tp|pp|ep|sp|dp|etp)\d+\.?)+)-(?:fp32|bf16|fp16))(?=[-\]])"
)


class DeploymentScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """LoadScopeScheduling by deployment. The controller collects nothing, so the scope is read from the id."""

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def remove_node(self, node: Any) -> str | None:
        """The item that a worker died in, if any. It is not run again: it would kill the next worker, or hide that it
        killed this one."""
        units = self.assigned_work.get(node, {}).values()
        pending = [(unit, nodeid) for unit in units for nodeid, completed in unit.items() if not completed]
        if not pending:
            super().remove_node(node)
            return None
        unit, crashed = pending[0]
        unit[crashed] = True
        super().remove_node(node)
        return str(crashed)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    """``model-layout-precision`` of a node id that has them; its file otherwise."""
    found = _CELL.search(nodeid)
    return found["cell"] if found else nodeid.partition("::")[0]
