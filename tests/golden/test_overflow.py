"""A precision in which eager code overflows has no yardstick, and is refused rather than judged by NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytest_adapt.golden.record import RecordError, RecordKey, make_record
from pytest_adapt.oracle import Rounding


class Overflowing:
    """An oracle whose emulations overflow."""

    def __init__(self, oracle: Any) -> None:
        self._oracle = oracle
        self.spec = oracle.spec

    def run(self, tokens: Any, *, rounding: Rounding | None = None, **how: Any) -> Any:
        trace = self._oracle.run(tokens, rounding=rounding, **how)
        if rounding is not None:
            trace.logits[2, 5] = np.inf
        return trace


@pytest.mark.requirement(62)
def test_an_overflowing_emulation_is_refused(live: Any, tokens: Any) -> None:
    key = RecordKey("m", "p", "s", "w", "t")
    assert make_record(Overflowing(live.oracle), key, tokens(6), ()).precisions == ()
    with pytest.raises(RecordError, match="overflows in fp16"):
        make_record(Overflowing(live.oracle), key, tokens(6), ("fp16",))
