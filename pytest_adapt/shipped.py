"""Where the shipped suites and golden records lie, in a wheel and in a checkout, and how pytest collects them."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "SuiteModule",
    "case_id",
    "goldens_dir",
    "is_suite_file",
    "program",
    "relative",
    "suite_of",
    "suites_dir",
    "with_suites",
]


def suites_dir() -> Path:
    """The shipped suites: inside the package (wheel) or beside it (checkout)."""
    return _shipped("suites")


def goldens_dir() -> Path:
    """The shipped golden records, read-only to users."""
    return _shipped("goldens")


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def suite_of(path: Path) -> str:
    """Name of the shipped suite that a test file belongs to; "" for a user's own file."""
    suites = suites_dir()
    return path.relative_to(suites).parts[0] if path.is_relative_to(suites) else ""


def is_suite_file(path: Path) -> bool:
    return path.is_relative_to(suites_dir()) and fnmatch.fnmatch(path.name, "test_*.py")


def case_id(path: Path, nodeid: str) -> str:
    """Id of a case: for a shipped suite the same wherever the suites are installed, else the node id."""
    suites = suites_dir()
    if not path.is_relative_to(suites):
        return nodeid
    _, colons, rest = nodeid.partition("::")
    return path.relative_to(suites).as_posix() + colons + rest


def with_suites(
    args: list[str], given: Sequence[str], *, directory: Path, rootdir: Path, testpaths: Iterable[str], pyargs: bool
) -> bool:
    """Change ``args`` in place so that a run without paths collects the shipped suites besides the user's tests.

    ``given`` are the positional arguments among ``args``, ``directory`` the working directory. A positional argument
    that is a path below the suites (a case id) is replaced by its real path. True for a run without paths.
    """
    suites = suites_dir()
    paths = 0
    for argument in given:
        name, colons, rest = argument.partition("::")
        if pyargs or (directory / name).exists():
            paths += 1
        elif (suites / name).exists() and name:
            args[_position(args, argument)] = f"{suites / name}{colons}{rest}"
            paths += 1
    if paths:
        return False
    if not (rootdir / "pytest_adapt" / "plugin.py").is_file():  # this project's own tests are not the user's
        args.extend(_own_tests(directory, rootdir, testpaths))
    args.append(str(suites))
    return True


def _own_tests(directory: Path, rootdir: Path, testpaths: Iterable[str]) -> list[str]:
    """What pytest would collect without us: testpaths from rootdir, else the working directory."""
    if directory == rootdir:
        found = [str(path) for pattern in testpaths for path in sorted(directory.glob(pattern))]
        if found:
            return found
    return [str(directory)]


def _position(args: list[str], argument: str) -> int:
    """Index of a positional argument, not of an equal option value."""
    places = [index for index, word in enumerate(args) if word == argument]
    free = [index for index in places if not index or not args[index - 1].startswith("-") or "=" in args[index - 1]]
    return (free or places)[-1]


class SuiteModule(pytest.Module):
    """A shipped test file. Its node id is its case id wherever it lies. It is imported in importlib mode, so that it
    never clashes with a user's file of the same name, and the user's naming conventions do not apply to it."""

    @classmethod
    def make(cls, path: Path, parent: pytest.Collector) -> SuiteModule:
        made: SuiteModule = cls.from_parent(parent, path=path, nodeid=path.relative_to(suites_dir()).as_posix())
        return made

    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")

    def _getobj(self) -> Any:
        option = self.config.option
        before, option.importmode = option.importmode, "importlib"
        try:
            return super()._getobj()  # type: ignore[no-untyped-call]
        finally:
            option.importmode = before


def program(started: str, python: str, directory: Path) -> tuple[str, ...]:
    """The words that start pytest as this run was started (``started`` is its argv[0]), typed in ``directory``."""
    path = Path(started)
    if path.name == "__main__.py" and path.parent.name == "pytest":
        return (_typed(Path(python), directory), "-m", "pytest")
    return (_typed(path, directory),) if path.name in ("pytest", "py.test") else ("pytest",)


def _typed(path: Path, directory: Path) -> str:
    """A program as one would type it: its name where that finds it, else its path."""
    found = shutil.which(path.name)
    if len(path.parts) == 1 or (found is not None and Path(found).absolute() == path.absolute()):
        return path.name
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path)


def relative(path: Path, start: Path) -> str:
    """``path`` as one would type it from ``start``."""
    try:
        return os.path.relpath(path, start)
    except ValueError:  # another drive
        return str(path)
