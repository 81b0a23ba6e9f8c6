"""What happens to a run when the target declines, lies, forgets, hangs or dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_adapt.matrix import Mark
from pytest_adapt.open_target import OpenTarget
from pytest_adapt.target.protocol import Deployment, Info

if TYPE_CHECKING:
    from conftest import Folder

Write = Callable[..., object]
THREE = """
    def test_one(target): assert len(target.generate((5, 6), 2).tokens) == 2
    def test_three(target): target.score((5, 6, 7))
    def test_two(target): target.score((5, 6))
"""
FP32 = "--adapt-precisions=fp32"


def test_a_declined_deployment_is_unsupported_and_not_tried_again(folder: Folder, write: Write) -> None:
    write(test_mine=THREE)
    result = folder.run("SingleOnly", "-rs", "test_mine.py")
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 3, "skipped": 3}
    assert set(folder.statuses().values()) == {"pass", "unsupported"}
    assert sum("bf16" in line for line in folder.opened()) == 1
    assert "one rank in fp32 only" in result.stdout.str()


def test_a_run_in_which_nothing_passed_is_not_green(folder: Folder, write: Write) -> None:
    write(test_mine=THREE)
    result = folder.run("SingleOnly", "--adapt-precisions=bf16", "test_mine.py")
    assert result.parseoutcomes() == {"skipped": 3}
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "nothing was judged" in result.stdout.str()


def test_a_run_in_which_everything_failed_was_judged(folder: Folder, write: Write) -> None:
    write(test_mine="def test_bad(target): assert False, 'bad'")
    result = folder.run("SingleOnly", FP32, "test_mine.py")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "nothing was judged" not in result.stdout.str().replace("where nothing was judged", "")


@pytest.mark.parametrize("xdist", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["alone", "xdist"])
def test_a_target_that_never_opens_ends_the_run_with_4(folder: Folder, write: Write, xdist: tuple[str, ...]) -> None:
    write(test_mine=THREE)
    args = ("--adapt-target=py:targets:Broken", "--adapt-profile=smoke", "test_mine.py", *xdist)
    result = folder.run_subprocess(*args)
    assert result.ret == 4
    assert "the target cannot be used: the licence server does not answer" in result.outlines
    assert "INTERNALERROR" not in result.stdout.str()
    assert len(folder.opened()) <= 4  # once in each process, and closed


def test_a_deployment_that_breaks_later_fails_its_items_once(folder: Folder, write: Write) -> None:
    write(test_mine=THREE)
    result = folder.run("LaterBroken", "test_mine.py")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 3, "failed": 3}
    assert sum("bf16" in line for line in folder.opened()) == 1
    assert "1. cannot open qwen3-moe-odd" in result.stdout.str()
    assert "no kernel for bf16: 3 cases" in result.stdout.str()


def test_a_target_that_dies_once_is_opened_again(folder: Folder, write: Write) -> None:
    write(test_mine=THREE)
    result = folder.run("Dies", FP32, "test_mine.py")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 2, "failed": 1}
    assert sum(line != "close" for line in folder.opened()) == 2
    result.stdout.fnmatch_lines(["the server died", "last line of its log", "repeat: pytest *::test_three*"])


def test_a_target_that_dies_again_ends_the_run_with_4(folder: Folder, write: Write) -> None:
    write(test_mine=THREE + "    def test_zhree(target): target.score((5, 6, 7))\n    def test_zwo(target): pass\n")
    result = folder.run("Dies", FP32, "test_mine.py")
    assert result.ret == 4
    assert any("the target cannot be used: the target failed 2 times on" in line for line in result.outlines)
    assert "last line of its log" in result.outlines
    assert "test_mine.py::test_zwo[qwen3-moe-odd-single-fp32]" not in folder.statuses()


def test_a_target_that_hangs_is_left_after_the_limit(folder: Folder, write: Write) -> None:
    write(test_mine=THREE)
    started = time.monotonic()
    result = folder.run("Hangs", FP32, "--adapt-timeout=1", "test_mine.py")
    assert time.monotonic() - started < 20
    assert result.parseoutcomes() == {"passed": 2, "failed": 1}
    assert " s while waiting for 1 of 1 answers (score#1) from echo" in result.stdout.str()


def test_a_request_that_is_never_answered_is_a_failure(folder: Folder, write: Write) -> None:
    write(test_mine=THREE)
    result = folder.run("Forgets", FP32, "test_mine.py")
    assert result.parseoutcomes() == {"passed": 2, "failed": 1}
    assert "1 of 1 requests were never answered" in result.stdout.str()


def test_a_declared_observable_counts_only_when_it_was_seen(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(needs=("logits", "text"))
        def test_weakest(target):
            assert target.best(("logits", "text")) == "text"
            assert not target.supports("logits")
        @pytest.mark.adapt(needs=("logits",))
        def test_strong(target): raise AssertionError("never runs")
        @pytest.mark.adapt(needs=("logits",), required=False)
        def test_optional(target): raise AssertionError("never runs")
        """
    )
    result = folder.run("Liar", FP32, "test_mine.py")
    assert result.parseoutcomes() == {"passed": 1, "failed": 1, "skipped": 1}
    assert sorted(folder.statuses().values()) == ["pass", "unknown", "unknown"]
    reason = "needs logits; the target shows text (logits: declared, but absent from the answer)"
    assert reason in result.stdout.str()


