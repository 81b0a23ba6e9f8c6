"""Routers of every transformers release are tapped, wherever the choice of experts is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_adapt.target.hf_taps import TapRecorder

LOGITS = torch.tensor([[0.5, 0.1, 0.9], [0.2, 0.8, 0.4]])
IDS = torch.tensor([[2, 0], [1, 2]])
WEIGHTS = torch.tensor([[0.6, 0.4], [0.7, 0.3]])


class Gate(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.output


class Experts(nn.Module):
    def forward(self, hidden: torch.Tensor, *chosen: torch.Tensor) -> torch.Tensor:
        return hidden


class Block(nn.Module):
    def __init__(self, output: Any, told: bool) -> None:
        super().__init__()
        self.gate, self.experts, self.told = Gate(output), Experts(), told

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.gate(hidden)
        chosen = (IDS, WEIGHTS) if self.told else ()
        result: torch.Tensor = self.experts(hidden, *chosen)
        return result


class Layer(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.mlp = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mlp(hidden)
        return result


class Model(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    @property
    def base_model(self) -> Model:
        return self

    def get_input_embeddings(self) -> None:
        return None


@pytest.mark.requirement(54, 116)
@pytest.mark.parametrize(
    ("output", "told", "shown"),
    [
        ((LOGITS, WEIGHTS, IDS), True, {"logits", "ids", "weights"}),
        ((IDS, WEIGHTS), False, {"ids", "weights"}),
        (LOGITS, True, {"logits", "ids", "weights"}),
        (LOGITS, False, {"logits"}),
    ],
    ids=["logits-weights-ids", "ids-weights", "logits-then-experts-are-told", "logits-alone"],
)
def test_what_the_router_shows_is_kept_in_order_of_ids(output: Any, told: bool, shown: set[str]) -> None:
    layer = Layer(Block(output, told))
    recorder = TapRecorder(Model(layer), ("layer.*.moe.router.*",))
    recorder.seen, recorder.batch, recorder.tokens = {}, 1, 2
    layer(torch.zeros(1, 2, 4))
    found = {name.rpartition(".")[2]: value[0].tolist() for name, value in recorder.seen.items()}
    assert set(found) == shown
    if "ids" in shown:
        assert found["ids"] == [[0, 2], [1, 2]]
        assert torch.equal(torch.tensor(found["weights"]), torch.tensor([[0.4, 0.6], [0.7, 0.3]]))
    if "logits" in shown:
        assert torch.equal(torch.tensor(found["logits"]), LOGITS)
    recorder.remove()
