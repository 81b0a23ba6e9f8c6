"""The ``target`` fixture: what a test may ask of the platform under test, against one deployment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_adapt.target.protocol import Deployment, Info, Request, Response, Spoilt, TargetError
from pytest_adapt.verdict.result import Status
from pytest_adapt.verdict.status import Verdict, need_not_show
from pytest_adapt.watchdog import Hung

if TYPE_CHECKING:
    import numpy as np

    from pytest_adapt.claims import Claims
    from pytest_adapt.matrix import Mark
    from pytest_adapt.session import Host, Opened

__all__ = ["OpenTarget"]

_USUAL = ("logits", "score", "topk", "text")
"""What a test that names no needs is answered with, where it is shown."""


class OpenTarget:
    """The ``target`` fixture: requests in, responses out, against one deployment.

    A platform may have room for one instance of a model, so one deployment is open at a time: asking another
    (`with_features`, `restart`, `refusal`) closes the present one, and the next request to this one loads it again.
    """

    def __init__(self, host: Host, deployment: Deployment, mark: Mark) -> None:
        self._host = host
        self._mark = mark
        self._deployment = deployment
        self._last: Opened | None = None
        self._variants: dict[Deployment, OpenTarget] = {}
        self.observables_used: set[str] = set()
        """Observables that were asked for."""
        self.responses: dict[str, Response] = {}
        """Answers by request id (what --adapt-dump writes)."""
        self._asked: dict[str, tuple[int, ...]] = {}
        self._scored: dict[tuple[int, ...], Response] = {}
        self._number = 0

    @property
    def deployment(self) -> Deployment:
        return self._deployment

    @property
    def info(self) -> Info:
        return self._known.info

    @property
    def kind(self) -> str:
        """engine or endpoint."""
        return self._host.spec.kind

    @property
    def shown(self) -> frozenset[str]:
        """Observables and features that the target declares and a probe showed."""
        return self._known.shown

    def supports(self, name: str, setting: int | None = None) -> bool:
        """Whether an observable or a feature (with this setting) is shown."""
        return name in self.shown and (setting is None or setting in self.info.features.get(name, ()))

    def best(self, observables: Iterable[str]) -> str:
        """The strongest shown one of several observables. Raises Verdict unknown where none is."""
        wanted = list(observables)
        for name in ("taps", "logits", "score", "topk", "text", *sorted(set(wanted))):
            if name in wanted and name in self.shown:
                return name
        raise self._not_shown(wanted)

    def check(self) -> None:
        """Open, and end the item where the target does not show what its mark needs."""
        _ = self._opened
        self._refuse_spoilt(self._mark.needs)
        if self._mark.needs:
            self.best(self._mark.needs)
        for name, wanted in self._mark.features:
            for setting in (wanted,) if isinstance(wanted, int) else wanted:
                self._check_feature(name, setting)

    def run(
        self,
        requests: Iterable[Request],
        answered: Callable[[str], None] | None = None,
        aborted: Collection[str] = (),
    ) -> dict[str, Response]:
        """Answers by request id, all requests in flight together; ``answered`` is told the id of each as it comes, and
        may abort those in ``aborted``.

        Raises Verdict: unknown where no wanted observable is shown, fail where the target breaks the contract.
        """
        shown = self.shown
        asked = []
        for request in requests:
            self._refuse_spoilt(sorted(request.want))
            want = request.want & shown
            if request.want and not want:
                raise self._not_shown(sorted(request.want))
            self.observables_used |= want
            asked.append(replace(request, want=want))
        self._asked |= {one.id.partition("#")[0]: one.prompt for one in asked}
        answers = self._host.run(self._opened, asked, answered, aborted)
        self.responses.update(answers)
        self._scored.update({one.prompt: answers[one.id] for one in asked if not one.max_new_tokens})
        return answers

    def score(self, tokens: Iterable[int], want: Iterable[str] | None = None, **request: Any) -> Response:
        """Teacher forcing: the target's predictions after each of ``tokens``."""
        return self.score_all({"score": tuple(tokens)}, want, **request)["score"]

    def score_all(
        self, prompts: Mapping[str, Iterable[int]], want: Iterable[str] | None = None, **request: Any
    ) -> dict[str, Response]:
        """`score` of several prompts, all in flight together, by name."""
        return self._ask(prompts, 0, want, request)

    def generate(self, tokens: Iterable[int], n: int, want: Iterable[str] | None = None, **request: Any) -> Response:
        """``n`` new tokens (greedy unless ``sampling`` is given). ``request`` are further fields of Request."""
        return self.generate_all({"generate": tuple(tokens)}, n, want, **request)["generate"]

    def generate_all(
        self, prompts: Mapping[str, Iterable[int]], n: int, want: Iterable[str] | None = None, **request: Any
    ) -> dict[str, Response]:
        """`generate` for several prompts, all in flight together, by name."""
        return self._ask(prompts, n, want, request)

    def longest(self, prompt: Callable[[int], Iterable[int]], limit: int) -> int:
        """The longest prompt, one new token included, that is not refused: by bisection below ``limit``, which is."""
        accepted, refused = 1, limit
        while refused - accepted > 1:
            middle = (accepted + refused) // 2
            if self.generate(prompt(middle - 1), 1, ("text",)).error is None:
                accepted = middle
            else:
                refused = middle
        return accepted

    def claims(self) -> Claims:
        """What the target declares and does not show, and what it shows and does not declare (`claims.tested`)."""
        from pytest_adapt.claims import tested

        return tested(self._host, self._deployment)

    def restart(self) -> None:
        """Close the deployment and open it again (a server is stopped and started)."""
        self._host.acquire(self._deployment)
        self._last = self._host.reopen()

    def with_features(self, **features: int) -> OpenTarget:
        """The same deployment with other features, opened in place of this one when it is asked something.

        Raises Verdict unsupported for a feature or setting that the target does not declare.
        """
        for name, setting in features.items():
            self._check_feature(name, setting)
        merged = dict(self._deployment.features) | features
        return self.variant(replace(self._deployment, features=tuple(sorted(merged.items()))))

    def variant(self, deployment: Deployment) -> OpenTarget:
        """Another deployment, opened in place of this one when it is asked something."""
        if deployment == self._deployment:
            return self
        if deployment not in self._variants:
            self._variants[deployment] = OpenTarget(self._host, deployment, self._mark)
        return self._variants[deployment]

    def tapped(self) -> OpenTarget:
        """The same deployment with every site tapped, opened in place of this one when it is asked something."""
        return self.variant(replace(self._deployment, taps=("*",)))

    def answer_to(self, tokens: Iterable[int]) -> Response | None:
        """The last teacher-forced answer to a prompt in this item."""
        return self._scored.get(tuple(tokens))

    def prompts(self) -> dict[str, tuple[int, ...]]:
        """The prompts of this item by the names that the test gave them (the last of each name), variants' included."""
        found = dict(self._asked)
        for one in self._variants.values():
            found |= one.prompts()
        return found

    def deployments(self) -> list[Deployment]:
        """This deployment and the variants of it that were asked for."""
        return [self._deployment, *self._variants]

    def aborted(self, requests: Iterable[Request], victims: Iterable[str]) -> dict[str, Response]:
        """`run`, during which requests are aborted: one id of ``victims`` as each answer comes.

        Raises Verdict unsupported where the target has no such control.
        """
        control = getattr(self._opened.target, "control", None)
        if control is None:
            raise Verdict(Status.UNSUPPORTED, f"{self.info.name} has no control over requests in flight")
        chosen = list(victims)
        left = list(chosen)

        def next_victim(identity: str) -> None:
            if left:
                try:
                    control("abort", id=left.pop())
                except Exception as error:  # the target's code may raise anything
                    raise _optional_failed(self.info, "control", error) from error

        return self.run(requests, next_victim, chosen)

    def with_pool(self, tokens: int) -> OpenTarget:
        """The same deployment with a KV cache of so many tokens, opened in place of this one; this one where the target
        does not show its cache (stats: kv_blocks), and so may not take the size from us."""
        if "kv_blocks" not in self.stats():
            return self
        return self.variant(replace(self._deployment, kv_tokens=tokens))

    @property
    def limit(self) -> int:
        """Tokens of prompt and output together that the target may take at most: what it says, within the positions
        that the model has (prompts of this length are made, and a claim is no reason to fill the memory)."""
        return max(self._deployment.max_context, min(self.info.max_context, _positions(self._deployment.model)))

    def stats(self) -> dict[str, float]:
        """The target's own counters; empty where it has none."""
        from pytest_adapt.target.checked import checked_counters

        counters = self._optional("stats")
        if counters is None:
            return {}
        try:
            return checked_counters(self.info.name, counters())
        except TargetError as error:
            raise Verdict(Status.FAIL, str(error)) from None

    def profile(self, what: str) -> bool:
        """Ask the target to sum up its operations from now on (``what``: time, counts or off); its `stats` tell the
        sums. False where it has no profile, or not of this deployment."""
        profile = getattr(self._opened.target, "profile", None)
        if profile is None:
            return False
        try:
            profile(what)
        except TargetError:
            return False
        except Exception as error:  # the target's code may raise anything
            raise _optional_failed(self.info, "profile", error) from error
        return True

    @property
    def in_process(self) -> bool:
        """Whether it computes on this machine's CPU, as far as it says: an engine that names no other device."""
        return self.kind == "engine" and self.info.environment.get("device", "cpu") == "cpu"

    @property
    def shows_memory(self) -> bool:
        """Whether `peak_memory` tells something. Asking begins a measurement anew."""
        measure = self._optional("peak_memory")
        return measure is not None and measure(True) is not None

    def peak_memory(self, reset: bool = False) -> int:
        """Largest number of bytes that the target held since the last reset. Raises Verdict unsupported where it
        does not tell."""
        measure = self._optional("peak_memory")
        found = None if measure is None else measure(reset)
        if found is None:
            raise Verdict(Status.UNSUPPORTED, f"{self.info.name} does not show its memory")
        if not isinstance(found, Integral) or found < 0:
            raise Verdict(Status.FAIL, f"{self.info.name}: peak_memory is {found!r}, expected a number of bytes")
        return int(found)

    def refusal(self, directory: Any) -> str | None:
        """Why the target declines the checkpoint in ``directory``; None where it loads it."""
        return self._host.refusal(replace(self._deployment, model=str(directory)))

    @property
    def ops(self) -> Mapping[str, Sequence[str]]:
        """Operators that the target declares -> their implementations, the one in use first."""
        return self._known.info.ops

    @property
    def chosen_op(self) -> str:
        """The case that --adapt-op names; "" for all."""
        return self._host.settings.op

    def missing_op(self, name: str) -> str:
        """Why a declared operator does not count; "" where it answered a probe."""
        from pytest_adapt.target.probe import op_fault

        opened = self._opened
        if name not in opened.ops:
            opened.ops[name] = op_fault(self.run_op, name, opened.deployment.precision)
        return opened.ops[name]

    def run_op(
        self, name: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any]
    ) -> Mapping[str, np.ndarray]:
        """One operator (`pytest_adapt.operators`). What the target raises comes through, for it concerns one case.

        Raises Verdict fail where the target has no `run_op` or hangs.
        """
        found: Mapping[str, np.ndarray] = self._in_target(name, lambda compute: compute(name, inputs, attributes))
        return found

    def time_op(
        self, name: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any], repeats: int
    ) -> list[float]:
        """Seconds of each of ``repeats`` calls of `run_op` after a first one, taken in the target's own thread."""

        def timed(compute: Callable[..., Any]) -> list[float]:
            compute(name, inputs, attributes)
            found = []
            for _ in range(repeats):
                started = time.perf_counter()
                compute(name, inputs, attributes)
                found.append(time.perf_counter() - started)
            return found

        seconds: list[float] = self._in_target(name, timed)
        return seconds

    def _in_target(self, op: str, use: Callable[[Callable[..., Any]], Any]) -> Any:
        """``use(run_op)`` in the target's own thread."""
        opened = self._opened
        compute = getattr(opened.target, "run_op", None)
        if compute is None:
            raise Verdict(Status.FAIL, f"{opened.info.name} declares operators, but has no run_op")
        try:
            return opened.watchdog.call(
                lambda: use(compute), self._host.settings.timeout, lambda: f"{opened.info.name} to compute {op}"
            )
        except Hung as error:
            raise _optional_failed(opened.info, "run_op", error) from None

    @property
    def _opened(self) -> Opened:
        """The deployment, open now."""
        self._last = self._host.acquire(self._deployment)
        return self._last

    @property
    def _known(self) -> Opened:
        """What opening the deployment showed; it may be closed by now."""
        return self._last or self._opened

    def _optional(self, name: str) -> Any:
        """An optional method of the target, called in the target's own thread; None where it has none."""
        opened = self._opened
        method = getattr(opened.target, name, None)
        if method is None:
            return None
        limit = self._host.settings.timeout

        def call(*arguments: Any) -> Any:
            try:
                return opened.watchdog.call(
                    lambda: method(*arguments), limit, lambda: f"{opened.info.name} to answer {name}"
                )
            except Exception as error:  # the target's code may raise anything
                raise _optional_failed(opened.info, name, error) from error

        return call

    def _ask(
        self, prompts: Mapping[str, Iterable[int]], n: int, want: Iterable[str] | None, request: dict[str, Any]
    ) -> dict[str, Response]:
        wanted = frozenset(want) if want is not None else self._default_want(n)
        # Ids are unique over the item, so that a late answer to an earlier request cannot pass for this one.
        self._number += 1
        names = {f"{name}#{self._number}": name for name in prompts}
        asked = [
            Request(identity, tuple(prompts[name]), max_new_tokens=n, want=wanted, **request)
            for identity, name in names.items()
        ]
        answers = self.run(asked)
        return {name: answers[identity] for identity, name in names.items()}

    def _default_want(self, n: int) -> frozenset[str]:
        """What the mark needs and the target shows; taps only where nothing else can answer."""
        candidates = self._mark.needs or _USUAL
        self._refuse_spoilt(candidates)
        shown = frozenset(candidates) & self.shown & {"taps", "logits", "score", "topk", "text"}
        for drop in ("taps", "text") if n == 0 else ("taps",):
            if len(shown) > 1:
                shown -= {drop}
        return shown or frozenset({"text"})

    def _check_feature(self, name: str, setting: int) -> None:
        offered = self.info.features.get(name, ())
        if name not in self.shown:
            why = self._known.missing.get(name, "not declared by the target")
            raise Verdict(Status.UNSUPPORTED, f"feature {name}: {why}")
        if setting not in offered:
            raise Verdict(
                Status.UNSUPPORTED, f"feature {name}={setting}: the target offers {', '.join(map(str, offered))}"
            )

    def _refuse_spoilt(self, wanted: Iterable[str]) -> None:
        """What is shown and cannot be right is never passed over for another observable."""
        missing = self._known.missing
        spoilt = [f"{name}: {why}" for name in wanted if isinstance(why := missing.get(name), Spoilt)]
        if spoilt:
            raise Verdict(Status.FAIL, f"the target shows what cannot be right: {'; '.join(spoilt)}")

    def _not_shown(self, wanted: Collection[str]) -> Verdict:
        shown = [name for name in ("taps", "logits", "score", "topk", "text") if name in self.shown]
        reasons = [f"{name}: {why}" for name in wanted if (why := self._known.missing.get(name))]
        tail = f" ({'; '.join(reasons)})" if reasons else ""
        reason = f"needs {' or '.join(wanted)}; the target shows {', '.join(shown) or 'nothing'}{tail}"
        free = need_not_show(self._host.kind, wanted, self.info.observables, self.shown)
        return Verdict(Status.UNKNOWN, reason, optional=free)


def _optional_failed(info: Info, name: str, error: Exception) -> Verdict:
    what = str(error) if isinstance(error, (TargetError, Hung)) else f"{type(error).__name__}: {error}"
    return Verdict(Status.FAIL, f"{info.name}: its optional {name} failed: {what}")


def _positions(directory: str) -> int:
    """Positions of a checkpoint's configuration; 0 where it does not say."""
    try:
        config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
        return int(config.get("max_position_embeddings") or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
