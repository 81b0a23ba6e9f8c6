"""What a target says of itself, tested both ways: what it declares must be shown, and what it shows must be declared.

A claim that is not kept would end in verdicts that mean nothing; one that is not made turns tests into `unsupported`,
and what nobody judges looks like what nobody can do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_adapt.target.probe import ask, fault, probe_prompt
from pytest_adapt.target.protocol import OBSERVABLES, PRECISIONS, Deployment, Info, Request, Target, TargetError
from pytest_adapt.target.tokenizer import load_tokenizer
from pytest_adapt.verdict.status import Verdict
from pytest_adapt.watchdog import Hung

if TYPE_CHECKING:
    from pytest_adapt.session import Host

__all__ = ["Claims", "tested", "undeclared"]

_REPEATED = 8


@dataclass(frozen=True)
class Claims:
    """Name of an observable, a feature with its setting, or a precision -> why it does not hold, in one line each."""

    unshown: Mapping[str, str]
    """Declared, but not shown."""
    undeclared: Mapping[str, str]
    """Shown, but not declared."""

    @property
    def problems(self) -> list[str]:
        """One line for each claim that does not hold, with the way out."""
        lines = [f"{name} is declared, but: {why}; declare only what is shown" for name, why in self.unshown.items()]
        return lines + [f"{name} is not declared, but {why}; declare it" for name, why in self.undeclared.items()]


def tested(host: Host, deployment: Deployment) -> Claims:
    """The claims of the target that ``host`` opens, about one deployment of it.

    Each feature that it declares is opened once, with its largest setting; of an engine, so is each precision that it
    does not declare. Raises Verdict or Fatal where the deployment itself does not open.
    """
    known = host.acquire(deployment)
    unshown, found = dict(known.missing), {}
    for name, offered in known.info.features.items():
        if any(offered):
            feature = (name, max(offered))
            unshown |= _unshown(host, replace(deployment, features=(feature,)), name, f"{name}={max(offered)}")
    if "taps" in known.info.observables and not deployment.taps:
        unshown |= _unshown(host, replace(deployment, taps=("*",)), "taps", "taps")
    for precision in PRECISIONS if host.spec.kind == "engine" else ():
        if precision not in host.spec.precisions:
            with contextlib.suppress(Verdict):
                host.acquire(replace(deployment, precision=precision))
                found[f"precision {precision}"] = "a deployment in it opens"
    opened = host.acquire(deployment)
    try:
        found |= opened.watchdog.call(
            lambda: undeclared(opened.target, deployment, opened.info),
            host.settings.timeout,
            lambda: f"{opened.info.name} to answer what it does not declare",
        )
    except (TargetError, Hung):
        host.close()  # it refused in its own way; the next request opens it again
    return Claims(unshown, found)


def _unshown(host: Host, deployment: Deployment, name: str, label: str) -> dict[str, str]:
    """Why a declared observable or feature does not count in a deployment that asks for it; empty where it does."""
    try:
        missing = host.acquire(deployment).missing
    except Verdict as verdict:
        return {label: verdict.reason}
    return {label: missing[name]} if name in missing else {}


def undeclared(target: Target, deployment: Deployment, info: Info) -> dict[str, str]:
    """What an opened target shows although it does not declare it. Nothing is held against a refusal.

    Observables that ``info`` leaves out, and (of an engine) answers out of a cache that ``deployment`` left off. Raises
    TargetError where the target does not survive the question.
    """
    tokenizer = None if info.token_prompts else load_tokenizer(Path(deployment.model))
    prompt = probe_prompt(info.vocab_size or 64, tokenizer)
    hidden = [name for name in OBSERVABLES if name not in info.observables]
    found = {}
    answer = ask(target, prompt, hidden) if hidden else None
    for name in hidden:
        shown = answer is not None and (name != "taps" or answer.taps)
        if answer is not None and shown and not fault(name, answer, len(prompt), deployment, info):
            found[name] = "an answer shows it"
    if info.kind == "engine" and not deployment.feature("prefix_cache"):
        again = (prompt * _REPEATED)[: max(1, (info.max_context or 1 << 20) - 1)]
        request = Request("adapt-claim-prefix", again, max_new_tokens=1, first_row=len(again) - 1)
        cached = [next(iter(target.run([request]))).cached_tokens for _ in range(2)][1]
        if cached:
            what = "prefix_cache=0" if "prefix_cache" in info.features else "prefix_cache"
            found[what] = f"{cached} of {len(again)} tokens of a repeated prompt came from a cache"
    return found
