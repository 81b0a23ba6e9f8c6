"""Faults of class PF: right answers, late. Only a comparison with a baseline sees them, so the suites alone do not.

They stand beside the catalogue: `--adapt-inject` takes their ids together with `--adapt-gate`, and puts them into the
target, not into the baseline.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

__all__ = ["SLOWDOWNS", "single_ops", "slow_op"]

_LAUNCHED = ("embedding", "rms_norm", "linear", "rope_apply", "attention", "swiglu", "route", "add", "lm_head")
MODELS = ("qwen3-moe-odd", "llama-odd", "mixtral-odd", "deepseek-v3-odd-neg")


def single_ops(seams: Seams) -> None:
    """Nothing is slowed, but kernels that fuse several operations give way to single ones, as they do for every
    slowdown of an operation: what such a slowdown is to be compared with."""
    for op in ("linear", "swiglu"):
        seams.wrap(op, lambda original: original)


def slow_op(seams: Seams, op: str, seconds: float) -> None:
    """Every call of one operation takes so many seconds of CPU time longer."""

    def wrapper(original: Operation) -> Operation:
        def call(*arguments: Any, **named: Any) -> Any:
            answer = original(*arguments, **named)
            end = time.thread_time() + seconds  # by this thread's own clock: a neighbour's time is not counted
            while time.thread_time() < end:
                pass
            return answer

        return call

    seams.wrap(op, wrapper)


def _work_each_step(seams: Seams) -> None:
    """Before each step the plan of it is turned into text and back, for nobody."""

    def wrapper(original: Operation) -> Operation:
        def step(executor: Any, plan: Any) -> Any:
            for _ in range(40):
                repr(plan)
            return original(executor, plan)

        return step

    seams.wrap("executor.step", wrapper)


def _sleep_each_step(seams: Seams) -> None:
    """Each step waits as long as it computes."""

    def wrapper(original: Operation) -> Operation:
        def step(executor: Any, plan: Any) -> Any:
            started = time.perf_counter()
            answer = original(executor, plan)
            time.sleep(time.perf_counter() - started)
            return answer

        return step

    seams.wrap("executor.step", wrapper)


def _slow_products(seams: Seams) -> None:
    """Linear layers fall back on a kernel that computes each product twice."""

    def wrapper(original: Operation) -> Operation:
        def linear(*arguments: Any, **named: Any) -> Any:
            original(*arguments, **named)
            return original(*arguments, **named)

        return linear

    seams.wrap("linear", wrapper)


def _dear_launches(seams: Seams) -> None:
    """The launch of every operation costs 40 microseconds more."""
    for op in _LAUNCHED:
        slow_op(seams, op, 40e-6)


def _slowdown(identifier: str, title: str, report: str, install: Any) -> Fault:
    return Fault(
        identifier,
        title,
        report,
        105,
        "benchmark",
        "",
        MODELS,
        install,
        observable="text",
        where="slower",
        says="regression",
        options=("--adapt-gate=times", "--adapt-baseline=builtin"),
    )


SLOWDOWNS: Mapping[str, Fault] = {
    fault.id: fault
    for fault in (
        _slowdown("PF01", "Host work is added to each step", "vllm#4210", _work_each_step),
        _slowdown("PF02", "Half of the speed is lost with an upgrade", "vllm#31030", _sleep_each_step),
        _slowdown("PF03", "A slower kernel takes over", "vllm#43029", _slow_products),
        _slowdown("PF07", "A launch costs several times as much", "pytorch#174575", _dear_launches),
    )
}
