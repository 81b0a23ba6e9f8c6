"""The judge of one item: collects comparisons, pools them, and says what failed and where.

Free of pytest: a test calls the methods, then asks for `failures`. Nothing that cannot be compared is passed over:
a wrong shape, a missing row, a NaN or an empty certified set is a failing measurement of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pytest_adapt.golden.record import Record, RecordError, divergence_terms, live_record
from pytest_adapt.models.recall import Recall
from pytest_adapt.models.walks import Walk
from pytest_adapt.perf.timing import Round
from pytest_adapt.sites import layer_of, order_key
from pytest_adapt.target.protocol import Request, Response
from pytest_adapt.verdict import service
from pytest_adapt.verdict.budget import Comparison, Rows, ulp
from pytest_adapt.verdict.discrete import near_tie, row_error
from pytest_adapt.verdict.gates import Evidence
from pytest_adapt.verdict.identity import compare_bits
from pytest_adapt.verdict.localise import compare_sites, known_site, with_ranks
from pytest_adapt.verdict.matches import Matches, judge_matches, margin_below
from pytest_adapt.verdict.pooling import (
    cosine_gap,
    describe,
    judge_assumption,
    judge_pooled,
    quadratic_rows,
    rows_of,
)
from pytest_adapt.verdict.result import Divergence, Figure, Flips, Measurement, Status
from pytest_adapt.verdict.sampling import Draws, Plan
from pytest_adapt.verdict.views import (
    Problem,
    View,
    both_show,
    common_rows,
    difference,
    follow,
    reference_view,
    view,
)

__all__ = ["Judge"]

_SHOWN_LINES = 12


class Judge:
    """Comparisons of one item at one precision ("fp32", "bf16" or "fp16").

    ``rounds`` and ``router`` are what the target says of itself (`Info.rounds`, `Info.router`). ``evidence`` is what
    earlier attempts of the same item sampled.
    """

    def __init__(
        self, precision: str, *, rounds: str = "eager", router: str = "fp32", evidence: Evidence | None = None
    ) -> None:
        self.precision = precision
        self.evidence = Evidence() if evidence is None else evidence
        self.attempt = self.evidence.attempts
        """0, or how often the item ran before: samples are to be drawn anew."""
        self.rounds = rounds
        self.router = router
        self.divergence: Divergence | None = None
        self.observables: set[str] = set()
        self.figures: list[Figure] = []
        """What was timed; no verdict follows from it."""
        self._done: list[Measurement] = []
        self._pooled: dict[tuple[str, str], Comparison] = {}
        self._matches: dict[tuple[str, str], Matches] = {}
        self._certified = [0, 0]
        self._choices = [0, 0, 0]
        self._scores: dict[tuple[str, str], list[np.ndarray]] = {}

    # What a test calls -------------------------------------------------------------------------------------------

    def prompt_tokens(self, prompt: str, response: Response, tokens: Sequence[int]) -> None:
        """The target must have counted the prompt as it was sent; otherwise nothing else means anything."""
        if self._refused(prompt, response):
            return
        ok = response.prompt_tokens == len(tokens)
        detail = f"target counted {response.prompt_tokens} prompt tokens, {len(tokens)} were sent"
        self._add(
            "prompt_tokens", float(abs(response.prompt_tokens - len(tokens))), 0.0, ok, prompt=prompt, detail=detail
        )

    def against_record(self, prompt: str, response: Response, record: Record, pool: str = "") -> None:
        """Every numeric observable of the response against the reference, at certified positions.

        Log-probabilities (rms and largest), cosine, divergence and the most probable token; each pooled over the
        prompts of the item and held against its own budget when `failures` is called. ``pool`` keeps rows of another
        kind apart: it stands before the names of the metrics.
        """
        if self._refused(prompt, response):
            return
        try:
            emulation = record.emulation(self.precision)
        except RecordError as problem:
            self._broken(prompt, Problem("record", str(problem)))
            return
        self._replicas(prompt, response)
        rows = np.flatnonzero(record.positions >= response.first_row)
        certified = emulation.certified[rows]
        self._count(certified)
        shown = [("logits", response.logits), ("topk", response.topk)]
        numeric = [name for name, value in shown if value is not None]
        try:
            if not numeric and response.scores is None:
                raise Problem("shown", "the response shows neither logits, scores nor top-k log-probabilities")
            for name in numeric:
                self._against_view(prompt, view(response, name, record, rows), record, rows, certified, pool)
            if response.scores is not None:
                self._against_scores(prompt, follow(response, record, rows), record, rows, certified, pool)
        except Problem as problem:
            self._broken(prompt, problem)

    def against_sites(
        self,
        prompt: str,
        response: Response,
        oracle: Any,
        tokens: Sequence[int],
        expected: tuple[str, ...] = (),
    ) -> None:
        """Every shown site against the oracle that follows the target's own values (`localise`).

        ``tokens`` are all that were fed: the prompt and all generated tokens but the last. ``expected``: patterns of
        sites that must have been shown. Sets `divergence` to the first failing site in dataflow order.
        """
        if self._refused(prompt, response):
            return
        if oracle is None:
            self._broken(prompt, Problem("oracle", "no oracle for this model; white-box comparison needs one"))
            return
        taps = dict(response.taps)
        if response.logits is not None:
            taps.setdefault("logits", response.logits)
        if not response.taps:
            self._broken(prompt, Problem("shown", "the response shows no site"))
            return
        if response.first_row:
            reason = f"rows start at token {response.first_row}; sites are followed from token 0: ask for every row"
            self._broken(prompt, Problem("rows", reason, response.first_row))
            return
        unknown = [name for name in taps if not known_site(name)]
        if unknown:
            self._broken(
                prompt, Problem("shape", f"unknown site {unknown[0]!r}; sites are listed in pytest_adapt.sites")
            )
            return
        self.observables.add("taps")
        self._replicas(prompt, response)
        report = compare_sites(
            prompt,
            taps,
            oracle,
            tuple(tokens),
            self.precision,
            self.rounds,
            expected,
            response.prompt_tokens,
            self.router,
        )
        self._done += report.measurements
        counts = (report.choices, report.certified, report.uncertified)
        self._choices = [seen + new for seen, new in zip(self._choices, counts, strict=True)]
        self._found(with_ranks(report.divergence, response))

    def recalled(self, prompt: str, response: Response, recall: Recall, record: Record) -> None:
        """An answer to a recall prompt, or to a beginning of it that ends with a question: numbers against the closed
        form, and which needles are lost."""
        if not self._refused(prompt, response):
            service.recalled(self, prompt, response, recall, record)

    def generated(self, prompt: str, response: Response, reference: Any, tokens: Sequence[int]) -> None:
        """Each greedy token must be the reference's first choice, given what the target wrote before it.

        ``reference`` is the Record of ``tokens`` + generated tokens but the last, or an Oracle. A different token needs
        a margin within the error of that row. Rows after a possible routing flip decide nothing.
        """
        if self._refused(prompt, response):
            return
        if not response.tokens:
            self._broken(prompt, Problem("shown", "the response has no generated token ids"))
            return
        fed = (*tokens, *response.tokens[:-1])
        try:
            record = reference if isinstance(reference, Record) else live_record(reference, prompt, fed, self.precision)
            emulation = record.emulation(self.precision)
        except RecordError as problem:
            self._broken(prompt, Problem("record", str(problem)))
            return
        if tuple(record.tokens.tolist()) != tuple(fed):
            reason = f"reference has {len(record.tokens)} tokens, not the {len(fed)} that were fed; record them all"
            self._broken(prompt, Problem("record", reason))
            return
        self.observables.add("text")
        at = {int(position): row for row, position in enumerate(record.positions)}
        error = row_error(emulation.largest)
        chosen = [
            (at[len(tokens) - 1 + i], token) for i, token in enumerate(response.tokens) if len(tokens) - 1 + i in at
        ]
        rows = np.array([row for row, _ in chosen], np.int64)
        matches = self._matches.setdefault(("token_match", "text"), Matches())
        picked = np.array([token for _, token in chosen], np.int64)
        matches.add(prompt, record, rows, picked, emulation.certified[rows], error[rows])
        self._count(emulation.certified[rows])

    def told(self, prompt: str, response: Response, readings: Sequence[str]) -> None:
        """Text shown beside generated token ids must be one of the tokenizer's ``readings`` of them.

        Bytes of a character that is not complete, and space around the text, are shown in many ways: they do not count.
        """
        if self._refused(prompt, response) or response.text is None or not response.tokens or not readings:
            return
        text, *wanted = (" ".join(one.replace("\ufffd", " ").split()) for one in (response.text, *readings))
        detail = f"the text is {text[:40]!r}, the generated ids read {wanted[0][:40]!r}"
        self._add("told", float(text not in wanted), 0.0, text in wanted, "text", prompt, compared=1, detail=detail)

    def agree(self, what: str, first: Response, second: Response, record: Record | None) -> None:
        """Two answers of one target that must be the same but for rounding, at certified positions.

        Each has its own error, so their difference is held against sqrt(2) times the emulation's. Rows are matched
        by token index. Without a record only the same bits agree.
        """
        if self._refused(what, first) or self._refused(what, second):
            return
        if record is None:
            self.identical(what, first, second)
            return
        try:
            emulation = record.emulation(self.precision)
        except RecordError as problem:
            self._broken(what, Problem("record", str(problem)))
            return
        common = common_rows(record, first, second)
        certified = emulation.certified[common]
        rows = common[certified]
        if both_show(first, second):
            self._count(certified)
        compared = False
        try:
            for name in both_show(first, second):
                compared = True
                self.observables.add(name)
                self._agree_numeric(what, name, first, second, record, rows)
            if first.tokens and second.tokens:
                compared = True
                self.observables.add("text")
                self._agree_tokens(what, first, second, record)
        except Problem as problem:
            self._broken(what, problem)
            return
        if not compared:
            self._broken(what, Problem("shown", "the two answers show nothing in common"))

    def identical(self, what: str, first: Response, second: Response) -> None:
        """Bit equality of everything that both show: arrays, tokens, text, stop reason."""
        if self._refused(what, first) or self._refused(what, second):
            return
        found = compare_bits(what, first, second)
        self.observables |= found.observables
        if not found.observables:
            self._broken(what, Problem("shown", "the two answers show nothing"))
            return
        self._found(with_ranks(found.divergence, first))
        ok, kind = not found.kind, found.kind
        self._add("identical", float(not ok), 0.0, ok, kind, what, found.position, found.compared, found.detail)

    def walked(self, response: Response, walk: Walk, others: Sequence[Walk], count: int, may_end: bool = False) -> None:
        """An answer of at most ``count`` tokens must be the request's own walk as far as it goes, and to its end unless
        it was asked to be aborted (``may_end``) and says so; a step out of another's is named as such."""
        if not self._refused(walk.name, response):
            service.walked(self, response, walk, others, count, may_end)

    def returned(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Of a target that counts them: no request runs or waits, and every block of its cache is free again."""
        service.returned(self, before, after)

    def growth(
        self,
        metric: str,
        lengths: Sequence[int],
        values: Sequence[float],
        most: int,
        least: Sequence[float],
        again: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        """A cost that may grow with the length as n^``most``: its fitted exponent must be nearer to that than to the
        next higher one. What an allocator keeps hides small growth, and noise looks like it, so it is judged where it
        exceeds ``least`` (one value a length) at the two largest lengths. With ``again``, which measures all lengths
        once more, such growth is measured thrice: the smallest values count, and must exceed by more than those of
        one length differ."""
        service.growth(self, metric, lengths, values, most, least, again)

    def timed(self, label: str, rounds: Sequence[Round], directory: Path | None = None) -> None:
        """Keep what the rounds of a load came to as figures. With the checkpoint's ``directory``, and where the
        machine's peaks are known, also the shares of them that were used."""
        self.figures += service.timed(label, rounds, self.precision, directory)

    def promise(
        self,
        metric: str,
        ok: bool,
        detail: str = "",
        *,
        value: float | None = None,
        budget: float = 0.0,
        prompt: str = "",
        position: int | None = None,
        observable: str = "",
        compared: int = 1,
        settled: bool = True,
    ) -> None:
        """A property that holds or does not, or (not ``settled``) cannot be told; ``value`` and ``budget`` where it has
        numbers."""
        found = (0.0 if ok else 1.0) if value is None else value
        self._add(metric, found, budget, ok, observable, prompt, position, compared, detail, settled)
        if observable:
            self.observables.add(observable)

    def sample(self, prompt: str, response: Response, record: Record, oracle: Any = None) -> None:
        """One prompt's answer as a sample for the gates (`gates`): likelihood, divergence and most probable tokens.

        Nothing is judged by itself; many short prompts are. With the ``oracle`` positions where routing may flip count
        too, for the tokens: its own run in this precision is the noise floor there.
        """
        if self._refused(prompt, response):
            return
        try:
            used = self.evidence.sample(prompt, response, record, self.precision, oracle)
            if not used:
                raise Problem("shown", "the response shows neither scores, predictions nor tokens")
            self.observables |= used
        except RecordError as problem:
            self._broken(prompt, Problem("record", str(problem)))
        except Problem as problem:
            self._broken(prompt, problem)

    def answered(
        self, prompt: str, wrong: Sequence[bool], floor: Sequence[bool] = (), observable: str = "text"
    ) -> None:
        """A task of several questions for the gate on answers: which ones the target got wrong, and the reference
        (none where its answers have a closed form)."""
        self.observables.add(observable)
        self.evidence.answered(prompt, wrong, floor or [False] * len(wrong), observable)

    def drawn(self, planned: Plan, label: str, requests: Sequence[Request], answers: Mapping[str, Response]) -> None:
        """Tokens that the target drew at a temperature above 0 (`sampling`); looks of one label add up."""
        self.observables.add("text")
        known = self.evidence.draws.setdefault(label, Draws(requests[0].sampling, label))
        known.add(planned, requests, answers)

    @property
    def settled(self) -> bool:
        """Whether more samples would change nothing: every gate has passed, or one has failed."""
        found = self.evidence.measurements()
        return all(one.ok for one in found) or any(not one.ok and one.settled for one in found)

    # What a report reads -----------------------------------------------------------------------------------------

    @property
    def measurements(self) -> list[Measurement]:
        """Everything measured so far; pooled comparisons are computed from the prompts seen until now."""
        pooled = [one for key, comparison in self._pooled.items() for one in judge_pooled(key, comparison)]
        pooled += [judge_assumption(self._pooled[key], scores) for key, scores in self._scores.items()]
        matches = [judge_matches(key, found) for key, found in self._matches.items() if found.compared]
        return [*pooled, *matches, *self.evidence.measurements(), *self._nothing_certain(), *self._done]

    @property
    def flips(self) -> list[Flips]:
        """Discrete choices compared, and those that differ with and without a certificate."""
        matches = list(self._matches.values())
        tokens = [sum(values) for values in zip(*((m.compared, m.ties, len(m.wrong)) for m in matches), strict=True)]
        counts = {"router": self._choices, "token": tokens or [0, 0, 0]}
        return [Flips(kind, *found) for kind, found in counts.items() if found[0]]

    def failures(self) -> list[Measurement]:
        """Measurements over their budget: pooled ones first, then the others in the order in which they were made."""
        return [measurement for measurement in self.measurements if not measurement.ok]

    @property
    def undecided(self) -> bool:
        """Whether something failed, and only because no position was certain enough to be compared."""
        return self.standing() is Status.UNKNOWN

    @property
    def inconclusive(self) -> bool:
        """Whether nothing failed, but a gate has too few samples to pass."""
        return self.standing() is Status.INCONCLUSIVE

    def standing(self) -> Status:
        """PASS, FAIL, UNKNOWN (`undecided`) or INCONCLUSIVE."""
        failures = self.failures()
        if not failures:
            return Status.PASS
        if all(one.metric == "certified" for one in failures):
            return Status.UNKNOWN
        return Status.FAIL if any(one.settled for one in failures) else Status.INCONCLUSIVE

    def message(self) -> str:
        """What failed, one line each, then the first divergence; at most one screen."""
        failures = self.failures()
        # One line for each kind of failure: the same operation is off in many layers and prompts.
        kinds: dict[tuple[str, str, str], list[Measurement]] = {}
        for measurement in failures:
            key = measurement.metric, measurement.observable, layer_of(measurement.site)[1] if measurement.site else ""
            kinds.setdefault(key, []).append(measurement)
        lines = [
            describe(found[0]) + (f"; and {len(found) - 1} more like it" if len(found) > 1 else "")
            for found in list(kinds.values())[:_SHOWN_LINES]
        ]
        if len(kinds) > _SHOWN_LINES:
            lines.append(f"and {len(kinds) - _SHOWN_LINES} more kinds over budget")
        if self.divergence is not None:
            lines.append(f"first divergence ({self.divergence.prompt}): {self.divergence}")
        return "\n".join(lines)

    # How -----------------------------------------------------------------------------------------------------------

    def _against_view(
        self, prompt: str, shown: View, record: Record, rows: np.ndarray, certified: np.ndarray, pool: str
    ) -> None:
        self.observables.add(shown.observable)
        emulation = record.emulation(self.precision)
        reference = reference_view(record, rows)
        error = difference(shown, reference, two_sided=False)
        part = rows[certified]
        floor = self._floor(record, part)
        if shown.observable == "logits" and record.expert_ids and len(part):
            scores = np.maximum.accumulate(emulation.score)[part]
            self._scores.setdefault((f"{pool}logprob", "logits"), []).append(scores)
        self._pool(
            f"{pool}logprob",
            shown.observable,
            rows_of(
                prompt,
                record,
                part,
                error[certified],
                emulation.rms[part],
                emulation.largest[part],
                floor,
                record.topk_logprobs[part],
            ),
        )
        listed = np.nan_to_num(error[certified][:, :-1])
        divergence = np.sum(np.exp(record.topk_logprobs[part]) * divergence_terms(listed), axis=1)
        self._pool(f"{pool}kl", shown.observable, quadratic_rows(prompt, record, part, divergence, emulation.kl[part]))
        if shown.projections is not None and reference.projections is not None:
            gap = cosine_gap(shown, reference)[certified]
            self._pool(
                f"{pool}cosine", shown.observable, quadratic_rows(prompt, record, part, gap, emulation.gap[part])
            )
        matches = self._matches.setdefault((f"{pool}token_match", shown.observable), Matches())
        bound = row_error(emulation.largest)[rows]
        matches.add(prompt, record, rows, shown.best, certified, bound)

    def _against_scores(
        self, prompt: str, found: np.ndarray, record: Record, rows: np.ndarray, certified: np.ndarray, pool: str
    ) -> None:
        self.observables.add("score")
        emulation = record.emulation(self.precision)
        keep = certified & np.isfinite(record.next_logprob[rows])
        part = rows[keep]
        error = (found[keep] - record.next_logprob[part])[:, None]
        yard = emulation.follow[part]
        floor = self._floor(record, part, record.next_logprob[part][:, None])
        values = record.next_logprob[part][:, None]
        self._pool(f"{pool}logprob", "score", rows_of(prompt, record, part, error, yard, yard, floor, values))

    def _agree_numeric(
        self, what: str, name: str, first: Response, second: Response, record: Record, rows: np.ndarray
    ) -> None:
        emulation = record.emulation(self.precision)
        if not len(rows):
            return
        if name == "score":
            keep = rows[np.isfinite(record.next_logprob[rows])]
            if not len(keep):
                return
            error = (follow(first, record, keep) - follow(second, record, keep))[:, None]
            values, yard, largest = record.next_logprob[keep][:, None], emulation.follow[keep], emulation.follow[keep]
        else:
            keep = rows
            error = difference(view(first, name, record, keep), view(second, name, record, keep), two_sided=True)
            values, yard, largest = record.topk_logprobs[keep], emulation.rms[keep], emulation.largest[keep]
        comparison = Comparison(widen=math.sqrt(2.0))
        floor = self._floor(record, keep, values)
        comparison.add(rows_of(what, record, keep, error, yard, largest, floor, values))
        self._done += judge_pooled(("agree", name), comparison)

    def _agree_tokens(self, what: str, first: Response, second: Response, record: Record) -> None:
        emulation = record.emulation(self.precision)
        pairs = list(zip(first.tokens, second.tokens, strict=False))
        different = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if different is None:
            self._add("agree.tokens", 0.0, 0.0, True, "text", what, compared=len(pairs))
            return
        position = first.prompt_tokens - 1 + different
        row = np.flatnonzero(record.positions == position)
        detail = f"generated token {different}: {pairs[different][0]} and {pairs[different][1]}"
        if len(row) and not emulation.certified[row[0]]:
            detail += ", after a possible routing flip"
            self._add("agree.tokens", 0.0, 0.0, True, "text", what, position, max(different, 1), detail)
            return
        tied = False
        if len(row):
            bound = row_error(emulation.largest)[row[0]] * math.sqrt(2.0)
            margins = [margin_below(record, int(row[0]), token) for token in pairs[different]]
            tied = bool(near_tie(max(margins), bound))
            detail += f", {max(margins):.3g} nats below the best, where a healthy target errs by {bound:.3g}"
        self._add("agree.tokens", 0.0 if tied else 1.0, 0.0, tied, "text", what, position, different + 1, detail)

    def _floor(self, record: Record, rows: np.ndarray, logprobs: np.ndarray | None = None) -> np.ndarray:
        """One ulp [R, n] of the logits' format at the magnitude of the logits behind log-probabilities."""
        values = record.topk_logprobs[rows] if logprobs is None else logprobs
        return ulp(values + record.lse[rows][:, None], self.precision)

    def _pool(self, metric: str, observable: str, rows: Rows) -> None:
        self._pooled.setdefault((metric, observable), Comparison()).add(rows)

    def _found(self, divergence: Divergence | None) -> None:
        if divergence is None:
            return
        mine = self.divergence
        if mine is None or order_key(divergence.site) < order_key(mine.site):
            self.divergence = divergence

    def _refused(self, prompt: str, response: Response) -> bool:
        if response.error is None:
            return False
        self._broken(prompt, Problem("response", f"the target refused the request: {response.error}"))
        return True

    def _replicas(self, prompt: str, response: Response) -> None:
        """Ranks that hold copies of the same numbers must hold the same bits."""
        if response.drift:
            more = f"; and {len(response.drift) - 1} more" if len(response.drift) > 1 else ""
            self._add(
                "replicas", float(len(response.drift)), 0.0, False, prompt=prompt, detail=response.drift[0] + more
            )

    def _broken(self, prompt: str, problem: Problem) -> None:
        self._add(problem.metric, math.inf, 0.0, False, prompt=prompt, position=problem.position, detail=problem.reason)

    def _count(self, certified: np.ndarray) -> None:
        self._certified[0] += int(certified.sum())
        self._certified[1] += len(certified)

    def _nothing_certain(self) -> list[Measurement]:
        certain, seen = self._certified
        if not seen or certain:
            return []
        detail = f"none of {seen} positions is certified at {self.precision}: a routing flip is possible from the start"
        return [Measurement("certified", 0.0, 1.0, False, detail=detail)]

    def _add(
        self,
        metric: str,
        value: float,
        budget: float,
        ok: bool,
        observable: str = "",
        prompt: str = "",
        position: int | None = None,
        compared: int = 0,
        detail: str = "",
        settled: bool = True,
    ) -> None:
        made = Measurement(metric, value, budget, ok, observable, prompt, position, compared=compared, detail=detail)
        self._done.append(made if settled else replace(made, settled=False))
