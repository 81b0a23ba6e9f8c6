"""What a model is, by configuration: frozen specs that every other part reads.

No class per model family: `adapt_engine.families` turns a Hugging Face config.json into these, and the
transformer is assembled from them. Sizes are those of the whole, unsharded model (logical coordinates).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .errors import ConfigError

__all__ = ["AttentionSpec", "DenseSpec", "LayerSpec", "ModelSpec", "MoESpec", "RopeSpec"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of ``dim`` components per head.

    Frequencies: Su et al. 2021 (RoFormer); ``linear``: position interpolation, Chen et al. 2023;
    ``yarn``: Peng et al. 2023; ``llama3``: the Llama 3.1 report's frequency bands.
    """

    dim: int
    theta: float
    kind: str = "default"
    """default, linear, llama3 or yarn."""
    interleaved: bool = False
    """Pairs are (0, 1), (2, 3) ... instead of (i, i + dim / 2); the output is always in halves."""
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN)."""


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer: ``gqa`` (keys and values per head) or ``mla`` (one compressed row per token)."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query and key head; for mla nope_dim + rope_dim."""
    value_dim: int
    """Width of a value head."""
    rope: RopeSpec
    scale: float
    """Multiplies query . key: head_dim ** -0.5, times YaRN's squared mscale where the family has it."""
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    """A query sees this many keys, itself included; None sees all before it."""
    norm_eps: float = 1e-6
    """Epsilon of the per-head norms (gqa) or of the latent norms (mla)."""
    q_lora: int = 0
    """mla: rank of the compressed query; 0 projects queries directly."""
    kv_lora: int = 0
    nope_dim: int = 0
    rope_dim: int = 0


@dataclass(frozen=True)
class DenseSpec:
    """A gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    inter: int
    bias: bool = False


@dataclass(frozen=True)
class MoESpec:
    """A routed feed-forward layer."""

    experts: int
    top_k: int
    inter: int
    score: str
    """softmax or sigmoid of the router logits."""
    renormalise: bool
    """Divide the chosen scores by their sum."""
    selection_bias: bool = False
    """A per-expert bias is added to scores for the choice only (never to the weights)."""
    groups: int = 1
    top_groups: int = 1
    """Groups are ranked by the sum of their two best biased scores; experts of the others are out."""
    routed_scale: float = 1.0
    shared_inter: int = 0
    """Width of all shared experts together; 0 means none."""
    module: str = "mlp"
    """Name of the block in a checkpoint."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's matrices in a checkpoint, in the order gate, up, down."""


