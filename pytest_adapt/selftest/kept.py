"""What a selftest has done is kept below ``.adapt/selftest/``, under a digest of the sources that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_adapt.shipped import goldens_dir, suites_dir

__all__ = ["Kept", "digest_of_sources"]

_OUTSIDE = ("faults", "inspect", "perf", "report", "selftest")
"""Parts of the judge on which no verdict depends. A fault's own file is named by who asks."""
_LIBRARIES = ("numpy", "torch", "pytest")


class Kept:
    """Named JSON documents of one state of the sources."""

    def __init__(self, root: Path, digest: str) -> None:
        self._directory = root / digest[:16]

    def read(self, name: str) -> dict[str, Any] | None:
        """The document; None where there is none, or a torn one."""
        try:
            found = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found["document"] if isinstance(found, dict) and found.get("name") == name else None

    def write(self, name: str, document: dict[str, Any]) -> None:
        """Keep a document, in one step: several processes may write at once."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps({"name": name, "document": document}, allow_nan=False), encoding="utf-8")
        part.replace(path)

    def _path(self, name: str) -> Path:
        return self._directory / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


@cache
def digest_of_sources(*modules: str) -> str:
    """SHA-256 of judge, suites, goldens and engine, of the named modules, and of the versions that they run on."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(" ".join(_versions()).encode())
    for path in _sources(package):
        digest.update(path.name.encode() + path.read_bytes())
    for name in modules:
        digest.update((package / name).read_bytes())
    return digest.hexdigest()


def _sources(package: Path) -> Iterator[Path]:
    for path in _files(package, "*.py"):
        inside = path.relative_to(package).parts
        if inside[0] not in _OUTSIDE:
            yield path
    yield from (package / "selftest" / name for name in ("memo.py", "nested.py", "trial.py"))
    yield from _files(suites_dir(), "*.py")
    yield from _files(goldens_dir(), "*.json")
    found = find_spec("adapt_engine")  # not imported: only its adapter does that
    if found is not None and found.origin is not None:
        engine = Path(found.origin).resolve().parent
        yield from _files(engine, "*.py")
        yield from _files(engine, "*.so")


def _files(directory: Path, pattern: str) -> Iterable[Path]:
    return sorted(path for path in directory.rglob(pattern) if "__pycache__" not in path.parts)


def _versions() -> Iterator[str]:
    yield platform.python_version()
    for name in _LIBRARIES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
