"""Rows: which tests get which cells, under which ids, in which order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pytest_adapt.matrix import LEAST_CONTEXT, RESERVE, Mark, Matrix

if TYPE_CHECKING:
    from conftest import Folder

pytestmark = pytest.mark.usefixtures("folder")
Write = Callable[..., object]


@pytest.mark.parametrize(
    ("model", "longest", "floor"), [("b", 4096, 1000), ("a", 1000, 64), ("c", 64, 0), ("d", 512, 0)]
)
def test_a_models_contexts_are_its_own(model: str, longest: int, floor: int) -> None:
    """All cells of a model share one deployment, with room for the longest of them; other models do not count."""
    contexts = {"a": (64, 1000), "b": (64, 1000, 4096), "c": (64,)}
    rows = [(f"model-{name}", "single", "fp32", context) for name, every in contexts.items() for context in every]
    matrix = Matrix(None, {}, {}, tuple(rows))  # type: ignore[arg-type]
    name = f"model-{model}"  # another object of the same text
    assert matrix.max_context(name) == max(longest, LEAST_CONTEXT) + RESERVE
    assert matrix.floor(name, longest) == floor


def test_a_test_of_the_first_model_gets_all_its_rows() -> None:
    """And those of no other, whichever object holds a name."""
    rows = [(f"model-{name}", "single", precision, 64) for name in ("b", "a") for precision in ("fp32", "bf16")]
    assert rows[0][0] is not rows[1][0]
    named = {f"model-{name}": SimpleNamespace(shape_class="odd") for name in ("a", "b")}
    matrix = Matrix(None, named, {}, tuple(rows))  # type: ignore[arg-type]
    values, ids = matrix.project(("model", "precision"), Mark(first=True))
    assert values == [("model-b", "fp32"), ("model-b", "bf16")] and ids == ["model-b-fp32", "model-b-bf16"]


def test_a_users_test_gets_only_the_axes_it_asks_for(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        def test_all(target, context_length): assert context_length == 64
        def test_model(model): assert model.entry is not None
        def test_precision(precision): pass
        def test_deployment(deployment): assert deployment.precision in ("fp32", "bf16")
        def test_plain(): pass

        @pytest.fixture
        def indirect(layout): return str(layout)
        def test_through_a_fixture(indirect): assert indirect == "single"

        @pytest.mark.parametrize("precision", ["fp16"])
        def test_own_axis(deployment): assert deployment.precision == "fp16"

        @pytest.mark.parametrize("n", [1, 2])
        @pytest.mark.adapt(precisions=["fp32"])
        def test_more(precision, n): pass
        """
    )
    result = folder.run("Echo", "-v", "test_mine.py")
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 12}
    assert set(folder.statuses()) == {
        "test_mine.py::test_all[qwen3-moe-odd-single-fp32-64]",
        "test_mine.py::test_all[qwen3-moe-odd-single-bf16-64]",
        "test_mine.py::test_model[qwen3-moe-odd]",
        "test_mine.py::test_precision[fp32]",
        "test_mine.py::test_precision[bf16]",
        "test_mine.py::test_deployment[qwen3-moe-odd-single-fp32]",
        "test_mine.py::test_deployment[qwen3-moe-odd-single-bf16]",
        "test_mine.py::test_through_a_fixture[single]",
        "test_mine.py::test_own_axis[qwen3-moe-odd-single-fp16]",
        "test_mine.py::test_more[fp32-1]",
        "test_mine.py::test_more[fp32-2]",
    }


