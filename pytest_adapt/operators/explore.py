"""Random cases of an operator, and the simplest one that fails: hypothesis, derandomised, in process.

Nothing is kept between runs: the same code explores the same cases everywhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from pytest_adapt.operators.case import Case
from pytest_adapt.operators.definition import Op

__all__ = ["cases", "explore"]

_SEEDS = 1 << 16
_PATIENCE = 10


def cases(op: Op, precision: str) -> st.SearchStrategy[Case]:
    """Any case of an operator; shrinks towards the simplest of each choice."""
    parameters = {
        name: st.integers(choices.start, choices[-1]) if isinstance(choices, range) else st.sampled_from(choices)
        for name, choices in op.space.items()
    }
    how = {"values": st.sampled_from(op.kinds), "memory": st.sampled_from(op.memories)}
    words = st.fixed_dictionaries({**parameters, **how, "seed": st.integers(0, _SEEDS)})
    return words.map(lambda given: op.case(precision, **given))


def explore(op: Op, precision: str, fails: Callable[[Case], bool], *, examples: int, seconds: float) -> Case | None:
    """Try ``examples`` cases; the simplest that fails, found within about ``seconds`` of this process's time, or None.

    A target that computes elsewhere may take several times as long, by the clock.
    """
    known: dict[Case, bool] = {}
    deadline, latest = time.process_time() + seconds, time.monotonic() + _PATIENCE * seconds

    def condition(case: Case) -> bool:
        if case not in known:
            # A failure once seen stays one; when time is up nothing new is tried.
            known[case] = time.process_time() < deadline and time.monotonic() < latest and fails(case)
        return known[case]

    quiet = settings(
        database=None,
        derandomize=True,
        deadline=None,
        max_examples=examples,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    with contextlib.suppress(HypothesisException):
        find(cases(op, precision), condition, settings=quiet)
    return min((case for case, failed in known.items() if failed), key=lambda case: case.size, default=None)
