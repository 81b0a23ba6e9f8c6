"""The same verdicts under xdist, and each deployment opened once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

pytest.importorskip("xdist")
Write = Callable[..., object]
XDIST = ("-p", "xdist.plugin", "-n", "2")
MIXED = """
    import pytest
    from pytest_adapt.verdict.result import Status
    from pytest_adapt.verdict.status import Verdict

    @pytest.mark.adapt(rung="loads", blocks=True)
    def test_loads(target, precision): assert precision != "fp16"

    @pytest.mark.adapt(rung="correct")
    def test_judged(target, context_length, precision, judge):
        judge.promise("colour", precision == "fp32", "it is the wrong colour")

    @pytest.mark.adapt(rung="consistent", required=False)
    def test_unknown(target): raise Verdict(Status.UNKNOWN, "cannot be seen")

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_more(target, n): target.generate((1, n), 3)

    def test_plain(): pass
"""
MODELS = ("--adapt-models=qwen3-moe-odd,llama-odd", "--adapt-precisions=fp32,bf16,fp16", "--adapt-contexts=16,64")


def test_same_verdicts_and_each_deployment_once(folder: Folder, write: Write) -> None:
    write(test_mine=MIXED)
    args = ("--adapt-target=py:targets:Echo", *MODELS, "test_mine.py")
    alone = folder.run_subprocess(*args)
    statuses, ladder, clusters = folder.statuses(), folder.report()["ladder"], folder.report()["clusters"]
    (folder.path / "opened.log").unlink()
    spread = folder.run_subprocess(*args, *XDIST)
    assert folder.statuses() == statuses
    assert len(statuses) == 42
    assert spread.ret == alone.ret == 1
    assert spread.parseoutcomes() == alone.parseoutcomes()
    assert folder.report()["ladder"] == ladder
    assert {(one["cause"], *sorted(one["cases"])) for one in folder.report()["clusters"]} == {
        (one["cause"], *sorted(one["cases"])) for one in clusters
    }
    opened = [line for line in folder.opened() if line != "close"]
    assert len(opened) == len(set(opened)) == 6
    assert folder.report()["target"]["name"] == "echo"
    assert folder.report()["usage"]["opens"] == 6


@pytest.mark.parametrize(("quota", "failed"), [(1, 1), (2, 0)])
def test_a_waivers_quota_counts_over_all_workers(folder: Folder, write: Write, quota: int, failed: int) -> None:
    write(test_mine="def test_bad(target): assert False, 'old trouble'\ndef test_good(target): pass\n")
    folder.pytester.makeini("[pytest]\nadapt_waivers = known.toml\n")
    (folder.path / "known.toml").write_text(
        '[[waiver]]\ncases = "test_mine.py::test_bad*"\nowner = "ana"\nlink = "https://example.org/1"\n'
        f"expires = 2999-01-01\nquota = {quota}\n"
    )
    models = ("--adapt-models=qwen3-moe-odd,llama-odd", "--adapt-precisions=fp32", "test_mine.py")
    for spread in ((), XDIST):
        result = folder.run_subprocess("--adapt-target=py:targets:Echo", *models, *spread)
        expected = {"passed": 2, "xfailed": quota, **({"failed": 1} if failed else {})}
        assert (result.ret, result.parseoutcomes()) == (failed, expected)
        (found,) = folder.report()["waivers"]
        assert (found["state"], found["waived"]) == ("spent" if failed else "used", quota)


def test_timing_items_are_deferred(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt_serial
        def test_speed(target): pass
        def test_other(target): pass
        """
    )
    args = ("--adapt-target=py:targets:Echo", "--adapt-precisions=fp32", "--adapt-models=llama-odd", "test_mine.py")
    assert folder.run_subprocess(*args, "--adapt-profile=day0").parseoutcomes() == {"passed": 2}
    result = folder.run_subprocess(*args, "--adapt-profile=day0", *XDIST)
    assert (result.ret, result.parseoutcomes()) == (0, {"passed": 1, "skipped": 1})
    assert sorted(folder.statuses().values()) == ["deferred", "pass"]
    line = next(line for line in result.outlines if line.startswith("not judged: 1 x deferred: "))
    assert "measures time; run it without xdist: " in line
    assert "-m pytest --adapt-target=py:targets:Echo" in line
    assert line.endswith(" -m adapt_serial")
    result = folder.run_subprocess(*args, "--adapt-profile=full", *XDIST)
    assert (result.ret, result.parseoutcomes()) == (1, {"passed": 1, "failed": 1})


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("a/test_x.py::test_y[llama-odd-single-fp32]", "llama-odd-single-fp32"),
        ("a/test_x.py::test_y[llama-odd-single-fp32-512]", "llama-odd-single-fp32"),
        ("a/test_x.py::test_y[llama-odd-tp2.pp2.ep4-bf16-512-nan]", "llama-odd-tp2.pp2.ep4-bf16"),
        ("a/test_x.py::test_y[my.model_1-tp16-fp16]", "my.model_1-tp16-fp16"),
        ("a/test_x.py::test_y", "a/test_x.py"),
        ("a/test_x.py::test_y[llama-odd]", "a/test_x.py"),
        ("a/test_x.py::test_y[fp32]", "a/test_x.py"),
    ],
)
def test_scopes(nodeid: str, scope: str) -> None:
    from pytest_adapt.scheduler import scope_of

    assert scope_of(nodeid) == scope


def test_an_explicit_distribution_is_left_alone(folder: Folder, write: Write) -> None:
    write(test_mine="def test_it(target): pass")
    args = ("--adapt-target=py:targets:Echo", "--adapt-precisions=fp32", "--adapt-profile=smoke", "test_mine.py")
    result = folder.run_subprocess(*args, *XDIST, "--dist=loadfile", "-v")
    assert result.ret == 0
    assert "scheduling tests via LoadFileScheduling" in result.stdout.str()
    result = folder.run_subprocess(*args, *XDIST, "-v")
    assert "scheduling tests via DeploymentScheduling" in result.stdout.str()


def test_an_item_that_kills_its_worker_is_an_error_and_is_not_run_again(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import os, pathlib

        def test_kills(target):
            with open(pathlib.Path(__file__).with_name("kills.log"), "a") as log:
                log.write("x")
            os._exit(9)

        def test_other(target): target.generate((1, 2), 3)
        """
    )
    args = ("--adapt-target=py:targets:Echo", "--adapt-models=qwen3-moe-odd", "--adapt-precisions=fp32", "test_mine.py")
    result = folder.run_subprocess(*args, *XDIST)
    assert result.ret == 1
    assert (folder.path / "kills.log").read_text() == "x"
    found = {one["case"].partition("::")[2].partition("[")[0]: one for one in folder.report()["cases"]}
    assert {name: one["status"] for name, one in found.items()} == {"test_kills": "error", "test_other": "pass"}
    assert found["test_kills"]["reason"].startswith("the process that ran it died: worker 'gw")
    assert (found["test_kills"]["model"], found["test_kills"]["precision"]) == ("qwen3-moe-odd", "fp32")


def test_a_users_fixture_in_place_of_ours_is_named_by_the_workers_too(folder: Folder) -> None:
    folder.pytester.makeconftest("import pytest\n@pytest.fixture\ndef judge(): return 1")
    args = ("--adapt-target=py:targets:Echo", "--adapt-profile=smoke", "loading")
    result = folder.run_subprocess(*args, "-p", "xdist.plugin", "-n", "1")
    assert result.ret == 1
    assert "conftest.py:2 redefines fixture 'judge', which the shipped suites use; rename it" in result.outlines
    assert "passed" not in result.parseoutcomes()
