"""The reference forward pass: a whole sequence at once, no cache, no batch, no sharding.

x = embed(tokens)
for each layer:  x = x + attention(norm(x));  x = x + feed_forward_or_mixture(norm(x))
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..sites import UNRECORDED, layer_of, site
from . import blocks, routing
from .checkpoint import Checkpoint
from .errors import OracleError
from .numerics import Numerics
from .parameters import audit, expert_projections, mixture_prefix
from .rounding import Rounding
from .spec import Latent, MixtureSpec, ModelSpec
from .threads import one_blas_thread

__all__ = ["Oracle", "Trace"]

_IDS = "moe.router.ids"
_MOST_REMEMBERED = 4096


@dataclass
class Trace:
    """What one run showed. Row t belongs to token t unless ``rows`` was given (logits only)."""

    tokens: tuple[int, ...]
    logits: np.ndarray
    """float64 [rows, V]."""
    sites: dict[str, np.ndarray] = field(default_factory=dict)
    """Recorded values that the run went on with; float64, or float32 under an emulation (int64 for ids)."""
    own: dict[str, np.ndarray] = field(default_factory=dict)
    """For each forced site, and the ids of each replayed layer: what the run itself computed there."""
    terms: dict[str, np.ndarray] = field(default_factory=dict)
    """Of a ``sized`` run, for each forced site that is one matrix product: the size of its partial sums."""
    ids: dict[int, np.ndarray] = field(default_factory=dict)
    """Layer -> int64 [T, k]: expert ids, ascending, that the run went on with."""
    selection: dict[int, np.ndarray] = field(default_factory=dict)
    """Layer -> [T, E]: scores that top-k looked at."""
    margins: dict[int, np.ndarray] = field(default_factory=dict)
    """Layer -> float64 [T]: margin of the run's own choice; score errors below half of it change nothing."""
    replayed: dict[int, np.ndarray] = field(default_factory=dict)
    """Layer -> certificates (row, margin, illegal) of rows where given ids differ from the run's own."""


