"""From ``--adapt-baseline`` to two sides: a git ref, a wheel, or another target's spec.

A ref and a wheel are installed once below ``.adapt/gate/``, and so is the working tree that a ref is compared with: at
paths of equal length, for the length of a path moves what lies behind it in memory, and that shows in times.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_adapt.perf.sides import Side, search_path
from pytest_adapt.target.process import tail
from pytest_adapt.target.protocol import TargetError
from pytest_adapt.target.registry import Registry, TargetSpec

__all__ = ["Baseline", "BaselineError", "Builder", "resolve_baseline"]

_SPEC = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9_-]*)(\[[^\]]*\])?(:.*)?", re.DOTALL)
_WHEEL = re.compile(r"(?P<path>.+\.whl)(#sha256=(?P<digest>[0-9a-f]{64}))?")
_Fill = Callable[[Path], None]
_KEY = 16
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


class BaselineError(Exception):
    """A baseline cannot be had; the message names it, the rule and the way out."""


@dataclass(frozen=True)
class Builder:
    """Installs the sides of a run. ``root`` is the user's rootdir, ``command`` the shell line that builds one side
    ({source}, {site}); empty for pip, once for the project in the sources and once for each in a folder directly below.
    """

    root: Path
    command: str = ""

    @property
    def store(self) -> Path:
        """Where builds lie, one folder a side and key."""
        return self.root / ".adapt" / "gate"

    def from_ref(self, commit: str, top: Path) -> Path:
        """Folder ``side-a/KEY`` with the files of a commit in ``src`` and what they install in ``site``."""

        def fill(source: Path) -> None:
            archive = source.with_name("tree.tar")
            _git(top, "archive", "--format=tar", f"--output={archive}", commit)
            try:
                with tarfile.open(archive) as tree:  # links may lead anywhere: it is the user's own repository
                    tree.extractall(source, filter="tar")
            except tarfile.TarError as error:
                raise BaselineError(f"the files of {commit[:8]} cannot be laid out: {error}") from error
            archive.unlink()

        return self._built("side-a", self._key(commit), fill)

    def from_tree(self, top: Path) -> Path:
        """The same of the working tree, changed and new files included, as ``side-b/KEY``."""
        names = _git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        # Our own folder holds these copies; git need not ignore it.
        files = sorted(name for name in set(names) if ".adapt" not in Path(name).parts and _copied(top / name))
        digest = hashlib.sha256()
        for name in files:
            place = top / name
            told = f"-> {os.readlink(place)}" if place.is_symlink() else _digest_of(place)
            digest.update(f"{name}\0{told}\n".encode())

        def fill(source: Path) -> None:
            for name in files:
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(top / name, source / name, follow_symlinks=False)

        return self._built("side-b", self._key(digest.hexdigest()), fill)

    def from_wheel(self, wheel: Path, digest: str) -> tuple[Path, Path]:
        """(side-a with the wheel, side-b with what this interpreter imports under the same names)."""

        def install(folder: Path) -> None:
            _run([*_PIP, "--target", str(folder / "site"), str(wheel)], folder / "build.log", f"{wheel.name}")

        a = self._once("side-a", digest[:_KEY], install)
        found = {name: _imported(name) for name in sorted(_modules(a / "site"))}
        told = hashlib.sha256()
        for name, place in found.items():
            for file in _files_of(place):
                told.update(f"{name}\0{file.relative_to(place.parent)}\0{_digest_of(file)}\n".encode())

        def copy(folder: Path) -> None:
            (folder / "site").mkdir()
            for place in found.values():
                if place.is_dir():
                    shutil.copytree(place, folder / "site" / place.name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy2(place, folder / "site" / place.name)

        return a, self._once("side-b", told.hexdigest()[:_KEY], copy)

    def _forget(self, place: Path) -> None:
        """Delete older builds of a side."""
        others = [one for one in place.parent.iterdir() if one != place and len(one.name) == _KEY]
        for one in sorted(others, key=lambda one: one.stat().st_mtime)[: max(0, len(others) - _KEPT + 1)]:
            shutil.rmtree(one, ignore_errors=True)

    def _key(self, of: str) -> str:
        """The same sources, built otherwise or for another interpreter, are another build."""
        parts = (of, self.command, sys.executable, sys.version)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY]

    def _built(self, side: str, key: str, fill: _Fill) -> Path:
        def make(folder: Path) -> None:
            source, site = folder / "src", folder / "site"
            source.mkdir()
            site.mkdir()
            fill(source)
            if self.command:
                line = self.command.replace("{source}", shlex.quote(str(source)))
                _run(["/bin/sh", "-c", line.replace("{site}", shlex.quote(str(site)))], folder / "build.log", side)
                return
            for project in _projects(source):
                isolated = ["--no-build-isolation"] if _can_build(project) else []
                words = [*_PIP, *isolated, "--target", str(site), str(project)]
                _run(words, folder / "build.log", f"{side}: {project.relative_to(source)}")

        return self._once(side, key, make)

    def _once(self, side: str, key: str, make: _Fill) -> Path:
        """The folder of a build, made now where it is not there; a build that fails leaves nothing but its log."""
        place = self.store / side / key
        if place.is_dir():
            return place
        part = place.with_name(f"{key}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            make(part)
        except BaseException:
            log = part / "build.log"
            if log.is_file():
                log.replace(self.store / f"{side}.log")
            shutil.rmtree(part, ignore_errors=True)
            raise
        if not place.is_dir():
            part.replace(place)
            self._forget(place)
        else:  # another run was quicker
            shutil.rmtree(part, ignore_errors=True)
        return place


_KEPT = 4
"""Builds of each side that are kept, the newest: each state of the working tree is one."""
_PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]


@dataclass(frozen=True)
class Baseline:
    """A baseline that exists. `sides` has it installed, which may take a minute."""

    label: str
    """For people."""
    pinned: bool
    """Whether the same words mean the same code tomorrow: a commit, a tag, a wheel with its hash, a target's spec. A
    branch moves: a regression that lands on it is compared with itself from then on."""
    spec: TargetSpec
    """Of the target that stands against it."""
    other: TargetSpec | None = None
    """Of the baseline, where it is a target of its own."""
    wheel: Path | None = None
    digest: str = ""
    """SHA-256 of the wheel."""
    top: Path = Path()
    commit: str = ""
    """Of the repository at ``top``."""

    def sides(self, builder: Builder) -> tuple[Side, Side]:
        """(the baseline, the target). Raises BaselineError where one cannot be built."""
        here = search_path()
        if self.other is not None:
            return Side(self.label, self.other, here), Side(self.spec.text, self.spec, here)
        if self.wheel is not None:
            a, b = builder.from_wheel(self.wheel, self.digest)
            old = Side(self.label, self.spec, (str(a / "site"), *here))
            return old, Side(f"{self.spec.text} as installed", self.spec, (str(b / "site"), *here))
        a, b = builder.from_ref(self.commit, self.top), builder.from_tree(self.top)
        return self._side(self.label, a, here), self._side("the working tree", b, here)

    def _side(self, label: str, place: Path, here: Sequence[str]) -> Side:
        """A side that finds what was installed first, and folders of its copy in place of the repository's."""
        site = [str(place / "site")] if any((place / "site").iterdir()) else []
        paths = (*site, *(_moved(entry, self.top, place / "src") for entry in here))
        inside = Path(_moved(str(self.spec.settings.rootdir), self.top, place / "src"))
        return Side(label, replace(self.spec, settings=replace(self.spec.settings, rootdir=inside)), paths)


