"""White-box comparison: every shown site against the oracle, each operation charged with its own error only.

The oracle runs with the target's values forced at every shown site. What it computes there from the target's
own inputs, minus what the target has, is the error of one operation (or of the few between two shown sites); the
same run under the precision's emulation gives the yardstick of just that operation. Expert ids are followed, and
each differing choice needs a certificate. The first failing site in dataflow order is the divergence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_adapt.sites import CHOICES, UNRECORDED, layer_of, matches, order_key, site
from pytest_adapt.verdict import looks
from pytest_adapt.verdict.budget import SITE_QUANTILE, Comparison, Rows, ulp
from pytest_adapt.verdict.discrete import Flip, judge_choices, near_tie, row_error, shape_problem
from pytest_adapt.verdict.result import Divergence, Measurement

if TYPE_CHECKING:
    from pytest_adapt.target.protocol import Response

__all__ = ["SiteReport", "SiteView", "compare_sites", "error_scale", "farthest", "known_site", "widening", "with_ranks"]

OUTLIER = 2.0
"""A value of more than so many rms of its row stands out."""
_IDS = "moe.router.ids"
_LOGITS = "moe.router.logits"
_SCORES = "moe.router.scores"
_EXPERT_SITES = "moe.experts."
_SAME = 1e-9
"""Part of a row's largest value by which two float64 runs of the same numbers differ at most: the order of sums."""


@dataclass
class SiteReport:
    """Outcome of one prompt: measurements in dataflow order, and the first divergence."""

    measurements: list[Measurement] = field(default_factory=list)
    divergence: Divergence | None = None
    compared: int = 0
    """Sites compared."""
    choices: int = 0
    """Choices compared: one a token and expert layer."""
    certified: int = 0
    """Choices that differ with a certificate."""
    uncertified: int = 0
    """Choices that differ without one."""

    def fail(self, measurement: Measurement, divergence: Divergence) -> None:
        self.measurements.append(measurement)
        if self.divergence is None or order_key(divergence.site) < order_key(self.divergence.site):
            self.divergence = divergence


