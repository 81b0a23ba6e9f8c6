"""What a needle model answers, in time O(n) for a prompt of n tokens: exactly, and as a precision rounds it.

Tokens that ask nothing have a query of 0, so their attention is the mean of the values that they see; what a
question sees is a single sum over keys. Both follow from the construction (`pytest_adapt.models.needle`), and no
matrix of n x n scores exists here. Written in the arithmetic of the oracle's blocks, so that an emulation rounds
what eager code rounds and, in float32, adds term by term.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pytest_adapt.golden.record import EmulationErrors, Record, RecordKey, answer_errors, tokens_digest
from pytest_adapt.golden.sketch import log_softmax, project, top_ids
from pytest_adapt.models.entries import ModelEntry, spec_hash
from pytest_adapt.models.needle import needle_weights
from pytest_adapt.oracle import Rounding
from pytest_adapt.oracle.blocks import rms_norm, rotary_tables, rotate
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.oracle.spec import GroupedQuery, ModelSpec
from pytest_adapt.oracle.threads import one_blas_thread

__all__ = ["ClosedForm"]


class ClosedForm:
    """The answers of one needle model."""

    def __init__(self, entry: ModelEntry) -> None:
        self.entry = entry
        self.spec = ModelSpec.from_config(entry.config)
        self._weights = needle_weights(entry)
        self._last: tuple[str, np.ndarray] = ("", np.empty(0))

    def logits(self, tokens: Sequence[int], rows: Sequence[int], precision: str | None = None) -> np.ndarray:
        """float64 [R, V]: logits after each token of ``rows`` (ascending); exact, or as eager code in ``precision``."""
        n = Numerics(
            self._weights.__getitem__, self.spec.architecture, None if precision is None else Rounding.of(precision)
        )
        with one_blas_thread():
            return _Walk(n, self.spec, np.asarray(tokens, np.int64), np.asarray(rows, np.int64)).logits()

    def record(self, prompt: str, tokens: Sequence[int], rows: Iterable[int], precisions: Iterable[str]) -> Record:
        """The record of a prompt at ``rows``. Nothing is chosen in these models, so every position is certified."""
        fed = np.asarray(tuple(tokens), np.int32)
        positions = np.unique(np.asarray(tuple(rows), np.int32))
        digest = tokens_digest(tokens)
        exact = self._known(f"{digest} {positions.tolist()}", fed, positions)
        logprobs, lse = log_softmax(exact)
        ids = top_ids(exact)
        projections, norm = project(exact)
        follow = np.append(fed[1:], -1)[positions]
        certain = np.ones(len(positions), bool)
        return Record(
            key=RecordKey(self.entry.name, prompt, spec_hash(self.entry), "", digest),
            vocab=self.spec.vocab,
            tokens=fed,
            positions=positions,
            lse=lse,
            topk_ids=ids,
            topk_logprobs=np.take_along_axis(logprobs, ids.astype(np.int64), axis=1),
            next_logprob=np.where(follow >= 0, logprobs[np.arange(len(follow)), np.maximum(follow, 0)], np.nan),
            projections=projections.astype(np.float32),
            norm=norm.astype(np.float32),
            margin=np.full(len(positions), np.inf, np.float32),
            errors={
                name: EmulationErrors(
                    score=np.zeros(len(positions)),
                    certified=certain,
                    **answer_errors(exact, self.logits(fed.tolist(), positions.tolist(), name), ids, follow),
                )
                for name in precisions
            },
            source="closed form",
        )

    def _known(self, key: str, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Exact logits; those of the last prompt are kept, which is asked for in one precision after the other."""
        if self._last[0] != key:
            self._last = key, self.logits(tokens.tolist(), rows.tolist())
        return self._last[1]


