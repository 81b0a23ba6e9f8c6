"""What the suite ``operators`` does with one operator on one target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_adapt.operators.case import Case
from pytest_adapt.operators.catalogue import NAMES, catalogue, parse_case
from pytest_adapt.operators.check import Examined, examine
from pytest_adapt.operators.definition import Op
from pytest_adapt.operators.draw import Arena, Draw
from pytest_adapt.report.operators import METRIC, STATES
from pytest_adapt.target.protocol import UnsupportedOp
from pytest_adapt.verdict.budget import Comparison
from pytest_adapt.verdict.result import Figure, Measurement, Status
from pytest_adapt.verdict.status import Verdict

if TYPE_CHECKING:
    from pytest_adapt.open_target import OpenTarget
    from pytest_adapt.verdict.judge import Judge

__all__ = ["judge_operator", "judge_support", "support", "time_operators"]

_FALLBACK = "reference"
_EXAMPLES = 40
_SHRINKING = 120
_SECONDS = 3.0
"""Processor time that looking for a simpler failing case may take."""
_REPEATS = 7


def support(implementations: tuple[str, ...]) -> str:
    """native, fallback or missing, from the names of an operator's implementations, the one in use first."""
    if not implementations:
        return "missing"
    return "fallback" if implementations[0].startswith(_FALLBACK) else "native"


def judge_operator(target: OpenTarget, judge: Judge, name: str, precision: str) -> None:
    """Every check of one operator; measurements go to ``judge``. Raises Verdict where the target does not compute it.

    The fixed cases first, then random ones; of what fails, the simplest case is reported with the option that repeats
    it. Where --adapt-op names a case, that one alone is run.
    """
    op, implementations = catalogue()[name], _implementations(target, name)
    tally = _Tally(op)
    chosen = parse_case(target.chosen_op) if target.chosen_op else None
    for case in [chosen] if chosen else op.grid(precision):
        tally.add(case, examine(op, case, target.run_op, implementations))
    if chosen is None:
        _explore(op, precision, target, implementations, tally)
    if op.wrt and name in target.info.gradients and chosen is None:
        from pytest_adapt.operators.gradient import examine_gradient

        case = op.case(precision, **op.gradient, seed=1)
        try:
            found = Examined(examine_gradient(op, case, target.run_op))
        except UnsupportedOp as reason:
            found = Examined(declined=str(reason))
        tally.add(case, found)
    if tally.declined and not tally.ran:
        raise Verdict(Status.UNSUPPORTED, f"operator {name}: {next(iter(tally.declined.values()))}")
    _tell(judge, tally.summary())


def judge_support(target: OpenTarget, judge: Judge) -> None:
    """One measurement an operator: native, fallback or missing. None of them is a failure; a name that is no operator's
    is one."""
    if not target.ops:
        raise Verdict(Status.UNSUPPORTED, f"{target.info.name} shows no single operators (run_op)")
    unknown = sorted(set(target.ops) - set(NAMES))
    if unknown:
        judge.promise("op.name", False, f"no operator is called {unknown[0]}; operators are {', '.join(NAMES)}")
    for name in NAMES:
        implementations = tuple(target.ops.get(name, ()))
        state = support(implementations)
        detail = f"{state}: {', '.join(implementations)}" if implementations else state
        judge.promise(METRIC, True, detail, value=float(STATES.index(state)), budget=2.0, prompt=name)


def time_operators(target: OpenTarget, judge: Judge, precision: str) -> None:
    """Time of a call of each operator at a published shape, by implementation: figures, after its answer is judged."""
    if not target.ops:
        raise Verdict(Status.UNSUPPORTED, f"{target.info.name} shows no single operators (run_op)")
    for name, op in catalogue().items():
        implementations = tuple(target.ops.get(name, ()))
        if not implementations:
            continue
        case = op.case(precision, **(op.published() or (op.base,))[-1], seed=1)
        tally = _Tally(op)
        tally.add(case, examine(op, case, target.run_op, implementations))
        _tell(judge, tally.summary())
        if tally.declined:
            continue
        arena = Arena()
        arrays = {key: arena.place(key, operand) for key, operand in op.inputs(Draw(case)).items()}
        for implementation in implementations:
            attributes = {**op.attributes(case), "implementation": implementation}
            samples = target.time_op(name, arrays, attributes, _REPEATS)
            judge.figures.append(Figure(str(case), f"time of {implementation}", "s", tuple(samples)))


