"""What each layer keeps per cached token. Bytes are accounted here and asserted against the allocation."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import AttentionSpec, ModelSpec

__all__ = ["KVGroup", "groups_of"]


@dataclass(frozen=True)
class KVGroup:
    """Layers whose cached rows have the same make-up."""

    kind: str
    """gqa: keys and values per head; mla: normed latent and rotated shared key."""
    layers: tuple[int, ...]
    components: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of what is kept per token and layer."""

    def bytes_per_token(self, element: int) -> int:
        """Bytes that one token takes in all layers of the group, at ``element`` bytes a number."""
        numbers = 0
        for _, shape in self.components:
            size = 1
            for length in shape:
                size *= length
            numbers += size
        return numbers * element * len(self.layers)


def _components(spec: AttentionSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if spec.kind == "mla":
        return (("latent", (spec.kv_lora,)), ("k_rope", (1, spec.rope_dim)))
    return (("k", (spec.kv_heads, spec.head_dim)), ("v", (spec.kv_heads, spec.value_dim)))


def groups_of(spec: ModelSpec, first: int = 0) -> tuple[KVGroup, ...]:
    """Groups of a model, in order of their first layer; the layers of ``spec`` are numbered from ``first``."""
    found: dict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], list[int]] = {}
    for index, layer in enumerate(spec.layers, first):
        found.setdefault((layer.attention.kind, _components(layer.attention)), []).append(index)
    return tuple(KVGroup(kind, tuple(layers), parts) for (kind, parts), layers in found.items())
