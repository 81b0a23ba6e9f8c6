"""``python -m pytest_adapt``: what holds for all its commands."""

from __future__ import annotations

import subprocess
import sys


def test_a_reader_that_leaves_early_gets_no_complaint() -> None:
    """``python -m pytest_adapt faults list | head -1``."""
    wait = (
        "import sys; sys.stdin.read(); import pytest_adapt.__main__ as m; raise SystemExit(m.main(['faults', 'list']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
