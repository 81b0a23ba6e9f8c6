"""The memory budget: its terms, what fits, and what would make it fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_adapt.__main__ import main
from pytest_adapt.inspect import analyse, count
from pytest_adapt.inspect.memory import Load, budget, plan, weight_bytes
from pytest_adapt.inspect.quantities import GIB, devices_of, tokens_of
from pytest_adapt.inspect.structure import InspectError
from pytest_adapt.layout import SINGLE, parse
from pytest_adapt.models import materialise


@pytest.mark.requirement(22)
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "kimi-k3"])
def test_one_card_holds_all_weights(name: str) -> None:
    structure = analyse(name)
    item = budget(structure, SINGLE, Load(4096))
    assert item.weights == weight_bytes(count(structure).total, "bf16")
    assert item.communication == 0, "one rank talks to nobody"
    assert item.total == item.weights + item.kv + item.activations + item.temporary


@pytest.mark.requirement(22)
def test_each_axis_divides_what_it_should() -> None:
    structure = analyse("qwen3-30b-a3b")
    load = Load(32768, batch=8)
    one = budget(structure, SINGLE, load)
    tensor, stage, expert = (budget(structure, parse(text), load) for text in ("tp4", "pp4", "ep8"))
    sequence = budget(structure, parse("sp4"), load)
    assert tensor.kv * 4 == one.kv and stage.kv * 4 == one.kv and sequence.kv * 4 == one.kv
    assert sequence.weights == one.weights
    assert stage.weights < 0.3 * one.weights
    assert expert.weights < 0.25 * one.weights, "nearly all parameters are experts"
    eight = budget(structure, parse("tp8"), load)
    assert eight.kv * 4 == one.kv, "4 KV heads are replicated beyond tp4"
    assert all(item.communication > 0 for item in (tensor, stage, expert, sequence))


@pytest.mark.requirement(22)
def test_windows_and_recurrent_state_bound_the_cache() -> None:
    short, long = (budget(analyse("gpt-oss-20b"), SINGLE, Load(n)).kv for n in (4096, 131072))
    full = sum(layer.long_context == "full" for layer in analyse("gpt-oss-20b").layers)
    assert long - short == (131072 - 4096) * full * 8 * 128 * 2
    states = [budget(analyse("kimi-linear-48b-a3b"), SINGLE, Load(n)).kv for n in (1, 2)]
    assert states[1] - states[0] == 7 * 576 * 2, "only the 7 latent layers grow"


@pytest.mark.requirement(24)
def test_three_terabytes_do_not_fit_one_card() -> None:
    found = plan(analyse("kimi-k3"), 1, 80 * GIB, Load(4096, precision="fp8"))
    assert found.partitions == 0 and found.closest.weights > 2.7e12


@pytest.mark.requirement(32)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(8, 160), st.integers(1, 40), st.sampled_from([4096, 32768]), st.integers(1, 16))
def test_more_memory_never_means_more_partitions(size: int, more: int, context: int, batch: int) -> None:
    structure = analyse("qwen3-30b-a3b")
    load = Load(context, batch)
    small, large = (plan(structure, 16, n * GIB, load).partitions for n in (size, size + more))
    assert large <= small or small == 0
    assert not (small and not large)


@pytest.mark.requirement(32)
def test_partitions_follow_capacity() -> None:
    structure = analyse("qwen3-30b-a3b")
    found = [plan(structure, 16, n * GIB, Load(32768, 4)).partitions for n in (8, 12, 24, 48, 96)]
    assert found == sorted(found, reverse=True) and len(set(found)) >= 4 and found[-1] == 1


@pytest.mark.requirement(22)
def test_advice_is_true() -> None:
    """Each single change that is offered makes the load fit."""
    structure, load = analyse("deepseek-v3"), Load(1 << 20, 4)
    found = plan(structure, 16, 64 * GIB, load)
    assert not found.fitting
    assert found.advice == ("32 cards instead of 16", "cards of 128 GiB instead of 64")
    assert plan(structure, 32, 64 * GIB, load).fitting
    assert plan(structure, 16, 128 * GIB, load).fitting
    shorter = plan(structure, 32, 64 * GIB, Load(1 << 20, 32))
    assert any(advice.startswith("batch ") for advice in shorter.advice), shorter.advice


@pytest.mark.requirement(22)
def test_copies_of_the_model_are_counted_in_cards() -> None:
    structure = analyse("qwen3-30b-a3b")
    assert plan(structure, 2, 80 * GIB, Load(4096)).advice == ("2 copies of the model side by side (1 card each)",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16x64GiB", (16, 64 * GIB)), ("80GB", (1, 80 * 10**9)), ("2x1.5TiB", (2, 3 << 39)), ("8x24g", (8, 24 * GIB))],
)
def test_devices_are_read(text: str, expected: tuple[int, int]) -> None:
    assert devices_of(text) == expected


@pytest.mark.parametrize("text", ["", "16", "x64GiB", "0x64GiB", "16x0GiB", "16x64", "-1x64GiB", "99999999x1GiB"])
def test_unreadable_devices_are_refused(text: str) -> None:
    with pytest.raises(InspectError, match="devices"):
        devices_of(text)


def test_tokens_are_read() -> None:
    assert [tokens_of(text) for text in ("1M", "128K", "1000000")] == [1 << 20, 131072, 1_000_000]
    for text in ("", "0", "1G", "-5", "1.5M"):
        with pytest.raises(InspectError, match="context"):
            tokens_of(text)


def test_the_command_prints_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "deepseek-v3", "--devices", "16x64GiB", "--context", "1M", "--batch", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 140
    text = "\n".join(lines)
    assert "671.03 B in all, 36.63 B active" in text
    assert "does not fit" in text and "would fit: 32 cards instead of 16" in text
    assert "made for 163,840 tokens" in text


def test_the_command_speaks_json_about_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = materialise("deepseek-v3-odd-neg", tmp_path)
    assert main(["inspect", str(directory), "--json", "--devices", "2x1GiB"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["checkpoint"]["differences"] == [] and facts["checkpoint"]["total"] == facts["parameters"]["total"]
    assert [layer["kind"] for layer in facts["layers"]] == ["dense"] * 2 + ["sparse"] * 3
    assert facts["memory"]["partitions"] == 1


@pytest.mark.requirement(2)
def test_tensors_that_contradict_the_configuration_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = materialise("mixtral-odd", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    assert main(["inspect", str(directory)]) == 1
    assert "layer 0: tensors hold" in capsys.readouterr().out


def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["inspect", "nothing"], ["inspect", "deepseek-v3", "--devices", "many"], ["nonsense"]):
        assert main(arguments) in (1, 2)
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
