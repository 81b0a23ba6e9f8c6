"""adapt-engine: a small inference engine for mixture-of-experts models that shows everything it computes.

from adapt_engine import Engine, EngineOptions, SequenceRequest

with Engine.open("checkpoint", EngineOptions(precision="bf16")) as engine:
    for result in engine.run([SequenceRequest("a", prompt=(1, 2, 3), max_new_tokens=8)]):
        print(result.tokens)
"""

import os

# Read once, when torch loads its OpenMP runtime: spinning threads of several engines would fight for cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from .config import ModelSpec  # noqa: E402
from .errors import CheckpointError, ConfigError, EngineError, LayoutError  # noqa: E402
from .layout import Layout  # noqa: E402
from .runtime.engine import Engine  # noqa: E402
from .runtime.requests import EngineOptions, SequenceRequest, SequenceResult, SequenceUpdate  # noqa: E402
from .version import __version__  # noqa: E402
from .weights.loader import LoadReport  # noqa: E402

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineError",
    "EngineOptions",
    "Layout",
    "LayoutError",
    "LoadReport",
    "ModelSpec",
    "SequenceRequest",
    "SequenceResult",
    "SequenceUpdate",
    "__version__",
]
