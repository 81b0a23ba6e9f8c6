"""Scores and top-k from the logits of a target that runs in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pytest_adapt.target.protocol import TopK

__all__ = ["following_tokens", "rows_of_logits"]

_ROW_BLOCK = 256


def following_tokens(prompt: Sequence[int], generated: Sequence[int], first_row: int) -> np.ndarray:
    """int64 [rows]: the token after each fed token from ``first_row`` on; -1 after the last one."""
    fed = [*prompt, *generated[:-1]]
    return np.array([*fed[1:], -1], dtype=np.int64)[first_row:]


def rows_of_logits(logits: torch.Tensor, following: np.ndarray, k: int) -> tuple[np.ndarray, TopK]:
    """Scores and top-k of logits [rows, V], computed in float64 in blocks of rows.

    ``following`` is int64 [rows], the token after each row; -1 gives nan. Returns float64 [rows] and TopK.
    """
    rows, vocab = logits.shape
    k = min(k, vocab)
    scores = np.full(rows, np.nan)
    ids, logprobs = np.empty((rows, k), np.int64), np.empty((rows, k))
    for start in range(0, rows, _ROW_BLOCK):
        block = torch.log_softmax(logits[start : start + _ROW_BLOCK].double(), dim=-1)
        here = slice(start, start + len(block))
        known = np.flatnonzero(following[here] >= 0)
        scores[start + known] = block.numpy()[known, following[here][known]]
        best = torch.topk(block, k, dim=-1)
        ids[here], logprobs[here] = best.indices.numpy(), best.values.numpy()
    return scores, TopK(ids, logprobs)
