"""From a judge's comparison to pytest's outcome; a wrong target must be caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_adapt.audit.headroom import read

if TYPE_CHECKING:
    from conftest import Folder

Write = Callable[..., object]
FP32 = "--adapt-precisions=fp32"
JUDGED = """
    import pytest
    pytestmark = pytest.mark.adapt(rung="correct", needs=("logits", "text"))

    def test_predictions(target, model, precision, reference, judge):
        for name, tokens in model.prompts(40).items():
            judge.against_record(name, target.score(tokens), reference.record(name, tokens))
"""


def test_a_right_target_passes(folder: Folder, write: Write) -> None:
    write(test_mine=JUDGED)
    history = folder.path / ".adapt" / "headroom.jsonl"
    history.write_bytes(b"\xff\xfe\x00\n")  # what a crash left there ends no later run
    result = folder.run("Oracle", FP32, "test_mine.py")
    assert result.ret == 0, result.stdout.str()
    (case,) = folder.report()["cases"]
    assert case["status"] == "pass"
    assert case["observable"] == "logits"
    assert sum(one["compared"] for one in case["measurements"]) > 1000
    (run,), left_out = read(history)
    assert left_out == 1
    cell = "test_mine.py::test_predictions | qwen3-moe-odd | single | fp32 | logprob.rms"
    assert run["target"] == "py:targets:Oracle" and 0 < run["cells"][cell] < 1


def test_a_wrong_target_is_caught(folder: Folder, write: Write) -> None:
    write(test_mine=JUDGED)
    result = folder.run("Wrong", FP32, "--adapt-dump=kept", "test_mine.py")
    assert result.ret == 1
    text = result.stdout.str()
    assert "logprob" in text
    assert "budget" in text
    assert "repeat: pytest --adapt-target=py:targets:Wrong" in text
    assert "test_mine.py::test_predictions[qwen3-moe-odd-single-fp32]" in text
    assert "Traceback" not in text
    assert list((folder.path / "kept").rglob("*.npz"))
    (cluster,) = folder.report()["clusters"]
    assert cluster["cases"] == ["test_mine.py::test_predictions[qwen3-moe-odd-single-fp32]"]


def test_another_target_can_be_the_reference(folder: Folder, write: Write) -> None:
    write(test_mine=JUDGED)
    assert folder.run("Oracle", FP32, "--adapt-reference=py:targets:Oracle", "test_mine.py").ret == 0
    assert folder.run("Wrong", FP32, "--adapt-reference=py:targets:Oracle", "test_mine.py").ret == 1


def test_comparing_nothing_is_an_error(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        def test_nothing(target, precision, judge): pass
        def test_no_judge(target): pass
        """
    )
    result = folder.run("Echo", FP32, "test_mine.py")
    assert result.ret == 1
    assert sorted(folder.statuses().values()) == ["error", "pass"]
    assert "the test compared nothing" in result.stdout.str()


STATUSES = """
    import pytest
    from pytest_adapt.verdict.result import Status
    from pytest_adapt.verdict.status import Verdict

    @pytest.mark.parametrize("status", [status.value for status in Status if status != "pass"])
    @pytest.mark.adapt(required={required})
    def test_it(target, status):
        raise Verdict(Status(status), "because")

    def test_green(target): pass
"""


@pytest.mark.parametrize("required", [True, False])
def test_every_status_reaches_pytest(folder: Folder, write: Write, required: bool) -> None:
    from pytest_adapt.verdict.result import Status
    from pytest_adapt.verdict.status import outcome

    write(test_mine=STATUSES.format(required=required))
    result = folder.run("Echo", FP32, "test_mine.py")
    expected: dict[str, int] = {"passed": 1}
    for status in Status:
        if status is not Status.PASS:
            expected[outcome(status, required)] = expected.get(outcome(status, required), 0) + 1
    assert result.parseoutcomes() == expected
    assert set(folder.statuses().values()) == {status.value for status in Status}