def resolve_baseline(text: str, spec: TargetSpec, registry: Registry, root: Path) -> Baseline:
    """What ``text`` means, in this order: a wheel (FILE.whl, with #sha256=... pinned), a target's spec, a git ref of
    the repository that ``root`` lies in. Raises BaselineError."""
    if (found := _WHEEL.fullmatch(text)) is not None:
        wheel, digest = root / found["path"], found["digest"] or ""
        if not wheel.is_file():
            raise BaselineError(f"{wheel} does not exist; what ends in .whl is the path of a wheel, from rootdir")
        told = _digest_of(wheel)
        if digest and digest != told:
            raise BaselineError(f"{wheel} has sha256 {told}, not the pinned one; it is another wheel than it was")
        return Baseline(f"{wheel.name} ({told[:8]})", bool(digest), spec, wheel=wheel, digest=told)
    matched = _SPEC.fullmatch(text)
    if matched is not None and matched["scheme"].lower() in registry.schemes:
        try:
            other = registry.resolve(text, rootdir=root, mode=spec.settings.mode)
        except TargetError as error:
            raise BaselineError(str(error)) from None
        return Baseline(text, True, spec, other=other)
    try:
        top = Path(_git(root, "rev-parse", "--show-toplevel").strip())
        commit = _git(top, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}").strip()
    except BaselineError:
        known = ", ".join(registry.schemes)
        raise BaselineError(
            f"{text!r} is no commit of the repository of {root}, no wheel (FILE.whl) and no target ({known}); "
            "a shallow clone lacks old commits: git fetch --tags --unshallow"
        ) from None
    named = commit[:8] if commit.startswith(text) else f"{text} ({commit[:8]})"
    pinned = _COMMIT.fullmatch(text) is not None or _is_tag(top, text)
    return Baseline(named, pinned, spec, top=top, commit=commit)


