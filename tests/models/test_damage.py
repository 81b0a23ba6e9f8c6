"""Damaged copies: every kind changes the copy, never the checkpoint that it was made from, and nothing stays behind."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from pytest_adapt.models import damage, materialise


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialise("llama-odd", tmp_path_factory.mktemp("models"))


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@pytest.mark.requirement(15)
@pytest.mark.parametrize("linked", [True, False], ids=["hard links", "copies"])
@pytest.mark.parametrize("kind", damage.KINDS)
def test_only_the_copy_is_damaged(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool
) -> None:
    def refuse(source: str, destination: str) -> None:
        raise OSError("no hard links here")

    if not linked:
        monkeypatch.setattr(os, "link", refuse)
    before = digests(checkpoint)
    with damage.applied(kind, checkpoint, tmp_path / "copy") as broken:
        after = digests(broken.directory)
        assert after != before
        assert set(after) <= set(before), "no file of ours lies in the copy"
        assert any(name in broken.what for name in broken.named)
        same = [path for path in broken.directory.iterdir() if after[path.name] == before[path.name]]
        assert all(path.samefile(checkpoint / path.name) == linked for path in same)
        assert digests(checkpoint) == before
    assert not list(tmp_path.iterdir())
    assert digests(checkpoint) == before


def test_a_failure_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError), damage.applied("nan", checkpoint, tmp_path / "copy"):
        raise KeyError("in the body")
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_names_those_that_exist(checkpoint: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="unknown damage 'rust'; known: truncated"),
        damage.applied("rust", checkpoint, tmp_path / "copy"),
    ):
        pass
