"""Searched prompts: the margin that is maximised, and the loop that maximises it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_adapt.golden.reference import OracleReference
from pytest_adapt.handle import ModelHandle
from pytest_adapt.matrix import Model
from pytest_adapt.models import ModelError, catalogue, materialise, prompts
from pytest_adapt.models.search import Choice, choice_of, margin, of_target, save, search
from pytest_adapt.models.tokenizer import plain_ids
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, TargetError


def choose(scores: np.ndarray, choice: Choice) -> set[int]:
    """Group-limited top-k, written independently of the margin."""
    size = len(scores) // choice.groups
    order = sorted(range(choice.groups), key=lambda g: -sum(sorted(scores[g * size : (g + 1) * size])[-2:]))
    allowed = [e for g in order[: choice.kept] for e in range(g * size, (g + 1) * size)]
    return set(sorted(allowed, key=lambda e: -scores[e])[: choice.chosen])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([Choice(5), Choice(4, 3, 2), Choice(3, 6, 4)]))
def test_no_error_below_half_the_margin_changes_the_choice(seed: int, choice: Choice) -> None:
    random = np.random.default_rng(seed)
    scores = random.normal(size=18)
    wide = margin(scores, choice) * scores.std()
    nudged = scores + random.uniform(-0.499, 0.499, size=18) * wide
    assert choose(nudged, choice) == choose(scores, choice)


def test_the_margin_is_that_of_the_nearest_other_choice() -> None:
    scores = np.array([0.9, 0.1, 0.5, 0.45, 0.3, 0.0])
    assert margin(scores, Choice(2)) * scores.std() == pytest.approx(0.05)
    assert margin(scores, Choice(6)) == np.inf, "all chosen: nothing can flip"
    # Groups (0.9, 0.1), (0.5, 0.45), (0.3, 0.0): best pairs 1.0, 0.95, 0.3.
    assert margin(scores, Choice(2, 3, 2)) * scores.std() == pytest.approx(0.05)
    assert margin(scores, Choice(2, 3, 1)) * scores.std() == pytest.approx(0.5 * 0.05)
    assert margin(scores - 7, Choice(2, 3, 2)) == pytest.approx(margin(scores, Choice(2, 3, 2)))


def rows_of(sequences: Sequence[tuple[int, ...]]) -> list[Mapping[str, np.ndarray]]:
    return [{"a": np.array([0.0, 0.1 * (tokens[-1] % 7), 1.0])} for tokens in sequences]


def test_each_token_is_the_best_candidate_and_a_search_can_go_on(tmp_path: Path) -> None:
    progress = tmp_path / "partial.json"
    whole = search(rows_of, Choice(1), range(50), length=80, candidates=8, seed=3)
    first = search(rows_of, Choice(1), range(50), length=64, candidates=8, seed=3, progress=progress)
    assert first.tokens == whole.tokens[:64]
    resumed = search(rows_of, Choice(1), range(50), length=80, candidates=8, seed=3, progress=progress)
    assert resumed.tokens == whole.tokens
    assert whole.tokens != search(rows_of, Choice(1), range(50), length=80, candidates=8, seed=4).tokens
    assert np.mean([token % 7 == 0 for token in whole.tokens]) > 0.5, "zero leaves the widest margin"


class Taps:
    """A target that shows what it is told to."""

    def __init__(self, answer: Mapping[str, np.ndarray]) -> None:
        self.answer = answer

    def open(self, deployment: Deployment) -> Info:
        return Info("taps", "1")

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in reversed(list(requests)):
            assert request.first_row == len(request.prompt) - 1 and request.want == {"taps"}
            rows = {name: value + request.prompt[-1] for name, value in self.answer.items()}
            yield Response(request.id, len(request.prompt), taps=rows)

    def close(self) -> None:
        return None


def test_a_target_answers_in_any_order_and_only_its_last_row_counts() -> None:
    run = of_target(Taps({"layer.1.moe.router.selection": np.arange(6.0).reshape(2, 3), "logits": np.ones((2, 3))}))
    found = run([(1, 10), (1, 20)])
    assert [rows["layer.1.moe.router.selection"].tolist() for rows in found] == [[13, 14, 15], [23, 24, 25]]
    assert all(len(rows) == 1 for rows in found)


def test_a_target_without_router_taps_is_refused() -> None:
    with pytest.raises(TargetError, match="shows no router selection"):
        of_target(Taps({"logits": np.ones((1, 3))}))([(1, 2)])


def test_saved_prompts_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save(path, "one", {"searched-0": [1, 2]})
    save(path, "two", {"searched-1": [3]})
    assert json.loads(path.read_text()) == {"source": "two", "prompts": {"searched-0": [1, 2], "searched-1": [3]}}


@pytest.mark.parametrize(
    "name", [n for n, e in catalogue().items() if "searched" in e.prompts and e.kind == "procedural"]
)
def test_every_sparse_model_ships_searched_prompts(name: str) -> None:
    entry = catalogue()[name]
    text = Path(__file__).parents[2] / "pytest_adapt" / "models" / "data" / f"{name}.prompts.json"
    shipped = json.loads(text.read_text())["prompts"]
    searched = [tokens for key, tokens in shipped.items() if key.startswith("searched-")]
    # Models that exist for their layouts are judged on shorter ones, and on the beginning of one.
    least = 192 if entry.shape_class == "wide" else 512
    assert sum(len(tokens) >= least for tokens in searched) >= 2
    assert all(max(tokens) < len(plain_ids(entry.config["vocab_size"])) for tokens in searched)
    assert choice_of(entry.config).chosen == entry.config["num_experts_per_tok"]


def test_shipped_prompts_reach_users(tmp_path: Path) -> None:
    entry = catalogue()["mixtral-odd"]
    (tmp_path / "config.json").write_text(json.dumps(dict(entry.config)))
    assert {"searched-0", "searched-1"} <= set(prompts(entry, tmp_path))


@pytest.mark.parametrize("content", ["{", "[" * 200_000, '{"seed": 3}', "[]"])
def test_a_damaged_progress_file_is_named(content: str, tmp_path: Path) -> None:
    progress = tmp_path / "partial.json"
    progress.write_text(content)
    with pytest.raises(ModelError, match=r"partial\.json: is no interrupted search"):
        search(lambda rows: [], Choice(1), range(50), length=8, candidates=4, seed=3, progress=progress)


@pytest.mark.requirement(113)
@pytest.mark.parametrize("name", ["deepseek-v3-odd-pos", "qwen3-moe-odd", "mixtral-odd"])
def test_a_users_directory_gets_a_prompt_whose_end_is_certain(name: str, tmp_path: Path) -> None:
    """Otherwise a healthy target's bf16 output could not be judged at all: random prompts may flip from the start."""
    directory = materialise(name, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    handle = ModelHandle(Model("mine", None, directory, (16,), ("bf16",), config), tmp_path)
    found = handle.all_prompts
    for ends, wanted in ((5, {5}), ([5, 7], {5, 7}), (None, set())):
        (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
        assert ModelHandle(Model("mine", None, directory, (16,), ("bf16",), config), tmp_path).end_tokens == wanted
    assert found == ModelHandle(Model("copy", None, directory, (16,), ("bf16",), config), tmp_path).all_prompts
    tokens = found["searched-4"]
    assert len(set(tokens)) == 4
    record = OracleReference(directory, ("bf16",), name, None).record("searched-4", tokens)
    assert record.emulation("bf16").certified.all()


def test_a_dense_model_needs_no_search(tmp_path: Path) -> None:
    directory = materialise("llama-odd", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    handle = ModelHandle(Model("mine", None, directory, (16,), ("bf16",), config), tmp_path)
    assert not any(name.startswith("searched") for name in handle.all_prompts)
