"""Child processes: servers from a template and line-protocol engines, well-behaved and not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.target.protocol import Deployment, Request, Target, TargetError, UnsupportedDeployment
from pytest_adapt.target.registry import resolve
from pytest_adapt.target.template import Template

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, die_after = int(sys.argv[1]), int(sys.argv[2])
count = 0
class Handler(BaseHTTPRequestHandler):
    def reply(self, body):
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
    def do_GET(self):
        self.reply({"data": [{"id": "tiny"}]})
    def do_POST(self):
        global count
        count += 1
        if die_after and count > die_after:
            print("ran out of memory", file=sys.stderr, flush=True)
            import os; os._exit(7)
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        choice = {"text": chr(0x4E00 + 9), "finish_reason": "length", "token_ids": [9], "prompt_token_ids": prompt}
        self.reply({"choices": [choice], "usage": {"prompt_tokens": len(prompt)}})
    def log_message(self, *arguments): pass
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
CHILD = """
import json, sys
import base64, struct
for line in sys.stdin:
    message = json.loads(line)
    if message["op"] == "open":
        answer = {"info": {"name": "child", "version": "1", "observables": ["logits", "text"], "vocab_size": 3}}
        print(json.dumps(answer), flush=True)
    elif message["op"] == "run":
        for request in reversed(message["requests"]):
            rows = [[float(token), 0.5, None] for token in request["prompt"]]
            if len(rows) == 2:
                flat = [float("nan") if value is None else value for row in rows for value in row]
                raw = struct.pack("<6f", *flat)
                rows = {"dtype": "float32", "shape": [2, 3], "base64": base64.b64encode(raw).decode()}
            answer = {"id": request["id"], "prompt_tokens": len(request["prompt"]), "logits": rows}
            print(json.dumps({"response": answer}), flush=True)
    else:
        break
"""


def python(script: str, directory: Path, *arguments: str) -> str:
    path = directory / "child.py"
    path.write_text(script)
    return " ".join([sys.executable, f"'{path}'", *arguments])


def made(spec: str, tmp_path: Path, **settings: Any) -> Target:
    settings = {"start_timeout": 10.0, "request_timeout": 5.0, "stop_grace": 0.3, **settings}
    return resolve(spec, rootdir=tmp_path, **settings).create()


def running(marker: str) -> list[str]:
    """Command lines of living processes that contain ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if marker in line and state != "Z" and int(entry.name) != os.getpid():
                found.append(line)
    return found


