"""Hugging Face config.json -> ModelSpec. One table entry per architecture; no class per model.

Reads both spellings that transformers has used: ``rope_parameters`` / ``dtype`` and ``rope_theta`` +
``rope_scaling`` / ``torch_dtype``. What would change the computed function and is not understood is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .config import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec
from .errors import CheckpointError, ConfigError

__all__ = ["ARCHITECTURES", "read_config", "spec_from_config"]

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_CONFIG_LIMIT = 16 << 20


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that change nothing in a forward pass, or that only training and tokenizing read.
_INERT = _names(
    """architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path use_cache
    initializer_range pad_token_id bos_token_id eos_token_id attention_dropout output_router_logits
    router_aux_loss_coef router_jitter_noise return_dict auto_map ep_size aux_loss_alpha seq_aux
    num_mtp_layers num_nextn_predict_layers qk_head_dim max_window_layers norm_type"""
)
_COMMON = _names(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_theta rope_scaling
    original_max_position_embeddings partial_rotary_factor attention_bias mlp_bias sliding_window pretraining_tp
    quantization_config layer_types use_sliding_window rope_interleave"""
)
_MOE_KEYS = _names(
    """num_local_experts num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers"""
)
_DEEPSEEK_KEYS = _names(
    """n_routed_experts n_shared_experts q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim n_group
    topk_group routed_scaling_factor first_k_dense_replace scoring_func topk_method moe_layer_freq"""
)
# An unknown key with such a name is likely to change the computed function; others are left alone.
_SUSPECT = re.compile(
    r"rope|rotary|attn|attention|norm|expert|router|moe|hidden|head|mlp|layer|scale|scaling|bias|window|sink|softcap"
    r"|logit|multiplier|^(qk|kv|q|v|k|n|num|use)_|clip|alibi|position|temperature"
)


class _Config:
    """Typed access to a config that names the key in every complaint."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"config.json: key {key!r} is missing; it must be an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"config.json: key {key!r} is {value!r}: must be an integer")
        if abs(value) >= 1 << 40:
            raise ConfigError(f"config.json: key {key!r} is {value!r}: absurdly large")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"config.json: key {key!r} is missing; it must be a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"config.json: key {key!r} is {value!r}: must be a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: key {key!r} is {value!r}: must be true or false")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a value outside ``allowed`` (a missing key is fine)."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            listed = ", ".join(repr(item) for item in allowed) or "absent"
            raise ConfigError(f"config.json: key {key!r} is {value!r}: this engine computes only {listed}")


def read_config(directory: str | Path) -> Mapping[str, Any]:
    """config.json of a checkpoint directory, as a mapping. Raises CheckpointError."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: not found; a checkpoint directory holds config.json and *.safetensors")
    if path.stat().st_size > _CONFIG_LIMIT:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes; a configuration has at most {_CONFIG_LIMIT}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: not valid JSON ({problem})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: holds {type(raw).__name__}, expected an object")
    return raw


