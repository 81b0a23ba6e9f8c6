"""Without a target the plugin costs nothing and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

ALLOWED = set(sys.stdlib_module_names) | {
    "pytest",
    "_pytest",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "pytest_adapt",
}
HEAVY = {"numpy", "torch", "safetensors", "hypothesis", "transformers", "adapt_engine"}


def imported(folder: Folder, *args: str) -> set[str]:
    """Top-level packages that a collection imports, and every submodule of ours."""
    command = [sys.executable, "-X", "importtime", "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider", *args]
    done = subprocess.run(command, cwd=folder.path, capture_output=True, text=True, env=os.environ, check=False)
    assert "INTERNALERROR" not in done.stdout + done.stderr
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return {name if name.startswith("pytest_adapt") else name.partition(".")[0] for name in names}


def test_nothing_heavy_is_imported(folder: Folder) -> None:
    (folder.path / "targets.py").unlink()
    without = imported(folder)
    with_plugin = imported(folder, "-p", "pytest_adapt.plugin")
    extra = with_plugin - without
    assert {name for name in extra if not name.startswith("pytest_adapt")} <= ALLOWED
    # Modules whose asserts pytest rewrites (the entry point) are not listed by -X importtime.
    assert {name for name in extra if name.startswith("pytest_adapt")} - {"pytest_adapt", "pytest_adapt.plugin"} == {
        "pytest_adapt.fixtures",
        "pytest_adapt.hookspecs",
        "pytest_adapt.layout",
        "pytest_adapt.options",
        "pytest_adapt.stash",
    }


def test_collection_with_a_target_imports_neither_arrays_nor_engine(folder: Folder) -> None:
    folder.pytester.makepyfile(
        plain="class Target:\n    def open(self, d): ...\n    def run(self, r): ...\n    def close(self): ...\n",
        test_mine="def test_it(target, model, context_length, judge, reference): pass\n",
    )
    found = imported(folder, "-p", "pytest_adapt.plugin", "--adapt-target=py:plain:Target", "test_mine.py")
    assert "pytest_adapt.runner" in found
    assert not found & HEAVY


def test_no_header_no_file_no_change_of_outcome(folder: Folder) -> None:
    folder.pytester.makepyfile(test_mine="def test_it(): pass")
    before = set(Path(folder.path).iterdir())
    command = [sys.executable, "-m", "pytest", "-p", "pytest_adapt.plugin", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=folder.path, capture_output=True, text=True, env=os.environ, check=True)
    assert "adapt" not in done.stdout
    assert set(Path(folder.path).iterdir()) - before <= {folder.path / "__pycache__"}
    assert list((folder.path / ".adapt").iterdir()) == [folder.path / ".adapt" / "models"]


def test_start_up_time(folder: Folder) -> None:
    """Against a run without the plugin: the least of several runs each, interleaved."""
    (folder.path / "targets.py").unlink()
    command = [sys.executable, "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider"]

    def seconds(*args: str) -> float:
        """CPU time: a busy neighbour must not decide."""
        before = os.times()
        subprocess.run([*command, *args], cwd=folder.path, capture_output=True, check=False, env=os.environ)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    pairs = [(seconds(), seconds("-p", "pytest_adapt.plugin")) for _ in range(5)]
    without, with_plugin = (min(column) for column in zip(*pairs, strict=True))
    assert with_plugin < 1.25 * without


@pytest.mark.parametrize("flag", ["--help", "--version", "--markers", "--fixtures"])
def test_pytests_own_questions_are_answered(folder: Folder, flag: str) -> None:
    folder.pytester.makeini("[pytest]\nadapt_target = broken spec\n")
    if flag in ("--markers", "--fixtures"):
        (folder.path / "tox.ini").unlink()
    assert folder.run_subprocess(flag).ret == 0
