"""Axes, profiles, rows and case ids: which deployments a run judges, known without opening or importing anything.

A row is one (model, layout, precision, context); a test gets the projection of the rows on the axes whose fixtures
it asks for. Standard library and pytest only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_adapt.options import Settings

if TYPE_CHECKING:
    from pytest_adapt.models import ModelEntry
    from pytest_adapt.target.registry import TargetSpec

__all__ = [
    "AXES",
    "PROFILES",
    "TIERS",
    "Cell",
    "Mark",
    "Matrix",
    "Model",
    "Profile",
    "Take",
    "contexts_of",
    "declined",
    "github_jobs",
    "make_matrix",
    "read_mark",
]

AXES: tuple[str, ...] = ("model", "layout", "precision", "context_length")
PRECISIONS: tuple[str, ...] = ("fp32", "bf16", "fp16")
TIERS: tuple[str, ...] = ("counters", "times", "instructions")
"""Of the performance gate; the last two run only where it is asked for."""
RESERVE = 128
"""Tokens of output that a deployment accepts beyond its longest context."""
LEAST_CONTEXT = 512
"""Suites that have no context axis use prompts up to this length."""
APART = "needle"
"""Shape class of models that are made for some suites, and judged by those alone."""
_COUNTS: Mapping[str, int] = {
    "vocab_size": 8,
    "num_hidden_layers": 0,
    "num_attention_heads": 0,
    "num_key_value_heads": 0,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
    "max_position_embeddings": 0,
}
"""Numbers of a user's config.json that prompts and layouts are made from, with their least values. Those of least
value 0 may be absent; prompts leave out four special tokens, so that a smaller vocabulary has none."""


@dataclass(frozen=True)
class Take:
    """What a profile takes of one shape class."""

    precisions: tuple[str, ...]
    contexts: tuple[int, ...]
    """Of a model's contexts, the largest up to each of these bounds."""
    names: tuple[str, ...] = ()
    """Models; () for all of the class. --adapt-models takes others too."""
    prompts: int = 0
    """At most so many prompts of a model, the shortest first; 0 for all."""


@dataclass(frozen=True)
class Profile:
    """How much of what a model and a target offer is run."""

    classes: Mapping[str, Take]
    """By shape class, in the order in which they are judged."""
    other: Take
    """For directories, and for classes that the profile does not list."""
    both: bool = False
    """Whether a target that can serve odd models is given the aligned ones too."""


_COMMON = ("fp32", "bf16")
_ALL_CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
PROFILES: Mapping[str, Profile] = {
    "smoke": Profile(
        {
            "odd": Take(_COMMON, (64,), ("qwen3-moe-odd",)),
            "aligned": Take(_COMMON, (64,), ("qwen3-moe-aligned",)),
        },
        other=Take(_COMMON, (64,)),
    ),
    "day0": Profile(
        {
            "odd": Take(
                _COMMON,
                (512,),
                ("deepseek-v3-odd-neg", "deepseek-v3-odd-pos", "llama-odd", "mixtral-odd", "qwen3-moe-odd"),
            ),
            "aligned": Take(_COMMON, (512,)),
            "real": Take(("fp32",), (64,), ("smollm2", "smollm2-moe-equal"), prompts=2),
            "needle": Take(_COMMON, (1024, 4096, 16384)),
        },
        other=Take(_COMMON, (512,)),
    ),
    "full": Profile(
        {
            "odd": Take(PRECISIONS, _ALL_CONTEXTS),
            "aligned": Take(PRECISIONS, _ALL_CONTEXTS),
            "real": Take(PRECISIONS, _ALL_CONTEXTS),
            "needle": Take(PRECISIONS, (1024, 4096, 16384, 65536)),
        },
        other=Take(PRECISIONS, _ALL_CONTEXTS),
        both=True,
    ),
}


@dataclass(frozen=True)
class Model:
    """A model of this run: an entry of the catalogue, or a checkpoint directory of the user's."""

    name: str
    entry: ModelEntry | None
    directory: Path | None
    contexts: tuple[int, ...]
    precisions: tuple[str, ...]
    config: Mapping[str, Any] = field(hash=False, default_factory=dict)
    explicit: bool = False
    """Named by --adapt-models."""

    @property
    def shape_class(self) -> str:
        """Of the catalogue's entry; "" for a directory."""
        return self.entry.shape_class if self.entry else ""

    @cached_property
    def described(self) -> ModelEntry:
        """The catalogue's entry, or one that describes a directory."""
        from pytest_adapt.models import ModelEntry

        return self.entry or ModelEntry(
            # A fixed name: copies of one checkpoint get the same prompts.
            name="directory",
            family=str(self.config.get("model_type", "")),
            shape_class="real",
            kind="directory",
            config=self.config,
            prompts=("random", "boundary"),
            contexts=self.contexts,
            precisions=self.precisions,
            must_pass=(),
        )

    @property
    def max_position(self) -> int:
        """Positions that the configuration allows; 0 where it does not say."""
        return int(self.config.get("max_position_embeddings") or 0)


