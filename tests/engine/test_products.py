"""Packed products, fused experts and the native router: against float64, against their twins, and against themselves.

Budgets are those of the arithmetic: a float32 sum of n products in any order is within n u |x| |w| of the exact one
(Higham 2002, 3.1), and each rounding adds half a unit in the last place. What is promised bit for bit is compared so.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adapt_engine.comm import Tree
from adapt_engine.config import MoESpec
from adapt_engine.kernels import KernelRegistry, native, reference
from adapt_engine.kernels.packed import PackedMatrix, segment_of
from adapt_engine.profile import Shape, profile_kernels
from adapt_engine.weights.parameters import Axis, ParameterSpec
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_kernels import BUILT, DTYPES, rounding_unit, spacing, spread

pytestmark = pytest.mark.skipif(not BUILT, reason="adapt_engine._native is not built: pip install ./engine")
LEVELS = tuple(native.load().supported_isas()) if BUILT else ()
SHAPES = [(1, 1, 1), (1, 577, 3), (3, 48, 97), (7, 33, 64), (13, 200, 130), (6, 64, 17), (2, 5, 200), (1, 1024, 320)]
"""Rows, depth, columns: one column to several panels, tails of every group, one tile and several."""


@pytest.fixture(params=LEVELS)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], Any]:
    """``ops(dtype)``: native ops of one instruction set."""
    monkeypatch.setenv(native.ISA_VARIABLE, request.param)
    offers = reference.offers() + native.offers()
    return lambda dtype: KernelRegistry(offers, dtype, "fast").ops


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """``threads(n)``: native threads until the test ends."""
    module = native.load()
    before = module.threads()
    yield module.set_threads
    module.set_threads(before)


def packed(weight: torch.Tensor, segment: int = 512, **settings: Any) -> PackedMatrix:
    return PackedMatrix(native.load(), weight, segment, **settings)


@pytest.mark.requirement(51, 57)
@pytest.mark.parametrize("segment", [512, 14, 1])
@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_as_exact_as_its_sums(
    ops: Callable[[torch.dtype], Any], dtype: torch.dtype, layout: str, segment: int
) -> None:
    torch.manual_seed(0)
    for rows, depth, columns in SHAPES:
        x, weight = spread(layout, rows, depth, dtype), spread(layout, columns, depth, dtype)
        bias = torch.randn(columns).to(dtype)
        matrix = packed(weight, segment)
        exact = x.double() @ weight.double().T + bias.double()
        size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        sums = (depth + 2) * rounding_unit(torch.float32) * size
        got = ops(dtype).linear(x, matrix, bias)
        assert got.dtype == dtype and got.shape == exact.shape
        allowed = sums + rounding_unit(dtype) * exact.abs() * 1.001 + spacing(dtype)
        assert bool(((got.double() - exact).abs() <= allowed).all()), (rows, depth, columns)
        part = ops(dtype).linear_partial(x, matrix, None)
        assert part.dtype == torch.float32
        assert bool(((part.double() + bias.double() - exact).abs() <= sums).all()), (rows, depth, columns)


@pytest.mark.requirement(51, 57)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_to_compute_gives_empty_results(ops: Callable[[torch.dtype], Any], dtype: torch.dtype) -> None:
    weight = torch.randn(70, 20).to(dtype)
    assert ops(dtype).linear(torch.empty(0, 20, dtype=dtype), packed(weight), None).shape == (0, 70)
    nobody, ids = torch.empty(0, 20, dtype=dtype), torch.empty((0, 2), dtype=torch.int64)
    stack = torch.randn(3, 8, 20).to(dtype), torch.randn(3, 8, 20).to(dtype), torch.randn(3, 20, 8).to(dtype)
    assert ops(dtype).experts(nobody, ids, torch.empty(0, 2), *stack, None).shape == (0, 20)
    assert ops(dtype).expert_rows(nobody, ids[:, 0], *stack, False, None).shape == (0, 20)


@pytest.mark.requirement(46, 51)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company_on_any_number_of_threads(
    ops: Callable[[torch.dtype], Any], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(23, 150).to(dtype), torch.randn(330, 150).to(dtype)
    matrix = packed(weight, 64)
    threads(1)
    together = ops(dtype).linear(x, matrix, None)
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(ops(dtype).linear(x, matrix, None), together)
        for size in (1, 2, 5, 7):
            parts = [ops(dtype).linear(part, matrix, None) for part in x.split(size)]
            assert torch.equal(torch.cat(parts), together), (count, size)
    # Columns: a rank's share of the outputs.
    cut = ops(dtype).linear(x, packed(weight[101:], 64), None)
    assert torch.equal(cut, together[:, 101:])


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Balanced, split at the largest power of two below the number of parts."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return tree(parts[:half]) + tree(parts[half:])


@pytest.mark.requirement(46, 51)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("segment", "count", "last"), [(14, 9, 14), (64, 8, 64), (7, 6, 3), (33, 13, 1), (8, 1, 5)])
def test_segments_add_up_along_the_canonical_tree(
    ops: Callable[[torch.dtype], Any], dtype: torch.dtype, segment: int, count: int, last: int
) -> None:
    """Whole subtrees that a rank computes alone, added along the same tree, are the whole product bit for bit."""
    torch.manual_seed(2)
    depth = (count - 1) * segment + last
    x, weight = torch.randn(5, depth).to(dtype), torch.randn(70, depth).to(dtype)
    whole = ops(dtype).linear_partial(x, packed(weight, segment), None)
    borders = range(0, depth, segment)

    def share(first: int, stop: int) -> torch.Tensor:
        cut = slice(first * segment, min(depth, stop * segment))
        return torch.as_tensor(ops(dtype).linear_partial(x[:, cut], packed(weight[:, cut], segment), None))

    assert torch.equal(whole, tree([share(index, index + 1) for index in range(len(borders))]))
    half = 1 << max(0, (count - 1).bit_length() - 1)
    if count > 1:
        assert torch.equal(whole, share(0, half) + share(half, count))


@pytest.mark.requirement(46, 51)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("segment", "borders"), [(14, (0, 42, 98, 126)), (7, (0, 7, 14, 38)), (8, (0, 24, 40))])
def test_shares_of_a_product_are_the_whole_product(
    ops: Callable[[torch.dtype], Any], dtype: torch.dtype, quantised: bool, segment: int, borders: tuple[int, ...]
) -> None:
    """Ranks that know the magnitudes of whole rows add their sums along the tree, finish, and have all bits."""
    torch.manual_seed(4)
    depth, own = borders[-1], ops(dtype)
    x, weight, bias = torch.randn(9, depth).to(dtype), torch.randn(130, depth).to(dtype), torch.randn(130).to(dtype)
    whole = own.linear(x, packed(weight, segment, quantised=quantised), bias)
    order = Tree(segment, borders)
    rows, columns = x.abs().amax(-1).float(), weight.abs().amax(-1).float()
    sums: dict[tuple[int, int], torch.Tensor] = {}
    for first, stop, nodes, ranges in zip(borders, borders[1:], order.nodes, order.ranges, strict=False):
        matrix = packed(weight[:, first:stop], segment, quantised=quantised, largest=columns if quantised else None)
        sums |= zip(nodes, own.linear_sums(x[:, first:stop], matrix, ranges, rows), strict=True)
    assert torch.equal(own.linear_finish(order.add(sums), matrix, bias, rows, dtype), whole)


@pytest.mark.requirement(46)
@given(ends=st.lists(st.integers(1, 9), min_size=1, max_size=6), last=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_nodes_are_the_largest_whole_subtrees(ends: list[int], last: int) -> None:
    """They cover each member's run, no two of them could be one, and all of them add up to the canonical tree."""
    edges = [0, *itertools.accumulate(ends)]
    order = Tree(4, (*(4 * edge for edge in edges[:-1]), 4 * (edges[-1] - 1) + last))
    leaves = [torch.randn(3) for _ in range(edges[-1])]
    for (first, stop), nodes in zip(itertools.pairwise(edges), order.nodes, strict=True):
        assert [one for node in nodes for one in range(*node)] == list(range(first, stop))
        assert len(nodes) <= 2 * (stop - first).bit_length()
    sums = {node: tree(leaves[slice(*node)]) for nodes in order.nodes for node in nodes}
    assert torch.equal(order.add(sums), tree(leaves))


