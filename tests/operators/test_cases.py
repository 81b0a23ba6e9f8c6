"""Case strings, inputs on the grid of a precision, and memory that tells what was touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_adapt.operators import NAMES, CaseError, catalogue, parse_case
from pytest_adapt.operators.case import MEMORIES
from pytest_adapt.operators.draw import Arena, Draw, Operand, decode, encode, on_grid
from pytest_adapt.operators.explore import cases

PRECISIONS = ("fp32", "bf16", "fp16")


@settings(max_examples=200, deadline=None, database=None)
@given(st.sampled_from(NAMES), st.sampled_from(PRECISIONS), st.data())
def test_a_case_string_gives_the_same_case_and_the_same_inputs(name, precision, data):
    op = catalogue()[name]
    case = data.draw(cases(op, precision))
    again = parse_case(str(case))
    assert again == case
    for first, second in zip(op.inputs(Draw(case)).values(), op.inputs(Draw(again)).values(), strict=True):
        assert first.values.tobytes() == second.values.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_every_case_of_the_grid_can_be_repeated_from_its_string(name):
    grid = catalogue()[name].grid("bf16")
    assert len(grid) == len(set(grid)) and len(grid) >= 5
    assert [parse_case(str(case)) for case in grid] == grid


def test_what_is_left_out_of_a_case_is_the_simplest():
    assert str(parse_case("rms_norm(width=5)")) == (
        "rms_norm(dtype=fp32,rows=0,heads=0,width=5,eps=1e-06,values=normal,memory=dense,seed=0)"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rms_norm", "is no case; write OPERATOR"),
        ("norm(rows=3)", "no operator 'norm'; operators are linear,"),
        ("rms_norm(depth=3)", "no parameter depth; it has dtype, rows, heads, width, eps, values, memory, seed"),
        ("rms_norm(width=0)", "width 0 is no number from 1 on"),
        ("rms_norm(dtype=fp8)", "dtype 'fp8' is none of fp32, bf16, fp16"),
        ("rms_norm(values=odd)", "values 'odd' is none of normal, negative"),
        ("rms_norm(memory=dense,seed=x)", "seed 'x' is no number"),
        ("rotary(kind=linear)", "kind 'linear' is none of default, yarn, llama3"),
        ("rms_norm(width)", "'width' is not name=value"),
        ("embedding(values=huge)", "values 'huge' is none of normal"),
    ],
)
def test_a_wrong_case_says_what_is_allowed(text, said):
    with pytest.raises(CaseError) as error:
        parse_case(text)
    assert said in str(error.value)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_numbers_of_their_format(name, precision):
    """What is compared is the operator alone: nothing is rounded on the way to it."""
    for case in catalogue()[name].grid(precision):
        for key, operand in catalogue()[name].inputs(Draw(case)).items():
            array = encode(operand.values, operand.format)
            assert np.array_equal(decode(array), operand.values, equal_nan=True), (key, str(case))


def test_kinds_of_values_are_what_they_are_called():
    draw = {kind: Draw(parse_case(f"linear(values={kind})")).activation(7, 9).values for kind in ("negative", "tied",
            "zero", "spike", "huge", "tiny")}  # fmt: skip
    assert (draw["negative"] < 0).all()
    assert len(np.unique(draw["tied"])) == 3
    assert (draw["zero"] == 0).all() and np.signbit(draw["zero"]).any()
    assert np.abs(draw["spike"][:, 0]).min() > np.abs(draw["spike"][:, 1:]).max()
    assert np.abs(draw["huge"]).max() > 2.0**40
    assert 0 < np.abs(draw["tiny"]).max() < 2.0**-126


@settings(max_examples=100, deadline=None, database=None)
@given(
    st.sampled_from(MEMORIES),
    st.sampled_from(PRECISIONS),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    st.integers(0, 99),
)
def test_memory_holds_the_values_and_poison_around_them(memory, held, shape, seed):
    values = on_grid(np.random.default_rng(seed).standard_normal(shape), held)
    arena = Arena(memory)
    view = arena.place("x", Operand(values, held))
    assert view.shape == shape and np.array_equal(decode(view), values)
    assert arena.damage() == ""
    buffer = view.base if view.base is not None else view
    while buffer.base is not None:
        buffer = buffer.base
    assert np.isnan(decode(buffer)).sum() == buffer.size - values.size >= 128
    if memory == "strided" and values.size and shape[-1] > 1:
        assert view.strides[-1] == 2 * view.itemsize


def test_a_write_is_told_from_its_place():
    arena = Arena("padded")
    view = arena.place("x", Operand(np.ones((3, 4)), "fp32"))
    view[1, 2] = 5.0
    assert arena.damage() == "its input x was written to (1 elements)"
    view[1, 2] = 1.0
    assert arena.damage() == ""
    beside = np.lib.stride_tricks.as_strided(view, (3, 9), view.strides)
    beside[2, 4] = 0.0
    assert arena.damage() == "memory outside x was written to (1 elements)"