def _tell(judge: Judge, measurements: Iterable[Measurement]) -> None:
    for one in measurements:
        judge.promise(
            one.metric, one.ok, one.detail, value=one.value, budget=one.budget, prompt=one.prompt, compared=one.compared
        )


def _implementations(target: OpenTarget, name: str) -> tuple[str, ...]:
    if name not in target.ops:
        raise Verdict(Status.UNSUPPORTED, f"operator {name}: {target.info.name} does not show it (run_op)")
    if why := target.missing_op(name):
        raise Verdict(Status.FAIL, f"operator {name} is declared, but {why}")
    return tuple(target.ops[name])


def _explore(op: Op, precision: str, target: OpenTarget, implementations: tuple[str, ...], tally: _Tally) -> None:
    """Random cases; where something failed already, simpler cases that fail alike."""
    from pytest_adapt.operators.explore import explore

    kinds = {_kind(failures) for failures in tally.failures.values()}

    def fails(case: Case) -> bool:
        found = examine(op, case, target.run_op, implementations)
        tally.add(case, found)
        # A crash on an empty input must not stand in for wrong numbers.
        return bool(found.failures) and _kind(found.failures) == max(kinds, default=_kind(found.failures))

    explore(op, precision, fails, examples=_SHRINKING if kinds else _EXAMPLES, seconds=_SECONDS)


def _kind(failures: Iterable[Measurement]) -> int:
    """0 where a case raised; 1 where it answered wrongly, which says more."""
    return int(any(one.metric != "op.error" for one in failures))


@dataclass
class _Tally:
    """Measurements of many cases: of each metric the worst, and everything that failed."""

    op: Op
    worst: dict[str, Measurement] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    failures: dict[Case, list[Measurement]] = field(default_factory=dict)
    pooled: dict[str, Comparison] = field(default_factory=dict)
    ran: int = 0
    declined: dict[Case, str] = field(default_factory=dict)

    def add(self, case: Case, found: Examined) -> None:
        if found.declined:
            self.declined[case] = found.declined
        self.ran += bool(found.measurements)
        if found.failures:
            self.failures[case] = found.failures
        for one in found.measurements:
            self.compared[one.metric] = self.compared.get(one.metric, 0) + one.compared
            if one.ok and (one.metric not in self.worst or one.use > self.worst[one.metric].use):
                self.worst[one.metric] = one
        for metric, rows in found.rows:
            self.pooled.setdefault(metric, Comparison(widen=self.op.widen)).add(rows)

    def summary(self) -> Iterator[Measurement]:
        """One measurement a metric; where cases failed, those of the simplest one of each kind, with its string."""
        count = f"; {len(self.failures)} of {self.ran} cases fail" if len(self.failures) > 1 else ""
        ordered = sorted(self.failures, key=lambda case: case.size)
        for kind in (1, 0):
            case = next((one for one in ordered if _kind(self.failures[one]) == kind), None)
            for one in _once(self.failures[case]) if case else ():
                yield replace(one, detail=f"{one.detail}{count}; --adapt-op='{case}'", compared=max(one.compared, 1))
        for metric, comparison in self.pooled.items():
            value, budget = comparison.rms()
            prompt, _ = comparison.worst_row()
            detail = f"relative to each row, {comparison.positions} rows; worst --adapt-op='{prompt}'"
            yield Measurement(metric, value, budget, value <= budget, compared=comparison.compared, detail=detail)
        if self.declined:
            number = float(len(self.declined))
            detail = f"{len(self.declined)} cases are declined: {next(iter(self.declined.values()))}"
            yield Measurement("op.declined", number, number + self.ran, True, compared=1, detail=detail)
        for metric, one in self.worst.items():
            yield replace(one, compared=self.compared[metric])


def _once(failures: Iterable[Measurement]) -> list[Measurement]:
    """The first failure of each metric."""
    found: dict[str, Measurement] = {}
    for one in failures:
        found.setdefault(one.metric, one)
    return list(found.values())
