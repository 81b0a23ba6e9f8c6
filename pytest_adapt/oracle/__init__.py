"""The oracle: a NumPy reference of every model block, with named sites.

Written once, float64, no cache, no sharding; emulations of fp32, bf16 and fp16 are tables over the same code.
Imports neither torch nor any engine.
"""

from __future__ import annotations

from .checkpoint import Checkpoint
from .errors import OracleError
from .model import Oracle, Trace
from .rounding import Rounding, Rule
from .routing import REPLAYED
from .spec import ModelSpec

__all__ = ["REPLAYED", "Checkpoint", "ModelSpec", "Oracle", "OracleError", "Rounding", "Rule", "Trace"]
