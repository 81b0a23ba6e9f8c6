"""Comparing code made wrong, one place at a time; `pytest_adapt.selftest.comparators` must notice each."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType

from pytest_adapt.golden import record as record_module
from pytest_adapt.golden import sketch
from pytest_adapt.selftest.comparators import CHECKS, World
from pytest_adapt.verdict import budget, discrete, judge, localise, matches, pooling, sampling, views

__all__ = ["MUTANTS", "Mutant", "planted", "seen_by"]


@dataclass(frozen=True)
class Mutant:
    """One place in the source of a module, and what stands there instead."""

    module: ModuleType
    old: str
    new: str

    @property
    def what(self) -> str:
        """For a list: where, and what becomes of it."""
        where = self.module.__name__.removeprefix("pytest_adapt.")
        return f"{where}: `{_line(self.old)}` -> `{_line(self.new)}`"


def _line(source: str) -> str:
    return " ".join(source.split())


def seen_by(mutant: Mutant, world: World) -> str:
    """Name of the first check that fails with the mutant planted; "" where all pass."""
    with planted(mutant):
        for check in CHECKS:
            try:
                check(world)
            except Exception:  # an exception is as loud as a failed assertion
                return check.__name__
    return ""


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Replace source text of a module that is loaded already, wherever its functions are used.

    Raises ValueError where the text does not stand in the source exactly once, or where no function changes.
    """
    module = mutant.module
    source = inspect.getsource(module)
    if source.count(mutant.old) != 1:
        raise ValueError(f"{source.count(mutant.old)} places in {module.__name__} read {mutant.old!r}")
    made = ModuleType(module.__name__)
    sys.modules[module.__name__] = made  # dataclasses look themselves up there
    try:
        exec(compile(source.replace(mutant.old, mutant.new), module.__file__ or "", "exec"), made.__dict__)
    finally:
        sys.modules[module.__name__] = module
    originals, changed = _functions(module), {}
    for name, function in _functions(made).items():
        if originals[name].__code__ != function.__code__:
            changed[name] = originals[name].__code__
            originals[name].__code__ = function.__code__
    try:
        if not changed:
            raise ValueError(f"{mutant.what} changes no function")
        yield
    finally:
        for name, code in changed.items():
            originals[name].__code__ = code


def _functions(module: ModuleType) -> dict[str, FunctionType]:
    """Every function and method that a module defines, by qualified name."""
    found: dict[str, FunctionType] = {}
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                found[function.__qualname__] = function
    return found


