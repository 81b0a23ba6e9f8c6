"""The shipped sampling suite on a target that shows text alone: a right sampler is green, a wrong one is red."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

SAMPLERS = '''
from dataclasses import replace
import numpy as np
from pytest_adapt.oracle import Oracle, Rounding
from pytest_adapt.target.protocol import Info, Response

class Sampler:
    """Draws from the distributions that the oracle's emulation of the precision has."""
    defaults = {"kind": "endpoint", "observables": ("text",)}
    heat = 1.0

    def open(self, deployment):
        self.oracle, self.rounding, self.known = Oracle(deployment.model), Rounding.of(deployment.precision), {}
        return Info("sampler", "1", kind="endpoint", observables=frozenset({"text"}), vocab_size=self.oracle.spec.vocab)

    def run(self, requests):
        for request in requests:
            fed, new = list(request.prompt), []
            for place in range(request.max_new_tokens):
                new.append(self.draw(self.logits(tuple(fed + new)), request.sampling, place))
            yield Response(request.id, len(fed), tuple(new), text="text" if new else None)

    def logits(self, tokens):
        if tokens not in self.known:
            last = np.array([len(tokens) - 1])
            self.known[tokens] = np.asarray(self.oracle.run(tokens, rounding=self.rounding, rows=last).logits[0], float)
        return self.known[tokens]

    def draw(self, logits, sampling, place):
        if not sampling.temperature:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
        p = np.exp((logits[order] - logits.max()) / (sampling.temperature * self.heat))
        p /= p.sum()
        keep = np.cumsum(p) - p < sampling.top_p
        uniform = np.random.Generator(np.random.Philox(key=sampling.seed, counter=place)).random()
        total = np.cumsum(p[keep])
        return int(order[np.searchsorted(total, uniform * total[-1], side="right")])

    def close(self): pass

class Hot(Sampler):
    heat = 1.1

class Plain(Sampler):
    """Refuses what OpenAI's own API does not have."""
    def run(self, requests):
        for request in requests:
            if request.sampling.top_k:
                yield Response(request.id, len(request.prompt), finish="abort", error="unknown field top_k")
            else:
                yield from super().run([request])

class PlainAndWide(Plain):
    def draw(self, logits, sampling, place):
        return super().draw(logits, replace(sampling, top_p=1.0), place)

class Greedy(Sampler):
    def draw(self, logits, sampling, place):
        return int(logits.argmax())
'''


def run(folder: Folder, target: str, precision: str) -> dict[str, str]:
    folder.pytester.makepyfile(samplers=SAMPLERS)
    given = (f"--adapt-target=py:samplers:{target}", "--adapt-models=qwen3-moe-odd", f"--adapt-precisions={precision}")
    folder.run_bare(*given, "-k", "test_samples")
    return {case.partition("::")[2].partition("[")[0]: status for case, status in folder.statuses().items()}


NAMES = {
    "test_samples_follow_the_distribution",
    "test_filters_keep_the_tokens_that_they_name",
    "test_a_seed_decides_the_sample",
    "test_no_temperature_and_one_candidate_are_greedy",
}


@pytest.mark.requirement(50, 113)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_right_sampler_is_green(folder: Folder, precision: str) -> None:
    assert run(folder, "Sampler", precision) == dict.fromkeys(NAMES, "pass")
    (case,) = (case for case in folder.report()["cases"] if "follow" in case["case"])
    assert case["observable"] == "text"
    measured = {one["metric"]: one for one in case["measurements"]}
    assert measured["sample.temperature"]["compared"] >= 1024
    assert "with power 0.8" in measured["sample.temperature"]["detail"]


@pytest.mark.requirement(50, 113)
def test_a_temperature_a_tenth_too_high_is_red(folder: Folder) -> None:
    found = run(folder, "Hot", "bf16")
    assert found["test_samples_follow_the_distribution"] == "fail"
    assert found["test_a_seed_decides_the_sample"] == "pass"
    (case,) = (case for case in folder.report()["cases"] if "follow" in case["case"])
    assert "tokens rarer by" in case["reason"]


@pytest.mark.requirement(98, 113)
def test_a_sampler_that_is_greedy_is_red_everywhere_but_where_greed_is_right(folder: Folder) -> None:
    found = run(folder, "Greedy", "fp32")
    assert found.pop("test_no_temperature_and_one_candidate_are_greedy") == "pass"
    assert set(found.values()) == {"fail"}


@pytest.mark.requirement(50, 113)
def test_what_is_refused_is_unsupported_and_excuses_nothing_else(folder: Folder) -> None:
    filters, greedy = "test_filters_keep_the_tokens_that_they_name", "test_no_temperature_and_one_candidate_are_greedy"
    found = run(folder, "Plain", "fp32")
    assert (found[filters], found[greedy]) == ("unsupported", "unsupported")
    assert any("unknown field top_k" in case["reason"] for case in folder.report()["cases"])
    assert run(folder, "PlainAndWide", "fp32")[filters] == "fail"