def test_a_users_own_fixture_of_the_same_name_wins(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.fixture
        def model(): return "mine"
        def test_it(model): assert model == "mine"
        """
    )
    assert folder.run("Echo", "test_mine.py").parseoutcomes() == {"passed": 1}


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("vocab_size", 8),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_experts", 0),
        ("num_local_experts", 0),
        ("n_routed_experts", 0),
        ("max_position_embeddings", 0),
    ],
)
def test_numbers_of_a_configuration_have_least_values(tmp_path: Path, key: str, least: int) -> None:
    from pytest_adapt.matrix import _from_directory

    def read(value: int) -> object:
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 331, key: value}))
        return _from_directory(str(tmp_path), [])

    assert read(least)
    with pytest.raises(pytest.UsageError, match=f"{key} is {least - 1}, expected a number of at least {least}"):
        read(least - 1)


def test_items_are_sorted_so_that_each_deployment_opens_once(folder: Folder, write: Write) -> None:
    write(
        test_b="""
        import pytest
        @pytest.mark.adapt(rung="consistent")
        def test_late(target): pass
        @pytest.mark.adapt(rung="loads")
        def test_early(target): pass
        @pytest.mark.adapt(features={"chunk": 7})
        def test_feature(target): assert target.deployment.feature("chunk") == 7
        """,
        test_a="def test_other(target): target.generate((1, 2), 3)\ndef test_plain(): pass",
    )
    result = folder.run("Echo", "-v", "--adapt-models=qwen3-moe-odd,mixtral-odd", "test_b.py", "test_a.py")
    assert result.ret == 0
    opened = [line for line in folder.opened() if line != "close"]
    assert len(opened) == len(set(opened)) == 8
    assert [line == "close" for line in folder.opened()] == [False, True] * 8
    ran = [line.split()[0] for line in result.outlines if " PASSED" in line]
    assert ran[0] == "test_a.py::test_plain"
    first = [name.partition("[")[0] for name in ran if "qwen3-moe-odd-single-fp32" in name]
    assert first == [
        "test_b.py::test_early",
        "test_b.py::test_late",
        "test_a.py::test_other",
        "test_b.py::test_feature",
    ]
    assert "[1/8] qwen3-moe-odd single fp32" in result.outlines
    assert "[8/8] mixtral-odd single bf16 chunk=7" in result.outlines


def test_quiet_shows_no_progress(folder: Folder, write: Write) -> None:
    write(test_a="def test_other(target): pass")
    assert not any(line.startswith("[1/") for line in folder.run("Echo", "-q", "test_a.py").outlines)


def test_rows_are_pruned_before_collection(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(profile="full")
        def test_full(target): pass
        @pytest.mark.adapt(models=["llama-odd"])
        def test_elsewhere(target): pass
        def test_here(target): pass
        """
    )
    result = folder.run("Echo", "--co", "-q", "--adapt-precisions=fp32", "test_mine.py")
    assert [line for line in result.outlines if "::" in line] == ["test_mine.py::test_here[qwen3-moe-odd-single-fp32]"]
    result = folder.run(
        "Echo", "--co", "-q", "--adapt-models=llama-odd", "--adapt-precisions=fp32", "test_mine.py", profile="full"
    )
    assert len([line for line in result.outlines if "::" in line]) == 3


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("rungs='loads'", "mark adapt does not take rungs"),
        ("'loads'", "mark adapt does not take 'loads'"),
        ("rung='load'", "rung 'load' is none of loads, correct"),
        ("needs='logit'", "needs 'logit' is none of taps, logits"),
        ("profile='nightly'", "profile 'nightly' is none of smoke, day0, full"),
        ("precisions=('fp8',)", "precisions 'fp8' is none of fp32"),
    ],
)
def test_a_wrong_mark_is_an_error_of_collection(folder: Folder, write: Write, mark: str, message: str) -> None:
    write(test_mine=f"import pytest\n@pytest.mark.adapt({mark})\ndef test_it(target): pass\n")
    result = folder.run("Echo", "test_mine.py")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert message in result.stdout.str()


def test_directories_are_models(folder: Folder, write: Write) -> None:
    for place in ("a", "b"):
        (folder.path / place / "tiny").mkdir(parents=True)
        config = {"vocab_size": 331, "max_position_embeddings": 100, "sliding_window": 24, "num_attention_heads": 6}
        (folder.path / place / "tiny" / "config.json").write_text(json.dumps(config))
    write(
        test_mine="""
        def test_it(target, model, context_length):
            assert model.entry is None
            assert model.boundaries == (16, 24, 64, 100)
            assert target.deployment.max_context == 100
            assert all(len(ids) <= context_length for ids in model.prompts(context_length).values())
            assert max(map(max, model.prompts().values())) < 331
        """
    )
    args = ("--adapt-models=a/tiny,b/tiny", "--adapt-precisions=fp32", "--adapt-contexts=24,100", "test_mine.py")
    result = folder.run("Echo", *args)
    assert result.ret == 0
    assert set(folder.statuses()) == {
        f"test_mine.py::test_it[{name}-single-fp32-{context}]" for name in ("tiny", "tiny-2") for context in (100, 24)
    }


