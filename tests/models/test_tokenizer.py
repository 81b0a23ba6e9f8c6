"""Text and ids of the conformance models map one to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_adapt.models import materialise


def test_every_id_survives_the_round_trip(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(materialise("llama-odd", tmp_path) / "tokenizer.json"))
    ids = list(range(313))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.encode(text[5:42]).ids == ids[5:42], "nothing is added at either end"


def test_unknown_characters_keep_the_token_count(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(materialise("llama-odd", tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("aé \n").ids == [309] * 4


def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = materialise("qwen3-moe-odd", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = [5, 0, 326, 5, 5, 17]
    assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (328, 329, 330)
