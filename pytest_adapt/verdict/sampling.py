"""Tokens drawn at a temperature above 0, against the distribution that the oracle knows: for targets that show text.

One token is drawn after each of a few certified prompts, many times with different seeds. Three questions are asked:
is a token there that the filters rule out (one is enough: no statistics), do target and reference draw from one
distribution (`statistics.permutation_test`, permuted within each prompt), and how far may the temperature be off.
Reference draws come from the oracle's exact distribution, with a counter-based generator, so that they never change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from pytest_adapt.golden.sketch import log_softmax
from pytest_adapt.target.protocol import Request, Response, Sampling
from pytest_adapt.verdict.budget import MAX_FACTOR, MEAN_FACTOR, RMS_FACTOR
from pytest_adapt.verdict.discrete import CANDIDATES, near_tie, row_error
from pytest_adapt.verdict.result import Measurement, Status
from pytest_adapt.verdict.statistics import ALPHA, POWER, RISK, permutation_test
from pytest_adapt.verdict.status import Verdict

__all__ = ["CONCERN", "LOOKS", "Draws", "Place", "Plan", "distribution", "drawable", "plan"]

CONCERN = 1.1
"""A pass shows that the temperature is off by less than this factor."""
LOOKS = 4
"""How often evidence is looked at, each look with as many draws again as all before it; alpha is shared among them."""
_PLACES = 8
_DRAWS = 128
"""Draws of each place at the first look."""
_REFERENCE = 8
"""Reference draws for each of the target's: the more, the less their own luck counts."""
_LONGEST = 24
_TEMPERATURES = (0.35, 0.5, 0.7, 1.4, 2.0)
"""Not 1, which an engine that ignores it would use."""
_TOP_K = (3, 4, 5, 6, 7, 8)
_TOP_P = (0.8, 0.85, 0.75, 0.9, 0.7, 0.65, 0.6, 0.55, 0.5)


@dataclass(frozen=True)
class Place:
    """A prompt at whose end the distribution is known: no routing flip is possible so far."""

    name: str
    tokens: tuple[int, ...]
    logits: np.ndarray
    """float64 [V], exact."""
    error: float
    """Bound of the emulation's error of a log-probability here, in nats."""
    rms: float
    kl: float

    def surprise(self, temperature: float) -> np.ndarray:
        """float64 [V]: minus the log-probability of every token before any filter."""
        found: np.ndarray = -log_softmax(self.logits[None] / temperature)[0][0]
        return found


@dataclass(frozen=True)
class Plan:
    """What is drawn: places, and the settings that are asked for. ``attempt`` numbers repeats of the whole item."""

    places: tuple[Place, ...]
    temperature: float
    top_k: int
    end: int
    attempt: int = 0
    top_p: float = _TOP_P[0]
    top_p_of_k: float = _TOP_P[0]
    """Of what ``top_k`` has left."""

    @property
    def plain(self) -> Sampling:
        """The temperature alone."""
        return Sampling(self.temperature)

    @property
    def filtered(self) -> Mapping[str, Sampling]:
        """Filters by name, each alone and one after the other. At temperature 1, which engines apply first or last."""
        return {
            "top_k": Sampling(1.0, top_k=self.top_k),
            "top_p": Sampling(1.0, top_p=self.top_p),
            "top_k and top_p": Sampling(1.0, top_k=self.top_k, top_p=self.top_p_of_k),
        }

    def requests(self, setting: Sampling, look: int = 0, draws: int = _DRAWS) -> list[Request]:
        """The draws of one look, places in turn: ``draws`` of each of eight places, of fewer ones more each; at a later
        look as many as all before it."""
        draws = draws * _PLACES // len(self.places)
        first = draws << (look - 1) if look else 0
        asked = []
        for number in range(first, draws << look):
            for index, place in enumerate(self.places):
                seed = ((self.attempt * _PLACES + index) << 16) + number + 1
                drawn = Sampling(setting.temperature, setting.top_k, setting.top_p, seed)
                name = f"{place.name}#{self.attempt}.{number}"
                # The end token is a token like any other; a server that stops at it has drawn it.
                last = len(place.tokens)
                asked.append(Request(name, place.tokens, 1, sampling=drawn, first_row=last, ignore_eos=False))
        return asked

    def differing(
        self, requests: Iterable[Request], one: Mapping[str, Response], two: Mapping[str, Response]
    ) -> tuple[int, int]:
        """(draws of one seed that came out differently in two runs, how many of them rounding may explain).

        Two runs need not round alike (batches of other sizes), and a random number near the border between two tokens
        then falls on either side. Of a sampler that walks through the tokens from the best one, the probability is the
        sum over borders of how far each moves. Errors are taken as `RMS_FACTOR` times `EmulationErrors.rms`,
        independent from token to token and run to run. More than the quantile `ALPHA` of such a number is no rounding.
        """
        by_tokens = {place.tokens: place for place in self.places}
        asked = list(requests)
        found = sum(one[request.id].tokens != two[request.id].tokens for request in asked)
        rate = sum(_border_risk(by_tokens[request.prompt], request.sampling) for request in asked)
        allowed = 0
        while _more_than(allowed, rate) > ALPHA:
            allowed += 1
        return found, min(allowed, len(asked) - 1)


