"""Memory of one card under a layout: weights, KV cache, activations, temporaries and communication buffers.

A budget, not a measurement: each term follows from the structure, the layout and the load by the formulas
below; the largest rank counts. All sizes in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pytest_adapt.inspect.parameters import Part, layer_parts, outer_parts
from pytest_adapt.inspect.structure import Attention, Layer, Linear, Structure
from pytest_adapt.layout import Layout, legal_layouts

__all__ = ["BITS", "Budget", "Load", "Plan", "budget", "kv_bytes", "kv_bytes_per_token", "plan", "weight_bytes"]

BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0}
"""Bits of one stored value, scales not included."""


@dataclass(frozen=True)
class Load:
    """What is asked of the model. ``step_tokens`` bounds the tokens of one forward pass (chunked prefill)."""

    context: int
    batch: int = 1
    precision: str = "bf16"
    kv_precision: str = "bf16"
    step_tokens: int = 8192


@dataclass(frozen=True)
class Budget:
    """Bytes on the fullest card of a layout."""

    layout: Layout
    weights: int
    kv: int
    activations: int
    temporary: int
    communication: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.temporary + self.communication


@dataclass(frozen=True)
class Plan:
    """Layouts that fit (best first), the closest one that does not, and what would help."""

    capacity: int
    """Usable bytes of one card."""
    fitting: tuple[Budget, ...]
    closest: Budget
    partitions: int
    """Cards that one copy of the model is cut over; 0 when nothing fits."""
    advice: tuple[str, ...] = ()


def kv_bytes_per_token(structure: Structure, precision: str = "bf16") -> int:
    """KV cache growth per token over all layers whose cache grows without bound or up to a reach."""
    return sum(_kv_row(layer) for layer in structure.softmax_layers) * int(BITS[precision]) // 8


def kv_bytes(structure: Structure, context: int, precision: str = "bf16") -> float:
    """KV cache of one sequence of ``context`` tokens, in bytes."""
    return sum(_kv_row(layer) * _tokens_kept(layer, context) for layer in structure.layers) * BITS[precision] / 8


def weight_bytes(params: int, precision: str) -> int:
    """Bytes of ``params`` weights: 3e12 at bf16 are 6.0 TB."""
    return math.ceil(params * BITS[precision] / 8)


def _kv_row(layer: Layer) -> int:
    """Numbers cached per token in one layer."""
    a = layer.attention
    if isinstance(a, Linear):
        return 0
    if a.latent:
        return a.kv_lora + a.rope + a.index_dim
    return a.kv_heads * (a.head_dim + a.value_dim)


def _tokens_kept(layer: Layer, context: int) -> int:
    a = layer.attention
    bounded = isinstance(a, Attention) and a.scheme in ("window", "chunked")
    return min(context, a.reach) if bounded and isinstance(a, Attention) else context


def _kv_layer(layer: Layer, layout: Layout, load: Load) -> float:
    """KV bytes of one layer on one rank. Sequence parallelism shares tokens; KV heads split up to their number."""
    a = layer.attention
    sequences = math.ceil(load.batch / layout.dp)
    if isinstance(a, Linear):
        # State in float32 and the last inputs of the convolution; both split over heads.
        state = a.v_heads * a.head_dim * a.head_dim * 4
        state += (a.conv - 1) * (2 * a.k_heads + a.v_heads) * a.head_dim * 2
        return sequences * state / min(layout.tp, a.v_heads)
    tokens = math.ceil(_tokens_kept(layer, load.context) / layout.sp)
    share = 1 if a.latent else min(layout.tp, a.kv_heads)
    return sequences * tokens * _kv_row(layer) / share * BITS[load.kv_precision] / 8


def _held(part: Part, structure: Structure, layout: Layout) -> int:
    """Parameters of a part on one rank."""
    if part.split in ("heads", "width", "vocab"):
        return math.ceil(part.params / layout.tp)
    if part.split == "kv":
        return math.ceil(part.params / min(layout.tp, structure.kv_heads))
    if part.split == "experts":
        one = part.params // structure.experts
        return math.ceil(math.ceil(structure.experts / layout.ep) * one / layout.etp)
    return part.params


def budget(structure: Structure, layout: Layout, load: Load) -> Budget:
    """Bytes on the fullest card. The embedding lies on the first stage, norm and head on the last."""
    held_by = [sum(_held(p, structure, layout) for p in layer_parts(structure, one)) for one in structure.distinct]
    kv_by = [_kv_layer(one, layout, load) for one in structure.distinct]
    layers, kv = [held_by[kind] for kind in structure.kinds], [kv_by[kind] for kind in structure.kinds]
    outer = {part.name: _held(part, structure, layout) for part in outer_parts(structure)}
    table = outer.get("embedding", outer.get("embedding = head", 0))
    last = sum(outer.values()) - table
    worst_weights = worst_kv = worst = -1.0
    for first, stop in _stages(len(layers), layout.pp):
        held = float(sum(layers[first:stop]))
        held += table if first == 0 else 0
        held += last if stop == len(layers) else 0
        held += table if stop == len(layers) and structure.tied and first > 0 else 0
        weights, cache = held * BITS[load.precision] / 8, sum(kv[first:stop])
        if weights + cache > worst:
            worst, worst_weights, worst_kv = weights + cache, weights, cache
    tokens = _step_tokens(layout, load)
    return Budget(
        layout,
        math.ceil(worst_weights),
        math.ceil(worst_kv),
        _activations(structure, layout, load, tokens),
        _temporary(structure, layout, load, tokens),
        _communication(structure, layout, load, tokens),
    )


def _stages(count: int, stages: int) -> list[tuple[int, int]]:
    """Layer ranges of pipeline stages, the first ones longer where they cannot be equal."""
    base, extra = divmod(count, stages)
    edges = [0]
    for stage in range(stages):
        edges.append(edges[-1] + base + (1 if stage < extra else 0))
    return list(zip(edges, edges[1:], strict=False))


def _step_tokens(layout: Layout, load: Load) -> int:
    """Tokens of one forward pass on one rank: a prefill chunk, or the whole prompts where they are shorter."""
    wanted = math.ceil(load.batch / layout.dp) * math.ceil(load.context / layout.sp)
    return max(1, min(load.step_tokens, wanted))


def _value_bytes(precision: str) -> int:
    """Activations stay in 16 bits where weights are narrower."""
    return 4 if precision == "fp32" else 2


def _activations(structure: Structure, layout: Layout, load: Load, tokens: int) -> int:
    """Residual stream, its normalised copy, and the widest layer's intermediates; one layer at a time is alive."""
    widest = max(_widths(structure, layer, layout) for layer in structure.distinct)
    return tokens * (2 * structure.hidden + widest) * _value_bytes(load.precision)


