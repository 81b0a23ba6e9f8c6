"""Which red cases share a cause. One cause may turn many cases red; two causes in one case are told apart.

Where sites were compared, every operation is charged with its own error only, so that a healthy one downstream of a
broken one is green: the operations that are red are broken themselves, and those of one kind share an implementation.
Elsewhere a cause is what a failure says (wrong answers, answers that disagree among each other, blocks that do not come
back), at the lowest rung on which that family of models is red.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_adapt.sites import LAYER_SITES, layer_of, order_key
from pytest_adapt.verdict.result import RUNGS, CaseResult, Measurement

__all__ = ["OPERATORS", "Cause", "causes_of", "dataflow", "failed", "operator_of", "worst"]

_KINDS: Mapping[str, tuple[str, ...]] = {
    "norm": tuple(name for name in (*LAYER_SITES, "final.norm") if name.rpartition(".")[2].endswith("norm")),
    "qkv": ("attn.q_a", "attn.q", "attn.kv_a", "attn.kv_b", "attn.k", "attn.v"),
    "rotation": ("attn.q_rope", "attn.k_rope"),
    "attention": ("attn.scores", "attn.probs", "attn.context"),
    "feed-forward": ("ffn.gate", "ffn.up"),
    "activation": ("ffn.act", "moe.experts.act"),
    "routing": ("moe.router.scores", "moe.router.selection", "moe.router.ids", "moe.router.weights"),
    "experts": ("moe.experts.gate", "moe.experts.up", "moe.experts.down"),
    "residual": ("attn.residual", "residual"),
}
"""Sites that one kind of operation computes; a site that is in none is a kind of its own."""
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "embed": ("embedding",),
    "norm": ("rms_norm", "add_rms_norm"),
    "qkv": ("linear",),
    "rotation": ("rotary",),
    "attention": ("attention", "latent_attention", "softmax"),
    "attn.out": ("linear",),
    "residual": ("add_rms_norm",),
    "feed-forward": ("linear",),
    "activation": ("swiglu", "experts"),
    "ffn.out": ("linear",),
    "moe.router.logits": ("router_logits",),
    "routing": ("route",),
    "experts": ("experts", "grouped_linear"),
    "moe.routed": ("combine",),
    "logits": ("head",),
}
"""Kind of operation -> the operators of the suite that compute it, the plain one first."""
_KIND_OF: Mapping[str, str] = {name: kind for kind, names in _KINDS.items() for name in names}
_PRODUCTS = frozenset({"qkv", "attn.out", "feed-forward", "ffn.out", "experts", "moe.router.logits", "logits"})
_MANY = 3
"""So many kinds of matrix products that are red together have the product itself in common."""
_EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")
_COUNTED = re.compile(r"\b\d+(?= of \d|,? \w+ run\b|,? \w* ?(?:wait|blocks|sequences|requests|tokens)\b)|(?<= of )\d+")
_WRONG = ("logprob", "kl", "cosine", "token_match", "needles", "ruler.")
_DISAGREE = ("agree.", "secret")


@dataclass(frozen=True)
class Cause:
    """What a red case is put down to."""

    key: tuple[str, ...]
    text: str
    sites: tuple[str, ...] = ()
    """Full names of the red sites that belong to it, in dataflow order; empty where no site was compared."""


def causes_of(red: Sequence[CaseResult]) -> list[list[Cause]]:
    """The causes of each case, the first in dataflow order first."""
    joined = _Joined()
    sites = [_red_sites(case) for case in red]
    for found, case in zip(sites, red, strict=True):
        if not _drifts(case):
            joined.take(found)
    lowest = _lowest_rungs(case for case, found in zip(red, sites, strict=True) if not found)
    kinds = {joined(_kind(name)) for found in sites for name in found}
    made = []
    for case, found in zip(red, sites, strict=True):
        causes = _by_sites(found, joined) if found else [_by_operator(case, kinds, joined) or _by_words(case, lowest)]
        # Ranks whose copies differ run different models: what is shown of them together fits none from there on.
        made.append([replace(causes[0], sites=tuple(found))] if _drifts(case) else causes)
    return made


def dataflow(name: str) -> tuple[int, int, str]:
    """Sort key that puts full site names in dataflow order; names of a user's own come last."""
    try:
        return (*order_key(name), "")
    except ValueError:
        return (1 << 31, 0, name)


def failed(case: CaseResult, cause: Cause | None = None) -> list[Measurement]:
    """Measurements over their budget, those of one cause where it has sites."""
    return [
        one
        for one in case.measurements
        if not one.ok and (cause is None or not cause.sites or not one.site or one.site in cause.sites)
    ]