def spec_from_config(raw: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json describes. Raises ConfigError naming the key, its value and what is allowed."""
    config = _Config(raw)
    names = config.get("architectures", [])
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"config.json: key 'architectures' is {names!r}: this engine computes one of {known}")
    build, keys = ARCHITECTURES[names[0]]
    _refuse_unknown(raw, keys)
    config.only("hidden_act", "silu", "swish")
    config.only("quantization_config")
    config.only("pretraining_tp", 1)
    config.only("partial_rotary_factor", 1, 1.0)
    spec = build(names[0], config)
    spec.validate()
    return spec


def _refuse_unknown(raw: Mapping[str, Any], keys: frozenset[str]) -> None:
    for key, value in raw.items():
        if key in keys or key in _INERT or not value:
            continue
        if _SUSPECT.search(key):
            raise ConfigError(
                f"config.json: key {key!r} = {value!r} is not understood; remove it if it changes nothing"
            )


def _rope(config: _Config, dim: int, *, theta: float, interleaved: bool) -> tuple[RopeSpec, float]:
    """The rotary embedding and its mscale_all_dim (0 where absent), from either spelling."""
    given = config.get("rope_parameters")
    name = "rope_parameters"
    if given is None:
        given, name = config.get("rope_scaling", {}), "rope_scaling"
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: key {name!r} is {given!r}: must be an object or null")
    known = {"rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "partial_rotary_factor"}
    known |= {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    known |= {"attention_factor"}
    for part, value in given.items():
        if part not in known and value is not None:
            raise ConfigError(f"config.json: key '{name}.{part}' = {value!r} is not understood")
    rope = _Config({f"{name}.{part}": value for part, value in given.items()})

    def key(part: str) -> str:
        return f"{name}.{part}"

    kind = rope.get(key("rope_type"), rope.get(key("type"), "default"))
    if kind not in _ROPE_KINDS:
        allowed = ", ".join(_ROPE_KINDS)
        raise ConfigError(f"config.json: key '{name}.rope_type' is {kind!r}: this engine computes {allowed}")
    rope.only(key("partial_rotary_factor"), 1, 1.0)
    base = rope.number(key("rope_theta"), config.number("rope_theta", theta))
    if config.get("rope_theta") is not None and config.number("rope_theta") != base:
        raise ConfigError(f"config.json: key 'rope_theta' is {config.get('rope_theta')!r} but '{name}' says {base!r}")
    positions = config.integer("max_position_embeddings", 2048)
    original = config.integer("original_max_position_embeddings", 0) or rope.integer(
        key("original_max_position_embeddings"), positions
    )
    factor = 1.0
    if kind != "default":
        # DeepSeek's own convention: a missing factor is the ratio of the two context lengths.
        implied = positions / original if kind == "yarn" and original else None
        factor = rope.number(key("factor"), implied)
    all_dim = rope.number(key("mscale_all_dim"), 0.0)
    return (
        RopeSpec(
            dim=dim,
            theta=base,
            kind=kind,
            interleaved=interleaved,
            factor=factor,
            original_context=original,
            low_freq_factor=rope.number(key("low_freq_factor"), 1.0 if kind != "llama3" else None),
            high_freq_factor=rope.number(key("high_freq_factor"), 4.0 if kind != "llama3" else None),
            beta_fast=rope.number(key("beta_fast"), 32.0),
            beta_slow=rope.number(key("beta_slow"), 1.0),
            truncate=rope.flag(key("truncate"), True),
            attention_factor=_attention_factor(rope, key, kind, factor, all_dim),
        ),
        all_dim,
    )


def _attention_factor(rope: _Config, key: Callable[[str], str], kind: str, factor: float, all_dim: float) -> float:
    """YaRN's factor on cos and sin: given, or mscale(factor, mscale) / mscale(factor, mscale_all_dim)."""
    if kind != "yarn":
        return 1.0
    if rope.get(key("attention_factor")) is not None:
        return rope.number(key("attention_factor"))
    mscale = rope.number(key("mscale"), 0.0)
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _gqa(config: _Config, *, theta: float, qk_norm: bool, bias: bool, out_bias: bool, eps: float) -> AttentionSpec:
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if heads <= 0 or hidden % heads:
            raise ConfigError(
                f"config.json: key 'num_attention_heads' is {heads}: must divide hidden_size = {hidden}, "
                "or head_dim must be given"
            )
        head_dim = hidden // heads
    width = config.integer("head_dim", head_dim)
    rope, _ = _rope(config, width, theta=theta, interleaved=False)
    return AttentionSpec(
        kind="gqa",
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=width,
        value_dim=width,
        rope=rope,
        scale=width**-0.5 if width > 0 else 0.0,
        qk_norm=qk_norm,
        qkv_bias=bias,
        out_bias=out_bias,
        norm_eps=eps,
    )


def _model(name: str, config: _Config, layers: list[LayerSpec], *, eps: float = 1e-6, drafts: int = 0) -> ModelSpec:
    dtype = config.get("dtype", config.get("torch_dtype", ""))
    if dtype and dtype not in _DTYPES:
        raise ConfigError(f"config.json: key 'dtype' is {dtype!r}: must be one of {', '.join(_DTYPES)}")
    eos = config.get("eos_token_id", [])
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(item, int) for item in ids):
        raise ConfigError(f"config.json: key 'eos_token_id' is {eos!r}: must be an integer or a list of them")
    return ModelSpec(
        architecture=name,
        vocab=config.integer("vocab_size"),
        hidden=config.integer("hidden_size"),
        layers=tuple(layers),
        norm_eps=config.number("rms_norm_eps", eps),
        tied=config.flag("tie_word_embeddings", False),
        max_positions=config.integer("max_position_embeddings", 2048),
        dtype=_DTYPES.get(dtype, ""),
        eos=tuple(ids),
        draft_layers=drafts,
    )


