"""What a config.json says about the function a model computes, and nothing else.

Reads both spellings that transformers has used: ``rope_parameters`` and ``dtype`` (5.x), ``rope_theta``,
``rope_scaling`` and ``torch_dtype`` (4.x). A key that is neither understood nor known to be without effect
on inference is refused: an option that the oracle ignores would make it a wrong judge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import OracleError

__all__ = [
    "ARCHITECTURES",
    "GroupedQuery",
    "Latent",
    "LayerSpec",
    "MixtureSpec",
    "ModelSpec",
    "RopeSpec",
    "RouterSpec",
]

ARCHITECTURES: tuple[str, ...] = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK2ForCausalLM",
)
_QWEN3 = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_DEEPSEEK = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys without effect on the logits of a given token sequence.
_NO_EFFECT = _words(
    "architectures model_type auto_map transformers_version _name_or_path name_or_path use_cache dtype torch_dtype "
    "bos_token_id eos_token_id pad_token_id sep_token_id initializer_range attention_dropout pretraining_tp "
    "output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise num_nextn_predict_layers "
    "num_mtp_layers ep_size use_flash_attn_2 is_llama_config task_specific_params problem_type id2label label2id "
    "output_attentions output_hidden_states return_dict _attn_implementation_autoset chunk_size_feed_forward "
    "is_encoder_decoder tokenizer_class finetuning_task generation_config transformers.js_config adapt"
)
# `type` stands beside `rope_type` in files that 5.x rewrote from 4.x ones.
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": _words("rope_type type rope_theta"),
    "yarn": _words(
        "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
        "mscale_all_dim truncate"
    ),
    "llama3": _words(
        "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor"
    ),
}
# Default of a missing rope_theta, by class in transformers.
_DEFAULT_THETA = {"MixtralForCausalLM": 1e6}
# DeepseekV3Attention builds the norms of its low-rank parts without the configured epsilon.
_LATENT_EPS = 1e-6


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over ``dim`` channels (even). ``scale`` multiplies cosine and sine."""

    kind: str
    dim: int
    theta: float
    scale: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    interleaved: bool = False
    """Channels 2i and 2i+1 form a pair (DeepSeek); otherwise i and i + dim/2 do."""


@dataclass(frozen=True)
class GroupedQuery:
    """Grouped-query attention: heads of width ``head_dim``, ``kv_heads`` shared evenly."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qk_norm: bool
    bias: bool


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1). ``q_lora`` 0 means a full query projection."""

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int
    scale: float
    bias: bool
    norm_eps: float


