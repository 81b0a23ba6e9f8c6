"""Mode strict: bit for bit the same, whatever runs beside a request, however it is cut, on any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import Engine, EngineError, EngineOptions, SequenceRequest, threads

from .conftest import FAMILIES
from .test_kernels import needs_native

pytestmark = needs_native
LENGTHS = (40, 3, 23)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    threads.use(before)


def logits_of(engine: Engine, prompt: tuple[int, ...], together: int, order: int = 1) -> list[torch.Tensor]:
    """Logits of three requests, ``together`` of them at a time."""
    requests = [
        SequenceRequest(str(index), prompt[index : index + length], max_new_tokens=4, want_logits=True)
        for index, length in enumerate(LENGTHS)
    ][::order]
    found: dict[str, Any] = {}
    for start in range(0, len(requests), together):
        found |= {result.id: result.logits for result in engine.run(requests[start : start + together])}
    return [found[str(index)] for index in range(len(LENGTHS))]


@pytest.mark.requirement(46)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_company_order_chunks_and_threads_change_no_bit(
    family: str, precision: str, opened: Any, prompt: tuple[int, ...]
) -> None:
    settings = {"mode": "strict", "precision": precision, "page_size": 4}
    expected = logits_of(opened(family, **settings), prompt, together=1)
    for changed in ({"prefill_chunk": 1}, {"prefill_chunk": 7, "threads": 2}, {"threads": 2, "prefix_cache": True}):
        for together, order in ((3, 1), (3, -1)):
            found = logits_of(opened(family, **settings, **changed), prompt, together, order)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), (changed, order)


@pytest.mark.requirement(46)
@pytest.mark.parametrize("layout", ["pp2", "dp2", "ep2", "ep4", "pp3.ep2"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_layouts_that_add_nothing_up_change_no_bit(
    family: str, precision: str, layout: str, opened: Any, prompt: tuple[int, ...]
) -> None:
    expected = logits_of(opened(family, mode="strict", precision=precision), prompt, together=1)
    found = logits_of(opened(family, mode="strict", precision=precision, layout=layout), prompt, together=3)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("layout", "axes"), [("tp2", "tp"), ("sp2", "sp"), ("tp2.ep1.etp2", "tp and etp")])
def test_layouts_whose_sums_have_no_order_yet_are_refused(
    layout: str, axes: str, checkpoints: Callable[[str], Path]
) -> None:
    with pytest.raises(EngineError, match=f"mode strict: layout .* adds up over {axes}, "):
        Engine.open(checkpoints("qwen3_moe"), EngineOptions(mode="strict", layout=layout))


@pytest.mark.requirement(46)
def test_on_one_rank_mode_fast_has_the_same_kernels(opened: Any, prompt: tuple[int, ...]) -> None:
    """So strict costs nothing there: what is invariant is the order of accumulation, not a slower path."""
    strict, fast = (opened("qwen3_moe", mode=mode, precision="bf16") for mode in ("strict", "fast"))
    differing = {op for op, name in strict.kernels().items() if fast.kernels()[op] != name}
    assert differing <= {"head_linear"}
    assert all(
        torch.equal(one, other)
        for one, other in zip(logits_of(strict, prompt, 1), logits_of(fast, prompt, 1), strict=True)
    )
