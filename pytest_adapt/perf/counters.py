"""Exact counters of one load: what a target's own `stats` say it did, and how that compares with the record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_adapt.perf.ledger import BUILD, ROUNDED, Ledger, Row, changes
from pytest_adapt.verdict.result import Status
from pytest_adapt.verdict.status import Verdict

if TYPE_CHECKING:
    from pytest_adapt.handle import ModelHandle
    from pytest_adapt.open_target import OpenTarget
    from pytest_adapt.perf.loads import Load

__all__ = ["cell_of", "count", "held_against"]

_SHOWN = 12


def cell_of(target: OpenTarget, model: ModelHandle) -> str:
    """Model, layout and precision, as a ledger names them."""
    return f"{model.name} {target.deployment.layout} {target.deployment.precision}"


def count(target: OpenTarget, model: ModelHandle, load: Load) -> Row:
    """Run a load on a freshly opened deployment and count.

    A number that the load raises counts as the rise, one that it leaves alone as it stands (bytes of weights and
    cache); what falls, is below 0 or is no whole number (shares, seconds) is no counter. Raises Verdict unsupported
    where the target counts nothing.
    """
    target.restart()
    target.profile("counts")
    try:
        before = target.stats()
        prompts = {str(number): tokens for number, tokens in enumerate(load.prompts(model))}
        answers = target.generate_all(prompts, load.new, ("text",))
        after = target.stats()
        if not after:
            raise Verdict(Status.UNSUPPORTED, f"{target.info.name} shows no counters (stats)")
    finally:
        target.profile("off")
    for answer in answers.values():
        if answer.error is not None or len(answer.tokens) != load.new:
            got = answer.error or f"{len(answer.tokens)} tokens"
            raise Verdict(Status.FAIL, f"load {load.name}: {load.new} tokens were asked for, the answer is {got}")
    counters = {
        name: round(value - before.get(name, 0.0)) if value != before.get(name, 0.0) else round(value)
        for name, value in sorted(after.items())
        if value.is_integer() and before.get(name, 0.0).is_integer() and value >= max(0.0, before.get(name, 0.0))
        if not name.endswith(("seconds", "share"))
    }
    names = BUILD if target.deployment.precision == "fp32" else BUILD + ROUNDED
    told = {name: str(value) for name, value in target.info.environment.items() if name in names}
    return Row(f"{cell_of(target, model)} {load.name}", counters, told, _spec(model))


def held_against(ledger: Ledger | None, found: Row | None, target: str) -> tuple[Status, str]:
    """(status, why) of what was counted: pass, unchecked (``target`` has none, or those of another build), new, stale
    or mismatch."""
    accepting = "record: --adapt-goldens=new, then python -m pytest_adapt counters accept"
    if ledger is None or found is None:
        return Status.UNCHECKED, f"no counters of {target} are on record; {accepting}"
    recorded = ledger.rows.get(found.key)
    if recorded is None:
        return Status.NEW, f"no counters of {found.key} in {ledger.path}; {accepting}"
    if recorded.spec != found.spec:
        return Status.STALE, f"the counters of {found.key} are of another specification of the model; {accepting}"
    differing, left = changes(recorded, found)
    if differing:
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        said = "; ".join(map(str, differing[:_SHOWN]))
        lines = [f"counters of {found.key} changed: {said}{more}", *([left] if left else [])]
        lines.append(
            "if that is meant: --adapt-goldens=update --adapt-reason='why', then python -m pytest_adapt counters accept"
        )
        return Status.MISMATCH, "\n".join(lines)
    return (Status.UNCHECKED if left else Status.PASS), left


def _spec(model: ModelHandle) -> str:
    if model.entry is None:
        return ""
    from pytest_adapt.models import spec_hash

    return spec_hash(model.entry)
