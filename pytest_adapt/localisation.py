"""A failing item of a target that can be tapped reruns its prompts: at which site does it leave the oracle first?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_adapt.open_target import OpenTarget
from pytest_adapt.session import Fatal
from pytest_adapt.target.protocol import Deployment
from pytest_adapt.verdict.result import Divergence
from pytest_adapt.verdict.status import Verdict

if TYPE_CHECKING:
    from pytest_adapt.items import ItemState

__all__ = ["Known", "first_divergence"]

Known = dict[tuple[Deployment, str, tuple[int, ...]], Divergence]
"""Where a prompt was seen to leave the oracle in a deployment with every site tapped."""

_NEW_TOKENS = 8
_LONGEST = 512
_FAILED = 3


def first_divergence(state: ItemState, known: Known) -> Divergence | None:
    """The first divergent site, in prefill or decode, over the failing prompts and the deployments that the item used.

    What an item before found is in ``known``, and what this one finds is added. None where the target cannot be
    tapped, the model has no oracle, or no site of these prompts is off.
    """
    from pytest_adapt.verdict.localise import compare_sites, with_ranks

    oracle = getattr(state.reference, "oracle", None)
    if state.target is None or state.model is None or oracle is None or state.cell is None:
        return None
    if "taps" not in state.target.info.observables:
        return None
    for tapped in _tapped(state.target):
        for name, tokens in _prompts(state):
            asked = tapped.deployment, name, tokens
            if asked in known:
                return known[asked]
            try:
                response = tapped.generate(tokens, _NEW_TOKENS, want={"taps"})
                if response.error is not None or response.first_row or not response.taps:
                    continue
                fed = (*tokens, *response.tokens[:-1])
                precision, rounds, router = state.cell.precision, tapped.info.rounds, tapped.info.router
                found = compare_sites(name, response.taps, oracle, fed, precision, rounds, (), len(tokens), router)
            except (Verdict, Fatal):
                return None
            divergence = with_ranks(found.divergence, response)
            if divergence is not None:
                known[asked] = divergence
                return divergence
    return None


def _tapped(target: OpenTarget) -> Iterator[OpenTarget]:
    """The item's deployments with every site tapped, the plain one first."""
    for deployment in target.deployments():
        try:
            yield target.variant(deployment).tapped()
        except (Verdict, Fatal):
            continue


def _prompts(state: ItemState) -> list[tuple[str, tuple[int, ...]]]:
    """Prompts that failed, as far as measurements name them, then a short one of the model's."""
    assert state.model is not None and state.target is not None
    own = state.model.prompts(_LONGEST)
    asked = {name: tokens for name, tokens in state.target.prompts().items() if 1 < len(tokens) <= _LONGEST}
    known = {**asked, **own}
    failed = [one.prompt.partition(":")[0] for one in state.judge.failures()]
    names = [name for name in dict.fromkeys(failed) if name in known][:_FAILED]
    spare = [name for name, tokens in own.items() if len(tokens) > 1 and name not in names][-1:]
    return [(name, known[name]) for name in [*names, *spare]]
