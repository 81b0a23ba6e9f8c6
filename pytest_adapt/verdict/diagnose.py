"""Which known fault a failed run looks like: its pattern against the rows of the kill matrix, as likelihoods.

Every fault is a model of the patterns that it leaves, estimated from its rows, of which counts what the tests that were
judged in the run could have left. A flag or a choice has the probability that the rows give it, smoothed by a few rows
of the background (all faults taken together); the logarithm of a number has a normal kernel around each row's. Features
count as independent (naive Bayes); where many tell one story (tests, sites, metrics, words), their sum is divided by
the root of their number, and the whole is tempered. The prior is uniform over the faults and "none of the known", whose
model is the background itself: an unfamiliar failure resembles no fault more than it resembles them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_adapt.faults.matrix import MatrixError, Row, load, shipped_matrix
from pytest_adapt.faults.registry import Fault, catalogue
from pytest_adapt.target.protocol import OBSERVABLES
from pytest_adapt.verdict.pattern import SETS, Pattern, family_of, function_of, group_of, narrowed, pattern_of
from pytest_adapt.verdict.status import WRONG

__all__ = [
    "STRONG",
    "Constants",
    "Diagnosis",
    "Known",
    "Match",
    "judged",
    "of_report",
    "one_line",
    "read_matrix",
]

STRONG = 0.8
"""Likelihood from which a run's own summary names a fault."""
_DECADES = 2.0
"""Of the background's kernel."""
_UNFIT = 0.05
"""Probability that a fault shows on a family for which the registry does not list it."""
_UNJUDGED = frozenset({"error", "blocked", "deferred", "unsupported", "unknown", "unchecked"})
"""Statuses that a case without a measurement may have when nobody looked at anything."""
_TOLD = ("test", "value", *sorted(SETS))
"""Kinds of flags that tell one story together."""
_SHOWN = 4


@dataclass(frozen=True)
class Constants:
    """What the model of a pattern takes for granted; the defaults predict rows best that were left out
    (`ci/blind.py --fit`)."""

    smoothing: float = 0.05
    """Rows of the background beside those of a fault."""
    temper: float = 0.3
    """Share of the evidence that counts."""
    width: float = 0.15
    """Of the kernel around the decimal logarithm of a number."""


@dataclass(frozen=True)
class Match:
    """One explanation of a failure."""

    fault: str
    """Id; "" for none of the known."""
    likelihood: float
    agrees: tuple[str, ...] = ()
    """Features that speak for it most, against the background."""
    differs: tuple[str, ...] = ()
    """Features that speak against it most."""


@dataclass(frozen=True)
class Diagnosis:
    """What one cause of a report looks like; the likelihoods of ``matches`` add to 1, the largest first."""

    cause: str
    cases: int
    first: str
    """The case to look at."""
    matches: tuple[Match, ...]
    observable: str
    """Of the rows that were asked; "" where nothing was compared, so that there is nothing to explain."""


def read_matrix(path: Path | None = None) -> Sequence[Row]:
    """Rows of a kill matrix, the shipped one by default. Raises MatrixError where there are none that can be read."""
    rows = load(path).rows
    if not rows:
        what = f"kill matrix {path}: no rows" if path else f"no kill matrix is shipped ({shipped_matrix()})"
        raise MatrixError(f"{what}; make one with --adapt-target=builtin --adapt-selftest, or name one with --matrix")
    return rows


def _row_pattern(row: Mapping[str, Any], groups: frozenset[str] | None) -> Pattern | None:
    """The pattern of a row of the matrix, as far as tests of these groups have made it; None where they were not run.
    Without groups: of all tests."""
    red = [case for case in row["red"] if groups is None or group_of(case["case"]) in groups]
    green = [name for name in row["green"] if groups is None or group_of(name) in groups]
    return pattern_of(red, green, single=row["layout"] == "single") if red or green else None


