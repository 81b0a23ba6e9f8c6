"""One BLAS thread while the oracle computes.

The oracle runs beside the engine that it judges, often on the same cores. OpenBLAS threads spin while they wait for
each other: with two of them beside a busy neighbour a run of a small model took 3.8 s instead of 0.1 s.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

__all__ = ["one_blas_thread"]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold the OpenBLAS in NumPy's wheels to one thread, then give back what was. Other BLAS stay as they are."""
    found = _openblas()
    if found is None:
        yield
        return
    get, put = found
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)


@functools.cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    folders = (Path(np.__file__).parent.with_name("numpy.libs"), Path(np.__file__).parent / ".dylibs")
    for file in (file for folder in folders for file in sorted(folder.glob("*openblas*"))):
        library = ctypes.CDLL(str(file))
        for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
            get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
            put = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if get is not None and put is not None:
                put.argtypes, put.restype = [ctypes.c_int], None
                return get, put
    return None
