"""Emulated precisions: a table that says, for each named value, in which format a real engine would hold it.

The yardstick of a precision is the error of the emulation that rounds every tensor which the family's eager
transformers code materialises. Beyond the public sites (`pytest_adapt.sites`) that code materialises
intermediate tensors; they have inner names, rounded by the table, never recorded or forced:

==========================================  ==================================================================
inner name                                  value
==========================================  ==================================================================
parameter.TENSOR                            a stored weight, in the precision of the deployment
rope.cos / rope.sin                         rotation tables
<norm site>.unit                            normalised row before the weight multiplies it
<attn>.q_rope.cos / .sin (k_rope likewise)  the two products of a rotation before their sum
layer.N.attn.scores.raw                     query-key products before the scale
layer.N.ffn.silu, moe.experts.silu          silu(gate) before it multiplies up
layer.N.moe.experts.weighted                expert output times combine weight
layer.N.moe.routed.partial                  running sum over chosen experts, in ascending expert id
layer.N.moe.shared.gate / up / silu / act   inside the shared expert
==========================================  ==================================================================

Between two named values an emulation computes in float32, as the eager code's accumulators do.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .errors import OracleError

__all__ = ["FORMATS", "Rounding", "Rule", "round_bf16", "round_fp16", "round_fp32"]


def round_fp32(x: np.ndarray) -> np.ndarray:
    """Nearest float32, ties to even."""
    return x.astype(np.float32, copy=False)


def round_fp16(x: np.ndarray) -> np.ndarray:
    """Nearest IEEE half, ties to even, carried as float32; beyond 65504 it overflows to infinity."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16 of a float32, ties to even, carried as float32.

    On the bit pattern: add half of the last kept place, less one when the kept part is even, and cut.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    # The carry of a NaN's payload could reach the sign or vanish; keep NaN a NaN.
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32)).reshape(x.shape)


FORMATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"fp32": round_fp32, "bf16": round_bf16, "fp16": round_fp16}


@dataclass(frozen=True)
class Rule:
    """Names that match ``pattern`` are held in ``format``, for the listed architectures (empty: all)."""

    pattern: str
    format: str
    architectures: tuple[str, ...] = ()


_DEEPSEEK = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
_DEPLOYED = "precision of the deployment"

# First match wins. Sources: transformers 5.24, models/{llama,mixtral,qwen3_moe,deepseek_v3}/modeling_*.py.
_EAGER: tuple[Rule, ...] = (
    # The router is exempt: Llama-style families compute its logits in the low precision, but a yardstick that
    # did so would absorb illegal choices. Its input is rounded all the same (ffn.norm).
    Rule("layer.*.moe.router.logits", "fp32"),
    Rule("layer.*.moe.router.scores", "fp32"),
    Rule("layer.*.moe.router.selection", "fp32"),
    # Qwen3-MoE casts combine weights to the activations' type; Mixtral and DeepSeek multiply by float32 ones.
    Rule("layer.*.moe.router.weights", "fp32", ("MixtralForCausalLM", *_DEEPSEEK)),
    # _keep_in_fp32_modules_strict of DeepseekV3PreTrainedModel.
    Rule("parameter.*.mlp.gate.*", "fp32", _DEEPSEEK),
    Rule("*", _DEPLOYED),
)


@dataclass(frozen=True)
class Rounding:
    """An emulation: rules (first match wins), and whether sums run term by term in float32.

    With ``sequential`` every dot product and every sum adds one term after the other in float32; without it,
    sums are float32 in an order that BLAS chooses, far below the grid of the formats that the rules name.
    """

    name: str
    rules: tuple[Rule, ...]
    sequential: bool = False
    _resolved: dict[tuple[str, str], Callable[[np.ndarray], np.ndarray]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @staticmethod
    def of(precision: str) -> Rounding:
        """The eager emulation of "fp32", "bf16" or "fp16". Raises OracleError for other names."""
        if precision not in FORMATS:
            raise OracleError(f"precision {precision!r} has no emulation; known are {', '.join(FORMATS)}")
        rules = tuple(
            Rule(rule.pattern, precision if rule.format == _DEPLOYED else rule.format, rule.architectures)
            for rule in _EAGER
        )
        return Rounding(precision, rules, sequential=precision == "fp32")

    def with_eager_router(self, architecture: str) -> Rounding:
        """The same, but the router's logits are held in the format of the router's weight, as eager code does."""
        form = self.format_of("parameter.model.layers.0.mlp.gate.weight", architecture)
        return Rounding(self.name, (Rule("layer.*.moe.router.logits", form), *self.rules), self.sequential)

    def format_of(self, name: str, architecture: str) -> str:
        """Format in which the value ``name`` is held. Raises OracleError when no rule matches."""
        for rule in self.rules:
            if fnmatch.fnmatchcase(name, rule.pattern) and architecture in (rule.architectures or (architecture,)):
                return rule.format
        raise OracleError(f"emulation {self.name}: no rule for {name!r}; end the rules with the pattern '*'")

    def apply(self, name: str, x: np.ndarray, architecture: str) -> np.ndarray:
        """``x`` rounded as the rules say for ``name``; float32, same shape."""
        key = name, architecture
        if key not in self._resolved:
            self._resolved[key] = FORMATS[self.format_of(name, architecture)]
        return self._resolved[key](x)
