"""Prompts on which routing is certain: token by token, the candidate whose narrowest choice is widest.

A router flips when two scores at the border of its choice are closer than their error. On random prompts
that happens every few dozen tokens in bfloat16, and everything after a flip differs. Here each next token is
the best of a few random candidates: the one whose smallest selection margin, over layers and over the choices
made in each (expert groups, then experts), is widest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_adapt.models.entries import ModelError
from pytest_adapt.sites import site
from pytest_adapt.target.protocol import Request, Target, TargetError

if TYPE_CHECKING:
    from pytest_adapt.oracle import Oracle

__all__ = [
    "SELECTION",
    "Choice",
    "Found",
    "LastRows",
    "choice_of",
    "margin",
    "of_oracle",
    "of_target",
    "save",
    "search",
]

SELECTION = "layer.*.moe.router.selection"
LastRows = Callable[[Sequence[tuple[int, ...]]], Sequence[Mapping[str, np.ndarray]]]
"""Token sequences that differ in their last token -> for each: site -> selection scores [experts] of that token."""


@dataclass(frozen=True)
class Choice:
    """What a router chooses: ``chosen`` experts, from the best ``kept`` of ``groups`` groups."""

    chosen: int
    groups: int = 1
    kept: int = 1


@dataclass
class Found:
    """A searched prompt and, for each of its tokens, the narrowest normalised margin."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def choice_of(config: Mapping[str, Any]) -> Choice:
    """The router of a checkpoint's config.json."""
    return Choice(config["num_experts_per_tok"], config.get("n_group") or 1, config.get("topk_group") or 1)


def margin(selection: np.ndarray, choice: Choice) -> float:
    """Distance of one row of selection scores [experts] from a different choice, in standard deviations of the row.

    A group's score is the sum of its two best (DeepSeek-V3, arXiv 2412.19437 and its reference code), which errs
    by up to twice the error of one score: group margins count half.
    """
    scores = np.asarray(selection, dtype=np.float64)
    spread = float(scores.std()) or 1.0
    widest = np.inf
    if choice.groups > choice.kept:
        rows = np.sort(scores.reshape(choice.groups, -1), axis=1)
        order = np.argsort(-rows[:, -2:].sum(axis=1), kind="stable")
        best = rows[order, -2:].sum(axis=1)
        widest = 0.5 * (best[choice.kept - 1] - best[choice.kept])
        scores = rows[order[: choice.kept]].ravel()
    ranked = np.sort(scores)[::-1]
    if len(ranked) > choice.chosen:
        widest = min(widest, ranked[choice.chosen - 1] - ranked[choice.chosen])
    return float(widest / spread)


def of_target(target: Target) -> LastRows:
    """Last-row selection scores from an open target that taps routers (its deployment asked for `SELECTION`)."""

    def run(sequences: Sequence[tuple[int, ...]]) -> list[Mapping[str, np.ndarray]]:
        requests = [
            Request(id=str(i), prompt=tokens, want=frozenset({"taps"}), first_row=len(tokens) - 1)
            for i, tokens in enumerate(sequences)
        ]
        answers: list[Mapping[str, np.ndarray]] = [{} for _ in sequences]
        for response in target.run(requests):
            rows = {name: rows[-1] for name, rows in response.taps.items() if name.endswith(".moe.router.selection")}
            if response.error or not rows:
                raise TargetError(f"search: the target shows no router selection ({response.error or SELECTION})")
            answers[int(response.id)] = rows
        return answers

    return run


def of_oracle(oracle: Oracle) -> LastRows:
    """Last-row selection scores in float64."""

    def run(sequences: Sequence[tuple[int, ...]]) -> list[Mapping[str, np.ndarray]]:
        answers: list[Mapping[str, np.ndarray]] = []
        for tokens in sequences:
            rows = oracle.run(tokens, rows=()).selection
            answers.append({site(layer, "moe.router.selection"): scores[-1] for layer, scores in rows.items()})
        return answers

    return run


def search(
    run_last_row: LastRows,
    choice: Choice,
    ids: range,
    *,
    length: int = 512,
    candidates: int = 16,
    seed: int = 0,
    progress: Path | None = None,
) -> Found:
    """A prompt of ``length`` tokens from ``ids``. Deterministic in its arguments and the target's scores.

    ``progress`` is a JSON file that is kept up to date, from which an interrupted search goes on.
    """
    found = Found()
    if progress is not None and progress.is_file():
        try:
            found = Found(**json.loads(progress.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as problem:
            raise ModelError(f"{progress}: is no interrupted search ({problem}); delete it to begin anew") from None
    while len(found.tokens) < length:
        options = _candidates(seed, len(found.tokens), ids, candidates)
        prefix = tuple(found.tokens)
        rows = run_last_row([(*prefix, token) for token in options])
        margins = [min(margin(scores, choice) for scores in row.values()) for row in rows]
        best = max(range(len(options)), key=margins.__getitem__)
        found.tokens.append(options[best])
        found.margins.append(margins[best])
        if progress is not None and len(found.tokens) % 32 == 0:
            progress.write_text(json.dumps(vars(found)), encoding="utf-8")
    return found


def save(path: Path, source: str, prompts: Mapping[str, Sequence[int]]) -> None:
    """Write prompts as data (`pytest_adapt.models.prompts.shipped`), one line each; keeps those that are there."""
    held = json.loads(path.read_text(encoding="utf-8"))["prompts"] if path.is_file() else {}
    lines = [
        f"  {json.dumps(name)}: {json.dumps(list(tokens), separators=(',', ':'))}"
        for name, tokens in sorted({**held, **prompts}.items())
    ]
    text = f'{{\n "source": {json.dumps(source)},\n "prompts": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")


def _candidates(seed: int, position: int, ids: range, count: int) -> list[int]:
    """``count`` different ids, from a hash of (seed, position)."""
    chosen: dict[int, None] = {}
    counter = 0
    while len(chosen) < min(count, len(ids)):
        digest = hashlib.sha256(f"{seed}:{position}:{counter}".encode()).digest()
        chosen[ids[int.from_bytes(digest[:8], "little") % len(ids)]] = None
        counter += 1
    return list(chosen)
