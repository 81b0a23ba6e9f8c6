"""``builtin``: the engine of the `adapt-engine` distribution, in this process; shows everything it computes.

``builtin[communicator=gloo]``, or the feature ``processes``, gives each rank of a layout a process of its own.

The only module of the judge that imports the engine. `BuiltinTarget.engine` is the opened engine, whose seams
(kernel registry, cache, pool, scheduler) faults are installed at.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_adapt.perf.memory import own_peak
from pytest_adapt.target.builtin_ops import BuiltinOps
from pytest_adapt.target.builtin_profile import OpProfile
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, TargetError, UnsupportedDeployment
from pytest_adapt.target.seams import BuiltinSeams
from pytest_adapt.target.threads import calm_openmp, fair_threads

if TYPE_CHECKING:
    import numpy as np
    from adapt_engine import Engine, SequenceRequest, SequenceResult
    from adapt_engine.tokenizer import Tokenizer

    from pytest_adapt.target.registry import TargetSettings

__all__ = ["BuiltinTarget"]

_FEATURES = {
    "deterministic": (0, 1, 2),
    "load_audit": (1,),
    "max_waiting": (0, 4),
    "native": (0, 1),
    "page_size": (0, 5),
    "preemption": (0, 1),
    "prefill_chunk": (0, 1, 7, 16, 64, 512),
    "prefix_cache": (0, 1),
    "processes": (0, 1),
    "step_tokens": (0, 7, 16, 64),
    "threads": (0, 1, 2),
}
_ROWS = frozenset({"logits", "score", "topk"})


class BuiltinTarget:
    """The built-in engine as a target; shows taps, logits, scores, top-k and text."""

    def __init__(self, argument: str, settings: TargetSettings) -> None:
        if argument:
            raise TargetError(f"target builtin:{argument}: nothing may follow the name; write builtin")
        communicator = settings.options.get("communicator", "virtual")
        if communicator not in ("virtual", "gloo"):
            raise TargetError(f"target builtin: communicator {communicator!r} is not one of virtual, gloo")
        self._settings = settings
        self._deployment = Deployment("")
        self._eos: frozenset[int] = frozenset()
        self._reader: Tokenizer | None = None
        self._writes = False
        self._aborts: deque[str] = deque()
        self._ops: BuiltinOps | None = None
        self._profile = OpProfile(())
        self.engine: Engine | None = None
        self.seams = BuiltinSeams()
        """Where `pytest_adapt.faults` are put in."""

    def open(self, deployment: Deployment) -> Info:
        self.close()
        if deployment.kv_precision != "auto":
            raise UnsupportedDeployment(
                f"KV precision {deployment.kv_precision}: the built-in engine keeps what it computed"
            )
        for name, setting in deployment.features:
            if setting and name not in _FEATURES:
                raise UnsupportedDeployment(f"feature {name}: the built-in engine has {', '.join(_FEATURES)}")
        calm_openmp()
        import torch
        from adapt_engine import Engine, EngineError, EngineOptions, LayoutError, __version__
        from adapt_engine.kernels import native as kernels_of_build

        threads = deployment.feature("threads") or fair_threads()
        mode = "strict" if deployment.feature("deterministic") else self._settings.mode
        native = bool(deployment.feature("native", 1))
        ordered = native and kernels_of_build.load() is not None
        if deployment.feature("deterministic") and not ordered:
            raise UnsupportedDeployment(
                "feature deterministic: only the native kernels of the built-in engine keep one order of accumulation, "
                f"and they are {'not built: install with a C++ compiler' if native else 'off'}"
            )
        gloo = bool(deployment.feature("processes", int(self._settings.options.get("communicator") == "gloo")))
        if gloo and self.seams.installed:
            raise UnsupportedDeployment("ranks in processes: faults are put into this process; use virtual ranks")
        try:
            options = EngineOptions(
                precision=deployment.precision,
                max_context=deployment.max_context,
                kv_tokens=deployment.kv_tokens,
                page_size=deployment.feature("page_size") or EngineOptions.page_size,
                prefill_chunk=deployment.feature("prefill_chunk"),
                prefix_cache=bool(deployment.feature("prefix_cache")),
                step_tokens=deployment.feature("step_tokens"),
                max_waiting=deployment.feature("max_waiting"),
                preemption=bool(deployment.feature("preemption", 1)),
                mode=mode,
                threads=threads,
                native=native,
                seed=deployment.seed,
                taps=deployment.taps,
                layout=deployment.layout,
                communicator="gloo" if gloo else "virtual",
            )
            self.seams.before_open()
            self.engine = Engine.open(deployment.model, options)
        except LayoutError as error:
            self.seams.detach()
            raise UnsupportedDeployment(str(error)) from error
        except EngineError as error:
            self.seams.detach()
            raise TargetError(f"builtin: {error}") from error
        kernels = self.engine.kernels()  # those of the build: what is put into the engine below may make others step in
        self.seams.attach(self.engine)
        self._ops = BuiltinOps(self.engine.kernels_registry)
        self._profile = OpProfile(self.engine.executor.registries)
        directory = Path(deployment.model)
        self._deployment, self._eos = deployment, _end_tokens(directory)
        self._writes = (directory / "tokenizer.json").is_file()
        report = self.engine.load_report
        counts = Counter(kernels.values())
        return Info(
            name="adapt-engine",
            version=__version__,
            observables=frozenset({"taps", "logits", "score", "topk", "text"}),
            features={
                name: offered
                for name, offered in _FEATURES.items()
                if (ordered or name != "deterministic")
                and not (name == "processes" and self.seams.installed)  # faults are put into this process
            },
            max_context=deployment.max_context,
            vocab_size=self.engine.spec.vocab,
            sites=tuple(dict.fromkeys(re.sub(r"^layer\.\d+\.", "layer.*.", site) for site in self.engine.spec.sites())),
            ops=self._ops.offered(),
            gradients=self._ops.gradients,
            rounds="eager",
            environment={
                "torch": torch.__version__,
                "cpu": torch.backends.cpu.get_cpu_capability(),
                "threads": str(threads),
                "mode": mode,
                "ranks": f"{self.engine.layout.world}{' processes' if gloo else ''}",
                "kernels": ", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
                "native_ops": " ".join(sorted(op for op, name in kernels.items() if name.startswith("native"))),
            },
            load={
                "seconds": report.seconds,
                "bytes": report.bytes,
                "bytes_per_second": report.bytes_per_second,
                "tensors": report.tensors,
                "files": report.files,
                "warnings": list(report.warnings),
            },
        )

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        if self.engine is None:
            raise TargetError("target builtin: not open")
        from adapt_engine import EngineError

        engine, asked = self.engine, {request.id: request for request in requests}
        self._aborts.clear()  # what was asked for before concerns no request of this run
        given: dict[str, float] = {}
        first: dict[str, float] = {}
        try:
            for request in asked.values():
                given[request.id] = time.perf_counter()
                refused = engine.submit(self._sequence(request))
                if refused is not None:
                    yield self._response(request, refused)
            while engine.busy:
                while self._aborts:
                    engine.abort(self._aborts.popleft())
                with self._profile.watching():
                    updates = engine.step()
                for update in updates:
                    now = time.perf_counter() - given[update.id]
                    if update.tokens:
                        first.setdefault(update.id, now)
                    if update.result is not None:
                        response = self._response(asked[update.id], update.result)
                        response.seconds, response.first_token_seconds = now, first.get(update.id)
                        yield response
        except EngineError as error:
            raise TargetError(f"builtin: {error}") from error
        finally:
            engine.drop_all()

    def control(self, name: str, **arguments: Any) -> None:
        """``control("abort", id=...)``: end a request of the run in progress before its next step.

        It is answered with finish ``abort`` and the tokens it has by then; an id that is not in flight is ignored.
        May be called from another thread than the one that runs. Raises TargetError for any other name.
        """
        if name != "abort" or set(arguments) != {"id"}:
            raise TargetError(f"builtin: no control {name}({', '.join(arguments)}); there is abort(id)")
        self._aborts.append(str(arguments["id"]))

    def profile(self, what: str, clock: str = "wall") -> None:
        """Sum up what runs from now on, by operation: ``what`` is time, counts or off, ``clock`` cpu or wall; `stats`
        tells the sums. Raises TargetError, also where ranks have processes of their own."""
        if what == "off":
            self._profile.stop()
            return
        if self.engine is None or self.engine.options.communicator == "gloo":
            raise TargetError("builtin: operations of ranks in processes are not profiled; use virtual ranks")
        try:
            self._profile.start(what, clock)
        except ValueError as error:
            raise TargetError(f"builtin: {error}") from error

    def close(self) -> None:
        engine, self.engine, self._reader, self._ops = self.engine, None, None, None
        self._profile.stop()
        self.seams.detach()
        if engine is not None:
            engine.close()

    def run_op(
        self, name: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """One operator through the engine's kernel registry, or its reference (``attributes["implementation"]``)."""
        if self._ops is None:
            raise TargetError("target builtin: not open")
        return self._ops.run(name, inputs, attributes)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, as the checkpoint's tokenizer gives them."""
        return list(self._tokenizer().encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer().decode(ids))

    def stats(self) -> dict[str, float]:
        """Counters of the engine since it was opened, and the sums of a profile that was on meanwhile."""
        return {} if self.engine is None else {**self.engine.stats(), **self._profile.counters()}

    def peak_memory(self, reset: bool = False) -> int | None:
        """Largest resident size of this process since the last reset, in bytes; None where ranks have their own."""
        if self.engine is not None and self.engine.options.communicator == "gloo":
            return None
        return own_peak(reset)

    def _tokenizer(self) -> Tokenizer:
        from adapt_engine import CheckpointError
        from adapt_engine.tokenizer import Tokenizer as Reader

        try:
            self._reader = self._reader or Reader(self._deployment.model)
            return self._reader
        except CheckpointError as error:
            raise TargetError(f"builtin: {error}") from error

    def _origin(self, replica: int) -> Callable[[str, int, tuple[int, ...], int | None], tuple[str, ...]] | None:
        engine = self.engine
        if engine is None or engine.layout.world == 1:
            return None
        return lambda site, position, element, expert: engine.locate(site, position, element, expert, replica)

    def _sequence(self, request: Request) -> SequenceRequest:
        from adapt_engine import SequenceRequest

        rows = bool(request.want & _ROWS)
        # Rows that nobody wants may come from the prefix cache; the engine never covers a wanted one.
        wanted = rows or "taps" in request.want
        return SequenceRequest(
            id=request.id,
            prompt=request.prompt,
            max_new_tokens=request.max_new_tokens,
            want_logits=rows,
            temperature=request.sampling.temperature,
            top_k=request.sampling.top_k,
            top_p=request.sampling.top_p,
            seed=request.sampling.seed,
            stop=request.stop if request.ignore_eos else (*request.stop, *sorted(self._eos)),
            first_row=_first_row(request) if wanted else len(request.prompt) + max(0, request.max_new_tokens),
        )

    def _response(self, request: Request, result: SequenceResult) -> Response:
        from pytest_adapt.target.rows import following_tokens, rows_of_logits

        length = len(request.prompt)
        if result.error is not None:
            return Response(request.id, length, finish="abort", error=result.error, seconds=result.seconds)
        first = _first_row(request)
        response = Response(
            request.id,
            prompt_tokens=length,
            tokens=result.tokens,
            finish=result.finish,
            first_row=first,
            cached_tokens=result.cached_tokens,
            seconds=result.seconds,
            drift=result.drift,
            origin=self._origin(result.replica),
        )
        if result.tokens and self._writes:
            response.text = self.detokenize(result.tokens)
        if result.finish == "abort":
            return response  # its rows end anywhere
        if "taps" in request.want:
            response.taps = {name: value.numpy() for name, value in result.taps.items()}
        if result.logits is not None:
            logits = result.logits
            scores, topk = rows_of_logits(logits, following_tokens(request.prompt, result.tokens, first), request.topk)
            response.logits = logits.numpy() if "logits" in request.want else None
            response.scores = scores if "score" in request.want else None
            response.topk = topk if "topk" in request.want else None
        return response


def _first_row(request: Request) -> int:
    """The last row of the prompt is always kept: the first new token is chosen from it."""
    return max(0, min(request.first_row, len(request.prompt) - 1))


def _end_tokens(directory: Path) -> frozenset[int]:
    """End-of-text ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((directory / name).read_bytes()).get("eos_token_id")
        except (OSError, ValueError, RecursionError, AttributeError):
            continue
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