def test_the_target_can_be_masked(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        def test_it(target):
            assert target.shown & {"logits", "text", "taps"} == {"text"}
            assert target.generate((1, 2), 2).logits is None
        """
    )
    assert folder.run("Echo", FP32, "--adapt-observables=text", "test_mine.py").ret == 0


@pytest.mark.parametrize(
    ("target", "require", "outcome"),
    [
        ("Echo", "", {"failed": 1}),
        ("Echo", "endpoint", {"skipped": 1}),
        ("TextOnly", "", {"skipped": 1}),
        ("TextOnly", "engine", {"failed": 1}),
        ("TextOnly", "release", {"failed": 1}),
    ],
)
def test_what_is_required_follows_from_the_kind(
    folder: Folder, write: Write, target: str, require: str, outcome: dict[str, int]
) -> None:
    write(
        test_mine="""
        import pytest
        def test_any(target): pass
        @pytest.mark.adapt(rung="correct", needs=("taps",))
        def test_taps(target): pass
        """
    )
    extra = (f"--adapt-require={require}",) if require else ()
    models = "--adapt-models=qwen3-moe-odd"
    result = folder.run(target, FP32, models, *extra, "test_mine.py")
    assert result.parseoutcomes() == {"passed": 1, **outcome}
    assert result.ret == ("failed" in outcome)


def test_an_endpoint_owes_one_observable_and_whatever_it_declares(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        from targets import Echo, Info
        class Hides(Echo):
            def open(self, deployment):
                return Info("hides", "1", observables=frozenset({"topk", "text"}), vocab_size=331)
        def test_text(target): pass
        @pytest.mark.adapt(rung="correct", needs=("logits", "score", "topk"))
        def test_numbers(target): pass
        def test_numbers_in_passing(target): target.score((1, 2), ("topk",))
        """
    )

    def owed() -> list[tuple[str, bool]]:
        return sorted((case["status"], case["required"]) for case in folder.report()["cases"])

    models = "--adapt-models=qwen3-moe-odd"
    assert folder.run("TextOnly", FP32, models, "test_mine.py").ret == 0
    assert owed() == [("pass", True), ("unknown", False), ("unknown", False)]
    hides = (FP32, models, "--adapt-require=endpoint", "test_mine.py")
    assert folder.run_bare("--adapt-target=py:test_mine:Hides", *hides).ret == 1
    assert owed() == [("pass", True), ("unknown", True), ("unknown", True)]
    assert any("topk: declared, but absent from the answer" in case["reason"] for case in folder.report()["cases"])


