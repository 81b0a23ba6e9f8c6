"""Ops against float64, native against reference, and the registry that chooses between them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapt_engine import EngineError
from adapt_engine.config import MoESpec, RopeSpec
from adapt_engine.kernels import Implementation, KernelRegistry, native, reference
from adapt_engine.kernels.registry import OPS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 48, 100, 577)
BUILT = importlib.util.find_spec("adapt_engine._native") is not None
needs_native = pytest.mark.skipif(not BUILT, reason="adapt_engine._native is not built: pip install ./engine")


def implementations(op: str) -> list[Any]:
    """The reference and, where built, the native op under every instruction set that this CPU has."""
    found = [pytest.param(next(offer.call for offer in reference.offers() if offer.op == op), id="reference")]
    if BUILT:
        with pytest.MonkeyPatch.context() as patch:
            for level in native.load().supported_isas():
                patch.setenv(native.ISA_VARIABLE, level)
                found += [pytest.param(offer.call, id=offer.name) for offer in native.offers() if offer.op == op]
    return found


def rounding_unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def spacing(dtype: torch.dtype) -> float:
    """Distance of neighbours below the smallest normal number: what a result near zero may lose."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def spread(kind: str, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A [rows, width] tensor with a given memory layout; rows are dense, everything else is awkward."""
    flat = (3 * torch.randn(rows * (width + 5) + 3)).to(dtype)
    if kind == "contiguous":
        return flat[: rows * width].view(rows, width)
    if kind == "misaligned":
        return flat[3 : 3 + rows * width].view(rows, width)
    return flat[: rows * (width + 5)].view(rows, width + 5)[:, 2 : 2 + width]


@pytest.mark.requirement(56)
@pytest.mark.requirement(57)
@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rms_norm", implementations("rms_norm"))
def test_rms_norm_rounds_as_often_as_the_formula_says(
    rms_norm: Callable[..., torch.Tensor], dtype: torch.dtype, layout: str
) -> None:
    """Error against float64: two roundings to dtype, and float32 sums of n squares, halved by the root."""
    torch.manual_seed(0)
    for width in WIDTHS:
        x, weight = spread(layout, 4, width, dtype), torch.randn(width).to(dtype)
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        relative = 2 * rounding_unit(dtype) + (width / 2 + 4) * rounding_unit(torch.float32)
        allowed = exact.abs() * relative * (1 + relative) + spacing(dtype) * (1 + weight.double().abs())
        got = rms_norm(x, weight, 1e-5)
        assert got.dtype == dtype and got.shape == x.shape
        assert bool(((got.double() - exact).abs() <= allowed).all()), width


@pytest.mark.requirement(57)
@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("swiglu", implementations("swiglu"))
def test_swiglu_rounds_once(swiglu: Callable[..., torch.Tensor], dtype: torch.dtype, layout: str) -> None:
    """Error against float64: one rounding to dtype; in float32 the exponential (2 units), sum, quotient, product."""
    torch.manual_seed(1)
    for width in WIDTHS:
        gate, up = 4 * spread(layout, 4, width, dtype), spread(layout, 4, width, dtype)
        exact = gate.double() * gate.double().sigmoid() * up.double()
        relative = rounding_unit(dtype) + 6 * rounding_unit(torch.float32)
        got = swiglu(gate, up)
        assert bool(((got.double() - exact).abs() <= exact.abs() * relative + spacing(dtype)).all()), width


@pytest.mark.parametrize("swiglu", implementations("swiglu"))
def test_swiglu_of_extremes(swiglu: Callable[..., torch.Tensor]) -> None:
    gate = torch.tensor([[math.nan, math.inf, 88.0, -88.0, 1e4, -1e4, 0.0, -0.0] * 3])
    got = swiglu(gate, torch.ones_like(gate))[0]
    assert math.isnan(got[0]) and got[1] == math.inf
    assert got[2] == 88.0 and got[4] == 1e4
    assert bool((got[[3, 5, 6, 7]].abs() <= 88 * math.exp(-87)).all())


@pytest.mark.parametrize("rms_norm", implementations("rms_norm"))
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rms_norm_does_not_hide_a_bad_value(rms_norm: Callable[..., torch.Tensor], poison: float) -> None:
    x = torch.ones(2, 37)
    x[1, 36] = poison
    got = rms_norm(x, torch.ones(37), 1e-6)
    assert bool(torch.isfinite(got[0]).all()) and not bool(torch.isfinite(got[1, 36]))


