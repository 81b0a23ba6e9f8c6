"""The ``gate`` fixture: what a load costs, against counters on record and against a baseline.

Every verdict is given inside the test that asks for it, so that its outcome, JUnit, -x and the exit code agree.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.stash import STATE
from pytest_adapt.verdict.result import Status
from pytest_adapt.verdict.status import Verdict

if TYPE_CHECKING:
    from pytest_adapt.handle import ModelHandle
    from pytest_adapt.open_target import OpenTarget
    from pytest_adapt.options import Settings
    from pytest_adapt.perf.baseline import Baseline
    from pytest_adapt.perf.gate import Comparison, Gate
    from pytest_adapt.perf.instructions import Instructions
    from pytest_adapt.perf.ledger import Ledger, Row
    from pytest_adapt.perf.rounds import Benchmark
    from pytest_adapt.perf.sides import Side
    from pytest_adapt.runner import Runner
    from pytest_adapt.target.protocol import Deployment
    from pytest_adapt.target.registry import Registry, TargetSpec

__all__ = ["Asked", "Gating", "baseline_of"]


def baseline_of(config: pytest.Config, settings: Settings, spec: TargetSpec, registry: Registry) -> Baseline | None:
    """What --adapt-baseline names; None without --adapt-gate. Raises pytest.UsageError."""
    if not settings.gate:
        return None
    from pytest_adapt.perf.baseline import BaselineError, resolve_baseline

    try:
        return resolve_baseline(settings.baseline, spec, registry, config.rootpath)
    except BaselineError as error:
        raise pytest.UsageError(f"--adapt-baseline: {error}") from None


class Gating:
    """The gate of one run. Sides are built and measured when the first test asks."""

    def __init__(self, runner: Runner, baseline: Baseline | None) -> None:
        self._runner = runner
        self.baseline = baseline
        self.items: Sequence[pytest.Item] = ()
        """The conformance items of the run, in order."""
        self.gate: Gate | None = None
        self._sides: tuple[Side, Side] | None = None
        self._unbuilt = ""
        """Why the sides cannot be built."""
        self._instructions: Instructions | None = None

    def asked_by(self, item: pytest.Item) -> Asked:
        """The fixture's value for one test."""
        return Asked(self, self._runner, item)

    def left_for_later(self, tier: str) -> str:
        """Why this run leaves a tier out; "" where it does not."""
        chosen = self._runner.settings.gate
        if not chosen or tier not in ("times", "instructions") or chosen in (tier, "all"):
            return ""
        return f"{tier} are no part of --adapt-gate={chosen}; --adapt-gate={tier} or --adapt-gate=all measures them"

    def header(self) -> list[str]:
        """A line for the head of a run."""
        if self.baseline is None:
            return []
        moves = (
            ""
            if self.baseline.pinned
            else ", which moves: what lands on it is compared with itself; pin a tag or commit"
        )
        return [f"adapt gate: {self._runner.settings.gate} against {self.baseline.label}{moves}"]

    def summary(self) -> list[str]:
        """Lines for the end of a run."""
        return [] if self.gate is None else self.gate.summary()

    def facts(self) -> dict[str, Any]:
        """What report.json holds; empty without a gate."""
        gate = self.gate
        if self.baseline is None or gate is None:
            return {}
        control = gate.control
        return {
            "baseline": gate.baseline.label,
            "pinned": self.baseline.pinned,
            "target": gate.target.label,
            "seed": gate.seed,
            "machine": gate.machine,
            "control": None
            if control is None
            else {
                "case": gate.control_case,
                "ratio": control.ratio,
                "interval": control.interval,
                "pairs": control.pairs,
            },
            "suspected": gate.suspected,
            "comparisons": [_plain(one) for one in gate.comparisons.values()],
        }

    def keep_trend(self) -> None:
        """Add what was compared to ``.adapt/gate/trend.jsonl``; a planted fault is no history. Raises OSError."""
        from pytest_adapt.perf.trend import FILE, Point, append

        if self.gate is None or self._runner.settings.inject:
            return
        points = [
            Point(
                at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                commit=self._commit(),
                target=self._runner.settings.target,
                baseline=self.gate.baseline.label,
                case=case,
                ratio=one.estimate.ratio,
                low=one.estimate.interval[0],
                high=one.estimate.interval[1],
                pairs=len(one.estimate.pairs),
                clock=one.clock,
                verdict=one.status,
            )
            for case, one in self.gate.comparisons.items()
            if one.estimate is not None and one.status != "invalid machine"
        ]
        if points:
            append(self._runner.config.rootpath / FILE, points)

    def close(self) -> None:
        """Forget the items."""
        self.items = ()

    def sides(self) -> tuple[Side, Side]:
        """(the baseline, the target). Raises Verdict error where one cannot be built."""
        from dataclasses import replace

        from pytest_adapt.perf.baseline import BaselineError, Builder

        runner = self._runner
        if self.baseline is None:
            raise Verdict(Status.ERROR, "no baseline: --adapt-gate --adapt-baseline=REF, FILE.whl or SPEC")
        if self._unbuilt:
            raise Verdict(Status.ERROR, self._unbuilt)
        if self._sides is None:
            runner.host.doing = f"building {self.baseline.label} and what stands against it"
            try:
                a, b = self.baseline.sides(Builder(runner.config.rootpath, runner.settings.gate_build))
            except (BaselineError, OSError) as error:
                self._unbuilt = f"--adapt-baseline: {error}"
                raise Verdict(Status.ERROR, self._unbuilt) from None
            finally:
                runner.host.doing = ""
            if runner.settings.inject:
                b = replace(b, plant=(("pytest_adapt.faults.registry:plant", {"identifier": runner.settings.inject}),))
            self._sides = a, b
        return self._sides

    def times(self, benchmark: Benchmark) -> Comparison:
        """The verdict on a benchmark; the first call measures all of the run."""
        from pytest_adapt.perf.gate import Gate

        runner = self._runner
        if self.gate is None:
            a, b = self.sides()
            self.gate = Gate(
                a,
                b,
                runner.spec.settings.log_dir,
                planned=lambda: self._planned("times"),
                timeout=runner.settings.timeout,
                tell=self._tell,
            )
        runner.host.close()  # what this process holds would be a neighbour
        try:
            return self.gate.times(benchmark)
        finally:
            runner.host.doing = ""

    def instructions(self, benchmark: Benchmark) -> dict[str, int | tuple[str, str]]:
        """Instructions of a benchmark on both sides; the first call counts all of the run."""
        from pytest_adapt.perf.instructions import Instructions

        runner = self._runner
        if self._instructions is None:
            a, b = self.sides()
            self._instructions = Instructions(
                a,
                b,
                runner.spec.settings.log_dir,
                planned=lambda: self._planned("instructions"),
                timeout=runner.settings.timeout,
                tell=self._tell,
            )
        runner.host.close()
        try:
            return self._instructions.of(benchmark)
        finally:
            runner.host.doing = ""

    def _tell(self, line: str) -> None:
        self._runner.host.doing = f"the gate: {line}"

    def _planned(self, tier: str) -> list[Benchmark]:
        """Benchmarks of all items of a tier; one that cannot be made is left to its own item, which says why."""
        found = []
        for item in self.items:
            state = item.stash[STATE]
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if state.mark.tier != tier or not {"model", "load"} <= params.keys():
                continue
            try:
                model = self._runner.model(item, str(params["model"]))
                layout, precision = str(params.get("layout", "single")), str(params.get("precision", "fp32"))
                deployment = self._runner.deployment(item, model, layout, precision)
                found.append(benchmark_of(state.case, deployment, model, str(params["load"])))
            except Verdict:
                continue
        return found

    def _commit(self) -> str:
        import subprocess

        words = ["git", "-C", str(self._runner.config.rootpath), "rev-parse", "HEAD"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""


class Asked:
    """The ``gate`` fixture in one test. Each method ends the test with its verdict."""

    def __init__(self, gating: Gating, runner: Runner, item: pytest.Item) -> None:
        self._gating, self._runner = gating, runner
        self._state = item.stash[STATE]

    def counters(self, target: OpenTarget, model: ModelHandle, load: str, judge: Any) -> None:
        """The load's exact counters against those on record (`pytest_adapt.perf.counters`)."""
        from pytest_adapt.perf.counters import cell_of, count, held_against
        from pytest_adapt.perf.loads import load_named

        cell = cell_of(target, model)
        ledger = self._ledger(target.info.name, cell)
        of = f"{target.info.name} on {cell}"
        if ledger is None and self._runner.settings.goldens not in ("new", "update"):
            raise Verdict(*held_against(None, None, of), optional=True)
        found = count(target, model, load_named(load))
        status, why = held_against(ledger, found, of)
        judge.promise("counters", status is not Status.MISMATCH, why, compared=len(found.counters))
        rebuilt = status is Status.UNCHECKED and ledger is not None
        if proposed := self._proposed(status, found, target.info.name, rebuilt):
            why = f"{why}\nproposed: {proposed}"
        raise Verdict(status, why, optional=status is Status.UNCHECKED)

    def registered(self, target: OpenTarget, model: ModelHandle, judge: Any) -> None:
        """Every load that is on record for this deployment is still run."""
        from pytest_adapt.perf.counters import cell_of
        from pytest_adapt.perf.loads import LOADS

        cell = cell_of(target, model)
        ledger = self._ledger(target.info.name, cell)
        if ledger is None:
            raise Verdict(Status.UNCHECKED, f"no counters of {target.info.name} on {cell} are on record", optional=True)
        gone = [row.key for row in ledger.gone(cell, LOADS)]
        if gone:
            raise Verdict(Status.GONE, f"on record, and nobody runs them: {', '.join(gone)} ({ledger.path})")
        rows = sum(row.cell == cell for row in ledger.rows.values())
        judge.promise("loads.registered", True, f"{rows} on record", value=0.0, compared=max(1, rows))

    def times(self, deployment: Deployment, model: ModelHandle, load: str, judge: Any) -> None:
        """The load's time against the baseline's, in pairs of fresh processes (`pytest_adapt.perf.gate`)."""
        from pytest_adapt.perf.paired import LEAST, LEAST_WALL

        found = self._gating.times(benchmark_of(self._state.case, deployment, model, load))
        if found.estimate is not None:
            least = math.expm1(LEAST_WALL if found.clock == "wall" and "waiting" in found.clock_why else LEAST)
            judge.promise(
                "times.slower",
                found.status in ("same", "improvement"),
                str(found.estimate),
                value=max(0.0, found.estimate.ratio - 1),
                budget=least,
                compared=len(found.estimate.pairs),
                settled=found.status in ("same", "improvement", "regression"),
            )
            self._figures(judge, load, found)
            if self._runner.settings.inject:
                self._runner.collector.exercised.add((model.name, deployment.layout))
        raise Verdict(Status(found.status), "\n".join(found.lines()))

    def instructions(self, deployment: Deployment, model: ModelHandle, load: str, judge: Any) -> None:
        """The load's instructions against the baseline's (`pytest_adapt.perf.instructions`)."""
        from pytest_adapt.perf.instructions import LEAST, missing_tool, verdict_of

        if self._runner.kind == "endpoint" or self._runner.spec.kind == "endpoint":
            raise Verdict(Status.UNSUPPORTED, "instructions are counted of targets that compute in this process")
        if missing := missing_tool():
            raise Verdict(Status.UNKNOWN, f"instructions are not counted: {missing}")
        status, why, ratio = verdict_of(
            self._gating.instructions(benchmark_of(self._state.case, deployment, model, load))
        )
        if not math.isnan(ratio):
            ok = status in ("same", "improvement")
            judge.promise("instructions.more", ok, why, value=max(0.0, ratio - 1), budget=LEAST)
        raise Verdict(Status(status), f"{status}: {why}")

    def _figures(self, judge: Any, load: str, found: Comparison) -> None:
        from pytest_adapt.verdict.result import Figure

        estimate = found.estimate
        if estimate is not None:
            ratios = tuple(math.exp(pair) for pair in estimate.pairs)
            judge.figures.append(Figure(load, f"{found.clock} time to the baseline's", "ratio", ratios))
            judge.figures.append(Figure(load, f"baseline's {found.clock} time of one run", "s", found.seconds[:1]))
            judge.figures.append(Figure(load, f"{found.clock} time of one run", "s", found.seconds[1:]))

    def _ledger(self, target: str, cell: str) -> Ledger | None:
        """The ledger of a target; None where it has nothing of this cell: nobody said what it should cost there."""
        from pytest_adapt.perf.ledger import Ledger, LedgerError
        from pytest_adapt.shipped import goldens_dir

        own = self._runner.settings.goldens_dir
        folders = [self._runner.config.rootpath / own] if own else []
        if self._runner.settings.goldens == "off":
            raise Verdict(Status.UNCHECKED, "goldens are off: counters on record are not compared")
        try:
            found = Ledger.find([*folders, goldens_dir()], target)
        except LedgerError as error:
            raise Verdict(Status.FAIL, str(error)) from None
        return found if found is not None and any(row.cell == cell for row in found.rows.values()) else None

    def _proposed(self, status: Status, found: Row, target: str, rebuilt: bool) -> str:
        """In the modes that propose records: where the proposal lies; "" where nothing was proposed. ``rebuilt``: some
        counters on record are of another build, and were not compared."""
        from pytest_adapt.perf.ledger import Proposal, propose

        settings = self._runner.settings
        missing = status is Status.NEW or status is Status.UNCHECKED and not rebuilt
        changed = rebuilt or status in (Status.MISMATCH, Status.STALE)
        if not (missing and settings.goldens in ("new", "update") or changed and settings.goldens == "update"):
            return ""
        root = self._runner.config.rootpath
        kind = "new" if missing else "update"
        path = propose(root / ".adapt" / "pending", Proposal(target, kind, found, self._state.case, settings.reason))
        return os.path.relpath(path, self._runner.config.invocation_params.dir)


def benchmark_of(case: str, deployment: Deployment, model: ModelHandle, load: str) -> Benchmark:
    """One load on one deployment, with its prompts."""
    from pytest_adapt.perf.loads import load_named
    from pytest_adapt.perf.rounds import Benchmark

    named = load_named(load)
    return Benchmark(case, deployment, load, tuple(named.prompts(model)), named.new)


def _plain(one: Comparison) -> dict[str, Any]:
    """A comparison as report.json holds it."""
    found: dict[str, Any] = {"case": one.case, "verdict": one.status, "clock": one.clock, "why": one.why}
    for name in ("first", "confirming", "wall"):
        estimate = getattr(one, name)
        if estimate is not None:
            found[name] = {
                "ratio": estimate.ratio,
                "interval": list(estimate.interval),
                "pairs": [math.exp(pair) for pair in estimate.pairs],
            }
    found["seconds"] = list(one.seconds)
    found["shares"] = [
        {"op": share.op, "before": share.before, "after": share.after, "calls": list(share.calls)}
        for share in one.shares
    ]
    return found
