"""Any shape, stride and alignment: native products, experts and attention against float64, found by hypothesis.

``ADAPT_KERNEL_EXAMPLES=100000`` searches for longer, for example under a sanitizer.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from adapt_engine.kernels import native, reference
from adapt_engine.kernels.packed import PackedMatrix
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_kernels import BUILT, DTYPES, rounding_unit, spacing
from .test_sdpa import exact

pytestmark = pytest.mark.skipif(not BUILT, reason="adapt_engine._native is not built: pip install ./engine")
LEVELS = ("avx512", "avx2", "scalar")
search = settings(
    max_examples=int(os.environ.get("ADAPT_KERNEL_EXAMPLES", "60")), deadline=None, derandomize=True, database=None
)
cases = given(
    seed=st.integers(0, 2**31),
    level=st.sampled_from(native.load().supported_isas() if BUILT else ["scalar"]),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 7),
    gap=st.integers(0, 9),
    data=st.data(),
)


def placed(rows: int, width: int, dtype: torch.dtype, offset: int, gap: int) -> torch.Tensor:
    """[rows, width] that begins anywhere, with a gap between rows; all around lies NaN, which nothing may touch."""
    flat = torch.full((offset + max(1, rows) * (width + gap) + 8,), math.nan, dtype=dtype)
    view = flat[offset:].as_strided((rows, width), (width + gap, 1))
    return view.copy_(torch.randn(rows, width))


def untouched(out: torch.Tensor, width: int) -> bool:
    """Nothing was written between the rows of ``out``."""
    base = out._base
    assert base is not None
    rest = base.clone()
    rest[out.storage_offset() :].as_strided(out.shape, out.stride()).fill_(math.nan)
    return bool(rest.isnan().all())


@pytest.mark.requirement(51, 57)
@search
@cases
def test_products(seed: int, level: str, dtype: torch.dtype, offset: int, gap: int, data: Any) -> None:
    torch.manual_seed(seed)
    rows, depth = data.draw(st.integers(0, 27)), data.draw(st.integers(1, 150))
    columns, segment = data.draw(st.integers(1, 210)), data.draw(st.integers(1, 80))
    module = native.load()
    x, weight = placed(rows, depth, dtype, offset, gap), placed(columns, depth, dtype, gap, offset)
    out = placed(rows, columns, torch.float32, offset, gap)
    matrix = PackedMatrix(module, weight, segment)
    assert torch.equal(matrix.dense(), weight)
    module.linear(x, matrix.handle, 0, None, out, LEVELS.index(level))
    error = (out.double() - x.double() @ weight.double().T).abs()
    size = x.double().abs() @ weight.double().abs().T
    assert bool((error <= (depth + 1) * rounding_unit(torch.float32) * size).all())
    assert untouched(out, columns)
    small = PackedMatrix(module, weight, segment, quantised=True)
    module.linear(x, small.handle, 0, None, out, LEVELS.index(level))
    # Rounding to 1/127 of the largest: half a step of either factor against the other, in every product.
    steps = 0.5 / 127 * (x.double().abs().amax(1, keepdim=True) if rows else torch.empty(0, 1).double())
    steps_w = 0.5 / 127 * weight.double().abs().amax(1)
    bound = steps * weight.double().abs().sum(1) + x.double().abs().sum(1, keepdim=True) * steps_w
    bound += depth * steps * steps_w + 8 * rounding_unit(torch.float32) * size
    assert bool(((out.double() - x.double() @ weight.double().T).abs() <= bound * 1.001).all())
    assert untouched(out, columns)


@pytest.mark.requirement(54, 57)
@search
@cases
def test_experts(seed: int, level: str, dtype: torch.dtype, offset: int, gap: int, data: Any) -> None:
    torch.manual_seed(seed)
    rows, hidden, inter = (data.draw(st.integers(*bounds)) for bounds in ((0, 20), (1, 90), (1, 90)))
    experts = data.draw(st.integers(1, 9))
    slots = data.draw(st.integers(1, experts))
    module = native.load()
    stacks = [
        PackedMatrix(module, (0.3 * torch.randn(experts, *shape)).to(dtype), data.draw(st.integers(1, 64)))
        for shape in ((inter, hidden), (inter, hidden), (hidden, inter))
    ]
    stacks[1] = PackedMatrix(module, stacks[1].dense(), stacks[0].segment)
    x, out = placed(rows, hidden, dtype, offset, gap), placed(rows, hidden, dtype, gap, offset)
    ids = (
        torch.stack([torch.randperm(experts)[:slots] for _ in range(rows)]) if rows else torch.empty((0, slots)).long()
    )
    weights = torch.rand(rows, slots)
    handles = [one.handle for one in stacks]
    module.experts(x, ids, weights, *handles, out, LEVELS.index(level))
    assert untouched(out, hidden)
    each = torch.empty((rows * slots, hidden), dtype=dtype)
    for at, expert in enumerate(ids.flatten().tolist()):
        row = x[at // slots : at // slots + 1]
        parts = []
        for stack in stacks[:2]:
            part = torch.empty((1, inter), dtype=dtype)
            module.linear(row, stack.handle, expert, None, part, LEVELS.index(level))
            parts.append(part)
        act = torch.empty((1, inter), dtype=dtype)
        module.swiglu(*parts, act, LEVELS.index(level))
        module.linear(act, stacks[2].handle, expert, None, each[at : at + 1], LEVELS.index(level))
    assert torch.equal(out, reference.combine(each.view(rows, slots, hidden), weights))


@pytest.mark.requirement(54, 57)
@search
@cases
def test_attention(seed: int, level: str, dtype: torch.dtype, offset: int, gap: int, data: Any) -> None:
    torch.manual_seed(seed)
    keys = data.draw(st.integers(1, 700))
    rows = data.draw(st.integers(0, min(keys, 30)))
    groups, share = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    width, value = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    window = data.draw(st.none() | st.integers(1, 400))
    heads = groups * share
    q = placed(rows, heads * width, dtype, offset, gap).unflatten(1, (heads, width))
    k = placed(keys, groups * width, dtype, gap, offset).unflatten(1, (groups, width))
    v = placed(keys, groups * value, dtype, offset, gap).unflatten(1, (groups, value))
    seen = torch.arange(keys)
    asking = seen[keys - rows :]
    out, logs = torch.empty(rows, heads, value), torch.empty(rows, heads)
    native.load().attention(q, k, v, asking, seen, 1 / math.sqrt(width), window or 0, out, logs, LEVELS.index(level))
    right = exact(q, k, v, asking, seen, window)
    # Shares are rounded to the dtype of the values (float16 keeps float32 ones), sums of up to n terms are float32.
    unit = rounding_unit(dtype) if dtype == torch.bfloat16 else 0.0
    allowed = (2 * unit + (keys + width + 64) * rounding_unit(torch.float32) * 8) * v.double().abs().amax()
    assert bool(((out.double() - right).abs() <= allowed + spacing(dtype)).all())
    assert bool(logs.isfinite().all())
