"""Named layouts: data that options, profiles and CI share."""

from __future__ import annotations

import json

import pytest

from pytest_adapt.layout import LayoutError, parse
from pytest_adapt.matrix import PROFILES, Mark, github_jobs, make_matrix
from pytest_adapt.models import catalogue
from pytest_adapt.options import Settings
from pytest_adapt.strategies import expand, fits, planned, strategies
from pytest_adapt.target.registry import resolve


@pytest.mark.requirement(43)
def test_a_strategy_is_a_name_for_layouts_and_strategies() -> None:
    assert expand(["tensor"]) == ("tp2", "tp3", "tp4", "tp8")
    assert expand(["pp2", "plain", "tp2"]) == ("pp2", "tp2", "ep2", "sp2")
    assert len(expand(["every"])) == sum(len(expand([name])) for name in strategies()["every"]) >= 30
    # Written as reports write them: an inferred dp is left out, and names parse to themselves.
    assert all(str(parse(layout)) == layout for layout in expand(strategies()))


@pytest.mark.requirement(43)
@pytest.mark.parametrize("word", ["tensors", "", "tp0", "tp2.tp2"])
def test_a_word_that_names_nothing_is_refused(word: str) -> None:
    with pytest.raises(LayoutError, match="tensor, pipeline" if word == "tensors" else "cannot read|twice"):
        expand([word])


@pytest.mark.requirement(43)
def test_every_profile_plans_layouts_that_its_models_can_take() -> None:
    """A layout named for one model is legal for it; strategies may hold some that are not."""
    entries = catalogue()
    for profile in PROFILES:
        plan = planned(profile)
        assert set(plan) - {"*"} <= set(entries)
        for name, layouts in plan.items():
            config = entries[name].config if name in entries else {}
            if "num_attention_heads" in config:
                legal = [layout for layout in layouts if not fits(layout, config)]
                assert legal if set(expand(["every"])) <= set(layouts) else legal == list(layouts), (profile, name)


def settings(**given: object) -> Settings:
    return Settings(target="builtin", **given)  # type: ignore[arg-type]


def rows(target: str, **given: object) -> set[tuple[str, str]]:
    """(model, layout) that tests of the layouts rung get."""
    matrix = make_matrix(settings(**given), resolve(target))
    values, _ = matrix.project(("model", "layout"), Mark(rung="layouts"))
    others, _ = matrix.project(("model", "layout"), Mark(rung="correct"))
    assert {layout for _, layout in others} <= {"single", *given.get("layouts", ())}  # type: ignore[misc]
    return {(model, layout) for model, layout in values}


@pytest.mark.requirement(43)
def test_only_tests_of_the_layouts_rung_get_the_layouts_of_the_profile() -> None:
    found = rows("builtin")
    assert ("qwen3-moe-wide", "tp2.ep2.etp2") in found and ("deepseek-v3-wide", "sp2") in found
    assert not any(model.endswith("aligned") for model, _ in found)
    assert rows("hf:") == set()
    assert rows("builtin", profile="smoke") == set()
    full = rows("builtin", profile="full")
    assert {("qwen3-moe-wide", "tp8.ep16"), ("deepseek-v3-wide", "tp3"), ("smollm2", "tp3")} <= full
    assert ("qwen3-moe-wide", "tp3") not in full


@pytest.mark.requirement(43)
def test_a_server_is_asked_for_the_axes_that_its_command_has() -> None:
    command = "cmd:serve {model} --port {port} -tp {tp}"
    assert rows(command) == {("qwen3-moe-aligned", "tp2")}
    assert rows(command + " -pp {pp}") == {("qwen3-moe-aligned", "tp2"), ("qwen3-moe-aligned", "pp2")}
    assert rows("cmd:serve {model} --port {port}") == set()


@pytest.mark.requirement(43)
def test_a_matrix_of_jobs_has_the_models_of_the_layouts() -> None:
    jobs = json.loads(github_jobs(make_matrix(settings(), resolve("builtin"))))["include"]
    wide = [job for job in jobs if job["model"] == "qwen3-moe-wide"]
    assert [job["precision"] for job in wide] == ["fp32", "bf16"]


@pytest.mark.requirement(43)
def test_layouts_that_are_given_replace_those_of_the_profile() -> None:
    assert rows("builtin", models=("llama-odd",), layouts=("single", "tp3")) == {("llama-odd", "tp3")}
    assert rows("builtin", models=("llama-odd",), layouts=("single",)) == set()
