"""Opened targets: one deployment at a time, opened once, probed once, and never waited for without a limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_adapt.perf.memory import return_memory
from pytest_adapt.target.owed import shortfall
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, Target, TargetError, UnsupportedDeployment
from pytest_adapt.verdict.result import Status
from pytest_adapt.verdict.status import Verdict
from pytest_adapt.watchdog import Hung, Watchdog

if TYPE_CHECKING:
    from pytest_adapt.options import Settings
    from pytest_adapt.target.registry import TargetSpec

__all__ = ["Fatal", "Host", "Opened"]

_CLOSE_SECONDS = 60.0
_DEATHS = 2


class Fatal(Exception):
    """The target cannot be used at all; the run ends with exit code 4."""

    adapt_status = Status.ERROR


@dataclass
class Opened:
    """A target with its deployment loaded."""

    target: Target
    watchdog: Watchdog
    deployment: Deployment
    info: Info
    shown: frozenset[str]
    """Observables and features that are declared and were seen."""
    missing: Mapping[str, str]
    """Declared, but not seen: why."""
    seconds: float
    """Time that opening took."""
    ops: dict[str, str] = field(default_factory=dict)
    """Declared operators that were probed: why one does not count, "" where it does."""


@dataclass
class Usage:
    """What a run spent, for the plan of the next one."""

    opens: int = 0
    open_seconds: float = 0.0
    tokens: int = 0
    run_seconds: float = 0.0


@dataclass
class Host:
    """Opens deployments of one target and keeps the present one. One that failed to open is not tried again."""

    spec: TargetSpec
    settings: Settings
    usage: Usage = field(default_factory=Usage)
    current: Opened | None = None
    deadline: float = float("inf")
    """When the present item gives up waiting (time.monotonic)."""
    fatal: str = ""
    doing: str = ""
    """What is waited for at this moment, in words; "" where the target is asked nothing."""
    reached: int = 0
    """Calls of what the fault of this run (--adapt-inject) replaced, in this process."""
    _failures: dict[Deployment, tuple[Status, str]] = field(default_factory=dict)
    _deaths: dict[Deployment, int] = field(default_factory=dict)
    _info: Info | None = None

    @property
    def kind(self) -> str:
        """What the target must show: a key of REQUIREMENTS."""
        return self.settings.require or self.spec.kind

    @property
    def info(self) -> Info | None:
        """What the last opened deployment said about itself."""
        return self._info

    def acquire(self, deployment: Deployment) -> Opened:
        """The opened deployment. Raises Verdict (declined, failed before) or Fatal."""
        if self.fatal:
            raise Fatal(self.fatal)
        if self.current is not None and self.current.deployment == deployment:
            return self.current
        if deployment in self._failures:
            raise Verdict(*self._failures[deployment])
        self.close()
        self.current = self._open_or_remember(deployment)
        return self.current

    def refusal(self, deployment: Deployment) -> str | None:
        """Why the target declines a deployment; None where it loads. The present one is closed first."""
        self.close()
        try:
            opened = self._open(deployment)
        except TargetError as error:
            return str(error)
        self.shut(opened)
        return None

    def run(
        self,
        opened: Opened,
        requests: Iterable[Request],
        answered: Callable[[str], None] | None = None,
        aborted: Collection[str] = (),
    ) -> dict[str, Response]:
        """Every request's answer by id; ``answered`` hears of each as it comes, and may abort those in ``aborted``.

        Raises Verdict where the target fails, hangs or answers with less than was asked for; Fatal where it died again.
        """
        asked = {request.id: request for request in requests}
        answers: dict[str, Response] = {}

        def waiting() -> str:
            left = [name for name in asked if name not in answers]
            return f"{len(left)} of {len(asked)} answers ({', '.join(left[:3])}) from {opened.info.name}"

        started = time.monotonic()
        self.doing = f"request 1 of {len(asked)}"
        try:
            for response in opened.watchdog.stream(
                lambda: opened.target.run(list(asked.values())), self._seconds_left(), waiting
            ):
                if response.id not in asked or response.id in answers:
                    raise TargetError(f"{opened.info.name} answered id {response.id!r}, unknown or answered before")
                answers[response.id] = response
                self.doing = f"request {min(len(answers) + 1, len(asked))} of {len(asked)}"
                if answered is not None:
                    answered(response.id)
            if len(answers) < len(asked):
                raise TargetError(f"the target stopped: no {waiting()}")
        except (TargetError, Hung) as error:
            self._died(opened, error)
        finally:
            self.doing = ""
        context = max(opened.info.max_context, opened.deployment.max_context)
        for name, request in asked.items():
            if lacks := shortfall(request, answers[name], opened.info, context, name in aborted):
                raise Verdict(Status.FAIL, f"{opened.info.name}: request {name!r}: {lacks}")
        self.usage.run_seconds += time.monotonic() - started
        self.usage.tokens += sum(len(request.prompt) + request.max_new_tokens for request in asked.values())
        return answers

    def reopen(self) -> Opened:
        """Close the present deployment and load it again."""
        if self.current is None:
            raise RuntimeError("nothing is open")
        deployment = self.current.deployment
        self.close()
        return self.acquire(deployment)

    def close(self) -> None:
        """Close the present deployment. What goes wrong there is not the item's fault: it is dropped."""
        if self.current is not None:
            self.shut(self.current)
            self.current = None

    def renew(self) -> None:
        """Close the present deployment, and forget what failed before: the next item finds what the first one found."""
        self.close()
        self._failures.clear()
        self._deaths.clear()

    def shut(self, opened: Opened) -> None:
        """Close an instance."""
        with contextlib.suppress(Exception):
            opened.watchdog.call(opened.target.close, _CLOSE_SECONDS, lambda: "the target to close")
        opened.watchdog.stop()
        return_memory()

    def _open_or_remember(self, deployment: Deployment) -> Opened:
        try:
            return self._open(deployment)
        except UnsupportedDeployment as error:
            failure = (Status.UNSUPPORTED, str(error))
        except (TargetError, Hung) as error:
            if self._info is None:  # nothing has worked yet: the spec or the server is wrong, not the deployment
                self.fatal = str(error)
                raise Fatal(self.fatal) from None
            failure = (Status.FAIL, f"cannot open {_name(deployment)}: {error}")
        self._failures[deployment] = failure
        raise Verdict(*failure)

    def _open(self, deployment: Deployment) -> Opened:
        from pytest_adapt.target.probe import probe

        started = time.monotonic()
        watchdog = Watchdog()
        limit = self.settings.timeout
        self.doing = f"opening {_name(deployment)}"
        target = watchdog.call(self._create, limit, lambda: "the adapter to start")
        try:
            info = watchdog.call(lambda: target.open(deployment), limit, lambda: f"{_name(deployment)} to open")
            found = watchdog.call(
                lambda: probe(target, deployment, info), limit, lambda: f"{_name(deployment)} to answer a probe"
            )
        except BaseException:
            with contextlib.suppress(Exception):
                watchdog.call(target.close, _CLOSE_SECONDS, lambda: "the target to close")
            watchdog.stop()
            raise
        finally:
            self.doing = ""
        self._info = info
        seconds = time.monotonic() - started
        self.usage.opens += 1
        self.usage.open_seconds += seconds
        shown = found.shown | {name for name, settings in info.features.items() if settings}
        return Opened(target, watchdog, deployment, info, shown - set(found.missing), found.missing, seconds)

    def _create(self) -> Target:
        target = self.spec.create()
        if self.settings.inject:
            from pytest_adapt.faults.registry import CountedSeams, get

            seams = getattr(target, "seams", None)
            if seams is None:
                raise TargetError(f"target {self.spec.text} has no seams to put fault {self.settings.inject} into")
            get(self.settings.inject).install(CountedSeams(seams, self._count))
        if self.settings.observables:
            from pytest_adapt.target.mask import MaskedTarget

            return MaskedTarget(target, self.settings.observables)
        return target

    def _count(self) -> None:
        self.reached += 1

    def _seconds_left(self) -> float:
        return max(0.0, min(self.deadline - time.monotonic(), self.settings.timeout))

    def _died(self, opened: Opened, error: Exception) -> None:
        """Drop the instance; the next item opens a new one, a second death in a row ends the run."""
        if opened is self.current:
            self.current = None
        self.shut(opened)
        deaths = self._deaths[opened.deployment] = self._deaths.get(opened.deployment, 0) + 1
        if deaths >= _DEATHS:
            self.fatal = f"the target failed {deaths} times on {_name(opened.deployment)}: {error}"
            raise Fatal(self.fatal) from None
        raise Verdict(Status.FAIL, str(error)) from None


def _name(deployment: Deployment) -> str:
    features = "".join(f" {name}={value}" for name, value in deployment.features)
    return f"{deployment.model.rstrip('/').rpartition('/')[2]} {deployment.layout} {deployment.precision}{features}"