@dataclass
class Known:
    """Models of the patterns of faults, at one observable."""

    observable: str
    rows: Mapping[str, Sequence[Pattern]]
    """Fault -> patterns of its rows that were caught."""
    families: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Fault -> families on which it shows, where the registry knows it."""
    constants: Constants = Constants()
    _seen: dict[str, dict[str, list[Any]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        rows: Iterable[Row],
        observable: str,
        constants: Constants | None = None,
        groups: frozenset[str] | None = None,
    ) -> Known:
        """From rows of the matrix: those of ``observable``; where it has none, of the next weaker one that has, else of
        the next stronger one. With ``groups`` (`Pattern.groups`) what other tests showed is left out, and so are faults
        that none of them was tried on. Raises MatrixError where no fault was caught at all."""
        caught = [row for row in rows if row["killed"] and row["red"]]
        at = {str(row["observable"]) for row in caught}
        place = OBSERVABLES.index(observable)
        chosen = next((name for name in (*OBSERVABLES[place:], *OBSERVABLES[:place][::-1]) if name in at), None)
        if chosen is None:
            raise MatrixError("the kill matrix has no row of a fault that was caught: make it with --adapt-selftest")
        found: dict[str, list[Pattern]] = {}
        for row in caught:
            if row["observable"] == chosen and (pattern := _row_pattern(row, groups)) is not None:
                found.setdefault(str(row["fault"]), []).append(pattern)
        registry = catalogue()
        families = {name: _families(registry[name]) for name in found if name in registry}
        return cls(chosen, found, families, constants or Constants())

    def replaced(self, fault: str, rows: Sequence[Pattern]) -> Known:
        """The same with other rows of one fault; without it where there are none."""
        others = {name: patterns for name, patterns in self.rows.items() if name != fault}
        return replace(self, rows={**others, fault: rows} if rows else others)

    def matches(self, patterns: Sequence[tuple[str, Pattern]]) -> tuple[Match, ...]:
        """Explanations of one failure, the likeliest first, from its patterns on several deployments: (family, pattern)
        each. They tell one story, so that their evidence is averaged."""
        return _ranked([self.evidence(family, pattern) for family, pattern in patterns])

    def evidence(self, family: str, pattern: Pattern) -> dict[str, dict[str, float]]:
        """Fault -> what was seen -> by how many nats that speaks for the fault, against the background."""
        found: dict[str, dict[str, float]] = {name: {} for name in self.rows}
        for feature in self._flags(pattern):
            value = pattern.flag(feature)
            if value is not None:
                seen = self._values(feature, Pattern.flag)
                self._discrete(found, feature if value else f"no {feature}", seen, value, 2)
        for feature, chosen in pattern.choices.items():
            seen = self._values(feature, Pattern.choice)
            kinds = len({one for ones in seen.values() for one in ones}) + 1
            self._discrete(found, f"{feature} {chosen}", seen, chosen, kinds)
        for feature, number in pattern.numbers.items():
            self._number(found, f"{feature} {10.0**number:.2g}", self._values(feature, Pattern.number), number)
        if family:
            self._family(found, family)
        return {name: _tempered(values, self.constants.temper) for name, values in found.items()}

    def _flags(self, pattern: Pattern) -> list[str]:
        vocabulary = {name for rows in self.rows.values() for row in rows for name in row.flags}
        # What no row ever showed is looked at too: it speaks against every known fault.
        return sorted(
            {name for name in vocabulary if name in pattern.flags or _kind(name) in SETS}
            | {name for name in pattern.flags if _kind(name) in SETS}
        )

    def _values(self, feature: str, value_of: Callable[[Pattern, str], Any]) -> dict[str, list[Any]]:
        """Fault -> the values of a feature in its rows, those that know it; faults with none are left out."""
        if feature not in self._seen:
            seen = {
                name: [one for row in rows if (one := value_of(row, feature)) is not None]
                for name, rows in self.rows.items()
            }
            self._seen[feature] = {name: ones for name, ones in seen.items() if ones}
        return self._seen[feature]

    def _discrete(
        self,
        found: dict[str, dict[str, float]],
        label: str,
        seen: Mapping[str, Sequence[Any]],
        value: bool | str,
        kinds: int,
    ) -> None:
        """Add the evidence of a feature with ``kinds`` different values."""
        if not seen:
            return
        smoothing = self.constants.smoothing
        counts = {name: sum(one == value for one in ones) for name, ones in seen.items()}
        shares = [count / len(seen[name]) for name, count in counts.items()]
        background = (sum(shares) + 1.0 / kinds) / (len(shares) + 1.0)
        for name, count in counts.items():
            share = (count + smoothing * background) / (len(seen[name]) + smoothing)
            found[name][label] = math.log(share / background)

    def _number(
        self, found: dict[str, dict[str, float]], label: str, seen: Mapping[str, Sequence[Any]], number: float
    ) -> None:
        if not seen:
            return
        smoothing, width = self.constants.smoothing, self.constants.width
        densities = {name: fmean(_normal(number - one, width) for one in ones) for name, ones in seen.items()}
        # The last part: a value far from everything that was seen is no less likely under one fault than another.
        background = fmean([*densities.values(), _normal(_DECADES, _DECADES)])
        for name, density in densities.items():
            count = len(seen[name])
            smooth = (count * density + smoothing * background) / (count + smoothing)
            found[name][label] = math.log(smooth / background)

    def _family(self, found: dict[str, dict[str, float]], family: str) -> None:
        kinds = len({one for families in self.families.values() for one in families} | {family})
        shares = {
            name: (1 - _UNFIT) * (family in families) / max(len(families), 1) + _UNFIT / kinds
            for name, families in self.families.items()
            if name in found
        }
        for name, share in shares.items():
            found[name][f"family {family}"] = math.log(share / fmean(shares.values()))


def _ranked(evidence: Sequence[Mapping[str, Mapping[str, float]]]) -> tuple[Match, ...]:
    """Explanations by the mean of their evidence on several deployments, of those on which they were tried."""
    total = {"": 0.0}
    for name in {name for one in evidence for name in one}:
        total[name] = fmean(sum(one[name].values()) for one in evidence if name in one)
    top = max(total.values())
    weights = {name: math.exp(value - top) for name, value in total.items()}
    whole = sum(weights.values())
    order = sorted(weights, key=lambda name: (-weights[name], name))
    return tuple(Match(name, weights[name] / whole, *_reasons(evidence, name)) for name in order)


def of_report(report: Mapping[str, Any], rows: Sequence[Row]) -> list[Diagnosis]:
    """One diagnosis for each cause (``clusters``) of a report.json; where nothing was compared, none of the known
    explains it. Raises MatrixError."""
    shown = set(report["target"].get("observables", ())) & set(report["settings"].get("observables") or OBSERVABLES)
    observable = next((name for name in OBSERVABLES if name in shown), OBSERVABLES[-1])
    models: dict[frozenset[str], Known] = {}
    cases = {case["case"]: case for case in report["cases"]}
    # A target that died at its opening looks like every fault that stops one, and like none.
    wrong: frozenset[str] = WRONG if judged(report["cases"]) else frozenset()
    found = []
    for cluster in report["clusters"]:
        red = [narrowed(cases[name], cluster.get("sites", ())) for name in cluster["cases"]]
        evidence = []
        for family, pattern in _patterns([case for case in red if case["status"] in wrong], report["cases"]):
            groups = pattern.groups
            if groups not in models:
                models[groups] = Known.of(rows, observable, groups=groups)
            observed = models[groups].observable
            evidence.append(models[groups].evidence(family, pattern))
        matches = _ranked(evidence)
        found.append(Diagnosis(cluster["cause"], len(red), cluster["first"], matches, observed if evidence else ""))
    return found


def judged(cases: Iterable[Mapping[str, Any]]) -> bool:
    """Whether anything was judged in a run: some case compared something, or came to more than an error."""
    return any(case["measurements"] or case["status"] not in _UNJUDGED for case in cases)


def one_line(diagnosis: Diagnosis) -> str:
    """``91% like EX04, shared experts summed once more over tp (TensorRT-LLM#15922)``; "" where no match is strong."""
    best = diagnosis.matches[0]
    if not best.fault or best.likelihood < STRONG:
        return ""
    fault = catalogue().get(best.fault)
    what = f", {fault.title[0].lower()}{fault.title[1:]} ({fault.report})" if fault else ""
    return f"{best.likelihood:.0%} like {best.fault}{what}"


def _patterns(red: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]) -> list[tuple[str, Pattern]]:
    """(family, pattern) of a cause on each of its deployments; on those of one rank where it shows there, since what
    further ranks add to that is the same again."""
    green = [case for case in cases if case["status"] == "pass"]
    on_one = any(case["layout"] == "single" for case in red)
    judged = any(case["layout"] == "single" and case["suite"] == "correctness" for case in green)
    single = True if on_one else False if judged else None
    places: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for case in red:
        if case["layout"] == "single" or not on_one:
            places.setdefault(_place(case), []).append(case)
    return [
        (
            family_of(place[0]),
            pattern_of(members, (function_of(case["case"]) for case in green if _place(case) == place), single=single),
        )
        for place, members in places.items()
    ]


