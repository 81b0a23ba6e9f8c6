"""Which reference judges a model: golden records, the live oracle, or another target."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_adapt.golden.reference import GoldenReference, OracleReference, TargetReference
    from pytest_adapt.handle import ModelHandle
    from pytest_adapt.items import ItemState
    from pytest_adapt.runner import Runner
    from pytest_adapt.target.protocol import Deployment, Response

__all__ = ["References"]


class References:
    """References of the present model. Items come model by model, so those of the last one are dropped (an oracle
    holds its weights in float64)."""

    def __init__(self, runner: Runner, made: dict[tuple[str, str], Any] | None = None) -> None:
        """``made`` holds what an earlier run in this process has made, and takes what this one makes."""
        self._runner = runner
        self._made: dict[tuple[str, str], Any] = {} if made is None else made
        self._host: Any = None
        self._case = ""

    def get(self, model: ModelHandle, precision: str, case: str) -> Any:
        """The reference of a model, for one case. ``precision`` matters to --adapt-reference, which opens a target."""
        self._case = case
        key = (model.name, precision if self._runner.settings.reference else "")
        if key not in self._made:
            for other in [made for made in self._made if made[0] != model.name]:
                del self._made[other]
            self._made[key] = self._make(model, precision)
        return self._made[key]

    def keep_observed(self, state: ItemState) -> None:
        """After a mismatch with a golden record: leave the target's answers under ``.adapt/pending``, for review. One
        with a fault put in has nothing to review."""
        from pytest_adapt.golden.record import RecordError
        from pytest_adapt.golden.review import propose_observed

        if self._runner.settings.inject or getattr(state.reference, "kind", "") != "golden":
            return
        if state.model is None or state.target is None:
            return
        prompts = state.model.all_prompts
        for one in state.judge.failures():
            tokens = prompts.get(one.prompt)
            answer = state.target.answer_to(tokens) if tokens else None
            if tokens is None or answer is None:
                continue
            record, who = state.reference.record(one.prompt, tokens), state.target.info.name
            with contextlib.suppress(RecordError):  # an answer that cannot be a record is in the message already
                propose_observed(self._pending, record, answer, who, state.case, one.detail)

    def observe(self, state: ItemState) -> None:
        """With --adapt-goldens=observe: leave what the target answered to the prompts of a prediction test as pending
        records of a class of its own, so that a later run shows what changed."""
        from pytest_adapt.golden.record import OBSERVED, RecordError, tokens_digest
        from pytest_adapt.golden.review import propose_observed

        cell = state.cell
        if self._runner.settings.goldens != "observe" or state.model is None or state.target is None or cell is None:
            return
        if cell.layout != "single" or getattr(state.reference, "kind", "") != "golden" or cell.taps or cell.features:
            return
        info = state.target.info
        for name, tokens in state.model.all_prompts.items():
            answer = state.target.answer_to(tokens)
            if answer is None:
                continue
            record = state.reference.record(name, tokens)
            seen = f"{OBSERVED}{cell.precision}"
            key = replace(record.key, prompt=name, prompts_digest=tokens_digest(tokens), math_class=seen)
            kept = replace(record, key=key, errors={cell.precision: record.emulation(cell.precision)})
            told = {"environment": dict(info.environment), "target": f"{info.name} {info.version}"}
            with contextlib.suppress(RecordError):  # a target that shows too little has nothing to compare later
                propose_observed(self._pending, kept, answer, info.name, "", self._runner.settings.reason, told)

    def close(self) -> None:
        """Close the target of --adapt-reference."""
        if self._host is not None:
            self._host.close()

    def _make(self, model: ModelHandle, precision: str) -> Any:
        live = self._live(model)
        if self._runner.settings.reference:
            return self._target(model, precision, live)
        if model.entry is None:
            return live
        if model.entry.kind == "needle":
            from pytest_adapt.golden.reference import ClosedReference

            return ClosedReference(live, model.entry)
        from pytest_adapt.golden.reference import GoldenProblem
        from pytest_adapt.golden.store import StoreError

        try:
            return self._golden(model, live)
        except StoreError as error:
            raise GoldenProblem("fail", str(error)) from None

    def _live(self, model: ModelHandle) -> OracleReference:
        from pytest_adapt.golden.reference import OracleReference

        rows = {row[2] for row in self._runner.matrix.every_row if row[0] == model.name}
        entry = model.entry.precisions if model.entry else ()
        precisions = tuple(sorted(rows | set(entry)))
        return OracleReference(
            model.directory, precisions, model.name, self._runner.config.rootpath / ".adapt" / "oracle"
        )

    def _golden(self, model: ModelHandle, live: OracleReference) -> GoldenReference | OracleReference:
        from pytest_adapt.golden.reference import GoldenReference
        from pytest_adapt.golden.store import Store, shipped_store
        from pytest_adapt.models import spec_hash

        settings, config = self._runner.settings, self._runner.config
        own = (Store(config.rootpath / settings.goldens_dir),) if settings.goldens_dir else ()
        stores = (*own, shipped_store())
        # A model of which nothing was ever recorded is judged by the live oracle; one record lost among others fails.
        recorded = any(name.startswith(f"{model.name}.") for store in stores for name in store.entries)
        if not recorded and settings.goldens in ("check", "observe"):
            return live
        assert model.entry is not None
        return GoldenReference(
            live,
            stores,
            model.all_prompts,
            spec_hash(model.entry),
            mode=settings.goldens,
            required=recorded,
            propose=self._propose if settings.goldens in ("new", "update") else None,
        )

    def _propose(self, record: Any, why: str) -> None:
        from pytest_adapt.golden.make import environment
        from pytest_adapt.golden.review import propose

        told = {"environment": environment()}
        propose(self._pending, record, why, self._case, self._runner.settings.reason, told)

    @property
    def _pending(self) -> Path:
        return self._runner.config.rootpath / ".adapt" / "pending"

    def _target(self, model: ModelHandle, precision: str, live: OracleReference) -> TargetReference:
        from pytest_adapt.golden.reference import TargetReference
        from pytest_adapt.open_target import OpenTarget
        from pytest_adapt.oracle import OracleError
        from pytest_adapt.session import Host
        from pytest_adapt.target.protocol import Deployment
        from pytest_adapt.target.registry import builtin_registry

        runner = self._runner
        if self._host is None:
            registry = builtin_registry()
            runner.config.hook.pytest_adapt_register_targets(registry=registry)
            spec = registry.resolve(runner.settings.reference, rootdir=runner.config.rootpath)
            self._host = Host(spec, replace(runner.settings, inject="", observables=()))
        offered = self._host.spec.precisions
        best = "fp32" if "fp32" in offered else precision
        wanted: Deployment = Deployment(
            str(model.directory), precision=best, max_context=runner.matrix.max_context(model.name)
        )
        from pytest_adapt.matrix import Mark

        other = OpenTarget(self._host, wanted, Mark())

        def score(tokens: Sequence[int]) -> Response:
            return other.score(tokens)

        known: OracleReference | None = live
        try:
            _ = live.oracle
        except OracleError:
            known = None
        return TargetReference(runner.settings.reference, score, precision, model.vocab_size, known)
