"""Shard plans: who holds what, loaded from files slice by slice, and put together again bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from adapt_engine import EngineError
from adapt_engine.config import ModelSpec
from adapt_engine.families import read_config, spec_from_config
from adapt_engine.layout import Layout, check, span
from adapt_engine.mesh import Mesh
from adapt_engine.weights.index import WeightIndex
from adapt_engine.weights.loader import Loader
from adapt_engine.weights.parameters import expected_parameters
from adapt_engine.weights.shards import ShardPlan, check_cover, unshard

from .conftest import FAMILIES, WIDE

MODELS = (*FAMILIES, *WIDE)
Checkpoints = Callable[[str], Path]


def legal(spec: ModelSpec, most: int) -> Iterator[Layout]:
    """Every layout of at most ``most`` ranks that the model can take."""
    sizes = range(1, most + 1)
    for tp in sizes:
        for pp in sizes:
            for ep in sizes:
                for sp in (1, 2):
                    for etp in (1, 2, 3):
                        layout = Layout(tp, pp, ep, sp, 0, etp)
                        if layout.world > most:
                            continue
                        try:
                            check(spec, layout)
                        except EngineError:
                            continue
                        yield layout


def load(directory: Path, spec: ModelSpec, plan: ShardPlan) -> list[Loader]:
    loaders = []
    for rank in range(plan.mesh.layout.world):
        loader = Loader(WeightIndex.read(directory), spec, torch.bfloat16, 1, plan.pieces(rank))
        loader.load()
        loaders.append(loader)
    return loaders


@pytest.mark.requirement(13, 20)
@pytest.mark.parametrize("family", MODELS)
def test_unsharding_what_the_ranks_loaded_gives_the_checkpoint_bit_for_bit(
    family: str, checkpoints: Checkpoints
) -> None:
    """Every legal layout of up to 8 ranks; copies on replicas have equal hashes (unshard compares them too)."""
    directory = checkpoints(family)
    spec = spec_from_config(read_config(directory))
    whole = Loader(WeightIndex.read(directory), spec, torch.bfloat16)
    whole.load()
    # pp, sp, etp and edp act apart from each other: the plan is exhaustive, the reading need not be.
    layouts = [layout for index, layout in enumerate(legal(spec, 8)) if index % 7 == 0 or layout.world in (2, 3)]
    assert len(layouts) >= 3
    for layout in layouts:
        plan = ShardPlan(spec, Mesh(layout))
        loaders = load(directory, spec, plan)
        check_cover(spec, (loader.placed for loader in loaders))
        for parameter in expected_parameters(spec):
            holders = plan.holders(parameter)
            parts = [(part, loaders[rank].view(parameter.name)) for part, ranks in holders.items() for rank in ranks]
            assert torch.equal(unshard(parameter, parts), whole.view(parameter.name)), (str(layout), parameter.name)
            for ranks in holders.values():
                digests = {
                    hashlib.sha256(loaders[rank].view(parameter.name).contiguous().view(torch.uint8).numpy()).digest()
                    for rank in ranks
                }
                assert len(digests) == 1


@pytest.mark.requirement(12, 13)
@pytest.mark.parametrize("family", MODELS)
def test_every_element_is_on_a_rank_in_every_legal_layout(family: str, checkpoints: Checkpoints) -> None:
    """From the plan alone, and exactly as often as the layout has copies."""
    spec = spec_from_config(read_config(checkpoints(family)))
    for layout in legal(spec, 8):
        plan = ShardPlan(spec, Mesh(layout))
        placed = [{piece.parameter.name: piece.part for piece in plan.pieces(rank)} for rank in range(layout.world)]
        check_cover(spec, placed)
        for parameter in expected_parameters(spec):
            held = sum(part.numel for part, ranks in plan.holders(parameter).items() for _ in ranks)
            whole = parameter.shape[0] * (parameter.shape[1] if len(parameter.shape) > 1 else 1)
            stages = 2 if parameter.name == "embed" and spec.tied and layout.pp > 1 else 1
            copies = layout.block if parameter.expert < 0 else layout.edp * layout.etp
            if parameter.cut is not None:
                parts = layout.etp if parameter.expert >= 0 else layout.tp
                copies = copies // parts * max(1, parts // parameter.cut.units)
            assert held == whole * copies * stages, (str(layout), parameter.name)


def test_a_gap_and_a_differing_copy_are_named(checkpoints: Checkpoints) -> None:
    spec = spec_from_config(read_config(checkpoints("qwen3_moe_wide")))
    plan = ShardPlan(spec, Mesh(Layout.parse("tp2")))
    placed = [{piece.parameter.name: piece.part for piece in plan.pieces(rank)} for rank in range(2)]
    del placed[1]["layer.2.attn.q.weight"]
    with pytest.raises(EngineError, match=r"layer\.2\.attn\.q\.weight: no rank holds rows from 40 of 80"):
        check_cover(spec, placed)
    parameter = next(one for one in expected_parameters(spec) if one.name == "layer.0.attn.norm")
    part = next(iter(plan.holders(parameter)))
    first = torch.zeros(part.shape)
    with pytest.raises(EngineError, match=r"layer\.0\.attn\.norm: ranks hold different copies"):
        unshard(parameter, [(part, first), (part, first + 1)])
    with pytest.raises(EngineError, match="48 elements are on no rank"):
        unshard(parameter, [])


@pytest.mark.requirement(12)
def test_placement_of_experts_can_be_given(checkpoints: Checkpoints) -> None:
    directory = checkpoints("qwen3_moe_wide")
    spec = spec_from_config(read_config(directory))
    mesh = Mesh(Layout.parse("ep2"))
    placement = tuple(int(expert % 5 == 0) for expert in range(19))
    plan = ShardPlan(spec, mesh, placement)
    assert plan.experts_of(19, 1) == (0, 5, 10, 15)
    loaders = load(directory, spec, plan)
    check_cover(spec, (loader.placed for loader in loaders))
    assert loaders[1].parameters["layer.0.moe.experts.gate"].shape == (4, 27, 48)
    whole = Loader(WeightIndex.read(directory), spec, torch.bfloat16)
    whole.load()
    name = "layer.0.moe.experts.10.down"
    assert torch.equal(loaders[1].view(name), whole.view(name))
    with pytest.raises(EngineError, match="names 3 experts, the model's layers have 19"):
        ShardPlan(spec, mesh, (0, 1, 0))
    with pytest.raises(EngineError, match=r"uses ep ranks \[0\], the layout has 0..1"):
        ShardPlan(spec, mesh, (0,) * 19)


REFUSED = [
    ("qwen3_moe_wide", "tp3", "8 query heads do not divide by 3; nearest legal: tp2, tp4"),
    ("qwen3_moe", "tp3", "2 KV heads neither divide by 3 nor are held whole"),
    ("qwen3_moe_wide", "pp6", "5 layers cannot fill 6 stages; nearest legal: pp5"),
    ("qwen3_moe_wide", "ep32", "19 experts cannot fill 32 ranks; nearest legal: ep19"),
    ("llama", "ep2", "a dense model has no experts to spread; nearest legal: single"),
    ("llama", "etp2", "a dense model has no experts to spread"),
]


@pytest.mark.parametrize(("family", "layout", "message"), REFUSED)
def test_an_illegal_layout_is_refused_with_the_nearest_legal_one(
    family: str, layout: str, message: str, checkpoints: Checkpoints
) -> None:
    spec = spec_from_config(read_config(checkpoints(family)))
    with pytest.raises(EngineError) as caught:
        check(spec, Layout.parse(layout))
    assert str(caught.value).startswith(f"layout {layout}: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp0", "'tp0' is not an axis"),
        ("pp2.tp2", "'tp2' is not an axis"),
        ("tp2.tp2", "'tp2' is not an axis"),
        ("", "'' is not an axis"),
        ("tp2.ep3.dp1", "do not fold over the dp x sp x tp = 2 ranks of a stage; use dp3"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Layout.parse(text)


def test_layouts_are_spelt_as_the_plugin_spells_them() -> None:
    """Two grammars, one language: engine and judge may not import each other."""
    from pytest_adapt.layout import parse

    for text in ("single", "tp2.pp2.ep4", "tp8.ep16", "ep2.dp4", "ep2.dp2", "tp2.ep2.etp2", "sp4.dp3", "tp2.ep2.dp2"):
        theirs, ours = parse(text), Layout.parse(text)
        assert str(theirs) == str(ours)
        assert (theirs.world, theirs.dp, theirs.edp) == (ours.world, ours.dp, ours.edp)


def test_runs_are_contiguous_and_differ_by_one_at_most() -> None:
    for length in range(1, 30):
        for parts in range(1, length + 1):
            runs = [span(length, parts, index) for index in range(parts)]
            assert runs[0][0] == 0 and runs[-1][1] == length
            assert all(before[1] == after[0] for before, after in zip(runs, runs[1:], strict=False))
            assert {stop - start for start, stop in runs} <= {length // parts, length // parts + 1}
