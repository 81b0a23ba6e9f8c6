"""Ranks in processes: the bits and the traffic of virtual ones, and an end in time whatever happens to one."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapt_engine import CheckpointError, Engine, EngineError, EngineOptions, SequenceRequest, SequenceResult
from adapt_engine.comm import Traffic
from adapt_engine.comm.board import Board, Sight
from adapt_engine.comm.distributed import DistributedCommunicator, Frame
from adapt_engine.comm.ledger import Entry, Ledger
from adapt_engine.config import MoESpec
from adapt_engine.layout import Layout
from adapt_engine.mesh import Mesh
from adapt_engine.runtime import watch
from adapt_engine.runtime.assemble import Assembler
from adapt_engine.runtime.nursery import Nursery
from adapt_engine.runtime.plan import Answer, RankAnswer, SequencePlan, StepPlan
from adapt_engine.runtime.requests import DTYPES
from adapt_engine.runtime.traffic import predict_traffic
from adapt_engine.runtime.wire import Garbage, dumps, loads
from adapt_engine.weights.shards import ShardPlan

from .conftest import VOCAB

Checkpoints = Callable[[str], Path]
Counts = list[dict[tuple[str, str], tuple[int, int]]]

LAYOUTS = ("tp2", "tp4", "pp2", "ep4", "sp2", "tp2.sp2", "tp2.ep2.etp2", "tp2.pp2.ep2")
MODELS = {"gqa": "qwen3_moe_wide", "mla": "deepseek_v3_wide"}
CI = Path(__file__).resolve().parents[2] / "ci"


def _drills() -> Any:
    """``ci/drills.py``, which is no package."""
    spec = importlib.util.spec_from_file_location("adapt_drills", CI / "drills.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


drills = _drills()
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as found:
        yield found


def counts(traffic: list[dict[tuple[str, str], Traffic]]) -> Counts:
    return [{key: (sums.calls, sums.sent) for key, sums in rank.items()} for rank in traffic]


def requests() -> list[SequenceRequest]:
    """The longer prompt's rows do not fit into a frame; the shorter one leaves sp ranks without rows."""
    torch.manual_seed(5)
    prompts = [tuple(torch.randint(0, VOCAB, (length,)).tolist()) for length in (40, 7)]
    return [SequenceRequest(str(row), one, max_new_tokens=3, want_logits=True) for row, one in enumerate(prompts)]


def served(engine: Engine) -> tuple[dict[str, SequenceResult], Counts]:
    """Results by id, and the traffic that `predict_traffic` expects of the steps that they took."""
    plan = ShardPlan(engine.spec, Mesh(engine.layout))
    assembler = Assembler(plan, engine.options.page_size)
    layers = {index: layer.ffn for index, layer in enumerate(engine.spec.layers) if isinstance(layer.ffn, MoESpec)}
    expected: list[dict[tuple[str, str], Traffic]] = [{} for _ in plan.mesh.places]
    step = engine.executor.step

    def predicted(order: StepPlan) -> list[RankAnswer]:
        answers = step(order)
        routing: dict[int, list[torch.Tensor]] = {
            index: [torch.empty((0, ffn.top_k), dtype=torch.int64)] * engine.layout.dp for index, ffn in layers.items()
        }
        for dp, sequences in enumerate(order.replicas):
            if sequences:
                _, taps = assembler.replica(order, answers, dp)
                for index, found in routing.items():
                    found[dp] = taps[f"layer.{index}.moe.router.ids"]
        element = DTYPES[engine.options.precision].itemsize
        for sums, rank in zip(
            expected, predict_traffic(engine.spec, engine.layout, order, routing, element=element), strict=True
        ):
            for key, traffic in rank.items():
                sums[key] = sums.get(key, Traffic()) + traffic
        return answers

    engine.executor.step = predicted  # type: ignore[method-assign]
    results = {result.id: result for result in engine.run(requests())}
    assert all(result.error is None for result in results.values())
    return results, counts(expected)


