"""From a target's spec (``hf:``, ``openai:http://...``, ``py:module:Class`` ...) to a Target.

A spec is ``scheme[options]:argument``; options are ``name=value`` pairs joined by commas, a list inside a value
is joined by ``+`` (``cmd[precisions=fp32+bf16]:serve {model}``). Resolving a spec imports nothing but the standard
library (and, for ``py:``, the user's own module); `TargetSpec.create` imports the adapter.

Other plugins add schemes with the hook ``pytest_adapt_register_targets(registry)``::

    def pytest_adapt_register_targets(registry):
        registry.register("acme", "acme_adapt:Target", requires=("acme",), install="pip install acme")
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_adapt.layout import AXES
from pytest_adapt.target.protocol import OBSERVABLES, PRECISIONS, TargetError
from pytest_adapt.target.template import Template

if TYPE_CHECKING:
    from pytest_adapt.target.protocol import Target

__all__ = ["Registry", "TargetDefaults", "TargetSettings", "TargetSpec", "builtin_registry", "resolve"]

KINDS = ("engine", "endpoint")
SHAPE_CLASSES = ("odd", "wide", "aligned", "real", "needle")
_SPEC = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9_-]*)(?:\[(?P<options>[^\]]*)\])?(?::(?P<argument>.*))?", re.DOTALL)


@dataclass(frozen=True)
class TargetDefaults:
    """What a kind of target can do as far as is known before it is opened: enough to plan a run."""

    kind: str = "engine"
    """engine (white box) or endpoint (a server): decides what is required."""
    precisions: tuple[str, ...] = PRECISIONS
    features: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Feature -> settings that may be asked for in ``Deployment.features`` (a plan; ``Info.features`` is final)."""
    shape_classes: tuple[str, ...] = SHAPE_CLASSES
    """Classes of conformance models that it can serve: odd, wide, aligned, real, needle."""
    observables: tuple[str, ...] = ("text",)
    axes: tuple[str, ...] = ()
    """Layout axes that can be asked for (tp, pp, ep, dp); none: one rank only."""


@dataclass(frozen=True)
class TargetSettings:
    """What every adapter may need to know about the run. Times are seconds."""

    rootdir: Path = field(default_factory=Path.cwd)
    """Where user modules are found, and where ``.adapt/logs/`` lies."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options in brackets of the spec."""
    mode: str = "fast"
    """fast or strict; only the built-in engine has both."""
    start_timeout: float = 600.0
    """A server or child process must be ready within this time (ADAPT_START_TIMEOUT)."""
    request_timeout: float = 600.0
    """One request must be answered within this time (ADAPT_REQUEST_TIMEOUT)."""
    stop_grace: float = 10.0
    """Between SIGTERM and SIGKILL."""
    concurrency: int = 4
    """Requests in flight towards a server (ADAPT_CONCURRENCY)."""

    @property
    def log_dir(self) -> Path:
        return self.rootdir / ".adapt" / "logs"


@dataclass(frozen=True)
class TargetSpec:
    """A resolved spec: what to open, and what it can do as far as is known before opening it."""

    text: str
    scheme: str
    argument: str
    adapter: str
    """``module:Class`` of the adapter; its constructor takes (argument, settings)."""
    defaults: TargetDefaults
    settings: TargetSettings = field(default_factory=TargetSettings)

    @property
    def kind(self) -> str:
        return self.defaults.kind

    @property
    def precisions(self) -> tuple[str, ...]:
        return self.defaults.precisions

    @property
    def features(self) -> Mapping[str, tuple[int, ...]]:
        return self.defaults.features

    @property
    def shape_classes(self) -> tuple[str, ...]:
        return self.defaults.shape_classes

    @property
    def axes(self) -> tuple[str, ...]:
        return self.defaults.axes

    def create(self) -> Target:
        """A new adapter, nothing opened yet. Raises TargetError where its module cannot be imported."""
        adapter: Any = _load(self.adapter, f"target {self.scheme}:")
        target: Target = adapter(self.argument, self.settings)
        return target


@dataclass(frozen=True)
class _Scheme:
    adapter: str
    defaults: TargetDefaults
    requires: tuple[str, ...]
    install: str
    options: tuple[str, ...]
    usage: str


