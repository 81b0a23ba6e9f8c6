"""``hf:``: transformers' own implementation, in this process, on one device.

Eager attention and eager experts, safetensors only, no remote code, no network. Scoring is one forward pass
without a cache; generation feeds the prompt (in chunks where ``prefill_chunk`` asks for it) and then token by
token through the KV cache, so that the logits of decode steps are those of the decode path. With ``batch`` n,
n sequences share left-padded forward passes.

Argument: ``hf:device=cuda,attn=sdpa`` (device cpu and attn eager by default).
"""

from __future__ import annotations

import gc
import importlib
import inspect
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_adapt import sites
from pytest_adapt.oracle import Checkpoint, OracleError
from pytest_adapt.perf.memory import own_peak
from pytest_adapt.target.hf_ops import HfOps
from pytest_adapt.target.hf_profile import ModuleProfile
from pytest_adapt.target.protocol import (
    Deployment,
    Info,
    Request,
    Response,
    Sampling,
    TargetError,
    UnsupportedDeployment,
)
from pytest_adapt.target.threads import calm_openmp, fair_threads

if TYPE_CHECKING:
    import numpy as np
    import torch

    from pytest_adapt.target.registry import TargetSettings

__all__ = ["HfTarget", "choose_token", "generator_of"]

_OPTIONS = {"device": "cpu", "attn": "eager"}
_FEATURES = {"batch": (0, 4), "prefill_chunk": (0, 1, 7, 16, 64, 512)}


@dataclass
class _Sequence:
    """One request on its way: what was fed, what was seen."""

    request: Request
    given: float
    """When the target was given it."""
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    taps: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    finish: str = ""
    first: float | None = None
    """Seconds to the first new token."""

    @property
    def first_row(self) -> int:
        """The last row of the prompt is always kept: the first new token is chosen from it."""
        return min(self.request.first_row, len(self.request.prompt) - 1)