def _border_risk(place: Place, setting: Sampling) -> float:
    p = -np.sort(-distribution(place, setting))
    below, squares = np.cumsum(p), np.cumsum(p**2)
    variance = (1 - below) ** 2 * squares + below**2 * np.maximum(squares[-1] - squares, 0.0)
    error = math.sqrt(2) * RMS_FACTOR * place.rms / setting.temperature
    return min(1.0, error * math.sqrt(2 / math.pi) * float(np.sum(np.sqrt(variance))))


def _more_than(count: int, rate: float) -> float:
    """P(more than ``count`` events) of a Poisson number with mean ``rate``."""
    return (
        1.0 - sum(math.exp(-rate + i * math.log(rate) - math.lgamma(i + 1)) for i in range(count + 1)) if rate else 0.0
    )


def plan(model: Any, reference: Any, precision: str, attempt: int = 0) -> Plan:
    """Places of a model's own prompts, and settings under which a wrong one shows.

    The temperature is the one at which log-probabilities spread most: their variance is the information that a draw
    has about it. ``top_k`` is the one beyond which one candidate more would show most. Raises Verdict unknown where
    no position is certified, or where nothing is known of the whole distribution.
    """
    if getattr(reference, "oracle", None) is None:
        raise Verdict(
            Status.UNKNOWN, "the oracle does not know this model: nothing says how its tokens are distributed"
        )
    found: list[Place] = []
    prompts = {name: ids for name, ids in model.all_prompts.items() if name.startswith("searched") and len(ids) >= 16}
    for name, ids in (prompts or model.prompts(_LONGEST)).items():
        found += _places(reference, name, tuple(ids[:_LONGEST]), precision, _PLACES - len(found))
        if len(found) == _PLACES:
            break
    if not found:
        raise Verdict(Status.UNKNOWN, f"no position of the model's prompts is certified at {precision}")

    end = model.config.get("eos_token_id")
    return Plan(tuple(found), end=end if isinstance(end, int) else -1, attempt=attempt, **sharpest(found))


def sharpest(places: Sequence[Place]) -> dict[str, Any]:
    """The settings of a plan, its fields by name, that show most at these places."""

    def spread(temperature: float) -> float:
        return sum(_moments(place, Sampling(temperature))[1] for place in places)

    def shows(k: int) -> float:
        """How often one candidate too many would be drawn and be none that rounding lets in."""
        one_more = Sampling(1.0, top_k=k + 1)
        return sum(float(distribution(p, one_more)[~drawable(p, Sampling(1.0, top_k=k))].sum()) for p in places)

    top_k = max(_TOP_K, key=shows)
    top_p, top_p_of_k = (max(_TOP_P, key=partial(_short_by_one, places, k)) for k in (0, top_k))
    temperature = max(_TEMPERATURES, key=spread)
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p, "top_p_of_k": top_p_of_k}


def _short_by_one(places: Iterable[Place], top_k: int, top_p: float) -> float:
    """How often a target draws the token that reaches ``top_p``, where others are kept and that one surely is: what is
    missed by one that drops it."""
    total = 0.0
    for place in places:
        p = comparable(place, Sampling(1.0, top_k, top_p))
        last = int(np.argmin(np.where(distribution(place, Sampling(1.0, top_k, top_p)) > 0, place.logits, np.inf)))
        total += float(p[last]) if np.count_nonzero(p) > 1 else 0.0
    return total


