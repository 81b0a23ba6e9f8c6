"""WL: weights loaded from the wrong place, in the wrong layout, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

ALL_MOE = ("qwen3-moe-odd", "mixtral-odd", "deepseek-v3-odd-pos")


def _reading(change: Callable[[str, Any], Any]) -> Callable[[Seams], None]:
    """Install ``change(checkpoint name, tensor)`` behind the loader's read."""

    def install(seams: Seams) -> None:
        def wrapper(original: Operation) -> Operation:
            def read(*arguments: Any, **named: Any) -> Any:
                tensor = original(*arguments, **named)
                return change(named["name"] if "name" in named else arguments[-1], tensor)

            return read

        seams.wrap("loader.read", wrapper)

    return install


def _key_rows_permuted(name: str, tensor: Any) -> Any:
    """Rows of k_proj taken as interleaved pairs: what a converter leaves that un-permutes with a wrong head count."""
    if not name.endswith("layers.0.self_attn.k_proj.weight"):
        return tensor
    half = tensor.shape[0] // 2
    return tensor.reshape(half, 2, -1).transpose(0, 1).reshape(tensor.shape).contiguous()


def _expert_left_unread(name: str, tensor: Any) -> Any:
    return (
        tensor * 0
        if ".layers.2." in name and ".experts.2." in name and ("up_proj" in name or ".w3." in name)
        else tensor
    )


def _stale_copy(name: str, tensor: Any) -> Any:
    return tensor * 0.96875 if name.endswith("layers.1.self_attn.o_proj.weight") else tensor


def _gate_and_up_exchanged(name: str, tensor: Any) -> Any:
    """Rows of gate_proj read as interleaved pairs: what a kernel for the other fused layout sees."""
    if ".layers.2." in name and ".experts." in name and ("gate_proj" in name or ".w1." in name):
        return tensor.reshape(2, tensor.shape[0] // 2, -1).transpose(0, 1).reshape(tensor.shape).contiguous()
    return tensor


def _tail_of_a_file_reads_as_zero(name: str, tensor: Any) -> Any:
    """A file shorter than its header says: what is mapped beyond its end is zero."""
    if not name.endswith("layers.1.self_attn.v_proj.weight"):
        return tensor
    tensor = tensor.clone()
    tensor[-tensor.shape[0] // 4 :] = 0
    return tensor


def _keys_under_another_name(name: str, tensor: Any) -> Any:
    """Two predicates disagree on what the tensor is called: its parameter stays as it was allocated."""
    return tensor * 0 if name.endswith("layers.1.self_attn.k_proj.weight") else tensor


def _not_finite_is_zero(seams: Seams) -> None:
    """A loader that cleans what it reads lets a damaged tensor pass."""

    def wrapper(original: Operation) -> Operation:
        def assign(loader: Any, parameter: str, tensor: Any) -> Any:
            return original(loader, parameter, tensor.nan_to_num(0.0, 0.0, 0.0))

        return assign

    seams.wrap("loader.assign", wrapper)


def _head_taken_from_the_embedding(seams: Seams) -> None:
    """The flag that ties them is read from the wrong level of the configuration: the stored head is left out."""
    tables: list[Any] = []

    def embedding(original: Operation) -> Operation:
        def look_up(table: Any, ids: Any) -> Any:
            tables[:] = [table]
            return original(table, ids)

        return look_up

    seams.wrap("embedding", embedding)
    seams.wrap("lm_head", lambda original: lambda x, weight: original(x, tables[0]))


def _norm_scaled(name: str, tensor: Any) -> Any:
    return tensor * 1.0625 if name.endswith("layers.1.post_attention_layernorm.weight") else tensor


def _head_untied(seams: Seams) -> None:
    """The tied head keeps other rows than the embedding: every token answers for its neighbour."""
    seams.wrap("lm_head", lambda original: lambda x, weight: original(x, weight.roll(1, 0).contiguous()))


def _swapped_experts(seams: Seams) -> None:
    """Expert 1 is computed with expert 0's weights and the reverse, in layer 2 only."""

    def wrapper(original: Operation) -> Operation:
        def experts(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any, *rest: Any, **named: Any) -> Any:
            if seams.layer() == 2:
                order = [1, 0, *range(2, len(gate))]
                gate, up, down = gate[order], up[order], down[order]
            return original(x, ids, weights, gate, up, down, *rest, **named)

        return experts

    seams.wrap("experts", wrapper)


FAULTS = (
    Fault(
        "WL09",
        "Key rows un-permuted with the wrong head count",
        "llama.cpp#3364",
        56,
        "correctness",
        "attn.k",
        ("qwen3-moe-odd", "mixtral-odd", "llama-odd"),
        _reading(_key_rows_permuted),
        0,
    ),
    Fault(
        "WL11",
        "One expert's up projection is never read",
        "1Cat-vLLM#21",
        15,
        "correctness",
        "moe.experts.up",
        ALL_MOE,
        _reading(_expert_left_unread),
        2,
    ),
    Fault(
        "WL14",
        "The tail of a shard reads as zeros",
        "vmlx-swift#217",
        11,
        "correctness",
        "attn.v",
        ("qwen3-moe-odd", "mixtral-odd", "llama-odd"),
        _reading(_tail_of_a_file_reads_as_zero),
        1,
    ),
    Fault(
        "WL17",
        "The stored head is left out as if it were tied",
        "vllm#51063",
        56,
        "correctness",
        "logits",
        ("qwen3-moe-odd",),
        _head_taken_from_the_embedding,
    ),
    Fault(
        "WL19",
        "Keys of one layer are stored under a name that nobody reads",
        "TransformerLens#1620",
        15,
        "correctness",
        "attn.k",
        ("qwen3-moe-odd", "mixtral-odd", "llama-odd"),
        _reading(_keys_under_another_name),
        1,
    ),
    Fault(
        "WL92",
        "Weights that are not finite are taken as zero",
        "own, after vllm#34930",
        15,
        "loading",
        "",
        ("qwen3-moe-odd",),
        _not_finite_is_zero,
        observable="text",
        where="damaged",
        says="the target loaded it",
    ),
    Fault(
        "WL15",
        "A stale copy of one tensor replaces the indexed one",
        "vllm#54230",
        11,
        "correctness",
        "attn.out",
        ("qwen3-moe-odd", "mixtral-odd", "llama-odd"),
        _reading(_stale_copy),
        1,
        difficulty="hard",
    ),
    Fault(
        "WL16",
        "The tied head is not the embedding",
        "vllm#5621",
        56,
        "correctness",
        "logits",
        ("qwen3-moe-odd-raw",),
        _head_untied,
    ),
    Fault(
        "WL20",
        "Gate rows read in the interleaved layout",
        "ROCm/ATOM#885",
        56,
        "correctness",
        "moe.experts.gate",
        ALL_MOE,
        _reading(_gate_and_up_exchanged),
        2,
    ),
    Fault(
        "WL90",
        "Two experts exchanged in one layer",
        "own, after vllm-ascend#4793",
        36,
        "correctness",
        "moe.experts.gate",
        ALL_MOE,
        _swapped_experts,
        2,
    ),
    Fault(
        "WL91",
        "One norm's weights scaled by 17/16",
        "own, after sglang#28100",
        56,
        "correctness",
        "ffn.norm",
        ("qwen3-moe-odd", "mixtral-odd", "llama-odd"),
        _reading(_norm_scaled),
        1,
    ),
)