def test_a_border_within_a_segment_is_refused() -> None:
    for borders in ((0, 6, 16), (4, 8), (0, 8, 8, 16)):
        with pytest.raises(ValueError, match="do not cut depth into runs of whole segments of 4"):
            Tree(4, borders)
    matrix = packed(torch.randn(5, 20), 8)
    for given_ranges in ([[0, 4]], [[4, 16]], [[0, 21]], [[8, 8]]):
        with pytest.raises(ValueError, match="ranges"):
            matrix.module.linear_sums(
                torch.randn(2, 20), matrix.handle, 0, torch.tensor(given_ranges), None, torch.empty(2, 5), 2
            )


@pytest.mark.requirement(51)
@pytest.mark.skipif("avx512" not in LEVELS, reason="this CPU has no AVX-512")
@pytest.mark.parametrize("quantised", [False, True])
def test_instruction_sets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, quantised: bool) -> None:
    """A product of two bfloat16 is exact in float32, and so are integers: nothing is left open."""
    torch.manual_seed(3)
    x, weight = torch.randn(9, 203).bfloat16(), torch.randn(150, 203).bfloat16()
    matrix = packed(weight, 50, quantised=quantised)
    found = []
    for level in LEVELS:
        monkeypatch.setenv(native.ISA_VARIABLE, level)
        registry = KernelRegistry(reference.offers() + native.offers(), torch.bfloat16, "fast")
        found.append(registry.ops.linear_partial(x, matrix, None))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.requirement(51, 66)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_the_product_of_what_was_rounded(ops: Callable[[torch.dtype], Any], dtype: torch.dtype) -> None:
    """Against integers in float64: per column and per row the largest magnitude is 127, ties round to even."""
    torch.manual_seed(4)
    for rows, depth, columns in SHAPES:
        x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
        matrix = packed(weight, 60, quantised=True)
        # torch computes 127 / x as a product with the reciprocal, which rounds twice.
        most, top = weight.float().abs().amax(1), x.float().abs().amax(1)
        scale, whole = most / 127, (weight.float() * torch.full_like(most, 127).div(most)[:, None]).round()
        assert torch.equal(matrix.dense(), (whole * scale[:, None]).to(dtype))
        steps = (x.float() * torch.full_like(top, 127).div(top)[:, None]).round()
        exact = (steps.double() @ whole.double().T) * (top / 127).double()[:, None] * scale.double()
        size = (steps.double().abs() @ whole.double().abs().T) * (top / 127).double()[:, None] * scale.double()
        got = ops(dtype).linear_partial(x, matrix, None)
        # Integers are exact in float32 up to 2^24; the tree and the two scales round.
        unit = rounding_unit(torch.float32)
        assert bool(((got.double() - exact).abs() <= 4 * unit * exact.abs() + 4 * unit * size).all()), (rows, depth)


