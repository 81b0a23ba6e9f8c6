"""The built-in engine and transformers on one real model: prefill and decode, in pairs, one process, same threads.

    python ci/peers/bench.py [--model smollm2] [--precision bf16] [--prompt 512] [--new 64] [--pairs 5] [--threads N]

Each pair runs both engines one after the other, the first one by turns, so that a slow moment of the machine falls on
both. The figure is the median over pairs of the ratio of their times, with the smallest and the largest. What they
write must agree: greedy tokens are compared, and a ratio between engines that write different text says so. Exit status
1 where the built-in engine is slower than the peer by the median, 0 otherwise. An engineering reference, not a
marketing metric.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from adapt_engine import Engine, EngineOptions, SequenceRequest

from pytest_adapt.models import catalogue, materialise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Phases = tuple[float, float, tuple[int, ...]]
"""Seconds of prefill (to the first token), of decode (the others), and the tokens."""


def built_in(directory: Path, precision: str, threads: int, length: int, new: int) -> Callable[[list[int]], Phases]:
    options = EngineOptions(precision=precision, threads=threads, max_context=length + new)
    engine = Engine.open(directory, options)

    def run(prompt: list[int]) -> Phases:
        started = time.perf_counter()
        refused = engine.submit(SequenceRequest("bench", tuple(prompt), max_new_tokens=new))
        if refused is not None:
            raise SystemExit(f"built-in engine: {refused.error}")
        first, tokens = 0.0, []
        while engine.busy:
            for update in engine.step():
                first = first or time.perf_counter()
                tokens.extend(update.tokens)
        return first - started, time.perf_counter() - first, tuple(tokens)

    return run


def transformers(directory: Path, precision: str, threads: int) -> Callable[[list[int], int], Phases]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[precision]).eval()

    @torch.inference_mode()
    def run(prompt: list[int], new: int) -> Phases:
        started = time.perf_counter()
        out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = out.logits[0, -1].argmax()
        first, tokens = time.perf_counter(), [int(token)]
        for _ in range(new - 1):
            out = model(token.view(1, 1), past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[0, -1].argmax()
            tokens.append(int(token))
        return first - started, time.perf_counter() - first, tuple(tokens)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a name of the catalogue or a checkpoint directory")
    parser.add_argument("--precision", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to write")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if min(arguments.prompt, arguments.pairs, arguments.threads) < 1 or arguments.new < 2:
        parser.error("--prompt, --pairs and --threads take at least 1, --new at least 2")
    directory = materialise(arguments.model) if arguments.model in catalogue() else Path(arguments.model)
    ours = built_in(directory, arguments.precision, arguments.threads, arguments.prompt, arguments.new)
    theirs = transformers(directory, arguments.precision, arguments.threads)
    prompt = [int(token) for token in np.random.default_rng(0).integers(5, 20_000, arguments.prompt)]
    ours(prompt), theirs(prompt, arguments.new)  # neither pays for warming up
    rows: list[tuple[Phases, Phases]] = []
    for pair in range(arguments.pairs):
        if pair % 2:
            peer = theirs(prompt, arguments.new)
            rows.append((ours(prompt), peer))
        else:
            mine = ours(prompt)
            rows.append((mine, theirs(prompt, arguments.new)))
    same = next((i for i, (a, b) in enumerate(zip(rows[0][0][2], rows[0][1][2], strict=True)) if a != b), arguments.new)
    print(f"{directory.name}, {arguments.precision}, {arguments.threads} threads, {arguments.pairs} pairs")
    print(f"{arguments.prompt} tokens in, {arguments.new} out; the first {same} written tokens are the same")
    print("| phase | built-in, tokens/s | transformers, tokens/s | ratio of times: median (smallest, largest) |")
    print("|---|---|---|---|")
    slower = False
    for place, (name, count) in enumerate((("prefill", arguments.prompt), ("decode", arguments.new - 1))):
        ratios = sorted(mine[place] / peer[place] for mine, peer in rows)  # type: ignore[operator]
        speeds = [count / statistics.median(row[side][place] for row in rows) for side in (0, 1)]  # type: ignore[type-var]
        median = statistics.median(ratios)
        slower |= median > 1.0
        print(f"| {name} | {speeds[0]:.0f} | {speeds[1]:.0f} | {median:.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f}) |")
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
