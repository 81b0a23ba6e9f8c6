"""Detection limits: which step counts, and which changed token a healthy engine may write."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_adapt.selftest import limits
from pytest_adapt.selftest.limits import STEPS, explained, first_token, smallest

PROMPTS = [(1, 2), (3, 4)]


def test_a_limit_is_the_smallest_step_that_holds() -> None:
    steps = (1.0, 2.0, 3.0, 4.0)
    assert smallest(steps, lambda step: step >= 3) == 3.0
    assert smallest(steps, lambda step: True) == 1.0
    assert smallest(steps, lambda step: False) is None
    assert smallest(steps, lambda step: step in (1.0, 3.0, 4.0)) == 3.0  # not seen at 2: chance saw it at 1


@pytest.mark.parametrize(
    ("near", "wrong", "expected"),
    [(None, None, (None, None)), (3, None, (None, STEPS[3])), (2, 5, (STEPS[5], STEPS[2])), (4, 4, (STEPS[4],) * 2)],
)
def test_the_first_token_is_wrong_or_any(
    monkeypatch: pytest.MonkeyPatch, near: int | None, wrong: int | None, expected: tuple[float | None, ...]
) -> None:
    """Token 8 is a near-tie of 7, token 9 is wrong; both outputs of a step are looked at."""

    def greedy(put: Any, factor: float, precision: str, model: Any) -> list[tuple[int, ...]]:
        step = next((place for place, one in enumerate(STEPS) if factor == 1.0 + one), -1)
        second = 9 if wrong is not None and step >= wrong else 7
        return [(7, 8 if near is not None and step >= near else 7), (7, second)]

    monkeypatch.setattr(limits, "prompts_of", lambda model: PROMPTS)
    monkeypatch.setattr(limits, "OracleReference", lambda *named: "reference")
    monkeypatch.setattr(limits, "greedy", greedy)
    monkeypatch.setattr(limits, "explained", lambda reference, precision, prompt, before, after: 9 not in after)
    model = SimpleNamespace(directory="none", name="none")
    assert first_token(lambda seams, factor: None, "bf16", model) == expected


class _Reference:
    """Tokens 5, 6 and 7 in this order after everything, 0.1 nats apart; errors as given."""

    def __init__(self, error: float, certified: bool) -> None:
        self.emulated = SimpleNamespace(largest=np.full(3, error), certified=np.full(3, certified))
        self.asked: list[tuple[int, ...]] = []

    def record(self, prompt: str, tokens: tuple[int, ...]) -> Any:
        self.asked.append(tokens)
        return SimpleNamespace(
            topk_ids=np.array([[5, 6, 7]] * 3),
            topk_logprobs=np.array([[-1.0, -1.1, -1.2]] * 3),
            emulation=lambda precision: self.emulated,
        )


@pytest.fixture(params=[((1, 5, 9), (1, 6, 2)), ((1, 6, 9), (1, 5, 5))], ids=["best before", "best after"])
def outputs(request: pytest.FixtureRequest) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    yield request.param


def test_a_changed_token_is_explained_by_a_near_tie_or_by_experts(
    outputs: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """What follows the first difference was computed from other tokens, and says nothing."""
    close = _Reference(error=0.06, certified=True)
    assert explained(close, "bf16", (3, 4), *outputs)  # type: ignore[arg-type]
    assert close.asked == [(3, 4, 1)]
    assert not explained(_Reference(1e-4, True), "bf16", (3, 4), *outputs)  # type: ignore[arg-type]
    assert explained(_Reference(1e-4, False), "bf16", (3, 4), *outputs)  # type: ignore[arg-type]


def test_both_tokens_must_be_near_the_best() -> None:
    assert not explained(_Reference(1e-4, True), "bf16", (3,), (6,), (7,))  # type: ignore[arg-type]
    far = _Reference(0.02, True)  # 0.08 nats may be a tie: the second is 0.1 away
    assert not explained(far, "bf16", (3,), (5,), (6,))  # type: ignore[arg-type]
