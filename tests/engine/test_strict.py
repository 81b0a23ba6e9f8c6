"""Mode strict: bit for bit the same, whatever runs beside a request, however it is cut, on any number of threads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import Engine, EngineOptions, LayoutError, SequenceRequest, threads
from adapt_engine.comm import Tree
from adapt_engine.families import read_config, spec_from_config
from adapt_engine.layout import Layout, check
from adapt_engine.runtime.nursery import Nursery

from .conftest import FAMILIES, VOCAB
from .test_kernels import needs_native
from .test_layouts import LAYOUTS, traffic_of

pytestmark = needs_native
Checkpoints = Callable[[str], Path]
LENGTHS = (40, 3, 23)
WHOLE_GRID = bool(os.environ.get("ADAPT_ENGINE_WHOLE_GRID"))
"""Whether every layout is held to one rank in every combination below: minutes, so by hand."""
GRID = tuple(itertools.product((1, 3, 8), (1, 7, 64, 0), (1, 2)))
"""Requests together, chunk of a prompt (0: all), threads."""
SOME = {"fp32": (8, 7, 1), "bf16": (3, 64, 1), "int8": (1, 0, 1)}
MODELS = {
    "gqa": ("qwen3_moe_wide", "qwen3_moe_three", "qwen3_moe_eight"),
    "mla": ("deepseek_v3_wide", "deepseek_v3_eight"),
}


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


def served(engine: Engine, together: int) -> dict[str, torch.Tensor]:
    """Logits of eight requests, ``together`` of them at a time: some rows of prefill beside some of decode."""
    requests = [
        SequenceRequest(str(index), tokens, max_new_tokens=3, want_logits=True)
        for index, tokens in enumerate(requests_of_many_lengths())
    ]
    found: dict[str, torch.Tensor] = {}
    for start in range(0, len(requests), together):
        for result in engine.run(requests[start : start + together]):
            assert result.error is None and result.logits is not None, result.error
            found[result.id] = result.logits
    assert engine.drifts == []
    return found


def requests_of_many_lengths() -> list[tuple[int, ...]]:
    torch.manual_seed(6)
    return [tuple(torch.randint(0, VOCAB, (length,)).tolist()) for length in (40, 3, 23, 70, 1, 17, 9, 33)]


def options_of(precision: str, **settings: Any) -> EngineOptions:
    return EngineOptions(**{"mode": "strict", "precision": precision, "max_context": 96, "page_size": 4, **settings})


@pytest.fixture(scope="module")
def one_rank(checkpoints: Checkpoints) -> Callable[[str, str], dict[str, torch.Tensor]]:
    """``one_rank(family, precision)``: what one rank answers to each request alone."""
    kept: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def get(family: str, precision: str) -> dict[str, torch.Tensor]:
        if (family, precision) not in kept:
            with Engine.open(checkpoints(family), options_of(precision)) as engine:
                kept[family, precision] = served(engine, 1)
        return kept[family, precision]

    return get


def family_for(kind: str, layout: str, checkpoints: Checkpoints) -> str:
    """The first model of that attention kind that mode strict takes so."""
    for family in MODELS[kind]:
        try:
            check(spec_from_config(read_config(checkpoints(family))), Layout.parse(layout), whole_segments=True)
        except LayoutError:
            continue
        return family
    raise AssertionError(f"no {kind} model takes {layout}")


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[one], expected[one]) for one in expected)


# A wrong order shows in float32; the formats take turns beside it, for they are packed and scaled in ways of their own.
TURNS = [
    (layout, precision)
    for number, layout in enumerate(LAYOUTS)
    for precision in (("fp32", "bf16", "int8") if WHOLE_GRID else ("fp32", ("bf16", "int8")[number % 2]))
]


@pytest.mark.requirement(46)
@pytest.mark.parametrize(("layout", "precision"), TURNS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_layout_changes_no_bit(
    kind: str, precision: str, layout: str, checkpoints: Checkpoints, one_rank: Any
) -> None:
    """Some batch size and chunk of a prompt, another one in each precision: as one rank answers each request alone."""
    family = family_for(kind, layout, checkpoints)
    for together, chunk, threads_of in GRID if WHOLE_GRID else (SOME[precision],):
        settings = options_of(precision, layout=layout, prefill_chunk=chunk, threads=threads_of)
        with Engine.open(checkpoints(family), settings) as engine:
            assert same(served(engine, together), one_rank(family, precision)), (family, together, chunk, threads_of)


@pytest.mark.requirement(46)
@pytest.mark.parametrize(("layout", "precision"), [("tp3", "fp16"), ("tp2.pp2.ep3.sp2", "int8")])
@pytest.mark.parametrize("kind", MODELS)
def test_every_batch_and_chunk_on_a_layout_changes_no_bit(
    kind: str, precision: str, layout: str, checkpoints: Checkpoints, one_rank: Any
) -> None:
    family = family_for(kind, layout, checkpoints)
    settings = options_of(precision, layout=layout, prefix_cache=True, micro_batches=2)
    for chunk, batches in ((1, (8,)), (7, (1, 3)), (0, (8, 3))):
        with Engine.open(checkpoints(family), replace(settings, prefill_chunk=chunk)) as engine:
            for together in batches:
                assert same(served(engine, together), one_rank(family, precision)), (family, together, chunk)


@pytest.mark.requirement(44, 46)
@pytest.mark.parametrize("layout", ["tp2", "tp3", "sp2", "tp2.pp2", "tp2.sp2", "tp2.ep2.etp2"])
@pytest.mark.parametrize(("kind", "precision"), [("gqa", "bf16"), ("mla", "int8")])
def test_processes_change_no_bit(
    kind: str, precision: str, layout: str, checkpoints: Checkpoints, one_rank: Any, nursery: Any
) -> None:
    family, world = family_for(kind, layout, checkpoints), Layout.parse(layout).world
    of_each = {"bf16": 1, "int8": 2}[precision]
    settings = options_of(precision, layout=layout, communicator="gloo", threads=of_each * world, prefill_chunk=7)
    with Engine.open(checkpoints(family), settings, nursery=nursery) as engine:
        assert same(served(engine, 3), one_rank(family, precision))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as found:
        yield found


@pytest.mark.requirement(46)
@pytest.mark.parametrize(("layout", "kind"), [("tp4", "gqa"), ("tp3", "mla"), ("etp3", "gqa"), ("etp3", "mla")])
def test_sums_in_the_order_of_ranks_would_be_seen(
    kind: str, layout: str, checkpoints: Checkpoints, one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison in float32 is sharp: the same sums in another order are other bits. Rounding to bfloat16 hides
    that in models as small as these, which is why every layout is compared in float32 too."""

    def in_turns(self: Tree, sums: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        ordered = [sums[node] for node in sorted(sums)]
        total, *others = ordered[::2] + ordered[1::2]
        for one in others:
            total = total + one
        return total

    family = family_for(kind, layout, checkpoints)
    monkeypatch.setattr(Tree, "add", in_turns)
    with Engine.open(checkpoints(family), options_of("fp32", layout=layout)) as engine:
        assert not same(served(engine, 3), one_rank(family, "fp32"))


@pytest.mark.requirement(46)
@pytest.mark.parametrize("layout", ["tp2", "tp3"])
def test_int8_scales_are_those_of_the_whole_row(layout: str, checkpoints: Checkpoints) -> None:
    """A rank that scaled its part of a row or of an activation by itself would round it to other integers."""
    with Engine.open(checkpoints("deepseek_v3_wide"), options_of("int8", layout=layout)) as engine:
        ranks = [worker.transformer.parameters for worker in engine.executor.workers]
    with Engine.open(checkpoints("deepseek_v3_wide"), options_of("int8")) as engine:
        (whole,) = (worker.transformer.parameters for worker in engine.executor.workers)
        for name in ("layer.0.attn.out.weight", "layer.0.ffn.down.weight"):
            assert all(torch.equal(one[name].scales, whole[name].scales) for one in ranks)
            assert torch.equal(torch.cat([one[name].dense() for one in ranks], 1), whole[name].dense())


@pytest.mark.requirement(46)
@pytest.mark.parametrize(
    ("family", "layout", "rule"),
    [
        ("qwen3_moe_wide", "tp8", "mode strict adds 71 feed-forward rows up in 5 segments of 16, too few for 8 ranks"),
        ("qwen3_moe", "etp5", "mode strict adds 28 rows of an expert up in 4 segments of 8, too few for 5 ranks"),
    ],
)
def test_what_has_fewer_segments_than_ranks_is_refused(
    family: str, layout: str, rule: str, checkpoints: Checkpoints
) -> None:
    with pytest.raises(LayoutError, match=f"layout {layout}: {rule}; nearest legal: "):
        Engine.open(checkpoints(family), EngineOptions(mode="strict", layout=layout))


@pytest.mark.requirement(45, 46)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("layout", ["tp4", "sp3", "etp3", "tp2.ep2.etp2", "tp2.pp2.ep3.sp2"])
@pytest.mark.parametrize("kind", MODELS)
def test_calls_and_bytes_equal_the_prediction(kind: str, layout: str, precision: str, checkpoints: Checkpoints) -> None:
    settings = options_of(precision, layout=layout, page_size=16, max_context=128, taps=("layer.*.moe.router.ids",))
    with Engine.open(checkpoints(family_for(kind, layout, checkpoints)), settings) as engine:
        measured, expected = traffic_of(engine, 2, strict=True, quantised=precision == "int8")
    assert measured == expected


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


@pytest.mark.requirement(46)
@pytest.mark.parametrize("layout", ["tp2", "sp2", "sp3", "tp2.sp2"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_biases_tied_heads_and_windows_change_no_bit_on_a_layout(
    family: str, precision: str, layout: str, checkpoints: Checkpoints, one_rank: Any
) -> None:
    with Engine.open(checkpoints(family), options_of(precision, layout=layout, prefill_chunk=7)) as engine:
        assert same(served(engine, 3), one_rank(family, precision))
