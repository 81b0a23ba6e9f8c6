"""Specs: what resolves, and the one line that each wrong one gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_adapt.target.protocol import Target, TargetError
from pytest_adapt.target.registry import TargetDefaults, builtin_registry, resolve

ADAPTER = """
from pytest_adapt.target.protocol import Info

class Target:
    @classmethod
    def defaults(cls):
        return {"kind": "engine", "precisions": ["fp32"], "observables": ["text"]}
    def open(self, deployment):
        return Info("mine", "1")
    def run(self, requests):
        return iter(())
    def close(self):
        pass

class Half:
    def open(self, deployment):
        pass
"""

WRONG = [
    ("", "unknown target ''; known targets: builtin,"),
    ("hff:", r"did you mean hf:\?"),
    ("vllm:serve", "unknown target"),
    ("http://127.0.0.1:8000/v1", "names its scheme first: openai:URL"),
    ("openai:", "says nothing after the colon; write openai:URL"),
    ("openai:127.0.0.1:8000", "must read http://host:port/v1"),
    ("py:adapter", "write py:module:Class"),
    ("py:no_such_module:Target", "importing no_such_module failed: ModuleNotFoundError"),
    ("py:my_adapter:Targe", r"module my_adapter has no Targe; did you mean Target\?"),
    ("py:my_adapter:Half", "Half lacks run, close"),
    ("cmd:serve {model}", "lacks {port}"),
    ("cmd:serve {model} --port {prot}", r"unknown placeholder {prot} \(write {{prot}} for a literal one\)"),
    ("cmd[speed=9]:serve {model} {port}", "option 'speed=9'.*known options: precisions, model"),
    ("cmd[precisions=int3]:serve {model} {port}", r"precisions names int3; valid ones are fp32\+bf16\+fp16"),
    ("jsonl:", "write jsonl:COMMAND"),
]


@pytest.fixture
def rootdir(tmp_path: Path) -> Path:
    (tmp_path / "my_adapter.py").write_text(ADAPTER)
    return tmp_path


@pytest.mark.requirement(102)
@pytest.mark.parametrize(("spec", "message"), WRONG, ids=[spec or "empty" for spec, _ in WRONG])
def test_a_wrong_spec_gets_one_clear_line(spec: str, message: str, rootdir: Path) -> None:
    with pytest.raises(TargetError, match=f"(?s){message}") as caught:
        resolve(spec, rootdir=rootdir)
    assert "\n" not in str(caught.value)


def test_credentials_in_a_url_are_refused_without_being_printed() -> None:
    with pytest.raises(TargetError, match="ADAPT_API_KEY") as caught:
        resolve("openai:https://user:s3cr3t@host/v1?token=s3cr3t")
    assert "s3cr3t" not in str(caught.value)


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    registry = builtin_registry()
    registry.register("acme", "acme_adapter:Target", requires=("acme_not_there",), install="pip install acme")
    with pytest.raises(TargetError, match="acme_not_there, which is not installed; install it with: pip install acme"):
        registry.resolve("acme:")


def test_other_plugins_add_schemes_but_never_replace_one() -> None:
    registry = builtin_registry()
    registry.register("acme", "acme_adapter:Target", defaults=TargetDefaults(kind="endpoint"))
    assert registry.resolve("acme:somewhere").kind == "endpoint"
    with pytest.raises(ValueError, match="'hf' is registered already"):
        registry.register("hf", "acme_adapter:Target")


def test_a_python_class_is_found_from_rootdir_and_says_what_it_can(rootdir: Path) -> None:
    spec = resolve("py:my_adapter:Target", rootdir=rootdir)
    assert (spec.kind, spec.precisions) == ("engine", ("fp32",))
    assert isinstance(spec.create(), Target)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit(0)", "importing spoiled failed: SystemExit: 0"),
        ("defaults = 5", "defaults is int, expected a mapping"),
        ("defaults = lambda: {}['x']", "defaults raised KeyError: 'x'"),
        ("defaults = {'precisions': 'fp32'}", "defaults precisions is 'fp32', expected some of"),
        ("defaults = {'observables': ['vibes']}", r"defaults observables is \('vibes',\), expected some of"),
    ],
)
def test_a_python_module_that_misbehaves_is_named(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "spoiled", raising=False)
    lines = ["class Target:", "    open = run = close = print", f"    {body}"]
    (tmp_path / "spoiled.py").write_text("\n".join(lines))
    with pytest.raises(TargetError, match=message):
        resolve("py:spoiled:Target", rootdir=tmp_path)


def test_a_template_says_which_axes_and_precisions_it_can_express() -> None:
    spec = resolve("cmd:serve {model} --port {port} -tp {tp} --dtype {dtype}")
    assert (spec.kind, spec.defaults.axes, spec.precisions) == ("endpoint", ("tp",), ("fp32", "bf16"))
    assert spec.shape_classes == ("aligned", "real", "needle")
    assert resolve("cmd[precisions=fp32]:serve {model} {port}").precisions == ("fp32",)


@pytest.mark.parametrize("variable", ["ADAPT_START_TIMEOUT", "ADAPT_CONCURRENCY"])
def test_a_wrong_environment_variable_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "soon")
    with pytest.raises(TargetError, match=f"{variable}='soon' is not a positive number"):
        resolve("openai:http://127.0.0.1:1/v1")


def test_resolving_imports_no_framework() -> None:
    code = (
        "import sys\nfrom pytest_adapt.target.registry import resolve\n"
        "for spec in ('hf:', 'openai:http://h/v1', 'cmd:x {model} {port}', 'jsonl:x'): resolve(spec)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'adapt_engine'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
