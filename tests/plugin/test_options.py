"""Options: one value from command line, environment, ini or default, and one line for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_adapt.options import OPTIONS, Settings, unknown_variables

if TYPE_CHECKING:
    from conftest import Folder

SHOW = """
    def test_show(target, request):
        from pytest_adapt.stash import RUN
        s = request.config.stash[RUN].settings
        print("SHOWN", s.profile, s.precisions, s.contexts, s.timeout, dict(s.sources))
"""


def test_command_line_then_environment_then_ini_then_default(
    folder: Folder, write: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(SHOW)
    folder.pytester.makeini("[pytest]\nadapt_profile = full\nadapt_precisions = bf16\nadapt_timeout = 9\n")
    monkeypatch.setenv("ADAPT_PRECISIONS", "fp16")
    monkeypatch.setenv("ADAPT_CONTEXTS", "64")
    args = ("--adapt-target=py:targets:Echo", "--adapt-models=qwen3-moe-odd", "--adapt-contexts=16, 64", "-s")
    result = folder.run_bare(*args, ".")
    line = next(line for line in result.outlines if "SHOWN" in line)
    assert "full ('fp16',) (16, 64) 9.0" in line
    for word in ("'profile': 'ini file'", "'precisions': 'environment'", "'contexts': 'command line'"):
        assert word in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--adapt-profile=smok"],
            "--adapt-profile: 'smok' is not allowed (did you mean smoke?); allowed: smoke, day0, full",
        ),
        (["--adapt-precisions=fp32,fp8"], "--adapt-precisions: 'fp8' is not allowed"),
        (["--adapt-precisions=,"], "--adapt-precisions=',' names nothing"),
        (["--adapt-layouts=tp0"], "--adapt-layouts: layout tp0: cannot read 'tp0'"),
        (["--adapt-layouts=ep4.dp2"], "nearest legal: ep2, ep4"),
        (["--adapt-contexts=4k"], "--adapt-contexts: '4k' is not a number of tokens"),
        (["--adapt-contexts=0"], "--adapt-contexts: '0' is not a number of tokens"),
        (
            ["--adapt-models=qwen3-moe-od"],
            "neither a checkpoint directory nor in the catalogue (did you mean qwen3-moe-odd",
        ),
        (["--adapt-models=empty"], "empty has no config.json; name the directory of a checkpoint"),
        (["--adapt-models=deep"], "config.json: cannot be read as JSON (maximum recursion depth"),
        (["--adapt-models=wordless"], "config.json: vocab_size is None, expected a number of at least 8"),
        (["--adapt-models=textual"], "config.json: num_attention_heads is 'many', expected a number of at least 0"),
        (["--adapt-report=taken"], "taken is a file; name a directory that can be made and written"),
        (["--adapt-dump=taken/below"], "taken is a file; name a directory that can be made and written"),
        (["--adapt-timeout=-1"], "--adapt-timeout='-1' is not a positive number of seconds"),
        (["--adapt-timeout=nan"], "--adapt-timeout='nan' is not a positive number of seconds"),
        (["--adapt-observables=tap"], "--adapt-observables: 'tap' is not allowed (did you mean taps?)"),
        (["--adapt-require=all"], "allowed: endpoint, engine, release"),
        (["--adapt-mode=exact"], "allowed: fast, strict"),
        (["--adapt-goldens=write"], "allowed: check, new, update, observe, off"),
        (["--adapt-goldens=update"], "--adapt-goldens=update needs --adapt-reason"),
        (["--adapt-goldens=update", "--adapt-reason=why"], "--adapt-goldens=update needs a selection"),
        (["--adapt-goldens=update", "--adapt-reason= "], "--adapt-reason is empty"),
        (["--adapt-goldens-dir=absent"], "adapt_goldens_dir: absent does not exist"),
        (["--adapt-goldens-dir=taken"], "adapt_goldens_dir: taken is no directory"),
        (["--adapt-inject=RT01"], "--adapt-inject=RT01 needs --adapt-target=builtin"),
        (["--adapt-inject=RT01", "--adapt-goldens=observe"], "nothing is recorded of a target with a fault"),
        (["--adapt-reference=nope:"], "unknown target 'nope:'"),
        (["--adapt-matrix=gitlab"], "allowed: github"),
        (["--adapt-layouts="], "--adapt-layouts is empty; give it a value (LAYOUT[,..]), or leave it out"),
        (["--adapt-models", " "], "--adapt-models is empty"),
        (["--adapt-timeout="], "--adapt-timeout is empty"),
        (["--adapt-matrix="], "--adapt-matrix is empty"),
        (["--adapt-matrix=github", "--adapt-plan"], "--adapt-matrix and --adapt-plan each print something and stop"),
        (
            ["--adapt-precisions=fp32", "--adapt-precisions", "bf16"],
            "--adapt-precisions is given twice, as 'fp32' and as 'bf16'; give it once",
        ),
        (["--adapt-contexts=8192", "--adapt-models=qwen3-moe-odd"], "has 4352 positions"),
        (
            ["--adapt-contexts=4096,15", "--adapt-models=needle-llama"],
            "--adapt-contexts=15: model needle-llama is asked nothing in so short a context; give 16 or more",
        ),
        (
            ["--adapt-prompt=random-36"],
            "--adapt-prompt: no model of this run has a prompt 'random-36' (did you mean random-3",
        ),
        (["--adapt-prompt=nosuch"], "has a prompt 'nosuch'; there are random-1, random-37, "),
        (
            ["--adapt-prompt=random-37:38"],
            "--adapt-prompt=random-37:38: the prompt has 37 tokens; give at most so many",
        ),
        (["--adapt-contexts=1023", "--adapt-models=needle-mixtral"], "give 1024 or more"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_4(folder: Folder, args: list[str], message: str) -> None:
    (folder.path / "taken").write_text("a file")
    (folder.path / "empty").mkdir()
    for name, config in {
        "deep": "[" * 200_000,
        "wordless": "{}",
        "textual": '{"vocab_size": 331, "num_attention_heads": "many"}',
    }.items():
        (folder.path / name).mkdir()
        (folder.path / name / "config.json").write_text(config)
    result = folder.run("Echo", *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.errlines if line.startswith("ERROR:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in result.stderr.str()
    assert not (folder.path / ".adapt" / "report").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nope", "unknown target 'nope'"),
        ("py:targets", "write py:module:Class"),
        ("py:targets:Ech", "did you mean Echo?"),
        ("py:absent:Target", "importing absent failed: ModuleNotFoundError"),
        ("openai:", "openai"),
        ("cmd:serve {model}", "lacks {port}"),
        ("openai:http://127.0.0.1:1/v1", "name it with --adapt-models"),
    ],
)
def test_a_wrong_target_is_one_line_and_exit_code_4(folder: Folder, spec: str, message: str) -> None:
    result = folder.run_bare(f"--adapt-target={spec}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in "\n".join(result.errlines)
    assert "Traceback" not in result.stderr.str()


def test_recording_is_refused_in_ci(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = folder.run("Echo", "--adapt-goldens=new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "is refused in CI" in "\n".join(result.errlines)


@pytest.mark.parametrize("variable", ["ADAPT_LAYOUTS", "ADAPT_PLAN", "ADAPT_START_TIMEOUT"])
def test_an_empty_variable_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "")
    result = folder.run("Echo", "--co")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"{variable} is empty" in "\n".join(result.errlines)


def test_an_empty_target_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    result = folder.run_bare("--adapt-target=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--adapt-target is empty; give it a value (SPEC), or leave it out" in "\n".join(result.errlines)
    monkeypatch.setenv("ADAPT_TARGET", "")
    assert folder.run_bare().ret == pytest.ExitCode.USAGE_ERROR
    monkeypatch.setenv("ADAPT_LAYOUTS", "")
    monkeypatch.delenv("ADAPT_TARGET")
    assert folder.run_bare().ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_the_same_value_twice_and_an_overridden_ini_line_are_no_contradiction(folder: Folder) -> None:
    folder.pytester.makeini("[pytest]\naddopts = --adapt-precisions=bf16\n")
    twice = ("--adapt-precisions=fp32", "--adapt-precisions=fp32")
    assert folder.run("Echo", *twice, "--co", "-q").ret == 0


def test_an_option_without_a_target_is_refused(folder: Folder) -> None:
    result = folder.run_subprocess("--adapt-precisions=fp32")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--adapt-precisions does nothing without --adapt-target" in result.stderr.str()


def test_header_names_target_profile_and_every_variable(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPT_API_KEY", "hunter2")
    monkeypatch.setenv("ADAPT_PROFIL", "x-secret")
    monkeypatch.setenv("ADAPT_CONCURRENCY", "3")
    folder.pytester.makepyfile(test_it="def test_it(target): pass")
    result = folder.run("Echo", "--adapt-precisions=fp32", "test_it.py")
    lines = [line for line in result.outlines if line.startswith("adapt")]
    header = lines[:2]
    assert header[0] == f"adapt {_version()}: target py:targets:Echo, profile smoke, requires engine"
    assert "precisions=fp32" in header[1]
    assert "ADAPT_API_KEY=***" in header[1]
    assert "ADAPT_CONCURRENCY=3" in header[1]
    assert "ADAPT_PROFIL (unknown, did you mean ADAPT_PROFILE?)" in header[1]
    quiet = folder.run_bare(*("--adapt-target=py:targets:Echo", "-q", "--co", "."))
    assert "nothing reads the variable ADAPT_PROFIL; did you mean ADAPT_PROFILE?" in quiet.stdout.str()
    text = result.stdout.str()
    assert "hunter2" not in text
    assert "x-secret" not in text


def _version() -> str:
    from pytest_adapt import __version__

    return __version__


def test_unknown_variables() -> None:
    known = {option.variable for option in OPTIONS if option.command_line}
    assert unknown_variables(dict.fromkeys(known, "1")) == {}
    engine = {"ADAPT_ENGINE_ISA": "avx2", "ADAPT_ENGINE_REQUIRE_NATIVE": "1"}
    assert unknown_variables(engine) == {} and "ADAPT_ENGINE_NATIVE" in unknown_variables({"ADAPT_ENGINE_NATIVE": "1"})
    assert unknown_variables({"ADAPT_TARGE": "x", "PATH": "y"}) == {"ADAPT_TARGE": "ADAPT_TARGET"}


def test_settings_give_their_own_command_line() -> None:
    sources = {"target": "environment", "precisions": "command line", "profile": "ini file", "report": "command line"}
    settings = Settings("hf:", precisions=("fp32", "bf16"), profile="full", report="out", sources=sources)
    assert settings.arguments() == ["--adapt-target=hf:", "--adapt-precisions=fp32,bf16"]


@pytest.mark.parametrize(("value", "text"), [(("random-37", 0), "random-37"), (("random-37", 5), "random-37:5")])
def test_a_prompt_is_written_as_it_may_be_given(folder: Folder, value: tuple[str, int], text: str) -> None:
    settings = Settings("hf:", prompt=value, sources={"prompt": "command line"})
    assert settings.arguments() == [f"--adapt-prompt={text}"]
    models = ("--adapt-models=qwen3-moe-odd,smollm2", "--adapt-plan")
    assert folder.run("Echo", *settings.arguments(), *models).ret == 0


def test_help_lists_every_option_once(folder: Folder) -> None:
    result = folder.run_subprocess("--help", "--adapt-target=nonsense")
    text = result.stdout.str()
    assert result.ret == 0
    assert "adapt: LLM platform conformance:" in text
    for option in OPTIONS:
        assert len(re.findall(rf"^  {option.flag}[ =\n]", text, re.MULTILINE)) == option.command_line, option
        assert f"  {option.ini} (" in text


def test_markers_are_described(folder: Folder) -> None:
    text = folder.run_subprocess("--markers").stdout.str()
    assert "@pytest.mark.requirement(number, ...): numbers of the requirements" in text
    assert "@pytest.mark.adapt(rung=None, needs=(), features={}, profile='smoke', required=True, blocks=False" in text
    assert "@pytest.mark.adapt_serial: measures time" in text


def test_every_option_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "options.md").read_text()
    for option in OPTIONS:
        row = f"| `{option.flag}` |" if option.command_line else f"| ini `{option.ini}` |"
        assert row in page, option
        line = next(line for line in page.splitlines() if line.startswith(row))
        for choice in option.choices:
            assert f"`{choice}`" in line, (option.name, choice)
    assert page.count("\n| `--adapt-") == sum(option.command_line for option in OPTIONS)


def test_every_argument_of_the_mark_is_documented() -> None:
    from pytest_adapt.matrix import Mark

    page = (Path(__file__).resolve().parents[2] / "docs" / "writing-tests.md").read_text()
    for name in Mark.__dataclass_fields__:
        assert f"`{name}`" in page, name