@dataclass(frozen=True)
class LayerSpec:
    attention: AttentionSpec
    ffn: DenseSpec | MoESpec


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder: embedding, layers, final norm, head."""

    architecture: str
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied: bool
    """The head is the embedding table."""
    max_positions: int
    dtype: str
    """Precision that config.json names for the stored weights: fp32, bf16, fp16, or empty."""
    eos: tuple[int, ...] = ()
    draft_layers: int = 0
    """Multi-token-prediction layers that may follow in the checkpoint; not loaded."""

    def validate(self) -> None:
        """Raises ConfigError that names the first contradiction."""
        for name, value in (("vocab_size", self.vocab), ("hidden_size", self.hidden)):
            _require(value > 0, name, value, "must be positive")
        _require(len(self.layers) > 0, "num_hidden_layers", len(self.layers), "must be positive")
        _require(self.norm_eps > 0, "rms_norm_eps", self.norm_eps, "must be positive")
        for layer in self.layers:
            _check_attention(layer.attention)
            if isinstance(layer.ffn, MoESpec):
                _check_moe(layer.ffn)
            else:
                _require(layer.ffn.inter > 0, "intermediate_size", layer.ffn.inter, "must be positive")

    def sites(self) -> Iterator[str]:
        """Names of every site that can be tapped, in dataflow order."""
        yield "embed"
        for index, layer in enumerate(self.layers):
            for name in _layer_sites(layer):
                yield f"layer.{index}.{name}"
        yield "final.norm"
        yield "logits"


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"config.json: key {key!r} is {value!r}: {rule}")


def _check_attention(spec: AttentionSpec) -> None:
    _require(spec.heads > 0, "num_attention_heads", spec.heads, "must be positive")
    _require(
        0 < spec.kv_heads <= spec.heads and spec.heads % spec.kv_heads == 0,
        "num_key_value_heads",
        spec.kv_heads,
        f"must divide num_attention_heads = {spec.heads}",
    )
    _require(spec.head_dim > 0, "head_dim", spec.head_dim, "must be positive")
    _require(spec.value_dim > 0, "v_head_dim", spec.value_dim, "must be positive")
    key = "qk_rope_head_dim" if spec.kind == "mla" else "head_dim"
    _require(spec.rope.dim > 0 and spec.rope.dim % 2 == 0, key, spec.rope.dim, "rotary pairs need an even width")
    _require(spec.rope.theta > 0, "rope_theta", spec.rope.theta, "must be positive")
    _require(spec.rope.factor > 0, "rope_parameters.factor", spec.rope.factor, "must be positive")
    if spec.rope.kind in ("yarn", "llama3"):
        _require(
            spec.rope.original_context > 0,
            "rope_parameters.original_max_position_embeddings",
            spec.rope.original_context,
            "must be positive",
        )
    _require(spec.window is None or spec.window > 0, "sliding_window", spec.window, "must be positive or null")
    if spec.kind == "mla":
        _require(spec.kv_lora > 0, "kv_lora_rank", spec.kv_lora, "must be positive")
        _require(spec.nope_dim > 0, "qk_nope_head_dim", spec.nope_dim, "must be positive")
        _require(spec.q_lora >= 0, "q_lora_rank", spec.q_lora, "must be positive or null")


def _check_moe(spec: MoESpec) -> None:
    _require(0 < spec.experts <= 1 << 16, "num_experts", spec.experts, "must lie in 1..65536")
    _require(
        0 < spec.top_k <= spec.experts, "num_experts_per_tok", spec.top_k, f"must lie in 1..{spec.experts} (experts)"
    )
    _require(spec.inter > 0, "moe_intermediate_size", spec.inter, "must be positive")
    _require(
        spec.groups > 0 and spec.experts % spec.groups == 0,
        "n_group",
        spec.groups,
        f"must divide the {spec.experts} experts",
    )
    _require(
        0 < spec.top_groups <= spec.groups, "topk_group", spec.top_groups, f"must lie in 1..{spec.groups} (n_group)"
    )
    per_group = spec.experts // spec.groups
    _require(
        spec.top_k <= spec.top_groups * per_group,
        "num_experts_per_tok",
        spec.top_k,
        f"{spec.top_groups} groups of {per_group} experts hold fewer",
    )
    _require(
        spec.groups == 1 or per_group >= 2,
        "n_group",
        spec.groups,
        "a group is ranked by its two best experts: needs two",
    )
    _require(spec.routed_scale > 0, "routed_scaling_factor", spec.routed_scale, "must be positive")


_GQA = ("attn.q", "attn.k", "attn.v")
_MLA = ("attn.kv_a", "attn.kv_a_norm", "attn.kv_b")
_MOE = (
    "moe.router.logits",
    "moe.router.scores",
    "moe.router.selection",
    "moe.router.ids",
    "moe.router.weights",
    "moe.experts.gate",
    "moe.experts.up",
    "moe.experts.act",
    "moe.experts.down",
    "moe.routed",
)


def _layer_sites(layer: LayerSpec) -> Iterator[str]:
    attention = layer.attention
    yield "attn.norm"
    if attention.kind == "mla":
        if attention.q_lora:
            yield from ("attn.q_a", "attn.q_a_norm")
        yield "attn.q"
        yield from _MLA
    else:
        yield from _GQA
        if attention.qk_norm:
            yield from ("attn.q_norm", "attn.k_norm")
    yield from ("attn.q_rope", "attn.k_rope", "attn.context", "attn.out", "attn.residual", "ffn.norm")
    if isinstance(layer.ffn, MoESpec):
        yield from _MOE
        if layer.ffn.shared_inter:
            yield "moe.shared"
    else:
        yield from ("ffn.gate", "ffn.up", "ffn.act")
    yield from ("ffn.out", "residual")