def _copied(place: Path) -> bool:
    """Whether it is a file or a link (what was deleted, and a repository inside, is not)."""
    return place.is_symlink() or place.is_file()


def _moved(entry: str, top: Path, source: Path) -> str:
    """A folder inside the repository, as it lies in a copy of it; any other stays. What git ignores (environments,
    builds) is not copied and stays where it is."""
    path = Path(entry)
    if not path.is_relative_to(top.resolve()):
        return entry
    inside = source / path.relative_to(top.resolve())
    return str(inside) if inside.is_dir() else entry


def _is_tag(top: Path, ref: str) -> bool:
    try:
        _git(top, "rev-parse", "--verify", "--quiet", f"refs/tags/{ref}")
    except BaselineError:
        return False
    return True


def _projects(source: Path) -> list[Path]:
    """The project in a source tree and those in folders directly below it."""
    folders = [source, *sorted(entry for entry in source.iterdir() if entry.is_dir())]
    found = []
    for folder in folders:
        file = folder / "pyproject.toml"
        if file.is_file() and "build-system" in tomllib.loads(file.read_text(encoding="utf-8")):
            found.append(folder)
    return found


def _can_build(project: Path) -> bool:
    """Whether what a project builds with is installed here, so that nothing need be fetched."""
    wanted = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["build-system"].get("requires", [])
    for requirement in wanted:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        try:
            importlib.metadata.version(name[0] if name else requirement)
        except importlib.metadata.PackageNotFoundError:
            return False
    return True


def _modules(site: Path) -> set[str]:
    """Names of the modules and packages that were installed into a folder; scripts and metadata are none."""
    entries = [entry for entry in site.iterdir() if entry.suffix in (".py", ".so") or (entry / "__init__.py").is_file()]
    return {entry.name.partition(".")[0] for entry in entries}


def _imported(name: str) -> Path:
    """The package folder, or the file, that ``import name`` finds."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    places = list(found.submodule_search_locations or ()) if found else []
    if places:
        return Path(places[0])
    if found is not None and found.origin and Path(found.origin).is_file():
        return Path(found.origin)
    raise BaselineError(f"the wheel has the module {name}, which is not installed here: there is nothing to compare")


def _files_of(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    yield from (file for file in sorted(place.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)


def _digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _git(where: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise BaselineError("a baseline that is a git ref needs git, which is not installed") from None
    except subprocess.CalledProcessError as error:
        raise BaselineError(f"git {' '.join(words)}: {error.stderr.strip() or error.returncode}") from None
    return done.stdout


def _run(words: Sequence[str], log: Path, what: str) -> None:
    with log.open("ab") as file:
        done = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise BaselineError(f"{what} cannot be built ({shlex.join(words)}: status {done.returncode})\n{tail(log)}")
