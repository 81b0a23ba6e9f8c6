"""The shipped suites run by pytest itself, inside this process, with everything that they find kept in memory.

One nested session is one fault (or none), one model, layout and precision, and one set of observables. It runs the
suites' own test functions under the plugin's own hooks: the code that judges a user's engine, not a copy of it.
What repeated sessions would make again (checkpoints, oracles, reference records) is shared between them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.faults.registry import Seams, get
from pytest_adapt.handle import ModelHandle
from pytest_adapt.items import CASE, case_from_json
from pytest_adapt.matrix import Model
from pytest_adapt.models import catalogue
from pytest_adapt.options import Settings
from pytest_adapt.references import References
from pytest_adapt.selftest.memo import Memory, RememberedTarget
from pytest_adapt.session import Host
from pytest_adapt.shipped import suites_dir
from pytest_adapt.stash import RUN, STATE
from pytest_adapt.target.mask import MaskedTarget
from pytest_adapt.target.protocol import Response, Target
from pytest_adapt.target.registry import TargetSpec
from pytest_adapt.verdict.identity import contents
from pytest_adapt.verdict.result import CaseResult
from pytest_adapt.verdict.status import WRONG

__all__ = ["Bench", "Found", "NestedError", "Setting"]

PROMPTS: tuple[tuple[str, int], ...] = (("random-37", 37), ("random-150", 150), ("searched-0", 64))
"""The reduced case set: prompts, and how many tokens of each are taken at most. A random one whose choices are close,
one beyond 64 and 128 tokens, and the beginning of one whose choices are certain in low precision."""
_QUIET = (
    "cacheprovider",
    "doctest",
    "faulthandler",
    "junitxml",
    "logging",
    "pastebin",
    "terminal",
    "threadexception",
    "unraisableexception",
    "warnings",
    "xdist",
)
"""Plugins of pytest's own that a nested session does without."""


class NestedError(RuntimeError):
    """A nested session did not run its cases; the message says why."""


@dataclass(frozen=True)
class Setting:
    """What one nested session judges."""

    model: str
    layout: str
    precision: str
    contexts: tuple[int, ...] = ()
    suites: tuple[str, ...] = ("correctness",)
    """Folders of the shipped suites, or test files in them."""
    observables: tuple[str, ...] = ()
    """() for all that the target has."""
    fault: str = ""

    def arguments(self) -> list[str]:
        """The command line of the session, without what keeps it quiet."""
        words = [
            "--adapt-target=builtin",
            f"--adapt-models={self.model}",
            f"--adapt-layouts={self.layout}",
            f"--adapt-precisions={self.precision}",
        ]
        if self.contexts:
            words.append(f"--adapt-contexts={','.join(map(str, self.contexts))}")
        if self.observables:
            words.append(f"--adapt-observables={','.join(self.observables)}")
        if self.fault:
            words.append(f"--adapt-inject={self.fault}")
        return words


@dataclass
class Found:
    """What a session came to."""

    cases: list[CaseResult] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    """Case -> digest of all that the target answered in it, in the order in which it was asked."""
    seconds: float = 0.0
    """Of this process's CPU time: what else the machine does is no cost of a fault."""

    @property
    def red(self) -> list[CaseResult]:
        """The cases that say that something is wrong."""
        return [case for case in self.cases if case.status in WRONG]