def test_each_prompt_is_judged_in_one_row(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        def test_it(model, context_length, precision):
            names = model.prompts(context_length)
            with open("prompts.log", "a") as log:
                log.writelines(f"{name} {len(ids)} {context_length}\\n" for name, ids in names.items())
        """
    )
    assert folder.run("Echo", "--adapt-precisions=fp32", "--adapt-contexts=16,64", "test_mine.py").ret == 0
    rows = [line.split() for line in (folder.path / "prompts.log").read_text().splitlines()]
    assert len({name for name, _, _ in rows}) == len(rows)
    assert {context for _, length, context in rows if int(length) <= 16} == {"16"}
    assert {context for _, length, context in rows if int(length) > 16} == {"64"}


def test_layouts(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        def test_it(target, layout): assert str(layout) == target.deployment.layout
        """
    )
    args = ("--adapt-layouts=single,tp2,tp4.dp1", "--adapt-precisions=fp32", "test_mine.py")
    result = folder.run("Echo", *args)
    assert result.ret == 0
    assert {case.partition("[")[2]: status for case, status in folder.statuses().items()} == {
        "qwen3-moe-odd-single-fp32]": "pass",
        "qwen3-moe-odd-tp2-fp32]": "pass",
        "qwen3-moe-odd-tp4-fp32]": "unsupported",
    }
    reason = next(case["reason"] for case in folder.report()["cases"] if "tp4" in case["case"])
    assert reason == "layout tp4: 6 query heads do not divide by 4; nearest legal: tp2, tp6"


def test_github_matrix(folder: Folder) -> None:
    result = folder.run_subprocess(
        "--adapt-target=py:targets:Echo", "--adapt-matrix=github", "--adapt-models=llama-odd,mixtral-odd", "-q"
    )
    assert result.ret == 0
    jobs = json.loads(result.stdout.str())["include"]
    assert [job["name"] for job in jobs] == ["llama-odd fp32", "llama-odd bf16", "mixtral-odd fp32", "mixtral-odd bf16"]
    assert jobs[0]["args"] == "--adapt-target=py:targets:Echo --adapt-models=llama-odd --adapt-precisions=fp32"
    assert not (folder.path / ".adapt" / "report").exists()


def test_plan_runs_nothing(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        def test_it(target, context_length): raise AssertionError
        @pytest.mark.adapt(requests=3, tokens=37)
        def test_more(target): raise AssertionError
        """
    )
    result = folder.run("Echo", "--adapt-plan", "--adapt-precisions=fp32", "test_mine.py")
    assert result.ret == 0
    line = next(line for line in result.outlines if line.startswith("qwen3-moe-odd single fp32"))
    # test_more: prompts of 1, 15, 16, 17 and 37 tokens, three times each
    cases, requests, tokens = map(int, line.split()[3:])
    assert cases == 2
    assert requests >= 3 * 5
    assert tokens >= 3 * (1 + 15 + 16 + 17 + 37)
    assert any(line.startswith("total: 2 cases, 1 deployments, about ") for line in result.outlines)
    assert "assumed: 5 s a deployment" in result.stdout.str()
    assert folder.opened() == []


def test_a_profile_may_cap_prompts_and_a_short_limit_cuts_one(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        def test_it(model, context_length):
            assert context_length == 24
            assert len(model.prompts()) == 2 and len(model.all_prompts) > 2
            (cut,) = model.prompts(context_length).values()
            assert cut == model.prompts()["text-a"][:24]
        """,
        conftest="""
        import sys, pytest, pytest_adapt.models
        prompts = sys.modules["pytest_adapt.models.prompts"]  # the package has a function of this name
        @pytest.fixture(autouse=True)
        def texts(monkeypatch):
            texts = {"text-a": tuple(range(40)), "text-b": tuple(range(50)), "text-c": tuple(range(60))}
            monkeypatch.setattr(prompts, "prompts_of", lambda entry, directory: texts)
        """,
    )
    (folder.path / "tiny").mkdir()
    (folder.path / "tiny" / "config.json").write_text('{"vocab_size": 331}')
    folder.pytester.makepyfile(
        capped="""
        import dataclasses
        from pytest_adapt import matrix
        PROFILE = matrix.PROFILES["smoke"]
        take = dataclasses.replace(PROFILE.other, prompts=2)
        matrix.PROFILES = {**matrix.PROFILES, "smoke": dataclasses.replace(PROFILE, other=take)}
        """
    )
    args = ("--adapt-target=py:targets:Echo", "--adapt-profile=smoke", "--adapt-models=tiny", "--adapt-contexts=24")
    result = folder.run_subprocess("-p", "capped", *args, "test_mine.py")
    assert result.ret == 0, result.stdout.str()


