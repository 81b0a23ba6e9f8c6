"""Every --adapt-* option, its ini key and its environment variable, resolved once into one frozen Settings.

The command line wins over ``ADAPT_*``, that over the ini file, that over the default; Settings keeps where each
value came from. Standard library and pytest only: this module is imported in every pytest run.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.layout import LayoutError
from pytest_adapt.stash import WHOLE

__all__ = [
    "OPTIONS",
    "VARIABLES",
    "Option",
    "Settings",
    "add_options",
    "given_target",
    "read_settings",
    "refuse_contradictions",
    "refuse_lone_options",
    "shown_variables",
    "unknown_variables",
    "unwritable",
]

_PRECISIONS = ("fp32", "bf16", "fp16")
_OBSERVABLES = ("taps", "logits", "score", "topk", "text")


@dataclass(frozen=True)
class Option:
    """One setting under its three spellings: --adapt-NAME, adapt_NAME, ADAPT_NAME."""

    name: str
    """Stem, with underscores."""
    help: str
    default: Any = ""
    metavar: str = "VALUE"
    choices: tuple[str, ...] = ()
    """Allowed values (of each element, for a list)."""
    kind: str = "text"
    """text, list (comma separated), flag, seconds, or duration (90s, 10m, 1h)."""
    command_line: bool = True
    alone: str = ""
    """What the flag means without a value; "" where it needs one."""

    @property
    def flag(self) -> str:
        return f"--adapt-{self.name.replace('_', '-')}"

    @property
    def ini(self) -> str:
        return f"adapt_{self.name}"

    @property
    def variable(self) -> str:
        return f"ADAPT_{self.name.upper()}"


OPTIONS: tuple[Option, ...] = (
    Option(
        "target",
        "platform under test: builtin, hf:, openai:URL, 'cmd:SHELL LINE', py:module:Class, jsonl:COMMAND",
        metavar="SPEC",
    ),
    Option(
        "models", "models to run: names of the catalogue or checkpoint directories", (), "NAME|DIR[,..]", kind="list"
    ),
    Option(
        "layouts",
        "layouts to run (single, tp2.pp2.ep4), or strategies of strategies.json (tensor)",
        (),
        "LAYOUT[,..]",
        kind="list",
    ),
    Option("precisions", "precisions to run", (), "P[,..]", _PRECISIONS, kind="list"),
    Option("contexts", "context lengths to run, in tokens", (), "TOKENS[,..]", kind="list"),
    Option("prompt", "give tests this prompt only, or its first tokens", None, "NAME[:TOKENS]"),
    Option("profile", "how much runs", "day0", "PROFILE", ("smoke", "day0", "full")),
    Option(
        "require",
        "what the target must show; the default follows from its kind",
        "",
        "KIND",
        ("endpoint", "engine", "release"),
    ),
    Option("observables", "pretend that the target shows only these", (), "NAME[,..]", _OBSERVABLES, kind="list"),
    Option("mode", "mode of the built-in engine", "fast", "MODE", ("fast", "strict")),
    Option(
        "goldens",
        "compare with records (check), besides that record missing ones (new), changed ones (update) or the target's "
        "own answers (observe) for review, or do without",
        "check",
        "MODE",
        ("check", "new", "update", "observe", "off"),
    ),
    Option("goldens_dir", "directory of your own records", "", "DIR"),
    Option("reason", "why records change; needed by --adapt-goldens=update", "", "TEXT"),
    Option("reference", "judge against another target instead of the oracle", "", "SPEC"),
    Option(
        "time",
        "run what fits this time: cases that together cover the settings best; a selftest begins nothing new after it",
        0.0,
        "90s|10m|1h",
        kind="duration",
    ),
    Option("strength", "settings that must meet somewhere in a time box", "2", "N", ("2", "3")),
    Option("op", "repeat one case of one operator, as a failure of the suite operators prints it", "", "CASE"),
    Option("inject", "put one fault into the built-in engine", "", "ID"),
    Option(
        "gate",
        "compare what the target costs with a baseline, in place of the suites: paired times, instructions, or both",
        "",
        "TIER",
        ("times", "instructions", "all"),
        alone="times",
    ),
    Option("baseline", "what --adapt-gate compares with; pin it", "", "GIT REF|FILE.whl|SPEC"),
    Option(
        "gate_build",
        "shell line that builds one side of a git ref ({source}, {site}); default: pip, each project of the repository",
        "",
        "SHELL LINE",
        command_line=False,
    ),
    Option("timeout", "seconds that one item may wait for the target", 600.0, "SECONDS", kind="seconds"),
    Option("report", "directory of report.json; default .adapt/report under rootdir", "", "DIR"),
    Option("dump", "write the answers of failing items to this directory", "", "DIR"),
    Option(
        "selftest",
        "try the judge itself: put faults into the built-in engine and see which suite is red",
        "",
        "ID,KIND*",
        alone="all",
    ),
    Option("plan", "print deployments, requests, tokens and estimated minutes, and stop", False, kind="flag"),
    Option("matrix", "print the jobs of a CI matrix as JSON, and stop", "", "FORMAT", ("github",)),
    Option("waivers", "file of known failures: owner, link, scope, expiry", "", "FILE", command_line=False),
)
# Read by target adapters, not by the plugin.
VARIABLES: tuple[str, ...] = (
    "ADAPT_API_KEY",
    "ADAPT_START_TIMEOUT",
    "ADAPT_REQUEST_TIMEOUT",
    "ADAPT_CONCURRENCY",
    "ADAPT_PEAK_GBS",
    "ADAPT_PEAK_GFLOPS",
)
_SELFTEST = ("target", "selftest", "precisions", "observables", "time")
"""Settings that a selftest goes by."""
# An empty key is no key.
_NUMBERS = VARIABLES[1:]
# The built-in engine's own, and its build's.
_ENGINE = ("ADAPT_ENGINE_ISA", "ADAPT_ENGINE_REQUIRE_NATIVE")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Settings:
    """The resolved options. Empty tuples and strings leave the choice to the profile and the target."""

    target: str
    models: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    contexts: tuple[int, ...] = ()
    prompt: tuple[str, int] | None = None
    """Name and number of tokens (0 for all) of the only prompt."""
    profile: str = "day0"
    require: str = ""
    observables: tuple[str, ...] = ()
    mode: str = "fast"
    goldens: str = "check"
    goldens_dir: str = ""
    reason: str = ""
    reference: str = ""
    time: float = 0.0
    """Seconds that a run may take; 0 for no limit."""
    strength: int = 2
    op: str = ""
    inject: str = ""
    timeout: float = 600.0
    report: str = ""
    dump: str = ""
    gate: str = ""
    """times, instructions or all; "" for no gate."""
    baseline: str = ""
    gate_build: str = ""
    selftest: str = ""
    """Faults (ids, or patterns such as RT*) whose detection is measured; "all" for every one, "" for none."""
    plan: bool = False
    matrix: str = ""
    waivers: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Name -> command line, environment or ini file, for each value that is not the default."""

    def arguments(self, *, without: tuple[str, ...] = ()) -> list[str]:
        """Command-line arguments that give these settings again (what a report needs to repeat a case)."""
        skipped = {"plan", "matrix", "report", "dump", "waivers", "selftest", "gate_build", *without}
        words = []
        for option in OPTIONS:
            value = getattr(self, option.name)
            if option.name == "prompt" and value is not None:
                value = f"{value[0]}:{value[1]}" if value[1] else value[0]
            if option.name in skipped or self.sources.get(option.name) in (None, "ini file"):
                continue
            text = (
                ",".join(map(str, value))
                if isinstance(value, tuple)
                else f"{value:g}"
                if option.kind in ("seconds", "duration")
                else str(value)
            )
            words.append(f"{option.flag}={text}")
        return words


