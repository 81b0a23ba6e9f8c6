"""What the scripts of this folder that go on where they were stopped share: one line of JSON for each thing done."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """A type of argparse: how many of something, one at least."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def read(path: Path, *, mend: bool = False) -> list[dict[str, Any]]:
    """Everything done so far; nothing where there is no such file.

    A last line that was cut off, because the script was stopped while it wrote, is left out with a message; with
    ``mend`` the file loses it too, so that the next line does not continue it. Raises SystemExit for any other line
    that is no JSON.
    """
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole, newline, rest = content.rpartition(b"\n")
    if rest:
        print(f"{path}: its last line was cut off; it counts as not done", file=sys.stderr)
        if mend:
            path.write_bytes(whole + newline)
    found = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise SystemExit(f"{path}:{number}: no JSON ({error}); remove the line, and it is done again") from None
    return found


def note(path: Path, done: dict[str, Any]) -> None:
    """Add one line, at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(done) + "\n")
