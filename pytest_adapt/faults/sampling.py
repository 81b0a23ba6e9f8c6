"""Faults of drawing tokens: temperature, filters, random numbers, the tokens that end an output. No logit is wrong, so
text alone shows them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

MODELS = ("qwen3-moe-odd", "llama-odd", "deepseek-v3-odd-neg")


def _changed(seams: Seams, change: Any) -> None:
    """``change(settings)`` is applied to what every draw is asked with (temperature, top_k, top_p, seed, position)."""

    def wrapper(original: Operation) -> Operation:
        def sample(logits: Any, **settings: Any) -> Any:
            change(settings)
            return original(logits, **settings)

        return sample

    seams.wrap("sample", wrapper)


def _scaled(factor: float) -> Any:
    """The temperature times ``factor``."""

    def install(seams: Seams) -> None:
        _changed(seams, lambda settings: settings.update(temperature=settings["temperature"] * factor))

    return install


def _without(**settings: Any) -> Any:
    """Some of what is asked for is not passed on."""

    def install(seams: Seams) -> None:
        _changed(seams, lambda asked: asked.update(settings))

    return install


def _ignored(seams: Seams) -> None:
    """Whatever temperature is asked for, 1 is used (0 is still greedy)."""
    _changed(seams, lambda settings: settings.update(temperature=1.0 if settings["temperature"] else 0.0))


def _one_for_none(seams: Seams) -> None:
    """``temperature or 1.0``."""
    _changed(seams, lambda settings: settings.update(temperature=settings["temperature"] or 1.0))


def _salted_with_the_slot(seams: Seams) -> None:
    """The place in the batch becomes part of the seed."""
    count = 0

    def salt(settings: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        settings["seed"] ^= count % 5

    _changed(seams, salt)


def _not_renormalised(seams: Seams) -> None:
    """What top_k has left is not made to sum to 1 before top_p looks at it, so that top_p keeps more."""

    def wrapper(original: Operation) -> Operation:
        def sample(logits: Any, **settings: Any) -> Any:
            kept, heat = settings["top_k"], settings["temperature"]
            if heat and 0 < kept < len(logits) and settings["top_p"] < 1:
                scaled = logits.double() / heat
                best = scaled.topk(kept).values
                mass = math.exp(float(best.logsumexp(0) - scaled.logsumexp(0)))
                settings["top_p"] = min(1.0, settings["top_p"] / mass)
            return original(logits, **settings)

        return sample

    seams.wrap("sample", wrapper)


def _crossing_dropped(seams: Seams) -> None:
    """top_p drops the token with which its mass is reached."""

    def wrapper(original: Operation) -> Operation:
        def sample(logits: Any, **settings: Any) -> Any:
            if settings["temperature"] and settings["top_p"] < 1:
                heat = settings["temperature"]
                ranked = (logits.double() / heat).sort(descending=True, stable=True).values
                if settings["top_k"]:
                    ranked = ranked[: settings["top_k"]]
                whole = int((ranked.softmax(-1).cumsum(-1) <= settings["top_p"]).sum())
                settings.update(top_k=max(1, whole), top_p=1.0)
            return original(logits, **settings)

        return sample

    seams.wrap("sample", wrapper)


def _tail_cut(seams: Seams) -> None:
    """Tokens of less than a fiftieth of the best one's probability are never drawn, whatever was asked for."""

    def wrapper(original: Operation) -> Operation:
        def sample(logits: Any, **settings: Any) -> Any:
            if settings["temperature"]:
                floor = logits.max() + settings["temperature"] * math.log(0.02)
                logits = logits.masked_fill(logits < floor, -math.inf)
            return original(logits, **settings)

        return sample

    seams.wrap("sample", wrapper)


def _one_more(seams: Seams) -> None:
    """top_k keeps one token too many."""
    _changed(seams, lambda settings: settings.update(top_k=settings["top_k"] + (settings["top_k"] > 0)))


def _stop_forgotten(seams: Seams) -> None:
    """The tokens that end an output are lost on the way to the scheduler."""

    def wrapper(original: Operation) -> Operation:
        def settled(request: Any) -> Any:
            return dataclasses.replace(original(request), stop=())

        return settled

    seams.wrap("request.settled", wrapper)


def _entry(
    identifier: str,
    title: str,
    report: str,
    install: Any,
    where: str,
    says: str,
    difficulty: str = "medium",
    suite: str = "correctness",
    requirement: int = 113,
) -> Fault:
    return Fault(
        identifier,
        title,
        report,
        requirement,
        suite,
        "",
        MODELS,
        install,
        observable="text",
        difficulty=difficulty,
        where=where,
        says=says,
    )


SHAPE, KEPT, SEED, GREEDY = "samples_follow", "filters_keep", "seed_decides", "are_greedy"
STOP = "stop_token"

FAULTS = (
    _entry("SA02", "The slot is part of the seed", "tt-metal#53802", _salted_with_the_slot, SEED, "draws differ"),
    _entry("SA06", "top_k has no effect", "after sglang#28180", _without(top_k=0), KEPT, "is not among those kept"),
    _entry(
        "SA09", "top_p of masses that top_k left unnormalised", "mlx-lm#388", _not_renormalised, KEPT, "top_k and top_p"
    ),
    _entry("SA11", "Temperature 0 samples at 1", "tinker-cookbook#198", _one_for_none, GREEDY, "temperature 0", "easy"),
    _entry(
        "SA90", "top_p has no effect", "own, after sglang#28180", _without(top_p=1.0), KEPT, "is not among those kept"
    ),
    _entry("SA91", "The temperature has no effect", "own", _ignored, SHAPE, "draws: p", "easy"),
    _entry("SA92", "Softmax temperature a tenth too high", "own", _scaled(1.1), SHAPE, "tokens rarer by", "hard"),
    _entry(
        "SA93", "Softmax temperature a tenth too low", "own", _scaled(1 / 1.1), SHAPE, "tokens more probable by", "hard"
    ),
    _entry("SA94", "Every draw takes the same random number", "own", _without(seed=0, position=0), SHAPE, "sd off"),
    _entry("SA95", "top_p drops the token that reaches it", "own", _crossing_dropped, KEPT, "top_p, "),
    _entry("SA96", "The tail is cut unasked", "own", _tail_cut, SHAPE, "tokens more probable by"),
    _entry("SA97", "top_k keeps one token too many", "own", _one_more, KEPT, "is not among those kept"),
    _entry("SA98", "Sampling is greedy", "own", _without(temperature=0.0), SHAPE, "tokens more probable by", "easy"),
    _entry(
        "SV91", "Stop tokens are forgotten", "own", _stop_forgotten, STOP, "must be the last", "easy", "consistency", 90
    ),
)
