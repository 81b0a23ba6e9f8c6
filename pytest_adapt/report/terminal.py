"""The summary at the end of a run: at most one screen, the cause and the next command first."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from pytest_adapt.report.operators import alone, coverage_line
from pytest_adapt.verdict.causes import failed, worst
from pytest_adapt.verdict.ladder import Cluster, clusters
from pytest_adapt.verdict.result import CaseResult, Figure, Measurement, Status
from pytest_adapt.verdict.status import PASSED, TIMED

if TYPE_CHECKING:
    from pytest_adapt.report.collector import Collector

__all__ = ["counts_line", "summary_lines", "write_summary"]

SCREEN = 24
"""Lines that a summary may take, with those that a terminal of WIDTH columns wraps."""
WIDTH = 120
_MOST_CLUSTERS = 5
_MOST_FIGURES = 4
_MOST_PATCH = 24
_MOST_DETAIL = 4
"""Lines of one measurement: what was found, and the way out in a line of its own."""
_JUDGED = PASSED | {Status.FAIL, Status.REGRESSION, Status.MISMATCH}


def write_summary(terminal: Any, collector: Collector) -> None:
    """Write the section ``adapt``."""
    red = bool(collector.fatal) or bool(clusters(collector.cases)) or bool(collector.fault_report()[1])
    red = red or collector.useless_waivers
    terminal.section("adapt", red=red, green=not red, bold=True)
    for line, markup in summary_lines(collector):
        terminal.write_line(line, **markup)


def summary_lines(collector: Collector) -> list[tuple[str, dict[str, bool]]]:
    """(line, markup) of the summary."""
    lines: list[tuple[str, dict[str, bool]]] = []
    if collector.fatal:
        text = f"the target cannot be used: {collector.fatal}"
        lines += [(_cut(line, 1), {"red": True}) for line in text.splitlines()[: SCREEN - 8]]
    cases = collector.cases
    if not cases:
        return lines
    found = clusters(cases)
    lines.append((str(collector.ladder), {"red": bool(found), "green": not found, "bold": True}))
    lines.append((counts_line(cases), {}))
    if not any(case.status in _JUDGED for case in cases):
        lines.append(("nothing was judged: no case passed, so this run proves nothing", {"red": True}))
    lines += [(line, {}) for line in collector.time_box.get("lines", ())]
    if collector.runner.settings.goldens == "off":
        lines.append(("goldens are off: what only a record can tell is unchecked", {"red": True}))
    if said := collector.fault_report()[1]:
        lines.append((said, {"red": True}))
    again = sum(case.attempts > 1 for case in cases)
    rerun = f"run again by another plugin: {again}; reruns add evidence, an earlier verdict stands" if again else ""
    missing = _not_shown(cases, collector.runner.timing_command)
    told = (
        rerun,
        *collector.runner.gating.summary(),
        _flips_line(cases),
        missing,
        coverage_line(cases),
        *_figure_lines(cases),
    )
    tail = [_cut(line, 3) for line in told if line]
    memory = f", peak memory {collector.peak_bytes / 1e9:.2f} GB" if collector.peak_bytes else ""
    where = f", report {collector.written}" if collector.written else ""
    tail.append(f"engineering reference: {collector.seconds:.1f} s{memory}{where}")
    lines += _causes(collector, found, SCREEN - 2 - _height([*(line for line, _ in lines), *tail]))
    # The patch of a waiver file comes whole: it is for copying.
    return lines + _waiver_lines(collector) + [(line, {}) for line in tail]


def _causes(collector: Collector, found: list[Cluster], room: int) -> list[tuple[str, dict[str, bool]]]:
    """The causes, as many as ``room`` lines hold; the first in any case, because it is the one to mend first."""
    lines: list[tuple[str, dict[str, bool]]] = []
    likely = _likely(collector) if found else {}
    for number, cluster in enumerate(found[:_MOST_CLUSTERS], start=1):
        case = cluster.first
        details = [f"{case.rung or 'beside the ladder'}: {case.case}", *_details(cluster)]
        kind = cluster.cause_of(case).key
        if kind[0] == "site" and (said := alone(collector.cases, kind[1], case.precision)):
            details.append(said)
        if number - 1 in likely:
            details.append(likely[number - 1])
        label = "next command" if number == 1 else "repeat"
        own = [
            (_cut(f"{number}. {_title(cluster)}"), {"red": True}),
            *((_cut(f"   {line}"), {}) for line in details),
            (f"   {label}: {collector.runner.command_of(case)}", {}),
        ]
        if number > 1 and _height([line for line, _ in [*lines, *own]]) > room:
            break
        lines += own
    else:
        number = len(found[:_MOST_CLUSTERS]) + 1
    if rest := len(found) - number + 1:
        titles = "; ".join(cluster.cause for cluster in found[number - 1 :])
        lines.append((_cut(f"{rest} more cause{'s' if rest > 1 else ''} in the report: {titles}"), {}))
    return lines


def _likely(collector: Collector) -> dict[int, str]:
    """Index of a cluster -> the known fault that it looks like, where the match is strong and faults are measured."""
    from pytest_adapt.faults.matrix import MatrixError
    from pytest_adapt.verdict.diagnose import of_report, one_line, read_matrix

    try:
        found = of_report(collector.document, read_matrix())
    except (MatrixError, KeyError, TypeError, ValueError):  # a summary never raises, whatever the file holds
        return {}
    return {index: line for index, one in enumerate(found) if (line := one_line(one))}


def _cut(line: str, most: int = 2) -> str:
    """At most so many lines of a terminal."""
    return line if len(line) <= most * WIDTH else f"{line[: most * WIDTH - 4]} ..."


def _height(lines: list[str]) -> int:
    return sum(max(1, -(-_columns(line) // WIDTH)) for line in lines)


def _columns(line: str) -> int:
    """Columns that a terminal needs: characters of East Asian scripts take two."""
    return len(line) + sum(unicodedata.east_asian_width(one) in "WF" for one in line)


def counts_line(cases: list[CaseResult]) -> str:
    """``12 cases: 10 pass, 1 fail, 1 unsupported (1 not required)``."""
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.status.value] = counts.get(case.status.value, 0) + 1
    optional = sum(not case.required for case in cases)
    tail = f" ({optional} not required)" if optional else ""
    shown = ", ".join(f"{number} {status}" for status, number in counts.items())
    return f"{len(cases)} case{'s' * (len(cases) != 1)}: {shown}{tail}"


def _title(cluster: Cluster) -> str:
    number = len(cluster.cases)
    where = [
        ", ".join(values[:4]) + (" ..." if len(values) > 4 else "")
        for name in ("model", "precision", "layout")
        if (values := cluster.values(name))
    ]
    return f"{cluster.cause}: {number} case{'s' if number > 1 else ''} ({'; '.join(where)})" if where else cluster.cause


def _details(cluster: Cluster) -> list[str]:
    """Where it came about, and what is most beyond its budget."""
    case = cluster.first
    cause = cluster.cause_of(case)
    measured = failed(case, cause)
    lines = []
    if case.divergence is not None and (not cause.sites or case.divergence.site in cause.sites):
        lines.append(str(case.divergence))
        if case.divergence.looks:
            lines.append(case.divergence.looks)
        measured = [one for one in measured if not one.site]
    elif cause.sites:  # not the first divergence of its case, but the first of this cause
        measured = [one for one in measured if one.site == cause.sites[0]] or measured
    if (most := worst(measured)) is not None:
        lines += _beyond(most).splitlines()[:_MOST_DETAIL]
    elif not lines and case.reason and case.reason not in cluster.cause:
        lines.append(case.reason)
    if shortest := case.prefix or case.no_prefix:
        lines.append(f"shortest: {shortest}")
    return lines


def _flips_line(cases: list[CaseResult]) -> str:
    """``flips: 3 of 1204 router choices and 2 of 900 tokens, each a near-tie; 0 that are none``; "" where none did."""
    found: dict[str, list[int]] = {}
    for case in cases:
        for one in case.flips:
            counts = (one.compared, one.certified, one.uncertified)
            found[one.kind] = [a + b for a, b in zip(found.get(one.kind, [0, 0, 0]), counts, strict=True)]
    names = {"router": "router choices", "token": "tokens"}
    shown = [f"{found[kind][1]} of {found[kind][0]} {name}" for kind, name in names.items() if kind in found]
    without = sum(counts[2] for counts in found.values())
    if not without and not sum(counts[1] for counts in found.values()):
        return ""
    return f"flips: {' and '.join(shown)}, each a near-tie; {without} that are none"


def _beyond(measured: Measurement) -> str:
    where = f" at position {measured.position}" if measured.position is not None else ""
    prompt = f" of {measured.prompt}" if measured.prompt else ""
    site = f" in {measured.site}" if measured.site else ""
    value, budget = f"{measured.value:.4g}", f"{measured.budget:.4g}"
    if value == budget and measured.value != measured.budget:
        value, budget = f"{measured.value:.8g}", f"{measured.budget:.8g}"
    if not measured.budget and measured.detail:  # a promise: what was found says more than how often
        return f"{measured.metric}{where}{prompt}{site}: {measured.detail}"
    times = f" ({measured.use:.3g} x budget)" if measured.budget and value != budget else ""
    detail = f"; {measured.detail}" if measured.detail else ""
    return f"{measured.metric} {value}, budget {budget}{times}{where}{prompt}{site}{detail}"


def _figure_lines(cases: list[CaseResult]) -> list[str]:
    """One line a load that was timed, the first few: what an engineer looks at first."""
    lines = []
    for case in cases:
        if case.suite == "operators":  # a table of its own, in the report
            continue
        by_load: dict[str, list[str]] = {}
        for one in case.figures:
            by_load.setdefault(one.load, []).append(_amount(one))
        lines += [
            f"engineering reference: {case.model} {case.layout} {case.precision}, {load}: {', '.join(amounts)}"
            for load, amounts in by_load.items()
        ]
    rest = len(lines) - _MOST_FIGURES
    return lines[:_MOST_FIGURES] + ([f"{rest} more loads in the report"] if rest > 0 else [])


def _waiver_lines(collector: Collector) -> list[tuple[str, dict[str, bool]]]:
    """Waivers that do not do what they say, and the patch that mends them."""
    from pytest_adapt.verdict.waiver import MENDED, patch

    told = [one for one in collector.waived if one.state in (*MENDED, "spent")]
    lines = [(str(one), {"red": one.state != "loose"}) for one in told]
    if not any(one.state in MENDED for one in told):
        return lines
    root, settings = collector.runner.config.rootpath, collector.runner.settings
    path = root / settings.waivers
    shown = path.relative_to(root) if path.is_relative_to(root) else path
    diff = patch(path, collector.waived, shown.as_posix()).splitlines()
    if not diff:
        return [*lines, (f"{path} has another form than [[waiver]] tables; change it by hand", {})]
    lines += [(line, {}) for line in diff[:_MOST_PATCH]]
    if len(diff) > _MOST_PATCH:
        lines.append((f"... {len(diff) - _MOST_PATCH} more lines of the patch", {}))
    return lines


def _amount(one: Figure) -> str:
    value, name = one.value, one.name.partition(",")[0]
    if one.unit == "bytes":
        return f"{name} {value / 1e9:.2f} GB"
    if one.unit == "share":
        return f"{name} {value:.2%}"
    if one.unit == "s" and value < 1:
        return f"{name} {1000 * value:.3g} ms"
    return f"{name} {value:.4g} {one.unit}"


def _not_shown(cases: list[CaseResult], timing_command: str) -> str:
    """One line for what was neither passed nor failed."""
    reasons: dict[str, int] = {}
    for case in cases:
        if case.status.value in ("unsupported", "unknown", "unchecked", "inconclusive", "deferred", "blocked"):
            # What measures time is put off for one reason, and one command runs it all.
            reason = f"{TIMED}: {timing_command}" if case.reason.startswith(TIMED) else case.reason
            key = f"{case.status.value}: {reason}"
            reasons[key] = reasons.get(key, 0) + 1
    ordered = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{number} x {reason}" for reason, number in ordered[:3]]
    rest = len(ordered) - 3
    more = f"; {rest} more reason{'s' if rest > 1 else ''} in the report" if rest > 0 else ""
    return "not judged: " + "; ".join(shown) + more if shown else ""