class Oracle:
    """The reference model of one checkpoint directory. Weights are mapped, and converted when used.

    Raises OracleError when config.json asks for something that the oracle does not compute, or when the weights
    are not exactly those that it asks for.
    """

    def __init__(self, directory: Path | str) -> None:
        self.checkpoint = Checkpoint(directory)
        self.spec = ModelSpec.from_config(self.checkpoint.config)
        audit(self.spec, self.checkpoint)
        self._choices: dict[tuple[tuple[int, ...], str], np.ndarray] = {}

    def choices(self, tokens: Sequence[int], precision: str) -> np.ndarray:
        """int64 [T]: the most probable token after each one, of the emulation of ``precision`` running freely (the
        lower id first among equals). Remembered: prompts of a sample are asked about again by every item."""
        key = tuple(int(token) for token in tokens), precision
        if key not in self._choices:
            if len(self._choices) == _MOST_REMEMBERED:
                del self._choices[next(iter(self._choices))]
            logits = self.run(key[0], rounding=Rounding.of(precision)).logits
            self._choices[key] = np.where(np.isnan(logits), -np.inf, logits).argmax(axis=1)
        return self._choices[key]

    def run(
        self,
        tokens: Sequence[int],
        *,
        rounding: Rounding | None = None,
        record: tuple[str, ...] = (),
        forced: Mapping[str, np.ndarray] | None = None,
        replay: Mapping[int, np.ndarray] | None = None,
        rows: Sequence[int] | None = None,
        sized: bool = False,
        absorbed: bool = False,
    ) -> Trace:
        """Run the model on a token sequence.

        rounding: an emulation; None computes in float64. record: shell patterns of sites to keep.
        forced: full site name -> another's value for all T rows (logits: the asked rows); the run keeps its own
        value in ``Trace.own`` and goes on with the given one, so own minus given is the error of one operation.
        replay: layer -> expert ids [T, k], forces just these. rows: rows of which logits are wanted.
        sized: ``Trace.terms`` gets the size of the partial sums of forced sites that are one matrix product.
        absorbed: latent attention works on the latent.
        Raises OracleError for tokens outside the vocabulary, sites that do not occur, shapes that do not fit, and
        weights that make float64 logits infinite or NaN.
        """
        ids = np.asarray(tokens, np.int64)
        if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= self.spec.vocab:
            raise OracleError(f"tokens: expected a non-empty list of ids in 0..{self.spec.vocab - 1}")
        for pattern in record:
            if pattern.endswith(tuple(UNRECORDED)):
                raise OracleError(f"record {pattern}: scores and probs pass in row blocks; record attn.context instead")
        given = {**(forced or {}), **{site(layer, _IDS): chosen for layer, chosen in (replay or {}).items()}}
        for name in given:
            if layer_of(name)[1] in UNRECORDED:
                raise OracleError(f"forced {name}: scores and probs pass in row blocks; force attn.context instead")
        trace = Trace(tokens=tuple(int(token) for token in ids), logits=np.empty(0))
        run = _Run(
            self.spec,
            Numerics(self.checkpoint.tensor, self.spec.architecture, rounding, record, given, sized, absorbed),
            given,
            trace,
        )
        # An emulation may overflow as the real engine would: infinities and NaN are its result, not a warning.
        with np.errstate(all="ignore"), one_blas_thread():
            run.forward(ids, None if rows is None else np.asarray(rows, np.int64))
        if rounding is None and not forced and not np.isfinite(trace.logits).all():
            row = int(np.argmin(np.isfinite(trace.logits).all(axis=-1)))
            raise OracleError(f"{self.checkpoint.directory}: logits of row {row} are not finite; some weight is not")
        unused = sorted(set(given) - set(trace.own))
        if unused:
            raise OracleError(
                f"forced {unused[0]}: no such site in {self.spec.architecture} of {self.checkpoint.directory}"
            )
        return trace

    def emulations(
        self, tokens: Sequence[int], rounding: Rounding, forced: Mapping[str, np.ndarray]
    ) -> tuple[Trace, ...]:
        """A run for each way in which sound engines compute the same: latent attention on expanded keys and values, as
        in prefill, and on the latent, as in decode, which rounds elsewhere and sums other terms."""
        ways = (False, True) if isinstance(self.spec.attention, Latent) else (False,)
        return tuple(self.run(tokens, rounding=rounding, forced=forced, absorbed=way) for way in ways)


