"""Types of command-line arguments that several commands share: what is wrong with one is wrong usage (exit code 2)."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["existing", "folder", "words"]


def folder(text: str) -> Path:
    """A directory that may not be there yet, and is nothing else."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return path


def existing(text: str) -> Path:
    """A directory."""
    if not folder(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not there")
    return Path(text)


def words(text: str) -> str:
    """A reason, which says something."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; say why, in a few words")
    return text.strip()