@pytest.mark.requirement(19, 39, 44, 45)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_processes_give_the_bits_and_the_traffic_of_virtual_ranks(
    kind: str, layout: str, checkpoints: Checkpoints, nursery: Nursery
) -> None:
    """Prefill and decode in fp32 and bf16; calls and bytes of every rank also equal the analytic prediction."""
    for precision in ("fp32", "bf16"):
        found = {}
        for communicator in ("virtual", "gloo"):
            options = EngineOptions(
                precision=precision,
                max_context=64,
                layout=layout,
                micro_batches=2,
                threads=1,
                communicator=communicator,
                taps=("layer.*.moe.router.ids", "layer.*.residual"),
            )
            with Engine.open(checkpoints(MODELS[kind]), options, nursery=nursery) as engine:
                results, predicted = served(engine)
                assert counts(engine.traffic()) == predicted
                assert engine.drifts == []
                found[communicator] = results, predicted, engine.memory()
                assert 0 <= engine.executor.bubble() < 1
        for name, expected in found["virtual"][0].items():
            one = found["gloo"][0][name]
            assert one.tokens == expected.tokens
            assert torch.equal(one.logits, expected.logits)
            assert all(torch.equal(one.taps[site], rows) for site, rows in expected.taps.items())
        assert found["gloo"][1:] == found["virtual"][1:]


COLLECTIVES = """
import torch
from adapt_engine.runtime import rank as module

def rows(rank, shape, dtype):
    made = torch.Generator().manual_seed(1000 * rank + sum(shape))
    return torch.randint(-99, 99, shape, generator=made).to(dtype)

def ready(self, original=module._Rank.ready):
    comm, group = self._comm, self._worker.plan.mesh.group("tp", self._comm.rank)
    size, me = group.size, group.index(comm.rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for width in ((), (1,), (7,), (3, 500)):
            counts = [5, 0, 1][:size]
            parts = comm.all_gather(rows(me, (counts[me], *width), dtype), group, counts)
            for other in range(size):
                assert torch.equal(parts[other], rows(other, (counts[other], *width), dtype))
            mine = [rows(me + to, (me + to, *width), dtype) for to in range(size)]
            for other, part in enumerate(comm.all_to_all(mine, group, [me + other for other in range(size)])):
                assert torch.equal(part, rows(me + other, (me + other, *width), dtype))
            root = rows(9, (2, *width), dtype)
            assert torch.equal(comm.broadcast(root if me == 1 else None, group, 1, (2, *width), dtype), root)
            for turn in range(3):
                comm.send(rows(me + turn, (4, *width), dtype), group, (me + 1) % size)
            comm.barrier(group)
            before = (me - 1) % size
            for turn in range(3):
                received = comm.recv(group, before, (4, *width), dtype)
                assert torch.equal(received, rows(before + turn, (4, *width), dtype))
    big = torch.tensor([1.0, 2.0**24, -(2.0**24)])
    assert float(comm.all_reduce(big[me : me + 1], group, torch.float32)) == 0
    assert len(comm._outbox) == 60
    comm.flush()
    assert not comm._outbox
    return original(self)

module._Rank.ready = ready
"""


@pytest.mark.requirement(44)
def test_collectives_move_the_right_rows_at_odd_sizes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Every rank checks what it receives: no rows, one row, more than a frame holds, all dtypes, sums in rank order."""
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)
    options = EngineOptions(max_context=64, layout="tp3", threads=1, communicator="gloo")
    with (
        Nursery(preload=[str(script)]) as own,
        Engine.open(checkpoints("qwen3_moe_three"), options, nursery=own) as engine,
    ):
        traffic = engine.traffic()
    assert {rank["all_reduce", "tp"].calls for rank in traffic} == {1}
    assert {rank["recv", "tp"].calls for rank in traffic} == {60}


FAULTS = """
import os
from pathlib import Path
from adapt_engine.comm import Communicator
from adapt_engine.runtime import rank as module
from adapt_engine.runtime.worker import Worker

def fault(rank):
    return Path(os.environ["ADAPT_TEST_FAULT"]).read_text() if rank == 1 else ""

def opened(cls, directory, plan, options, comm, original=Worker.open.__func__):
    if fault(comm.rank) == "exit":
        os._exit(3)
    return original(cls, directory, plan, options, comm)

