"""What a selftest has done is kept below ``.adapt/selftest/``, under a digest of the sources that it depends on."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_adapt.documents import DocumentError, Shape, both, choice, fields, named, read, write
from pytest_adapt.shipped import goldens_dir, suites_dir

__all__ = ["Kept", "KeptError", "digest_of_sources", "sources"]

_LIBRARIES = ("numpy", "torch", "pytest")


class KeptError(Exception):
    """What was done cannot be kept; one line with the file and why."""


class Kept:
    """Named JSON documents of one state of the sources."""

    def __init__(self, root: Path, digest: str) -> None:
        self._directory = root / digest[:16]

    def read(self, name: str, shape: Shape) -> dict[str, Any] | None:
        """The document; None where there is none of this name and shape: it is made again."""
        try:
            found = read(self._path(name), fields({"name": choice(name), "document": both(named(_anything), shape)}))
        except DocumentError:
            return None
        document: dict[str, Any] = found["document"]
        return document

    def write(self, name: str, document: dict[str, Any]) -> None:
        """Keep a document, in one step: several processes may write at once. Raises KeptError."""
        path = self._path(name)
        try:
            write(path, json.dumps({"name": name, "document": document}, allow_nan=False))
        except OSError as error:
            raise KeptError(f"{name} cannot be kept: {error}") from None

    def _path(self, name: str) -> Path:
        return self._directory / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


@cache
def digest_of_sources(*modules: str) -> str:
    """SHA-256 of judge, suites, goldens and engine, of the faults' files that are named, and of the versions that they
    run on."""
    digest = hashlib.sha256(" ".join(_versions()).encode())
    for root, path in sources(modules):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def sources(modules: Sequence[str] = ()) -> Iterator[tuple[Path, Path]]:
    """(root, file) of everything that a verdict may depend on. Of the faults' own files only the ``modules``: another
    fault changes nothing of this one; nor does the matrix that is made of them all."""
    package = Path(__file__).resolve().parent.parent
    faults = package / "faults"
    own = {faults / name for name in ("__init__.py", "registry.py", *modules)}
    roots = [package, suites_dir(), goldens_dir()]
    found = find_spec("adapt_engine")  # not imported: only its adapter does that
    if found is not None and found.origin is not None:
        roots.append(Path(found.origin).resolve().parent)
    for root in roots:
        for path in sorted(root.rglob("*")):
            if "__pycache__" not in path.parts and path.is_file() and (path.parent != faults or path in own):
                yield root, path


def _anything(value: Any) -> None:
    return None


def _versions() -> Iterator[str]:
    yield platform.python_version()
    for name in _LIBRARIES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
