"""The adapter that the docs tell users to copy: judged as they would, and right."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Folder

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "adapter.py"
TESTED = "predictions or seed_decides or are_greedy or stop_token or filters_keep"


@pytest.mark.requirement(1, 90)
def test_the_example_is_judged_right(folder: Folder) -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    shutil.copy(EXAMPLE, folder.path)
    models = ("--adapt-models=qwen3-moe-aligned", "--adapt-precisions=fp32", "--adapt-contexts=64")
    result = folder.run_subprocess("--adapt-target=py:adapter:Target", *models, "-k", TESTED)
    assert result.ret == 0, result.stdout.str()
    passed = {
        case.partition("::")[2].partition("[")[0] for case, status in folder.statuses().items() if status == "pass"
    }
    assert passed >= {
        "test_predictions_match_the_reference",
        "test_a_seed_decides_the_sample",
        "test_no_temperature_and_one_candidate_are_greedy",
        "test_output_ends_with_a_stop_token",
        "test_filters_keep_the_tokens_that_they_name",
    }


def test_the_example_is_as_short_as_the_docs_say() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
