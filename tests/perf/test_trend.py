"""Levels of a series: noise makes none, a step is found soon after it came, and the picture shows it."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pytest_adapt.perf.trend import Point, Series, append, changes, drawn, read
from pytest_adapt.perf.trend_cli import main

POINT = Point("2026-01-01T04:00:00Z", "abcdef0123", "builtin", "v1", "a[decode]", 1.0, 0.99, 1.01, 5, "cpu", "same")


def noise(dice: random.Random, count: int, level: float = 0.0, spread: float = 0.01) -> list[float]:
    return [dice.gauss(level, spread) for _ in range(count)]


@pytest.mark.requirement(108)
@pytest.mark.parametrize("count", [20, 50, 100])
def test_noise_has_one_level(count: int) -> None:
    dice = random.Random(count)
    assert sum(bool(changes(noise(dice, count, spread=0.02))) for _ in range(150)) == 0


@pytest.mark.requirement(108)
@pytest.mark.parametrize(("spread", "step", "delay"), [(0.01, 0.05, 3), (0.02, 0.10, 3), (0.01, -0.05, 3)])
def test_a_step_is_found_within_a_few_points(spread: float, step: float, delay: int) -> None:
    dice = random.Random(5)
    found = [changes(noise(dice, 30, 0.0, spread) + noise(dice, delay, step, spread)) for _ in range(100)]
    assert sum(len(one) == 1 and abs(one[0] - 30) <= 1 for one in found) >= 90


def test_several_levels_are_told_apart_and_small_ones_are_not_reported() -> None:
    dice = random.Random(1)
    three = noise(dice, 20) + noise(dice, 20, 0.08) + noise(dice, 20, -0.05)
    assert [abs(one - place) <= 1 for one, place in zip(changes(three), (20, 40), strict=True)] == [True, True]
    assert changes(noise(dice, 60, spread=0.002) + noise(dice, 60, 0.02, 0.002)) == []  # 2 % is below 3 %
    assert changes([]) == changes([0.0]) == changes([0.0] * 50) == []
    assert changes([0.0] * 10 + [0.1] * 10) == [10]


@pytest.mark.requirement(108)
def test_runs_are_kept_and_a_slower_level_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "gate" / "trend.jsonl", tmp_path / "trend.svg"
    assert main([str(file)]) == 2 and "no runs yet" in capsys.readouterr().err
    dice = random.Random(2)
    for day, log in enumerate(noise(dice, 12) + noise(dice, 5, 0.1)):
        ratio = math.exp(log)
        at, commit = f"2026-01-{day + 1:02}T04:00:00Z", f"{day:02}cafe"
        one = replace(POINT, at=at, commit=commit, ratio=ratio, low=ratio - 0.01, high=ratio + 0.01)
        append(file, [one, replace(one, case="b<flat>", ratio=1.0, low=0.99, high=1.01)])
        if day == 11:
            assert main([str(file)]) == 0
    with file.open("a") as stream:
        stream.write('{"at": "half a li')
    series, others = read(file)
    assert others == 1
    assert [(one.case, len(one.points)) for one in series] == [("a[decode]", 17), ("b<flat>", 17)]
    assert series[0].slower is not None and series[0].slower.commit in ("11cafe", "12cafe", "13cafe")
    assert series[1].slower is None and [round(level, 2) for _, level in series[0].levels] == [1.0, 1.1]
    capsys.readouterr()
    assert main([str(file), "--svg", str(picture)]) == 1
    said = capsys.readouterr().out
    assert "a[decode] (builtin against v1): 17 runs, levels x" in said and "slower since 1" in said
    root = ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg") and len([one for one in root.iter() if one.tag.endswith("circle")]) == 34


@pytest.mark.parametrize(
    "damage",
    [
        b'{"at": "2026-01-01"}',
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps(asdict(POINT) | {"ratio": "1"}).encode(),
        json.dumps(asdict(POINT) | {"low": 0.0}).encode(),
        json.dumps(asdict(POINT) | {"high": 0.5}).encode(),
        json.dumps(asdict(POINT) | {"case": "\x1b[2J"}).encode(),
        json.dumps(asdict(POINT) | {"ratio": 1}).replace('"ratio": 1,', '"ratio": 1e999,').encode(),
    ],
)
def test_lines_of_others_are_counted_and_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    file = tmp_path / "trend.jsonl"
    append(file, [POINT])
    file.write_bytes(file.read_bytes() + damage + b"\n" + json.dumps(asdict(POINT)).encode() + b"\n")
    assert main([str(file)]) == 0
    said = capsys.readouterr().out
    assert "2 runs" in said and "1 of the file's lines passed over" in said


def test_a_history_without_measurements_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trend.jsonl"
    for content, told in ((b"", "0 lines are no measurements"), (b"\xff\n[]\n", "2 lines are no measurements")):
        file.write_bytes(content)
        assert main([str(file)]) == 2 and told in capsys.readouterr().err


def test_a_picture_is_never_drawn_over_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trend.jsonl"
    append(file, [POINT])
    before = file.read_bytes()
    assert main([str(file), "--svg", str(file)]) == 2 and "the history itself" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert main([str(file), "--svg", str(file / "in a file.svg")]) == 2 and "cannot be" in capsys.readouterr().err


def test_a_long_series_is_searched_at_its_end() -> None:
    points = [replace(POINT, ratio=1.0 + 0.1 * (number >= 9000)) for number in range(9500)]
    assert Series("a", "t", "b", tuple(points)).changes == [9000]


def test_a_picture_of_nothing_is_a_picture() -> None:
    assert ElementTree.fromstring(drawn([])).tag.endswith("svg")
    assert ElementTree.fromstring(drawn([Series("a", "t", "b", (POINT,))])).tag.endswith("svg")
