"""Native attention: no further from the exact result than what it replaces, and the same bits in any company."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adapt_engine.kernels import KernelRegistry, native, reference, sdpa

from .test_kernels import BUILT, DTYPES
from .test_sdpa import exact

pytestmark = pytest.mark.skipif(not BUILT, reason="adapt_engine._native is not built: pip install ./engine")
LEVELS = tuple(native.load().supported_isas()) if BUILT else ()
# Rows, keys, heads, key heads, widths of keys and of values, window: one key to several chunks of 256, odd widths,
# runs of chunks on several threads, more rows than a block, windows within a chunk and over its border.
SHAPES: list[tuple[int, int, int, int, int, int, int | None]] = [
    (1, 1, 4, 2, 20, 20, None),
    (1, 70, 6, 2, 10, 14, None),
    (33, 33, 5, 1, 64, 48, None),
    (70, 70, 6, 2, 33, 70, 7),
    (5, 600, 8, 2, 64, 64, None),
    (210, 300, 3, 3, 17, 9, 256),
    (2, 1800, 4, 1, 32, 32, 700),
]


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


def drawn(shape: tuple[int, int, int, int, int, int, int | None], dtype: torch.dtype) -> tuple[Any, ...]:
    rows, keys, heads, groups, width, value, window = shape
    torch.manual_seed(rows * keys + heads)
    tensors = torch.randn(rows, heads, width), torch.randn(keys, groups, width), torch.randn(keys, groups, value)
    seen = torch.arange(keys)
    settings = {
        "q_positions": seen[keys - rows :],
        "k_positions": seen,
        "scale": 1 / math.sqrt(width),
        "window": window,
    }
    return *(one.to(dtype) for one in tensors), settings


@pytest.mark.requirement(51, 54)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_as_exact_as_what_it_replaces(
    ops: Callable[[torch.dtype], Any], dtype: torch.dtype, shape: tuple[int, int, int, int, int, int, int | None]
) -> None:
    q, k, v, settings = drawn(shape, dtype)
    right = exact(q, k, v, settings["q_positions"], settings["k_positions"], settings["window"])
    kept = (reference.attention, sdpa.attention)
    twin = max((call(q, k, v, **settings).double() - right).square().mean().sqrt() for call in kept)
    floor = torch.finfo(dtype).eps / 4 * right.square().mean().sqrt()
    found = ops(dtype).attention(q, k, v, **settings)
    assert found.dtype == dtype and found.shape == right.shape
    assert (found.double() - right).square().mean().sqrt() <= 2 * max(twin, floor)
    context, weights = ops(dtype).attention_partial(q, k, v, **settings)
    _, logs = reference.attention_partial(q, k, v, **settings)
    assert torch.equal(context.to(dtype), found)
    assert bool(((weights - logs).abs() <= 1e-5 * (1 + logs.abs())).all())


@pytest.mark.requirement(46, 54)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company_on_any_number_of_threads(
    ops: Callable[[torch.dtype], Any],
    shape: tuple[int, int, int, int, int, int, int | None],
    threads: Callable[[int], None],
) -> None:
    """In chunks of a prompt, row by row, and with later keys there that it does not see."""
    q, k, v, settings = drawn(shape, torch.bfloat16)
    rows, keys = shape[:2]
    call = ops(torch.bfloat16).attention
    threads(1)
    whole = call(q, k, v, **settings)
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(call(q, k, v, **settings), whole), count
        for size in {1, 7, rows} if rows < 50 else {64}:
            for start in range(0, rows, size):
                stop = min(rows, start + size)
                known = keys - rows + stop
                part = call(
                    q[start:stop],
                    k[:known],
                    v[:known],
                    **{
                        **settings,
                        "q_positions": settings["q_positions"][start:stop],
                        "k_positions": settings["k_positions"][:known],
                    },
                )
                assert torch.equal(part, whole[start:stop]), (count, size, start)


@pytest.mark.requirement(54)
@pytest.mark.parametrize("keys", [5, 700])
def test_parts_of_the_keys_merge_to_the_whole(ops: Callable[[torch.dtype], Any], keys: int) -> None:
    """A part without a visible key weighs nothing; float32 rounding is all that is left."""
    q, k, v, settings = drawn((3, keys, 6, 2, 24, 24, None), torch.float32)
    parts = []
    for some in (*torch.arange(keys).chunk(3), torch.arange(0), torch.arange(keys, keys + 4)):
        held = some[some < keys]
        positions = {**settings, "k_positions": some}
        late = some if held.numel() else torch.zeros(len(some), dtype=torch.int64)
        parts.append(ops(torch.float32).attention_partial(q, k[late], v[late], **positions))
    assert bool(parts[-1][1].isneginf().all()) and not bool(parts[-1][0].any())
    merged = ops(torch.float32).attention_merge(
        torch.stack([context for context, _ in parts]), torch.stack([weight for _, weight in parts])
    )
    whole = ops(torch.float32).attention(q, k, v, **settings)
    assert float((merged - whole).abs().max()) <= 16 * torch.finfo(torch.float32).eps * float(whole.abs().max())


@pytest.mark.requirement(54)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_bad_value_is_not_hidden(ops: Callable[[torch.dtype], Any], where: str, poison: float) -> None:
    """A bad key concerns the rows that see it; a bad value may, as in the reference, reach others through 0 * NaN."""
    q, k, v, settings = drawn((8, 8, 2, 1, 16, 16, None), torch.float32)
    (k if where == "k" else v)[5] = poison
    found = ops(torch.float32).attention(q, k, v, **settings)
    assert not bool(found[5:].isfinite().any())
    assert where == "v" or bool(found[:5].isfinite().all())


@pytest.mark.requirement(57)
def test_a_mismatch_is_refused_with_its_name() -> None:
    module = native.load()
    q, k = torch.ones(2, 4, 8), torch.ones(3, 2, 8)
    asking, seen, out = torch.tensor([1, 2]), torch.arange(3), torch.empty(2, 4, 8)

    def run(**changed: Any) -> None:
        given = {"q": q, "k": k, "v": k, "q_positions": asking, "k_positions": seen, "out": out, **changed}
        order = ("q", "k", "v", "q_positions", "k_positions")
        module.attention(*(given[name] for name in order), 1.0, 0, given["out"], None, 2)

    run()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("k: q, k and v must have one dtype", {"q": q.bfloat16()}),
        ("k: its heads must divide", {"k": torch.ones(3, 3, 8)}),
        ("k: heads must be as wide", {"k": torch.ones(3, 2, 7)}),
        ("v: must have a row", {"v": torch.ones(4, 2, 8)}),
        ("q_positions: must be one dense row of 2 int64", {"q_positions": torch.arange(3)}),
        ("q_positions: must ascend", {"q_positions": torch.tensor([2, 1])}),
        ("k_positions: must not repeat", {"k_positions": torch.tensor([0, 1, 1])}),
        ("out: must be dense", {"out": torch.empty(2, 4, 9)}),
    ]
    for message, changed in cases:
        with pytest.raises(ValueError, match=message):
            run(**changed)
