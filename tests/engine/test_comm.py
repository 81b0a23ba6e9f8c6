"""Collectives of the virtual communicator: values, order, accounts, and an end at once where ranks disagree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adapt_engine import EngineError
from adapt_engine.comm import Communicator, SoloCommunicator, Traffic, VirtualWorld
from adapt_engine.layout import Layout
from adapt_engine.mesh import GROUPS, Mesh
from hypothesis import given, settings
from hypothesis import strategies as st


def world(text: str) -> VirtualWorld:
    return VirtualWorld(Mesh(Layout.parse(text)))


def everyone(virtual: VirtualWorld, task: Any, axis: str = "world") -> list[Any]:
    """``task(communicator, group)`` on every rank."""
    return virtual.run(lambda rank: task(virtual.communicators[rank], virtual.mesh.group(axis, rank)))


@pytest.mark.requirement(44)
@given(
    counts=st.lists(st.integers(0, 5), min_size=2, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64]),
    width=st.integers(1, 7),
)
@settings(max_examples=30, deadline=None)
def test_collectives_move_the_right_rows_at_odd_sizes(counts: list[int], dtype: torch.dtype, width: int) -> None:
    size = len(counts)
    virtual = world(f"tp{size}")
    rows = [torch.randint(-9, 9, (count, width)).to(dtype) for count in counts]

    def task(comm: Communicator, group: Any) -> Any:
        gathered = comm.all_gather(rows[comm.rank], group, counts)
        sent = [rows[comm.rank] + to for to in range(size)]
        swapped = comm.all_to_all(sent, group, counts)
        root = comm.broadcast(rows[1] if comm.rank == 1 else None, group, 1, (counts[1], width), dtype)
        comm.send(rows[comm.rank], group, (comm.rank + 1) % size)
        before = (comm.rank - 1) % size
        return gathered, swapped, root, comm.recv(group, before, (counts[before], width), dtype)

    for rank, (gathered, swapped, root, received) in enumerate(everyone(virtual, task)):
        assert all(torch.equal(part, rows[other]) for other, part in enumerate(gathered))
        assert all(torch.equal(part, rows[other] + rank) for other, part in enumerate(swapped))
        assert torch.equal(root, rows[1]) and torch.equal(received, rows[rank - 1])
        size_of_row = width * dtype.itemsize
        others = size - 1
        assert virtual.communicators[rank].ledger.traffic() == {
            ("all_gather", "world"): Traffic(1, counts[rank] * size_of_row * others, pytest.approx(0, abs=9)),
            ("all_to_all", "world"): Traffic(1, counts[rank] * size_of_row * others, pytest.approx(0, abs=9)),
            ("broadcast", "world"): Traffic(1, (rank == 1) * counts[1] * size_of_row * others, pytest.approx(0, abs=9)),
            ("send", "world"): Traffic(1, counts[rank] * size_of_row, pytest.approx(0, abs=9)),
            ("recv", "world"): Traffic(1, 0, pytest.approx(0, abs=9)),
        }


@pytest.mark.requirement(44)
def test_a_sum_is_taken_in_rank_order_in_float32_and_rounded_once() -> None:
    """1 + 2^24 - 2^24 is 0 in float32 in this order and 1 in another."""
    virtual = world("tp3")
    parts = [torch.tensor([1.0, 1.0]), torch.tensor([2.0**24, 0.003]), torch.tensor([-(2.0**24), 0.003])]
    sums = everyone(virtual, lambda comm, group: comm.all_reduce(parts[comm.rank], group, torch.bfloat16))
    expected = (parts[0] + parts[1] + parts[2]).bfloat16()
    assert expected[0] == 0 and expected[1] == torch.tensor(1.006).bfloat16()
    assert all(torch.equal(one, expected) for one in sums)
    with pytest.raises(EngineError, match=r"rank 0 \(tp0\): all_reduce takes float32"):
        everyone(virtual, lambda comm, group: comm.all_reduce(parts[0].half(), group, torch.float16))


@pytest.mark.requirement(44)
def test_ranks_run_in_the_same_order_every_time() -> None:
    """Unsynchronised threads would interleave differently; the baton makes the trace a function of the program."""

    def trace() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        virtual = world("tp4")

        def task(comm: Communicator, group: Any) -> None:
            for turn in range(3):
                seen.append((turn, comm.rank))
                comm.barrier(group)

        everyone(virtual, task)
        return seen

    first = trace()
    # A rank that completes a meeting goes on; the others follow in rank order.
    assert first[:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]
    assert all(trace() == first for _ in range(5))


FAULTY: dict[str, tuple[Any, str]] = {
    "other op": (
        lambda comm, group: comm.barrier(group) if comm.rank == 2 else comm.all_gather(torch.zeros(1, 1), group),
        r"rank 2 \(tp2\) calls barrier on world\[0,1,2\].* where rank 0 \(tp0\) called all_gather on world",
    ),
    "other dtype": (
        lambda comm, group: comm.all_gather(torch.zeros(1, 1, dtype=[torch.half, torch.float][comm.rank > 0]), group),
        r"rank 1 \(tp1\) calls all_gather .*float32.* where rank 0 \(tp0\) called .*float16",
    ),
    "other shape": (
        lambda comm, group: comm.all_reduce(torch.zeros(2, 3 + comm.rank), group, torch.float32),
        r"rank 1 \(tp1\) calls all_reduce .*\[4\] float32.* where rank 0 \(tp0\) called .*\[3\] float32",
    ),
    "wrong rows": (
        lambda comm, group: comm.all_to_all([torch.zeros(1, 2)] * 3, group, [1, 1, 1 + (comm.rank == 0)]),
        r"rank 0 \(tp0\): all_to_all .*: rank 2 sent \[1, 2\] float32, expected \[2, 2\]",
    ),
    "skipped": (
        lambda comm, group: None if comm.rank == 1 else comm.barrier(group),
        r"rank . \(tp.\) waits for ever in barrier on world\[0,1,2\].*: rank 1 \(tp1\) has finished",
    ),
    "crossed": (
        lambda comm, group: comm.recv(group, (comm.rank + 1) % 3, (1, 1), torch.float32),
        r"waits for ever in recv on world\[0,1,2\].*: rank . \(tp.\) is in recv",
    ),
    "raised": (
        lambda comm, group: comm.barrier(group) if comm.rank != 1 else math.sqrt(-1),
        r"rank 1 \(tp1\): ValueError: ",
    ),
}


@pytest.mark.requirement(44, 105)
@pytest.mark.parametrize("fault", FAULTY)
def test_ranks_that_disagree_end_at_once_with_everyones_last_calls(fault: str) -> None:
    task, message = FAULTY[fault]
    virtual = world("tp3")
    virtual.communicators[0].ledger.step = virtual.communicators[1].ledger.step = 7
    with pytest.raises(EngineError, match=message) as caught:
        everyone(virtual, task)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("step ")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["rank 0 (tp0)", "rank 1 (tp1)", "rank 2 (tp2)"]
    # The world is usable again.
    assert everyone(virtual, lambda comm, group: len(comm.all_gather(torch.ones(1, 1), group))) == [3, 3, 3]


def test_one_rank_alone_gets_back_what_it_sends() -> None:
    comm = SoloCommunicator()
    group = Mesh(Layout()).group("tp", 0)
    one = torch.ones(2, 3)
    assert torch.equal(comm.all_reduce(one, group, torch.float32), one)
    assert comm.all_to_all([one], group, [2])[0] is one
    assert comm.ledger.traffic()["all_to_all", "tp"].sent == 0
    with pytest.raises(EngineError, match="one rank"):
        comm.send(one, group, 0)


@pytest.mark.requirement(12)
@pytest.mark.parametrize("text", ["single", "tp8.ep16", "tp2.pp2.ep2.dp2", "tp2.ep2.etp2", "sp4", "pp3.ep2.dp4"])
def test_groups_partition_the_world_on_both_meshes(text: str) -> None:
    layout = Layout.parse(text)
    mesh = Mesh(layout)
    sizes = {"expert": layout.ep * layout.etp, "stage": layout.block, "world": layout.world}
    for axis in GROUPS:
        groups = {mesh.group(axis, rank).ranks for rank in range(layout.world)}
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.world))
        expected = sizes.get(axis) or getattr(layout, axis)
        assert {len(ranks) for ranks in groups} == {expected}
        for rank in range(layout.world):
            place = mesh.places[rank]
            if axis in ("tp", "sp", "dp", "pp", "ep", "etp"):
                assert mesh.group(axis, rank).index(rank) == getattr(place, axis)
    assert mesh.at(pp=layout.pp - 1, dp=layout.dp - 1, sp=layout.sp - 1, tp=layout.tp - 1).rank == layout.world - 1
