"""JSON files that others wrote: read, and held to a shape once, so that nothing downstream meets another one.

A shape is a function of a value: None where it fits, else where and why it does not, such as ``.cases[3].status is 7,
not a text``. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "DocumentError",
    "Shape",
    "both",
    "choice",
    "each",
    "fields",
    "named",
    "number",
    "of_schema",
    "one_line",
    "optional",
    "parse",
    "printable",
    "read",
    "real",
    "text",
    "truth",
    "whole",
    "write",
]

Shape = Callable[[Any], str | None]
_SHOWN = 60
_LARGEST = 1 << 63
_NOT_FINITE = frozenset({"inf", "-inf", "nan"})


class DocumentError(ValueError):
    """A file that cannot be used; one line that names it and the first thing that is wrong."""


def read(path: Path, shape: Shape) -> Any:
    """The document in a file. Raises DocumentError where it cannot be read, is no JSON, or is of another shape."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DocumentError(f"{path}: cannot be read as JSON ({one_line(why, 200)})") from None
    if (problem := shape(found)) is not None:
        raise DocumentError(f"{path}: {one_line(problem, 200).removeprefix('.')}")
    return found


def parse(text: str) -> Any:
    """JSON without numbers that are not finite (it has none), however deep. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    found = float(digits)
    return found if math.isfinite(found) else _refused(digits)


def write(path: Path, content: str) -> None:
    """Write a text file in one step: whoever reads meanwhile, or after a crash, has the old one or the new one. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(content, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def one_line(words: object, most: int = 400) -> str:
    """Words of others as one line of at most ``most`` characters that cannot steer the terminal that shows it."""
    line = " ".join(str(words).split())[: most + 1]
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)
    return line if len(line) <= most else f"{line[:most]}..."


def text(value: Any) -> str | None:
    return None if isinstance(value, str) else _not(value, "a text")


def printable(value: Any) -> str | None:
    """A text that may be shown as it is: it cannot steer a terminal."""
    return None if isinstance(value, str) and value.isprintable() else _not(value, "a text without control characters")


def truth(value: Any) -> str | None:
    return None if isinstance(value, bool) else _not(value, "true or false")


def whole(value: Any) -> str | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
    return None if fits else _not(value, "a whole number")


def choice(*allowed: str) -> Shape:
    """One of these texts."""
    return lambda value: None if value in allowed else _not(value, f"one of {', '.join(allowed)}")


def real(value: Any) -> str | None:
    fits = math.isfinite(value) if isinstance(value, float) else whole(value) is None
    return None if fits else _not(value, "a finite number")


def number(value: Any) -> str | None:
    """A number, or the name of one that JSON does not have."""
    return None if isinstance(value, str) and value in _NOT_FINITE else real(value)


def of_schema(expected: int) -> Shape:
    """An object of this schema."""

    def check(value: Any) -> str | None:
        found = value.get("schema") if isinstance(value, dict) else None
        fits = type(found) is int and found == expected
        return None if fits else f" schema {one_line(repr(found), _SHOWN)}, this version reads {expected}"

    return check


def both(first: Shape, second: Shape) -> Shape:
    """Of the first shape, then of the second."""
    return lambda value: first(value) or second(value)


def optional(shape: Shape) -> Shape:
    """The shape, or null."""
    return lambda value: None if value is None else shape(value)


def each(shape: Shape) -> Shape:
    """A list of such."""

    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return _not(value, "a list")
        for place, one in enumerate(value):
            if (problem := shape(one)) is not None:
                return f"[{place}]{problem}"
        return None

    return check


def named(shape: Shape) -> Shape:
    """An object whose every value is such."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return _not(value, "an object")
        for name, one in value.items():
            if (problem := shape(one)) is not None:
                return f".{name}{problem}"
        return None

    return check


def fields(needed: Mapping[str, Shape], may: Mapping[str, Shape] | None = None) -> Shape:
    """An object with the ``needed`` fields; those that it ``may`` have are of their shape where they are there, and
    nothing is asked of others."""
    every = [*((name, shape, True) for name, shape in needed.items())]
    every += [(name, shape, False) for name, shape in (may or {}).items()]

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return _not(value, "an object")
        for name, shape, must in every:
            if name not in value:
                if must:
                    return f" has no {name!r}"
            elif (problem := shape(value[name])) is not None:
                return f".{name}{problem}"
        return None

    return check


def _not(value: Any, what: str) -> str:
    try:
        shown = json.dumps(value)
    except (ValueError, RecursionError):  # thousands of digits
        shown = "a value"
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f" is {shown}; it must be {what}"
