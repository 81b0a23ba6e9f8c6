"""Attention of packed rows, sequence by sequence; under sequence parallelism every rank reads its own keys.

A rank stores keys and values of the positions that it owns. It sees the queries of all ranks of its sp group and
attends to what it has; the partial results of a row go to the row's owner and are merged there (the online softmax
of Milakov & Gimelshein 2018, as in Liu et al. 2023, "Ring Attention"). Prefill and decode are the same code.

In mode strict keys and values travel instead (as in Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2): each
rank computes its own rows over all of them, in the order of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..model.step import Span, Step

__all__ = ["Read", "attend_spans"]

Read = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""An attention op: context [Tq, H, d_v], and the natural log-sum-exp [Tq, H] of its scores where it is partial."""


def attend_spans(
    step: Step,
    queries: torch.Tensor,
    width: int,
    one: Callable[[Span, torch.Tensor, torch.Tensor, Read], tuple[torch.Tensor, torch.Tensor | None]],
) -> torch.Tensor:
    """Context [T, H, ``width``] of this rank's rows, in the dtype of ``queries`` [T, H, d].

    ``one(span, queries, positions, read)`` computes one sequence's context with the attention op ``read``.
    """
    ops, parallel = step.ops, step.parallel
    if parallel.sp.size == 1 or step.gathers:

        def whole(*tensors: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, None]:
            return ops.attention(*tensors, **settings), None

        parts = []
        for span in step.spans:
            rows = step.own(span)
            parts.append(one(span, queries[rows], step.positions[rows], whole)[0])
        return step.join(parts) if parts else queries.new_empty((0, queries.shape[1], width))
    everyone = step.rows.gather(queries, parallel)
    context = torch.zeros((*everyone.shape[:2], width + 1))
    for span in step.spans:
        rows = slice(span.start, span.stop)
        part, weight = one(span, everyone[rows], step.rows.positions[rows], ops.attention_partial)
        assert weight is not None
        context[rows, :, :width], context[rows, :, width] = part, weight
    found = torch.stack(step.rows.scatter(context, parallel))
    return ops.attention_merge(found[..., :width], found[..., width]).to(queries.dtype)
