"""transformers reads every conformance model as it stands: no missing key, no unexpected one, no overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.models import catalogue, materialise, prompts

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROCEDURAL = [name for name, entry in catalogue().items() if entry.kind == "procedural"]


def load(directory: Path, dtype: Any) -> tuple[Any, dict[str, Any]]:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        output_loading_info=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )


@pytest.mark.parametrize("name", PROCEDURAL)
def test_every_tensor_finds_its_place(name: str, tmp_path: Path) -> None:
    directory = materialise(name, tmp_path)
    model, report = load(directory, torch.float32)
    assert not any(report.values()), report
    tokens = torch.tensor([prompts(catalogue()[name], directory)["random-150"]])
    with torch.no_grad():
        logits = model.eval()(tokens).logits[0]
        half = load(directory, torch.float16)[0].eval()(tokens).logits[0]
    assert 2 < logits.std(dim=-1).mean() < 4, "decisive, but not a single token"
    assert torch.isfinite(half).all(), "float16 must not overflow"


def test_position_and_context_matter(tmp_path: Path) -> None:
    """Attention is not flat: another token at the start, or another order, changes what comes much later."""
    directory = materialise("deepseek-v3-odd-pos", tmp_path)
    model = load(directory, torch.float32)[0].eval()
    tokens = list(prompts(catalogue()["deepseek-v3-odd-pos"], directory)["random-37"])
    other = [tokens[0] ^ 1, *tokens[1:]]
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    with torch.no_grad():
        last = [model(torch.tensor([row])).logits[0, -1] for row in (tokens, other, swapped)]
    for changed in last[1:]:
        assert (changed - last[0]).abs().max() > 0.05