def _widths(structure: Structure, layer: Layer, layout: Layout) -> int:
    """Numbers per token that attention or feed-forward holds at once on one rank."""
    a, f = layer.attention, layer.feed_forward
    if isinstance(a, Linear):
        attention = (2 * a.k_heads + 3 * a.v_heads) * a.head_dim // layout.tp
    else:
        attention = a.heads * (a.head_dim + a.value_dim) // layout.tp
        attention += (a.kv_lora + a.rope) if a.latent else a.kv_heads * (a.head_dim + a.value_dim)
    if f.experts:
        # Expert parallelism evens out over many tokens: each rank computes its share of the chosen experts.
        ranks = layout.ep * layout.etp / (layout.dp * layout.sp)
        routed = math.ceil(f.chosen * (2 * f.inter + (f.latent or structure.hidden)) / max(1.0, ranks))
        feed_forward = routed + 2 * f.shared // layout.tp
    else:
        feed_forward = 2 * f.inter // layout.tp
    return max(attention, feed_forward)


def _temporary(structure: Structure, layout: Layout, load: Load, tokens: int) -> int:
    """Float32 logits of one row per sequence, router scores, and attention's running block (never S x S)."""
    sequences = math.ceil(load.batch / layout.dp)
    logits = sequences * math.ceil(structure.vocab / layout.tp) * 4
    blocks = math.ceil(structure.heads / layout.tp) * 128 * min(load.context, 4096) * 4
    return logits + blocks + tokens * structure.experts * 4


def _communication(structure: Structure, layout: Layout, load: Load, tokens: int) -> int:
    """Buffers of the collectives a layout needs: all-reduce (tp), stage hand-over (pp), dispatch and combine (ep),
    gathered key-value rows of one layer's block (sp)."""
    row = structure.hidden * _value_bytes(load.precision)
    total = 2 * tokens * row if layout.tp > 1 else 0
    total += 2 * tokens * row if layout.pp > 1 else 0
    if layout.ep > 1:
        copies = min(structure.chosen, layout.ep)
        total += 2 * tokens * copies * row
    if layout.sp > 1:
        widest = max((_kv_row(layer) for layer in structure.distinct), default=0)
        total += 2 * min(load.step_tokens, load.context) * widest * int(BITS[load.kv_precision]) // 8
    return total


