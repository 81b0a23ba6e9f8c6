"""The comparators themselves are planted with errors: each must make a check fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_adapt.selftest.comparators import CHECKS, World, make_world
from pytest_adapt.selftest.mutants import MUTANTS, Mutant, planted, seen_by
from pytest_adapt.verdict import budget


@pytest.fixture(scope="module")
def world(bench: Any) -> World:
    return make_world(bench("qwen3-moe-odd"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_comparators_hold(world: World, check: Callable[[World], None]) -> None:
    check(world)


@pytest.mark.requirement(113)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_comparator_is_caught(world: World, name: str) -> None:
    assert seen_by(MUTANTS[name], world), f"{name}: no check noticed"


def test_a_mutant_whose_place_is_gone_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="0 places in pytest_adapt.verdict.budget read 'no such text'"),
        planted(Mutant(budget, "no such text", "")),
    ):
        pass


def test_the_original_comes_back(world: World) -> None:
    with planted(MUTANTS["inverted rule"]), pytest.raises(AssertionError):
        CHECKS[0](world)
    CHECKS[0](world)
