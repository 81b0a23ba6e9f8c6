"""Console script ``adapt-engine``: what this build can do, what a checkpoint is, and plain generation."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

import torch

from . import threads
from .errors import EngineError
from .families import ARCHITECTURES, read_config, spec_from_config
from .kernels import KernelRegistry, native, reference
from .profile import profile_kernels
from .runtime.engine import Engine
from .runtime.requests import DTYPES, EngineOptions, SequenceRequest
from .tokenizer import Tokenizer
from .version import __version__
from .weights.index import WeightIndex

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="adapt-engine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="kernels of this build; with DIR also what the checkpoint holds")
    info.add_argument("directory", nargs="?", metavar="DIR")
    profile = commands.add_parser("profile", help="kernels against the limits of this machine, measured in one run")
    profile.add_argument("--rounds", type=int, default=7, metavar="N", help="the median over so many; default 7")
    profile.add_argument("--threads", type=int, default=0, metavar="N", help="default: torch's")
    generate = commands.add_parser("generate", help="continue a prompt")
    generate.add_argument("directory", metavar="DIR")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    generate.add_argument("--precision", default="fp32", choices=sorted(DTYPES))
    generate.add_argument("--layout", default="single", help="ranks, all in this process (tp2.pp2); default: one")
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=0)
    return parser


def _native_line() -> str:
    module = native.load()
    if module is None:
        return "not built (no C++ compiler at install time): running on reference kernels"
    return f"built, using {native.isa(module)} of {', '.join(module.supported_isas())}"


def _info(directory: str | None) -> None:
    print(f"adapt-engine {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"native kernels: {_native_line()}")
    for precision, dtype in DTYPES.items():
        names = KernelRegistry(reference.offers() + native.offers(), dtype, "fast").names()
        fast = sorted(op for op, name in names.items() if name != "reference")
        print(
            f"  {precision}: native {', '.join(fast) or 'none'}; reference for the other {len(names) - len(fast)} ops"
        )
    print(f"architectures: {', '.join(ARCHITECTURES)}")
    if directory is None:
        return
    spec = spec_from_config(read_config(directory))
    index = WeightIndex.read(directory)
    kinds = sorted({layer.attention.kind for layer in spec.layers})
    print(f"{directory}: {spec.architecture}, {len(spec.layers)} layers ({', '.join(kinds)}), hidden {spec.hidden}")
    print(f"  {len(index.entries)} tensors, {index.nbytes} bytes, {len(index.files)} files")
    for warning in index.warnings:
        print(f"  warning: {warning}")


def _profile(arguments: argparse.Namespace) -> None:
    if arguments.threads:
        threads.use(arguments.threads)
    else:
        threads.follow()
    limits, uses = profile_kernels(max(1, arguments.rounds))
    print(f"threads {torch.get_num_threads()}, {_native_line()}")
    for name, limit in limits.items():
        print(f"limit {name:<28}{limit:>22.1f} {'GB/s' if name == 'read' else 'GFLOP/s'}")
    for use in uses:
        print(use)


def _generate(arguments: argparse.Namespace) -> None:
    tokenizer = Tokenizer(arguments.directory)
    prompt = tokenizer.encode(arguments.prompt)
    options = EngineOptions(
        precision=arguments.precision,
        layout=arguments.layout,
        max_context=max(1, len(prompt) + arguments.max_new_tokens),
        max_batch=1,
    )
    with Engine.open(arguments.directory, options) as engine:
        request = SequenceRequest(
            id="prompt",
            prompt=prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
            stop=engine.spec.eos,
        )
        for result in engine.run([request]):
            if result.error is not None:
                raise EngineError(result.error)
            print(arguments.prompt + tokenizer.decode(result.tokens))
            rate = len(result.tokens) / result.seconds if result.seconds else 0.0
            report = engine.load_report
            print(
                f"[{len(prompt)} + {len(result.tokens)} tokens, {rate:.1f} tokens/s, finish {result.finish}; "
                f"loaded {report.bytes} bytes in {report.seconds:.2f} s, {report.bytes_per_second / 1e9:.2f} GB/s]",
                file=sys.stderr,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 0, or 1 with one line on stderr where the engine refuses."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "info":
            _info(arguments.directory)
        elif arguments.command == "profile":
            _profile(arguments)
        else:
            _generate(arguments)
    except EngineError as problem:
        print(f"adapt-engine: {problem}", file=sys.stderr)
        return 1
    return 0