@pytest.mark.parametrize("rms_norm", implementations("rms_norm")[1:])
def test_native_row_does_not_depend_on_its_neighbours(rms_norm: Callable[..., torch.Tensor]) -> None:
    x, weight = torch.randn(9, 577), torch.randn(577)
    together = rms_norm(x, weight, 1e-6)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-6)[0], together[i]) for i in range(9))


@pytest.mark.requirement(57)
@pytest.mark.parametrize("op", ["rms_norm", "swiglu"])
def test_no_rows_with_gaps_between_elements_are_no_rows(op: str) -> None:
    empty = torch.ones(2, 10)[:0, ::2]
    for offer in (*reference.offers(), *native.offers()):
        if offer.op == op:
            got = offer.call(empty, *((torch.ones(5), 1e-6) if op == "rms_norm" else (empty,)))
            assert got.shape == (0, 5)


@needs_native
@pytest.mark.parametrize("level", range(3))
def test_the_largest_logit_is_found_and_ties_go_to_the_lowest(level: int) -> None:
    module = native.load()
    if ("avx512", "avx2", "scalar")[level] not in module.supported_isas():
        pytest.skip("this CPU lacks it")
    torch.manual_seed(20)
    for width in (*WIDTHS, 1000):
        logits = torch.randint(-3, 3, (width,)).float()
        assert module.greedy(logits, level) == int((logits == logits.max()).nonzero()[0])
        zeros = torch.tensor([0.0, -0.0] * width)[1 : width + 1] - 0.0
        assert module.greedy(zeros, level) == 0
        for poison in (math.nan, math.inf, -math.inf):
            broken = logits.clone()
            broken[width // 2] = poison
            assert module.greedy(broken, level) == -1


@needs_native
def test_native_module_refuses_what_it_would_have_to_convert() -> None:
    module = native.load()
    x, weight, out = torch.ones(3, 5), torch.ones(5), torch.empty(3, 5)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("x: dtype", (x.double(), weight, out.double())),
        ("weight: dtype", (x, weight.bfloat16(), out)),
        ("out: dtype", (x, weight, out.bfloat16())),
        ("out: shape", (x, weight, torch.empty(3, 6))),
        ("weight: must be one dense row", (x, torch.ones(6), out)),
        ("x: elements of a row must be adjacent", (torch.ones(5, 3).T, weight, out)),
        ("x: must have 2 dimensions", (torch.ones(15), weight, out)),
        ("out: rows overlap", (x, weight, torch.empty(5).expand(3, 5))),
    ]
    for message, arguments in cases:
        with pytest.raises(ValueError, match=message):
            module.rms_norm(*arguments, 1e-6, 2)
    with pytest.raises(ValueError, match="eps"):
        module.rms_norm(x, weight, out, -1.0, 2)
    with pytest.raises(TypeError):
        module.rms_norm([[1.0]], weight, out, 1e-6, 2)
    with pytest.raises(ValueError, match="level 7"):
        module.rms_norm(x, weight, out, 1e-6, 7)


@needs_native
def test_instruction_set_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "scalar")
    assert {offer.name for offer in native.offers()} == {"native-scalar"}
    monkeypatch.setenv(native.ISA_VARIABLE, "sse9")
    with pytest.raises(EngineError, match="ADAPT_ENGINE_ISA=sse9.*avx512, avx2, scalar"):
        native.offers()


@pytest.mark.requirement(51)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 577, 3), (3, 48, 97), (16, 64, 64), (257, 5, 7), (64, 200, 1)], ids=str
)
def test_linear_is_correct_over_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """|error| <= n u |x| |w| for float32 sums of n products in any order (Higham 2002, 3.1), then one rounding."""
    torch.manual_seed(2)
    rows, width, out = shape
    ops = KernelRegistry(reference.offers(), dtype, "fast").ops
    x, weight, bias = torch.randn(rows, width).to(dtype), torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    got = ops.linear(x, weight, bias)
    allowed = (width + 2) * rounding_unit(torch.float32) * size + rounding_unit(dtype) * exact.abs() * 1.001
    assert got.dtype == dtype
    # torch may round the product before it adds the bias: two roundings, the first at the product's magnitude.
    allowed += rounding_unit(dtype) * (exact - bias.double()).abs() * 1.001 + spacing(dtype)
    assert bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.requirement(51)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 3, 17, 9), (2, 8, 64, 128), (70, 2, 9, 1)], ids=str)