@dataclass(frozen=True)
class Mark:
    """The arguments of ``@pytest.mark.adapt``."""

    rung: str | None = None
    needs: tuple[str, ...] = ()
    """Observables of which any one can answer."""
    features: tuple[tuple[str, Any], ...] = ()
    """Feature -> the setting to deploy with (a number), or the settings that must be declared (a tuple)."""
    profile: str = "smoke"
    """The smallest profile in which the test runs."""
    required: bool = True
    blocks: bool = False
    """Whether the rest of its deployment is blocked when this item is red."""
    classes: tuple[str, ...] = ()
    """Shape classes; () for all but `APART`, "any" for all."""
    models: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    contexts: tuple[int, ...] = ()
    first: bool = False
    """Of the rows that are left, those of the first model only: what is judged does not depend on the model."""
    requests: int = 1
    """For --adapt-plan: requests per prompt."""
    tokens: int = 0
    """For --adapt-plan: longest prompt that is used; 0 for the context."""
    tier: str = ""
    """Of the performance gate: counters (in every run), or times or instructions (with --adapt-gate alone)."""

    @property
    def settings(self) -> tuple[tuple[str, int], ...]:
        """The features that the deployment itself is opened with."""
        return tuple((name, value) for name, value in self.features if isinstance(value, int))

    @property
    def taps(self) -> tuple[str, ...]:
        return ("*",) if self.needs == ("taps",) else ()


@dataclass(frozen=True)
class Cell:
    """The deployment of an item, before its checkpoint exists. Items of one cell share one opened target."""

    model: str
    layout: str = "single"
    precision: str = "fp32"
    taps: tuple[str, ...] = ()
    features: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        extra = [f"{name}={value}" for name, value in self.features] + (["taps"] if self.taps else [])
        return " ".join([self.model, self.layout, self.precision, *extra])


@dataclass(frozen=True)
class Matrix:
    """The rows of a run, in the order in which they are judged."""

    settings: Settings
    models: Mapping[str, Model]
    prompts: Mapping[str, int]
    """Model -> most prompts that a test gets; 0 for all."""
    rows: tuple[tuple[str, str, str, int], ...]
    """(model, layout, precision, context)."""
    layout_rows: tuple[tuple[str, str, str, int], ...] = ()
    """Rows of tests on the rung "layouts", which hold many ranks against what is known of one."""
    _cache: dict[Any, tuple[list[Any], list[str]]] = field(default_factory=dict, hash=False, compare=False, repr=False)

    @property
    def every_row(self) -> tuple[tuple[str, str, str, int], ...]:
        """Rows of all tests."""
        return self.rows + self.layout_rows

    def project(self, axes: tuple[str, ...], mark: Mark) -> tuple[list[Any], list[str]]:
        """(values, ids) for ``metafunc.parametrize``: the distinct projections of the rows that the mark allows."""
        rows = self.layout_rows if mark.rung == "layouts" else self.rows
        wanted = (mark.models, mark.layouts, mark.precisions, mark.contexts)
        key = (rows is self.rows, axes, mark.classes, *wanted, mark.first)
        if key not in self._cache:
            places = [AXES.index(axis) for axis in axes]
            taken = [
                row
                for row in rows
                if self._in_class(row[0], mark.classes)
                and all(not allowed or row[place] in allowed for place, allowed in enumerate(wanted))
            ]
            if mark.first:
                taken = [row for row in taken if row[0] == taken[0][0]]
            found = dict.fromkeys(tuple(row[place] for place in places) for row in taken)
            ids = ["-".join(map(str, values)) for values in found]
            self._cache[key] = ([values[0] for values in found] if len(axes) == 1 else list(found), ids)
        return self._cache[key]

    def _in_class(self, model: str, classes: tuple[str, ...]) -> bool:
        found = self.models[model].shape_class
        return found in classes or "any" in classes or not classes and found != APART

    def max_context(self, model: str) -> int:
        """``Deployment.max_context`` of a model: the same in all its cells, so that contexts share one deployment."""
        longest = max((row[3] for row in self.rows if row[0] == model), default=LEAST_CONTEXT)
        wanted = max(longest, LEAST_CONTEXT) + RESERVE
        limit = self.models[model].max_position if model in self.models else 0
        return min(wanted, limit) if limit else wanted

    def floor(self, model: str, context: int) -> int:
        """The next smaller context of a model in this run; 0 for its smallest."""
        return max((row[3] for row in self.rows if row[0] == model and row[3] < context), default=0)


