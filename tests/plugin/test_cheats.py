"""A target does not choose how much of it is judged: what it omits, cuts short or avoids is red, in a line."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

Write = Callable[..., Path]

TESTS = """
    import pytest
    def test_score(target): target.score(range(5, 12), want=("logits", "topk"))
    def test_generate(target): target.generate(range(5, 12), 6)
"""
# What the adapter does to each answer of the honest one, which items are red, and what they say.
CHEATS = {
    "last_row": (
        "n = len(a.logits) - 2 if request.id != 'adapt-probe' else 0; a.logits = a.logits[n:]; a.first_row = n",
        ("score", "generate"),
        "rows begin at token 5, and were asked for from token 0",
    ),
    "short": (
        "a.tokens = a.tokens[:3]; a.logits = a.logits[: len(request.prompt) + max(0, len(a.tokens) - 1)]",
        ("generate",),
        "3 of 6 tokens were generated, finish 'length'",
    ),
    "short_and_counted_as_whole": (
        "a.tokens = a.tokens[:3]; a.completion_tokens = 6 if request.max_new_tokens > 3 else None; "
        "a.logits = a.logits[: len(request.prompt) + max(0, len(a.tokens) - 1)]",
        ("generate",),
        "completion_tokens is 6, but 3 token ids came",
    ),
    "short_by_a_stop_that_is_none": (
        "a.tokens = a.tokens[:3]; a.finish = 'stop'; "
        "a.logits = a.logits[: len(request.prompt) + max(0, len(a.tokens) - 1)]",
        ("generate",),
        "3 of 6 tokens were generated, finish 'stop'",
    ),
    "a_stop_after_the_last_token": (
        "a.finish = 'stop' if a.tokens else a.finish",
        ("generate",),
        "which is no stop token, and the end token is to be ignored",
    ),
    "a_time_before_it_was_asked": ("a.seconds = -5.0", ("score", "generate"), "seconds is -5, which is no time"),
    "first_token_after_the_last": (
        "a.seconds, a.first_token_seconds = 1.0, 1.5",
        ("score", "generate"),
        "the first token came after 1.5 s, and the whole answer after 1 s",
    ),
    "not_finite": (
        "a.logits = a.logits.copy(); a.logits[:, 3] = -np.inf",
        ("score", "generate"),
        "the target shows what cannot be right: logits: values that are not finite",
    ),
    "a_column_too_few": (
        "a.logits = a.logits[:, :-1]",
        ("score", "generate"),
        "the target shows what cannot be right: logits: ",
    ),
    "hides_its_tokens": (
        "a.tokens = (); a.logits = a.logits[: len(request.prompt)]",
        ("generate",),
        "1 of 6 tokens were generated",
    ),
    "now_and_then_no_logits": (
        "a.logits = a.logits if request.id == 'adapt-probe' else None",
        ("score", "generate"),
        "logits was asked for, a probe saw it, and it is absent from the answer",
    ),
    "one_candidate": (
        "a.topk = TopK(np.zeros((len(a.logits), 1), int), np.full((len(a.logits), 1), -1.0))",
        ("score", "generate"),
        "topk lists 1 candidates, 20 were asked for",
    ),
    "miscounts": (
        "a.prompt_tokens += request.id != 'adapt-probe'",
        ("score", "generate"),
        "counted 8 prompt tokens, 7 were sent",
    ),
    "outside_the_vocabulary": (
        "a.tokens = tuple(t + 331 * (request.id != 'adapt-probe') for t in a.tokens)",
        ("generate",),
        "is outside the vocabulary of 331",
    ),
    "skips": (
        "request.id == 'adapt-probe' or pytest.skip('nothing to see')",
        ("score", "generate"),
        "run raised Skipped: nothing to see",
    ),
    "expects_to_fail": (
        "request.id == 'adapt-probe' or pytest.xfail('known')",
        ("score", "generate"),
        "run raised XFailed: known",
    ),
    "interrupts": (
        "if request.id != 'adapt-probe': raise KeyboardInterrupt",
        ("score", "generate"),
        "run raised KeyboardInterrupt",
    ),
    "leaves": (
        "if request.id != 'adapt-probe': os._exit(0)",
        ("score", "generate"),
        "run raised SystemExit: os._exit(0)",
    ),
}


@pytest.mark.requirement(113, 118)
@pytest.mark.parametrize("name", CHEATS)
def test_what_is_left_out_or_got_out_of_is_red(folder: Folder, write: Write, name: str) -> None:
    change, red, says = CHEATS[name]
    body = f"""
    import os
    import pytest
    from dataclasses import replace
    import numpy as np
    from pytest_adapt.target.protocol import TopK
    from targets import Echo

    class Cheat(Echo):
        observables = frozenset({{"logits", "topk", "text"}})
        defaults = {{"observables": ("logits", "topk", "text")}}
        def run(self, requests):
            for request in requests:
                for a in super().run([request]):
                    a.text = None
                    rows = len(a.logits)
                    a.topk = TopK(np.argsort(-a.logits, axis=1)[:, : request.topk], np.full((rows, request.topk), -3.0))
                    {change}
                    if a.topk is not None and a.logits is not None and a.topk.ids.shape[1] > 1:
                        a.topk = TopK(a.topk.ids[-len(a.logits) :], a.topk.logprobs[-len(a.logits) :])
                    yield a
    """
    (folder.path / "cheats.py").write_text(textwrap.dedent(body))
    write(test_mine=TESTS)
    result = folder.run_bare(
        "--adapt-target=py:cheats:Cheat",
        "--adapt-models=qwen3-moe-odd",
        "--adapt-profile=smoke",
        "--adapt-precisions=fp32",
        "test_mine.py",
    )
    assert result.ret != 0
    cases = {case["case"].rpartition("::test_")[2].partition("[")[0]: case for case in folder.report()["cases"]}
    bad = {key for key, case in cases.items() if case["status"] in ("fail", "error")}
    assert bad == set(red), cases
    assert any(says in case["reason"] for case in cases.values()), [case["reason"] for case in cases.values()]
    honest = set(cases) - set(red)
    assert all(cases[key]["status"] == "pass" for key in honest)


@pytest.mark.parametrize("why", ["stop", "end", "context", "asked"])
def test_an_output_may_end_where_it_was_told_to(folder: Folder, write: Write, why: str) -> None:
    body = f"""
    from dataclasses import replace
    from targets import Echo

    class Ends(Echo):
        def open(self, deployment):
            self.most = deployment.max_context
            return super().open(deployment)
        def run(self, requests):
            for request in requests:
                most = {{"context": self.most - len(request.prompt)}}.get({why!r}, 2)
                short = replace(request, max_new_tokens=min(most, request.max_new_tokens))
                for a in super().run([short]):
                    a.text = None
                    a.finish = "abort" if {why!r} == "asked" else "length" if {why!r} == "context" else "stop"
                    yield a
        def control(self, name, **arguments): pass
    """
    (folder.path / "cheats.py").write_text(textwrap.dedent(body))
    asked = {
        "stop": "target.generate((5, 6), 6, stop=((6 * 7 + 3) * 7 + 3,))",
        "end": "target.generate((5, 6), 6, ignore_eos=False)",
        "context": "target.generate([5] * (target.limit - 2), 6)",
        "asked": "target.aborted([Request('a', (5, 6), 6), Request('b', (5, 6), 2)], ['a'])",
    }[why]
    write(
        test_mine=f"""
        from pytest_adapt.target.protocol import Request
        def test_it(target, judge):
            {asked}
            judge.promise("ran", True)
    """
    )
    result = folder.run_bare(
        "--adapt-target=py:cheats:Ends",
        "--adapt-models=qwen3-moe-odd",
        "--adapt-profile=smoke",
        "--adapt-precisions=fp32",
        "test_mine.py",
    )
    assert [case["status"] for case in folder.report()["cases"]] == ["pass"], result.outlines