@pytest.mark.requirement(51)
def test_int8_hides_no_bad_value_and_survives_zeros(ops: Callable[[torch.dtype], Any]) -> None:
    x = torch.ones(4, 37)
    x[1], x[2, 36], x[3, 0] = 0, torch.nan, torch.inf
    weight = torch.randn(20, 37)
    weight[5] = 0
    got = ops(torch.float32).linear(x, packed(weight, quantised=True), None)
    assert bool(torch.isfinite(got[:2]).all()) and not bool(got[1].any()) and not bool(got[:2, 5].any())
    assert bool(got[2:].isnan().all())


@pytest.mark.requirement(51)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_matrix_is_the_matrix_and_takes_its_bytes(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    for shape in ((1, 1), (97, 33), (64, 512), (3, 70, 13)):
        weight = torch.randn(shape).to(dtype)
        for segment in (512, 5):
            matrix = packed(weight, segment)
            assert matrix.storage.nbytes == weight.nbytes and matrix.shape == weight.shape
            for index in range(shape[0] if len(shape) == 3 else 1):
                one, plain = (matrix[index], weight[index]) if len(shape) == 3 else (matrix, weight)
                ids = torch.arange(len(plain)).flip(0)
                assert torch.equal(one.dense(), plain) and torch.equal(one.rows(ids), plain[ids])
                assert (matrix.nbytes, one.nbytes) == (weight.nbytes, plain.nbytes)
            small = packed(weight, segment, quantised=True)
            assert (
                small.nbytes
                == small.storage.nbytes + small.scales.nbytes
                == weight.numel() + 4 * weight[..., 0].numel()
            )
    with pytest.raises(IndexError):
        packed(torch.ones(3, 4)).rows(torch.tensor([3]))
    with pytest.raises(IndexError, match="no matrix 3"):
        packed(torch.ones(3, 4, 5))[3]


def test_whoever_treats_a_packed_matrix_as_a_tensor_gets_one() -> None:
    torch.manual_seed(5)
    weight, stack = torch.randn(7, 12), torch.randn(3, 7, 12)
    assert torch.equal(packed(weight).roll(1, 0), weight.roll(1, 0))
    assert torch.equal(torch.cat((packed(weight), weight)), torch.cat((weight, weight)))
    assert torch.equal(packed(stack)[[2, 0]], stack[[2, 0]])
    assert torch.equal(packed(stack)[1:], stack[1:])
    assert not hasattr(packed(weight), "nothing_of_the_kind")


def test_segments_follow_what_layouts_cut() -> None:
    def segment(shape: tuple[int, ...], cut: Axis | None, dimension: int) -> int:
        return segment_of(ParameterSpec("a", shape, "a", "a", cut, dimension))

    assert segment((64, 1024), None, 0) == 512
    assert segment((64, 1024), Axis("heads", 16), 0) == 512
    assert segment((1024, 1024), Axis("heads", 16), 1) == 64
    assert segment((48, 84), Axis("heads", 6), 1) == 14
    assert segment((1024, 512), Axis("expert_inter", 512), 1) == 64
    assert segment((48, 72), Axis("inter", 72), 1) == 16
    assert segment((48, 28), Axis("inter", 28), 1) == 8


def experts_of(dtype: torch.dtype, experts: int, hidden: int, inter: int) -> tuple[torch.Tensor, ...]:
    gate, up = (0.3 * torch.randn(experts, inter, hidden) for _ in range(2))
    return gate.to(dtype), up.to(dtype), (0.3 * torch.randn(experts, hidden, inter)).to(dtype)


def choices(rows: int, slots: int, experts: int) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:slots].sort().values for _ in range(rows)])


