"""What a failure looks like, in terms that another model, precision or prompt leaves alone.

A pattern is made of the cases of one deployment, as report.json and the kill matrix hold them: which tests are red and
which are green, where the first divergence is, which operations and metrics are beyond their budgets and by how much on
a log scale, on which axes of a layout, and words of the reasons. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pytest_adapt.sites import layer_of
from pytest_adapt.verdict.result import RUNGS

__all__ = ["AXES", "SETS", "Pattern", "family_of", "function_of", "group_of", "narrowed", "pattern_of"]

AXES: tuple[str, ...] = ("tp", "pp", "ep", "sp", "dp", "etp")
SETS: frozenset[str] = frozenset({"site", "metric", "word"})
"""Kinds of flags of which a pattern names those that are set, and no other."""
_FAMILIES: Mapping[str, str] = {"deepseek": "deepseek_v3", "qwen3": "qwen3_moe", "mixtral": "mixtral", "llama": "llama"}
_WORD = re.compile(r"[a-z]{4,}")
_CASE = re.compile(r"\S*::\S*|\S+-\d+\b")
"""Names of cases and prompts, which are no words."""
_SPLIT = re.compile(r"([a-z]+)(\d+)")
_EDGES = (1, 2, 16, 64, 128, 512, 1024, 4096)
_MEASURED = 8
_SITE_TESTS = ("correctness/test_sites.py", "correctness/test_layouts.py")
_PAGE = 16
"""Positions around multiples of it are borders of pages, chunks and windows of every conformance model."""


@dataclass(frozen=True)
class Pattern:
    """Features of a failure by name; a name that is absent is not known."""

    flags: Mapping[str, bool] = field(default_factory=dict)
    """Something was seen, or was looked at and not seen (``test ...``, ``site ...``, ``metric ...``, ``word ...``)."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """One of several values (``divergence``: the site without its layer)."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Decimal logarithms (``error``: of the first divergence, relative to its row)."""
    judged: frozenset[str] = frozenset()
    """Suites of which a test was judged; ``site`` where any site was compared."""

    @property
    def groups(self) -> frozenset[str]:
        """Groups of tests (`group_of`) that were judged."""
        return frozenset(group_of(name.removeprefix("test ")) for name in self.flags if name.startswith("test "))

    def choice(self, name: str) -> str | None:
        return self.choices.get(name)

    def number(self, name: str) -> float | None:
        return self.numbers.get(name)

    def flag(self, name: str) -> bool | None:
        """The value of a flag. Of those that are named where they are set (sites, metrics, words), what is not named
        is not set, where it could have been."""
        if name in self.flags:
            return self.flags[name]
        kind, _, rest = name.partition(" ")
        if kind not in SETS:
            return None
        return False if (kind if kind == "site" else rest.partition(" ")[0]) in self.judged else None


def pattern_of(
    red: Sequence[Mapping[str, Any]],
    green: Iterable[str] = (),
    *,
    single: bool | None = None,
) -> Pattern:
    """The pattern of the ``red`` cases (as in report.json) of one deployment, where the tests ``green`` passed; without
    red ones just what was looked at and not seen.

    ``single`` says whether the failure shows on one rank too (None: that was not judged, so the layout tells nothing).
    """
    flags: dict[str, bool] = {f"test {name}": False for name in green}
    flags |= {f"test {function_of(str(case['case']))}": True for case in red}
    choices: dict[str, str] = {}
    numbers: dict[str, list[float]] = {}
    failed = [one for case in red for one in _failed(case)]
    sites = [layer_of(one["site"]) for one in failed if one.get("site")]
    flags |= {f"site {local}": True for _, local in sites}
    flags |= {f"metric {_suite(case)} {one['metric']}": True for case in red for one in _failed(case)}
    flags |= {f"word {_suite(case)} {word}": True for case in red for word in _words(case)}
    if single is not None:
        split = {axis for case in red for axis, size in _SPLIT.findall(str(case.get("layout", ""))) if int(size) > 1}
        flags |= {f"axis {axis}": not single and axis in split for axis in AXES}
    for one in failed:
        if not one.get("site") and (value := _log(one["value"])) is not None:
            numbers.setdefault(f"value of {one['metric']}", []).append(value)
    divergences = [case["divergence"] for case in red if case.get("divergence")]
    choices["divergence"] = "nowhere"
    choices["suite"] = min((_rung(case), _suite(case)) for case in red)[1] if red else "none"
    if divergences:
        first = divergences[0]
        layer, local = layer_of(str(first["site"]))
        choices["divergence"] = local
        choices["layer"] = "none" if layer is None else str(min(layer, 4))
        if first.get("step"):
            choices["phase"] = str(first["step"])
        if first.get("ranks"):
            choices["ranks"] = str(min(len(first["ranks"]), 3))
        choices["position"] = _place(min(int(one["position"]) for one in divergences))
        flags["border"] = _at_border(min(int(one["position"]) for one in divergences))
        flags["one expert"] = first.get("expert") is not None
        for one in divergences:
            _add_values(numbers, flags, one)
        _add_peak(numbers, failed, local)
    elif places := [int(one["position"]) for one in failed if one.get("position") is not None]:
        choices["position"] = _place(min(places))
        flags["border"] = _at_border(min(places))
    judged = {name.partition(" ")[2].partition("/")[0] for name in flags if name.startswith("test ")}
    return Pattern(
        flags,
        choices,
        {name: median(values) for name, values in numbers.items()},
        frozenset(judged | ({"site"} if sites else set())),
    )


