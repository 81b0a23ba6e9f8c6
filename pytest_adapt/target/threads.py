"""Threads of targets that compute in this process: several workers must not fight for cores."""

from __future__ import annotations

import os

__all__ = ["calm_openmp", "fair_threads"]


def calm_openmp() -> None:
    """Call before torch is imported: idle OpenMP threads sleep instead of spinning against other workers."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def fair_threads() -> int:
    """This worker's share of the cores, or what OMP_NUM_THREADS says."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
