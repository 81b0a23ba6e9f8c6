"""What a red run leaves for whoever must find the cause: clusters, the known fault, the shortest prompt, tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pytest_adapt.report.terminal import SCREEN, WIDTH
from pytest_adapt.verdict import diagnose

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

    def test_other(target, precision, judge):
        target.score((5, 6, 7))
        judge.promise("colour", True)
"""
LATE = """

class Late(Oracle):
    \"\"\"Right for 20 tokens; from the next on one vocabulary entry in fifty is off.\"\"\"
    def logits(self, tokens):
        found = super().logits(tokens).copy()
        found[20:, ::50] += 0.05
        return found

class Long(Oracle):
    \"\"\"Off in the last row of prompts of more than 30 tokens.\"\"\"
    def logits(self, tokens):
        found = super().logits(tokens).copy()
        if len(tokens) > 30:
            found[-1] += np.arange(VOCAB) % 3
        return found
"""


@pytest.fixture
def late(folder: Folder) -> Folder:
    file = folder.path / "targets.py"
    file.write_text(file.read_text() + LATE)
    return folder


@pytest.mark.requirement(116)
def test_a_black_box_names_the_shortest_prompt_that_shows_it(late: Folder, write: Write) -> None:
    write(test_mine=JUDGED)
    result = late.run("Late", FP32, "test_mine.py")
    assert result.ret == 1
    found = next(case["prefix"] for case in late.report()["cases"] if case["prefix"])
    assert (found["tokens"], found["passes"], found["longer_passes"]) == (21, 20, 0)
    assert found["requests"] <= 8
    said = f"shortest: the first 21 of {found['whole']} tokens of {found['prompt']} show it, 20 do not"
    assert said in result.stdout.str()
    argument = f"--adapt-prompt={found['prompt']}:21"
    (cluster,) = late.report()["clusters"]
    assert argument in cluster["command"]
    # The command shows it, and one token less does not.
    assert late.run("Late", FP32, argument, "test_mine.py").ret == 1
    assert late.run("Late", FP32, argument.replace(":21", ":20"), "test_mine.py").ret == 0


@pytest.mark.requirement(116)
def test_a_failure_that_depends_on_the_whole_length_is_found_too(late: Folder, write: Write) -> None:
    write(test_mine=JUDGED)
    assert late.run("Long", FP32, "test_mine.py").ret == 1
    found = next(case["prefix"] for case in late.report()["cases"] if case["prefix"])
    assert (found["tokens"], found["passes"]) == (31, 30)


def test_a_prompt_that_the_model_has_not_is_named(folder: Folder, write: Write) -> None:
    write(test_mine=JUDGED)
    usage = folder.run("Oracle", FP32, "--adapt-prompt=mine:3", "test_mine.py")
    assert usage.ret == 4
    assert "no model of this run has a prompt 'mine'; there are random-1" in usage.stderr.str()
    # One that another model of the run has is nothing that this one owes.
    both = "--adapt-models=qwen3-moe-odd,llama-odd"
    result = folder.run("Oracle", FP32, both, "--adapt-prompt=searched-0:3", "test_mine.py")
    assert result.ret == 0
    assert "model llama-odd has no prompt 'searched-0' (--adapt-prompt); it has random-1" in result.stdout.str()
    usage = folder.run("Oracle", FP32, "--adapt-prompt=random-1:0", "test_mine.py")
    assert usage.ret == 4
    assert "--adapt-prompt: 'random-1:0' is no prompt; write NAME or NAME:TOKENS" in usage.stderr.str()


@pytest.mark.requirement(116)
def test_a_box_that_shows_text_alone_is_asked_for_one_token(late: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(needs=("text",))
        def test_greedy(target, model, precision, reference, judge):
            for name, tokens in model.prompts(40).items():
                response = target.generate(tokens, 4, ("text",))
                record = reference.record(name, tokens + response.tokens[:-1])
                judge.generated(name, response, record, tokens)
        """
    )
    assert late.run("Long", FP32, "--adapt-observables=text", "test_mine.py").ret == 1
    found = next(case["prefix"] for case in late.report()["cases"] if case["prefix"])
    assert max(30, found["passes"]) < found["tokens"] <= 37  # not every row that is off has another first token


@pytest.mark.requirement(116)
@pytest.mark.parametrize(
    ("new", "target", "why"),
    [
        (24, "Answering", "none, position 20 is of the answer: the 15 tokens of boundary-15 alone do not show it"),
        (1, "Tired", "none, no beginning of random-1 fails alone: it depends on what else was asked"),
        (1, "Gone", "none, the target could not be asked again: the server died"),
    ],
)
def test_why_there_is_no_shortest_prompt_is_said(folder: Folder, write: Write, new: int, target: str, why: str) -> None:
    file = folder.path / "targets.py"
    file.write_text(
        file.read_text()
        + """

class Answering(Oracle):
    def logits(self, tokens):
        found = super().logits(tokens).copy()
        found[20:] = np.roll(found[20:], 1, axis=-1)
        return found

class Tired(Oracle):
    count = 0
    def run(self, requests):
        for response in super().run(requests):
            type(self).count += 1
            if self.count == 2:  # after the probe
                response.tokens = tuple(token + 1 for token in response.tokens)
            yield response

class Gone(Tired):
    def run(self, requests):
        if self.count > 1:
            raise TargetError("the server died")
        yield from super().run(requests)
"""
    )
    write(
        test_mine=f"""
        import pytest
        @pytest.mark.adapt(needs=("text",))
        def test_greedy(target, model, precision, reference, judge):
            name = "boundary-15" if {new} > 1 else "random-1"
            tokens = model.all_prompts[name]
            response = target.generate(tokens, {new}, ("text",))
            judge.generated(name, response, reference.record(name, tokens + response.tokens[:-1]), tokens)
        """
    )
    result = folder.run(target, FP32, "--adapt-observables=text", "test_mine.py")
    assert result.ret in (1, 4)
    (found,) = folder.report()["cases"]
    assert (found["prefix"], found["no_prefix"]) == (None, why)
    assert f"   shortest: {why}" in result.outlines


@pytest.mark.requirement(116)
def test_what_a_test_asked_can_be_asked_again(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        def test_it(target):
            target.generate_all({"first": (1, 2, 3), "second": (4, 5)}, 2)
            target.with_features(chunk=7).score_all({"third": (6, 7)})
            assert target.prompts() == {"first": (1, 2, 3), "second": (4, 5), "third": (6, 7)}
        """
    )
    assert folder.run("Echo", FP32, "test_mine.py").ret == 0