def _places(reference: Any, name: str, tokens: tuple[int, ...], precision: str, most: int) -> list[Place]:
    record = reference.record(name, tokens)
    emulation = record.emulation(precision)
    # Not the first token alone: a target may treat it on its own (no page is filled, nothing is attended to).
    usable = np.flatnonzero(emulation.certified & (record.positions >= min(2, len(tokens) - 1)))
    if not len(usable):
        return []
    chosen = usable[np.unique(np.linspace(0, len(usable) - 1, min(most, len(usable))).astype(int))]
    positions = record.positions[chosen].astype(int)
    logits = np.asarray(reference.oracle.run(tokens[: int(positions[-1]) + 1], rows=positions).logits, np.float64)
    bound = row_error(emulation.largest)
    return [
        Place(
            name=f"{name}[:{position + 1}]",
            tokens=tokens[: position + 1],
            logits=row,
            error=float(bound[index]),
            rms=float(emulation.rms[index]),
            kl=float(emulation.kl[index]),
        )
        for position, index, row in zip(positions.tolist(), chosen.tolist(), logits, strict=True)
    ]


def distribution(place: Place, setting: Sampling) -> np.ndarray:
    """float64 [V]: the probabilities that are drawn from. Temperature, then the ``top_k`` best, then of their
    probabilities, made to sum to 1, the shortest run from the best that reaches ``top_p`` (Holtzman et al.,
    arXiv 1904.09751); lower ids first among equals."""
    order = np.argsort(-place.logits, kind="stable")
    kept = order[: setting.top_k] if setting.top_k else order
    p = np.exp(log_softmax(place.logits[None, kept] / setting.temperature)[0][0])
    kept = kept[np.cumsum(p) - p < setting.top_p]
    found = np.zeros(len(order))
    found[kept] = np.exp(log_softmax(place.logits[None, kept] / setting.temperature)[0][0])
    return found


def drawable(place: Place, setting: Sampling) -> np.ndarray:
    """bool [V]: tokens that a target may draw whose logits err by at most `MAX_FACTOR` times the emulation's error.

    A token beyond the filters' border needs a certificate: of the k-th best it is less than a near-tie away, and the
    mass of those that are surely better may, within the error, be short of ``top_p`` (errors of e change the odds of
    any set of tokens by a factor of at most exp(2 e / temperature)).
    """
    ordered = np.sort(place.logits)[::-1]
    allowed = np.ones(len(ordered), bool)
    if setting.top_k:
        allowed = near_tie(ordered[min(setting.top_k, len(ordered)) - 1] - place.logits, place.error)
    if setting.top_p < 1:
        p = distribution(place, Sampling(setting.temperature, setting.top_k))
        before = _mass_above(place, p, CANDIDATES * MAX_FACTOR * place.error)
        factor = math.exp(-CANDIDATES * MAX_FACTOR * place.error / setting.temperature)
        least = before * factor / (before * factor + np.maximum(1.0 - before, 0.0) + np.finfo(np.float64).tiny)
        allowed &= least < setting.top_p
    found: np.ndarray = allowed
    return found


def _mass_above(place: Place, p: np.ndarray, margin: float) -> np.ndarray:
    """float64 [V]: for each token the probability of all whose logits exceed its own by more than ``margin``; of all
    not below it by more than -``margin`` where that is negative. By sorting: a vocabulary squared fits no memory."""
    order = np.argsort(-place.logits, kind="stable")
    side: Literal["left", "right"] = "right" if np.signbit(margin) else "left"
    count = np.searchsorted(-place.logits[order], -(place.logits + margin), side=side)
    found: np.ndarray = np.concatenate([[0.0], np.cumsum(p[order])])[count]
    return found


def surely_kept(place: Place, setting: Sampling) -> np.ndarray:
    """bool [V]: tokens that the filters keep whatever the errors of a healthy target's logits (as in `drawable`).

    Of top_k those that are better than the first one left out by more than a near-tie; of top_p those before which
    the mass of all that may be better, within the error, stays below ``top_p``.
    """
    ordered = np.sort(place.logits)[::-1]
    sure = np.ones(len(ordered), bool)
    if 0 < setting.top_k < len(ordered):
        sure = ~near_tie(place.logits - ordered[setting.top_k], place.error)
    if setting.top_p < 1:
        p = distribution(place, Sampling(setting.temperature, setting.top_k))
        before = _mass_above(place, p, -CANDIDATES * MAX_FACTOR * place.error) - p
        factor = math.exp(CANDIDATES * MAX_FACTOR * place.error / setting.temperature)
        most = before * factor / (before * factor + np.maximum(1.0 - before, 0.0) + np.finfo(np.float64).tiny)
        sure &= most < setting.top_p
    found: np.ndarray = sure & (distribution(place, setting) > 0)
    return found


def comparable(place: Place, setting: Sampling) -> np.ndarray:
    """float64 [V]: the distribution of a drawn token, given that it is `surely_kept`; zeros where none is.

    A token at the border of a filter may be kept or not, and takes its share from all others; the odds of those that
    are surely kept are the same either way.
    """
    p = np.where(surely_kept(place, setting), distribution(place, setting), 0.0)
    total = p.sum()
    found: np.ndarray = p / total if total else p
    return found


