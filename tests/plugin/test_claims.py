"""A liar in each direction: what is declared must be shown, and what is shown must be declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

Write = Callable[..., object]
CLAIMANTS = """
    from dataclasses import replace
    from targets import VOCAB, Echo, Info, Liar, TargetError, UnsupportedDeployment

    class Honest(Echo):
        defaults = {"precisions": ("fp32",)}
        features = {"chunk": (0, 7)}

        def open(self, deployment):
            if deployment.precision not in self.defaults["precisions"]:
                raise UnsupportedDeployment(f"no kernel for {deployment.precision}")
            self.deployment, self.seen = deployment, set()
            kind = self.defaults.get("kind", "engine")
            return Info("h", "1", kind, self.observables, self.features, vocab_size=VOCAB)

        def run(self, requests):
            for request in requests:
                for response in super().run([request]):
                    yield self.answer(request, response)

        def answer(self, request, response):
            if "logits" not in request.want:
                response.logits = None
            return response

    class NoLogits(Honest):
        def answer(self, request, response):
            response.logits = None
            return response

    class Shy(Honest):
        observables = frozenset({"text"})

    class Refuses(Honest):
        def open(self, deployment):
            if deployment.feature("chunk"):
                raise UnsupportedDeployment("chunks are not built in")
            return super().open(deployment)

    class NoTaps(Honest):
        observables = frozenset({"logits", "text", "taps"})

    class Cache(Honest):
        features = {"prefix_cache": (0, 1)}

        def answer(self, request, response):
            response.cached_tokens = len(request.prompt) - 1 if request.prompt in self.seen and self.on() else 0
            self.seen.add(request.prompt)
            return super().answer(request, response)

        def on(self):
            return self.deployment.feature("prefix_cache")

    class NoCache(Cache):
        def on(self):
            return False

    class AlwaysCache(Cache):
        def on(self):
            return True

    class HiddenCache(AlwaysCache):
        features = {}

    class Served(HiddenCache):
        defaults = {"kind": "endpoint", "precisions": ("fp32",)}

    class MorePrecise(Honest):
        def open(self, deployment):
            return super().open(replace(deployment, precision="fp32"))

    class Strict(Honest):
        observables = frozenset({"text"})

        def answer(self, request, response):
            if request.want - self.observables:
                raise TargetError("logprobs are not allowed")
            return super().answer(request, response)
"""


@pytest.mark.requirement(60, 63)
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("Honest", ""),
        ("Cache", ""),
        ("Strict", ""),  # who refuses what he does not declare is honest
        ("Served", ""),  # a server keeps the features it was started with
        ("NoLogits", "logits is declared, but: declared, but absent from the answer; declare only what is shown"),
        ("Refuses", "chunk=7 is declared, but: chunks are not built in"),
        ("NoTaps", "taps is declared, but: declared, but absent"),
        ("NoCache", "prefix_cache=1 is declared, but: a repeated prompt took nothing from the cache"),
        ("AlwaysCache", "prefix_cache=0 is not declared, but 95 of 96 tokens of a repeated prompt came from a cache"),
        ("HiddenCache", "prefix_cache is not declared, but 95 of 96 tokens"),
        ("Shy", "logits is not declared, but an answer shows it; declare it"),
        ("MorePrecise", "precision bf16 is not declared, but a deployment in it opens"),
    ],
)
def test_claims_are_tested_both_ways(folder: Folder, write: Write, target: str, says: str) -> None:
    write(claimants=CLAIMANTS)
    write(
        test_mine="""
        def test_claims(target, precision, judge):
            problems = target.claims().problems
            judge.promise("claims", not problems, "; ".join(problems))
            assert target.generate((1, 2), 3).tokens  # and it still serves
        """
    )
    args = (f"--adapt-target=py:claimants:{target}", "--adapt-profile=smoke", "--adapt-precisions=fp32")
    result = folder.run_bare(*args, "--adapt-models=qwen3-moe-odd", "test_mine.py")
    (case,) = folder.report()["cases"]
    assert (result.ret, case["status"]) == ((1, "fail") if says else (0, "pass")), case["reason"]
    told = case["measurements"][0]["detail"]
    assert told == "" if not says else says in told
    assert told.count("; declare") == (2 if target == "MorePrecise" else 1 if says else 0), told