class HfTarget:
    """transformers as a target; shows taps, logits, scores, top-k and text."""

    def __init__(self, argument: str, settings: TargetSettings) -> None:
        options = dict(_OPTIONS)
        for part in filter(None, argument.split(",")):
            name, equals, value = part.partition("=")
            if not equals or name not in _OPTIONS:
                raise TargetError(f"target hf:{argument}: {part!r} is none of device=..., attn=...")
            options[name] = value
        options.update(settings.options)
        self._device, self._attention = options["device"], options["attn"]
        self._model: Any = None
        self._ops = HfOps(options["device"])
        self._recorder: Any = None
        self._profile: ModuleProfile | None = None
        self._stack = ExitStack()
        self._deployment = Deployment("")
        self._eos: frozenset[int] = frozenset()
        self._tokenizer: Any = None

    def open(self, deployment: Deployment) -> Info:
        self.close()
        if deployment.layout != "single":
            raise UnsupportedDeployment(f"layout {deployment.layout}: hf: runs on one rank (layout single)")
        if deployment.kv_precision != "auto":
            raise UnsupportedDeployment(
                f"KV precision {deployment.kv_precision}: hf: keeps keys and values as computed"
            )
        for name, setting in deployment.features:
            if setting and name not in _FEATURES:
                raise UnsupportedDeployment(f"feature {name}: hf: has {', '.join(_FEATURES)}")
        calm_openmp()
        import torch
        import transformers

        threads = fair_threads()
        torch.set_num_threads(threads)
        started = time.perf_counter()
        model, warnings = self._load(deployment)
        seconds = time.perf_counter() - started
        self._model, self._deployment, self._profile = model, deployment, ModuleProfile(model)
        from pytest_adapt.target.hf_taps import SITES, TapRecorder, watched_attention

        self._recorder = TapRecorder(model, deployment.taps)
        rotated = any(sites.matches(f"layer.0.attn.{name}", deployment.taps) for name in ("q_rope", "k_rope"))
        if rotated and hasattr(model, "set_attn_implementation"):  # 4.54 and later: older ones show no rotated rows
            name = self._stack.enter_context(watched_attention(self._recorder, self._attention))
            model.set_attn_implementation(name)
        config = model.config.get_text_config()
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        eos = config.eos_token_id if eos is None else eos
        self._eos = frozenset() if eos is None else frozenset(eos if isinstance(eos, list) else [eos])
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return Info(
            name="transformers",
            version=transformers.__version__,
            observables=frozenset({"taps", "logits", "score", "topk", "text"}),
            features=dict(_FEATURES),
            max_context=min(deployment.max_context, int(getattr(config, "max_position_embeddings", 1 << 30))),
            vocab_size=int(config.vocab_size),
            sites=SITES,
            ops=self._ops.offered(),
            gradients=self._ops.gradients,
            rounds="eager",
            router="eager",
            environment={
                "torch": torch.__version__,
                "device": self._device,
                "attention": self._attention,
                "threads": str(threads),
            },
            load={
                "seconds": seconds,
                "bytes": size,
                "bytes_per_second": size / max(seconds, 1e-9),
                "warnings": warnings,
            },
        )

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        if self._model is None:
            raise TargetError("target hf: not open")
        started = time.perf_counter()
        limit = max(1, self._deployment.feature("batch"))
        group: list[Request] = []
        # Prompt -> logits after it, of requests for one token alone: with other seeds it is drawn from them again.
        rows: dict[tuple[int, ...], torch.Tensor] = {}
        for request in requests:
            wrong = self._abnormal(request)
            if wrong:
                yield Response(request.id, len(request.prompt), finish="abort", error=wrong)
                continue
            alone = request.max_new_tokens == 1 and request.first_row >= len(request.prompt) - 1
            if alone and limit == 1 and request.want <= {"text"}:
                yield self._drawn(request, rows, started)
                continue
            group.append(request)
            if len(group) == limit:
                yield from self._answer(group, started)
                group = []
        if group:
            yield from self._answer(group, started)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.remove()
        self._stack.close()
        self._model = self._recorder = self._tokenizer = self._profile = None
        gc.collect()

    def run_op(
        self, name: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """One operator by transformers' eager code or the torch function that it calls."""
        return self._ops.run(name, inputs, attributes)

    def profile(self, what: str, clock: str = "wall") -> None:
        """Sum up what runs from now on, by class of module (`hf_profile`). Raises TargetError."""
        if self._profile is None:
            raise TargetError("target hf: not open")
        try:
            self._profile.stop() if what == "off" else self._profile.start(what, clock)
        except ValueError as error:
            raise TargetError(f"target hf: {error}") from error

    def stats(self) -> dict[str, float]:
        """The sums of a profile that was on since the model was loaded."""
        return {} if self._profile is None else self._profile.counters()

    def peak_memory(self, reset: bool = False) -> int | None:
        """Largest number of bytes held since the last reset: on an accelerator what torch allocated there, else the
        resident size of this process."""
        import torch

        if not self._device.startswith("cuda"):
            return own_peak(reset)
        if reset:
            torch.cuda.reset_peak_memory_stats(self._device)
        return int(torch.cuda.max_memory_allocated(self._device))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text`` without special tokens."""
        return [int(token) for token in self._text()(text, add_special_tokens=False)["input_ids"]]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._text().decode(list(ids), skip_special_tokens=False))

    def _load(self, deployment: Deployment) -> tuple[Any, list[str]]:
        import torch

        transformers: Any = importlib.import_module("transformers")
        directory = Path(deployment.model)
        if not (directory / "config.json").is_file():
            raise TargetError(f"{directory} holds no config.json; a model is a checkpoint directory")
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        if deployment.precision not in dtypes:
            raise UnsupportedDeployment(f"precision {deployment.precision}: hf: computes in {', '.join(dtypes)}")
        release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        # Older releases have eager experts alone and do not know the option.
        experts = {"experts_implementation": "eager"} if release >= (5, 0) else {}
        asked = {"dtype" if release >= (4, 56) else "torch_dtype": dtypes[deployment.precision]}
        progress = transformers.utils.logging.is_progress_bar_enabled()
        level = transformers.utils.logging.get_verbosity()
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                attn_implementation=self._attention,
                **asked,
                **experts,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises many kinds for one broken checkpoint
            raise _refusal(directory, error) from error
        finally:
            transformers.utils.logging.set_verbosity(level)
            if progress:
                transformers.utils.logging.enable_progress_bar()
        for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
            found = sorted(str(key) for key in report.get(kind) or ())
            if found:
                what = kind.replace("_", " ")
                raise TargetError(
                    f"{directory}: {len(found)} {what} (first: {found[0]}); transformers would make them up"
                )
        ignored = sorted(str(key) for key in report.get("unexpected_keys") or ())
        warnings = [f"{len(ignored)} unexpected tensors ignored (first: {ignored[0]})"] if ignored else []
        return model.to(self._device).eval(), warnings

    def _abnormal(self, request: Request) -> str:
        """Why a request cannot be run; empty where it can."""
        vocab = int(self._model.config.get_text_config().vocab_size)
        if not request.prompt:
            return "the prompt is empty"
        outside = [token for token in request.prompt if not 0 <= token < vocab]
        if outside:
            return f"token id {outside[0]} is outside the vocabulary of {vocab}"
        total = len(request.prompt) + request.max_new_tokens
        if request.max_new_tokens < 0 or total > self._deployment.max_context:
            return (
                f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones do not fit "
                f"the context of {self._deployment.max_context}"
            )
        sampling = request.sampling
        if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            return f"sampling {sampling} is out of range"
        return ""

    def _answer(self, requests: list[Request], given: float) -> Iterator[Response]:
        import torch

        running = [_Sequence(request, given) for request in requests]
        with torch.inference_mode():
            self._execute(running)
        seconds = time.perf_counter() - given
        for sequence in running:
            yield self._response(sequence, seconds)

    def _drawn(self, request: Request, rows: dict[tuple[int, ...], torch.Tensor], given: float) -> Response:
        """One token after a prompt; ``rows`` keeps what was computed for it."""
        import torch

        sequence = _Sequence(request, given)
        if request.prompt in rows:
            sequence.logits = [rows[request.prompt]]
            self._extend(sequence, generator_of(request.sampling))
        else:
            with torch.inference_mode():
                self._execute([sequence])
            rows[request.prompt] = sequence.logits[-1][-1:]
        return self._response(sequence, time.perf_counter() - given)

    def _execute(self, running: list[_Sequence]) -> None:
        """Feed the prompts, then one token of each at a time until all are done."""
        import torch

        longest = max(len(sequence.request.prompt) for sequence in running)
        pads = [longest - len(sequence.request.prompt) for sequence in running]
        fed = [[0] * pad + list(sequence.request.prompt) for pad, sequence in zip(pads, running, strict=True)]
        tokens = torch.tensor(fed, device=self._device)
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=self._device)
        chunk = self._deployment.feature("prefill_chunk")
        decodes = any(sequence.request.max_new_tokens for sequence in running)
        cache = _new_cache(self._model) if decodes or 0 < chunk < longest else None
        for start in range(0, longest, chunk or longest):
            stop = min(longest, start + (chunk or longest))
            self._forward(running, pads, tokens[:, start:stop], mask[:, :stop], cache, start)
        if not decodes:
            return
        generators = [generator_of(sequence.request.sampling) for sequence in running]
        position = longest
        while True:
            for sequence, generator in zip(running, generators, strict=True):
                self._extend(sequence, generator)
            if all(sequence.finish for sequence in running):
                return
            last = torch.tensor([[sequence.tokens[-1] if sequence.tokens else 0] for sequence in running])
            mask = torch.cat([mask, mask.new_ones(len(running), 1)], dim=1)
            self._forward(running, pads, last.to(self._device), mask, cache, position)
            position += 1

    def _forward(
        self,
        running: list[_Sequence],
        pads: list[int],
        tokens: torch.Tensor,
        mask: torch.Tensor,
        cache: Any,
        start: int,
    ) -> None:
        """One forward pass of columns ``start`` onwards; rows of real tokens are kept."""
        import torch

        width = tokens.shape[1]
        columns = torch.arange(start, start + width, device=tokens.device)
        positions = (columns[None] - torch.tensor(pads, device=tokens.device)[:, None]).clamp(min=0)
        recorder = self._recorder
        recorder.seen, recorder.batch, recorder.tokens = {}, len(running), width
        extra = {} if cache is None else {_cache_argument(self._model): cache}
        with self._profile.watching() if self._profile is not None else nullcontext():
            output = self._model(
                input_ids=tokens,
                attention_mask=mask if any(pads) else None,
                position_ids=positions,
                use_cache=cache is not None,
                **extra,
            )
        for row, (sequence, pad) in enumerate(zip(running, pads, strict=True)):
            if sequence.finish:
                continue
            skip = max(0, pad + sequence.first_row - start)
            if skip >= width:
                continue
            sequence.logits.append(output.logits[row, skip:].cpu())
            if "taps" in sequence.request.want:
                for name, value in recorder.seen.items():
                    sequence.taps.setdefault(name, []).append(value[row, skip:].clone())
                if sites.matches("logits", self._deployment.taps):
                    sequence.taps.setdefault("logits", []).append(output.logits[row, skip:].float().cpu())

    def _extend(self, sequence: _Sequence, generator: Any) -> None:
        """Choose the next token of a sequence, or mark it finished."""
        request = sequence.request
        if sequence.finish:
            return
        if len(sequence.tokens) == request.max_new_tokens:
            sequence.finish = "length"
            return
        token = choose_token(sequence.logits[-1][-1], request.sampling, generator)
        sequence.tokens.append(token)
        if sequence.first is None:
            sequence.first = time.perf_counter() - sequence.given
        if token in request.stop or (not request.ignore_eos and token in self._eos):
            sequence.finish = "stop"
        elif len(sequence.tokens) == request.max_new_tokens:
            sequence.finish = "length"

    def _response(self, sequence: _Sequence, seconds: float) -> Response:
        import torch

        from pytest_adapt.target.rows import following_tokens, rows_of_logits

        request = sequence.request
        logits = torch.cat(sequence.logits)
        following = following_tokens(request.prompt, sequence.tokens, sequence.first_row)
        scores, topk = rows_of_logits(logits, following, request.topk)
        return Response(
            request.id,
            prompt_tokens=len(request.prompt),
            tokens=tuple(sequence.tokens),
            finish=sequence.finish or "length",
            text=self._maybe_text(sequence.tokens),
            logits=logits.float().numpy() if "logits" in request.want else None,
            scores=scores if "score" in request.want else None,
            topk=topk if "topk" in request.want else None,
            taps={name: torch.cat(parts).numpy() for name, parts in sequence.taps.items()},
            first_row=sequence.first_row,
            seconds=seconds,
            first_token_seconds=sequence.first,
        )

    def _maybe_text(self, tokens: list[int]) -> str | None:
        if not tokens or not (Path(self._deployment.model) / "tokenizer.json").is_file():
            return None
        return self.detokenize(tokens)

    def _text(self) -> Any:
        if self._tokenizer is None:
            import transformers

            try:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                    self._deployment.model, local_files_only=True, trust_remote_code=False
                )
            except Exception as error:  # as for models: many kinds for one broken file
                raise _refusal(Path(self._deployment.model), error) from error
        return self._tokenizer


def choose_token(row: torch.Tensor, sampling: Sampling, generator: Any) -> int:
    """Greedy (the lowest id of the largest logit), or one draw after temperature, top-k and top-p."""
    import torch

    row = row.double()
    if sampling.temperature == 0:
        return int(torch.nonzero(row == row.max())[0]) if not torch.isnan(row).any() else int(row.argmax())
    order = torch.sort(row / sampling.temperature, descending=True, stable=True)
    probabilities = torch.softmax(order.values, dim=-1)
    if sampling.top_k:
        probabilities[sampling.top_k :] = 0.0
    if sampling.top_p < 1:
        # Of what top_k has left, as transformers' own filters do one after the other.
        probabilities /= probabilities.sum()
        probabilities[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = 0.0
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return int(order.indices[drawn])


def generator_of(sampling: Sampling) -> Any:
    """The random numbers of one output, a torch.Generator that its seed alone decides."""
    import torch

    return torch.Generator().manual_seed(sampling.seed)


def _new_cache(model: Any) -> Any:
    from transformers import DynamicCache

    # 4.56 and later make layers after the configuration; older caches grow every layer as it comes.
    told = "config" in inspect.signature(DynamicCache.__init__).parameters
    return DynamicCache(config=model.config) if told else DynamicCache()


def _cache_argument(model: Any) -> str:
    """transformers 5.2x renamed past_key_values to cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _refusal(directory: Path, error: Exception) -> TargetError:
    """One line for whatever transformers raised on a checkpoint."""
    text = " ".join(str(error).split())
    line = f"transformers refuses {directory}: {type(error).__name__}: {text[:300]}"
    try:
        Checkpoint(directory)
    except OracleError as found:  # names the file, which transformers seldom does
        line += f" ({found})"
    unknown = "model type" in text and "recognize" in text or "Unrecognized" in text
    return UnsupportedDeployment(line) if unknown else TargetError(line)
