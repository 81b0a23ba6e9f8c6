"""How small an error is still seen: one value times 1 + d, d in logarithmic steps from 1e-5 to 1e-1.

For each precision, the smallest d that the correctness suite sees through each observable, beside the smallest that
changes a token of greedy output, and the smallest that changes any bit of an answer at all. In 16 bits a changed bit is
enough to change a token somewhere, where two are as good as each other; so a token counts that no healthy target of the
precision may write, and the smallest d that changes any token stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pytest_adapt.faults.registry import Operation, Seams
from pytest_adapt.golden.reference import OracleReference
from pytest_adapt.handle import ModelHandle
from pytest_adapt.selftest.memo import Memory
from pytest_adapt.selftest.nested import Bench, Found, Setting
from pytest_adapt.selftest.trial import COLUMNS, control_of
from pytest_adapt.target.protocol import Deployment, Request
from pytest_adapt.target.registry import resolve
from pytest_adapt.verdict.discrete import near_tie, row_error
from pytest_adapt.verdict.matches import margin_below

__all__ = ["SCALED", "STEPS", "first_token", "greedy", "measure_limit", "smallest"]

STEPS: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
MODEL = "deepseek-v3-odd-pos"
PROMPTS, LENGTH, TOKENS = 10, 32, 48
_EVERY_BIT = ("correctness/test_sites.py", "correctness/test_predictions.py")
"""Tests in which the target shows everything that it has."""


def _weight(seams: Seams, factor: float) -> None:
    def wrapper(original: Operation) -> Operation:
        def assign(loader: Any, parameter: str, tensor: Any) -> Any:
            return original(loader, parameter, tensor * factor if parameter == "layer.1.attn.out.weight" else tensor)

        return assign

    seams.wrap("loader.assign", wrapper)


def _routed_scale(seams: Seams, factor: float) -> None:
    def wrapper(original: Operation) -> Operation:
        def route(logits: Any, bias: Any, spec: Any) -> Any:
            routing = original(logits, bias, spec)
            return routing._replace(weights=routing.weights * factor)

        return route

    seams.wrap("route", wrapper)


def _softmax_scale(seams: Seams, factor: float) -> None:
    seams.wrap("softmax_scale", lambda original: lambda spec: original(spec) * factor)


SCALED: Mapping[str, tuple[str, Callable[[Seams, float], None]]] = {
    "weight": ("one weight tensor (output projection of layer 1)", _weight),
    "routed": ("the routed scale", _routed_scale),
    "softmax": ("the softmax scale", _softmax_scale),
}
"""Short name -> (what is scaled, how it is put into the target's seams)."""


@dataclass
class _Scan:
    """Answers of the scaled target, each step computed once and judged through each observable."""

    precision: str
    put: Callable[[Seams, float], None]
    bench: Bench
    controls: Any
    memories: dict[float, Memory] = field(default_factory=dict)
    healthy: Memory = field(default_factory=Memory)

    def seen(self, column: str, step: float) -> bool:
        return bool(self._run(step, self._setting(column), until_red=True).red)

    def changes(self, step: float) -> bool:
        setting = replace(self._setting("taps"), suites=_EVERY_BIT)
        control = control_of(setting, self.bench, self.controls, self.healthy)
        return bool(self._run(step, setting).answers != control["answers"])

    def _setting(self, column: str) -> Setting:
        setting = Setting(MODEL, "single", self.precision, suites=("correctness",))
        return replace(setting, observables=COLUMNS[column])

    def _run(self, step: float, setting: Setting, until_red: bool = False) -> Found:
        memory = self.memories.setdefault(step, Memory())
        return self.bench.run(setting, memory, lambda seams: self.put(seams, 1.0 + step), until_red=until_red)


def measure_limit(name: str, precision: str, bench: Bench, controls: Any) -> dict[str, Any]:
    """One row: the smallest step (None where even the largest is not enough) for ``changes``, each observable under
    ``detected``, ``token`` and ``any_token``."""
    what, put = SCALED[name]
    scan = _Scan(precision, put, bench, controls)
    detected = {column: smallest(STEPS, partial(scan.seen, column)) for column in COLUMNS}
    changes = next(filter(scan.changes, STEPS), None)
    token, any_token = first_token(put, precision, bench.catalogued(MODEL))
    return {
        "value": what,
        "precision": precision,
        "model": MODEL,
        "changes": changes,
        "detected": detected,
        "token": token,
        "any_token": any_token,
    }


def smallest(steps: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """The smallest step from which on ``holds`` is true; None where it is false of the largest.

    From the largest downwards: what is seen is seen soon, and what is not takes a whole suite, here once.
    """
    found = None
    for step in reversed(steps):
        if not holds(step):
            break
        found = step
    return found


def first_token(
    put: Callable[[Seams, float], None], precision: str, model: ModelHandle
) -> tuple[float | None, float | None]:
    """The smallest steps at which one of ten greedy outputs of 48 tokens has another token: one that rounding cannot
    explain, and any."""
    prompts = prompts_of(model)
    reference = OracleReference(model.directory, (precision,), model.name)
    before, nearest = greedy(put, 1.0, precision, model), None
    for step in STEPS:
        after = greedy(put, 1.0 + step, precision, model)
        changed = [one for one in zip(prompts, before, after, strict=True) if one[1] != one[2]]
        if changed and nearest is None:
            nearest = step
        if not all(explained(reference, precision, *one) for one in changed):
            return step, nearest
    return None, nearest


def explained(
    reference: OracleReference,
    precision: str,
    prompt: tuple[int, ...],
    before: tuple[int, ...],
    after: tuple[int, ...],
) -> bool:
    """Whether healthy targets may differ at the first token in which two outputs do: it is a near-tie of both with the
    best one, or follows a near-tie of experts."""
    place = next(index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
    record = reference.record("greedy", prompt + before[:place])
    emulation = record.emulation(precision)
    bound = float(row_error(emulation.largest)[-1])
    near = all(near_tie(margin_below(record, -1, one[place]), bound) for one in (before, after))
    return bool(near) or not emulation.certified[-1]


def prompts_of(model: ModelHandle) -> list[tuple[int, ...]]:
    """Ten prompts: the model's texts, or random ones where it has none."""
    texts = [tokens for name, tokens in sorted(model.all_prompts.items()) if name.startswith("text")]
    return texts[:PROMPTS] or list(model.load(PROMPTS, LENGTH).values())


def greedy(
    put: Callable[[Seams, float], None], factor: float, precision: str, model: ModelHandle
) -> list[tuple[int, ...]]:
    """What the scaled target writes after each of `prompts_of`."""
    prompts = prompts_of(model)
    target: Any = resolve("builtin").create()
    put(target.seams, factor)
    try:
        longest = max(map(len, prompts))
        target.open(Deployment(str(model.directory), precision=precision, max_context=longest + TOKENS))
        asked = [Request(str(number), tokens, TOKENS) for number, tokens in enumerate(prompts)]
        answers = {response.id: response.tokens for response in target.run(asked)}
    finally:
        target.close()
    return [answers[request.id] for request in asked]