def worst(measurements: Iterable[Measurement]) -> Measurement | None:
    """The measurement that used most of its budget, a failed one first, then one that is undecided. Of several that
    have no budget the one that says where: a lost needle rather than the token that came in its place."""
    return max(
        measurements,
        key=lambda one: (not one.ok and one.settled, not one.ok, one.use, one.metric.startswith("needles")),
        default=None,
    )


class _Joined:
    """Kinds of operation that have one cause in this run."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def __call__(self, kind: str) -> str:
        while kind in self._parent:
            kind = self._parent[kind]
        return kind

    def take(self, sites: Sequence[str]) -> None:
        """Learn from the red sites of one case."""
        kinds = {_kind(name) for name in sites}
        products = sorted(kinds & _PRODUCTS)
        if len(products) >= _MANY:
            self._join(products)
        layers: dict[str, set[int | None]] = {}
        for name in sites:
            layer, local = layer_of(name)
            layers.setdefault(local, set()).add(layer)
        # All that reads the residual stream at these layers is off: the stream itself came there wrong.
        if "attn.residual" in layers and layers["attn.residual"] == layers.get("attn.norm"):
            self._join(["residual", "norm"])

    def _join(self, kinds: Sequence[str]) -> None:
        first = self(kinds[0])
        for kind in kinds[1:]:
            if self(kind) != first:
                self._parent[self(kind)] = first


def _red_sites(case: CaseResult) -> list[str]:
    """Sites that are over their budget, in dataflow order."""
    names = {one.site for one in failed(case) if one.site}
    if case.divergence is not None:
        names.add(case.divergence.site)
    return sorted(names, key=dataflow)


def _drifts(case: CaseResult) -> bool:
    return any(one.metric == "replicas" for one in failed(case))


def _kind(name: str) -> str:
    local = layer_of(name)[1]
    return _KIND_OF.get(local, local)


def _by_sites(sites: Sequence[str], joined: _Joined) -> list[Cause]:
    found: dict[str, list[str]] = {}
    for name in sites:
        found.setdefault(joined(_kind(name)), []).append(name)
    return [
        Cause(("site", kind), f"first divergence in {layer_of(names[0])[1]}", tuple(names))
        for kind, names in found.items()
    ]


def operator_of(case: CaseResult) -> str:
    """The operator that a case of suite ``operators`` is about; "" for any other."""
    return case.case.rpartition("-")[2].rstrip("]") if case.suite == "operators" else ""


def _by_operator(case: CaseResult, kinds: Collection[str], joined: _Joined) -> Cause | None:
    """An operator that is wrong by itself is the cause of the sites that it computes, where those are red too."""
    name = operator_of(case)
    mine = [joined(kind) for kind, operators in OPERATORS.items() if name in operators]
    return next((Cause(("site", kind), f"operator {name}") for kind in mine if kind in kinds), None)


def _by_words(case: CaseResult, lowest: Mapping[tuple[str, str], int]) -> Cause:
    measured = worst(failed(case))
    if measured is None:
        reason = case.reason.partition("\n")[0]
        return Cause(("reason", case.status, _broken(reason)), reason or str(case.status))
    if not measured.settled:
        text = f"{measured.metric} undecided: too few samples ({case.suite or 'own tests'})"
        return Cause(("metric", case.rung, case.suite, measured.metric, "undecided"), text)
    nature = _nature(measured.metric)
    text = f"{measured.metric} beyond its budget ({case.suite or 'own tests'})"
    if not nature or not case.suite:
        return Cause(("metric", case.rung, case.suite, measured.metric), text)
    rung = lowest[nature, case.model]
    wrong = lowest.get(("wrong", case.model), len(RUNGS))
    # Answers that are wrong in the first place disagree as well: routing flips where a right model has no choice.
    if nature == "disagree" and wrong <= rung:
        nature, rung = "wrong", wrong
    return Cause(("answers", nature, str(rung)), text)


def _broken(reason: str) -> str:
    """What went wrong, without where and how many: an exception's name and text, if the reason ends with one."""
    found = _EXCEPTION.search(reason)
    # Blocks, requests and tokens are counted anew in each case; a status, a signal or an error's number is not.
    return _COUNTED.sub("0", found[0] if found else reason)


def _lowest_rungs(cases: Iterable[CaseResult]) -> dict[tuple[str, str], int]:
    """(nature, model) -> index of the lowest rung on which it is red."""
    found: dict[tuple[str, str], int] = {}
    for case in cases:
        measured = worst(failed(case))
        if measured is not None and (nature := _nature(measured.metric)):
            rung = RUNGS.index(case.rung) if case.rung in RUNGS else len(RUNGS)
            found[nature, case.model] = min(rung, found.get((nature, case.model), rung))
    return found


def _nature(metric: str) -> str:
    """wrong: against the reference; disagree: among each other; "" for what is a promise of its own."""
    if metric.startswith(_WRONG):
        return "wrong"
    return "disagree" if metric.startswith(_DISAGREE) else ""
