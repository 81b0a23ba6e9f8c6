"""The summary at the end of a run: at most one screen, the cause and the next command first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_adapt.report.operators import coverage_line
from pytest_adapt.verdict.ladder import Cluster, clusters, worst
from pytest_adapt.verdict.result import CaseResult, Figure

if TYPE_CHECKING:
    from pytest_adapt.report.collector import Collector

__all__ = ["counts_line", "summary_lines", "write_summary"]

_MOST_CLUSTERS = 5
_MOST_FIGURES = 4


def write_summary(terminal: Any, collector: Collector) -> None:
    """Write the section ``adapt``."""
    red = bool(collector.fatal) or bool(clusters(collector.cases)) or bool(collector.fault_report()[1])
    terminal.section("adapt", red=red, green=not red, bold=True)
    for line, markup in summary_lines(collector):
        terminal.write_line(line, **markup)


def summary_lines(collector: Collector) -> list[tuple[str, dict[str, bool]]]:
    """(line, markup) of the summary."""
    lines: list[tuple[str, dict[str, bool]]] = []
    if collector.fatal:
        lines += [(line, {"red": True}) for line in f"the target cannot be used: {collector.fatal}".splitlines()[:20]]
    cases = collector.cases
    if not cases:
        return lines
    found = clusters(cases)
    lines.append((str(collector.ladder), {"red": bool(found), "green": not found, "bold": True}))
    lines.append((counts_line(cases), {}))
    if not any(case.status in ("pass", "fail") for case in cases):
        lines.append(("nothing was judged: no case passed, so this run proves nothing", {"red": True}))
    lines += [(line, {}) for line in collector.time_box.get("lines", ())]
    if collector.runner.settings.goldens == "off":
        lines.append(("goldens are off: what only a record can tell is unchecked", {"red": True}))
    if said := collector.fault_report()[1]:
        lines.append((said, {"red": True}))
    command = collector.runner.command_of
    for number, cluster in enumerate(found[:_MOST_CLUSTERS], start=1):
        lines.append((f"{number}. {_title(cluster)}", {"red": True}))
        lines += [(f"   {line}", {}) for line in _details(cluster)]
        label = "next command" if number == 1 else "repeat"
        lines.append((f"   {label}: {command(cluster.first)}", {}))
    if len(found) > _MOST_CLUSTERS:
        rest = len(found) - _MOST_CLUSTERS
        lines.append((f"{rest} more cause{'s' if rest > 1 else ''} in the report", {}))
    missing = _not_shown(cases, collector.runner.timing_command)
    if missing:
        lines.append((missing, {}))
    if operators := coverage_line(cases):
        lines.append((operators, {}))
    lines += [(line, {}) for line in _figure_lines(cases)]
    memory = f", peak memory {collector.peak_bytes / 1e9:.2f} GB" if collector.peak_bytes else ""
    where = f", report {collector.written}" if collector.written else ""
    lines.append((f"engineering reference: {collector.seconds:.1f} s{memory}{where}", {}))
    return lines


def counts_line(cases: list[CaseResult]) -> str:
    """``12 cases: 10 pass, 1 fail, 1 unsupported (1 not required)``."""
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.status.value] = counts.get(case.status.value, 0) + 1
    optional = sum(not case.required for case in cases)
    tail = f" ({optional} not required)" if optional else ""
    return f"{len(cases)} cases: {', '.join(f'{number} {status}' for status, number in counts.items())}{tail}"


def _title(cluster: Cluster) -> str:
    number = len(cluster.cases)
    where = [
        ", ".join(values[:4]) + (" ..." if len(values) > 4 else "")
        for name in ("model", "precision", "layout")
        if (values := cluster.values(name))
    ]
    return f"{cluster.cause}: {number} case{'s' if number > 1 else ''} ({'; '.join(where)})" if where else cluster.cause


def _details(cluster: Cluster) -> list[str]:
    case = cluster.first
    lines = [f"{case.rung or 'beside the ladder'}: {case.case}"]
    if case.divergence is not None:
        lines.append(str(case.divergence))
    measured = worst(case)
    if measured is not None and not measured.ok:
        where = f" at position {measured.position}" if measured.position is not None else ""
        prompt = f" of {measured.prompt}" if measured.prompt else ""
        site = f" in {measured.site}" if measured.site else ""
        times = f" ({measured.use:.3g} x budget)" if measured.budget else ""
        detail = f"; {measured.detail}" if measured.detail else ""
        lines.append(
            f"{measured.metric} {measured.value:.4g}, budget {measured.budget:.4g}{times}{where}{prompt}{site}{detail}"
        )
    elif case.divergence is None and case.reason and case.reason not in cluster.cause:
        lines.append(case.reason)
    return lines


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
    """One line for what was neither passed nor failed. What was deferred shares one reason and one command."""
    reasons: dict[str, int] = {}
    for case in cases:
        if case.status.value in ("unsupported", "unknown", "unchecked", "inconclusive", "deferred", "blocked"):
            reason = f"measures time; run it without xdist: {timing_command}"
            key = f"{case.status.value}: {reason if case.status == 'deferred' else case.reason}"
            reasons[key] = reasons.get(key, 0) + 1
    ordered = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{number} x {reason}" for reason, number in ordered[:3]]
    rest = len(ordered) - 3
    more = f"; {rest} more reason{'s' if rest > 1 else ''} in the report" if rest > 0 else ""
    return "not judged: " + "; ".join(shown) + more if shown else ""