MUTANTS: Mapping[str, Mutant] = {
    "abs dropped in largest": Mutant(
        budget, "largest=np.max(np.abs(errors), axis=1)", "largest=np.max(errors, axis=1)"
    ),
    "square over the wrong axis": Mutant(
        budget, "square=np.mean(errors**2, axis=1)", "square=np.mean(errors**2, axis=0)"
    ),
    "yardstick from the target": Mutant(
        budget,
        "yard_square=np.mean(yard**2, axis=1)",
        "yard_square=np.mean(errors**2, axis=1)",
    ),
    "rms budget ten times": Mutant(
        budget, "max(RMS_FACTOR, spread(self.independent, self.quantile)) * yard", "10 * yard"
    ),
    "largest budget unlimited": Mutant(budget, "factor * np.maximum(yard, peak", "1e9 * np.maximum(yard, peak"),
    "last rows dropped": Mutant(budget, "getattr(self, one.name)[keep]", "getattr(self, one.name)[keep][:-1]"),
    "pooled mean instead of root": Mutant(
        budget,
        "return math.sqrt(float(np.average(squares",
        "return (float(np.average(squares",
    ),
    "worst row by its smallest": Mutant(budget, "row = int(np.argmax(use))", "row = int(np.argmin(use))"),
    "everything certified": Mutant(
        discrete,
        "np.asarray(ratio) * CANDIDATES < 1.0",
        "np.asarray(ratio) * CANDIDATES < np.inf",
    ),
    "no memory of flips": Mutant(discrete, "np.logical_and.accumulate(safe)", "np.asarray(safe)"),
    "last layer ignored": Mutant(discrete, "inner & (np.asarray(last) * CANDIDATES < 1.0)", "inner"),
    "score error without abs": Mutant(
        discrete, "np.abs(np.asarray(errors, np.float64))", "np.asarray(errors, np.float64)"
    ),
    "any choice legal": Mutant(discrete, "not illegal and near_tie(margin, bounds[row])", "not illegal"),
    "intruder is the best": Mutant(discrete, "expert=int(min(intruders", "expert=int(max(intruders"),
    "absolute errors of sites": Mutant(localise, "(value - own) / scale", "(value - own) / scale.max()"),
    "emulation against itself": Mutant(
        localise,
        "(value - own) / scale, (emulated - own)",
        "(emulated - own) / scale, (emulated - own)",
    ),
    "position is the slot": Mutant(
        localise,
        "place, slot = divmod(row, per_token)",
        "slot, place = divmod(row, per_token)",
    ),
    "first site by name": Mutant(localise, "order_key(divergence.site) < order_key(self", "(divergence.site) > (self"),
    "choices not judged": Mutant(localise, "if local not in CHOICES or layer is None", "if True"),
    "only the best token": Mutant(
        views,
        "ids = record.topk_ids[rows].astype(np.int64)\n    if obs",
        "ids = record.topk_ids[rows][:, :1].astype(np.int64) * np.ones((1, 20), np.int64)\n    if obs",
    ),
    "tokens left out are free": Mutant(
        views,
        "error = np.where(absent, -np.maximum(",
        "error = np.where(absent, np.nan * np.maximum(",
    ),
    "strangers are free": Mutant(views, "np.where(np.isfinite(excess) & (excess > 0), excess, np.nan)", "np.nan"),
    "rows off by one": Mutant(
        views,
        "record.positions[rows].astype(np.int64) - response.first_row",
        "np.maximum(record.positions[rows].astype(np.int64) - response.first_row - 1, 0)",
    ),
    "scores unchecked": Mutant(
        views,
        "return np.where(needed, found, np.nan)",
        "return np.where(needed, record.next_logprob[rows], np.nan)",
    ),
    "argmin for argmax": Mutant(views, "logits.argmax(axis=1)", "logits.argmin(axis=1)"),
    "mismatches are ties": Mutant(matches, "if near_tie(margin, error):", "if True:"),
    "pooled verdict ignored": Mutant(pooling, "rms <= rms_budget", "True"),
    "largest verdict ignored": Mutant(pooling, "ok=largest <= largest_budget", "ok=True"),
    "divergence verdict ignored": Mutant(pooling, "value, budget, value <= budget, obs", "value, budget, True, obs"),
    "only certified by chance": Mutant(
        judge,
        "part = rows[certified]\n        floor",
        "part = rows[certified][:0]\n        floor",
    ),
    "softmax over rows": Mutant(
        sketch,
        "total = np.log(np.exp(shifted).sum(axis=-1",
        "total = np.log(np.exp(shifted).sum(axis=0",
    ),
    "projections of raw logits": Mutant(sketch, "z = z - z.mean(axis=-1, keepdims=True)", "z = z + 1.0"),
    "smallest tokens": Mutant(
        sketch,
        "order = np.lexsort((found, -values), axis=1)",
        "order = np.lexsort((found, values), axis=1)",
    ),
    "next token of the same row": Mutant(
        record_module,
        "np.append(sequence[1:], -1)[positions]",
        "np.append(sequence[:-1], -1)[positions]",
    ),
    "divergence of first order": Mutant(
        record_module,
        "np.where(small, d * d * (0.5 + d / 6.0), np.expm1(d) - d)",
        "np.zeros_like(d)",
    ),
    "inverted rule": Mutant(pooling, "rms <= rms_budget", "rms > rms_budget"),
    "inverted largest rule": Mutant(pooling, "ok=largest <= largest_budget", "ok=largest > largest_budget"),
    "rms budget a hundred times": Mutant(
        budget, "max(RMS_FACTOR, spread(self.independent, self.quantile)) * yard", "100 * RMS_FACTOR * yard"
    ),
    "largest budget a hundred times": Mutant(
        budget, "factor * np.maximum(yard, peak", "100 * factor * np.maximum(yard, peak"
    ),
    "golden compared with itself": Mutant(
        judge,
        "error = difference(shown, reference, two_sided=False)",
        "error = difference(reference, reference, two_sided=False)",
    ),
    "scores compared with themselves": Mutant(
        judge,
        "error = (found[keep] - record.next_logprob[part])[:, None]",
        "error = (found[keep] - found[keep])[:, None]",
    ),
    "site compared with itself": Mutant(localise, "(value - own) / scale", "(value - value) / scale"),
    "repeated rows are evidence": Mutant(
        budget, "found = np.zeros(self.positions, bool)", "found = np.ones(self.positions, bool)"
    ),
    "no hidden choice is unsure": Mutant(localise, "if not others:", "if others:"),
    "the same choice twice": Mutant(
        localise,
        "choose(oracle.spec.mixture.router, without).ids",
        "choose(oracle.spec.mixture.router, selection[rows]).ids",
    ),
    "all rows unsure": Mutant(localise, "found[name] = changed", "found[name] = np.ones_like(changed)"),
    "filters without a border": Mutant(
        sampling,
        "sure = ~near_tie(place.logits - ordered[setting.top_k], place.error)",
        "sure = np.ones(len(ordered), bool)",
    ),
    "top_p without a border": Mutant(sampling, "sure &= most < setting.top_p", "sure &= True"),
    "any token may be drawn": Mutant(sampling, "if not allowed[token]]", "if not allowed[0]]"),
    "draws always fit": Mutant(sampling, "ok = found.p > level", "ok = True"),
    "only the first rows": Mutant(budget, "getattr(self, one.name)[keep]", "getattr(self, one.name)[keep][:5]"),
}