@pytest.mark.requirement(54)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "slots", "experts"), [(1, 2, 5), (9, 3, 4), (40, 2, 3), (3, 1, 20), (17, 4, 4)])
def test_fused_experts_have_the_bits_of_the_single_ops(
    ops: Callable[[torch.dtype], Any],
    dtype: torch.dtype,
    rows: int,
    slots: int,
    experts: int,
    threads: Callable[[int], None],
) -> None:
    """With and without a tap, on one thread and several; and each site once, in logical shape."""
    torch.manual_seed(6)
    hidden, inter = 77, 70
    x, ids, weights = torch.randn(rows, hidden).to(dtype), choices(rows, slots, experts), torch.rand(rows, slots)
    stacks = [packed(one, 16) for one in experts_of(dtype, experts, hidden, inter)]
    seen: dict[str, torch.Tensor] = {}
    apart = ops(dtype).experts(x, ids, weights, *stacks, seen.__setitem__)
    assert {name: tuple(value.shape) for name, value in seen.items()} == {
        "moe.experts.gate": (rows, slots, inter),
        "moe.experts.up": (rows, slots, inter),
        "moe.experts.act": (rows, slots, inter),
        "moe.experts.down": (rows, slots, hidden),
    }
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(ops(dtype).experts(x, ids, weights, *stacks, None), apart), count
        sent = x.repeat_interleave(slots, 0)
        alone = ops(dtype).expert_rows(sent, ids.reshape(-1), *stacks, False, None)
        assert torch.equal(alone, seen["moe.experts.down"].reshape(-1, hidden)), count
    partial = ops(dtype).expert_rows(sent, ids.reshape(-1), *stacks, True, None)
    assert partial.dtype == torch.float32 and torch.equal(partial.to(dtype), alone)