class _Walk:
    """One pass over a prompt. ``rows`` are computed as the model would; other questions, whose keys and values are
    0 and whose answers nobody reads, are carried along as if they asked nothing."""

    def __init__(self, n: Numerics, spec: ModelSpec, tokens: np.ndarray, rows: np.ndarray) -> None:
        assert isinstance(spec.attention, GroupedQuery)
        self.n, self.spec, self.attention = n, spec, spec.attention
        self.repeats = spec.attention.heads // spec.attention.kv_heads
        self.rows = rows
        self.tokens = tokens[: int(rows.max()) + 1]  # no row sees a later token

    def logits(self) -> np.ndarray:
        n, spec = self.n, self.spec
        tables = rotary_tables(n, spec.rope, np.arange(len(self.tokens)))
        x = n.site("embed", n.parameter("model.embed_tokens.weight")[self.tokens])
        for layer in range(len(spec.layers)):
            x = self._layer(layer, x, tables)
        y = rms_norm(n, "final.norm", x[self.rows], "model.norm.weight", spec.norm_eps)
        found: np.ndarray = n.site("logits", n.linear(y, "lm_head.weight")).astype(np.float64)
        return found

    def _layer(self, layer: int, x: np.ndarray, tables: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        n, rows, window = self.n, self.rows, self.spec.layers[layer].window
        weights, attn = f"model.layers.{layer}", f"layer.{layer}.attn"
        inside, heads, groups = f"{weights}.self_attn", self.attention.heads, self.attention.kv_heads
        y = rms_norm(n, f"{attn}.norm", x, f"{weights}.input_layernorm.weight", self.spec.norm_eps)
        k = self._projected(f"{attn}.k", y, f"{inside}.k_proj.weight", groups)
        v = self._projected(f"{attn}.v", y, f"{inside}.v_proj.weight", groups)
        q = self._projected(f"{attn}.q", y[rows], f"{inside}.q_proj.weight", heads)
        cos, sin = tables
        k = rotate(n, f"{attn}.k_rope", k, tables, interleaved=False)
        q = rotate(n, f"{attn}.q_rope", q, (cos[rows], sin[rows]), interleaved=False)
        context = self._means(attn, v, window)
        for index, row in enumerate(rows.tolist()):
            first = max(0, row - window + 1) if window else 0
            context[row] = self._asked(attn, q[index], k[first : row + 1], v[first : row + 1])
        context = n.site(f"{attn}.context", context).reshape(len(x), -1)
        out = n.site(f"{attn}.out", self._linear(context, f"{inside}.o_proj.weight"))
        return n.site(f"{attn}.residual", x + out)  # the feed-forward part adds 0

    def _means(self, attn: str, v: np.ndarray, window: int) -> np.ndarray:
        """[n, H, d]: equal weights for all visible keys."""
        total = np.cumsum(v, axis=0, dtype=np.float64)
        count = np.arange(1, len(v) + 1)
        if window:
            total[window:] -= total[:-window].copy()
            count = np.minimum(count, window)
        weight = self.n.inner(f"{attn}.probs", (1.0 / count).astype(self.n.dtype))
        total *= weight[:, None, None]
        return np.repeat(total.astype(self.n.dtype), self.repeats, axis=1)

    def _asked(self, attn: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """[H, d]: softmax attention of one query [H, d] over keys and values [t, G, d]. Channels of 0 are left out."""
        n = self.n
        context = np.zeros((len(q), v.shape[-1]), n.dtype)
        for head in range(len(q)):
            group, used = head // self.repeats, np.flatnonzero(q[head])
            raw = n.inner(f"{attn}.scores.raw", n.matmul(q[head, used][None], k[:, group, used].T)[0])
            scores = n.inner(f"{attn}.scores", raw * self.attention.scale)
            weights = np.exp(scores - scores.max())
            probs = n.inner(f"{attn}.probs", weights / self._sum(weights[:, None]))
            held = np.flatnonzero(v[:, group].any(axis=0))
            context[head, held] = self._sum(probs[:, None] * v[:, group, held])
        return context

    def _sum(self, terms: np.ndarray) -> np.ndarray:
        """Sum over the first axis. Term by term, a cumulative sum is far quicker than `Numerics.total`, which is made
        for short sums, and adds in the same order."""
        if self.n.in_order:
            return np.asarray(np.cumsum(terms, axis=0, dtype=terms.dtype)[-1])
        return np.asarray(terms.sum(axis=0))

    def _projected(self, name: str, y: np.ndarray, weight: str, heads: int) -> np.ndarray:
        return self.n.site(name, self._linear(y, weight).reshape(len(y), heads, self.attention.head_dim))

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """x times a transposed weight, most of whose entries are 0: leaving those out changes no sum."""
        weight = self.n.parameter(name)
        outs, ins = np.flatnonzero(weight.any(axis=1)), np.flatnonzero(weight.any(axis=0))
        result = np.zeros((len(x), len(weight)), self.n.dtype)
        result[:, outs] = self.n.matmul(x[:, ins], np.ascontiguousarray(weight[np.ix_(outs, ins)].T))
        return result
