"""What leaves the model wrongly: logits of rows that are no tokens."""

from __future__ import annotations

from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

_PADDING = 7


def _padding_answers(seams: Seams) -> None:
    """The last rows of the head are padding and answer 0, which wins where all others are negative."""

    def wrapper(original: Operation) -> Operation:
        def lm_head(x: Any, weight: Any) -> Any:
            logits = original(x, weight).clone()
            logits[:, -_PADDING:] = 0
            return logits

        return lm_head

    seams.wrap("lm_head", wrapper)


FAULTS = (
    Fault(
        "PL03",
        "Padded rows of the head answer zero",
        "mirage#751, tt-metal#47021",
        56,
        "correctness",
        "logits",
        ("qwen3-moe-odd", "mixtral-odd", "llama-odd"),
        _padding_answers,
    ),
)