def stepped(self, plan, original=module._Rank.step):
    answer = original(self, plan)
    return b"x" if fault(self._comm.rank) == "garbage" else answer

def reduced(self, partial, group, dtype, original=Communicator.all_reduce):
    found = fault(self.rank)
    if found == "raise":
        raise MemoryError("no memory left on this rank")
    if found == "skip":
        return partial.to(dtype)
    return original(self, partial.double() if found == "type" else partial, group, dtype)

Worker.open = classmethod(opened)
module._Rank.step = stepped
module.dumps = lambda value, original=module.dumps: value if isinstance(value, bytes) else original(value)
Communicator.all_reduce = reduced
"""
ENDINGS = {
    "exit": r"rank 1 \(tp1\) exited with status 3",
    "garbage": r"rank 1 \(tp1\) sent 1 bytes that are no message",
    "raise": r"rank 1 \(tp1\) failed: MemoryError: no memory left on this rank",
    "skip": r"rank . \(tp.\) calls all_\w+ on tp\[0,1\].* where rank . \(tp.\) called all_\w+ on tp\[0,1\]",
    "type": r"rank 1 \(tp1\): all_reduce takes float32 partials",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nursery, Path]]:
    """Ranks of which number 1 does what the file says."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faults.py").write_text(FAULTS)
    os.environ["ADAPT_TEST_FAULT"] = str(folder / "fault")
    try:
        with Nursery(preload=[str(folder / "faults.py")]) as found:
            yield found, folder / "fault"
    finally:
        del os.environ["ADAPT_TEST_FAULT"]


@pytest.mark.requirement(44, 105)
@pytest.mark.parametrize("fault", ENDINGS)
def test_a_rank_that_fails_ends_the_run_with_its_name_and_everyones_last_calls(
    fault: str, checkpoints: Checkpoints, faulty: tuple[Nursery, Path]
) -> None:
    own, file = faulty
    options = EngineOptions(max_context=64, layout="tp2", threads=1, communicator="gloo")
    file.write_text(fault)
    with (
        pytest.raises(EngineError, match=ENDINGS[fault]) as caught,
        Engine.open(checkpoints("qwen3_moe_wide"), options, nursery=own) as engine,
    ):
        list(engine.run(requests()))
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "rank 0 (tp0)",
        "rank 1 (tp1)",
    ]
    file.write_text("")
    with Engine.open(checkpoints("qwen3_moe_wide"), options, nursery=own) as engine:
        assert len(list(engine.run(requests()))) == 2


@pytest.mark.requirement(44, 105)
@on_linux
@pytest.mark.parametrize("kind", drills.KINDS)
def test_drills_end_in_time_with_rank_and_collective_and_leave_nothing(kind: str, checkpoints: Checkpoints) -> None:
    """One of each; ``ci/drills.py`` runs as many as one likes."""
    drill = drills.Drill(layout="tp2.sp2" if kind == "stall" else "tp2", kind=kind, rank=1, at=0.4, seed=3)
    outcome = drills.run(drill, checkpoints("qwen3_moe_wide"), timeout=5 if kind == "stall" else 20)
    assert outcome.problems == []
    assert outcome.error, "a fault in the middle of a run was not noticed"


@pytest.mark.requirement(105)
def test_an_engine_whose_ranks_failed_must_be_opened_again(checkpoints: Checkpoints, nursery: Nursery) -> None:
    options = EngineOptions(max_context=64, layout="pp2", threads=1, communicator="gloo")
    with Engine.open(checkpoints("qwen3_moe_wide"), options, nursery=nursery) as engine:
        os.kill(engine.executor.pids[1], signal.SIGKILL)
        with pytest.raises(EngineError, match=r"rank 1 \(pp1\) was ended by SIGKILL"):
            list(engine.run(requests()))
        with pytest.raises(EngineError, match=r"ranks were ended \(step 0: rank 1 \(pp1\) .*open the engine again"):
            list(engine.run(requests()))