def compare_sites(
    prompt: str,
    taps: Mapping[str, np.ndarray],
    oracle: Any,
    tokens: Sequence[int],
    precision: str,
    rounds: str = "eager",
    expected: tuple[str, ...] = (),
    prompt_tokens: int | None = None,
    router: str = "fp32",
) -> SiteReport:
    """Compare shown sites (full name -> [T, ...]) of one sequence of T tokens.

    ``expected`` are patterns of sites that must have been shown wherever the model has them. ``rounds`` is
    ``fused`` for a target whose shown values are rounded copies of what it goes on with: then the input of an
    operation is off by one rounding too (`widening`). ``router`` is `Info.router`: the emulation keeps the router in
    float32, so that no wrong choice is absorbed, unless the target says that it holds the logits as eager code does
    (choices are judged given the logits, where they are shown).
    """
    from pytest_adapt.oracle import Rounding
    from pytest_adapt.oracle.routing import score_forms

    report = SiteReport()
    length = len(tokens) if prompt_tokens is None else prompt_tokens
    shown = {
        name: np.asarray(taps[name]) for name in sorted(taps, key=order_key) if layer_of(name)[1] not in UNRECORDED
    }
    # One token is enough to know which sites there are and their shapes.
    first = oracle.run(tokens[:1], record=("*",)).sites
    shapes = {name: (len(tokens), *value.shape[1:]) for name, value in first.items()}
    _report_absent(report, prompt, shown, shapes, expected)
    shown = _usable(report, prompt, shown, shapes, oracle, length)
    if not shown:
        return report
    floats = {name: value for name, value in shown.items() if layer_of(name)[1] not in CHOICES}
    forced = {**floats, **{name: value for name, value in shown.items() if name not in floats}}
    architecture = oracle.spec.architecture
    rounding = Rounding.of(precision)
    if router == "eager":
        rounding = rounding.with_eager_router(architecture)
    exact = oracle.run(tokens, forced=forced, sized=True)
    # Where nobody shows which experts were chosen, the emulation goes on with those of the exact run.
    hidden = {site(layer, _IDS): ids for layer, ids in exact.ids.items() if site(layer, _IDS) not in shown}
    emulations = oracle.emulations(tokens, rounding, {**forced, **hidden})
    emulated = emulations[0]
    _judge_choices(report, prompt, shown, exact, emulated, length)
    unsure = _unsure(oracle, tokens, forced, hidden, exact, emulated)
    worst: dict[str, Measurement] = {}
    views: dict[str, SiteView] = {}
    for name, value in floats.items():
        own = np.asarray(exact.own[name], np.float64)
        form = rounding.format_of(name, architecture)
        ways = [trace.own[name] for trace in emulations]
        layer, local = layer_of(name)
        if local == _SCORES and form == "fp32" and (logits := shown.get(site(layer or 0, _LOGITS))) is not None:
            ways += score_forms(oracle.spec.mixture.router, logits)
        other = farthest(own, ways)
        ids = shown.get(site(layer or 0, _IDS)) if _EXPERT_SITES in name else None
        kept = np.flatnonzero(~unsure[name]) if name in unsure else np.arange(len(tokens))
        if not len(kept):
            continue  # said below
        terms = exact.terms.get(name)
        views[name] = view = SiteView(
            prompt,
            name,
            np.asarray(value, np.float64)[kept],
            own[kept],
            other[kept],
            form,
            ids,
            length,
            None if terms is None else terms[kept],
            kept,
        )
        for measurement, divergence in view.judge(widening(name, precision, rounds)):
            if divergence is not None:
                if name.endswith(_LOGITS) and router != "eager" and _on_grid(value, precision):
                    hint = f"; all are numbers of {precision}: an engine that holds them so says Info.router 'eager'"
                    divergence = replace(divergence, note=divergence.note + hint)
                report.fail(measurement, divergence)
            if measurement.metric not in worst or measurement.use > worst[measurement.metric].use:
                worst[measurement.metric] = measurement
    report.compared = len(shown)
    if report.divergence is not None and report.divergence.site in views:
        words = _described(report, views, shown, exact.own, oracle.spec)
        report.divergence = replace(report.divergence, looks=words)
    if unsure:
        report.measurements.append(_left_out(prompt, unsure))
    # One line a statistic for what passed: the site that used most of its budget.
    report.measurements += [measurement for measurement in worst.values() if measurement.ok]
    return report


