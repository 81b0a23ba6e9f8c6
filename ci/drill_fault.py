"""One fault in one rank process: run by the nursery before it forks the ranks (`Nursery(preload=...)`).

Environment ``ADAPT_DRILL``, JSON: kind (kill, stall, drop, corrupt), rank, message (its how-manieth), seed, and mark,
a file that gets the moment of the fault (`time.monotonic`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from adapt_engine.comm.distributed import DistributedCommunicator

DRILL = json.loads(os.environ["ADAPT_DRILL"])
ORIGINAL = DistributedCommunicator._post


def damaged(parts: list[Any]) -> list[Any]:
    """The message with one bit of it changed."""
    dice = random.Random(DRILL["seed"])
    parts = [part.clone() for part in parts]
    part = dice.choice(parts)
    part[dice.randrange(part.numel())] ^= 1 << dice.randrange(8)
    return parts


def post(self: Any, call: Any, peer: int, kind: int, number: int, parts: list[Any]) -> list[Any]:
    count = self.drill_messages = getattr(self, "drill_messages", 0) + 1
    if self.rank != DRILL["rank"] or count != DRILL["message"]:
        return ORIGINAL(self, call, peer, kind, number, parts)
    Path(DRILL["mark"]).write_text(repr(time.monotonic()))
    if DRILL["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if DRILL["kind"] == "stall":
        os.kill(os.getpid(), signal.SIGSTOP)
    if DRILL["kind"] == "drop":
        return []
    return ORIGINAL(self, call, peer, kind, number, damaged(parts))


DistributedCommunicator._post = post  # type: ignore[method-assign]
