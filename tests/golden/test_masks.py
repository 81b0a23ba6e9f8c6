"""Of searched prompts nearly every position is certified, in every precision, in every record that ships."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_adapt.golden.record import Record
from pytest_adapt.golden.store import shipped_store

LEAST = 0.95


@pytest.mark.requirement(113)
def test_searched_prompts_are_certified_nearly_everywhere() -> None:
    store = shipped_store()
    searched = [name for name in store.entries if ".searched-" in name]
    assert len(searched) >= 8
    shares = {}
    for name in searched:
        record = Record.load(store.path(name))
        for precision in record.precisions:
            shares[name, precision] = float(np.mean(record.certified(precision)))
    assert not {key: share for key, share in shares.items() if share < LEAST}
