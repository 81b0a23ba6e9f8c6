"""ci/peers/agreement.py calls equal only what is equal, on a small model in the place of SmolLM2."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt.golden.record import Record
from pytest_adapt.golden.reference import OracleReference
from pytest_adapt.models import materialise
from pytest_adapt.target.protocol import Response, TargetError, TopK

SCRIPT = Path(__file__).parents[2] / "ci" / "peers" / "agreement.py"
PROMPT = tuple(range(20, 50))


@dataclass(frozen=True)
class Case:
    """The script, the built-in engine's answer to one prompt, and the record of what it was fed."""

    script: Any
    mine: Response
    record: Record

    def row(self, theirs: Response) -> Any:
        row = self.script.Row("llama-odd", "made", "all")
        self.script.compare(row, "other", len(PROMPT), self.mine, theirs, self.record)
        return row

    def second_best(self, new: int) -> int:
        """The record's second choice after ``new`` generated tokens."""
        return int(self.record.topk_ids[len(PROMPT) - 1 + new, 1])


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    pytest.importorskip("adapt_engine")
    spec = importlib.util.spec_from_file_location("agreement", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "agreement", script)  # dataclasses look their module up
        spec.loader.exec_module(script)
    work = tmp_path_factory.mktemp("agreement")
    directory = materialise("llama-odd", work)
    _, answers = script.generate("builtin", work, directory, script.requests({"made": PROMPT}, server=False))
    mine = answers["made"]
    record = OracleReference(directory, ("fp32",)).record("made", (*PROMPT, *mine.tokens[:-1]))
    return Case(script, mine, record)


def changed_token(response: Response, new: int, token: int) -> Response:
    return replace(response, tokens=(*response.tokens[:new], token, *response.tokens[new + 1 :]))


def test_the_same_answer_is_equal(case: Case) -> None:
    row = case.row(case.mine)
    assert (row.verdict, row.equal["other"], row.largest["other"]) == ("equal", "48", 0.0)


def test_another_token_with_a_wide_margin_is_different(case: Case) -> None:
    row = case.row(changed_token(case.mine, 5, case.second_best(5)))
    assert row.verdict == "DIFFERENT"
    assert row.equal["other"] == "5"
    assert "not a near-tie" in row.failures[0]


def test_another_token_within_the_error_is_a_near_tie(case: Case) -> None:
    at, token = len(PROMPT) - 1 + 5, case.second_best(5)
    tied = case.record.topk_logprobs.copy()
    tied[at, 1] = tied[at, 0] - 1e-9
    row = replace(case, record=replace(case.record, topk_logprobs=tied)).row(changed_token(case.mine, 5, token))
    assert row.verdict == "near-tie"
    assert row.cells()[5].startswith("other: token 5 (position 34)")


def test_another_token_after_a_possible_routing_flip_is_a_near_tie(case: Case) -> None:
    emulation = case.record.errors["fp32"]
    certified = np.arange(len(emulation.certified)) < len(PROMPT)
    record = replace(case.record, errors={"fp32": replace(emulation, certified=certified)})
    row = replace(case, record=record).row(changed_token(case.mine, 5, case.second_best(5)))
    assert row.verdict == "near-tie"
    assert f"from position {len(PROMPT)} on" in row.differences[0]


def test_an_expert_that_no_router_would_choose_is_different(tmp_path: Path, case: Case) -> None:
    directory = materialise("mixtral-odd", tmp_path)
    info, answers = case.script.generate("builtin", tmp_path, directory, case.script.requests({"made": PROMPT}, False))
    answer, reference = answers["made"], OracleReference(directory, ("fp32",))
    row = case.script.Row("mixtral-odd", "made", "some")
    case.script.follow(row, "builtin", answer, PROMPT, info, reference)
    assert row.verdict == "equal"
    assert 0 < row.followed["builtin"] < 1
    ids = {name: value.copy() for name, value in answer.taps.items()}
    first = ids["layer.0.moe.router.ids"]
    selection = reference.oracle.run(PROMPT).selection[0]
    first[7] = np.sort(np.argsort(selection[7])[: first.shape[1]])  # the experts with the lowest scores
    case.script.follow(row, "builtin", replace(answer, taps=ids), PROMPT, info, reference)
    assert row.verdict == "DIFFERENT"
    assert "illegal" in row.failures[0]


def test_numbers_over_budget_are_different_though_every_token_is_equal(case: Case) -> None:
    assert case.mine.logits is not None
    logits = case.mine.logits.copy()
    logits[3] += np.where(np.arange(logits.shape[1]) == case.record.topk_ids[3, 0], np.float32(0.05), np.float32(0))
    row = case.row(replace(case.mine, logits=logits))
    assert (row.verdict, row.equal["other"]) == ("DIFFERENT", "48")
    assert "position 3" in row.failures[0]


def test_rows_after_the_first_difference_are_not_compared(case: Case) -> None:
    assert case.mine.logits is not None
    logits = case.mine.logits.copy()
    logits[len(PROMPT) + 5 :] = 0.0
    theirs = replace(changed_token(case.mine, 5, case.second_best(5)), logits=logits)
    assert case.row(theirs).use["other"] == 0.0


def test_a_server_is_compared_where_it_shows_candidates(case: Case) -> None:
    topk = case.mine.topk
    assert topk is not None
    ids, logprobs = topk.ids.copy(), topk.logprobs.copy()
    ids[3], logprobs[3] = -1, np.nan
    server = replace(case.mine, logits=None, topk=TopK(ids, logprobs))
    assert case.row(server).verdict == "equal"
    logprobs[4, 0] += 0.05
    row = case.row(server)
    assert row.verdict == "DIFFERENT"
    assert "position 4" in row.failures[0]


def test_an_answer_that_ends_early_is_different(case: Case) -> None:
    row = case.row(replace(case.mine, tokens=case.mine.tokens[:20]))
    assert row.verdict == "DIFFERENT"


def test_another_count_of_prompt_tokens_is_refused(case: Case) -> None:
    with pytest.raises(TargetError, match="counted 31 tokens, 30 were sent"):
        case.script._sound(replace(case.mine, prompt_tokens=len(PROMPT) + 1), len(PROMPT))


class Letters:
    """Two spellings of one text: 0 is "ab", 1 is "a", 2 is "b"; 3 is half a character, 4 a run of 40 blanks."""

    size = 5

    def encode(self, text: str) -> list[int]:
        return ["?ab".index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(("ab", "a", "b", "\ufffd", " " * 40)[number] for number in ids)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("abab", (0, 3, 4, 1, 2)), ("abaa", (0, 3, 4, 1, 1)), ("ab", (0, 3, 4)), ("ba", (2, 1)), ("", ())],
)
def test_a_text_is_read_in_the_spelling_of_the_other_engine(case: Case, text: str, tokens: tuple[int, ...]) -> None:
    answer = Response("made", 1, text=text)
    assert case.script._respelled(answer, (0, 3, 4, 1, 2), Letters()).tokens == tokens
