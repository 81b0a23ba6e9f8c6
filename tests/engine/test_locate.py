"""From logical coordinates back to ranks: whatever rank a value is changed on, it is among those that are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapt_engine import Engine, EngineOptions, SequenceRequest

PROMPT = tuple(range(3, 43))
# Operation to disturb -> site where it shows first, and in which layer.
CASES = [
    ("swiglu", "layer.1.ffn.act", 1),
    ("rope_apply", "layer.2.attn.q_rope", 2),
    ("rope_apply", "layer.2.attn.k_rope", 2),
    ("expert_rows", "layer.2.moe.experts.down", 2),
    ("add", "layer.3.attn.residual", 3),
    ("lm_head", "logits", None),
]


@pytest.mark.requirement(39)
@pytest.mark.parametrize("layout", ["tp4", "sp2", "pp3", "tp2.ep2.etp2", "tp2.pp2.ep2.dp2", "ep2.sp2"])
@pytest.mark.parametrize(("op", "site", "layer"), CASES)
def test_the_rank_that_was_disturbed_is_named(
    op: str, site: str, layer: int | None, layout: str, checkpoints: Callable[[str], Path]
) -> None:
    """Each rank in turn; only ranks that have the layer and the rows change anything."""
    options = EngineOptions(max_context=64, layout=layout, taps=("*",))
    hit = 0
    with Engine.open(checkpoints("qwen3_moe_wide"), options) as engine:
        (plain,) = engine.run([SequenceRequest("a", PROMPT)])
        for rank, registry in enumerate(engine.executor.registries):

            def disturb(call: Any, registry: Any = registry) -> Any:
                def disturbed(*given: Any) -> Any:
                    out = call(*given)
                    return out + 1 if registry.layer == layer else out

                return disturbed

            # Requests go to replicas in turn: come back to the first.
            engine._turn = 0
            with registry.wrap(op, disturb):
                (found,) = engine.run([SequenceRequest("a", PROMPT)])
            gap = (found.taps[site] - plain.taps[site]).abs()
            if not bool((gap > 0.5).any()):
                continue
            hit += 1
            position, *element = (gap > 0.5).nonzero()[0].tolist()
            expert = None
            if site.endswith("experts.down"):
                expert = int(plain.taps["layer.2.moe.router.ids"][position, element[0]])
            named = engine.locate(site, position, tuple(element), expert, found.replica)
            assert engine.executor.workers[rank].comm.name in named
            # One rank has a query head, a feed-forward row, a vocabulary row; others hold copies or summands.
            alone = site.endswith(("q_rope", "ffn.act", "logits"))
            assert len(named) == 1 if alone else len(named) <= engine.layout.tp * engine.layout.etp
    assert hit or (op == "expert_rows" and engine.layout.ep * engine.layout.etp == 1)
