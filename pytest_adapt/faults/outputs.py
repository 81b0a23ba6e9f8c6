"""What leaves the model wrongly: logits of rows that are no tokens, and tokens that nobody asked to be drawn."""

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


def _zero_is_no_temperature(seams: Seams) -> None:
    """``temperature or 1.0``: greedy output is drawn."""

    def wrapper(original: Operation) -> Operation:
        def sample(logits: Any, **named: Any) -> Any:
            return original(logits, **{**named, "temperature": named["temperature"] or 1.0})

        return sample

    seams.wrap("sample", wrapper)


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
    Fault(
        "SA11",
        "Temperature 0 draws as temperature 1",
        "tinker-cookbook#198",
        90,
        "correctness",
        "",
        ("qwen3-moe-odd", "llama-odd"),
        _zero_is_no_temperature,
        observable="text",
        where="greedy",
        says="instead of",
    ),
)
