"""Engines side by side on one model, in turns, in one run: prefill and decode, and how near the machine's limits.

    python ci/peers/bench.py [--llama-venv VENV] [--vllm-venv VENV] [--engines ...] [--model DIR] [--rounds 5]
                             [--threads N] [--cases 512,4096,8x64] [--new 64] [--work DIR] [--markdown FILE]

The model is of Qwen3-MoE shape, 12 layers, hidden 1024, 32 experts of width 512 of which 4 are chosen, 16 heads and 4
of keys, vocabulary 32,000 (701M parameters, 140M of them active), drawn weights; `--model` takes another checkpoint of
a family that `to_gguf.py` converts. A case is the tokens of a prompt, or how many requests of how many tokens, all
different. Each engine has a process of its own, which stands still while another is measured; each round measures every
engine once, in another order. Figures are medians over rounds, ratios too: of the times of one round. Limits are
measured in the same run: bytes read and multiply-adds by kernels that do nothing else. What must be read and computed
is that of `pytest_adapt.perf.roofline`. An engineering reference, not a marketing metric.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENGINES = ("builtin:bf16", "builtin:int8", "llama.cpp:bf16", "llama.cpp:q8_0", "vllm:bf16", "transformers:bf16")
PREFILL, DECODE = "prefill", "decode"
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Case:
    """So many requests of so many prompt tokens, together."""

    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Case:
        batch, _, length = text.rpartition("x")
        return cls(int(batch or 1), int(length))

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}" if self.batch > 1 else str(self.length)

    def prompts(self, vocab: int) -> list[list[int]]:
        import numpy as np

        drawn = np.random.default_rng(self.length).integers(5, vocab - 5, (self.batch, self.length))
        return [[int(token) for token in row] for row in drawn]


class Engine:
    """One engine in a process of its own, which is stopped while it is not asked."""

    def __init__(self, name: str, python: Path, model: Path, threads: int, context: int, slots: int, log: Path) -> None:
        self.name = name
        words = [str(python), str(HERE / "bench_engine.py"), name, str(model)]
        words += ["--threads", str(threads), "--context", str(context), "--slots", str(slots)]
        # Each may wait as it likes: while one is measured, the others stand still.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environment["OMP_NUM_THREADS"] = str(threads)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self.version = str(self._answer()["ready"])
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            tail = "\n".join(self._log.read_text().splitlines()[-5:])
            raise SystemExit(f"{self.name} ended with {self._process.returncode}; {self._log} ends with\n{tail}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def bench_model(root: Path) -> Path:
    """The checkpoint of the bench shape, drawn like those of the catalogue."""
    from pytest_adapt.models import catalogue
    from pytest_adapt.models.checkpoint import materialise_entry

    entry = catalogue()["qwen3-moe-aligned"]
    return materialise_entry(replace(entry, name="bench", config={**entry.config, **SHAPE}), root)


def limits(threads: int) -> dict[str, float]:
    """GB/s and, by format, GFLOP/s of this machine."""
    from adapt_engine.profile import measured_limits
    from adapt_engine.threads import use

    use(threads)
    return measured_limits()


def shares(
    model: Path, engine: str, case: Case, new: int, speeds: dict[str, float], most: dict[str, float]
) -> dict[str, float]:
    """Of the limits, what decode reads and prefill computes."""
    from pytest_adapt.perf.roofline import work

    precision = engine.partition(":")[2].replace("q8_0", "int8")
    needed = work(model, precision, case.length, case.batch)
    middle = work(model, precision, case.length + new // 2, case.batch)
    steps = speeds[DECODE] / case.batch
    return {
        PREFILL: needed.prefill_operations / case.batch * speeds[PREFILL] / case.length / 1e9 / most[precision],
        DECODE: middle.decode_bytes * steps / 1e9 / most["read"],
    }


def table(
    model: Path, engines: Iterable[Engine], cases: Sequence[Case], new: int, found: Any, most: dict[str, float]
) -> list[str]:
    engines = list(engines)
    ours = {one.name.partition(":")[2].replace("q8_0", "int8"): one.name for one in engines if "builtin" in one.name}
    lines = [
        "| prompt | engine | prefill, tokens/s | of the peak | decode, tokens/s | of the read limit | prefill, built-in"
        " over it | decode, built-in over it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        for engine in engines:
            rounds = found[engine.name].get(case)
            if not rounds:
                continue
            times = {phase: statistics.median(one[phase] for one in rounds) for phase in (PREFILL, DECODE)}
            speeds = {
                PREFILL: case.batch * case.length / times[PREFILL],
                DECODE: case.batch * (new - 1) / times[DECODE],
            }
            part = shares(model, engine.name, case, new, speeds, most)
            cells = [str(case), f"{engine.name} ({engine.version})"]
            cells += [f"{speeds[PREFILL]:.0f}", f"{part[PREFILL]:.0%}", f"{speeds[DECODE]:.1f}", f"{part[DECODE]:.0%}"]
            rival = ours.get(engine.name.partition(":")[2].replace("q8_0", "int8"))
            for phase in (PREFILL, DECODE):
                if rival is None or rival == engine.name:
                    cells.append("")
                    continue
                ratios = [b[phase] / a[phase] for a, b in zip(found[rival][case], rounds, strict=True)]
                cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def measure(
    engines: list[Engine], cases: Sequence[Case], vocab: int, new: int, rounds: int
) -> dict[str, dict[Case, list[dict[str, Any]]]]:
    """Engine -> case -> one answer a round. A round before them warms up."""
    found: dict[str, dict[Case, list[dict[str, Any]]]] = {}
    for engine in engines:
        single = engine.name.startswith("llama.cpp")  # as `bench_engine.py` drives it
        found[engine.name] = {case: [] for case in cases if case.batch == 1 or not single}
    for number in range(rounds + 1):
        first = number % len(engines)
        for case in cases:
            prompts = case.prompts(vocab)
            for engine in (*engines[first:], *engines[:first]):
                if case in found[engine.name]:
                    answer = engine.ask(prompts, new)
                    found[engine.name][case] += [answer] if number else []
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint directory; without it the bench model is written")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--llama-venv", type=Path, help="with llama-cpp-python (setup.sh llama)")
    parser.add_argument("--vllm-venv", type=Path, help="with vLLM (setup.sh vllm)")
    parser.add_argument("--transformers-venv", type=Path, help="default: this one")
    parser.add_argument("--cases", default="512,4096,8x64")
    parser.add_argument("--new", type=int, default=64, help="tokens to write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, default=Path(".adapt/bench"))
    parser.add_argument("--markdown", type=Path, help="write the table there as well")
    arguments = parser.parse_args()
    arguments.engines = [name for name in arguments.engines.split(",") if name]
    if unknown := sorted(set(arguments.engines) - set(ENGINES)):
        parser.error(f"--engines {','.join(unknown)}: known are {', '.join(ENGINES)}")
    try:
        arguments.cases = [Case.parse(text) for text in arguments.cases.split(",")]
    except ValueError:
        parser.error(f"--cases {arguments.cases}: write tokens, or REQUESTSxTOKENS, with commas between")
    least = min(arguments.rounds, arguments.threads, *(min(one.batch, one.length) for one in arguments.cases))
    if least < 1 or arguments.new < 2:
        parser.error("--rounds, --threads and --cases take at least 1, --new at least 2")
    return arguments


def main() -> int:
    arguments = parsed()
    cases: list[Case] = arguments.cases
    pythons = {
        "builtin": Path(sys.executable),
        "transformers": python_of(arguments.transformers_venv) or Path(sys.executable),
        "llama.cpp": python_of(arguments.llama_venv),
        "vllm": python_of(arguments.vllm_venv),
    }
    arguments.work.mkdir(parents=True, exist_ok=True)
    model = arguments.model or bench_model(arguments.work)
    vocab = int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    context = max(one.length for one in cases) + arguments.new
    slots = max(one.batch for one in cases)
    lines: list[str] = []
    engines: list[Engine] = []
    try:
        for name in arguments.engines:
            kind, _, precision = name.partition(":")
            python = pythons[kind]
            if python is None:
                lines.append(f"not measured: {name} (--{kind.partition('.')[0]}-venv)")
                continue
            served = converted(python, model, precision, arguments.work) if kind == "llama.cpp" else model
            log = arguments.work / f"{name.replace(':', '-')}.log"
            engines.append(Engine(name, python, served, arguments.threads, context, slots, log))
        most = limits(arguments.threads)
        found = measure(engines, cases, vocab, arguments.new, arguments.rounds)
        about = f"{arguments.threads} threads, {arguments.new} new tokens, medians of {arguments.rounds} rounds"
        lines += [
            f"{model.name}, {about}",
            f"limits: {', '.join(f'{name} {most[name]:.0f} {unit_of(name)}' for name in most)}",
        ]
        lines += ["", *table(model, engines, cases, arguments.new, found, most)]
    finally:
        for engine in engines:
            engine.close()
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def unit_of(limit: str) -> str:
    return "GB/s" if limit == "read" else "GFLOP/s"


def python_of(venv: Path | None) -> Path | None:
    if venv is not None and not (venv / "bin" / "python").exists():
        raise SystemExit(f"{venv}: no virtual environment (bin/python is missing)")
    return venv / "bin" / "python" if venv is not None else None


def converted(python: Path, model: Path, precision: str, work: Path) -> Path:
    """The model as GGUF."""
    out = work / f"{model.name}.{precision}.gguf"
    if not out.exists():
        subprocess.run([python, HERE / "to_gguf.py", model, out, "--type", precision], check=True)
    return out


if __name__ == "__main__":
    sys.exit(main())
