"""Every layout equals one rank: logits, tokens, sites; and communicates exactly what arithmetic says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import Engine, EngineOptions, LayoutError, SequenceRequest, SequenceResult
from adapt_engine.comm import Traffic
from adapt_engine.config import MoESpec
from adapt_engine.families import read_config, spec_from_config
from adapt_engine.layout import Layout, check
from adapt_engine.mesh import Mesh
from adapt_engine.runtime.plan import StepPlan
from adapt_engine.runtime.requests import DTYPES
from adapt_engine.runtime.traffic import predict_traffic
from adapt_engine.weights.shards import ShardPlan

from .conftest import VOCAB

Checkpoints = Callable[[str], Path]

# Named by the requirements, and what else differs in kind: uneven splits, every axis at once, replicated KV heads.
LAYOUTS = (
    *("tp2", "tp3", "tp4", "tp8", "pp2", "pp3", "ep2", "ep4", "dp2", "sp2", "sp4"),
    *("tp2.pp2", "tp2.ep2", "ep2.dp4", "tp2.sp2", "tp2.pp2.ep2", "tp2.pp2.ep2.dp2", "tp2.ep2.etp2", "tp8.ep16"),
    *("pp5", "ep3", "ep7", "dp3", "sp3", "etp2", "etp3", "ep2.etp3", "sp2.dp2", "ep2.sp2", "ep4.sp2", "pp2.ep2"),
    *("pp2.sp2", "pp3.dp2", "tp4.ep8", "tp4.sp2", "tp2.pp2.sp2", "tp2.ep4.sp2", "tp2.pp2.ep3.sp2", "pp2.ep2.sp2.etp2"),
)
MODELS = {"gqa": ("qwen3_moe_wide", "qwen3_moe_three"), "mla": ("deepseek_v3_wide",)}


def prompts() -> list[tuple[int, ...]]:
    """Lengths on both sides of page borders; one shorter than a page, so that some sp ranks have none of it."""
    torch.manual_seed(5)
    return [tuple(torch.randint(0, VOCAB, (length,)).tolist()) for length in (70, 33, 5, 48)]


def answers(engine: Engine, **request: Any) -> dict[str, SequenceResult]:
    requests = [
        SequenceRequest(str(index), tokens, max_new_tokens=6, want_logits=True, **request)
        for index, tokens in enumerate(prompts())
    ]
    found = {result.id: result for result in engine.run(requests)}
    assert all(result.error is None for result in found.values())
    return found


@pytest.fixture(scope="module")
def fitting(checkpoints: Checkpoints) -> Callable[[str, str], str]:
    """``fitting(kind, layout)``: the first model of that attention kind that can be laid out so."""

    def get(kind: str, layout: str) -> str:
        for family in MODELS[kind]:
            try:
                check(spec_from_config(read_config(checkpoints(family))), Layout.parse(layout))
            except LayoutError:
                continue
            return family
        raise AssertionError(f"no {kind} model takes {layout}")

    return get


@pytest.fixture(scope="module")
def alone(checkpoints: Checkpoints) -> Callable[..., dict[str, SequenceResult]]:
    """``alone(family, precision)``: one rank's answers."""
    kept: dict[tuple[str, str], dict[str, SequenceResult]] = {}

    def get(family: str, precision: str = "fp32") -> dict[str, SequenceResult]:
        if (family, precision) not in kept:
            options = EngineOptions(precision=precision, max_context=128, taps=("*",))
            with Engine.open(checkpoints(family), options) as engine:
                kept[family, precision] = answers(engine)
        return kept[family, precision]

    return get


@pytest.fixture(scope="module")
def rounding(official: Callable[[str, torch.dtype], torch.Tensor]) -> Callable[[str], float]:
    """``rounding(family)``: how far two correct float32 evaluations may lie apart, as in test_invariance."""
    kept: dict[str, float] = {}

    def get(family: str) -> float:
        if family not in kept:
            gap = official(family, torch.float32) - official(family, torch.float64)
            kept[family] = 4 * float(gap.abs().max())
        return kept[family]

    return get


