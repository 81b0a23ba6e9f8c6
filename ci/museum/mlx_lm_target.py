"""``py:mlx_lm_target:MlxLm``: mlx-lm on the CPU, in this process, on one device.

The released package reads the checkpoint and computes every number; this file only calls it, and wraps modules to
see what they return. Old releases want an old spelling of config.json here and there; none is rewritten.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytest_adapt import sites
from pytest_adapt.target.hf import choose_token, generator_of
from pytest_adapt.target.protocol import Deployment, Info, Request, Response, UnsupportedDeployment

# Local site -> module inside a layer. Of MLA's attention only what every release materialises.
_SEEN = {
    "attn.norm": "input_layernorm",
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.q": "self_attn.q_b_proj|self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "ffn.norm": "post_attention_layernorm",
    "moe.shared": "mlp.shared_experts",
    "ffn.out": "mlp",
}
_HEADS = ("attn.q", "attn.k", "attn.v")


class _Tap:
    """A module that shows what it returns; everything else is the module's own."""

    def __init__(self, module: Any, show: Any) -> None:
        self._module, self._show = module, show

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        output = self._module(*arguments, **options)
        self._show(arguments, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class MlxLm:
    """Shows taps, logits and text. Tokens are drawn by the hf: target's sampler: the museum is about what the package
    computes."""

    defaults = {
        "precisions": ["fp32"],  # the CPU has no other kernel for experts
        "shape_classes": ["odd", "aligned"],
        "observables": ["taps", "logits", "text"],
    }

    def __init__(self) -> None:
        self._model: Any = None
        self._taps: tuple[str, ...] = ()
        self._seen: dict[str, list[np.ndarray]] = {}
        self._limit = self._vocab = 0

    def open(self, deployment: Deployment) -> Info:
        if deployment.layout != "single" or deployment.precision != "fp32":
            raise UnsupportedDeployment(f"{deployment.layout} in {deployment.precision}: one rank, fp32")
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        loader: Any = importlib.import_module("mlx_lm.utils")
        loaded = loader.load_model(Path(deployment.model))
        self._model = loaded[0] if isinstance(loaded, tuple) else loaded
        self._model.set_dtype(mx.float32)
        self._taps, self._limit = deployment.taps, deployment.max_context
        self._vocab = int(self._model.args.vocab_size)
        if self._taps:
            self._watch()
        return Info(
            name="mlx-lm",
            version=importlib.metadata.version("mlx-lm"),
            observables=frozenset({"taps", "logits", "text"}),
            vocab_size=self._vocab,
            sites=(*(f"layer.*.{name}" for name in (*_SEEN, "attn.q_rope", "attn.k_rope", "residual")), "logits"),
            environment={"mlx": importlib.metadata.version("mlx")},
        )

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in requests:
            total = len(request.prompt) + request.max_new_tokens
            inside = all(0 <= token < self._vocab for token in request.prompt)
            if not request.prompt or total > self._limit or not inside or request.max_new_tokens < 0:
                yield Response(request.id, len(request.prompt), error="the prompt is empty, too long or no tokens")
            else:
                yield self._answer(request)

    def close(self) -> None:
        self._model = None

    def _answer(self, request: Request) -> Response:
        """The prompt in one pass, then token by token through the package's own cache."""
        caches: Any = importlib.import_module("mlx_lm.models.cache")
        cache = caches.make_prompt_cache(self._model) if request.max_new_tokens else None
        self._seen = {}
        rows = [self._feed(request.prompt, cache)]
        tokens: list[int] = []
        generator = generator_of(request.sampling)
        for step in range(request.max_new_tokens):
            tokens.append(choose_token(torch.from_numpy(rows[-1][-1]), request.sampling, generator))
            if tokens[-1] in request.stop or step + 1 == request.max_new_tokens:
                break
            rows.append(self._feed((tokens[-1],), cache))
        logits = np.concatenate(rows)
        taps = {name: np.concatenate(parts) for name, parts in self._seen.items()}
        if sites.matches("logits", self._taps):
            taps["logits"] = logits
        shown = taps if "taps" in request.want else {}
        return Response(request.id, len(request.prompt), tokens=tuple(tokens), logits=logits, taps=shown)

    def _feed(self, tokens: tuple[int, ...], cache: Any) -> np.ndarray:
        """float32 [tokens, vocabulary]."""
        import mlx.core as mx

        return _array(self._model(mx.array([list(tokens)]), cache=cache)[0])

    def _watch(self) -> None:
        for number, layer in enumerate(self._model.model.layers):
            rope = getattr(layer.self_attn, "rope", None)
            if hasattr(layer.self_attn, "k_proj") and rope is not None:
                layer.self_attn.rope = _Tap(rope, self._rotated(number))
            gate, experts = getattr(layer.mlp, "gate", None), getattr(layer.mlp, "switch_mlp", None)
            if gate is not None and experts is not None:
                layer.mlp.gate = _Tap(gate, self._router(number))
            for name, paths in _SEEN.items():
                self._wrap(layer, paths, sites.site(number, name))
            self._model.model.layers[number] = _Tap(layer, self._show(sites.site(number, "residual"), None))

    def _wrap(self, layer: Any, paths: str, name: str) -> None:
        for path in paths.split("|"):
            *owners, last = path.split(".")
            owner = layer
            for part in owners:
                owner = getattr(owner, part, None)
            module = getattr(owner, last, None)
            if module is not None and sites.matches(name, self._taps):
                heads = self._heads(layer.self_attn, name) if name.endswith(_HEADS) else None
                setattr(owner, last, _Tap(module, self._show(name, heads)))
                return

    def _heads(self, attention: Any, name: str) -> int:
        if hasattr(attention, "num_heads"):  # MLA
            return int(attention.num_heads)
        return int(attention.n_heads if name.endswith(".q") else attention.n_kv_heads)

    def _show(self, name: str, heads: int | None) -> Any:
        def show(_: tuple[Any, ...], output: Any) -> None:
            value = _array(output[0])
            self._keep(name, value if heads is None else value.reshape(len(value), heads, -1))

        return show

    def _rotated(self, number: int) -> Any:
        """Queries are rotated first, then keys: [1, heads, tokens, d]."""
        calls: list[str] = []

        def show(_: tuple[Any, ...], output: Any) -> None:
            name = "attn.k_rope" if calls else "attn.q_rope"
            calls.pop() if calls else calls.append(name)
            self._keep(sites.site(number, name), _array(output[0]).swapaxes(0, 1))

        return show

    def _router(self, number: int) -> Any:
        """A gate returns logits, or the chosen ids and their weights."""

        def show(_: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, tuple):
                self._keep(sites.site(number, "moe.router.logits"), _array(output[0]))
                return
            ids = np.asarray(output[0][0]).astype(np.int64)
            order = ids.argsort(-1)
            self._keep(sites.site(number, "moe.router.ids"), np.take_along_axis(ids, order, -1))
            weights = np.take_along_axis(_array(output[1][0]), order, -1)
            self._keep(sites.site(number, "moe.router.weights"), weights)

        return show

    def _keep(self, name: str, value: np.ndarray) -> None:
        if sites.matches(name, self._taps):
            self._seen.setdefault(name, []).append(value)


def _array(value: Any) -> np.ndarray:
    import mlx.core as mx

    return np.array(value.astype(mx.float32))