def test_features(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(features={"chunk": 7})
        def test_on(target): assert target.deployment.features == (("chunk", 7),)
        @pytest.mark.adapt(features={"chunk": 8})
        def test_size(target): raise AssertionError
        @pytest.mark.adapt(features={"graphs": 1})
        def test_absent(target): raise AssertionError
        @pytest.mark.adapt(features={"chunk": (0, 7)})
        def test_both(target):
            on = target.with_features(chunk=7)
            assert target.deployment.features == () and on.deployment.feature("chunk") == 7
            assert on is target.with_features(chunk=7)
            assert (on.score((1, 2)).logits == target.score((1, 2)).logits).all()
        def test_at_run_time(target): target.with_features(chunk=9)
        """
    )
    result = folder.run("Echo", FP32, "test_mine.py")
    assert result.ret == 0
    assert {case.partition("[")[0].partition("::")[2]: status for case, status in folder.statuses().items()} == {
        "test_on": "pass",
        "test_both": "pass",
        "test_size": "unsupported",
        "test_absent": "unsupported",
        "test_at_run_time": "unsupported",
    }
    opened = folder.opened()
    assert "close" not in opened[::2] and set(opened[1::2]) == {"close"}, "one deployment is open at a time"


def test_restart_and_refusal(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        def test_it(target, tmp_path):
            before = target.generate((1, 2), 3)
            target.restart()
            assert target.generate((1, 2), 3).tokens == before.tokens
            assert target.refusal(tmp_path) is None
        """
    )
    assert folder.run("Echo", FP32, "test_mine.py").ret == 0
    opened = folder.opened()
    assert len(opened) == 6 and set(opened[1::2]) == {"close"}, "one deployment is open at a time"


def test_without_a_target_conformance_tests_skip(folder: Folder, write: Write) -> None:
    write(test_mine=THREE + "    def test_plain(): pass\n")
    result = folder.run_bare("-rs", "test_mine.py")
    assert result.parseoutcomes() == {"passed": 1, "skipped": 3}
    assert "no target: give --adapt-target=SPEC to run this test" in result.stdout.str()


def test_targets_of_other_plugins(folder: Folder, write: Write) -> None:
    folder.pytester.makeconftest(
        """
        def pytest_adapt_register_targets(registry):
            registry.register("acme", "targets:FromPlugin")
        def pytest_adapt_report_metadata(metadata):
            metadata["board"] = "A7"
        """
    )
    with (folder.path / "targets.py").open("a") as file:
        file.write(
            "\nclass FromPlugin(Echo):\n    def __init__(self, argument, settings):\n        assert argument == 'x'\n"
        )
    write(test_mine=THREE)
    result = folder.run_subprocess("--adapt-target=acme:x", "--adapt-profile=smoke", FP32, "test_mine.py")
    assert result.ret == 0, result.stdout.str()
    assert folder.report()["metadata"] == {"board": "A7"}


@pytest.mark.parametrize(
    ("config", "claimed", "limit"),
    [
        ('{"max_position_embeddings": 4096}', 2048, 2048),
        ('{"max_position_embeddings": 4096}', 10**12, 4096),
        ('{"max_position_embeddings": 4096}', 0, 512),
        ("{}", 10**12, 512),
        ("[", 10**12, 512),
    ],
)
def test_a_claimed_context_is_held_to_the_positions_of_the_model(
    tmp_path: Path, config: str, claimed: int, limit: int
) -> None:
    (tmp_path / "config.json").write_text(config)
    target = OpenTarget(cast(Any, None), Deployment(str(tmp_path), max_context=512), Mark())
    target._last = cast(Any, SimpleNamespace(info=Info("mine", "1", max_context=claimed)))
    assert target.limit == limit