@pytest.mark.requirement(34, 35, 36, 37, 38, 39)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_layout_equals_one_rank(
    kind: str, layout: str, checkpoints: Checkpoints, fitting: Any, alone: Any, rounding: Any
) -> None:
    """A batch of unequal prompts, prefill then decode, every site: same shapes, same values within float32."""
    family = fitting(kind, layout)
    options = EngineOptions(max_context=128, taps=("*",), layout=layout, micro_batches=2)
    with Engine.open(checkpoints(family), options) as engine:
        found = answers(engine)
        assert engine.drifts == []
        engine.check_integrity()
    assert str(engine.layout) == layout
    for name, expected in alone(family).items():
        assert found[name].tokens == expected.tokens
        assert set(found[name].taps) == set(expected.taps)
        assert float((found[name].logits - expected.logits).abs().max()) <= rounding(family)
        for site, rows in expected.taps.items():
            assert found[name].taps[site].shape == rows.shape, site
            if site.endswith("router.ids"):
                assert torch.equal(found[name].taps[site], rows), site


@pytest.mark.requirement(39, 75)
@pytest.mark.parametrize("layout", ["tp2", "sp2", "sp3", "tp2.pp2.ep2.dp2", "ep2.sp2", "tp2.sp2"])
@pytest.mark.parametrize("kind", MODELS)
def test_chunked_prefill_on_a_layout_equals_one_rank(
    kind: str, layout: str, checkpoints: Checkpoints, fitting: Any, alone: Any, rounding: Any
) -> None:
    """Chunks of 7 and pages of 5 share no border; with a prefix cache a second run starts from cached pages."""
    family = fitting(kind, layout)
    options = EngineOptions(max_context=128, layout=layout, prefill_chunk=7, page_size=5, prefix_cache=True)
    with Engine.open(checkpoints(family), options) as engine:
        for turn in range(2):
            found = answers(engine, first_row=40 * turn)
            for name, expected in alone(family).items():
                assert found[name].tokens == expected.tokens
                # An answer shorter than 40 rows keeps those from 40 on only: none.
                gap = found[name].logits - expected.logits[40 * turn :]
                assert not gap.numel() or float(gap.abs().max()) <= rounding(family)
        assert engine.stats()["prefix_hit_tokens"] > 0


@pytest.mark.requirement(39)
@pytest.mark.parametrize("layout", ["tp4", "pp3", "ep4", "sp2", "tp2.pp2.ep2.dp2", "tp2.ep2.etp2"])
@pytest.mark.parametrize("kind", MODELS)
def test_half_precision_on_a_layout_rounds_no_more_than_on_one_rank(
    kind: str, layout: str, checkpoints: Checkpoints, fitting: Any, alone: Any
) -> None:
    """Median over rows of the distance to float32: flips of the router at near ties do not decide it."""
    family = fitting(kind, layout)
    options = EngineOptions(precision="bf16", max_context=128, layout=layout)
    with Engine.open(checkpoints(family), options) as engine:
        found = answers(engine)

    def error(given: dict[str, SequenceResult]) -> float:
        rows = [
            (given[name].logits[: len(tokens)] - alone(family)[name].logits[: len(tokens)]).square().mean(-1).sqrt()
            for name, tokens in zip("0123", prompts(), strict=True)
        ]
        return float(torch.cat(rows).median())

    # 156 rows: the median has a sampling error of about 1.25 / sqrt(156) = 10 % on either side.
    assert error(found) <= 1.2 * error(alone(family, "bf16"))


def routing_of(
    engine: Engine, plans: list[StepPlan], found: dict[str, SequenceResult]
) -> list[dict[int, list[torch.Tensor]]]:
    """Expert ids of every step, by layer and replica, from what the tapped results say of each sequence."""
    by_beginning = {tokens[:5]: found[str(index)] for index, tokens in enumerate(prompts())}
    layers = {index: layer.ffn for index, layer in enumerate(engine.spec.layers) if isinstance(layer.ffn, MoESpec)}
    serving: dict[tuple[int, int], SequenceResult] = {}
    steps = []
    for plan in plans:
        chosen: dict[int, list[torch.Tensor]] = {index: [] for index in layers}
        for dp, sequences in enumerate(plan.replicas):
            for sequence in sequences:
                if sequence.first == 0:
                    serving[dp, int(sequence.slots[0])] = by_beginning[sequence.ids[:5]]
            for index, ffn in layers.items():
                parts = [
                    serving[dp, int(one.slots[0])].taps[f"layer.{index}.moe.router.ids"][one.first : one.last]
                    for one in sequences
                ]
                chosen[index].append(torch.cat([torch.empty((0, ffn.top_k), dtype=torch.int64), *parts]))
        steps.append(chosen)
    return steps


Calls = list[dict[tuple[str, str], tuple[int, int]]]
"""For each rank, (op, axis) -> calls and bytes sent."""


