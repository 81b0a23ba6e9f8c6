"""Rank drills: one fault in one message of one rank process, at random; the run must end in time and say where.

    python ci/drills.py --count 50 --seed 1 --timeout 5

Each drill opens the engine over gloo on a random layout, with ranks in processes of which one kills itself, stops,
loses a message or damages one. Either the run ends within 30 s of the fault with an error whose first line names that
rank and a collective and which shows the last calls of every rank, or it completes with the right tokens. Afterwards
nothing may be left: no process that a drill started, no listening port, no file, no descriptor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from adapt_engine import Engine, EngineError, EngineOptions, SequenceRequest  # noqa: E402
from adapt_engine.layout import Layout  # noqa: E402
from adapt_engine.mesh import Mesh  # noqa: E402
from adapt_engine.runtime.nursery import Nursery  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

KINDS = ("kill", "stall", "drop", "corrupt")
LAYOUTS = ("tp2", "pp2", "ep2", "sp2", "tp4", "pp3", "ep4", "tp2.pp2", "tp2.sp2", "tp2.ep2.etp2", "ep2.sp2")
LIMIT = 30.0
"""Seconds from the fault to the end of the run."""
COLLECTIVE = re.compile(
    r"(all_gather|all_reduce|all_to_all|broadcast|barrier|send|recv|send and recv) on [a-z]+\[[\d,]+\]"
)
Tokens = dict[str, tuple[int, ...]]
_LISTEN = "0A"


@dataclass(frozen=True)
class Drill:
    """One fault, when ``rank`` has sent the share ``at`` of its messages of the run."""

    layout: str
    kind: str
    rank: int
    at: float
    seed: int

    @classmethod
    def random(cls, dice: random.Random, kind: str) -> Drill:
        layout = dice.choice(LAYOUTS)
        shape = Layout.parse(layout)
        senders = shape.world - (shape.world == shape.pp)  # a last stage of one rank has nobody to tell
        rank = dice.randrange(senders)
        return cls(layout, kind, rank, dice.random(), dice.randrange(1 << 30))

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.0%} of the messages of rank {self.rank} on {self.layout}"


@dataclass
class Outcome:
    """How a drill ended; ``problems`` is empty where it ended as it must."""

    drill: Drill
    seconds: float
    """From the fault (from the start of the run where there was none) to the end."""
    error: str
    problems: list[str]

    def __str__(self) -> str:
        ended = self.error.splitlines()[0] if self.error else "completed with the right tokens"
        verdict = "ok  " if not self.problems else "FAIL"
        return "\n".join(
            [f"{verdict} {self.drill}: {self.seconds:.1f} s: {ended}", *(f"     {p}" for p in self.problems)]
        )


def requests() -> list[SequenceRequest]:
    return [
        SequenceRequest(str(row), tuple(range(3, 3 + length)), max_new_tokens=4) for row, length in ((0, 20), (1, 5))
    ]


def serve(directory: Path, options: EngineOptions, nursery: Nursery | None = None) -> tuple[Tokens, list[int]]:
    """Tokens by request, and how many messages each rank sent."""
    with Engine.open(directory, options, nursery=nursery) as engine:
        found = {result.id: result.tokens for result in engine.run(requests())}
        mesh, traffic = Mesh(engine.layout), engine.traffic()
    sent = [
        sum(sums.calls * messages(op, mesh.group(axis, rank).size) for (op, axis), sums in each.items())
        for rank, each in enumerate(traffic)
    ]
    return found, sent


def messages(op: str, size: int) -> int:
    """That one call of ``op`` sends to the others of a group of ``size``."""
    return {"send": 1, "recv": 0}.get(op, size - 1)


def run(drill: Drill, directory: Path, timeout: float) -> Outcome:
    """One drill on the checkpoint in ``directory``."""
    options = EngineOptions(layout=drill.layout, max_context=64, threads=1, timeout=timeout)
    right, sent = serve(directory, options)
    fault = {
        "kind": drill.kind,
        "rank": drill.rank,
        "message": 1 + int(drill.at * sent[drill.rank]),
        "seed": drill.seed,
    }
    error, problems, found = "", [], right
    # libuv, behind the store, keeps one pipe from its first use on.
    TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before, ports = descriptors(), set(listening())
    with scratch() as (folder, token):
        mark = folder / "mark"
        os.environ["ADAPT_DRILL"] = json.dumps({**fault, "mark": str(mark), "token": token})
        with Nursery(preload=[str(Path(__file__).with_name("drill_fault.py"))]) as nursery:
            opened = time.monotonic()
            try:
                found, _ = serve(directory, replace(options, communicator="gloo"), nursery)
            except EngineError as problem:
                error = str(problem)
        ended = time.monotonic()
        del os.environ["ADAPT_DRILL"]
        happened = float(mark.read_text()) if mark.exists() else 0.0
        mark.unlink(missing_ok=True)
        problems += [f"file left: {path}" for path in folder.iterdir()]
        problems += [f"process left: {name}" for name in alive(token)]
    seconds = ended - (happened or opened)
    problems += [f"port left: {port}" for port in set(listening()) - ports]
    problems += [f"descriptor left: {name}" for name in descriptors() - before]
    if seconds > LIMIT:
        problems.append(f"took {seconds:.1f} s")
    problems += judged(drill, error) if error else []
    if not error and found != right:
        problems.append(f"completed with other tokens: {found}, expected {right}")
    if error and not happened:
        problems.append("failed without a fault")
    return Outcome(drill, seconds, error, problems)


def judged(drill: Drill, error: str) -> list[str]:
    """What the error lacks."""
    head, *ledgers = error.splitlines()
    mesh = Mesh(Layout.parse(drill.layout))
    lacking = [] if mesh.name(drill.rank) in head else [f"the error does not name {mesh.name(drill.rank)}"]
    if not COLLECTIVE.search(head):
        lacking.append("the error names no collective")
    if [line.split(":")[0].strip() for line in ledgers] != [mesh.name(rank) for rank in range(len(mesh.places))]:
        lacking.append("the error does not show every rank's last calls")
    return lacking


@contextmanager
def scratch() -> Iterator[tuple[Path, str]]:
    """An empty directory that all processes of the drill use for temporary files, and a text to know them by."""
    previous = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="adapt-drill-") as name:
        os.environ["TMPDIR"] = name
        try:
            yield Path(name), f"drill-{os.getpid()}-{time.monotonic_ns()}"
        finally:
            if previous is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = previous


def alive(token: str) -> list[str]:
    """Processes whose environment was that of the drill, but this one; zombies count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            if token.encode() in (entry / "environ").read_bytes() or (
                status[0] == "Z" and int(status[1]) == os.getpid()
            ):
                found.append(f"{entry.name} ({status[0]})")
        except OSError:
            continue
    return found


def descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {os.readlink(entry)}")
        except OSError:
            continue
    return found


def listening() -> list[int]:
    """Ports on which this process listens."""
    held = {name.partition("socket:[")[2].removesuffix("]") for name in descriptors()}
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN and row[9] in held]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=5.0, help="EngineOptions.timeout: when a rank counts as stuck")
    parser.add_argument("--model", default="qwen3-moe-wide", help="of the catalogue, or a checkpoint directory")
    arguments = parser.parse_args()
    if arguments.count < 1:  # no drill at all would be a green one
        parser.error(f"--count: {arguments.count} is not a number of at least 1")
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="adapt-drills-") as name:
        directory = Path(arguments.model)
        if not directory.is_dir():
            from pytest_adapt.models import materialise

            directory = materialise(arguments.model, Path(name))
        outcomes = []
        for index in range(arguments.count):
            outcomes.append(run(Drill.random(dice, KINDS[index % len(KINDS)]), directory, arguments.timeout))
            print(f"{index + 1:3d} {outcomes[-1]}", flush=True)
    bad = sum(bool(one.problems) for one in outcomes)
    ended = [one for one in outcomes if one.error]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(Counter(one.drill.kind for one in ended).items()))
    completed = len(outcomes) - len(ended)
    print(f"{len(outcomes)} drills, {bad} bad: {len(ended)} ended with an error ({kinds}), {completed} completed")
    for kind in KINDS:
        times = sorted(one.seconds for one in ended if one.drill.kind == kind)
        if times:
            print(
                f"  {kind}: {times[len(times) // 2]:.1f} s in the middle, {times[-1]:.1f} s at most from fault to end"
            )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