class Bench:
    """Runs nested sessions below one root directory, and keeps what they share."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._handles: dict[str, ModelHandle] = {}
        self._references: dict[tuple[str, str], Any] = {}
        self._plans: dict[str, dict[str, Any]] = {}

    def run(
        self,
        setting: Setting,
        memory: Memory | None = None,
        install: Callable[[Seams], None] | None = None,
        *,
        until_red: bool = False,
    ) -> Found:
        """Run the cases of a setting. ``memory`` holds the answers of sessions that differ in their observables alone;
        ``install`` puts a change into the target's seams that is no registered fault. With ``until_red`` no case
        is begun after a red one.

        Raises NestedError where no case was run.
        """
        memory = memory or Memory()
        inner = _Inner(self, memory, install, until_red)
        started = time.process_time()
        quiet = [word for name in _QUIET for word in ("-p", f"no:{name}")]
        words = [*quiet, "--disable-plugin-autoload", "-p", "pytest_adapt.plugin", "-c", os.devnull]
        words += [f"--rootdir={self._root}", "--assert=plain", "--capture=no", *setting.arguments()]
        words += [str(suites_dir() / name) for name in setting.suites]
        with _environment(), memory.of_tests(self._plans), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = pytest.main(words, plugins=[inner])
        if not inner.found.cases:
            why = inner.problem or f"pytest ended with code {int(code)}"
            raise NestedError(f"no case was run with {' '.join(setting.arguments())}: {why}")
        inner.found.seconds = time.process_time() - started
        return inner.found

    def handle(self, model: Model, root: Path) -> ModelHandle:
        """The handle of a model with the reduced set of prompts."""
        if model.name not in self._handles:
            self._handles[model.name] = _Reduced(model, root)
        return self._handles[model.name]

    def catalogued(self, name: str) -> ModelHandle:
        """The handle of a model of the catalogue."""
        entry = catalogue()[name]
        model = Model(name, entry, None, entry.contexts, entry.precisions, entry.config, explicit=True)
        return self.handle(model, self._root / ".adapt" / "models")

    def references(self, runner: Any) -> References:
        return References(runner, self._references)


class _Reduced(ModelHandle):
    """A model that gives its tests a few prompts."""

    def prompts(self, limit: int | None = None) -> dict[str, tuple[int, ...]]:
        known = self.all_prompts
        chosen = [(name, known[name], most) for name, most in PROMPTS if name in known]
        if limit is None:
            return {name: tokens[:most] for name, tokens, most in chosen}
        fitting = {name: tokens[: min(most, limit)] for name, tokens, most in chosen if "random" not in name}
        fitting |= {name: tokens for name, tokens, _ in chosen if "random" in name and len(tokens) <= limit}
        return dict(sorted(fitting.items(), key=lambda item: (len(item[1]), item[0])))


class _Inner:
    """Plugin of a nested session."""

    def __init__(self, bench: Bench, memory: Memory, install: Callable[[Seams], None] | None, until_red: bool) -> None:
        self.found = Found()
        self.problem = ""
        self.memory = memory
        self.install = install
        self.until_red = until_red
        self._bench = bench
        self._digest: Any = None

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        runner = config.stash[RUN]
        config.pluginmanager.unregister(runner.collector)
        runner.host = _Recording(runner.spec, runner.settings, self)
        runner.references = self._bench.references(runner)
        runner.make_handle = self._bench.handle

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problem = self.problem or str(report.longrepr)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._digest = hashlib.sha256()
        result = yield
        # Each item has a target of its own: what it is told does not depend on which items ran before, and so is
        # remembered when fewer of them run.
        item.config.stash[RUN].host.renew()
        state = item.stash.get(STATE, None)
        if state is not None:
            self.found.answers[state.case] = self._digest.hexdigest()[:16]
        if self.until_red and self.found.red:
            item.session.shouldstop = "one red case is enough"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = getattr(report, CASE, None)
        if text is not None:
            self.found.cases.append(case_from_json(text))

    def answered(self, answers: dict[str, Response]) -> None:
        """Take note of what the target said."""
        for name, response in answers.items():
            self._digest.update(f"{name} {response.error} {response.first_row}".encode())
            for key, value in sorted(contents(response).items()):
                self._digest.update(key.encode())
                self._digest.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())


class _Recording(Host):
    """A host whose answers are remembered, and taken note of."""

    def __init__(self, spec: TargetSpec, settings: Settings, inner: _Inner) -> None:
        super().__init__(spec, settings)
        self._inner = inner

    def run(self, *asked: Any, **named: Any) -> dict[str, Response]:
        answers = super().run(*asked, **named)
        self._inner.answered(answers)
        return answers

    def _create(self) -> Target:
        made = RememberedTarget(self._faulty, self._inner.memory)
        return MaskedTarget(made, self.settings.observables) if self.settings.observables else made

    def _faulty(self) -> Target:
        target: Any = self.spec.create()
        if self.settings.inject:
            get(self.settings.inject).install(target.seams)
        if self._inner.install is not None:
            self._inner.install(target.seams)
        made: Target = target
        return made


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Without the variables by which the user's own run is set up."""
    hidden = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if name.startswith("ADAPT_") or name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_PLUGINS", "CI")
    }
    try:
        yield
    finally:
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        os.environ.update(hidden)