def make_matrix(settings: Settings, spec: TargetSpec) -> Matrix:
    """Rows from profile, target and narrowing options. Raises pytest.UsageError for a model that does not exist."""
    profile = PROFILES[settings.profile]
    models = _named_models(settings) if settings.models else _profile_models(profile, spec)
    if spec.scheme == "openai" and not settings.models:
        raise pytest.UsageError(
            "a running server serves one model: name it with --adapt-models=DIR (its checkpoint) or NAME (one exported)"
        )
    rows: list[tuple[str, str, str, int]] = []
    prompts: dict[str, int] = {}
    for model in models:
        take = profile.classes.get(model.shape_class, profile.other)
        contexts = settings.contexts or contexts_of(model, take)
        prompts[model.name] = take.prompts
        if settings.contexts:
            _check_contexts(model, contexts)
        offered = _precisions(take, model, spec)
        for layout in settings.layouts or ("single",):
            # A target that offers none of the profile's precisions is judged at what it has.
            for precision in settings.precisions or offered or spec.precisions:
                rows.extend((model.name, layout, precision, context) for context in contexts)
    if not rows:
        raise pytest.UsageError(
            f"nothing to run: target {spec.text} can serve none of the models of profile {settings.profile}"
        )
    spread = _layout_rows(settings, spec, models)
    if settings.layouts:
        layout_rows = [row for row in rows if row[1] != "single"]
    else:
        layout_rows = [
            (model.name, layout, precision, contexts_of(model, profile.other)[0])
            for model, layouts in spread
            for layout in layouts
            for precision in settings.precisions or _precisions(profile.other, model, spec) or spec.precisions
        ]
        models = list(dict.fromkeys([*models, *(model for model, _ in spread)]))
    if settings.prompt is not None:
        _check_prompt(*settings.prompt, models)
    named = {model.name: model for model in models}
    return Matrix(settings, named, prompts, tuple(rows), tuple(layout_rows))


def _check_contexts(model: Model, contexts: tuple[int, ...]) -> None:
    if model.max_position and max(contexts) > model.max_position:
        raise pytest.UsageError(
            f"--adapt-contexts={max(contexts)}: model {model.name} has {model.max_position} positions"
        )
    if min(contexts) < (least := _least_context(model)):
        raise pytest.UsageError(
            f"--adapt-contexts={min(contexts)}: model {model.name} is asked nothing in so short a context; "
            f"give {least} or more"
        )


def _least_context(model: Model) -> int:
    """The shortest context in which a model can be asked anything."""
    if model.entry is None or model.shape_class != APART:
        return 1
    return model.entry.least_context