class _Run:
    """One forward pass: the model's wiring over `blocks` and `routing`."""

    def __init__(self, spec: ModelSpec, n: Numerics, given: Mapping[str, np.ndarray], trace: Trace) -> None:
        self.spec = spec
        self.n = n
        self.given = given
        self.trace = trace

    def forward(self, tokens: np.ndarray, rows: np.ndarray | None) -> None:
        n, spec = self.n, self.spec
        tables = blocks.rotary_tables(n, spec.rope, np.arange(len(tokens)))
        x = n.site("embed", n.parameter("model.embed_tokens.weight")[tokens])
        for layer in range(len(spec.layers)):
            x = self.layer(layer, x, tables)
        x = blocks.rms_norm(n, "final.norm", x, "model.norm.weight", spec.norm_eps)
        if rows is not None:
            if len(rows) and not (rows.min() >= 0 and rows.max() < len(tokens)):
                raise OracleError(f"rows: expected rows of 0..{len(tokens) - 1}")
            x = x[rows]
        head = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
        self.trace.logits = n.site("logits", n.linear(x, head)).astype(np.float64)
        self.trace.sites, self.trace.own, self.trace.terms = n.sites, n.own, n.terms

    def layer(self, layer: int, x: np.ndarray, tables: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        n, spec = self.n, self.spec
        weights, attn = f"model.layers.{layer}", site(layer, "attn")
        window = spec.layers[layer].window
        y = blocks.rms_norm(n, f"{attn}.norm", x, f"{weights}.input_layernorm.weight", spec.norm_eps)
        inside = f"{weights}.self_attn"
        if isinstance(spec.attention, Latent):
            y = blocks.latent_attention(n, attn, inside, y, spec.attention, tables, spec.rope.interleaved, window)
        else:
            y = blocks.grouped_query_attention(n, attn, inside, y, spec.attention, tables, window, spec.norm_eps)
        x = n.site(f"{attn}.residual", x + y)

        ffn = site(layer, "ffn")
        y = blocks.rms_norm(n, f"{ffn}.norm", x, f"{weights}.post_attention_layernorm.weight", spec.norm_eps)
        if spec.mixture is not None and spec.layers[layer].mixture:
            y = self.mixture(layer, y, spec.mixture)
        else:
            y = blocks.feed_forward(n, n.site, ffn, f"{weights}.mlp", y, spec.mlp_bias)
        return n.site(site(layer, "residual"), x + n.site(f"{ffn}.out", y))

    def mixture(self, layer: int, x: np.ndarray, mixture: MixtureSpec) -> np.ndarray:
        """Routed experts, plus the shared one: the feed-forward part of a mixture layer."""
        n, moe, inside = self.n, site(layer, "moe"), mixture_prefix(self.spec, layer)
        ids, weights = self.route(layer, x, mixture, f"{moe}.router", f"{inside}.gate")
        down = self.experts(f"{moe}.experts", f"{inside}.experts", x, ids, mixture.intermediate)
        y = routing.combine(n, moe, down, weights)
        if mixture.shared:
            shared = blocks.feed_forward(n, n.inner, f"{moe}.shared", f"{inside}.shared_experts", x, bias=False)
            y = y + n.site(f"{moe}.shared", shared)
        return y

    def route(
        self, layer: int, x: np.ndarray, mixture: MixtureSpec, name: str, gate: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Expert ids and combine weights [T, k] of each row; fills the trace's routing fields."""
        n, router = self.n, mixture.router
        logits = n.site(f"{name}.logits", n.linear(x, f"{gate}.weight", in_order=True))
        scores = n.site(f"{name}.scores", routing.scores_of(n, router, logits))
        biased = scores + n.parameter(f"{gate}.e_score_correction_bias") if router.selection_bias else scores
        selection = n.site(f"{name}.selection", biased)
        choice = routing.choose(router, selection)
        ids, given = choice.ids, self.given.get(f"{name}.ids")
        if given is not None:
            ids = routing.check_ids(router, f"{name}.ids", given, len(x))
            self.trace.replayed[layer] = routing.judge_replay(router, selection, choice.ids, ids)
        n.chosen(f"{name}.ids", choice.ids, ids)
        self.trace.ids[layer], self.trace.margins[layer] = ids, choice.margin
        self.trace.selection[layer] = selection
        return ids, n.site(f"{name}.weights", routing.weights_of(n, router, scores, ids))

    def experts(self, name: str, inside: str, x: np.ndarray, ids: np.ndarray, width: int) -> np.ndarray:
        """SwiGLU of each chosen expert, [T, k, h], computed expert by expert."""
        n = self.n
        gate_name, up_name, down_name = expert_projections(self.spec)
        places = {int(expert): np.nonzero(ids == expert) for expert in np.unique(ids)}

        def project(projection: str, inputs: Callable[[np.ndarray, np.ndarray], np.ndarray], size: int) -> np.ndarray:
            products = {f"{inside}.{expert}.{projection}.weight": (at, inputs(*at)) for expert, at in places.items()}
            return n.linear_by_rows(products, (*ids.shape, size))

        gate = n.site(f"{name}.gate", project(gate_name, lambda row, _: x[row], width))
        up = n.site(f"{name}.up", project(up_name, lambda row, _: x[row], width))
        act = n.site(f"{name}.act", n.inner(f"{name}.silu", blocks.silu(gate)) * up)
        return n.site(f"{name}.down", project(down_name, lambda row, place: act[row, place], x.shape[1]))
