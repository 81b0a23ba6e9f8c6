"""ci/museum/: its list of exhibits is well-formed, and an exhibit counts only when both releases are as expected."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt.models import catalogue
from pytest_adapt.sites import LAYER_SITES

MUSEUM = Path(__file__).parents[2] / "ci" / "museum"


@pytest.fixture(scope="module")
def museum() -> Any:
    spec = importlib.util.spec_from_file_location("museum_run", MUSEUM / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def exhibits(museum: Any) -> list[Any]:
    found: list[Any] = museum.exhibits(MUSEUM / "exhibits.toml")
    return found


@pytest.mark.requirement(116)
def test_at_least_ten_bugs_of_three_projects_are_shown(exhibits: list[Any]) -> None:
    assert len({exhibit.id for exhibit in exhibits}) == len(exhibits) >= 10
    assert len({exhibit.project for exhibit in exhibits}) >= 3


@pytest.mark.requirement(116, 118)
def test_every_exhibit_pins_two_releases_of_one_package_and_names_a_site(exhibits: list[Any]) -> None:
    for exhibit in exhibits:
        old, new = exhibit.old[0].split("=="), exhibit.new[0].split("==")
        assert old[0] == new[0] == exhibit.project and old[1] != new[1], exhibit.id
        assert exhibit.old[1:] == exhibit.new[1:], exhibit.id
        assert all("==" in pin for pin in exhibit.old), exhibit.id
        assert exhibit.model in catalogue(), exhibit.id
        assert exhibit.site in LAYER_SITES and exhibit.site in exhibit.words, exhibit.id
        assert exhibit.report.startswith("https://") and exhibit.what.endswith("."), exhibit.id


@pytest.mark.requirement(116)
def test_an_exhibit_is_as_expected_only_with_both_releases_as_they_should_be(museum: Any, exhibits: list[Any]) -> None:
    exhibit = exhibits[0]
    first = f"layer.2.{exhibit.site}, position 0, prefill: got [1], expected [2] (error 1, budget 0)"
    old = museum.Verdict(exhibit.old[0], 1, exhibit.words, first, {"fail": 3}, 1.0)
    new = museum.Verdict(exhibit.new[0], 0, "", "", {"pass": 4}, 1.0)
    assert museum.wrong(exhibit, old, new) == ""
    assert "expected 1" in museum.wrong(exhibit, replace(old, exit=0), new)
    assert "expected 1" in museum.wrong(exhibit, replace(old, exit=4), new)
    assert "another cause" in museum.wrong(exhibit, replace(old, cause="first divergence in residual"), new)
    assert "another cause" in museum.wrong(exhibit, replace(old, first="layer.2.residual, position 0"), new)
    assert "expected 0" in museum.wrong(exhibit, old, replace(new, exit=1))
    assert "no case" in museum.wrong(exhibit, old, replace(new, cases={"unsupported": 4}))


@pytest.mark.requirement(115)
def test_a_changed_configuration_is_served_with_the_shipped_weights(
    museum: Any, exhibits: list[Any], tmp_path: Path
) -> None:
    exhibit = replace(exhibits[0], id="changed", model="llama-odd", config={"rope_theta": 77.0})
    for _ in range(2):  # a second run finds the links of the first
        copy = Path(museum.checkpoint(exhibit, tmp_path))
    config = json.loads((copy / "config.json").read_text("utf-8"))
    assert config["rope_theta"] == 77.0 and config["hidden_size"] > 0
    weights = list(copy.glob("*.safetensors"))
    assert len(weights) >= 2 and all(file.is_symlink() and file.stat().st_size for file in weights)
    assert museum.checkpoint(replace(exhibit, config={}), tmp_path) == "llama-odd"


@pytest.mark.requirement(115)
def test_scaled_rows_are_exact_multiples_and_everything_else_keeps_its_bits(museum: Any) -> None:
    values = np.array([[1.5, -0.25, 0.0], [3.0, -7.0, 0.5], [2.0, 2.0, 2.0]], np.float32)
    half = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    header = {
        name: {"dtype": "BF16", "shape": [3, 3], "data_offsets": [at, at + 18]}
        for at, name in ((0, "layers.0.q.weight"), (18, "layers.0.other.weight"))
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + half + half
    found = museum.scaled(data, {"q.weight": [2, 10]})
    bits = np.frombuffer(found[-36:], "<u2").astype(np.uint32) << 16
    scaled, other = bits.view(np.float32).reshape(2, 3, 3)
    assert np.array_equal(scaled[:2], values[:2] * 1024) and np.array_equal(scaled[2], values[2])
    assert np.array_equal(other, values) and found[:-36] == data[:-36]
    with pytest.raises(ValueError, match="expected BF16 and 4 rows"):
        museum.scaled(data, {"q.weight": [4, 10]})