def test_batched_linear_is_correct_over_shapes(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """One matrix a head; float32 sums, not rounded to dtype."""
    torch.manual_seed(3)
    rows, heads, width, out = shape
    ops = KernelRegistry(reference.offers(), dtype, "fast").ops
    x, weight = torch.randn(rows, heads, width).to(dtype), torch.randn(heads, out, width).to(dtype)
    exact = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    size = torch.einsum("thi,hoi->tho", x.double().abs(), weight.double().abs())
    got = ops.head_linear(x, weight)
    assert got.dtype == torch.float32
    assert bool(((got.double() - exact).abs() <= width * rounding_unit(torch.float32) * size).all())


@pytest.mark.parametrize("position", [0, 1, 4095, 1_000_000])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotary_tables_are_exact_at_any_position(kind: str, position: int) -> None:
    """Against Python's own float64 mathematics, scalar by scalar; one rounding to float32."""
    spec = RopeSpec(dim=12, theta=5e4, kind=kind, factor=8.0, original_context=64, attention_factor=1.25)
    cos, sin = reference.rope_tables(spec, torch.tensor([position]))
    unit = 1.25 * rounding_unit(torch.float32)
    for pair in range(6):
        angle = position * float(reference.rope_frequencies(spec)[pair])
        assert float(cos[0, pair]) == pytest.approx(1.25 * math.cos(angle), abs=unit)
        assert float(sin[0, pair]) == pytest.approx(1.25 * math.sin(angle), abs=unit)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_the_complex_product_of_its_pairs(interleaved: bool) -> None:
    torch.manual_seed(4)
    spec = RopeSpec(dim=10, theta=1e4)
    x, positions = torch.randn(7, 3, 10), torch.arange(7) * 13
    got = reference.rope_apply(x, *reference.rope_tables(spec, positions), interleaved)
    pairs = x.double().view(7, 3, 5, 2).unbind(-1) if interleaved else x.double().chunk(2, -1)
    turn = torch.polar(torch.ones(7, 1, 5).double(), (positions[:, None] * reference.rope_frequencies(spec))[:, None])
    expected = torch.complex(*pairs) * turn
    error = (got.double() - torch.cat((expected.real, expected.imag), -1)).abs()
    # Two products and a sum of float32, from cosines rounded to float32.
    assert float(error.max()) <= 4 * rounding_unit(torch.float32) * float(expected.abs().max())


@pytest.mark.requirement(53, 57)
@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope_apply", implementations("rope_apply"))
def test_every_rotation_has_the_bits_of_the_reference(
    rope_apply: Callable[..., torch.Tensor], dtype: torch.dtype, layout: str
) -> None:
    """The same two products and sum of float32, rounded once: nothing is left to an implementation."""
    torch.manual_seed(5)
    for half in (1, 5, 16, 33, 64):
        for rows, heads in ((0, 3), (1, 1), (7, 3)):
            x = spread(layout, max(rows, 1) * heads, 2 * half, dtype)[: rows * heads].view(rows, heads, 2 * half)
            angles = torch.randn(rows, half) * 100
            cos, sin = angles.cos(), angles.sin()
            for interleaved in (False, True):
                got, twin = rope_apply(x, cos, sin, interleaved), reference.rope_apply(x, cos, sin, interleaved)
                assert got.dtype == dtype and got.shape == x.shape
                assert torch.equal(got, twin), (half, rows, heads, interleaved)


@pytest.mark.skipif(not BUILT, reason="the extension is not built")
@pytest.mark.parametrize(
    ("rows", "width", "angles", "half", "why"),
    [
        (6, 8, 4, 4, "6 rows of x do not divide by its 4"),
        (6, 8, 3, 3, "half as many columns as x, 8"),
        (6, 8, 0, 4, "do not divide by its 0"),
    ],
)
def test_a_rotation_that_cannot_be_is_refused(rows: int, width: int, angles: int, half: int, why: str) -> None:
    x, table = torch.ones(rows, width), torch.ones(angles, half)
    with pytest.raises(ValueError, match=why):
        native.load().rotate(x, table, table, torch.empty_like(x), 2)


def brute_force(logits: list[float], bias: list[float], spec: MoESpec) -> list[int]:
    """Choice by the definition, in plain Python: groups by their two best, then experts; ties to the lowest id."""
    top = max(logits)
    if spec.score == "softmax":
        scores = [math.exp(value - top) for value in logits]
        scores = [value / sum(scores) for value in scores]
    else:
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    ranked = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = spec.experts // spec.groups
    strength = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(spec.groups)]
    groups = sorted(range(spec.groups), key=lambda g: (-strength[g], g))[: spec.top_groups]
    pool = [expert for expert in range(spec.experts) if expert // size in groups]
    return sorted(sorted(pool, key=lambda expert: (-ranked[expert], expert))[: spec.top_k])


@pytest.mark.requirement(54)
@pytest.mark.parametrize("offset", [7.0, 0.0, -7.0])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routing_equals_its_definition(score: str, groups: tuple[int, int], offset: float) -> None:
    spec = MoESpec(12, 3, 8, score, True, True, groups[0], groups[1], routed_scale=2.5)
    torch.manual_seed(5)
    logits = torch.randn(60, 12)
    bias = offset + 0.12 * torch.randn(12)
    routing = reference.route(logits, bias, spec)
    for row in range(60):
        assert routing.ids[row].tolist() == brute_force(logits[row].tolist(), bias.tolist(), spec)
    chosen = routing.scores.gather(1, routing.ids)
    expected = 2.5 * chosen / chosen.sum(-1, keepdim=True)
    assert float(((routing.weights - expected) / expected).abs().max()) <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.requirement(54)
def test_routing_ties_go_to_the_lowest_id_and_nan_is_never_preferred() -> None:
    spec = MoESpec(6, 2, 8, "sigmoid", False)
    logits = torch.tensor([[0.0] * 6, [0, 1, 0, 1, 1, 0], [math.nan, -3, -3, -3, -2, math.nan]])
    assert reference.route(logits, None, spec).ids.tolist() == [[0, 1], [1, 3], [1, 4]]


@pytest.mark.requirement(54)
def test_experts_without_tokens_and_experts_with_all_of_them() -> None:
    """Every token to one expert, or spread; against a loop over tokens in float64."""
    torch.manual_seed(6)
    ops = KernelRegistry(reference.offers(), torch.float32, "fast").ops
    x = torch.randn(9, 10)
    gate, up, down = torch.randn(5, 7, 10), torch.randn(5, 7, 10), torch.randn(5, 10, 7)
    weights = torch.rand(9, 2)
    for ids in (torch.tensor([[1, 3]] * 9), torch.stack([torch.randperm(5)[:2].sort().values for _ in range(9)])):
        got = ops.experts(x, ids, weights, gate, up, down, None)
        for row in range(9):
            total, size = torch.zeros(10).double(), torch.zeros(10).double()
            for slot, expert in enumerate(ids[row].tolist()):
                g, u = gate[expert].double() @ x[row].double(), up[expert].double() @ x[row].double()
                part = float(weights[row, slot]) * down[expert].double() * (g * g.sigmoid() * u)
                total += part.sum(-1)
                # Errors of gate and up scale with their absolute sums, and pass through silu with a slope below 1.1.
                size += _magnitude(x[row], gate[expert], up[expert], down[expert]) * float(weights[row, slot])
            assert bool(((got[row].double() - total).abs() <= 40 * rounding_unit(torch.float32) * size).all())


def _magnitude(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Sum of the absolute values of all products behind each output; 40 = 10 + 10 + 7 terms, product rule and silu."""
    g, u = gate.double().abs() @ x.double().abs(), up.double().abs() @ x.double().abs()
    return 1.1 * (down.double().abs() @ (g * u))


def test_registry_prefers_priority_and_required_traits() -> None:
    plain = reference.offers()
    every = frozenset(DTYPES)

    def quick(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x

    better = Implementation("rms_norm", "quick", quick, frozenset({torch.bfloat16}), frozenset(), priority=5)
    assert KernelRegistry([*plain, better], torch.bfloat16, "fast").names()["rms_norm"] == "quick"
    assert KernelRegistry([*plain, better], torch.float32, "fast").names()["rms_norm"] == "reference"
    strict = [
        Implementation(op, "exact", quick, every, frozenset({"batch_invariant", "layout_invariant"})) for op in OPS
    ]
    chosen = KernelRegistry([*plain, better, *strict], torch.bfloat16, "strict").names()
    assert set(chosen.values()) <= {"exact", "reference"} and chosen["rms_norm"] == "exact"
    with pytest.raises(EngineError, match="op rms_norm"):
        KernelRegistry([*plain, better], torch.bfloat16, "strict")
    with pytest.raises(EngineError, match=r"op linear in torch\.float32"):
        KernelRegistry([offer for offer in plain if offer.op != "linear"], torch.float32, "fast")


def test_wrappers_nest_and_leave_in_any_order() -> None:
    registry = KernelRegistry(reference.offers(), torch.float32, "fast")
    one, original = torch.ones(1, 1), registry.ops.add
    doubled = registry.wrap("add", lambda call: lambda a, b: call(a, b) * 2)
    plus = registry.wrap("add", lambda call: lambda a, b: call(a, b) + 1)
    assert float(registry.ops.add(one, one)) == 5
    doubled.remove()
    doubled.remove()
    assert float(registry.ops.add(one, one)) == 3
    plus.remove()
    assert registry.ops.add is original
    with pytest.raises(EngineError, match="no op 'nothing'"):
        registry.wrap("nothing", lambda call: call)