@pytest.mark.requirement(54)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_experts_are_within_rounding_of_the_twin(ops: Callable[[torch.dtype], Any], dtype: torch.dtype) -> None:
    """No further from float64 than twice the reference is, over all rows."""
    torch.manual_seed(7)
    hidden, inter, experts = 96, 65, 6
    x, ids, weights = torch.randn(50, hidden).to(dtype), choices(50, 3, experts), torch.rand(50, 3)
    stacks = experts_of(dtype, experts, hidden, inter)
    plain = KernelRegistry(reference.offers(), dtype, "fast").ops
    exact = torch.zeros(50, hidden, dtype=torch.float64)
    for row in range(50):
        for slot in range(3):
            gate, up, down = (one[ids[row, slot]].double() for one in stacks)
            act = torch.nn.functional.silu(gate @ x[row].double()) * (up @ x[row].double())
            exact[row] += weights[row, slot].double() * (down @ act)
    twin = (plain.experts(x, ids, weights, *stacks, None).double() - exact).square().mean().sqrt()
    mine = (ops(dtype).experts(x, ids, weights, *stacks, None).double() - exact).square().mean().sqrt()
    assert mine <= 2 * twin


@pytest.mark.requirement(54)
def test_a_row_of_the_experts_does_not_depend_on_its_neighbours(ops: Callable[[torch.dtype], Any]) -> None:
    torch.manual_seed(8)
    x, ids, weights = torch.randn(19, 40).bfloat16(), choices(19, 2, 5), torch.rand(19, 2)
    for quantised in (False, True):
        stacks = [packed(one, quantised=quantised) for one in experts_of(torch.bfloat16, 5, 40, 33)]
        together = ops(torch.bfloat16).experts(x, ids, weights, *stacks, None)
        for row in range(19):
            one = slice(row, row + 1)
            assert torch.equal(
                ops(torch.bfloat16).experts(x[one], ids[one], weights[one], *stacks, None)[0], together[row]
            )