def _moments(place: Place, setting: Sampling) -> tuple[float, float]:
    """Mean and variance of `Place.surprise` of a surely kept token drawn under ``setting``."""
    p = comparable(place, setting)
    values = place.surprise(setting.temperature)
    mean = float(p @ values)
    return mean, float(p @ (values - mean) ** 2)


def _outside(place: Place, setting: Sampling) -> float:
    """Probability that a token drawn without the filters is one that they rule out."""
    p = distribution(place, Sampling(setting.temperature))
    return float(p[~drawable(place, setting)].sum())


@dataclass
class Draws:
    """What a target drew under one setting, over all looks and attempts."""

    setting: Sampling
    label: str
    places: dict[str, Place] = field(default_factory=dict)
    drawn: dict[str, list[int]] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    _judged: list[Measurement] | None = None

    def add(self, planned: Plan, requests: Iterable[Request], answers: Mapping[str, Response]) -> None:
        """Take in the answers of one look."""
        by_tokens = {place.tokens: place for place in planned.places}
        self._judged = None
        for request in requests:
            place, answer = by_tokens[request.prompt], answers[request.id]
            token = _token(answer, planned.end)
            if token is None or not 0 <= token < len(place.logits):
                reason = answer.error or ("no generated token id came back" if token is None else f"token id {token}")
                self.problems.append((place.name, reason))
                continue
            self.places[place.name] = place
            self.drawn.setdefault(place.name, []).append(token)

    def measurements(self) -> list[Measurement]:
        """The verdict on everything drawn so far."""
        if self._judged is None:
            self._judged = self._judge()
        return self._judged

    def _judge(self) -> list[Measurement]:
        if self.problems:
            name, reason = self.problems[0]
            detail = f"{len(self.problems)} of the draws did not come: {reason}"
            return [Measurement("sample.drawn", math.inf, 0.0, False, "text", name, detail=detail)]
        filtered = bool(self.setting.top_k) or self.setting.top_p < 1
        return [
            *([self._support()] if filtered else []),
            self._distribution(),
            *([] if filtered else [self._temperature()]),
        ]

    @property
    def count(self) -> int:
        return sum(map(len, self.drawn.values()))

    def _support(self) -> Measurement:
        wrong = []
        missed = 0.0
        for name, tokens in self.drawn.items():
            place = self.places[name]
            allowed = drawable(place, self.setting)
            outside = [token for token in tokens if not allowed[token]]
            missed += len(tokens) * math.log1p(-min(_outside(place, self.setting), 1 - 1e-12))
            if outside:
                rank = int(np.sum(place.logits > place.logits[outside[0]])) + 1
                wrong.append(
                    (name, len(place.tokens) - 1, f"token {outside[0]} (rank {rank}) is not among those kept", outside)
                )
        count = sum(len(one[3]) for one in wrong)
        name, position, reason = wrong[0][:3] if wrong else ("", None, "")
        power = -math.expm1(missed)
        detail = f"{self.label}: {f'{reason}; ' if reason else ''}{count} of {self.count} draws are ruled out"
        detail += f"; without the filter one would be with probability {power:.4g}"
        settled = bool(wrong) or power >= POWER
        return Measurement(
            "sample.support",
            float(count),
            0.0,
            not wrong and settled,
            "text",
            name,
            position,
            "",
            self.count,
            detail,
            settled,
        )

    def _distribution(self) -> Measurement:
        temperature, level, drawn = self.setting.temperature, ALPHA / LOOKS, self._compared()
        expected = {
            name: _reference(self.places[name], self.setting, _REFERENCE * len(ids)) for name, ids in drawn.items()
        }
        count = sum(map(len, drawn.values()))
        if not count:
            detail = f"{self.label}: which tokens the filter keeps is no matter of certainty at any of the places"
            return Measurement(
                "sample.distribution", math.inf, -math.log10(level), False, "text", detail=detail, settled=False
            )
        inflation = sum(
            len(ids) * _REFERENCE / (1 + _REFERENCE) * 2 * MEAN_FACTOR * self.places[name].kl / temperature**2
            for name, ids in drawn.items()
        )
        found = permutation_test(
            drawn,
            expected,
            {name: self.places[name].surprise(temperature) for name in drawn},
            alpha=level,
            surprise_margin=self._slack() * self._information() / count,
            frequency_margin=inflation,
        )
        moved = "rarer" if found.surprise > 0 else "more probable"
        detail = (
            f"{self.label}, {count} draws: p {found.p:.2g} ({found.permutations} permutations within prompts"
            f"{'; p cannot be smaller' if found.p * (found.permutations + 1) < 1.5 else ''}); "
        )
        detail += f"tokens {moved} by {abs(found.surprise):.3g} nats ({found.surprise_score:.3g} sd), "
        detail += f"frequencies {found.frequency_score:.3g} sd off"
        ok = found.p > level
        worst = max(drawn, key=lambda name: self._moved(name)) if not ok else ""
        return Measurement(
            "sample.distribution",
            -math.log10(found.p),
            -math.log10(level),
            ok,
            "text",
            worst,
            None,
            "",
            count,
            detail,
        )

    def _temperature(self) -> Measurement:
        """How far off the temperature may be: the score estimate of its logarithm, and what would have been seen."""
        information = self._information()
        off = sum(self._moved(name, signed=True) for name in self._compared()) / information if information else 0.0
        error, slack = 1 / math.sqrt(information) if information else math.inf, self._slack()
        quantile = NormalDist().inv_cdf
        reach = (quantile(1 - ALPHA / LOOKS / 2) + quantile(POWER)) * error * math.sqrt(1 + 1 / _REFERENCE) + slack
        beyond = abs(off) + quantile(1 - RISK) * error + slack
        settled = beyond <= math.log(CONCERN)
        detail = f"times {math.exp(off):.3f}, {math.exp(off - 2 * error):.3f} to {math.exp(off + 2 * error):.3f}; "
        detail += f"sees times {math.exp(min(reach, 50.0)):.3f} with power {POWER:g} at alpha {ALPHA / LOOKS:g}"
        if not settled:
            gap = math.log(CONCERN) - abs(off) - slack
            needed = (
                (quantile(1 - RISK) / gap) ** 2 / (information / self.count) if gap > 0 and information else math.inf
            )
            hint = (
                f"about {math.ceil(needed)} draws would settle it" if math.isfinite(needed) else "more draws would tell"
            )
            detail = f"undecided, {detail}; {hint}"
        return Measurement(
            "sample.temperature",
            beyond,
            math.log(CONCERN),
            settled,
            "text",
            compared=self.count,
            detail=detail,
            settled=settled,
        )

    def _compared(self) -> dict[str, np.ndarray]:
        """The draws whose odds are known: those of tokens that are surely kept, where there are any."""
        found = {name: np.array(tokens) for name, tokens in self.drawn.items()}
        found = {name: ids[surely_kept(self.places[name], self.setting)[ids]] for name, ids in found.items()}
        return {name: ids for name, ids in found.items() if len(ids)}

    def _information(self) -> float:
        """Fisher's information of the compared draws about the logarithm of the temperature."""
        compared = self._compared()
        return sum(len(tokens) * _moments(self.places[name], self.setting)[1] for name, tokens in compared.items())

    def _slack(self) -> float:
        """What a healthy target's logits may shift the logarithm of the temperature by.

        Errors of rms e shift the mean surprise of one place by at most e sd / temperature (Cauchy and Schwarz), and
        those of different places are independent.
        """
        total = sum(
            (len(tokens) * self.places[name].rms / self.setting.temperature) ** 2
            * _moments(self.places[name], self.setting)[1]
            for name, tokens in self._compared().items()
        )
        information = self._information()
        return RMS_FACTOR * math.sqrt(total) / information if information else 0.0

    def _moved(self, name: str, signed: bool = False) -> float:
        """Excess of the summed surprise of one place's draws."""
        place, tokens = self.places[name], self._compared()[name]
        values = place.surprise(self.setting.temperature)[tokens]
        found = float(values.sum() - len(tokens) * _moments(place, self.setting)[0])
        return found if signed else abs(found)


def _token(answer: Response, end: int) -> int | None:
    """The drawn token; a server that leaves the end token out says that it stopped."""
    if answer.error is not None:
        return None
    if answer.tokens:
        return answer.tokens[0]
    return end if answer.finish == "stop" and end >= 0 else None


def _reference(place: Place, setting: Sampling, count: int) -> np.ndarray:
    """``count`` draws from the exact `comparable` distribution, a function of place, setting and their number."""
    text = f"{place.name} {place.tokens} {setting.temperature} {setting.top_k} {setting.top_p}"
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    uniform = np.random.Generator(np.random.Philox(key=key)).random(count)
    total = np.cumsum(comparable(place, setting))
    found: np.ndarray = np.searchsorted(total, uniform * total[-1], side="right")
    return found