def _layer_count(config: _Config) -> int:
    count = config.integer("num_hidden_layers")
    if not 0 < count <= 4096:
        raise ConfigError(f"config.json: key 'num_hidden_layers' is {count}: must lie in 1..4096")
    return count


def _windows(config: _Config, count: int) -> list[int | None]:
    """Window of each layer where the family decides by use_sliding_window and layer_types."""
    window = config.integer("sliding_window", 0) if config.flag("use_sliding_window", False) else 0
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 28)
        return [window if window and index >= first else None for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ConfigError(f"config.json: key 'layer_types' is {kinds!r}: must list {count} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"config.json: key 'layer_types' holds {kind!r}: full_attention or sliding_attention")
        if kind == "sliding_attention" and not window:
            raise ConfigError("config.json: key 'layer_types' asks for sliding_attention but sliding_window is off")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _with_window(spec: AttentionSpec, window: int | None) -> AttentionSpec:
    return replace(spec, window=window)


def _llama(name: str, config: _Config) -> ModelSpec:
    config.only("rope_interleave", False)
    config.only("layer_types")
    bias = config.flag("attention_bias", False)
    attention = _gqa(config, theta=10000.0, qk_norm=False, bias=bias, out_bias=bias, eps=1e-6)
    ffn = DenseSpec(config.integer("intermediate_size"), config.flag("mlp_bias", False))
    return _model(name, config, [LayerSpec(attention, ffn)] * _layer_count(config))


def _qwen3(name: str, config: _Config) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    eps = config.number("rms_norm_eps", 1e-6)
    attention = _gqa(config, theta=10000.0, qk_norm=True, bias=bias, out_bias=bias, eps=eps)
    ffn = DenseSpec(config.integer("intermediate_size"))
    windows = _windows(config, _layer_count(config))
    return _model(name, config, [LayerSpec(_with_window(attention, window), ffn) for window in windows])


def _experts(config: _Config, *keys: str) -> int:
    """Number of experts under any of the names it has had; two that disagree are refused."""
    found = {key: config.integer(key) for key in keys if config.get(key) is not None}
    if not found:
        raise ConfigError(f"config.json: key {keys[0]!r} is missing; it must be an integer")
    if len(set(found.values())) > 1:
        raise ConfigError(f"config.json: keys {found!r} disagree on the number of experts")
    return next(iter(found.values()))


def _mixtral(name: str, config: _Config) -> ModelSpec:
    config.only("layer_types")
    config.only("attention_bias", False)
    attention = _gqa(config, theta=1e6, qk_norm=False, bias=False, out_bias=False, eps=1e-5)
    attention = _with_window(attention, config.integer("sliding_window", 0) or None)
    ffn = MoESpec(
        experts=_experts(config, "num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok", 2),
        inter=config.integer("intermediate_size"),
        score="softmax",
        renormalise=True,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return _model(name, config, [LayerSpec(attention, ffn)] * _layer_count(config), eps=1e-5)


def _qwen3_moe(name: str, config: _Config) -> ModelSpec:
    config.only("layer_types")
    bias = config.flag("attention_bias", False)
    eps = config.number("rms_norm_eps", 1e-6)
    attention = _gqa(config, theta=10000.0, qk_norm=True, bias=bias, out_bias=bias, eps=eps)
    if config.flag("use_sliding_window", False):
        attention = _with_window(attention, config.integer("sliding_window", 4096))
    moe = MoESpec(
        experts=_experts(config, "num_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok", 8),
        inter=config.integer("moe_intermediate_size"),
        score="softmax",
        renormalise=config.flag("norm_topk_prob", False),
    )
    step = config.integer("decoder_sparse_step", 1)
    if step < 1:
        raise ConfigError(f"config.json: key 'decoder_sparse_step' is {step}: must be positive")
    dense_layers = config.get("mlp_only_layers", [])
    if not isinstance(dense_layers, list):
        raise ConfigError(f"config.json: key 'mlp_only_layers' is {dense_layers!r}: must be a list of layer numbers")
    layers = []
    for index in range(_layer_count(config)):
        sparse = index not in dense_layers and (index + 1) % step == 0
        ffn = moe if sparse else DenseSpec(config.integer("intermediate_size"))
        layers.append(LayerSpec(attention, ffn))
    return _model(name, config, layers)


def _deepseek_v3(name: str, config: _Config) -> ModelSpec:
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    config.only("moe_layer_freq", 1)
    config.only("mlp_bias", False)
    config.only("layer_types")
    rope_dim = config.integer("qk_rope_head_dim", 64)
    nope_dim = config.integer("qk_nope_head_dim", 128)
    rope, all_dim = _rope(config, rope_dim, theta=10000.0, interleaved=config.flag("rope_interleave", True))
    width = nope_dim + rope_dim
    scale = width**-0.5 if width > 0 else 0.0
    if rope.kind != "default" and all_dim:
        scale *= _mscale(rope.factor, all_dim) ** 2
    heads = config.integer("num_attention_heads")
    config.only("num_key_value_heads", heads)
    bias = config.flag("attention_bias", False)
    attention = AttentionSpec(
        kind="mla",
        heads=heads,
        kv_heads=heads,
        head_dim=width,
        value_dim=config.integer("v_head_dim", 128),
        rope=rope,
        scale=scale,
        qkv_bias=bias,
        out_bias=bias,
        # The published code builds the latent norms with the default epsilon, not with rms_norm_eps.
        norm_eps=1e-6,
        q_lora=config.integer("q_lora_rank", 0),
        kv_lora=config.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
    )
    inter = config.integer("moe_intermediate_size", 2048)
    moe = MoESpec(
        experts=_experts(config, "n_routed_experts", "num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok", 8),
        inter=inter,
        score="sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        selection_bias=True,
        groups=config.integer("n_group", 8),
        top_groups=config.integer("topk_group", 4),
        routed_scale=config.number("routed_scaling_factor", 2.5),
        shared_inter=inter * config.integer("n_shared_experts", 1),
    )
    dense = config.integer("first_k_dense_replace", 3)
    layers = []
    for index in range(_layer_count(config)):
        ffn = moe if index >= dense else DenseSpec(config.integer("intermediate_size"))
        layers.append(LayerSpec(attention, ffn))
    drafts = config.integer("num_nextn_predict_layers", config.integer("num_mtp_layers", 0))
    return _model(name, config, layers, drafts=drafts)


ARCHITECTURES: Mapping[str, tuple[Callable[[str, _Config], ModelSpec], frozenset[str]]] = {
    "LlamaForCausalLM": (_llama, _COMMON),
    "Qwen3ForCausalLM": (_qwen3, _COMMON),
    "MixtralForCausalLM": (_mixtral, _COMMON | _MOE_KEYS),
    "Qwen3MoeForCausalLM": (_qwen3_moe, _COMMON | _MOE_KEYS),
    "DeepseekV3ForCausalLM": (_deepseek_v3, _COMMON | _MOE_KEYS | _DEEPSEEK_KEYS),
}