def test_a_red_load_blocks_the_rest_of_its_deployment(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(rung="loads", blocks=True)
        def test_loads(target): assert target.deployment.precision != "bf16", "it did not load"
        @pytest.mark.adapt(rung="correct")
        def test_correct(target): pass
        """
    )
    result = folder.run("Echo", "test_mine.py")
    assert sorted(folder.statuses().values()) == ["blocked", "fail", "pass", "pass"]
    assert result.parseoutcomes() == {"passed": 2, "failed": 2}
    assert "not trusted on any rung; rung 1 (loads) is red" in result.outlines
    assert "not run after test_mine.py::test_loads[qwen3-moe-odd-single-bf16]" in result.stdout.str()
    assert len(folder.report()["clusters"]) == 1


def test_waivers(folder: Folder, write: Write) -> None:
    write(test_mine="def test_bad(target): assert False, 'old trouble'\ndef test_good(target): pass\n")
    entry = '[[waiver]]\ncases = "{cases}"\nowner = "ana"\nlink = "https://example.org/1"\n'
    entry += "expires = {expires}\nquota = {quota}\n"
    folder.pytester.makeini("[pytest]\nadapt_waivers = known.toml\n")
    known = folder.path / "known.toml"
    both = "test_mine.py::test_*[qwen3-moe-odd-*]"

    known.write_text(entry.format(cases=both, expires="2999-01-01", quota=2))
    result = folder.run("Echo", "test_mine.py")
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 2, "xfailed": 2}
    assert sorted(folder.statuses().values()) == ["pass", "pass", "waived", "waived"]

    known.write_text(entry.format(cases=both, expires="2999-01-01", quota=1))
    result = folder.run("Echo", "test_mine.py")
    assert result.parseoutcomes() == {"passed": 2, "xfailed": 1, "failed": 1}
    (line,) = (line for line in result.outlines if line.startswith("waiver 1 "))
    assert line.endswith("its quota of 1 is spent; 1 more of its cases failed")
    assert "change it by hand" not in result.stdout.str()

    known.write_text(entry.format(cases=both, expires="2020-01-01", quota=2))
    result = folder.run("Echo", "test_mine.py")
    assert result.parseoutcomes() == {"passed": 2, "failed": 2}
    assert "expired on 2020-01-01 and covers nothing" in result.stdout.str()

    known.write_text(entry.format(cases=both.replace("_*", "_good"), expires="2020-01-01", quota=1))
    assert folder.run("Echo", "test_mine.py", "-k", "good").ret == 1, "an expired entry fails a run of passed cases"

    known.write_text(entry.format(cases=both, expires='"soon"', quota=2))
    result = folder.run("Echo", "test_mine.py")
    assert result.ret == 4
    assert "waiver 1: expires must be a date" in "\n".join(result.errlines)


ENTRY = """
# {owner} knows
[[waiver]]
cases = "test_mine.py::test_{name}[qwen3-moe-odd-*]"
owner = "{owner}"
link = "https://example.org/1"
expires = 2999-01-01
quota = {quota}
"""


def test_a_waiver_that_nobody_needs_fails_and_the_patch_removes_it(folder: Folder, write: Write) -> None:
    write(test_mine="def test_bad(target, precision): assert precision != 'bf16'\ndef test_good(target): pass\n")
    folder.pytester.makeini("[pytest]\nadapt_waivers = known.toml\n")
    known = folder.path / "known.toml"
    text = ENTRY.format(name="bad", owner="ana", quota=1) + ENTRY.format(name="good", owner="bo", quota=2)
    known.write_text(text)
    result = folder.run("Echo", "test_mine.py")
    assert (result.ret, result.parseoutcomes()) == (1, {"passed": 3, "xfailed": 1})
    said = result.stdout.str()
    assert "waiver 2 (test_mine.py::test_good[qwen3-moe-odd-*]; owner bo, https://example.org/1): unused: 2 of" in said
    assert "waiver 1" not in said
    assert "--- a/known.toml" in result.outlines
    assert "-# bo knows" in result.outlines and '-owner = "bo"' in result.outlines
    assert " # ana knows" not in result.outlines and '-owner = "ana"' not in result.outlines
    found = folder.report()["waivers"]
    assert [(one["number"], one["state"], one["waived"], one["passed"]) for one in found] == [
        (1, "used", 1, 1),
        (2, "unused", 0, 2),
    ]
    assert folder.report()["exit"] == 1
    (case,) = (one for one in folder.report()["cases"] if one["status"] == "waived")
    assert case["waiver"] == 1
    folder.pytester.makeini(f"[pytest]\nadapt_waivers = {known}\n")
    assert "--- a/known.toml" in folder.run("Echo", "test_mine.py").outlines, "an absolute path below rootdir"
    folder.pytester.makeini("[pytest]\nadapt_waivers = known.toml\n")
    # A narrowed run may have left out the case that needs an entry.
    assert folder.run("Echo", FP32, "test_mine.py", "-k", "good").ret == 0
    assert [one["state"] for one in folder.report()["waivers"]] == ["absent", "used"]


def test_pytests_own_marks_still_work(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.xfail(reason="known")
        def test_known(target): assert False
        @pytest.mark.skip(reason="not now")
        def test_skipped(target): pass
        def test_good(target): pass
        """
    )
    result = folder.run("Echo", FP32, "test_mine.py")
    assert result.ret == 0
    assert sorted(folder.statuses().values()) == ["pass", "unsupported", "xfail"]


