"""Black boxes: the shortest beginning of a prompt that shows a failure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_adapt.shortest import shrink


def asked(fails: Callable[[int], bool]) -> tuple[list[int], Callable[[int], bool]]:
    lengths: list[int] = []

    def count(length: int) -> bool:
        lengths.append(length)
        return fails(length)

    return lengths, count


@pytest.mark.requirement(116)
@pytest.mark.parametrize("least", [1, 2, 17, 63, 64, 149, 150])
def test_a_failure_at_the_row_that_it_points_to_takes_few_requests(least: int) -> None:
    lengths, fails = asked(lambda length: length >= least)
    found = shrink("random-150", 150, least, fails)
    assert found is not None
    assert (found.tokens, found.passes, found.whole, found.longer_passes) == (least, least - 1, 150, 0)
    assert found.requests == len(lengths) == len(set(lengths)) <= 4


@pytest.mark.requirement(116)
@pytest.mark.parametrize("least", [1, 5, 30, 100, 511])
def test_without_a_hint_the_bounds_hold_what_is_sought(least: int) -> None:
    lengths, fails = asked(lambda length: length >= least)
    found = shrink("random-512", 512, 512, fails)
    assert found is not None
    assert found.passes < least <= found.tokens
    assert found.tokens - found.passes <= 512 // 2**3
    assert len(lengths) <= 8
    if found.passes + 1 < found.tokens:
        assert "between them nothing was tried" in str(found)


def test_a_failure_that_does_not_grow_with_the_prompt_is_said_to_be_so() -> None:
    found = shrink("random-150", 150, 40, lambda length: length in (40, 150))
    assert found is not None
    assert found.tokens == 40
    assert found.longer_passes == 95
    assert "not monotonic: 95 do not either" in str(found)
    shorter = shrink("random-150", 150, 100, lambda length: length in (49, 100, 125, 150))
    assert shorter is not None
    assert (shorter.tokens, shorter.longer_passes) == (49, 99)


def test_what_no_beginning_shows_alone_has_none() -> None:
    lengths, fails = asked(lambda length: False)
    assert shrink("random-150", 150, 40, fails) is None
    assert lengths == [40, 150]


def test_a_slow_target_is_asked_no_further() -> None:
    lengths, fails = asked(lambda length: length >= 7)
    found = shrink("random-150", 150, 100, fails, seconds=0.0)
    assert found is not None
    assert lengths == [100]
    assert (found.tokens, found.passes) == (100, 0)


def test_its_command_runs_just_these_tokens() -> None:
    found = shrink("random-150", 150, 40, lambda length: length >= 40)
    assert found is not None
    assert found.argument == "--adapt-prompt=random-150:40"
    assert str(found) == "the first 40 of 150 tokens of random-150 show it, 39 do not (4 requests)"