@pytest.mark.requirement(104)
def test_needle_models_are_left_to_the_tests_that_name_them(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        def test_usual(model): pass
        @pytest.mark.adapt(classes="needle")
        def test_apart(model, context_length): assert len(model.recalls(context_length)) == 2
        @pytest.mark.adapt(classes="any")
        def test_any(model): pass
        """
    )
    models = "--adapt-models=needle-llama,qwen3-moe-odd"
    folder.run("Echo", models, "--adapt-precisions=fp32", "test_mine.py", profile="day0")
    assert set(folder.statuses()) == {
        "test_mine.py::test_usual[qwen3-moe-odd]",
        "test_mine.py::test_apart[needle-llama-1024]",
        "test_mine.py::test_apart[needle-llama-4096]",
        "test_mine.py::test_apart[needle-llama-16384]",
        "test_mine.py::test_any[needle-llama]",
        "test_mine.py::test_any[qwen3-moe-odd]",
    }


def test_a_profile_gives_a_needle_model_no_context_without_a_question(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(classes="needle")
        def test_apart(model, context_length): assert model.recalls(context_length)
        """
    )
    models = "--adapt-models=needle-llama,needle-mixtral"
    assert folder.run("Echo", models, "--adapt-plan", "test_mine.py").ret == 0
    assert folder.run("Echo", models, "test_mine.py").ret == 0
    names = {"test_mine.py::test_apart[needle-llama-64]", "test_mine.py::test_apart[needle-mixtral-1024]"}
    assert set(folder.statuses()) == names


def test_the_plan_counts_recall_prompts(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
        import pytest
        @pytest.mark.adapt(classes="needle", contexts=1024)
        def test_apart(target, model, context_length): pass
        """
    )
    arguments = ("--adapt-plan", "--adapt-models=needle-llama", "--adapt-precisions=fp32")
    result = folder.run("Echo", *arguments, "test_mine.py", profile="day0")
    # 1024 + 2 tokens, 32 questions with their answers and 4 rulers; and 1024 + 2 with the questions inside.
    assert f"1 cases, 1 deployments, about 2 requests, {1094 + 1026} tokens" in result.stdout.str()


def test_a_named_model_of_an_undeclared_class_is_unsupported_and_not_planned(folder: Folder, write: Write) -> None:
    write(
        test_mine="def test_it(target): pass",
        picky="""
        from targets import Echo
        class Picky(Echo):
            defaults = {"shape_classes": ("aligned",), "observables": ("logits", "text")}
        """,
    )
    folder.pytester.syspathinsert()
    given = ("--adapt-target=py:picky:Picky", "--adapt-models=qwen3-moe-odd,qwen3-moe-aligned", "test_mine.py")
    only = ("--adapt-precisions=fp32", "--adapt-profile=smoke")
    why = "model qwen3-moe-odd: shape class odd is not declared by the target (aligned); nearest: qwen3-moe-aligned"
    result = folder.run_bare(*given, *only)
    assert result.parseoutcomes() == {"passed": 1, "skipped": 1}
    assert folder.statuses() == {
        "test_mine.py::test_it[qwen3-moe-odd-single-fp32]": "unsupported",
        "test_mine.py::test_it[qwen3-moe-aligned-single-fp32]": "pass",
    }
    assert why in result.stdout.str()
    assert not any("qwen3-moe-odd" in line for line in folder.opened())
    plan = folder.run_bare(*given, *only, "--adapt-plan")
    assert f"unsupported: 1 cases: {why}" in plan.outlines
    assert any(line.startswith("total: 1 cases, 1 deployments, about ") for line in plan.outlines)


def test_a_plan_leaves_out_layouts_that_the_target_or_the_model_cannot_take(folder: Folder, write: Write) -> None:
    write(test_mine="def test_it(target): pass")
    line = "--adapt-target=cmd:serve {model} --port {port} -tp {tp} --dtype {dtype}"
    options = ("--adapt-models=qwen3-moe-aligned", "--adapt-precisions=fp32", "--adapt-layouts=tp2,pp2,tp2.ep2,tp3")
    result = folder.run_bare(line, *options, "--adapt-plan", "test_mine.py")
    assert result.ret == 0
    said = [line for line in result.outlines if line.startswith("unsupported: 1 cases: layout ")]
    assert [one.split()[4].rstrip(":") for one in said] == ["pp2", "tp2.ep2", "tp3"]
    assert "the command has no {pp} (axes that it has: {tp})" in said[0]
    assert "2 KV heads neither split evenly over 3 ranks" in said[2]
    assert any(line.startswith("total: 1 cases, 1 deployments, about ") for line in result.outlines)
