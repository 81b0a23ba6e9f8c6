"""What a fault is, and the list of all of them.

A fault wraps a seam that the target has anyway (an operation of the kernel registry, the weight loader, the KV
cache); the target's code knows nothing of faults and pays nothing while none is installed. A wrapper receives
the original callable and returns its replacement.
"""

from __future__ import annotations

import difflib
import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["CountedSeams", "Fault", "Operation", "Seams", "UnknownFault", "Wrapper", "catalogue", "get", "plant"]

Operation = Callable[..., Any]
Wrapper = Callable[[Operation], Operation]


class Seams(Protocol):
    """What a target must offer (as its ``seams`` attribute) so that faults can be put into it."""

    def wrap(self, seam: str, wrapper: Wrapper) -> None:
        """Replace ``seam`` by ``wrapper(original)`` in every deployment opened from now on, until ``restore``.

        Seams are the target's own names: an operation ("rms_norm"), a method of its loader ("loader.read") or of
        its KV cache ("kv.gather"). Raises KeyError for a seam that it does not have.
        """
        ...

    def restore(self) -> None:
        """Put every original back."""
        ...

    def layer(self) -> int | None:
        """The layer being computed at this moment; None outside the layers."""
        ...

    def rank(self) -> int:
        """The rank that computes at this moment."""
        ...


class CountedSeams:
    """Seams through which a fault is installed so that ``reached`` hears of each call of what it replaced."""

    def __init__(self, seams: Seams, reached: Callable[[], None]) -> None:
        self._seams = seams
        self._reached = reached

    def wrap(self, seam: str, wrapper: Wrapper) -> None:
        """See `Seams`."""

        def counted(original: Operation) -> Operation:
            replaced = wrapper(original)

            @functools.wraps(replaced)
            def call(*arguments: Any, **named: Any) -> Any:
                self._reached()
                return replaced(*arguments, **named)

            return call

        self._seams.wrap(seam, counted)

    def restore(self) -> None:
        """See `Seams`."""
        self._seams.restore()

    def layer(self) -> int | None:
        """See `Seams`."""
        return self._seams.layer()

    def rank(self) -> int:
        """See `Seams`."""
        return self._seams.rank()


class UnknownFault(ValueError):
    """No fault has this id; the message says what it waits for, or which ids are near."""


@dataclass(frozen=True)
class Fault:
    """One injectable fault.

    ``models`` are conformance models on which the fault is in contract and not equivalent to the original;
    ``site`` is where the first divergence belongs (without its layer), ``layer`` the first layer that shows it on
    the first of those models; "" for a fault of no single value, such as a lost block.
    """

    id: str
    title: str
    report: str
    requirement: int
    suite: str
    site: str
    models: tuple[str, ...]
    install: Callable[[Seams], None]
    layer: int | None = None
    observable: str = "taps"
    difficulty: str = "medium"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    """Those in which the owning suite must see it."""
    healthy: str = ""
    """Which sound engine computes the same in the other precisions, so that it is no fault there; "" for none."""
    layout: str = "single"
    """Ranks on which it shows."""
    where: str = ""
    """Of a suite that is not white-box: words of the names of its tests that must be red."""
    says: str = ""
    """Part of what such a test must say: it leads to the cause."""
    contexts: tuple[int, ...] = ()
    """Context lengths at which the fault shows; () for those of the profile."""
    reduced: tuple[Callable[[Seams], None], tuple[int, ...]] | None = None
    """The same fault with smaller numbers, and the lengths at which it shows then: for runs of seconds."""
    options: tuple[str, ...] = ()
    """Of the command line, without which it does not show."""

    @property
    def white_box(self) -> bool:
        """Whether a site must be named; else a message (``says``)."""
        return bool(self.site)

    @property
    def kind(self) -> str:
        """Class of the fault: the letters of its id."""
        return self.id[:2]

    @property
    def shows_on(self) -> str:
        """Where it is known to be visible, in words."""
        contexts = f", contexts {', '.join(map(str, self.contexts))}" if self.contexts else ""
        return f"model {self.models[0]} (layout {self.layout}, {' and '.join(self.precisions)}{contexts})"

    @property
    def command(self) -> str:
        """The command line that puts it where it shows, and runs the tests that must be red."""
        words = [f"--adapt-inject={self.id}", f"--adapt-models={self.models[0]}", f"--adapt-layouts={self.layout}"]
        if self.contexts:
            words.append(f"--adapt-contexts={','.join(map(str, self.contexts))}")
        words += [*self.options, "-k", f"{self.suite} and {self.where or 'sites'}"]
        return shlex.join(["pytest", "--adapt-target=builtin", *words])


def catalogue() -> Mapping[str, Fault]:
    """All faults by id, in the order of their ids."""
    from pytest_adapt.faults import (
        attention,
        determinism,
        experts,
        layouts,
        leaks,
        long_context,
        norms,
        outputs,
        precision,
        rotary,
        routing,
        sampling,
        scheduling,
        weights,
    )

    modules: tuple[Any, ...] = (
        *(attention, determinism, experts, layouts, leaks, long_context, norms, outputs, precision, rotary, routing),
        *(sampling, scheduling, weights),
    )
    entries: list[Fault] = [fault for module in modules for fault in module.FAULTS]
    found = {fault.id: fault for fault in sorted(entries, key=lambda fault: fault.id)}
    if len(found) != len(entries):
        raise ValueError("two faults share an id")
    return found


def get(identifier: str) -> Fault:
    """The fault with this id: of the catalogue, or one of those that only a baseline shows (`slowness`). Raises
    UnknownFault."""
    from pytest_adapt.faults.slowness import SLOWDOWNS

    known = {**catalogue(), **SLOWDOWNS}
    if identifier not in known:
        raise UnknownFault(_unknown(identifier, tuple(known)))
    return known[identifier]


def _unknown(identifier: str, known: Sequence[str]) -> str:
    """What to do about an id that no fault has."""
    from pytest_adapt.faults.waiting import waits

    if reason := waits(identifier):
        return reason
    near = difflib.get_close_matches(identifier.upper(), known, 4, 0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"no fault {identifier[:40]!r}; {hint}python -m pytest_adapt faults list names all {len(known)}"


def plant(seams: Seams, identifier: str) -> None:
    """Put the fault with this id into a target's seams. Raises UnknownFault."""
    get(identifier).install(seams)
