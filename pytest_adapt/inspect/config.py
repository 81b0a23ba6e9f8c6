"""Reading a Hugging Face config.json into a `Structure`, and saying exactly what is wrong with one that cannot be.

Field names and their meaning follow the transformers configuration classes of each family. A missing or
contradictory field is an error that names it; an option or operator that pytest-adapt has no reference for is
a gap, listed before anything runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_adapt.inspect.structure import Attention, FeedForward, InspectError, Layer, Structure

__all__ = ["FAMILIES", "from_config", "load_config"]

# Families whose every operator has a reference.
FAMILIES = ("llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2")
_QK_NORM = ("qwen3", "qwen3_moe")
_ACTIVATIONS = ("silu", "swish")
_ROPE_TYPES = ("default", "yarn", "llama3")
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "int8": 8}
_LAYER_TYPES = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
}
# Options that do not change the structure and need no operator, beside those read below.
_NEUTRAL = frozenset(
    {"architectures", "model_type", "auto_map", "transformers_version", "_name_or_path", "name_or_path", "use_cache",
     "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "initializer_range",
     "attention_dropout", "pretraining_tp", "rms_norm_eps", "output_router_logits", "router_aux_loss_coef",
     "aux_loss_alpha", "seq_aux", "router_jitter_noise", "num_nextn_predict_layers", "ep_size", "rope_theta",
     "rope_interleave", "norm_topk_prob", "routed_scaling_factor", "max_window_layers", "id2label", "label2id",
     "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
     "tokenizer_class", "task_specific_params", "problem_type", "hidden_dropout", "resid_pdrop", "embd_pdrop"}
)  # fmt: skip


def load_config(path: Path) -> Mapping[str, Any]:
    """Parse a config.json (or the one inside a directory). Raises InspectError naming file and cause."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InspectError(f"{file}: cannot be read: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise InspectError(f"{file}: is not UTF-8 text") from None
    except (ValueError, RecursionError) as problem:
        raise InspectError(f"{file}: is not JSON: {str(problem).splitlines()[0]}") from None
    if not isinstance(raw, dict):
        raise InspectError(f"{file}: holds {type(raw).__name__}, expected an object with the model's fields")
    return raw


def from_config(raw: Mapping[str, Any], name: str = "config.json") -> Structure:
    """Structure of a model from its parsed config.json. Raises InspectError with the field named."""
    outer = raw
    gaps: list[str] = []
    if isinstance(raw.get("text_config"), dict):
        raw = {**{key: outer[key] for key in ("model_type", "architectures") if key in outer}, **raw["text_config"]}
        gaps += [
            f"{key}: only the language model is analysed" for key in outer if key in ("vision_config", "audio_config")
        ]
    reader = _Reader(raw, name)
    layers = _layers(reader)
    structure = Structure(
        name=name,
        architecture=_architecture(raw, outer),
        hidden=reader.whole("hidden_size"),
        vocab=reader.whole("vocab_size"),
        context=reader.whole("max_position_embeddings"),
        layers=layers,
        tied=reader.flag("tie_word_embeddings", bool(outer.get("tie_word_embeddings", False))),
        weight_bits=_bits(reader),
    )
    _check_rope(reader, gaps)
    gaps = [*_family_gap(raw), *gaps, *reader.gaps, *reader.unread()]
    return replace(structure, gaps=tuple(dict.fromkeys(gaps)))


