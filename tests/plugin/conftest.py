"""Pytest inside pytest: a folder with small targets, and a way to run them."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.numpy

ROOT = Path(__file__).resolve().parents[2]
# Inner runs load this plugin only, by name: the same whether it is installed or not, and quick.
PLUGIN = ("-p", "pytest_adapt.plugin", "-p", "no:cacheprovider")

# pytester forgets what an inner run imported, and these refuse to be imported twice in one process.
LOADED_ONCE = (numpy, safetensors.numpy)

TARGETS = '''
import os, time
import numpy as np
from pytest_adapt.target.protocol import Info, Response, TargetError, UnsupportedDeployment

VOCAB = 331
LOG = os.path.join(os.path.dirname(__file__), "opened.log")

class Echo:
    """Next token is a function of the last: deterministic, and right by its own rule."""
    defaults = {"observables": ("logits", "text"), "features": {"chunk": (0, 7)}}
    observables = frozenset({"logits", "text"})

    def open(self, deployment):
        with open(LOG, "a") as log:
            name = os.path.basename(deployment.model)
            log.write(f"{name} {deployment.layout} {deployment.precision} {deployment.features}\\n")
        self.deployment = deployment
        return Info("echo", "1", observables=self.observables, vocab_size=VOCAB, features={"chunk": (0, 7)})

    def run(self, requests):
        for request in requests:
            fed, new = list(request.prompt), []
            for _ in range(request.max_new_tokens):
                new.append(self.next(fed[-1]))
                fed.append(new[-1])
            fed = fed[: len(request.prompt) + max(0, len(new) - 1)]
            logits = np.zeros((len(fed), VOCAB), np.float32)
            logits[np.arange(len(fed)), [self.next(token) for token in fed]] = 5.0
            yield Response(request.id, len(request.prompt), tuple(new), logits=logits, text="text" if new else None)

    def next(self, token):
        return (token * 7 + 3) % VOCAB

    def close(self):
        with open(LOG, "a") as log:
            log.write("close\\n")

class SingleOnly(Echo):
    def open(self, deployment):
        if deployment.layout != "single" or deployment.precision == "bf16":
            super().open(deployment)
            raise UnsupportedDeployment(f"{deployment.layout} in {deployment.precision}: one rank in fp32 only")
        return super().open(deployment)

class Broken(Echo):
    def open(self, deployment):
        super().open(deployment)
        raise TargetError("the licence server does not answer")

class LaterBroken(Echo):
    def open(self, deployment):
        info = super().open(deployment)
        if deployment.precision == "bf16":
            raise TargetError("no kernel for bf16")
        return info

class Dies(Echo):
    def run(self, requests):
        for request in requests:
            if len(request.prompt) == 3:
                raise TargetError("the server died\\nlast line of its log")
            yield from super().run([request])

class Hangs(Echo):
    def run(self, requests):
        for request in requests:
            if len(request.prompt) == 3:
                time.sleep(30)
            yield from super().run([request])

class Forgets(Echo):
    def run(self, requests):
        for request in requests:
            if len(request.prompt) != 3:
                yield from super().run([request])

class Liar(Echo):
    """Declares logits, shows none."""
    def run(self, requests):
        for response in super().run(requests):
            response.logits = None
            yield response

class TextOnly(Echo):
    defaults = {"kind": "endpoint", "observables": ("text",)}
    observables = frozenset({"text"})

class Oracle(Echo):
    """Answers with the oracle's own float32 logits: right by construction."""
    def open(self, deployment):
        from pytest_adapt.oracle import Oracle
        self.oracle = Oracle(deployment.model)
        info = super().open(deployment)
        return Info("oracle", "1", observables=frozenset({"logits", "text"}), vocab_size=self.oracle.spec.vocab)

    def run(self, requests):
        for request in requests:
            fed, new = list(request.prompt), []
            logits = self.logits(fed)
            for _ in range(request.max_new_tokens):
                new.append(int(logits[-1].argmax()))
                fed.append(new[-1])
                if len(new) < request.max_new_tokens:
                    logits = self.logits(fed)
            fed = fed[: len(request.prompt) + max(0, len(new) - 1)]
            yield Response(request.id, len(request.prompt), tuple(new), logits=self.logits(fed))

    def logits(self, tokens):
        return np.asarray(self.oracle.run(tuple(tokens)).logits, np.float32)

class Wrong(Oracle):
    """The same, with one vocabulary entry in fifty shifted."""
    def logits(self, tokens):
        found = super().logits(tokens).copy()
        found[:, ::50] += 0.05
        return found
'''


class Folder:
    """A user's folder with ``targets.py`` in it."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.path = pytester.path
        pytester.makepyfile(targets=TARGETS)
        for name in [name for name in os.environ if name.startswith("ADAPT_") or name in ("CI", "PYTEST_ADDOPTS")]:
            monkeypatch.delenv(name)
        monkeypatch.setattr(sys, "argv", ["pytest"])  # what commands to repeat a case begin with
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        # The engine that these tests have: an installed one brings native kernels, which the source tree may lack.
        engine = importlib.util.find_spec("adapt_engine")
        places = [ROOT, *([Path(engine.origin).parents[1]] if engine and engine.origin else [])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(place) for place in places))
        # Checkpoints are the same for every test: written once in the checkout's own cache.
        cache = ROOT / ".adapt" / "models"
        cache.mkdir(parents=True, exist_ok=True)
        (self.path / ".adapt").mkdir()
        (self.path / ".adapt" / "models").symlink_to(cache)

    def run(self, target: str, *args: str, profile: str = "smoke") -> pytest.RunResult:
        """Run pytest in this process against ``py:targets:TARGET``."""
        own = any(word.startswith("--adapt-profile") for word in args)
        taken = () if own else (f"--adapt-profile={profile}",)
        return self.run_bare(f"--adapt-target=py:targets:{target}", *taken, *args)

    def run_bare(self, *args: str) -> pytest.RunResult:
        """Run pytest in this process with nothing but ``args``."""
        return self.pytester.runpytest_inprocess(*PLUGIN, *args)

    def run_subprocess(self, *args: str) -> pytest.RunResult:
        """Run pytest in a process of its own, with nothing but ``args``."""
        return self.pytester.runpytest_subprocess(*PLUGIN, *args)

    def opened(self) -> list[str]:
        """What the targets of this folder opened and closed, in order."""
        log = self.path / "opened.log"
        return log.read_text().splitlines() if log.exists() else []

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / ".adapt" / "report" / "report.json").read_text())
        return found

    def statuses(self) -> dict[str, str]:
        """Case id -> status, of the last run."""
        return {case["case"]: case["status"] for case in self.report()["cases"]}


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(pytester, monkeypatch)


@pytest.fixture
def write(pytester: pytest.Pytester) -> Callable[..., Path]:
    """Write a test module."""
    return pytester.makepyfile
