"""Layout grammar and structural rules."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from pytest_adapt.layout import AXES, SINGLE, Layout, LayoutError, check, legal_layouts, parse


@pytest.mark.parametrize(
    ("text", "canonical", "world", "dp", "edp"),
    [
        ("single", "single", 1, 1, 1),
        ("tp1", "single", 1, 1, 1),
        ("tp8.ep16", "tp8.ep16", 16, 2, 1),
        ("tp2.pp2.ep4", "tp2.pp2.ep4", 8, 2, 1),
        ("tp8.ep16.dp2", "tp8.ep16", 16, 2, 1),
        ("tp2.dp2", "tp2.dp2", 4, 2, 4),
        ("tp2.ep2.dp4.etp2", "tp2.ep2.dp4.etp2", 8, 4, 2),
        ("sp4.ep2", None, 0, 0, 0),
    ],
)
def test_parse(text: str, canonical: str | None, world: int, dp: int, edp: int) -> None:
    if canonical is None:
        with pytest.raises(LayoutError, match=r"order tp, pp, ep, sp, dp, etp; nearest legal: ep2\.sp4"):
            parse(text)
        return
    layout = parse(text)
    assert (str(layout), layout.world, layout.dp, layout.edp) == (canonical, world, dp, edp)
    assert parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read ''"),
        ("tp", "cannot read 'tp'"),
        ("tp02", "cannot read 'tp02'"),
        ("tp0", "cannot read 'tp0'"),
        ("TP2", "cannot read 'TP2'"),
        ("tp2..pp2", "cannot read ''"),
        ("tp-2", "cannot read 'tp-2'"),
        ("tp2.tp4", "axis tp appears twice"),
        ("ep4.dp2", "nearest legal: ep2, ep4"),
        (
            "tp10000",
            "cannot read 'tp10000': a layout is 'single' or axes in the order .*, each with a size of 1 to 9999",
        ),
        ("ep999999", "cannot read"),
        ("tp9999.pp9", "89991 ranks are more than 65536"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match="^layout .*" + re.sub(r"\.(?!\*)", r"\.", message)) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp3", "layout tp3: 8 query heads do not divide by 3; nearest legal: tp2, tp4"),
        ("pp9", "layout pp9: 4 layers cannot fill 9 stages; nearest legal: pp4"),
        ("ep11", "layout ep11: 10 experts cannot fill 11 ranks; nearest legal: ep10"),
        ("tp2.etp2", None),
        ("tp8", None),
        ("ep7", None),
    ],
)
def test_structural_rules(text: str, message: str | None) -> None:
    sizes = {"heads": 8, "kv_heads": 2, "experts": 10, "layers": 4}
    if message is None:
        check(parse(text), **sizes)
        return
    with pytest.raises(LayoutError) as caught:
        check(parse(text), **sizes)
    assert str(caught.value) == message


def test_kv_heads_split_evenly_or_are_replicated_whole() -> None:
    check(parse("tp3"), heads=12, kv_heads=6, experts=0, layers=1)
    check(parse("tp12"), heads=12, kv_heads=6, experts=0, layers=1)
    with pytest.raises(LayoutError, match="6 KV heads neither split evenly over 4 ranks"):
        check(parse("tp4"), heads=12, kv_heads=6, experts=0, layers=1)


def test_dense_models_have_no_expert_axes() -> None:
    for text in ("ep2", "etp2"):
        with pytest.raises(LayoutError, match="dense model"):
            check(parse(text), heads=8, kv_heads=8, experts=0, layers=4)


def test_legal_layouts_are_legal_complete_and_round_trip() -> None:
    sizes = {"heads": 6, "kv_heads": 2, "experts": 5, "layers": 3}
    found = legal_layouts(heads=6, kv_heads=2, experts=5, layers=3, devices=12)
    assert found
    assert len(set(map(str, found))) == len(found)
    for layout in found:
        check(layout, **sizes)
        assert layout.world == 12
        assert parse(str(layout)) == layout
    for tp in (1, 2, 3, 6, 12):  # by brute force over one axis
        assert (str(Layout(tp=tp, dp=12 // tp)) in map(str, found)) == (tp in (1, 2, 6))


def test_legal_layouts_over_some_axes() -> None:
    found = legal_layouts(heads=8, kv_heads=8, experts=0, layers=4, devices=4, axes=("tp", "pp"), up_to=True)
    assert [str(layout) for layout in found] == ["single", "pp2", "tp2", "pp3", "pp4", "tp2.pp2", "tp4"]
    with pytest.raises(LayoutError, match="no such axis"):
        legal_layouts(heads=1, kv_heads=1, experts=0, layers=1, devices=1, axes=("tpx",))


def test_layouts_are_values() -> None:
    assert parse("single") is SINGLE
    assert hash(parse("tp2")) == hash(Layout(tp=2))
    assert [getattr(SINGLE, axis) for axis in AXES] == [1] * 6


@pytest.mark.parametrize("text", ["ep9999", "tp9999", "pp9999", "ep7.etp9999", "tp8.ep9999"])
def test_a_huge_layout_is_refused_at_once(text: str) -> None:
    started = time.process_time()
    with pytest.raises(LayoutError):
        check(parse(text), heads=16, kv_heads=4, experts=64, layers=4)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("text", ["tp9999", "tp10000", "pp9999.dp7", "tp0", "ep9999.etp9999", "tp2.ep4", "tp256.pp256"])
def test_judge_and_engine_read_the_same_layouts(text: str) -> None:
    engine = pytest.importorskip("adapt_engine")
    layouts = pytest.importorskip("adapt_engine.layout")

    def reads(parser: Callable[[str], object], error: type[Exception]) -> bool:
        try:
            parser(text)
        except error:
            return False
        return True

    assert reads(parse, LayoutError) == reads(layouts.Layout.parse, engine.LayoutError)