class _Reader:
    """Typed access that names the field in every refusal and remembers what was read."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        self.raw = raw
        self.name = name
        self.gaps: list[str] = []
        self._read: set[str] = set()

    def wrong(self, what: str) -> InspectError:
        return InspectError(f"{self.name}: {what}")

    def get(self, *keys: str) -> Any:
        """Value of the first of several spellings; two spellings that disagree are an error."""
        self._read.update(keys)
        found = {key: self.raw[key] for key in keys if self.raw.get(key) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise self.wrong(f"fields {' and '.join(found)} contradict each other ({', '.join(map(repr, values))})")
        return values[0] if values else None

    def whole(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(*keys)
        if value is None:
            value = default
        if value is None:
            spelled = f"{keys[0]} (also spelled {', '.join(keys[1:])})" if len(keys) > 1 else keys[0]
            raise self.wrong(f"field {spelled} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(f"field {keys[0]} is {value!r}, expected a whole number of at least {least}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(f"field {key} is {value!r}, expected true or false")
        return default if value is None else value

    def whole_list(self, key: str, below: int) -> list[int]:
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < below for item in value):
            raise self.wrong(f"field {key} is {value!r}, expected a list of layer numbers below {below}")
        return value

    def unread(self) -> list[str]:
        """Options that nothing here understands and that are switched on."""
        return [
            f"option {key} = {_short(self.raw[key])}: not known"
            for key in sorted(set(self.raw) - self._read - _NEUTRAL)
            if self.raw[key] not in (None, False, [], {}, 0)
        ]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _architecture(raw: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    names = outer.get("architectures") or raw.get("architectures") or [raw.get("model_type", "unknown")]
    return str(names[0]) if isinstance(names, list) and names else str(names)


def _family_gap(raw: Mapping[str, Any]) -> list[str]:
    kind = raw.get("model_type")
    return [] if kind in FAMILIES else [f"model_type {kind!r}: no reference; known are {', '.join(FAMILIES)}"]


def _bits(reader: _Reader) -> float:
    quantisation = reader.get("quantization_config")
    if quantisation is not None:
        if not isinstance(quantisation, Mapping):
            raise reader.wrong(f"field quantization_config is {quantisation!r}, expected an object")
        method = quantisation.get("quant_method", "unknown")
        reader.gaps.append(f"quantization_config: weights stored as {method}; no reference for it")
        bits = quantisation.get("bits", {"fp8": 8, "mxfp4": 4.25}.get(str(method), 16))
        return float(bits)
    kind = str(reader.get("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
    if kind not in _BITS:
        reader.gaps.append(f"dtype {kind!r}: not known")
    return float(_BITS.get(kind, 16))


def _check_rope(reader: _Reader, gaps: list[str]) -> None:
    old, new = reader.get("rope_scaling"), reader.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise reader.wrong(f"field {key} is {value!r}, expected an object")
    theta, inner = reader.get("rope_theta"), (new or {}).get("rope_theta")
    if theta is not None and inner is not None and theta != inner:
        raise reader.wrong(f"fields rope_theta and rope_parameters.rope_theta contradict each other ({theta}, {inner})")
    if old and new:
        kinds = [value.get("rope_type", value.get("type", "default")) for value in (old, new)]
        if kinds[0] != kinds[1]:
            raise reader.wrong(
                f"fields rope_scaling and rope_parameters contradict each other ({kinds[0]}, {kinds[1]})"
            )
        for key in sorted(set(old) & set(new)):
            if old[key] != new[key]:
                both = f"({old[key]}, {new[key]})"
                raise reader.wrong(f"fields rope_scaling.{key} and rope_parameters.{key} contradict each other {both}")
    scaling = {**(new or {}), **(old or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_TYPES:
        gaps.append(f"rotary scaling {kind!r}: no reference; known are {', '.join(_ROPE_TYPES)}")
    partial = reader.get("partial_rotary_factor")
    if partial is None:
        partial = scaling.get("partial_rotary_factor", 1.0)
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise reader.wrong(f"field partial_rotary_factor is {partial!r}, expected a number above 0 and at most 1")
    if partial != 1:
        gaps.append(f"partial rotary embedding ({partial}): no reference")
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    for key, value in (("factor", factor), ("original_max_position_embeddings", original)):
        bad = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0
        if value is not None and bad:
            raise reader.wrong(f"field rope_scaling.{key} is {value!r}, expected a positive number")


def _layers(reader: _Reader) -> tuple[Layer, ...]:
    count = reader.whole("num_hidden_layers", "n_layer", "num_layers")
    activation = reader.get("hidden_act", "hidden_activation")
    if activation is not None and activation not in _ACTIVATIONS:
        reader.gaps.append(f"activation {activation!r}: no reference; known are {', '.join(_ACTIVATIONS)}")
    attention = _latent(reader) if reader.get("kv_lora_rank") is not None else _grouped(reader)
    schemes = _schemes(reader, count)
    dense, mixture = _feed_forward(reader)
    sparse = _sparse_layers(reader, count) if mixture else set()
    if dense is None and len(sparse) < count:
        raise reader.wrong("field intermediate_size is missing, and some layers are dense")
    layers = []
    for index in range(count):
        scheme, reach = schemes[index]
        placed = replace(attention, scheme=scheme, reach=reach)
        chosen = mixture if index in sparse else dense
        assert chosen is not None
        layers.append(Layer(placed, chosen))
    return tuple(layers)


def _grouped(reader: _Reader) -> Attention:
    hidden, heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    kv_heads = reader.whole("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise reader.wrong(
            f"field num_key_value_heads is {kv_heads}, which does not divide num_attention_heads {heads}"
        )
    if reader.get("head_dim") is None and hidden % heads:
        raise reader.wrong(
            f"field hidden_size {hidden} does not divide by num_attention_heads {heads}, and head_dim is missing"
        )
    width = reader.whole("head_dim", default=hidden // heads)
    if width % 2:
        raise reader.wrong(f"field head_dim is {width}; rotary embedding needs an even one")
    kind = reader.raw.get("model_type")
    qkv_bias = reader.flag("attention_bias", kind == "qwen2") or reader.flag("qkv_bias")
    return Attention(
        heads,
        kv_heads,
        width,
        width,
        qkv_bias=qkv_bias,
        out_bias=qkv_bias and kind not in ("qwen2", "glm4_moe"),
        norm_params=2 * width if kind in _QK_NORM or reader.flag("use_qk_norm") else 0,
    )


def _latent(reader: _Reader) -> Attention:
    heads = reader.whole("num_attention_heads")
    nope, rope = reader.whole("qk_nope_head_dim"), reader.whole("qk_rope_head_dim")
    both = reader.get("qk_head_dim")
    if both is not None and both != nope + rope:
        raise reader.wrong(f"field qk_head_dim is {both!r}, but qk_nope_head_dim + qk_rope_head_dim is {nope + rope}")
    if rope % 2:
        raise reader.wrong(f"field qk_rope_head_dim is {rope}; rotary embedding needs an even one")
    reader.get("head_dim")  # spelled as the rotary width by some exporters, as the whole by others
    kv_heads = reader.whole("num_key_value_heads", default=heads)
    if kv_heads != heads:
        raise reader.wrong(
            f"field num_key_value_heads is {kv_heads}; latent attention has one per query head ({heads})"
        )
    bias = reader.flag("attention_bias")
    return Attention(
        heads,
        heads,
        nope + rope,
        reader.whole("v_head_dim"),
        q_lora=reader.whole("q_lora_rank", default=0, least=0),
        kv_lora=reader.whole("kv_lora_rank"),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
    )


def _schemes(reader: _Reader, count: int) -> list[tuple[str, int]]:
    """(scheme, reach) of each layer, from layer_types, a window, or an attention chunk."""
    window = reader.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise reader.wrong(f"field sliding_window is {window!r}, expected a whole number of at least 1 or null")
    if not reader.flag("use_sliding_window", True):
        window = None
    chunk = reader.whole("attention_chunk_size", default=0, least=0)
    kinds = reader.get("layer_types")
    if kinds is None:
        return [("window", window) if window else ("chunked", chunk) if chunk else ("full", 0)] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        size = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise reader.wrong(f"field layer_types lists {size} layers, num_hidden_layers says {count}")
    found = []
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            reader.gaps.append(f"attention {kind!r}: no reference; sized as full attention")
        scheme = _LAYER_TYPES.get(kind, "full")
        reach = {"window": window, "chunked": chunk}.get(scheme, 0)
        if scheme != "full" and not reach:
            raise reader.wrong(f"field layer_types asks for {kind}, but {_REACH_FIELD[scheme]} is missing")
        found.append((scheme, reach or 0))
    return found


_REACH_FIELD = {"window": "sliding_window", "chunked": "attention_chunk_size"}


def _feed_forward(reader: _Reader) -> tuple[FeedForward | None, FeedForward | None]:
    """(dense layer or None, sparse layer or None)."""
    bias = reader.flag("mlp_bias")
    experts = reader.get("num_experts", "num_local_experts", "n_routed_experts")
    inter = reader.get("intermediate_size")
    dense = FeedForward(reader.whole("intermediate_size"), bias=bias) if inter is not None or not experts else None
    if not experts:
        return dense, None
    experts = reader.whole("num_experts", "num_local_experts", "n_routed_experts")
    chosen = reader.whole("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
    if chosen > experts:
        raise reader.wrong(f"field num_experts_per_tok is {chosen}, more than the {experts} experts")
    groups, kept = reader.whole("n_group", default=1), reader.whole("topk_group", default=1)
    if experts % groups:
        raise reader.wrong(f"field n_group is {groups}, which does not divide {experts} experts")
    if kept > groups:
        raise reader.wrong(f"field topk_group is {kept}, more than n_group {groups}")
    if chosen > experts // groups * kept:
        raise reader.wrong(
            f"field num_experts_per_tok is {chosen}; {kept} groups hold only {experts // groups * kept} experts"
        )
    scoring = reader.get("scoring_func", "score_function") or "softmax"
    if scoring not in ("softmax", "sigmoid"):
        reader.gaps.append(f"router scoring {scoring!r}: no reference; known are softmax, sigmoid")
    method = reader.get("topk_method")
    if method not in (None, "noaux_tc", "greedy", "group_limited_greedy"):
        reader.gaps.append(f"expert selection {method!r}: no reference")
    kind = reader.raw.get("model_type")
    # Mixtral and its like have no dense layers, and so one width only.
    one_width = kind == "mixtral" or (kind not in FAMILIES and reader.get("moe_intermediate_size") is None)
    width = reader.whole("intermediate_size" if one_width else "moe_intermediate_size")
    shared = reader.whole("n_shared_experts", "num_shared_experts", default=0, least=0) * width
    shared = reader.whole("shared_expert_intermediate_size", default=shared, least=0)
    biased = method == "noaux_tc" or kind in ("deepseek_v3", "kimi_k2", "glm4_moe")
    return dense, FeedForward(
        width, experts, chosen, shared, shared_gate="shared_expert_intermediate_size" in reader.raw,
        selection_bias=biased, groups=groups, groups_kept=kept,
    )  # fmt: skip


def _sparse_layers(reader: _Reader, count: int) -> set[int]:
    first = reader.whole("first_k_dense_replace", default=0, least=0)
    if first > count:
        raise reader.wrong(f"field first_k_dense_replace is {first}, more than num_hidden_layers {count}")
    every = reader.whole("moe_layer_freq", default=1)
    step = reader.whole("decoder_sparse_step", default=1)
    dense = set(reader.whole_list("mlp_only_layers", count))
    return {
        i for i in range(count)
        if i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense
    }  # fmt: skip
