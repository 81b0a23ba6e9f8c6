"""A user's own records of what a target answered: noise, environment or behaviour, from run to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_adapt.__main__ import main

if TYPE_CHECKING:
    from conftest import Folder

Write = Callable[..., object]
ENGINES = """
    import numpy as np
    from targets import VOCAB, Info, Oracle

    class Engine(Oracle):
        library, steep = "1.0", 1.0

        def open(self, deployment):
            super().open(deployment)
            seen = frozenset({"logits", "text"})
            return Info("engine", "1", observables=seen, vocab_size=VOCAB, environment={"blas": self.library})

        def logits(self, tokens):
            return super().logits(tokens) * np.float32(self.steep)

    class Rebuilt(Engine):
        library, steep = "2.0", 1.0 + 3e-7

    class Changed(Engine):
        steep = 1.0 + 3e-7
"""


@pytest.mark.requirement(118)
def test_a_user_sees_what_changed_in_the_answers_of_a_target(
    folder: Folder, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every run passes: what is compared here is today's engine with yesterday's, not with the truth."""
    write(engines=ENGINES)
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(rung="correct", needs=("logits",))
        def test_predictions(target, model, precision, reference, judge):
            for name, tokens in model.prompts(40).items():
                judge.against_record(name, target.score(tokens), reference.record(name, tokens))
        """
    )
    goldens = ["goldens", "--store", str(folder.path / "mine"), "--pending", str(folder.path / ".adapt" / "pending")]

    def observe(engine: str) -> None:
        args = ("--adapt-goldens=observe", "--adapt-profile=smoke", "--adapt-precisions=fp32", "test_mine.py")
        assert folder.run_bare(f"--adapt-target=py:engines:{engine}", *args).ret == 0
        capsys.readouterr()

    observe("Engine")
    assert main([*goldens, "accept", "--all", "--reason", "the release of today"]) == 0
    records = sorted(path.name for path in (folder.path / "mine").glob("*.safetensors"))
    assert "qwen3-moe-odd.random-37.seen-fp32.safetensors" in records
    for engine, code, kind in (("Engine", 0, "noise"), ("Rebuilt", 0, "environment"), ("Changed", 1, "behaviour")):
        observe(engine)
        assert main([*goldens, "review", "--markdown"]) == code
        out = capsys.readouterr().out
        assert out.startswith(f"### Golden records: {len(records)} {kind}\n"), out
        assert ("- environment: blas: 1.0 -> 2.0" in out) == (engine == "Rebuilt")
        assert main([*goldens, "reject", "--all"]) == 0


def test_a_run_refuses_a_record_of_ones_own_that_was_edited_by_one_bit(folder: Folder, write: Write) -> None:
    from pytest_adapt.golden.record import Record
    from pytest_adapt.golden.store import Store, shipped_store

    write(
        test_mine="""
        def test_it(target, model, precision, reference, judge):
            tokens = model.all_prompts["random-37"]
            judge.against_record("random-37", target.score(tokens), reference.record("random-37", tokens))
        """
    )
    shipped, name = shipped_store(), "qwen3-moe-odd.random-37.exact"
    own = Store(folder.path / "mine")
    own.write(Record.load(shipped.path(name)), shipped.entries[name]["provenance"])
    args = ("--adapt-goldens-dir=mine", "--adapt-precisions=fp32", "test_mine.py")
    assert folder.run("Oracle", *args).ret == 0
    data = bytearray(own.path(name).read_bytes())
    data[-33] ^= 1
    own.path(name).write_bytes(data)
    assert folder.run("Oracle", *args).ret == 1
    (case,) = folder.report()["cases"]
    assert case["status"] == "fail" and "content differs from its digest" in case["reason"]


def test_what_a_run_with_errors_proposes_is_not_accepted(
    folder: Folder, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    test = """
        def test_it(target, model, precision, reference, judge):
            tokens = model.all_prompts["random-37"]
            judge.against_record("random-37", target.score(tokens), reference.record("random-37", tokens))
        {more}
        """
    goldens = ["goldens", "--store", str(folder.path / "mine"), "--pending", str(folder.path / ".adapt" / "pending")]
    args = ("--adapt-goldens=observe", "--adapt-precisions=fp32", "test_mine.py")
    write(test_mine=test.format(more="def test_broken(target, nobody): pass"))
    assert folder.run("Oracle", *args).ret == 1
    assert main([*goldens, "accept", "--all", "--reason", "today", "--allow-observed"]) == 1
    assert "the run that proposed it had errors" in capsys.readouterr().err
    write(test_mine=test.format(more=""))
    assert folder.run("Oracle", *args).ret == 0
    assert main([*goldens, "accept", "--all", "--reason", "today"]) == 0