def _check_prompt(name: str, tokens: int, models: list[Model]) -> None:
    """Refuse a prompt that no model of the run has, or none has so many tokens of."""
    import difflib

    from pytest_adapt.models.prompts import lengths_of

    lengths = {model.name: lengths_of(model.described) for model in models}
    longest = max((found[name] for found in lengths.values() if name in found), default=0)
    if not longest:
        names = list(dict.fromkeys(prompt for found in lengths.values() for prompt in found))
        near = difflib.get_close_matches(name, names, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise pytest.UsageError(
            f"--adapt-prompt: no model of this run has a prompt {name!r}{hint}; there are {', '.join(names)}"
        )
    if tokens > longest:
        raise pytest.UsageError(
            f"--adapt-prompt={name}:{tokens}: the prompt has {longest} tokens; give at most so many"
        )


def _precisions(take: Take, model: Model, spec: TargetSpec) -> list[str]:
    return [name for name in take.precisions if name in model.precisions and name in spec.precisions]


def _layout_rows(settings: Settings, spec: TargetSpec, models: list[Model]) -> list[tuple[Model, list[str]]]:
    """Models of the run and the layouts that its profile names for each, as far as target and model take them."""
    from pytest_adapt.layout import AXES as SPLITS
    from pytest_adapt.layout import parse
    from pytest_adapt.models import catalogue
    from pytest_adapt.strategies import fits, planned

    axes = set(spec.axes) | {axis for axis in SPLITS if spec.scheme == "cmd" and f"{{{axis}}}" in spec.text}
    plan = planned(settings.profile)
    if not settings.models:
        entries = catalogue()
        classes = [name for name in spec.shape_classes if name != "aligned" or "odd" not in spec.shape_classes]
        if PROFILES[settings.profile].both:
            classes = list(spec.shape_classes)
        models = [
            _from_entry(entries[name], explicit=False)
            for name in plan
            if name in entries and entries[name].shape_class in classes
        ]
    found = []
    for model in models:
        named = plan.get(model.name, plan.get("*", ()) if model.explicit else ())
        # A converted model's shape is known once it is written.
        known = "num_attention_heads" in model.config
        taken = [
            layout
            for layout in named
            if all(axis in axes for axis in SPLITS if getattr(parse(layout), axis) > 1)
            and not (known and fits(layout, model.config))
        ]
        if taken:
            found.append((model, taken))
    return found


def declined(model: Model, layout: str, spec: TargetSpec) -> str:
    """Why a target will not take a model in a layout, as far as is known before it is opened; "" where it may.

    A shape class that a target leaves out counts as declined also for a model that was named. What is known of a
    server's command line or URL is an assumption of ours, though: there the user knows better.
    """
    from pytest_adapt.layout import AXES as SPLITS
    from pytest_adapt.layout import parse
    from pytest_adapt.strategies import fits

    if model.entry and model.shape_class not in spec.shape_classes and spec.scheme not in ("cmd", "openai"):
        near = _sibling(model.entry, spec.shape_classes)
        hint = f"; nearest: {near}" if near else ""
        offered = ", ".join(spec.shape_classes) or "none"
        return f"model {model.name}: shape class {model.shape_class} is not declared by the target ({offered}){hint}"
    if spec.scheme in ("hf", "openai") and layout != "single":
        return f"layout {layout}: {spec.scheme}: serves the layout single alone"
    if spec.scheme == "cmd":
        for axis in SPLITS:
            if getattr(parse(layout), axis) > 1 and axis not in spec.axes:
                named = ", ".join(f"{{{name}}}" for name in spec.axes) or "none"
                return f"layout {layout}: the command has no {{{axis}}} (axes that it has: {named})"
    # A converted model's shape is known once it is written.
    return fits(layout, model.config) if "num_attention_heads" in model.config else ""


def _sibling(entry: ModelEntry, classes: tuple[str, ...]) -> str:
    """The model of the same family in one of these classes whose name is nearest; "" where there is none."""
    import difflib

    from pytest_adapt.models import catalogue

    names = sorted(
        one.name for one in catalogue().values() if one.family == entry.family and one.shape_class in classes
    )
    return next(iter(difflib.get_close_matches(entry.name, names, 1, cutoff=0)), "")


def read_mark(marks: Iterable[pytest.Mark], where: str) -> Mark:
    """The nearest ``adapt`` mark, checked. Raises pytest.Collector.CollectError naming the test and the argument."""
    from pytest_adapt.target.protocol import OBSERVABLES
    from pytest_adapt.verdict.result import RUNGS

    mark = next(iter(marks), None)
    if mark is None:
        return Mark()
    given = dict(mark.kwargs)
    known = set(Mark.__dataclass_fields__)
    if mark.args or set(given) - known:
        wrong = ", ".join([*map(repr, mark.args), *sorted(set(given) - known)])
        raise pytest.Collector.CollectError(
            f"{where}: mark adapt does not take {wrong}; it takes {', '.join(sorted(known))}"
        )
    for name in ("needs", "classes", "models", "layouts", "precisions", "contexts"):
        if name in given:
            value = given[name]
            given[name] = (value,) if isinstance(value, str | int) else tuple(value)
    given["features"] = tuple(
        sorted(
            (name, value if isinstance(value, int) else tuple(value))
            for name, value in given.get("features", {}).items()
        )
    )
    made = Mark(**given)
    for what, values, allowed in (
        ("rung", (made.rung or "loads",), RUNGS),
        ("needs", made.needs, OBSERVABLES),
        ("profile", (made.profile,), tuple(PROFILES)),
        ("precisions", made.precisions, PRECISIONS),
        ("tier", (made.tier or "counters",), TIERS),
    ):
        for value in values:
            if value not in allowed:
                raise pytest.Collector.CollectError(
                    f"{where}: mark adapt: {what} {value!r} is none of {', '.join(allowed)}"
                )
    return made


def github_jobs(matrix: Matrix) -> str:
    """JSON of a GitHub Actions matrix: one job per model and precision, each with the arguments that select it."""
    jobs = []
    fixed = matrix.settings.arguments(without=("models", "precisions"))
    for model, precision in dict.fromkeys((row[0], row[2]) for row in matrix.every_row):
        directory = matrix.models[model].directory
        arguments = [*fixed, f"--adapt-models={directory or model}", f"--adapt-precisions={precision}"]
        jobs.append(
            {
                "name": f"{model} {precision}",
                "model": model,
                "precision": precision,
                "args": " ".join(map(_quoted, arguments)),
            }
        )
    return json.dumps({"include": jobs})


def _quoted(word: str) -> str:
    import shlex

    return shlex.quote(word)


def _profile_models(profile: Profile, spec: TargetSpec) -> list[Model]:
    from pytest_adapt.models import catalogue

    classes = [name for name in profile.classes if name in spec.shape_classes]
    if "odd" in classes and "aligned" in classes and not profile.both:
        classes.remove("aligned")
    entries = catalogue().values()
    return [
        _from_entry(entry, explicit=False)
        for name in classes
        for entry in sorted(entries, key=lambda entry: entry.name)
        if entry.shape_class == name and (not profile.classes[name].names or entry.name in profile.classes[name].names)
    ]


def _named_models(settings: Settings) -> list[Model]:
    from pytest_adapt.models import catalogue

    entries = catalogue()
    found: dict[str, Model] = {}
    for word in settings.models:
        if word in entries:
            found[word] = _from_entry(entries[word], explicit=True)
            continue
        model = _from_directory(word, sorted(entries))
        name, number = model.name, 2
        while name in found:
            name, number = f"{model.name}-{number}", number + 1
        found[name] = Model(name, None, model.directory, model.contexts, model.precisions, model.config, explicit=True)
    return list(found.values())


def _from_entry(entry: ModelEntry, *, explicit: bool) -> Model:
    return Model(entry.name, entry, None, entry.contexts, entry.precisions, entry.config, explicit)


def _from_directory(word: str, names: list[str]) -> Model:
    directory = Path(word).expanduser().resolve()
    if not directory.is_dir():
        import difflib

        near = difflib.get_close_matches(word, names, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise pytest.UsageError(
            f"--adapt-models: {word!r} is neither a checkpoint directory nor in the catalogue{hint}: {', '.join(names)}"
        )
    file = directory / "config.json"
    if not file.exists():
        raise pytest.UsageError(f"--adapt-models: {directory} has no config.json; name the directory of a checkpoint")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise pytest.UsageError(f"--adapt-models: {file}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise pytest.UsageError(f"--adapt-models: {file}: expected a JSON object, found {type(config).__name__}")
    for key, least in _COUNTS.items():
        value = config.get(key)
        if (value is not None or least > 0) and (type(value) is not int or value < least):
            raise pytest.UsageError(
                f"--adapt-models: {file}: {key} is {value!r}, expected a number of at least {least}"
            )
    name = "".join(char if char.isalnum() or char in "._-" else "_" for char in directory.name) or "model"
    return Model(name, None, directory, _boundaries(config), PRECISIONS, config, explicit=True)


def _boundaries(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Lengths at which behaviour can change: KV page, window, original rotary length, the usual steps."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = scaling if isinstance(scaling, Mapping) else {}
    named = (config.get("sliding_window"), scaling.get("original_max_position_embeddings"))
    limit = config.get("max_position_embeddings")
    top = min(limit, 4096) if isinstance(limit, int) and limit > 0 else 4096
    lengths = {16, 64, 512, 1024, top} | {value for value in named if isinstance(value, int)}
    return tuple(sorted(length for length in lengths if 0 < length <= top))


def contexts_of(model: Model, take: Take) -> tuple[int, ...]:
    """The largest context of the model under each bound; its smallest where all are beyond."""
    lengths = tuple(length for length in model.contexts if length >= _least_context(model))
    found = {max((length for length in lengths if length <= bound), default=0) for bound in take.contexts}
    return tuple(sorted(found - {0})) or lengths[:1] or (LEAST_CONTEXT,)
