"""The result model: what a comparison measured, what a case came to, and the rungs of the ladder.

Values between the stages of a run are these small dataclasses; every report is written from them.
Standard library only, and every field survives ``dataclasses.asdict`` as plain JSON (they travel from
xdist workers to the controller that way).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["RUNGS", "CaseResult", "Divergence", "Figure", "Flips", "Measurement", "Prefix", "Status"]


class Status(StrEnum):
    """What a case came to. The pytest outcome of each is in the design notes and in `status.outcome`."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    XFAIL = "xfail"
    WAIVED = "waived"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"
    UNCHECKED = "unchecked"
    INCONCLUSIVE = "inconclusive"
    DEFERRED = "deferred"
    BLOCKED = "blocked"
    STALE = "stale"
    MISMATCH = "mismatch"
    NEW = "new"
    GONE = "gone"
    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    SAME = "same"
    INVALID_MACHINE = "invalid machine"


RUNGS: tuple[str, ...] = (
    "loads",
    "correct",
    "consistent",
    "layouts",
    "precision",
    "long_context",
    "stress",
    "performance",
)


@dataclass(frozen=True)
class Measurement:
    """One number against one budget."""

    metric: str
    """logprob.rms, logprob.max, cosine, kl, token_match, site.rms, site.max, prompt_tokens, ..."""
    value: float
    budget: float
    ok: bool
    observable: str = ""
    """Which observable answered: taps, logits, score, topk, text."""
    prompt: str = ""
    position: int | None = None
    """Token position of the worst value."""
    site: str = ""
    """Full site name, where the metric belongs to one."""
    compared: int = 0
    """How many values were compared; 0 is never a pass."""
    detail: str = ""
    """One line for the reader: got, expected, certificate."""
    settled: bool = True
    """False where too few samples decide neither way; it is not ok then, and no failure."""

    @property
    def use(self) -> float:
        """Share of the budget used (1.0 is the limit); inf where the budget is 0 and the value is not."""
        if self.budget:
            return self.value / self.budget
        return 0.0 if not self.value else float("inf")


@dataclass(frozen=True)
class Figure:
    """Something timed or weighed, every sample of it: an engineering reference of one machine and run."""

    load: str
    """What was asked, as ``1024 in / 128 out / batch 4``."""
    name: str
    unit: str
    samples: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Flips:
    """How many discrete choices of one kind were compared, and how many differ from the reference's."""

    kind: str
    """router (experts and groups) or token (the most probable one)."""
    compared: int
    certified: int
    """Differ with a certificate: the reference's margin is within the error measured on that very row."""
    uncertified: int
    """Differ without one; each is a failure."""


_RANKS = 4


@dataclass(frozen=True)
class Divergence:
    """The first place where a target left the reference, in logical coordinates."""

    site: str
    position: int
    got: str
    expected: str
    error: float
    budget: float
    prompt: str = ""
    layer: int | None = None
    step: str = ""
    """prefill or decode, where it matters."""
    expert: int | None = None
    element: tuple[int, ...] = ()
    """Index of it within the row of its position."""
    ranks: tuple[str, ...] = ()
    """Names of the ranks where it came about; empty on one rank, or where the target cannot tell."""
    note: str = ""
    looks: str = ""
    """What the values of the row are instead, and how far it reaches; for the reader, no evidence."""

    def __str__(self) -> str:
        where = [self.site, f"position {self.position}"]
        if self.expert is not None:
            where.append(f"expert {self.expert}")
        if self.ranks:
            shown = self.ranks[:_RANKS] + (("...",) if len(self.ranks) > _RANKS else ())
            where.append(" or ".join(shown))
        if self.step:
            where.append(self.step)
        error = f"(error {self.error:.3g}, budget {self.budget:.3g})"
        line = f"{', '.join(where)}: got {self.got}, expected {self.expected} {error}"
        return f"{line}; {self.note}" if self.note else line


@dataclass(frozen=True)
class Prefix:
    """The shortest beginning of a prompt that was seen to fail alone."""

    prompt: str
    tokens: int
    """Its length."""
    whole: int
    """Tokens of the whole prompt."""
    passes: int
    """The longest beginning below it that does not fail; 0 for none."""
    requests: int
    """How many were spent."""
    longer_passes: int = 0
    """A longer beginning that does not fail: then the failure does not grow with the prompt, and shorter ones than
    ``tokens`` may fail that were not tried."""

    @property
    def argument(self) -> str:
        """Command-line argument that runs a suite with just these tokens."""
        return f"--adapt-prompt={self.prompt}:{self.tokens}"

    def __str__(self) -> str:
        what = f"the first {self.tokens} of {self.whole} tokens of {self.prompt} show it"
        if self.passes + 1 < self.tokens:
            what += f", {self.passes or 'none'} do not, between them nothing was tried"
        elif self.passes:
            what += f", {self.passes} do not"
        if self.longer_passes:
            what += f"; not monotonic: {self.longer_passes} do not either"
        return f"{what} ({self.requests} requests)"


@dataclass
class CaseResult:
    """One item of the run."""

    case: str
    """Case id: the same from a checkout, a wheel, and under xdist. Never a node id."""
    status: Status
    suite: str
    rung: str
    required: bool = True
    model: str = ""
    layout: str = ""
    precision: str = ""
    context: int = 0
    observable: str = ""
    reason: str = ""
    """Why it was not a plain pass; one line."""
    waiver: int = 0
    """Place in the waiver file of the entry that let it through, from 1; 0 where none did."""
    measurements: list[Measurement] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    flips: list[Flips] = field(default_factory=list)
    divergence: Divergence | None = None
    attempts: int = 1
    """How often the item ran, where another plugin reruns it: its first verdict stands, its samples add up."""
    prefix: Prefix | None = None
    no_prefix: str = ""
    """Why no beginning of a prompt was found that fails alone; "" where none was sought."""
    requirements: tuple[int, ...] = ()
    seconds: float = 0.0
    open_seconds: float = 0.0
    """Of these, opening deployments."""
    peak_bytes: int = 0
    nodeid: str = ""
    """Only to print a command that repeats the case; never a key."""