@dataclass(frozen=True)
class RouterSpec:
    """How ``chosen`` of ``experts`` are found and weighted. ``groups`` 1 means no group limit."""

    experts: int
    chosen: int
    scoring: str
    selection_bias: bool
    groups: int
    groups_kept: int
    renormalise: bool
    renormalise_eps: float
    scale: float


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture layer: router, width of one expert, width of the shared expert (0: none)."""

    router: RouterSpec
    intermediate: int
    shared: int


@dataclass(frozen=True)
class LayerSpec:
    """``window`` keys are visible at most (0: all); ``mixture`` or dense feed-forward."""

    window: int
    mixture: bool


@dataclass(frozen=True)
class ModelSpec:
    """Everything in config.json that decides the function computed."""

    architecture: str
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    attention: GroupedQuery | Latent
    rope: RopeSpec
    intermediate: int
    mlp_bias: bool
    mixture: MixtureSpec | None
    norm_eps: float
    tied: bool
    max_position: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a parsed config.json. Raises OracleError for an unknown architecture, option or value."""
        reader = _Reader(config)
        spec = _build(reader)
        reader.refuse_unread()
        return spec

    def boundaries(self) -> tuple[int, ...]:
        """Positions where behaviour changes: sliding windows, original and full rotary range. Sorted, positive."""
        found = {layer.window for layer in self.layers} | {self.rope.original_max_position, self.max_position}
        return tuple(sorted(found - {0}))

    def canonical(self) -> str:
        """Canonical JSON of the whole spec (sorted keys, no spaces): the input of the configuration's digest."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


class _Reader:
    """Typed access to a configuration that remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()
        names = config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            raise OracleError(f"architectures: {names!r} is not known; known are {', '.join(ARCHITECTURES)}")
        self.architecture: str = names[0]

    def raw(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.raw(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OracleError(f"{key}: {value!r} of {self.architecture}; expected an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return _number(key, self.raw(key, default))

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise OracleError(f"{key}: {value!r} of {self.architecture}; expected true or false")
        return value

    def only(self, key: str, *known: Any) -> None:
        """The key, where present, must have one of the known values."""
        value = self.raw(key, known[0])
        if value not in known:
            raise OracleError(
                f"{key}: {value!r} of {self.architecture} is not known; known: {', '.join(map(repr, known))}"
            )

    def refuse_unread(self) -> None:
        for key in sorted(set(self._config) - self._read - _NO_EFFECT):
            # An option that is off is no option.
            if self._config[key] not in (None, False, [], {}):
                known = ", ".join(sorted(self._read))
                value = repr(self._config[key])
                value = value if len(value) <= 80 else f"{value[:77]}..."
                raise OracleError(f"{key}: {value} is no known option of {self.architecture}; known are {known}")


def _number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise OracleError(f"{key}: {value!r}; expected a finite number")
    return float(value)


def _build(reader: _Reader) -> ModelSpec:
    reader.only("hidden_act", "silu", "swish")
    hidden = reader.whole("hidden_size")
    heads = reader.whole("num_attention_heads")
    max_position = reader.whole("max_position_embeddings")
    latent = reader.architecture in _DEEPSEEK
    rope_dim = reader.whole("qk_rope_head_dim") if latent else reader.whole("head_dim", hidden // heads)
    rope, mscale_all_dim = _rope(reader, rope_dim, max_position, latent)
    attention = _latent(reader, heads, rope, mscale_all_dim) if latent else _grouped_query(reader, heads, rope_dim)
    mixture = _mixture(reader)
    llama = reader.architecture == "LlamaForCausalLM"
    return ModelSpec(
        architecture=reader.architecture,
        vocab=reader.whole("vocab_size"),
        hidden=hidden,
        layers=_layers(reader, mixture is not None),
        attention=attention,
        rope=rope,
        intermediate=reader.whole("intermediate_size"),
        mlp_bias=reader.flag("mlp_bias", False) if llama else False,
        mixture=mixture,
        norm_eps=reader.number("rms_norm_eps", 1e-5 if reader.architecture == "MixtralForCausalLM" else 1e-6),
        tied=reader.flag("tie_word_embeddings", False),
        max_position=max_position,
    )


def _grouped_query(reader: _Reader, heads: int, head_dim: int) -> GroupedQuery:
    kv_heads = reader.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise OracleError(f"num_key_value_heads: {kv_heads} does not divide {heads} query heads")
    return GroupedQuery(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qk_norm=reader.architecture in _QWEN3,
        bias=False if reader.architecture == "MixtralForCausalLM" else reader.flag("attention_bias", False),
    )


def _latent(reader: _Reader, heads: int, rope: RopeSpec, mscale_all_dim: float) -> Latent:
    reader.only("num_key_value_heads", heads)
    nope = reader.whole("qk_nope_head_dim")
    reader.only("qk_head_dim", nope + rope.dim)
    reader.only("head_dim", rope.dim, nope + rope.dim)
    # YaRN as DeepSeek trains it: the temperature of arXiv 2309.00071 eq. 22, once for queries and once for keys.
    temperature = _mscale(rope.factor, mscale_all_dim) if mscale_all_dim else 1.0
    return Latent(
        heads=heads,
        q_lora=reader.whole("q_lora_rank", 0, least=0),
        kv_lora=reader.whole("kv_lora_rank"),
        nope=nope,
        rope=rope.dim,
        value=reader.whole("v_head_dim"),
        scale=(nope + rope.dim) ** -0.5 * temperature * temperature,
        bias=reader.flag("attention_bias", False),
        norm_eps=_LATENT_EPS,
    )


def _rope(reader: _Reader, dim: int, max_position: int, latent: bool) -> tuple[RopeSpec, float]:
    """The rotary part, and DeepSeek's ``mscale_all_dim`` (0 where absent)."""
    if dim % 2:
        raise OracleError(f"rotary width {dim} of {reader.architecture} is odd; channels rotate in pairs")
    theta = reader.number("rope_theta", _DEFAULT_THETA.get(reader.architecture, 1e4))
    old, new = reader.raw("rope_scaling"), reader.raw("rope_parameters")
    found = old or new or {}
    if not isinstance(found, Mapping):
        raise OracleError(f"rope_parameters: {found!r}; expected an object")
    values = {key: value for key, value in found.items() if value is not None}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise OracleError(f"rope_type: {kind!r} is not known; known are {', '.join(_ROPE_KEYS)}")
    for key in sorted(set(values) - _ROPE_KEYS[kind]):
        known = ", ".join(sorted(_ROPE_KEYS[kind]))
        raise OracleError(f"rope_parameters.{key}: {values[key]!r} is no option of rope_type {kind}; known are {known}")
    theta = _number("rope_theta", values.get("rope_theta", theta))
    interleaved = latent and reader.flag("rope_interleave", True)
    if kind == "default":
        return RopeSpec("default", dim, theta, interleaved=interleaved), 0.0
    numbers = {
        key: _number(f"rope_parameters.{key}", value) for key, value in values.items() if key not in _NOT_NUMBERS
    }
    original = numbers.get("original_max_position_embeddings", float(max_position))
    if kind == "llama3":
        missing = {"factor", "low_freq_factor", "high_freq_factor"} - set(numbers)
        if missing:
            raise OracleError(f"rope_parameters.{min(missing)}: missing; rope_type llama3 needs it")
        return RopeSpec(
            "llama3",
            dim,
            theta,
            factor=numbers["factor"],
            original_max_position=int(original),
            low_freq_factor=numbers["low_freq_factor"],
            high_freq_factor=numbers["high_freq_factor"],
            interleaved=interleaved,
        ), 0.0
    factor = numbers.get("factor", max_position / original)
    mscale, mscale_all_dim = numbers.get("mscale", 0.0), numbers.get("mscale_all_dim", 0.0)
    if "attention_factor" in numbers:
        scale = numbers["attention_factor"]
    elif mscale and mscale_all_dim:
        scale = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    else:
        scale = _mscale(factor, 1.0)
    return RopeSpec(
        "yarn",
        dim,
        theta,
        scale=scale,
        factor=factor,
        original_max_position=int(original),
        beta_fast=numbers.get("beta_fast", 0.0) or 32.0,
        beta_slow=numbers.get("beta_slow", 0.0) or 1.0,
        truncate=bool(values.get("truncate", True)),
        interleaved=interleaved,
    ), mscale_all_dim


_NOT_NUMBERS = frozenset({"rope_type", "type", "truncate"})


def _mscale(factor: float, coefficient: float) -> float:
    """0.1 m ln(s) + 1 for s > 1 (arXiv 2309.00071, eq. 22), else 1."""
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


def _mixture(reader: _Reader) -> MixtureSpec | None:
    architecture = reader.architecture
    if architecture == "MixtralForCausalLM":
        experts = _experts(reader, "num_local_experts", "num_experts")
        router = _router(reader, experts, renormalise=True)
        return MixtureSpec(router, reader.whole("intermediate_size"), 0)
    if architecture == "Qwen3MoeForCausalLM":
        experts = _experts(reader, "num_experts", "num_local_experts")
        router = _router(reader, experts, renormalise=reader.flag("norm_topk_prob", False))
        return MixtureSpec(router, reader.whole("moe_intermediate_size"), 0)
    if architecture in _DEEPSEEK:
        reader.only("scoring_func", "sigmoid")
        reader.only("topk_method", "noaux_tc")
        reader.only("moe_layer_freq", 1)
        experts = _experts(reader, "n_routed_experts", "num_local_experts", "num_experts")
        width = reader.whole("moe_intermediate_size")
        return MixtureSpec(_grouped_router(reader, experts), width, width * reader.whole("n_shared_experts", least=0))
    return None


def _experts(reader: _Reader, *spellings: str) -> int:
    found = {reader.raw(key) for key in spellings} - {None}
    if len(found) > 1:
        raise OracleError(f"{spellings[0]}: {' and '.join(spellings)} disagree ({sorted(found)})")
    return reader.whole(next((key for key in spellings if reader.raw(key) is not None), spellings[0]))


def _router(reader: _Reader, experts: int, renormalise: bool) -> RouterSpec:
    chosen = reader.whole("num_experts_per_tok")
    if chosen > experts:
        raise OracleError(f"num_experts_per_tok: {chosen} of {experts} experts; expected at most {experts}")
    return RouterSpec(experts, chosen, "softmax", False, 1, 1, renormalise, 0.0, 1.0)


def _grouped_router(reader: _Reader, experts: int) -> RouterSpec:
    chosen = reader.whole("num_experts_per_tok")
    groups, kept = reader.whole("n_group"), reader.whole("topk_group")
    if experts % groups or experts // groups < 2:
        raise OracleError(f"n_group: {groups} groups of {experts} experts; expected equal groups of at least 2")
    if kept > groups or chosen > kept * (experts // groups):
        raise OracleError(f"topk_group: {kept} of {groups} groups cannot give {chosen} of {experts} experts")
    return RouterSpec(
        experts=experts,
        chosen=chosen,
        scoring="sigmoid",
        selection_bias=True,
        groups=groups,
        groups_kept=kept,
        renormalise=reader.flag("norm_topk_prob", True),
        renormalise_eps=1e-20,
        scale=reader.number("routed_scaling_factor"),
    )


def _layers(reader: _Reader, mixture: bool) -> tuple[LayerSpec, ...]:
    count = reader.whole("num_hidden_layers")
    windows = _windows(reader, count)
    sparse = [mixture] * count
    if reader.architecture in _DEEPSEEK:
        first = reader.whole("first_k_dense_replace", least=0)
        sparse = [layer >= first for layer in range(count)]
    elif reader.architecture == "Qwen3MoeForCausalLM":
        step, dense = reader.whole("decoder_sparse_step", 1), reader.raw("mlp_only_layers", [])
        sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]
    return tuple(LayerSpec(window, moe) for window, moe in zip(windows, sparse, strict=True))


def _windows(reader: _Reader, count: int) -> list[int]:
    if reader.architecture == "MixtralForCausalLM":
        return [reader.whole("sliding_window", 0, least=0)] * count
    if reader.architecture not in _QWEN3:
        return [0] * count
    window, first = reader.whole("sliding_window", 0, least=0), reader.whole("max_window_layers", 0, least=0)
    if not reader.flag("use_sliding_window", False):
        window = 0
    if reader.architecture == "Qwen3MoeForCausalLM":
        if window and first:
            raise OracleError(f"max_window_layers: {first} with use_sliding_window is read in two ways; set it to 0")
        return [window] * count
    kinds = reader.raw("layer_types")
    if kinds is None:
        return [window if layer >= first else 0 for layer in range(count)]
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= set(known):
        raise OracleError(f"layer_types: {kinds!r}; expected one of {', '.join(known)} for each of {count} layers")
    return [known[kind] for kind in kinds]