def add_options(parser: pytest.Parser) -> None:
    """Declare the option group and the ini keys."""
    group = parser.getgroup("adapt", "adapt: LLM platform conformance")
    for option in OPTIONS:
        default = "" if option.kind == "flag" else f" (default: {option.default:g})" if option.kind == "seconds" else ""
        if option.choices and option.kind == "text" and option.default:
            default = f" (default: {option.default})"
        values = f": {'|'.join(option.choices)}" if option.choices else ""
        text = f"{option.help}{values}{default}"
        if option.command_line and option.kind == "flag":
            group.addoption(option.flag, dest=option.ini, action="store_true", default=None, help=text)
        elif option.command_line and option.alone:
            group.addoption(
                option.flag,
                dest=option.ini,
                metavar=option.metavar,
                default=None,
                help=text,
                nargs="?",
                const=option.alone,
            )
        elif option.command_line:
            group.addoption(option.flag, dest=option.ini, metavar=option.metavar, default=None, help=text)
        parser.addini(option.ini, f"same as {option.flag}" if option.command_line else text, default=None)


def given_target(config: pytest.Config, namespace: Any = None) -> str:
    """The target of this run, "" where there is none (the plugin then stays inert)."""
    return str(_raw(config, OPTIONS[0], namespace)[0] or "")