def traffic_of(engine: Engine, element: int, **mode: bool) -> tuple[Calls, Calls]:
    """What the ranks sent over a run of prefill and decode, and what was predicted of each of its steps; experts given
    the recorded routing. ``mode``: further arguments of `predict_traffic`."""
    plans: list[StepPlan] = []
    step = engine.executor.step

    def recorded(plan: StepPlan) -> Any:
        plans.append(plan)
        return step(plan)

    engine.executor.step = recorded  # type: ignore[method-assign]
    found = answers(engine)
    expected: list[dict[tuple[str, str], Traffic]] = [{} for _ in engine.traffic()]
    for plan, routing in zip(plans, routing_of(engine, plans, found), strict=True):
        predicted = predict_traffic(engine.spec, engine.layout, plan, routing, element=element, **mode)
        for sums, rank in zip(expected, predicted, strict=True):
            for key, traffic in rank.items():
                sums[key] = sums.get(key, Traffic()) + traffic
    both = (
        [{key: (one.calls, one.sent) for key, one in rank.items()} for rank in ranks]
        for ranks in (engine.traffic(), expected)
    )
    measured, foretold = both
    return measured, foretold


@pytest.mark.requirement(19, 45)
@pytest.mark.parametrize(
    ("layout", "precision"), [*((one, "fp32") for one in LAYOUTS), ("tp2.ep2.etp2", "bf16"), ("tp2.pp2.sp2", "bf16")]
)
@pytest.mark.parametrize("kind", MODELS)
def test_calls_and_bytes_equal_the_analytic_prediction(
    kind: str, layout: str, precision: str, checkpoints: Checkpoints, fitting: Any
) -> None:
    """For every rank, op and group, over a whole run of prefill and decode; experts given the recorded routing."""
    family = fitting(kind, layout)
    options = EngineOptions(
        precision=precision, max_context=128, layout=layout, micro_batches=2, taps=("layer.*.moe.router.ids",)
    )
    with Engine.open(checkpoints(family), options) as engine:
        measured, expected = traffic_of(engine, DTYPES[precision].itemsize)
        share = engine.stats()["comm_share"]
    assert measured == expected
    assert (sum(sent for rank in measured for _, sent in rank.values()) > 0) == (layout not in ("dp2", "dp3"))
    assert (0 < share < 1) == (layout not in ("dp2", "dp3"))