def test_a_broken_fixture_is_an_error(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.fixture
        def bad(target): raise RuntimeError("of the user")
        def test_it(target, bad): pass
        @pytest.fixture
        def late(target):
            yield
            raise RuntimeError("after")
        def test_late(late): pass
        """
    )
    result = folder.run("Echo", FP32, "test_mine.py")
    assert result.parseoutcomes() == {"passed": 1, "errors": 2}
    assert set(folder.statuses().values()) == {"error"}


def test_a_model_that_is_not_installed_counts_only_when_it_was_named(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        import pytest_adapt.models

        @pytest.fixture(autouse=True)
        def absent(monkeypatch):
            def refuse(name, root): raise pytest_adapt.models.ModelError(f"{name}: pip install weights")
            monkeypatch.setattr(pytest_adapt.models, "materialise", refuse)

        def test_it(absent, target): pass
        def test_plain(): pass
        """
    )
    assert folder.run("Echo", FP32, "test_mine.py").parseoutcomes() == {"passed": 1, "skipped": 1}
    assert folder.report()["cases"][0]["reason"] == "qwen3-moe-odd: pip install weights"
    named = ("--adapt-models=qwen3-moe-odd", "test_mine.py")
    assert folder.run("Echo", FP32, *named).parseoutcomes() == {"passed": 1, "failed": 1}
    assert folder.run("Echo", FP32, "--adapt-require=release", "test_mine.py").parseoutcomes() == {
        "passed": 1,
        "failed": 1,
    }


TAPPED = """
    import numpy as np
    from targets import VOCAB, Info, Response, Wrong

    class Tapped(Wrong):
        defaults = {"kind": "endpoint", "observables": ("taps", "logits", "text")}

        def open(self, deployment):
            super().open(deployment)
            return Info("tapped", "1", "endpoint", frozenset({"taps", "logits", "text"}), vocab_size=VOCAB)

        def run(self, requests):
            for request, response in zip(requests, super().run(requests)):
                fed = (*request.prompt, *response.tokens[:-1])
                norm = self.oracle.run(fed, record=("final.norm",)).sites["final.norm"]
                response.taps = {"final.norm": np.asarray(norm, np.float32), "logits": response.logits}
                yield response
"""


def test_an_endpoint_that_shows_taps_is_told_where_it_broke(folder: Folder, write: Write) -> None:
    write(tapped=TAPPED)
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(needs=("logits",))
        def test_predictions(target, model, precision, reference, judge):
            name, tokens = next(iter(model.prompts(16).items()))
            judge.against_record(name, target.score(tokens), reference.record(name, tokens))
        """
    )
    result = folder.run_bare("--adapt-target=py:tapped:Tapped", "--adapt-profile=smoke", FP32, "test_mine.py")
    assert result.ret == 1
    (case,) = folder.report()["cases"]
    assert case["divergence"]["site"] == "logits"


def test_an_index_of_records_that_cannot_be_read_is_a_verdict(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        def test_it(target, model, reference, judge): pass
        """
    )
    (folder.path / "store").mkdir()
    (folder.path / "store" / "index.json").write_text("[3]")
    args = ("--adapt-goldens-dir=store", "--adapt-models=qwen3-moe-odd", "--adapt-precisions=fp32", "test_mine.py")
    assert folder.run("Echo", *args).ret == 1
    (case,) = folder.report()["cases"]
    assert case["status"] == "fail"
    assert "index.json: cannot be read as an index" in case["reason"]


@pytest.mark.requirement(113)
@pytest.mark.parametrize("excuse", ["raise Verdict(Status.UNSUPPORTED, 'no such feature')", "pytest.skip('not today')"])
def test_an_excuse_hides_no_failure(folder: Folder, write: Write, excuse: str) -> None:
    write(
        test_mine=f"""
        import pytest
        from pytest_adapt.verdict.result import Status
        from pytest_adapt.verdict.status import Verdict

        def test_after_a_failure(target, judge):
            judge.promise("colour", False, "red instead of blue")
            {excuse}

        def test_after_a_pass(target, judge):
            judge.promise("colour", True)
            {excuse}
    """
    )
    assert folder.run("Oracle", FP32, "--adapt-models=qwen3-moe-odd", "test_mine.py").ret == 1
    cases = {case["case"].partition("::test_")[2].partition("[")[0]: case for case in folder.report()["cases"]}
    assert cases["after_a_failure"]["status"] == "fail"
    assert "red instead of blue" in cases["after_a_failure"]["reason"]
    assert cases["after_a_pass"]["status"] == "unsupported"