def refuse_lone_options(config: pytest.Config) -> None:
    """Raises pytest.UsageError for an --adapt-* option without a target, which would do nothing."""
    for option in OPTIONS:
        if option.command_line and getattr(config.option, option.ini, None) is not None and not given_target(config):
            raise pytest.UsageError(
                f"{option.flag} does nothing without --adapt-target=SPEC (builtin, hf:, openai:URL ...)"
            )


def refuse_contradictions(config: pytest.Config) -> None:
    """Raises pytest.UsageError for a value that is there and empty (a shell variable that was not set would silently
    run the default), for an option given twice with different values, and for two ways to print and stop."""
    for option in OPTIONS:
        if not option.command_line:
            continue
        value = getattr(config.option, option.ini, None)
        spelling = option.flag
        if value is None:
            value, spelling = os.environ.get(option.variable), option.variable
        if isinstance(value, str) and not value.strip() and (given_target(config) or option is OPTIONS[0]):
            raise pytest.UsageError(f"{spelling} is empty; give it a value ({option.metavar}), or leave it out")
    if given_target(config):
        for name in _NUMBERS:
            if os.environ.get(name, "1").strip() == "":
                raise pytest.UsageError(f"{name} is empty; give it a number, or unset it")
    given: dict[str, str] = {}
    for flag, value in _typed(config.invocation_params.args):
        if given.setdefault(flag, value) != value:
            raise pytest.UsageError(f"{flag} is given twice, as {given[flag]!r} and as {value!r}; give it once")
    if config.option.adapt_matrix and config.option.adapt_plan:
        raise pytest.UsageError("--adapt-matrix and --adapt-plan each print something and stop; give one of them")