@pytest.mark.parametrize("part", ["linear", "swiglu", "combine"])
def test_fused_experts_give_way_to_a_wrapped_part(part: str) -> None:
    """Whoever wraps an op sees every call of it, and is heard."""
    torch.manual_seed(9)
    registry = KernelRegistry(reference.offers() + native.offers(), torch.float32, "fast")
    fused = registry.names()["experts"]
    x, ids, weights = torch.randn(4, 24), choices(4, 2, 3), torch.rand(4, 2)
    stacks = [packed(one) for one in experts_of(torch.float32, 3, 24, 16)]
    before = registry.ops.experts(x, ids, weights, *stacks, None)
    calls = []

    def wrapper(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            calls.append(part)
            return call(*arguments) * 2

        return counted

    with registry.wrap(part, wrapper):
        assert registry.names()["experts"] != fused
        assert not torch.equal(registry.ops.experts(x, ids, weights, *stacks, None), before) and calls
    assert registry.names()["experts"] == fused
    assert torch.equal(registry.ops.experts(x, ids, weights, *stacks, None), before)


@pytest.mark.requirement(54)
@pytest.mark.parametrize("bias", [None, 7.0, -7.0])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_the_native_router_is_the_reference_one(
    ops: Callable[[torch.dtype], Any], score: str, groups: tuple[int, int], bias: float | None, renormalise: bool
) -> None:
    """Scores to a few units (exponential, sum, quotient); choices equal wherever those cannot change them."""
    torch.manual_seed(10)
    spec = MoESpec(36, 5, 8, score, renormalise, bias is not None, groups[0], groups[1], routed_scale=2.5)
    logits = 3 * torch.randn(70, 36)
    shift = None if bias is None else bias + 0.12 * torch.randn(36)
    got, twin = ops(torch.float32).route(logits, shift, spec), reference.route(logits, shift, spec)
    eps = torch.finfo(torch.float32).eps
    assert bool(((got.scores - twin.scores).abs() <= 8 * eps * twin.scores).all())
    assert bool(((got.selection - twin.selection).abs() <= 8 * eps * twin.selection.abs()).all())
    assert torch.equal(got.ids, twin.ids) and got.ids.dtype == torch.int64
    assert bool(((got.weights - twin.weights).abs() <= 16 * eps * twin.weights).all())


@pytest.mark.requirement(54)
@pytest.mark.parametrize("experts", [5, 6, 17, 64])
def test_native_ties_go_to_the_lowest_id_and_nan_is_last(ops: Callable[[torch.dtype], Any], experts: int) -> None:
    spec = MoESpec(experts, 4, 8, "sigmoid", False)
    logits = torch.randint(-1, 2, (60, experts)).float()
    logits[::3, 1] = torch.nan
    found = ops(torch.float32).route(logits, None, spec)
    assert torch.equal(found.ids, reference.route(logits, None, spec).ids)
    broken = torch.full((1, experts), torch.nan)
    assert ops(torch.float32).route(broken, None, spec).ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.requirement(57)
def test_a_mismatch_is_refused_with_its_name() -> None:
    module = native.load()
    matrix = packed(torch.ones(6, 4))
    stack = packed(torch.ones(2, 8, 4)), packed(torch.ones(2, 8, 4)), packed(torch.ones(2, 4, 8))
    x, out = torch.ones(3, 4), torch.empty(3, 6)
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    handles = [one.handle for one in stack]
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("x: must have 4 columns, has 5", lambda: module.linear(torch.ones(3, 5), matrix.handle, 0, None, out, 2)),
        ("index: there are 1", lambda: module.linear(x, matrix.handle, 1, None, out, 2)),
        ("out: shape", lambda: module.linear(x, matrix.handle, 0, None, torch.empty(3, 5), 2)),
        ("bias: must be one dense row of 6", lambda: module.linear(x, matrix.handle, 0, torch.ones(5), out, 2)),
        ("x: dtype", lambda: module.linear(x, packed(torch.ones(6, 4).bfloat16()).handle, 0, None, out, 2)),
        ("down: gate and up", lambda: module.experts(x, ids, weights, handles[0], handles[1], handles[0], x, 2)),
        ("weights: dtype", lambda: module.experts(x, ids, weights.double(), *handles, torch.empty(3, 4), 2)),
        (
            "storage: must be one dense row of 24",
            lambda: module.Weights(torch.empty(23, dtype=torch.uint8), None, 3, 1, 6, 4, 4),
        ),
        ("scales: belong to int8", lambda: module.Weights(torch.empty(24, dtype=torch.uint8), None, 3, 1, 6, 4, 4)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(IndexError, match="an expert that is not there"):
        module.experts(x, ids + 2, weights, *handles, torch.empty(3, 4), 2)


def test_calls_from_several_threads_at_once_do_not_disturb_each_other(threads: Callable[[int], None]) -> None:
    torch.manual_seed(11)
    threads(2)
    registry = KernelRegistry(reference.offers() + native.offers(), torch.bfloat16, "fast")
    x, matrix = torch.randn(11, 96).bfloat16(), packed(torch.randn(200, 96).bfloat16())
    expected = registry.ops.linear(x, matrix, None)
    wrong: list[int] = []

    def compute(index: int) -> None:
        wrong.extend(index for _ in range(200) if not torch.equal(registry.ops.linear(x, matrix, None), expected))

    workers = [threading.Thread(target=compute, args=(index,)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own(threads: Callable[[int], None]) -> None:
    torch.manual_seed(12)
    threads(2)
    registry = KernelRegistry(reference.offers() + native.offers(), torch.float32, "fast")
    x, matrix = torch.randn(9, 64), packed(torch.randn(300, 64))
    expected = registry.ops.linear(x, matrix, None)
    pid = os.fork()
    if not pid:
        same = torch.equal(registry.ops.linear(x, matrix, None), expected)
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(registry.ops.linear(x, matrix, None), expected)


def test_a_profile_compares_each_kernel_with_the_limit_that_holds_for_it() -> None:
    """On a layer so small that it takes no time; the figures mean something only on a real one."""
    limits, uses = profile_kernels(rounds=1, shape=Shape(hidden=64, inter=64, experts=4, chosen=2, vocab=256))
    assert set(limits) == {"read", "fp32", "bf16", "int8"} and all(rate > 0 for rate in limits.values())
    assert all(use.rate > 0 and use.share == use.rate / use.limit for use in uses)
    for use in uses:
        limit = limits["read"] if use.unit == "GB/s" else limits["bf16" if "bf16" in use.name else "int8"]
        assert use.limit == limit and f"{use.share:.1%}" in str(use)
