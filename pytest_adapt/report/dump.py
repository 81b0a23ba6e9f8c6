"""The answers of a failing item as .npz files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pytest_adapt.target.protocol import Response

__all__ = ["dump_responses"]


def dump_responses(directory: Path, case: str, responses: Mapping[str, Response]) -> None:
    """Write ``directory/<case>/<request>.npz``: tokens, logits, scores, topk_ids, topk_logprobs, taps."""
    import numpy as np

    folder = directory / _file_name(case)
    folder.mkdir(parents=True, exist_ok=True)
    for name, response in responses.items():
        arrays = {"tokens": np.array(response.tokens, dtype=np.int64), "first_row": np.array(response.first_row)}
        if response.logits is not None:
            arrays["logits"] = response.logits
        if response.scores is not None:
            arrays["scores"] = response.scores
        if response.topk is not None:
            arrays |= {"topk_ids": response.topk.ids, "topk_logprobs": response.topk.logprobs}
        arrays |= dict(response.taps)
        np.savez(folder / f"{_file_name(name)}.npz", **arrays)  # type: ignore[arg-type]


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_") or "response"
