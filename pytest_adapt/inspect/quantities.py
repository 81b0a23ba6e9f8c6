"""Reading and writing quantities on the command line: 16x64GiB, 1M tokens, bytes."""

from __future__ import annotations

import re

from pytest_adapt.inspect.structure import InspectError

__all__ = ["GIB", "devices_of", "gib", "tokens_of"]

GIB = 1 << 30
_DEVICES = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(GiB|GB|G|TiB|TB|MiB|MB)", re.IGNORECASE)
_UNITS = {"gib": GIB, "g": GIB, "gb": 10**9, "tib": 1 << 40, "tb": 10**12, "mib": 1 << 20, "mb": 10**6}
_TOKENS = re.compile(r"(\d+)(K|M|)", re.IGNORECASE)


def devices_of(text: str) -> tuple[int, int]:
    """(number of cards, bytes of each) from ``16x64GiB``; GB are decimal. Raises InspectError."""
    found = _DEVICES.fullmatch(text.strip())
    number, size = (int(found[1] or 1), float(found[2])) if found else (0, 0.0)
    if not found or number < 1 or size <= 0:
        raise InspectError(f"devices {text!r}: expected a number of cards and their memory, as in 16x64GiB")
    if number > 1 << 16:
        raise InspectError(f"devices {text!r}: at most {1 << 16} cards")
    return number, int(size * _UNITS[found[3].lower()])


def tokens_of(text: str) -> int:
    """Tokens from ``131072``, ``128K`` (x 1024) or ``1M`` (x 1024 x 1024). Raises InspectError."""
    found = _TOKENS.fullmatch(text.strip())
    value = int(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2].lower()] if found else 0
    if not 1 <= value <= 1 << 40:
        raise InspectError(f"context {text!r}: expected tokens, as in 131072, 128K or 1M (K = 1024, M = 1024 x 1024)")
    return value


def gib(value: float) -> str:
    """Bytes as GiB with three significant digits."""
    size = value / GIB
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}" if size >= 10 else f"{size:.2f}"
