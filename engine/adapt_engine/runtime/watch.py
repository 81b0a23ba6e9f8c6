"""Why ranks in processes do not go on: read from what their boards show. No process is touched here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..comm.board import Sight
from ..mesh import Mesh

__all__ = ["around", "report", "stuck"]


def stuck(
    mesh: Mesh,
    sights: Mapping[int, Sight],
    unfinished: Iterable[int],
    now: float,
    timeout: float,
    runnable: Callable[[int], bool] = lambda rank: False,
) -> tuple[int, str] | None:
    """The rank that holds the others up, and how; None while they may still go on.

    A rank is stuck that gave no sign of life for ``timeout`` seconds; ranks are stuck that all wait for one another
    as long. A rank that computes is not, however long it takes; nor is one that would run (``runnable``) if a busy
    machine let it.
    """
    open_ranks = sorted(unfinished)
    silent = [rank for rank in open_ranks if now - sights[rank].beat > timeout and not runnable(rank)]
    if silent:
        return silent[0], f"gives no sign of life for {timeout:g} s, {around(mesh, sights, silent[0], open_ranks)}"
    waiting = [rank for rank in open_ranks if sights[rank].awaited >= 0 and now - sights[rank].changed > timeout]
    if not open_ranks or waiting != open_ranks or any(runnable(rank) for rank in open_ranks):
        return None
    rank = _first_of_circle(sights, waiting)
    other = sights[rank].awaited
    there = f"is in {sights[other].pending}" if other in open_ranks else "has finished the step"
    return rank, f"waits for ever in {sights[rank].pending}: {mesh.name(other)} {there}"


def _first_of_circle(sights: Mapping[int, Sight], waiting: list[int]) -> int:
    """Where everyone waits for another: the rank that waits for one who will not come, the others follow from it.

    That is one who waits for a rank that has finished, or, of ranks that wait in a circle, the first to do so.
    """
    seen = [waiting[0]]
    while (other := sights[seen[-1]].awaited) in waiting and other not in seen:
        seen.append(other)
    if other not in seen:
        return seen[-1]
    return min(seen[seen.index(other) :], key=lambda one: sights[one].changed)


def around(mesh: Mesh, sights: Mapping[int, Sight], rank: int, unfinished: Iterable[int]) -> str:
    """The collective that ``rank`` is in, or in which others wait for it, or what they are in."""
    if sights[rank].pending:
        return f"in {sights[rank].pending}"
    others = [other for other in unfinished if other != rank and sights[other].pending]
    waiting = [other for other in others if sights[other].awaited == rank] or others
    if waiting:
        names = ", ".join(mesh.name(other) for other in waiting)
        return f"while {names} wait{'s' * (len(waiting) == 1)} in {sights[waiting[0]].pending}"
    return "while no rank is in a collective"


def report(mesh: Mesh, sights: Mapping[int, Sight], rank: int | None, what: str) -> str:
    """What all errors of ranks look like: step, rank (None: no single one), what happened, then the last calls of
    every rank."""
    name = "" if rank is None else mesh.name(rank)
    head = what if what.startswith(name) else f"{name} {what}"
    tails = "\n".join(f"  {mesh.name(other)}: {sights[other].tail}" for other in sorted(sights))
    return f"step {max(sight.step for sight in sights.values())}: {head}\n{tails}"
