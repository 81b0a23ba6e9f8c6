"""What a status means to pytest, and what a kind of target is required to show. Data first, then two lookups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_adapt.verdict.result import RUNGS, Status

__all__ = [
    "EXCUSES",
    "GREEN",
    "OUTCOMES",
    "PASSED",
    "REQUIREMENTS",
    "TIMED",
    "WRONG",
    "Requirement",
    "Verdict",
    "need_not_show",
    "outcome",
    "required",
    "verdict_of",
]

EXCUSES: frozenset[Status] = frozenset({Status.UNSUPPORTED, Status.UNKNOWN, Status.UNCHECKED, Status.INCONCLUSIVE})
"""What an item may end with where something could not be judged; never where something was judged and failed."""
PASSED: frozenset[Status] = frozenset({Status.PASS, Status.SAME, Status.IMPROVEMENT})
"""Something was judged, and is right."""
GREEN: frozenset[Status] = PASSED | {Status.XFAIL, Status.WAIVED, Status.UNSUPPORTED}
"""Never a reason to fail a run."""
WRONG: frozenset[Status] = frozenset({Status.FAIL, Status.ERROR, Status.MISMATCH, Status.STALE})
"""Something is wrong, and not just undecided or new."""

TIMED = "measures time; run it without xdist"
"""How the reason of an item begins that is deferred under xdist."""

# status -> (outcome when the item is required, when it is not)
OUTCOMES: Mapping[Status, tuple[str, str]] = {
    Status.PASS: ("passed", "passed"),
    Status.FAIL: ("failed", "failed"),
    Status.ERROR: ("failed", "failed"),
    Status.XFAIL: ("xfailed", "xfailed"),
    Status.WAIVED: ("xfailed", "xfailed"),
    Status.UNSUPPORTED: ("skipped", "skipped"),
    Status.UNKNOWN: ("failed", "skipped"),
    Status.UNCHECKED: ("failed", "skipped"),
    Status.INCONCLUSIVE: ("failed", "skipped"),
    Status.DEFERRED: ("failed", "skipped"),
    Status.BLOCKED: ("failed", "skipped"),
    Status.STALE: ("failed", "failed"),
    Status.MISMATCH: ("failed", "failed"),
    Status.NEW: ("failed", "failed"),
    Status.GONE: ("failed", "failed"),
    Status.REGRESSION: ("failed", "failed"),
    Status.IMPROVEMENT: ("passed", "passed"),
    Status.SAME: ("passed", "passed"),
    Status.INVALID_MACHINE: ("failed", "failed"),
}


@dataclass(frozen=True)
class Requirement:
    """What a kind of target must show."""

    rungs: frozenset[str]
    observables: frozenset[str]
    """An item is required when it needs nothing, or one of these can answer it."""
    any_one: bool = False
    """Whether one of them is enough: what needs another one, which the target does not declare, is not required."""
    serial: bool = False
    """Whether timing items are required in every profile (else only in the full one)."""
    manifest: bool = True
    """Whether suites that a model's manifest does not list are optional."""


_SERVED = frozenset({"score", "topk", "text"})
REQUIREMENTS: Mapping[str, Requirement] = {
    "endpoint": Requirement(frozenset(RUNGS), _SERVED, any_one=True),
    "engine": Requirement(frozenset(RUNGS), _SERVED | {"logits", "taps"}),
    "release": Requirement(frozenset(RUNGS), _SERVED | {"logits", "taps"}, serial=True, manifest=False),
}


class Verdict(Exception):
    """Ends an item with a status other than pass. Any exception with an ``adapt_status`` does the same.

    ``optional`` says that this target is not asked for it (the weights of the model are not installed, or a kind need
    not show what would decide): the item counts only for a release.
    """

    def __init__(self, status: Status, reason: str, *, optional: bool = False) -> None:
        super().__init__(reason)
        self.adapt_status = status
        self.reason = reason
        self.optional = optional


def outcome(status: Status, required: bool) -> str:
    """pytest's outcome: passed, failed, skipped or xfailed."""
    return OUTCOMES[status][0 if required else 1]


def required(
    kind: str,
    *,
    rung: str,
    needs: Iterable[str] = (),
    serial: bool = False,
    profile: str = "day0",
    suite: str = "",
    must_pass: Iterable[str] | None = None,
) -> bool:
    """Whether an item counts for this kind of target (a key of REQUIREMENTS).

    ``must_pass`` are the suites that the model's manifest lists (None: a model without one); ``suite`` is empty for a
    user's own test, which counts always. Suites that stand beside the ladder have rung "".
    """
    rule = REQUIREMENTS[kind]
    wanted = frozenset(needs)
    if serial and not (rule.serial or profile == "full"):
        return False
    if rung and rung not in rule.rungs:
        return False
    if wanted and not wanted & rule.observables:
        return False
    return not (suite and rule.manifest and must_pass is not None and suite not in must_pass)


def need_not_show(kind: str, needs: Iterable[str], declared: Iterable[str], shown: Iterable[str]) -> bool:
    """Whether a target of this kind owes none of what an item needs: something else that it shows is enough. What it
    declares and does not show, it owes."""
    rule = REQUIREMENTS[kind]
    return rule.any_one and bool(rule.observables & frozenset(shown)) and not frozenset(needs) & frozenset(declared)


def verdict_of(error: BaseException) -> tuple[Status, str] | None:
    """(status, reason) that an exception stands for; None for an ordinary one."""
    status = getattr(error, "adapt_status", None)
    return (Status(status), str(error) or str(status)) if status is not None else None