@pytest.mark.requirement(105)
@on_linux
def test_a_rank_that_stands_still_between_steps_is_noticed(checkpoints: Checkpoints, nursery: Nursery) -> None:
    """Whether the order finds room on its way to the rank or not."""
    short = (SequencePlan((1, 2), 0, 2, torch.arange(2), 1),)
    long = (SequencePlan((1, 2), 0, 2, torch.zeros(1 << 20, dtype=torch.int64), 1),)
    options = EngineOptions(max_context=64, layout="pp2", threads=1, communicator="gloo", timeout=3)
    for sequences, message in (
        (
            short,
            r"rank 1 \(pp1\) is stopped and gives no sign of life for 3 s, while rank 0 \(pp0\) waits in send on pp",
        ),
        (long, r"rank 1 \(pp1\) is stopped and neither reads nor writes for 3 s"),
    ):
        with Engine.open(checkpoints("qwen3_moe_wide"), options, nursery=nursery) as engine:
            os.kill(engine.executor.pids[1], signal.SIGSTOP)
            with pytest.raises(EngineError, match=message):
                engine.executor.step(StepPlan(0, (sequences,)))


@pytest.mark.requirement(105)
@on_linux
def test_ranks_end_with_the_process_that_forked_them(checkpoints: Checkpoints, monkeypatch: Any) -> None:
    token = f"nursery-{os.getpid()}"
    monkeypatch.setenv("ADAPT_TEST_TOKEN", token)
    options = EngineOptions(max_context=64, layout="tp2", threads=1, communicator="gloo")
    with Engine.open(checkpoints("qwen3_moe_wide"), options) as engine:
        assert len(drills.alive(token)) == 3
        parent = int(Path(f"/proc/{engine.executor.pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(EngineError) as caught:
            list(engine.run(requests()))
        blamed = f"the process that forks ranks (pid {parent}) was ended by SIGKILL, and every rank with it"
        assert blamed in str(caught.value).splitlines()[0] and "rank 1" not in str(caught.value).splitlines()[0]
        with pytest.raises(EngineError, match=r"SIGKILL.*open the engine again"):
            list(engine.run(requests()))
    assert drills.alive(token) == []


@pytest.mark.requirement(105)
def test_a_process_that_cannot_start_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineError, match="the process that forks ranks does not answer .*exit status 1"):
        Nursery(preload=["no_such_module"])
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.requirement(105)
def test_a_checkpoint_is_refused_as_on_one_rank(copied: Callable[[str], Path], nursery: Nursery) -> None:
    directory = copied("qwen3_moe_wide")
    for file in directory.glob("model-00001-*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    messages = []
    for communicator in ("virtual", "gloo"):
        options = EngineOptions(max_context=64, layout="tp2", threads=1, communicator=communicator)
        with pytest.raises(CheckpointError) as caught:
            Engine.open(directory, options, nursery=nursery)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


CONTROLLER = """
import signal, sys
from adapt_engine import Engine, EngineOptions, SequenceRequest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored

options = EngineOptions(max_context=4096, layout="tp2", threads=1, communicator="gloo", timeout=30)
try:
    with Engine.open(sys.argv[1], options) as engine:
        engine.submit(SequenceRequest("0", (1, 2, 3), max_new_tokens=4000))
        engine.step()
        print("running", flush=True)
        while engine.busy:
            engine.step()
except KeyboardInterrupt:
    assert not engine.executor.pids
    print("interrupted", flush=True)
"""


@pytest.mark.requirement(105)
@on_linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_a_controller_that_is_interrupted_or_killed(
    number: signal.Signals, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    token = f"controller-{os.getpid()}-{number}"
    environment = {**os.environ, "ADAPT_TEST_TOKEN": token, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CONTROLLER, str(checkpoints("qwen3_moe_wide"))]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "running\n"
        assert len(drills.alive(token)) == 4, "controller, nursery, two ranks"
        controller.send_signal(number)
        rest = controller.stdout.read()
    assert rest == ("interrupted\n" if number == signal.SIGINT else "")
    until = time.monotonic() + 30
    while drills.alive(token) and time.monotonic() < until:
        time.sleep(0.05)
    assert drills.alive(token) == []
    assert list(tmp_path.iterdir()) == []


def sight(awaited: int = -1, changed: float = 90.0, beat: float = 99.9) -> Sight:
    return Sight(beat, changed, awaited, 7, "all_reduce on tp[0,1]" if awaited >= 0 else "", "...")


@pytest.mark.requirement(105)
@pytest.mark.parametrize(
    ("sights", "unfinished", "expected"),
    [
        ([sight(1), sight(), sight(0)], [0, 1, 2], None),
        ([sight(1), sight(0, 98)], [0, 1], None),
        ([sight(1), sight(beat=90)], [0, 1], "1 gives no sign of life for 5 s, while rank 0 (tp0) waits in all_reduce"),
        ([sight(1), sight(0, 90.1)], [0, 1], "0 waits for ever in all_reduce on tp[0,1]: rank 1 (tp1) is in all_red"),
        ([sight(1), sight()], [0], "0 waits for ever in all_reduce on tp[0,1]: rank 1 (tp1) has finished the step"),
        # The last one waits longest, but for one of two that lost each other.
        ([sight(1, 91), sight(0, 92), sight(0, 80)], [0, 1, 2], "0 waits for ever"),
        ([sight(1, 91), sight(2, 92), sight(1, 80)], [0, 1, 2], "2 waits for ever"),
    ],
)
def test_slow_ranks_are_told_from_stuck_ones(sights: list[Sight], unfinished: list[int], expected: str | None) -> None:
    """At second 100 with a timeout of 5: who computes may take long, who waits for one who computes too."""
    mesh = Mesh(Layout.parse(f"tp{len(sights)}"))
    verdict = watch.stuck(mesh, dict(enumerate(sights)), unfinished, now=100.0, timeout=5.0)
    if expected is None:
        assert verdict is None
    else:
        assert verdict is not None
        assert "{} {}".format(*verdict).startswith(expected)
        # On a busy machine ranks that could run may be kept from it: that is no fault of theirs.
        late = {rank for rank, one in enumerate(sights) if one.beat < 95} or {0}
        assert watch.stuck(mesh, dict(enumerate(sights)), unfinished, 100.0, 5.0, late.__contains__) is None


@pytest.mark.requirement(105)
def test_a_board_shows_what_each_rank_did_last() -> None:
    board = Board.create(2)
    ledger = Ledger()
    ledger.step = 4
    ledger.add("tp", Entry(4, "all_reduce", "tp[0,1]", "float32", 64, 0.1))
    ledger.pending = "all_gather on tp[0,1] " + "x" * 5000
    board.write(1, ledger)
    board.wait_for(1, 0)
    seen, other = board.read(1), board.read(0)
    assert (seen.step, seen.awaited) == (4, 0)
    assert seen.pending.startswith("all_gather on tp[0,1] xxx")
    assert seen.tail.startswith("all_reduce tp[0,1] float32 64 B; now in all_gather")
    assert (other.step, other.awaited, other.pending, other.tail) == (0, -1, "", "no collective yet")
    assert 0 <= time.monotonic() - other.beat < 60
    board.close()
    board.close()


@pytest.mark.requirement(105)
@pytest.mark.parametrize("width", [0, 3, 900, 9000])
def test_a_frame_with_any_bit_changed_is_refused(width: int) -> None:
    payload = torch.arange(width).to(torch.uint8)
    call = "all_gather on tp[0,1] ([1, 1] rows of [3] uint8)"
    head = Frame(7, width, zlib.crc32(payload.numpy().data), call, "uint8", (1, width))
    frame, *rest = head.pack(payload)
    back, inside = Frame.unpack(frame)
    assert back == head
    assert torch.equal(payload, rest[0] if inside is None else inside)
    dice = random.Random(width)
    for _ in range(300):
        changed = frame.clone()
        changed[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
        with pytest.raises(ValueError, match="checksum"):
            Frame.unpack(changed)


class Loopback(DistributedCommunicator):
    """Ends that meet in one list of message parts instead of a network."""

    def __init__(self, rank: int, mail: list[torch.Tensor]) -> None:
        super().__init__(Mesh(Layout.parse("pp2")), rank, timeout=1.0)
        self.mail = mail

    def _post(self, call: Any, peer: int, kind: int, number: int, parts: list[torch.Tensor]) -> list[Any]:
        self.mail.extend(parts)
        return []

    def _listen(self, call: Any, peer: int, tag: int, size: int = 4096) -> tuple[Any, torch.Tensor]:
        return None, self.mail.pop(0)

    def _wait(self, work: Any, call: Any, peer: int) -> None: ...


@pytest.mark.requirement(44, 105)
@pytest.mark.parametrize("rows", [3, 3000])
def test_what_happened_to_a_message_is_told_where_it_arrives(rows: int) -> None:
    """Lost, doubled, damaged in its tensor, of another shape, of another call; within a frame and beside it."""

    def received(change: Callable[[list[torch.Tensor]], object], shape: tuple[int, ...] = (rows, 2)) -> torch.Tensor:
        mail: list[torch.Tensor] = []
        ends = Loopback(0, mail), Loopback(1, mail)
        group = ends[0]._mesh.group("pp", 0)
        for turn in range(2):
            ends[0].send(torch.full((rows, 2), float(turn)), group, 1)
        change(mail)
        ends[1].recv(group, 0, shape, torch.float32)
        return ends[1].recv(group, 0, shape, torch.float32)

    parts = 1 if rows == 3 else 2
    assert torch.equal(received(lambda mail: None), torch.ones(rows, 2))

    def lose(mail: list[torch.Tensor]) -> None:
        del mail[:parts]

    def double(mail: list[torch.Tensor]) -> None:
        mail[:0] = mail[:parts]

    with pytest.raises(
        EngineError, match=r"rank 1 \(pp1\): recv on .*: message 2 of rank 0 \(pp0\) came where 1 was due"
    ):
        received(lose)
    with pytest.raises(
        EngineError, match=r"message 1 of rank 0 \(pp0\) came where 2 was due .*: one was lost or doubled"
    ):
        received(double)
    damaged = "frame" if parts == 1 else "tensor"
    with pytest.raises(EngineError, match=rf"a message of rank 0 \(pp0\) is damaged: checksum of its {damaged}"):
        received(lambda mail: mail[parts - 1][20:21].add_(1))
    with pytest.raises(EngineError, match=rf"recv on .*: rank 0 sent \[{rows}, 2\] float32, expected \[1, 2\] float32"):
        received(lambda mail: None, (1, 2))

    mail: list[torch.Tensor] = []
    ends = Loopback(0, mail), Loopback(1, mail)
    group = ends[0]._mesh.group("pp", 0)
    ends[0].send(torch.zeros(rows, 2), group, 1)
    with pytest.raises(EngineError, match=r"rank 1 \(pp1\) calls broadcast on pp\[0,1\].* where rank 0 .* called send"):
        ends[1].broadcast(None, group, 0, (rows, 2), torch.float32)


class Foreign:
    """Not part of any message."""


@pytest.mark.requirement(108)
def test_messages_carry_tensors_bit_for_bit_and_no_foreign_types() -> None:
    tensors = [
        torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        torch.empty((0, 3)),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(7),
    ]
    for tensor in tensors:
        sent = RankAnswer([Answer(None, {"site": tensor})])
        received = loads(dumps(sent))
        assert isinstance(received, RankAnswer)
        (back,) = received.batches[0].taps.values()
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bytes(back.reshape(-1).view(torch.uint8).numpy()) == bytes(
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        )
    for foreign in (Foreign(), os.system, [Path("x")]):
        with pytest.raises(Garbage, match="no message"):
            loads(dumps(foreign))
    for damaged in (b"", b"garbage", dumps(RankAnswer([]))[:-3]):
        with pytest.raises(Garbage):
            loads(damaged)


@pytest.mark.parametrize(("name", "value"), [("communicator", "nccl"), ("timeout", 0), ("timeout", "5")])
def test_options_are_checked(name: str, value: object) -> None:
    with pytest.raises(EngineError, match=f"option {name}: "):
        EngineOptions(**{name: value})  # type: ignore[arg-type]
