"""The one error of the oracle: what it refuses, by which rule, and the way out, in one line."""

from __future__ import annotations

__all__ = ["OracleError"]


class OracleError(Exception):
    """A checkpoint, option or argument that the oracle refuses. The message is one line."""
