"""What the engine raises. Every message names the thing, the rule and the way out, in one line."""

from __future__ import annotations

__all__ = ["CheckpointError", "ConfigError", "EngineError", "LayoutError"]


class EngineError(Exception):
    """The engine cannot do what was asked (option, request, state)."""


class CheckpointError(EngineError):
    """A checkpoint directory cannot be trusted; the message names the file and the tensor or key."""


class LayoutError(EngineError):
    """A model cannot be spread over ranks so; the message names the rule and the nearest layouts that can."""


class ConfigError(CheckpointError):
    """config.json describes a model that this engine does not compute; the message names the key."""