@pytest.mark.requirement(120)
def test_full_tensors_are_written_only_on_request(folder: Folder, write: Write) -> None:
    write(test_mine=JUDGED)
    folder.run("Wrong", FP32, "test_mine.py")
    assert not list(folder.path.rglob("*.npz"))
    report = (folder.path / ".adapt" / "report" / "report.json").read_text()
    assert len(report) < 50_000
    folder.run("Wrong", FP32, "--adapt-dump=kept", "test_mine.py")
    (kept,) = (folder.path / "kept").iterdir()  # the red item alone
    assert "test_predictions" in kept.name
    arrays = list(kept.glob("*.npz"))
    assert arrays
    for file in arrays:
        with np.load(file) as one:
            rows, vocab = one["logits"].shape
        assert rows > 0
        assert vocab == 331


MANY = """
    import pytest
    @pytest.mark.parametrize("n", range(12))
    def test_promise(target, precision, judge, n):
        judge.promise(f"promise-{n}", False, "a detail that goes on and on and on " * 20, value=2.0, budget=1.0)
"""


@pytest.mark.requirement(116)
def test_the_summary_is_at_most_one_screen(folder: Folder, write: Write) -> None:
    write(test_mine=MANY)
    result = folder.run("Echo", FP32, "test_mine.py")
    at = next(i for i, line in enumerate(result.outlines) if " adapt =" in line)
    end = next(i for i, line in enumerate(result.outlines) if line.startswith("engineering reference: "))
    lines = result.outlines[at : end + 1]
    assert sum(max(1, -(-len(line) // WIDTH)) for line in lines) <= SCREEN
    assert any(line.startswith("1. promise-") for line in lines)
    assert any("more causes in the report: " in line for line in lines)
    assert len(folder.report()["clusters"]) == 12


def known(path: Path, report: dict[str, Any], fault: str) -> None:
    """A kill matrix in which ``fault`` looks as the report does, and two others do not."""
    red = [case for case in report["cases"] if case["status"] == "fail"]
    tests = {case["case"].partition("[")[0]: 1 for case in report["cases"]}
    row = {"precision": "bf16", "observable": "logits", "model": "qwen3-moe-odd", "layout": "single", "differs": True}
    row |= {"killed": True, "owner": True, "located": None, "seconds": 1.0}
    green = {name: count for name, count in tests.items() if not any(case["case"].startswith(name) for case in red)}
    other = {"measurements": [], "divergence": None, "reason": "the blocks of its cache do not come back"}
    rows = [row | {"fault": fault, "red": red, "green": green, "precision": name} for name in ("fp32", "bf16", "fp16")]
    for number, name in enumerate(("SC10", "ME03", "AT16")):
        case = {**red[0], **other, "case": f"stress/test_{number}.py::test_it[needle-llama]", "suite": "stress"}
        rows.append(row | {"fault": name, "red": [case], "green": tests})
    path.write_text(json.dumps({"schema": 1, "made": {}, "rows": rows, "mutants": []}))


@pytest.mark.requirement(117)
def test_the_summary_names_a_known_fault_where_the_match_is_strong(
    folder: Folder, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(test_mine=JUDGED)
    matrix = folder.path / "kill_matrix.json"
    monkeypatch.setattr(diagnose, "read_matrix", lambda: diagnose.load(matrix).rows)
    assert "like WL90" not in folder.run("Wrong", FP32, "test_mine.py").stdout.str()  # nothing is known
    known(matrix, folder.report(), "WL90")
    text = folder.run("Wrong", FP32, "test_mine.py").stdout.str()
    assert "% like WL90, two experts exchanged in one layer (own, after vllm-ascend#4793)" in text
    green = folder.run("Oracle", FP32, "test_mine.py")
    assert green.ret == 0
    assert "like WL90" not in green.stdout.str()