def _place(case: Mapping[str, Any]) -> tuple[str, str, str]:
    return case["model"], case["layout"], case["precision"]


def _families(fault: Fault) -> frozenset[str]:
    return frozenset(family_of(name) for name in fault.models) - {""}


def _kind(feature: str) -> str:
    return feature.partition(" ")[0]


def _tempered(values: Mapping[str, float], temper: float) -> dict[str, float]:
    """Evidence by feature, that of features which tell one story divided by the root of their number."""
    kinds = {label: _kind(label.removeprefix("no ")) for label in values}
    counts = {kind: sum(found == kind and abs(values[label]) > 0.1 for label, found in kinds.items()) for kind in _TOLD}
    return {label: temper * value / math.sqrt(max(counts.get(kinds[label], 1), 1)) for label, value in values.items()}


def _reasons(
    evidence: Sequence[Mapping[str, Mapping[str, float]]], fault: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What speaks for a fault most, and against it, on its deployments together."""
    if not fault:
        return (), ()
    total: dict[str, float] = {}
    for one in evidence:
        for label, value in one.get(fault, {}).items():
            total[label] = total.get(label, 0.0) + value / len(evidence)
    order = sorted(total, key=lambda label: -total[label])
    agrees = [label for label in order if total[label] > 0.1]
    differs = [label for label in reversed(order) if total[label] < -0.1]
    return tuple(agrees[:_SHOWN]), tuple(differs[:_SHOWN])


def _normal(distance: float, width: float) -> float:
    return math.exp(-0.5 * (distance / width) ** 2) / (width * math.sqrt(2.0 * math.pi))
