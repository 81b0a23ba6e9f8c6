"""A slow item shows that it lives; a quick one, and a run that asked for silence, say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

SLOW = """
    import time
    from targets import Echo
    class Slow(Echo):
        def run(self, requests):
            for request in requests:
                if len(request.prompt) == 3:
                    time.sleep(2)
                yield from super().run([request])
"""
# What an item says is shown when it fails: the line must not be there.
TESTS = """
    def test_slow(target):
        target.score_all({"a": (5, 6), "b": (5, 6, 7)})
        assert 0
    def test_quick(target):
        target.score((5, 6))
"""
SOON = """
    from pytest_adapt import heartbeat
    heartbeat.FIRST, heartbeat.EVERY = 0.1, 0.2
"""
ARGS = ("-p", "soon", "--adapt-target=py:slow:Slow", "--adapt-precisions=fp32", "--adapt-models=qwen3-moe-odd")


@pytest.mark.parametrize("spread", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["alone", "xdist"])
def test_a_slow_item_says_what_it_waits_for(
    folder: Folder, write: Callable[..., object], monkeypatch: pytest.MonkeyPatch, spread: tuple[str, ...]
) -> None:
    if spread:
        pytest.importorskip("xdist")
    write(test_mine=TESTS, soon=SOON, slow=SLOW)
    monkeypatch.syspath_prepend(folder.path)
    monkeypatch.setenv("PYTHONPATH", str(folder.path), prepend=":")
    result = folder.run_subprocess(*ARGS, "test_mine.py", *spread)
    assert result.parseoutcomes() == {"passed": 1, "failed": 1}
    lines = [line for line in result.errlines if line.startswith("adapt: ")]
    said = "adapt: test_mine.py::test_slow[qwen3-moe-odd-single-fp32]: request 2 of 2, "
    assert any(line.startswith(said) and line.endswith(" s") for line in lines)
    assert "request 2 of 2" not in result.stdout.str()
    assert "request 2 of 2" not in (folder.path / ".adapt" / "report" / "report.json").read_text()


def test_twice_quiet_is_silent(folder: Folder, write: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    write(test_mine=TESTS, soon=SOON, slow=SLOW)
    monkeypatch.setenv("PYTHONPATH", str(folder.path), prepend=":")
    result = folder.run_subprocess(*ARGS, "test_mine.py", "-q", "-q")
    assert "adapt: test_mine" not in result.stderr.str()
