"""The console script, the tokenizer, and what importing the package does to a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from adapt_engine import CheckpointError
from adapt_engine.cli import main
from adapt_engine.tokenizer import Tokenizer

from .conftest import VOCAB


@pytest.fixture
def speaking(copied: Callable[[str], Path]) -> Path:
    """A checkpoint with a tokenizer of single letters."""
    directory = copied("llama")
    letters = {chr(33 + index): index for index in range(VOCAB)}
    model = tokenizers.models.WordLevel(letters, unk_token="!")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.requirement(90)
def test_generate_prints_the_continuation(speaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(speaking), "HELLO", "--max-new-tokens", "6"]) == 0
    printed = capsys.readouterr()
    text = printed.out.strip()
    assert text.startswith("HELLO") and 6 <= len(text) <= 11
    assert "tokens/s" in printed.err and "GB/s" in printed.err
    for more in ([], ["--layout", "tp2.pp3"]):
        main(["generate", str(speaking), "HELLO", "--max-new-tokens", "6", *more])
        assert capsys.readouterr().out.strip() == text
    assert main(["generate", str(speaking), "HELLO", "--layout", "tp4"]) == 1
    assert "6 query heads do not divide by 4; nearest legal: tp2, tp6" in capsys.readouterr().err


def test_info_names_kernels_and_checkpoint(speaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(speaking)]) == 0
    printed = capsys.readouterr().out
    assert "native kernels:" in printed and "LlamaForCausalLM" in printed and "51 tensors" in printed


def test_errors_are_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_tokenizer_round_trip_and_refusals(speaking: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(speaking)
    assert tokenizer.encode("ABC") == (32, 33, 34)
    assert tokenizer.decode((32, 33, 34)) == "ABC"
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def in_process(code: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**inherited, **environment}
    )
    return done.stdout.strip()


def test_import_sets_a_passive_wait_policy_and_pulls_in_neither_judge_nor_pytest() -> None:
    code = (
        "import adapt_engine, os, sys\n"
        "print(os.environ['OMP_WAIT_POLICY'], *{name.split('.')[0] for name in sys.modules})"
    )
    policy, *modules = in_process(code).split()
    assert policy == "PASSIVE"
    assert "adapt_engine" in modules
    assert not {"pytest", "pytest_adapt", "transformers", "safetensors"} & set(modules)


def test_without_the_extension_the_reference_kernels_serve() -> None:
    """A wait policy that the user chose stays."""
    code = (
        "import os, sys; sys.modules['adapt_engine._native'] = None\n"
        "from adapt_engine.cli import main; main(['info']); print(os.environ['OMP_WAIT_POLICY'])"
    )
    printed = in_process(code, OMP_WAIT_POLICY="ACTIVE")
    assert "running on reference kernels" in printed and printed.endswith("ACTIVE")