@dataclass
class SiteView:
    """One site of one prompt: the target's value, the oracle's, and the emulation's."""

    prompt: str
    name: str
    value: np.ndarray
    own: np.ndarray
    emulated: np.ndarray
    form: str
    ids: np.ndarray | None
    prompt_tokens: int
    terms: np.ndarray | None = None
    """Sums of the magnitudes of the terms that each value is made of, where it is one matrix product."""
    tokens: np.ndarray | None = None
    """Positions of the first axis; None for all from 0 on."""
    over: np.ndarray | None = field(default=None, init=False)
    """bool [rows]: beyond the budget; where none is, those whose rms is more than all rows may have. After `judge`."""
    allowed: np.ndarray | None = field(default=None, init=False)
    """float64 [rows, n]: what a healthy target errs at most in each value; after `judge`."""

    def judge(self, widen: float) -> list[tuple[Measurement, Divergence | None]]:
        """Both statistics, with a divergence where one is over its budget.

        Errors are taken relative to what they can be expected to be proportional to (`error_scale`).
        """
        width = self.own.shape[-1]
        own, value, emulated = (array.reshape(-1, width) for array in (self.own, self.value, self.emulated))
        scale = error_scale(own, None if self.terms is None else self.terms.reshape(-1, width))
        per_token = len(own) // len(self.own)
        positions = np.repeat(np.arange(len(self.own)) if self.tokens is None else self.tokens, per_token)
        rows = Rows.of_elements(
            self.prompt, positions, (value - own) / scale, (emulated - own) / scale, ulp(own, self.form) / scale
        )
        comparison = Comparison(widen, SITE_QUANTILE, [rows])
        rms, rms_budget = comparison.rms()
        largest, largest_budget, _, _ = comparison.largest()
        budgets = comparison.row_budgets()[0]
        over = rows.largest > budgets
        row = int(np.argmax(over)) if over.any() else int(np.argmax(rows.square))
        element = int(np.argmax(np.abs(value[row] - own[row]) / scale[row]))
        self.over = over if over.any() else rows.square > rms_budget**2
        self.allowed = budgets[:, None] * scale
        results: list[tuple[Measurement, Divergence | None]] = []
        for metric, found, limit in (("site.rms", rms, rms_budget), ("site.max", largest, largest_budget)):
            ok = found <= limit
            measurement = Measurement(
                metric=metric,
                value=found,
                budget=limit,
                ok=ok,
                observable="taps",
                prompt=self.prompt,
                position=int(positions[row]),
                site=self.name,
                compared=own.size,
                detail="relative to the row",
            )
            divergence = None if ok else self._divergence(row, per_token, element, found, limit, metric)
            results.append((measurement, divergence))
        return results

    def _divergence(
        self, row: int, per_token: int, element: int, found: float, limit: float, metric: str
    ) -> Divergence:
        place, slot = divmod(row, per_token)
        position = place if self.tokens is None else int(self.tokens[place])
        width = self.own.shape[-1]
        got, expected = (array.reshape(-1, width)[row, element] for array in (self.value, self.own))
        index = [element] if self.own.ndim == 2 else [slot, element]
        kind = "rms of all rows, each" if metric == "site.rms" else "largest error,"
        return Divergence(
            site=self.name,
            layer=layer_of(self.name)[0],
            position=position,
            got=f"{got:.6g}",
            expected=f"{expected:.6g}",
            error=found,
            budget=limit,
            prompt=self.prompt,
            step=_step(position, self.prompt_tokens),
            expert=int(self.ids[position, slot]) if self.ids is not None else None,
            element=tuple(index),
            note=f"element {index}; {kind} relative to the row",
        )

    def row_of(self, position: int, slot: int) -> int:
        """Index of the row of one slot (head, expert) of a position."""
        place = position if self.tokens is None else int(np.searchsorted(self.tokens, position))
        return place * math.prod(self.own.shape[1:-1]) + slot

    def describe(self, position: int, slot: int, others: Iterable[tuple[str, np.ndarray]]) -> str:
        """What one row looks like beside what it should be, and which rows are off; after `judge`."""
        assert self.over is not None and self.allowed is not None
        width, row = self.own.shape[-1], self.row_of(position, slot)
        own, value = (array.reshape(-1, width) for array in (self.own, self.value))
        per_token = len(own) // len(self.own)
        positions = np.arange(len(self.own)) if self.tokens is None else self.tokens
        experts = None if self.ids is None else self.ids[positions]
        noun = "expert slot" if _EXPERT_SITES in self.name else "head"
        extent = looks.reach(self.over, positions, per_token, self.prompt_tokens, experts, noun)
        if (np.abs(value[row] - own[row]) > self.allowed[row]).any():
            like = looks.likeness(value[row], own[row], self.allowed[row], others, self.form)
        else:  # what no row shows alone, all rows may
            like = looks.together(value, own, self.allowed, self.form)
        return f"{like}; {extent}" if extent else like