def _typed(arguments: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """(flag, value) of our options as they were typed, addopts left out: those are there to be overridden."""
    flags = {option.flag for option in OPTIONS if option.command_line and option.kind != "flag"}
    words = [str(word) for word in arguments]
    for index, word in enumerate(words):
        if word == "--":
            return
        flag, equals, value = word.partition("=")
        if flag in flags:
            yield flag, value if equals else "".join(words[index + 1 : index + 2])


def read_settings(config: pytest.Config) -> Settings:
    """Resolve every option. Raises pytest.UsageError naming the value, where it came from and what is allowed."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in OPTIONS:
        raw, source = _raw(config, option)
        if raw in (None, ""):
            values[option.name] = option.default
            continue
        values[option.name] = _READERS[option.kind](option, raw, source)
        sources[option.name] = source
    values["layouts"] = _layouts(values["layouts"])
    values["strength"] = int(values["strength"])
    values["contexts"] = tuple(_context(text) for text in values["contexts"])
    values["prompt"] = _prompt(values["prompt"])
    settings = Settings(**values, sources=sources)
    _check_goldens(settings, config)
    _check_gate(settings)
    _check_selftest(settings, config)
    for name in ("report", "dump"):
        value = getattr(settings, name)
        if value and (problem := unwritable(Path(config.invocation_params.dir) / value)):
            raise pytest.UsageError(f"--adapt-{name}={value}: {problem}; name a directory that can be made and written")
    if not hasattr(config, "workerinput"):
        for name, meant in unknown_variables(os.environ).items():
            hint = f"; did you mean {meant}?" if meant else ""
            # Not only in the header: -q hides it, and a mistyped variable changes what is judged.
            config.issue_config_time_warning(
                pytest.PytestWarning(f"adapt: nothing reads the variable {name}{hint}"), stacklevel=2
            )
    return settings


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """ADAPT_* variables that nothing reads, each with the name that was probably meant ("" if none is near)."""
    known = {option.variable for option in OPTIONS if option.command_line} | {*VARIABLES, *_ENGINE}
    found = {}
    for name in sorted(environment):
        if name.startswith("ADAPT_") and name not in known:
            found[name] = next(iter(difflib.get_close_matches(name, sorted(known), 1)), "")
    return found


def shown_variables(environment: Mapping[str, str]) -> list[str]:
    """``NAME=value`` of every ADAPT_* variable, for the header; values of secrets and of unknown names are hidden."""
    unknown = unknown_variables(environment)
    shown = []
    for name in sorted(environment):
        if not name.startswith("ADAPT_"):
            continue
        if name in unknown:
            hint = f", did you mean {unknown[name]}?" if unknown[name] else ""
            shown.append(f"{name} (unknown{hint})")
        else:
            shown.append(f"{name}={'***' if any(word in name for word in _SECRET) else environment[name]}")
    return shown


def _raw(config: pytest.Config, option: Option, namespace: Any = None) -> tuple[Any, str]:
    """(value, source) of the first place that gives one."""
    if option.command_line:
        value = getattr(config.option if namespace is None else namespace, option.ini, None)
        if value is not None:
            return value, "command line"
        value = os.environ.get(option.variable)
        if value:
            return value, "environment"
    value = config.getini(option.ini)
    return (value, "ini file") if value else (None, "default")


def _text(option: Option, raw: Any, source: str) -> str:
    text = str(raw).strip()
    _allowed(option, text, source)
    return text


def _list(option: Option, raw: Any, source: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(part.strip() for part in str(raw).replace("\n", ",").split(",") if part.strip()))
    for part in parts:
        _allowed(option, part, source)
    if not parts:
        raise pytest.UsageError(f"{_spelling(option, source)}={raw!r} names nothing; write {option.metavar}")
    return parts


def _flag(option: Option, raw: Any, source: str) -> bool:
    if isinstance(raw, bool):
        return raw
    meanings = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if str(raw).strip().lower() not in meanings:
        raise pytest.UsageError(
            f"{_spelling(option, source)}={raw!r} is no truth value; write one of {', '.join(meanings)}"
        )
    return meanings[str(raw).strip().lower()]


def _seconds(option: Option, raw: Any, source: str) -> float:
    try:
        number = float(raw)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise pytest.UsageError(f"{_spelling(option, source)}={raw!r} is not a positive number of seconds")
    return number


def _duration(option: Option, raw: Any, source: str) -> float:
    from pytest_adapt.covering import read_duration

    try:
        return read_duration(str(raw))
    except ValueError as error:
        raise pytest.UsageError(f"{_spelling(option, source)}: {error}") from None


_READERS: Mapping[str, Callable[[Option, Any, str], Any]] = {
    "text": _text,
    "list": _list,
    "flag": _flag,
    "seconds": _seconds,
    "duration": _duration,
}


def _allowed(option: Option, value: str, source: str) -> None:
    if not option.choices or value in option.choices:
        return
    near = difflib.get_close_matches(value, option.choices, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise pytest.UsageError(
        f"{_spelling(option, source)}: {value!r} is not allowed{hint}; allowed: {', '.join(option.choices)}"
    )


def _spelling(option: Option, source: str) -> str:
    return {"environment": option.variable, "ini file": f"ini {option.ini}"}.get(source, option.flag)


def _layouts(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words:
        return ()
    from pytest_adapt.strategies import expand

    try:
        return expand(words)
    except LayoutError as error:
        raise pytest.UsageError(f"--adapt-layouts: {error}") from None


def _context(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1 << 24:
        raise pytest.UsageError(f"--adapt-contexts: {text!r} is not a number of tokens (1 to {1 << 24})")
    return int(text)


def _prompt(text: str | None) -> tuple[str, int] | None:
    """``random-150:17`` as name and number of tokens; ``random-150`` for all of them."""
    if text is None:
        return None
    name, colon, count = text.rpartition(":") if ":" in text else (text, "", "")
    if not name or (colon and not (count.isdecimal() and int(count) > 0)):
        raise pytest.UsageError(f"--adapt-prompt: {text!r} is no prompt; write NAME or NAME:TOKENS, as random-150:17")
    return name, int(count or 0)


def unwritable(path: Path) -> str:
    """Why a directory could not be made or written, to be said before a run rather than after it; "" where it can."""
    path = path.absolute()
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return ""
    return f"{nearest} {'may not be written' if nearest.is_dir() else 'is a file'}"


def _check_selftest(settings: Settings, config: pytest.Config) -> None:
    """A selftest has models, layouts and lengths of its own: what would narrow the suites is refused, not ignored."""
    if not settings.selftest:
        return
    if not [word for word in settings.selftest.split(",") if word.strip()]:
        raise pytest.UsageError(f"--adapt-selftest={settings.selftest!r} names nothing; write ID,KIND*, or no value")
    refused = [
        _spelling(option, source)
        for option in OPTIONS
        if option.name not in _SELFTEST and (source := settings.sources.get(option.name, "ini file")) != "ini file"
    ]
    if not hasattr(config, "workerinput"):
        refused += [f"the path {path}" for path in config.known_args_namespace.file_or_dir]
    if refused:
        raise pytest.UsageError(
            f"--adapt-selftest does not take {', '.join(refused)}: it chooses by --adapt-selftest=ID,KIND*, "
            f"--adapt-precisions, --adapt-observables, --adapt-time, -k and -n (--collect-only lists its items)"
        )


def _check_gate(settings: Settings) -> None:
    if settings.gate and not settings.baseline:
        raise pytest.UsageError(
            "--adapt-gate needs --adapt-baseline=REF (a git tag or commit), FILE.whl or SPEC: what to compare with"
        )
    if settings.baseline and not settings.gate and settings.sources.get("baseline") != "ini file":
        raise pytest.UsageError(f"--adapt-baseline={settings.baseline} does nothing without --adapt-gate")


def _check_goldens(settings: Settings, config: pytest.Config) -> None:
    mode = settings.goldens
    if mode in ("new", "update") and os.environ.get("CI"):
        raise pytest.UsageError(
            f"--adapt-goldens={mode} is refused in CI (the variable CI is set); record on a desk and review"
        )
    if mode == "update" and not settings.reason:
        raise pytest.UsageError("--adapt-goldens=update needs --adapt-reason='why the records change'")
    if mode == "update" and config.stash.get(WHOLE, False) and not config.option.keyword:
        raise pytest.UsageError(
            "--adapt-goldens=update needs a selection (-k, paths or case ids): say which records change"
        )
    if settings.inject and mode in ("new", "update", "observe"):
        raise pytest.UsageError(
            f"--adapt-goldens={mode} with --adapt-inject={settings.inject}: nothing is recorded of a target with a "
            "fault; give one of them"
        )
    if settings.inject and settings.target.partition(":")[0].partition("[")[0] != "builtin":
        raise pytest.UsageError(f"--adapt-inject={settings.inject} needs --adapt-target=builtin, not {settings.target}")
    for name in ("waivers", "goldens_dir"):
        value = getattr(settings, name)
        path = Path(config.rootpath) / value
        if value and not path.exists():
            raise pytest.UsageError(f"adapt_{name}: {value} does not exist (paths start at {config.rootpath})")
        if value and path.is_dir() is not (name == "goldens_dir"):
            what = "no directory" if name == "goldens_dir" else "a directory, and no file"
            raise pytest.UsageError(f"adapt_{name}: {value} is {what} (paths start at {config.rootpath})")