def plan(structure: Structure, devices: int, memory: int, load: Load, reserve: float = 0.08) -> Plan:
    """Layouts of at most ``devices`` cards with ``memory`` bytes each, ``reserve`` of which stays free.

    The model is cut over as few cards as will hold it; what is left serves as copies (data parallelism). So more
    memory per card never means more partitions.
    """
    capacity = int(memory * (1 - reserve))
    closest: Budget | None = None
    for world in range(1, devices + 1):
        if devices % world:
            continue
        budgets = [budget(structure, layout, _share(load, devices // world)) for layout in _layouts(structure, world)]
        if not budgets:
            continue
        budgets.sort(key=_preference)
        fitting = tuple(item for item in budgets if item.total <= capacity)
        if fitting:
            return Plan(capacity, fitting, fitting[0], world, _fit_advice(structure, devices, world))
        least = min(budgets, key=lambda item: item.total)
        if closest is None or least.total < closest.total:
            closest = least
    assert closest is not None  # one card with layout "single" is always legal
    return Plan(capacity, (), closest, 0, tuple(_advice(structure, devices, memory, load, reserve)))


def _share(load: Load, copies: int) -> Load:
    """Sequences that one of several copies of the model serves."""
    return replace(load, batch=math.ceil(load.batch / copies))


def _layouts(structure: Structure, world: int) -> list[Layout]:
    """Legal layouts of one copy; tp stays within a server of 8 cards where the world is larger."""
    found = legal_layouts(
        heads=structure.heads,
        kv_heads=structure.kv_heads,
        experts=structure.experts,
        layers=len(structure.layers),
        devices=world,
        axes=("tp", "pp", "ep", "sp", "dp") if structure.experts else ("tp", "pp", "sp"),
    )
    return [layout for layout in found if layout.tp <= 8]


def _preference(item: Budget) -> tuple[int, int, int, int]:
    """Fewer pipeline stages, then fewer sequence shards, then less memory: stages idle, shards gather."""
    layout = item.layout
    return layout.pp, layout.sp, item.total, layout.tp


def _fit_advice(structure: Structure, devices: int, world: int) -> tuple[str, ...]:
    copies = devices // world
    cards = "1 card" if world == 1 else f"{world} cards"
    return (f"{copies} copies of the model side by side ({cards} each)",) if copies > 1 else ()


def _fits(structure: Structure, devices: int, memory: int, load: Load, reserve: float) -> bool:
    capacity = int(memory * (1 - reserve))
    worlds = [world for world in range(devices, 0, -1) if devices % world == 0]
    return any(
        budget(structure, layout, _share(load, devices // world)).total <= capacity
        for world in worlds
        for layout in _layouts(structure, world)
    )


def _advice(structure: Structure, devices: int, memory: int, load: Load, reserve: float) -> list[str]:
    """Single changes, each tried, that make the load fit; if none does, narrower weights and cache together."""
    found = []

    def fits(devices: int = devices, memory: int = memory, load: Load = load) -> bool:
        return _fits(structure, devices, memory, load, reserve)

    narrow = replace(load, precision="fp8") if BITS[load.precision] > 8 else load
    thin = replace(load, kv_precision="fp8") if BITS[load.kv_precision] > 8 else load
    if narrow != load and fits(load=narrow):
        found.append("weights in fp8")
    if thin != load and fits(load=thin):
        found.append("KV cache in fp8")
    if load.batch > 1 and fits(load=replace(load, batch=1)):
        found.append(
            f"batch {_largest(1, load.batch - 1, lambda n: fits(load=replace(load, batch=n)))} instead of {load.batch}"
        )
    if fits(load=replace(load, context=1024)):
        most = _largest(1024, load.context, lambda n: fits(load=replace(load, context=n)))
        found.append(f"context of {most:,} tokens instead of {load.context:,}")
    more = next((devices * factor for factor in (2, 4, 8, 16, 32, 64) if fits(devices=devices * factor)), None)
    if more:
        found.append(f"{more} cards instead of {devices}")
    gib = 1 << 30
    larger = next((memory * factor for factor in (2, 4, 8) if fits(memory=memory * factor)), None)
    if larger:
        found.append(f"cards of {larger / gib:.0f} GiB instead of {memory / gib:.0f}")
    if not found and fits(load=replace(narrow, kv_precision=thin.kv_precision)):
        found.append("weights and KV cache in fp8 together")
    return found or ["nothing tried so far: twice to sixty-four times the cards, larger cards, fp8, a shorter context"]


def _largest(low: int, high: int, fits: object) -> int:
    """Largest number in low..high that fits, given that ``low`` does and that fitting is monotone."""
    assert callable(fits)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
