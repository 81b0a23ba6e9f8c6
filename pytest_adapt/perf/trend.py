"""Ratios to a pinned baseline over many runs: kept as lines of JSON, searched for changes of level, drawn.

Levels are searched as E-divisive does (Matteson and James 2014): the split of a series at which the energy distance of
its two parts is largest is a change where Student's test of their means says so at 1e-5 and the means differ by 3 % at
least; then both parts are searched alike. Ratios, not times: the baseline was measured in the same minutes.
"""

from __future__ import annotations

import fcntl
import html
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pytest_adapt import documents
from pytest_adapt.verdict.statistics import student_tail

__all__ = ["FILE", "Point", "Series", "append", "changes", "drawn", "read"]

FILE = Path(".adapt/gate/trend.jsonl")
P = 1e-5
LEAST = 0.03
_SHORTEST = 2
"""Points on each side of a change: one may be a bad minute."""
_MOST = 2000
"""Points of a series in which changes are sought."""
_WIDTH, _HEIGHT, _MARGIN = 720, 180, 48


@dataclass(frozen=True)
class Point:
    """One benchmark of one run."""

    at: str
    """UTC, as 2026-01-31T04:00:00Z."""
    commit: str
    target: str
    baseline: str
    case: str
    ratio: float
    low: float
    high: float
    """The interval of 95 %."""
    pairs: int
    clock: str
    verdict: str


_POINT = documents.fields(
    dict.fromkeys(("at", "commit", "target", "baseline", "case", "clock", "verdict"), documents.printable)
    | dict.fromkeys(("ratio", "low", "high"), documents.real)
    | {"pairs": documents.whole}
)


@dataclass(frozen=True)
class Series:
    """One benchmark of one target against one baseline, the oldest first."""

    case: str
    target: str
    baseline: str
    points: tuple[Point, ...]

    @property
    def changes(self) -> list[int]:
        """Indices of the first points of new levels."""
        recent = self.points[-_MOST:]  # the search is quadratic
        return [len(self.points) - len(recent) + one for one in changes([math.log(point.ratio) for point in recent])]

    @property
    def levels(self) -> list[tuple[int, float]]:
        """(first index, median ratio) of each level."""
        starts = [0, *self.changes]
        ends = [*starts[1:], len(self.points)]
        return [
            (start, statistics.median(point.ratio for point in self.points[start:end]))
            for start, end in zip(starts, ends, strict=True)
        ]

    @property
    def slower(self) -> Point | None:
        """Where the present level began, if it is slower than the one before."""
        levels = self.levels
        if len(levels) < 2 or levels[-1][1] <= levels[-2][1]:
            return None
        return self.points[levels[-1][0]]


def append(path: Path, points: Iterable[Point]) -> None:
    """Add the points of one run, in one piece, whoever else writes. Raises OSError."""
    text = "".join(json.dumps(asdict(point), sort_keys=True) + "\n" for point in points)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)


def read(path: Path) -> tuple[list[Series], int]:
    """All series of a file, by case, and the number of lines that are none of ours (a run that was killed while it
    wrote). Raises OSError."""
    found: dict[tuple[str, str, str], list[Point]] = {}
    others = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = documents.parse(line)
        except ValueError:
            row = None
        if _POINT(row) is None and 0 < row["low"] <= row["ratio"] <= row["high"]:
            point = Point(**{name: row[name] for name in Point.__dataclass_fields__})
            found.setdefault((point.case, point.target, point.baseline), []).append(point)
        else:
            others += 1
    every = [Series(*key, tuple(sorted(points, key=lambda one: one.at))) for key, points in sorted(found.items())]
    return every, others


def changes(values: Sequence[float]) -> list[int]:
    """Indices at which the level of a series of logarithms changes, ascending."""
    split = _split(np.asarray(values, np.float64))
    if split is None:
        return []
    return [*changes(values[:split]), split, *(split + one for one in changes(values[split:]))]


def _split(x: np.ndarray) -> int | None:
    """The index of the most distant split of x [n], where it is a change."""
    n = len(x)
    if n < 2 * _SHORTEST:
        return None
    distance = np.abs(x[:, None] - x[None, :])
    corner = np.zeros((n + 1, n + 1))
    corner[1:, 1:] = distance.cumsum(0).cumsum(1)
    whole = corner[n, n]
    best, energy = None, -math.inf
    for k in range(_SHORTEST, n - _SHORTEST + 1):
        left, right = corner[k, k], whole - 2 * corner[n, k] + corner[k, k]
        between = corner[n, k] - corner[k, k]
        m = n - k
        found = k * m / n * (2 * between / (k * m) - left / (k * k) - right / (m * m))
        if found > energy:
            best, energy = k, found
    assert best is not None
    a, b = x[:best], x[best:]
    step = abs(float(a.mean() - b.mean()))
    if step < math.log1p(LEAST):
        return None
    spread = math.sqrt((float(((a - a.mean()) ** 2).sum()) + float(((b - b.mean()) ** 2).sum())) / (n - 2))
    t = math.inf if spread == 0 else step / (spread * math.sqrt(1 / len(a) + 1 / len(b)))
    return best if 2 * student_tail(t, n - 2) < P else None


def drawn(series: Sequence[Series]) -> str:
    """One picture (SVG) of all series, one below the other: ratios with their intervals, levels, and changes."""
    parts = [_panel(one, place * _HEIGHT) for place, one in enumerate(series)]
    height = max(1, len(series)) * _HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n' + "".join(parts) + "</svg>\n"
    )


def _panel(one: Series, top: int) -> str:
    points, levels = one.points, one.levels
    low = min(0.95, *(point.low for point in points)) - 0.01
    high = max(1.05, *(point.high for point in points)) + 0.01

    def x(index: float) -> float:
        return _MARGIN + (index + 0.5) * (_WIDTH - 2 * _MARGIN) / len(points)

    def y(ratio: float) -> float:
        return top + 24 + (high - ratio) / (high - low) * (_HEIGHT - 48)

    title = html.escape(f"{one.case}: {one.target} against {one.baseline}")
    lines = [f'<text x="{_MARGIN}" y="{top + 15}">{title}</text>']
    for ratio, colour in ((1.0, "#888"), (1.05, "#d88"), (1 / 1.05, "#8b8")):
        lines.append(_line(_MARGIN, y(ratio), _WIDTH - _MARGIN, y(ratio), colour, 'stroke-dasharray="4 3"'))
        lines.append(f'<text x="4" y="{y(ratio) + 4:.1f}" fill="{colour}">x{ratio:.2f}</text>')
    for index, point in enumerate(points):
        lines.append(_line(x(index), y(point.low), x(index), y(point.high), "#9ab"))
        note = html.escape(f"{point.at} {point.commit[:8]} x{point.ratio:.3f} {point.verdict}")
        lines.append(
            f'<circle cx="{x(index):.1f}" cy="{y(point.ratio):.1f}" r="2.5" fill="#246"><title>{note}</title></circle>'
        )
    for number, (start, level) in enumerate(levels):
        end = levels[number + 1][0] if number + 1 < len(levels) else len(points)
        lines.append(_line(x(start - 0.5), y(level), x(end - 0.5), y(level), "#246", 'stroke-width="1.5"'))
        if number:
            lines.append(_line(x(start - 0.5), top + 24, x(start - 0.5), top + _HEIGHT - 24, "#c33"))
            commit = html.escape(points[start].commit[:8])
            lines.append(f'<text x="{x(start - 0.5) + 3:.1f}" y="{top + _HEIGHT - 12}" fill="#c33">{commit}</text>')
    return "\n".join(lines) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'