class Registry:
    """Schemes by name. Registering is cheap: an adapter is named, not imported."""

    def __init__(self) -> None:
        self._schemes: dict[str, _Scheme] = {}

    def register(
        self,
        scheme: str,
        adapter: str,
        *,
        defaults: TargetDefaults | None = None,
        requires: tuple[str, ...] = (),
        install: str = "",
        options: tuple[str, ...] = (),
        usage: str = "",
    ) -> None:
        """Add a scheme. ``adapter`` is ``module:Class``, called with (argument, `TargetSettings`).

        ``requires`` names importable modules without which the scheme is refused, ``install`` is the command
        that provides them, ``options`` the names allowed in brackets, ``usage`` one example spec.
        Raises ValueError for a scheme that exists already.
        """
        if scheme in self._schemes:
            raise ValueError(f"target scheme {scheme!r} is registered already (by {self._schemes[scheme].adapter})")
        entry = _Scheme(adapter, defaults or TargetDefaults(), requires, install, options, usage or f"{scheme}:")
        self._schemes[scheme] = entry

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(sorted(self._schemes))

    def resolve(self, spec: str, **settings: Any) -> TargetSpec:
        """Resolve ``spec``; ``settings`` are fields of `TargetSettings` (those left out come from ADAPT_* variables).

        Raises TargetError (one line) for an unknown scheme or option, a missing package, an argument of the
        wrong form.
        """
        found = _SPEC.fullmatch(spec.strip())
        name = found["scheme"].lower() if found else ""
        if found is None or name not in self._schemes:
            raise TargetError(self._unknown(spec, name))
        entry = self._schemes[name]
        argument = (found["argument"] or "").strip()
        options = _options(spec, found["options"] or "", entry.options)
        missing = [module for module in entry.requires if importlib.util.find_spec(module) is None]
        if missing:
            way_out = f"; install it with: {entry.install}" if entry.install else ""
            what = f"{' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
            raise TargetError(f"target {spec!r} needs {what}{way_out}")
        made = replace(_from_environment(), **settings)
        made = replace(made, options={**made.options, **options})
        resolved = TargetSpec(spec, name, argument, entry.adapter, entry.defaults, made)
        return _refined(resolved, entry.usage)

    def _unknown(self, spec: str, name: str) -> str:
        known = ", ".join(self._schemes[scheme].usage for scheme in self.schemes)
        if name in ("http", "https"):
            return f"a target names its scheme first: openai:URL for a server that runs; known targets: {known}"
        near = difflib.get_close_matches(name or spec, self._schemes, 1)
        hint = f" (did you mean {self._schemes[near[0]].usage}?)" if near else ""
        return f"unknown target {spec!r}{hint}; known targets: {known}"


def builtin_registry() -> Registry:
    """A registry with the schemes that the plugin ships."""
    registry = Registry()
    here = "pytest_adapt.target"
    chunks = {"prefill_chunk": (0, 1, 7, 16, 64, 512)}
    everything = ("taps", "logits", "score", "topk", "text")
    registry.register(
        "builtin",
        f"{here}.builtin:BuiltinTarget",
        defaults=TargetDefaults(
            features={
                **chunks,
                "max_waiting": (0, 4),
                "native": (0, 1),
                "page_size": (0, 5),
                "preemption": (0, 1),
                "prefix_cache": (0, 1),
                "processes": (0, 1),
                "step_tokens": (0, 7, 16, 64),
            },
            observables=everything,
            axes=AXES,
        ),
        requires=("adapt_engine", "torch"),
        install="pip install 'pytest-adapt[engine]' (from a checkout: pip install . ./engine)",
        options=("communicator",),
        usage="builtin",
    )
    registry.register(
        "hf",
        f"{here}.hf:HfTarget",
        defaults=TargetDefaults(features={"batch": (0, 4), **chunks}, observables=everything),
        requires=("torch", "transformers"),
        install="pip install 'pytest-adapt[hf]'",
        options=("device", "attn"),
        usage="hf:",
    )
    registry.register("py", f"{here}.py:PyTarget", usage="py:module:Class")
    registry.register("jsonl", f"{here}.jsonl:JsonlTarget", options=("precisions",), usage="jsonl:COMMAND")
    server = TargetDefaults(
        kind="endpoint",
        precisions=("bf16",),
        shape_classes=("aligned", "real", "needle"),
        observables=("score", "topk", "text"),
    )
    registry.register(
        "openai", f"{here}.openai:OpenAITarget", defaults=server, options=("precisions", "model"), usage="openai:URL"
    )
    registry.register(
        "cmd",
        f"{here}.cmd:CmdTarget",
        defaults=server,
        options=("precisions", "model"),
        usage="'cmd:SHELL LINE with {model} {port}'",
    )
    return registry


def resolve(spec: str, *, registry: Registry | None = None, **settings: Any) -> TargetSpec:
    """Resolve ``spec`` with the shipped schemes, or with ``registry``; see `Registry.resolve`."""
    return (registry or builtin_registry()).resolve(spec, **settings)