def narrowed(case: Mapping[str, Any], sites: Iterable[str]) -> Mapping[str, Any]:
    """The case with what belongs to one of its causes: these sites, and what was measured at no site."""
    wanted = set(sites)
    if not wanted:
        return case
    measured = [one for one in case["measurements"] if not one.get("site") or one["site"] in wanted]
    first = case.get("divergence")
    if first is not None and first["site"] not in wanted:
        own = next((one for one in measured if one.get("site") and not one["ok"]), None)
        first = own and {"site": own["site"], "position": own.get("position") or 0, "error": own["value"]}
    return {**case, "measurements": measured, "divergence": first}


def function_of(case: str) -> str:
    """Test of a case id: ``correctness/test_sites.py::test_name`` without its parameters."""
    return case.partition("[")[0]


def group_of(case: str) -> str:
    """The test, by its function or case; all that compare sites, on one rank or on several, are one."""
    return "sites" if case.startswith(_SITE_TESTS) else function_of(case)


def family_of(model: str) -> str:
    """Family that a conformance model's name says; "" where it says none."""
    return next((family for word, family in _FAMILIES.items() if word in model), "")


def _failed(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The measurements that a row of the kill matrix keeps of a case: the first of each kind."""
    kinds: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for one in case.get("measurements") or ():
        if not one["ok"]:
            local = layer_of(one["site"])[1] if one.get("site") else ""
            kinds.setdefault((one["metric"], one.get("observable", ""), local), one)
    return list(kinds.values())[:_MEASURED]


def _rung(case: Mapping[str, Any]) -> int:
    return RUNGS.index(case["rung"]) if case["rung"] in RUNGS else len(RUNGS)


def _suite(case: Mapping[str, Any]) -> str:
    return str(case["case"]).partition("/")[0]


def _add_values(numbers: dict[str, list[float]], flags: dict[str, bool], divergence: Mapping[str, Any]) -> None:
    if (error := _log(divergence["error"])) is not None:
        numbers.setdefault("error", []).append(error)
    try:
        got, expected = float(divergence["got"]), float(divergence["expected"])
    except (KeyError, ValueError):  # chosen experts, words, nothing
        return
    flags["zero"] = got == 0.0 or flags.get("zero", False)
    flags["other sign"] = got * expected < 0 or flags.get("other sign", False)
    if expected and (ratio := _log(got / expected)) is not None:
        numbers.setdefault("ratio", []).append(ratio)


def _add_peak(numbers: dict[str, list[float]], failed: Sequence[Mapping[str, Any]], local: str) -> None:
    """How far the largest error stands out of the rms of its site: one element, or all of them."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for one in failed:
        if one.get("site") and layer_of(one["site"])[1] == local and (value := _log(one["value"])) is not None:
            found.setdefault((one.get("prompt", ""), one["site"]), {})[one["metric"]] = value
    peaks = [both["site.max"] - both["site.rms"] for both in found.values() if len(both) == 2 and "site.max" in both]
    if peaks:
        numbers["peak"] = peaks


def _words(case: Mapping[str, Any]) -> set[str]:
    """Words of what was said; not those of a metric or site, which are features of their own."""
    measured = _failed(case)
    said = [str(one.get("detail", "")) for one in measured if not one.get("site")]
    return {
        word
        for text in (said if measured else [str(case.get("reason", ""))])
        for word in _WORD.findall(_CASE.sub(" ", text.lower()))
    }


def _place(position: int) -> str:
    return next((f"below {edge}" for edge in _EDGES if position < edge), "beyond")


def _at_border(position: int) -> bool:
    return position > 0 and position % _PAGE in (0, 1, _PAGE - 1)


def _log(value: Any) -> float | None:
    number = abs(float(value))
    return math.log10(number) if 0 < number < math.inf else None