def gone(marker: str, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while running(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running(marker)


# Templates -------------------------------------------------------------------------------------------------------


def test_every_value_is_quoted_for_the_shell(checkpoint: Path) -> None:
    template = Template("serve {model} --port {port} -tp {tp} --dtype {dtype} --json '{{a}} {\"b\": 1}' ${HOME}")
    line = template.render(Deployment(str(checkpoint), layout="tp2", precision="bf16"), port=81, python="py")
    assert line == f"serve '{checkpoint}' --port 81 -tp 2 --dtype bfloat16 --json '{{a}} {{\"b\": 1}}' ${{HOME}}"


def test_an_axis_that_a_template_cannot_express_is_unsupported() -> None:
    with pytest.raises(UnsupportedDeployment, match=r"layout pp2: the command has no {pp} \(axes that it has: {tp}\)"):
        Template("serve {model} {port} {tp}").render(Deployment("m", layout="pp2"), port=1, python="py")


def test_a_command_without_dtype_runs_what_its_spec_says(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UnsupportedDeployment, match=r"has no {dtype}; say what it runs: cmd\[precisions=fp32\]"):
        made("cmd:serve {model} {port}", tmp_path).open(Deployment(str(checkpoint), precision="fp32"))


# Servers from a template -----------------------------------------------------------------------------------------


@pytest.mark.requirement(90)
def test_a_server_is_started_judged_and_stopped(tmp_path: Path, checkpoint: Path) -> None:
    line = python(SERVER, tmp_path, "{port}", "0", "{model}", "{dtype}")
    target = made(f"cmd:{line}", tmp_path)
    info = target.open(Deployment(str(checkpoint), precision="fp32"))
    assert info.kind == "endpoint"
    assert len(running("child.py")) >= 1
    (response,) = target.run([Request("a", (5, 6), max_new_tokens=1)])
    assert response.tokens == (9,)
    target.close()
    target.close()
    assert gone("child.py")
    port = int(info.environment["url"].rpartition(":")[2].removesuffix("/v1"))
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass


NEVER = f"sleep {90_000 + os.getpid()}"  # found again by its words, whatever else sleeps on this machine
STARTS_BADLY = [
    (
        "dies",
        "echo no such device >&2; exit 3; : {model} {port}",
        r"did not start \(exited with status 3\)",
        "no such device",
    ),
    ("is killed", "echo working; kill -9 $$; : {model} {port}", r"did not start \(was ended by SIGKILL\)", "working"),
    ("is no command", "/no/such/vllm serve {model} {port}", r"did not start \(exited with status 127\)", "not found"),
    ("never answers", f"echo loading; {NEVER}; : {{model}} {{port}}", r"not healthy within 1 s", "loading"),
]


@pytest.mark.requirement(102)
@pytest.mark.parametrize(
    ("line", "message", "log"), [case[1:] for case in STARTS_BADLY], ids=[c[0] for c in STARTS_BADLY]
)
def test_a_server_that_does_not_start_is_named_with_the_tail_of_its_log(
    line: str, message: str, log: str, tmp_path: Path, checkpoint: Path
) -> None:
    target = made(f"cmd[precisions=bf16]:{line}", tmp_path, start_timeout=1.0)
    with pytest.raises(TargetError, match=message) as caught:
        target.open(Deployment(str(checkpoint), precision="bf16"))
    first, where, *tail = str(caught.value).splitlines()
    assert first.startswith("target cmd: the server")
    assert where.startswith(f"  log: {tmp_path / '.adapt' / 'logs'}")
    assert log in "\n".join(tail)
    assert gone(NEVER)


@pytest.mark.requirement(104)
def test_a_server_that_dies_under_load_is_named_with_the_tail_of_its_log(tmp_path: Path, checkpoint: Path) -> None:
    line = python(SERVER, tmp_path, "{port}", "9", "{model}", "{dtype}")
    target = made(f"cmd:{line}", tmp_path)
    target.open(Deployment(str(checkpoint), precision="fp32"))
    with pytest.raises(TargetError, match=r"exited with status 7") as caught:
        list(target.run([Request(str(i), (5, 6), max_new_tokens=1) for i in range(20)]))
    assert "ran out of memory" in str(caught.value)
    assert gone("child.py")


def test_a_server_that_ignores_signals_and_its_stray_children_are_killed(tmp_path: Path, checkpoint: Path) -> None:
    line = python(SERVER, tmp_path, "{port}", "0", "{model}", "{dtype}")
    stray = f"trap '' TERM INT HUP; setsid sleep 301 & {line}"
    target = made(f"cmd:{stray}", tmp_path)
    target.open(Deployment(str(checkpoint), precision="fp32"))
    assert running("sleep 301")
    target.close()
    assert gone("child.py") and gone("sleep 301")


@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
def test_no_server_outlives_its_judge(end: str, tmp_path: Path, checkpoint: Path) -> None:
    line = python(SERVER, tmp_path, "{port}", "0", "{model}", "{dtype}")
    judge = (
        "import os, sys, signal\nfrom pathlib import Path\n"
        "from pytest_adapt.target.registry import resolve\nfrom pytest_adapt.target.protocol import Deployment\n"
        f"target = resolve({'cmd:' + line!r}, rootdir=Path({str(tmp_path)!r}), stop_grace=0.3).create()\n"
        f"target.open(Deployment({str(checkpoint)!r}, precision='fp32'))\n"
        "print('open', flush=True)\n" + ("sys.exit(0)" if end == "exit" else "os.kill(os.getpid(), signal.SIGKILL)")
    )
    ran = subprocess.run([sys.executable, "-c", judge], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "open\n", ran.stderr
    assert ran.returncode == (0 if end == "exit" else -signal.SIGKILL)
    assert gone("child.py")


# The line protocol -----------------------------------------------------------------------------------------------


def test_a_child_answers_in_any_order_with_lists_or_base64(tmp_path: Path) -> None:
    target = made(f"jsonl:{python(CHILD, tmp_path)}", tmp_path)
    info = target.open(Deployment("model"))
    assert (info.name, info.observables) == ("child", {"logits", "text"})
    for _ in range(2):
        answers = {a.id: a for a in target.run([Request("a", (1, 2)), Request("b", (3,))])}
        assert answers["a"].logits[:, 0].tolist() == [1.0, 2.0]
        assert answers["b"].logits.shape == (1, 3)
        assert answers["a"].logits.dtype == "float32" and str(answers["a"].logits[0, 2]) == "nan"
    target.close()
    assert gone("child.py")


INFO = """echo '{"info": {"name": "x", "observables": ["text"]}}'; read a; read b; """
MISBEHAVES = [
    ("dies", "echo boom >&2; exit 4", "exited with status 4 before it answered open", "boom"),
    ("hangs", "exec sleep 302", "no answer to open within 0.5 s", "empty"),
    ("closes its output", "exec 1>&-; exec sleep 302", "closed its standard output", "empty"),
    ("writes no JSON", "echo hello", "a line that is no JSON: hello", "empty"),
    ("steers the terminal", r"printf '\033[2Jhello\n'", r"no JSON: \x1b[2Jhello", "empty"),
    ("writes a list", "echo '[1]'", "expected a JSON object", "empty"),
    ("refuses", """echo '{"error": "no weights"}'""", "refused open: no weights", "empty"),
    ("has no name", """echo '{"info": {}}'""", 'expected {"info": {"name"', "empty"),
    ("has strange keys", """echo '{"info": {"name": "x", "colour": 1}}'""", "info has colour; known keys", "empty"),
    (
        "has strange observables",
        """echo '{"info": {"name": "x", "observables": ["soul"]}}'""",
        "has soul; known: taps",
        "",
    ),
    ("has a worded vocabulary", """echo '{"info": {"name": "x", "vocab_size": "many"}}'""", "vocab_size is 'many'", ""),
    ("has a number of features", """echo '{"info": {"name": "x", "features": {"a": [[]]}}}'""", "feature a is", ""),
    ("answers deep brackets", "printf '%0100000d' 0 | tr 0 '['", "a line that is no JSON", "empty"),
    ("has an odd id", INFO + """echo '{"response": {"id": []}}'""", "id is [], expected text", None),
    ("has worded rows", INFO + """echo '{"response": {"id": "a", "first_row": "x"}}'""", "first_row is 'x'", None),
    ("has a text of 7", INFO + """echo '{"response": {"id": "a", "text": 7}}'""", "text is 7, expected text", None),
    ("answers another id", INFO + """echo '{"response": {"id": "zz"}}'""", "answered id 'zz', which is unknown", None),
    ("answers no response", INFO + "echo '{}'", r'answered run with {}, expected {"response"', "empty"),
    ("has strange fields", INFO + """echo '{"response": {"id": "a", "soul": 1}}'""", "response has soul", "empty"),
    (
        "has ragged logits",
        INFO + """echo '{"response": {"id": "a", "logits": [[1], [1, 2]]}}'""",
        "ValueError",
        "empty",
    ),
    (
        "lacks rows",
        INFO + """echo '{"response": {"id": "a", "logits": [[1]]}}'""",
        "1 rows from token 0, but 2 tokens",
        None,
    ),
    ("dies in run", INFO + "kill -SEGV $$", "ended by SIGSEGV before it answered run", "empty"),
]


@pytest.mark.requirement(102)
@pytest.mark.parametrize(("line", "message", "log"), [case[1:] for case in MISBEHAVES], ids=[c[0] for c in MISBEHAVES])
def test_a_child_that_misbehaves_is_one_clear_line(line: str, message: str, log: str | None, tmp_path: Path) -> None:
    target = made(f"jsonl:{line}", tmp_path, start_timeout=0.5, request_timeout=0.5)
    try:
        with pytest.raises(TargetError) as caught:
            target.open(Deployment("model"))
            list(target.run([Request("a", (1, 2))]))
    finally:
        target.close()
    first, *rest = str(caught.value).splitlines()
    assert message in first
    assert (log is None) is (not rest)
    assert log is None or log in "\n".join(rest)
    assert gone("sleep 302")


def test_a_child_may_decline_a_deployment(tmp_path: Path) -> None:
    target = made("""jsonl:echo '{"unsupported": "one rank only"}'""", tmp_path)
    with pytest.raises(UnsupportedDeployment, match="one rank only"):
        target.open(Deployment("model", layout="tp2"))