def _described(
    report: SiteReport,
    views: Mapping[str, SiteView],
    shown: Mapping[str, np.ndarray],
    own: Mapping[str, np.ndarray],
    spec: Any,
) -> str:
    """What the first divergence looks like, in which layers the same operation is off, and the window it has."""
    found = report.divergence
    assert found is not None
    layer, local = layer_of(found.site)
    slot = found.element[0] if len(found.element) > 1 else 0
    words = views[found.site].describe(found.position, slot, _others(found, slot, shown, own))
    if layer is None:
        return words
    red = {one.site for one in report.measurements if not one.ok}
    judged = {name: at for name in views for at, kind in [layer_of(name)] if kind == local and at is not None}
    layers = looks.among([at for name, at in judged.items() if name in red], list(judged.values()))
    words += f", {layers}" if layers else ""
    window = spec.layers[layer].window
    return f"{words} (its window is {window} keys)" if window and local == "attn.context" else words


def _others(
    found: Divergence, slot: int, shown: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Rows that a target may have in place of the right one: what the operation was given, other positions, heads and
    layers. What comes after it was made of the wrong one, and is no explanation."""
    name, position = found.site, found.position
    layer, local = layer_of(name)
    right = np.asarray(own[name], np.float64)
    for other, value in shown.items():
        near, kind = layer_of(other)
        before = near == layer and order_key(other) < order_key(name)
        if before and value.shape == right.shape and kind not in CHOICES:
            yield f"{other} at this position", _row(value, position, slot)
    for at in range(len(right)):
        if at != position:
            yield f"position {at}", _row(right, at, slot)
    if right.ndim > 2 and not local.startswith(_EXPERT_SITES):
        for head in range(right.shape[1]):
            if head != slot:
                yield f"head {head}", _row(right, position, head)
    for other, value in own.items():
        if other != name and layer_of(other)[1] == local:
            yield other, _row(value, position, slot)


def _row(value: np.ndarray, position: int, slot: int) -> np.ndarray:
    """One row of a site [T, ..., n], float64 [n]."""
    at = np.asarray(value[position], np.float64)
    return at if at.ndim == 1 else at.reshape(-1, at.shape[-1])[slot]


def _on_grid(value: np.ndarray, precision: str) -> bool:
    """Whether a 16-bit precision holds every one of the numbers."""
    from pytest_adapt.oracle.rounding import FORMATS

    plain = np.asarray(value, np.float32)
    return precision != "fp32" and bool((FORMATS[precision](plain) == plain).all())


def _unsure(
    oracle: Any,
    tokens: Sequence[int],
    forced: Mapping[str, np.ndarray],
    hidden: Mapping[str, np.ndarray],
    exact: Any,
    emulated: Any,
) -> dict[str, np.ndarray]:
    """Site -> bool [T]: rows that a near-tie among experts which nobody shows may have changed; only sites with some.

    A target may choose otherwise there, and does not say so: what it then shows is right and is not what the oracle
    has. Which rows that reaches follows from the dataflow, so the oracle runs again with the next best expert in each
    such place, and what is the same with both choices can be compared.
    """
    from pytest_adapt.oracle.routing import choose

    others: dict[str, np.ndarray] = {}
    for name, ids in hidden.items():
        layer = layer_of(name)[0]
        selection = np.asarray(exact.selection[layer], np.float64)
        error = row_error(np.asarray(emulated.selection[layer], np.float64) - selection)
        rows = np.flatnonzero(near_tie(exact.margins[layer], error))
        if len(rows):
            without = selection[rows].copy()
            weakest = np.argmin(np.take_along_axis(without, ids[rows], axis=-1), axis=-1)
            without[np.arange(len(rows)), ids[rows, weakest]] = -np.inf
            others[name] = ids.copy()
            others[name][rows] = choose(oracle.spec.mixture.router, without).ids
    if not others:
        return {}
    second = oracle.run(tokens, forced={**forced, **hidden, **others})
    found = {}
    for name, own in exact.own.items():
        if layer_of(name)[1] in CHOICES:
            continue
        one, two = (np.asarray(value, np.float64).reshape(len(tokens), -1) for value in (own, second.own[name]))
        changed = np.abs(one - two).max(axis=1) > _SAME * np.abs(one).max(axis=1)
        if changed.any():
            found[name] = changed
    return found


def _left_out(prompt: str, unsure: Mapping[str, np.ndarray]) -> Measurement:
    """What could not be compared, in a line that takes no side."""
    rows, total = sum(int(one.sum()) for one in unsure.values()), sum(len(one) for one in unsure.values())
    most = max(unsure, key=lambda name: unsure[name].mean())
    detail = (
        f"{rows} of {total} rows of {len(unsure)} sites, most of {most}, follow a near-tie between experts, and were "
    )
    detail += f"left out: show {_IDS} to have them judged"
    return Measurement("site.unsure", float(rows), float(total), True, "taps", prompt, None, most, 0, detail)


def known_site(name: str) -> bool:
    """Whether the vocabulary has such a site."""
    try:
        order_key(name)
    except ValueError:
        return False
    return True


def with_ranks(divergence: Divergence | None, response: Response) -> Divergence | None:
    """The divergence with the ranks on which it came about, where the target has several and can tell."""
    if divergence is None or response.origin is None:
        return divergence
    try:
        ranks = tuple(
            response.origin(divergence.site, divergence.position, tuple(divergence.element), divergence.expert)
        )
    except Exception as error:  # the target's code; the divergence must not be lost with it
        ranks = (f"unknown ranks ({type(error).__name__}: {error})",)
    return replace(divergence, ranks=tuple(map(str, ranks)))


def farthest(own: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
    """float64, the shape of ``own``: of each element that of ``values`` which errs most."""
    found = np.asarray(values[0], np.float64)
    for value in values[1:]:
        found = np.where(np.abs(value - own) > np.abs(found - own), value, found)
    return found


def error_scale(own: np.ndarray, terms: np.ndarray | None) -> np.ndarray:
    """What errors of the values ``own`` [rows, n] are judged relative to; float64 [rows, n], positive.

    The rms of their row (one position, head or slot), otherwise a row of large values would hide a fault in a row of
    small ones. More for a value that stands out of its row, otherwise the rounding of one outlier (real models have
    some at the first position) would be the yardstick of all others. And more for a sum whose ``terms`` have larger
    magnitudes, for its row, than is usual at this site: where they cancel, its error is that of the terms and of the
    order in which an engine adds them (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    rms = np.sqrt(np.mean(own**2, axis=1, keepdims=True))
    scale = np.maximum(rms, np.abs(own) / OUTLIER)
    if terms is not None and (rms > 0).any():
        usual = float(np.median((terms / np.where(rms > 0, rms, np.inf))[rms[:, 0] > 0]))
        if usual > 0:
            scale = np.maximum(scale, terms / usual)
    found: np.ndarray = np.where(scale > 0, scale, 1.0)
    return found


def widening(name: str, precision: str, rounds: str) -> float:
    """By how much a yardstick grows for roundings that the eager emulation does not make.

    A fused target's operation has an input that is off by one rounding more, where it shows a rounded copy of what it
    goes on with (in float32 nothing is rounded to be shown). Attention passes through scores and weights that nobody
    shows, and engines form them in other ways than eager code (scaled before or after the product, in base 2, merged
    over chunks of keys): one rounding more there too. Independent errors add in square.
    """
    local = layer_of(name)[1]
    extra = (rounds == "fused" and precision != "fp32") + (local == "attn.context")
    return math.sqrt(1.0 + extra)


def _step(position: int, prompt_tokens: int) -> str:
    return "decode" if position >= prompt_tokens else "prefill"


def _report_absent(
    report: SiteReport,
    prompt: str,
    shown: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    expected: tuple[str, ...],
) -> None:
    """A site shown in one layer must be shown in every layer that has it; asked-for patterns likewise."""
    kinds = {layer_of(name)[1] for name in shown}
    wanted = [n for n in shapes if matches(n, expected) or (not expected and layer_of(n)[1] in kinds)]
    for name in sorted(set(wanted) - set(shown), key=order_key):
        report.fail(
            Measurement("site.shown", 0.0, 0.0, False, "taps", prompt, None, name, 0, "not shown by the target"),
            Divergence(name, 0, "nothing", f"shape {shapes[name]}", math.inf, 0.0, prompt, layer_of(name)[0]),
        )


def _usable(
    report: SiteReport,
    prompt: str,
    shown: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    oracle: Any,
    prompt_tokens: int,
) -> dict[str, np.ndarray]:
    """Sites that can be compared as numbers. Stops at the first meaningless one: what follows has no inputs."""
    usable: dict[str, np.ndarray] = {}
    for name, value in shown.items():
        layer, local = layer_of(name)
        problem: tuple[int, int | None, str] | None = None
        wanted = "distinct experts in ascending order" if local in CHOICES else "finite numbers"
        if name not in shapes:
            problem, wanted = (0, None, "a site that the model does not have"), "one of its sites"
        elif local in CHOICES:
            router = oracle.spec.mixture.router
            problem = shape_problem(value, shapes[name][0], router.chosen, router.experts)
        elif value.shape != shapes[name]:
            problem, wanted = (0, None, f"shape {value.shape}"), f"shape {shapes[name]}"
        elif not np.isfinite(value).all():
            row = int(np.argwhere(~np.isfinite(value))[0][0])
            count = int((~np.isfinite(value)).sum())
            problem = row, None, f"{count} of {value.size} values are not finite"
        if problem is None:
            usable[name] = value
            continue
        row, expert, reason = problem
        report.fail(
            Measurement("site.valid", math.inf, 0.0, False, "taps", prompt, row, name, value.size, reason),
            Divergence(
                site=name,
                layer=layer,
                position=row,
                got=reason,
                expected=wanted,
                error=math.inf,
                budget=0.0,
                prompt=prompt,
                step=_step(row, prompt_tokens),
                expert=expert,
            ),
        )
        break
    return usable


def _judge_choices(
    report: SiteReport,
    prompt: str,
    shown: Mapping[str, np.ndarray],
    exact: Any,
    emulated: Any,
    prompt_tokens: int,
) -> None:
    flips: dict[str, list[Flip]] = {}
    rows = 0
    for name, chosen in shown.items():
        layer, local = layer_of(name)
        if local not in CHOICES or layer is None:
            continue
        selection = np.asarray(exact.selection[layer], np.float64)
        error = row_error(np.asarray(emulated.selection[layer], np.float64) - selection)
        flips[name] = judge_choices(chosen, exact.own[name], selection, error, exact.replayed[layer])
        rows += len(chosen)
    if not flips:
        return
    illegal = [(name, flip) for name, found in flips.items() for flip in found if not flip.legal]
    report.choices, report.uncertified = rows, len(illegal)
    report.certified = sum(len(found) for found in flips.values()) - len(illegal)
    if not illegal:
        detail = f"{report.certified} of {rows} choices differ, each a near-tie"
        report.measurements.append(Measurement("site.choice", 0.0, 0.0, True, "taps", prompt, None, _IDS, rows, detail))
    for name in dict.fromkeys(name for name, _ in illegal):
        found = [flip for flip in flips[name] if not flip.legal]
        flip = found[0]
        report.fail(
            Measurement(
                "site.choice",
                float(len(found)),
                0.0,
                False,
                "taps",
                prompt,
                flip.row,
                name,
                len(shown[name]),
                f"{len(found)} illegal choices; {flip.reason}",
            ),
            Divergence(
                site=name,
                layer=layer_of(name)[0],
                position=flip.row,
                got=str(list(flip.chosen)),
                expected=str(list(flip.expected)),
                error=flip.margin,
                budget=flip.error,
                prompt=prompt,
                step=_step(flip.row, prompt_tokens),
                expert=flip.expert,
                note=flip.reason,
            ),
        )
