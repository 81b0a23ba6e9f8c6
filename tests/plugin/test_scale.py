"""Ten thousand items cost less than three times what bare parametrisation of as many costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Folder

FUNCTIONS = 40
ROWS = 250
LIMIT = 3.0


def test_collection_is_cheap(folder: Folder) -> None:
    contexts = ",".join(str(n) for n in range(1, ROWS + 1))
    ours = "\n".join(f"def test_{i}(target, context_length): pass" for i in range(FUNCTIONS))
    bare = f"import pytest\nROWS = [('llama-odd', 'single', 'fp32', n) for n in range(1, {ROWS + 1})]\n"
    bare += "IDS = ['-'.join(map(str, row)) for row in ROWS]\n" + "\n".join(
        f"@pytest.mark.parametrize('m,l,p,c', ROWS, ids=IDS)\ndef test_{i}(m, l, p, c): pass" for i in range(FUNCTIONS)
    )
    folder.pytester.makepyfile(test_ours=ours, test_bare=bare)
    args = ["--adapt-target=py:targets:Echo", "--adapt-models=llama-odd", "--adapt-precisions=fp32"]
    active = ["-p", "pytest_adapt.plugin", *args, f"--adapt-contexts={contexts}", "test_ours.py"]

    def seconds(*args: str) -> float:
        command = [sys.executable, "-m", "pytest", "--co", "-qq", "-p", "no:cacheprovider", *args]
        started = time.process_time(), os.times()
        done = subprocess.run(command, cwd=folder.path, capture_output=True, text=True, env=os.environ, check=True)
        assert f"{FUNCTIONS * ROWS}" in done.stdout.replace(",", ""), done.stdout[-300:]
        return os.times().children_user - started[1].children_user

    pairs = [(seconds("test_bare.py"), seconds(*active)) for _ in range(3)]
    bare_seconds, our_seconds = (min(column) for column in zip(*pairs, strict=True))
    assert our_seconds < LIMIT * bare_seconds, f"{our_seconds:.2f} s against {bare_seconds:.2f} s"
