"""High-water marks of processes, as the system tells them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pytest_adapt.perf.memory import own_peak, peak_resident, tree_peak

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")


@pytest.mark.requirement(70)
def test_a_passing_allocation_shows_until_the_mark_is_set_again() -> None:
    before = own_peak(reset=True)
    if before is None:
        pytest.skip("this system does not let a process reset its mark")
    block = np.ones(1 << 24)  # 128 MiB, touched
    del block
    high = own_peak(reset=False)
    assert high is not None and high - before > 100 << 20
    again = own_peak(reset=True)
    assert again is not None and again < high - (100 << 20)


def test_children_count_and_processes_that_ended_do_not() -> None:
    line = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()  # the grandchild runs
        whole, alone = tree_peak(child.pid, False), peak_resident((child.pid,), False)
        assert whole is not None and alone is not None and whole > alone > 0
        child.stdin.write(b"\n")
        child.stdin.close()
        child.wait()
    assert peak_resident((child.pid,), False) is None
    assert peak_resident((child.pid,), True) is None