def _options(spec: str, text: str, allowed: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name.strip() not in allowed:
            known = f"known options: {', '.join(allowed)}" if allowed else "this target has no options"
            raise TargetError(f"target {spec!r}: option {part!r} is not name=value of a known option; {known}")
        options[name.strip()] = value.strip()
    return options


def _refined(spec: TargetSpec, usage: str) -> TargetSpec:
    """Defaults that depend on the argument or on the options of the spec."""
    defaults = spec.defaults
    if spec.scheme == "py":
        defaults = _python_defaults(spec)
    elif spec.scheme in ("jsonl", "cmd", "openai") and not spec.argument:
        raise TargetError(f"target {spec.text!r} says nothing after the colon; write {usage}")
    elif spec.scheme == "openai":
        _check_url(spec.argument)
    elif spec.scheme == "cmd":
        template = Template(spec.argument)
        defaults = replace(defaults, axes=template.axes, precisions=template.precisions or defaults.precisions)
    if "precisions" in spec.settings.options:
        defaults = replace(defaults, precisions=_precisions(spec))
    return replace(spec, defaults=defaults)


def _check_url(url: str) -> None:
    """Refuse what is no plain URL, without printing what may be a secret."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TargetError("target openai: the URL must read http://host:port/v1 or https://host/v1")
    if parts.username or parts.password or parts.query:
        raise TargetError(
            "target openai: the URL carries a user, a password or a query; give the key in ADAPT_API_KEY instead"
        )


def _precisions(spec: TargetSpec) -> tuple[str, ...]:
    wanted = tuple(filter(None, spec.settings.options["precisions"].split("+")))
    wrong = [name for name in wanted if name not in PRECISIONS]
    if wrong or not wanted:
        shown = ", ".join(wrong) or "nothing"
        raise TargetError(
            f"target {spec.text!r}: precisions names {shown}; valid ones are {'+'.join(PRECISIONS)} (joined by +)"
        )
    return wanted


def _python_defaults(spec: TargetSpec) -> TargetDefaults:
    """Import the user's class (from rootdir) and read its optional ``defaults``: a mapping, or a function of one."""
    module, colon, name = spec.argument.partition(":")
    if not (module and colon and name):
        raise TargetError(f"target {spec.text!r}: write py:module:Class (for example py:my_platform.adapter:Target)")
    root = str(spec.settings.rootdir)
    if root not in sys.path:
        sys.path.insert(0, root)
    adapter: Any = _load(f"{module}:{name}", f"target {spec.text!r}")
    lacking = [method for method in ("open", "run", "close") if not callable(getattr(adapter, method, None))]
    if lacking:
        raise TargetError(
            f"target {spec.text!r}: {name} lacks {', '.join(lacking)}; "
            "a target has open, run and close (docs/targets.md)"
        )
    given = getattr(adapter, "defaults", {})
    try:
        given = given() if callable(given) else given
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise TargetError(f"target {spec.text!r}: defaults raised {type(error).__name__}: {error}") from error
    if isinstance(given, TargetDefaults):
        return given
    if not isinstance(given, Mapping):
        raise TargetError(f"target {spec.text!r}: defaults is {type(given).__name__}, expected a mapping")
    known = {item.name for item in fields(TargetDefaults)}
    wrong = sorted(set(given) - known)
    if wrong:
        raise TargetError(
            f"target {spec.text!r}: defaults has {', '.join(wrong)}; known keys: {', '.join(sorted(known))}"
        )
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    made = TargetDefaults(**values)
    if made.kind not in KINDS:
        raise TargetError(f"target {spec.text!r}: defaults kind {made.kind!r} is none of {', '.join(KINDS)}")
    for key, allowed in (("precisions", PRECISIONS), ("shape_classes", SHAPE_CLASSES), ("observables", OBSERVABLES)):
        names = getattr(made, key)
        if isinstance(names, str) or not isinstance(names, Collection) or not set(names) <= set(allowed):
            raise TargetError(f"target {spec.text!r}: defaults {key} is {names!r}, expected some of {allowed}")
    return made


def _load(path: str, who: str) -> object:
    module, _, name = path.partition(":")
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything while it is imported
        raise TargetError(f"{who}: importing {module} failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(loaded, name)
    except AttributeError:
        near = difflib.get_close_matches(name, dir(loaded), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TargetError(f"{who}: module {module} has no {name}{hint}") from None


def _from_environment() -> TargetSettings:
    values: dict[str, Any] = {}
    for name in ("start_timeout", "request_timeout", "concurrency"):
        variable = f"ADAPT_{name.upper()}"
        text = os.environ.get(variable)
        if not text:
            continue
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e7:
            raise TargetError(f"{variable}={text!r} is not a positive number")
        values[name] = max(1, int(number)) if name == "concurrency" else number
    return TargetSettings(**values)