@pytest.mark.requirement(23)
@pytest.mark.parametrize("layout", ["single", "tp2", "tp8", "pp2", "ep4", "sp2", "tp2.ep2.etp2"])
@pytest.mark.parametrize("kind", MODELS)
def test_memory_of_every_rank_is_what_its_plan_says(
    kind: str, layout: str, checkpoints: Checkpoints, fitting: Any
) -> None:
    family = fitting(kind, layout)
    options = EngineOptions(precision="bf16", max_context=128, kv_tokens=256, layout=layout)
    with Engine.open(checkpoints(family), options) as engine:
        plan = ShardPlan(engine.spec, Mesh(engine.layout))
        for rank in engine.memory():
            weights = sum(piece.part.numel * (4 if piece.parameter.fp32 else 2) for piece in plan.pieces(rank.rank))
            assert rank.weights == weights
            per_token = 0
            for index in plan.layers(plan.mesh.places[rank.rank].pp):
                attention = engine.spec.layers[index].attention
                width = attention.head_dim + attention.value_dim
                if attention.kind == "mla":
                    per_token += attention.kv_lora + attention.rope_dim
                else:
                    per_token += max(1, attention.kv_heads // engine.layout.tp) * width
            assert rank.kv == per_token * 2 * 256 // engine.layout.sp
        assert engine.stats()["kv_bytes"] == sum(rank.kv for rank in engine.memory())


@pytest.mark.requirement(36)
def test_empty_and_overloaded_experts_are_served(checkpoints: Checkpoints) -> None:
    """All rows choose the same three experts, which lie on one rank: others get nothing, one gets everything."""
    prompt = prompts()[0]

    def skewed(call: Any) -> Any:
        def route(logits: torch.Tensor, bias: Any, spec: MoESpec) -> Any:
            return call(logits - 100 * (torch.arange(spec.experts) >= spec.top_k), bias, spec)

        return route

    found = {}
    for layout in ("single", "ep4", "tp2.ep2.etp2"):
        with Engine.open(checkpoints("qwen3_moe_wide"), EngineOptions(max_context=128, layout=layout)) as engine:
            for registry in engine.executor.registries:
                registry.wrap("route", skewed)
            (found[layout],) = engine.run([SequenceRequest("a", prompt, max_new_tokens=4, want_logits=True)])
    for layout in ("ep4", "tp2.ep2.etp2"):
        assert found[layout].tokens == found["single"].tokens
        assert torch.allclose(found[layout].logits, found["single"].logits, rtol=0, atol=1e-4)


@pytest.mark.requirement(12, 36)
def test_experts_may_lie_anywhere(checkpoints: Checkpoints, alone: Any, rounding: Any) -> None:
    """Scattered and uneven: one rank holds four of nineteen."""
    placement = tuple(int(expert % 5 == 0) for expert in range(19))
    options = EngineOptions(max_context=128, layout="ep2", placement=placement, taps=("layer.*.moe.experts.act",))
    with Engine.open(checkpoints("qwen3_moe_wide"), options) as engine:
        found = answers(engine)
    for name, expected in alone("qwen3_moe_wide").items():
        assert float((found[name].logits - expected.logits).abs().max()) <= rounding("qwen3_moe_wide")
        site = "layer.0.moe.experts.act"
        eps = torch.finfo(torch.float32).eps
        size = expected.taps[site].abs().max()
        assert float((found[name].taps[site] - expected.taps[site]).abs().max()) <= 100 * eps * size


@pytest.mark.requirement(37)
def test_requests_are_spread_over_replicas(checkpoints: Checkpoints) -> None:
    with Engine.open(
        checkpoints("qwen3_moe_wide"), EngineOptions(max_context=128, layout="dp2", max_batch=1)
    ) as engine:
        served = []
        original = [replica.scheduler.submit for replica in engine.replicas]
        for index, replica in enumerate(engine.replicas):

            def submit(request: SequenceRequest, index: int = index) -> None:
                served.append(index)
                original[index](request)

            replica.scheduler.submit = submit  # type: ignore[method-assign]
        answers(engine)
        assert sorted(served) == [0, 0, 1, 1]
        assert engine.stats()["steps"] < 4 * 6


@pytest.mark.requirement(39)
def test_copies_that_differ_are_named(checkpoints: Checkpoints) -> None:
    """One tp rank rounds its residual differently: the site, both ranks and the size are reported with the result."""
    options = EngineOptions(max_context=128, layout="tp2.pp2", taps=("layer.*.residual", "layer.*.attn.k_rope"))
    with Engine.open(checkpoints("qwen3_moe_wide"), options) as engine:

        def nudge(call: Any) -> Any:
            def add(residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
                out = call(residual, x)
                return out + 1e-3 if engine.executor.running == (1, 2) else out

            return add

        assert all(not result.drift for result in answers(engine).values())
        for registry in engine.executor.registries:
            registry.wrap("add", nudge)
        found = answers(engine)
        assert "layer.2.attn.residual differs between rank 0 (pp0 tp0) and rank 1 (pp0 tp1)" in found["0"].drift[0]
        assert engine.stats()["drifts"] == len(engine.drifts)


@pytest.mark.requirement(35)
def test_the_pipeline_bubble_shrinks_as_predicted_with_micro_batches(checkpoints: Checkpoints) -> None:
    """Without other waiting, P stages and M equal micro-batches idle (P - 1) / (M + P - 1) of the time.

    Stages of real layers are not equal: each is made to cost the same, by 20 ms of work after it has received.
    """

    def work() -> None:
        start = time.thread_time()
        while time.thread_time() < start + 0.02:
            pass

    for stages, parts in ((2, 1), (2, 4), (4, 2), (4, 4)):
        options = EngineOptions(max_context=32, layout=f"pp{stages}", micro_batches=parts)
        with Engine.open(checkpoints("qwen3_moe_wide"), options) as engine:
            for worker in engine.executor.workers:
                forward = worker.transformer.forward

                def slow(step: Any, forward: Any = forward, worker: Any = worker) -> Any:
                    receive = worker.parallel.receive

                    def paused(*given: Any) -> Any:
                        value = receive(*given)
                        work()
                        return value

                    worker.parallel.receive = paused
                    if worker.parallel.first_stage:
                        work()
                    try:
                        return forward(step)
                    finally:
                        worker.parallel.receive = receive

                worker.transformer.forward = slow
            requests = [SequenceRequest(str(index), (1, 2, 3)) for index in range(parts)]
            assert len(list(engine.run(requests))) == parts
            predicted = (stages - 1) / (parts + stages - 1)
            # Computing a few rows takes some milliseconds more, unevenly.
            assert engine.executor.bubble() == pytest.approx(predicted, abs=0.12)
