"""EX, PL, AT: what goes wrong only where several ranks share a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

GQA = ("qwen3-moe-wide",)
MLA = ("deepseek-v3-wide",)
_FIRST_ROUTED = 2  # of deepseek-v3-wide, whose first layers are dense


class _Turn:
    """Tells the calls of one rank in one layer apart: 1 for the first, 2 for the second ..."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._last: dict[int, tuple[int | None, int]] = {}

    def __call__(self, rank: int) -> int:
        layer, count = self._last.get(rank, (-1, 0))
        now = self._seams.layer()
        count = count + 1 if layer == now else 1
        self._last[rank] = now, count
        return count


def _collective(seams: Seams, name: str, change: Callable[[Any, int, Callable[[], Any], tuple[Any, ...]], Any]) -> None:
    """Replace a collective by ``change(communicator, turn, call, arguments)``."""

    def wrapper(original: Operation) -> Operation:
        turn = _Turn(seams)

        def collective(self: Any, *arguments: Any, **named: Any) -> Any:
            return change(self, turn(self.rank), lambda: original(self, *arguments, **named), arguments)

        return collective

    seams.wrap(f"comm.{name}", wrapper)


def _shared_reduced(times: int) -> Callable[[Seams], None]:
    """The second all-reduce of a routed layer sums the shared experts over tp."""

    def install(seams: Seams) -> None:
        def change(comm: Any, turn: int, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
            layer = seams.layer()
            if turn != 2 or layer is None or layer < _FIRST_ROUTED:
                return call()
            partial, group, dtype = arguments
            return call() * group.size if times == 2 else partial.to(dtype)

        _collective(seams, "all_reduce", change)

    return install


def _attention_reduced_twice(seams: Seams) -> None:
    def change(comm: Any, turn: int, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        return call() * arguments[1].size if turn == 1 else call()

    _collective(seams, "all_reduce", change)


def _expert_map_shifted(seams: Seams) -> None:
    """The last ep rank stores each of its experts one place further."""

    def wrapper(original: Operation) -> Operation:
        def piece(self: Any, parameter: Any, rank: int) -> Any:
            found = original(self, parameter, rank)
            if found is None or parameter.expert < 0 or self.mesh.places[rank].ep < self.mesh.layout.ep - 1:
                return found
            return replace(found, slot=(found.slot + 1) % found.stack)

        return piece

    seams.wrap("shards.piece", wrapper)


def _weights_of_the_wrong_slot(seams: Seams) -> None:
    seams.wrap("combine", lambda original: lambda down, weights: original(down, weights.roll(1, 1)))


def _rows_beyond_capacity(seams: Seams) -> None:
    """An expert computes at most so many rows of a step; what is beyond comes back as zeros."""
    capacity = 6

    def wrapper(original: Operation) -> Operation:
        def expert_rows(x: Any, ids: Any, *rest: Any, **named: Any) -> Any:
            out = original(x, ids, *rest, **named)
            for expert in set(ids.tolist()):
                out[(ids == expert).nonzero().flatten()[capacity:]] = 0
            return out

        return expert_rows

    seams.wrap("expert_rows", wrapper)


def _one_partial_sum(seams: Seams) -> None:
    """Of the partial sums that etp ranks send back, the third exchange of a layer, only the first ones count."""

    def change(comm: Any, turn: int, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        parts = call()
        return [part * (place % 2 == 0) for place, part in enumerate(parts)] if turn % 3 == 0 else parts

    _collective(seams, "all_to_all", change)


def _kv_heads_in_turn(seams: Seams) -> None:
    """With fewer KV heads than ranks, rank r holds head r mod G instead of r // (tp / G)."""

    def wrapper(original: Operation) -> Operation:
        def piece(self: Any, parameter: Any, rank: int) -> Any:
            found = original(self, parameter, rank)
            cut = parameter.cut
            if found is None or cut is None or cut.name != "kv_heads" or cut.units >= self.mesh.layout.tp:
                return found
            head = self.mesh.places[rank].tp % cut.units
            width = parameter.shape[0] // cut.units
            part = replace(found.part, ranges=((head * width, (head + 1) * width), *found.part.ranges[1:]))
            return replace(found, part=part)

        return piece

    seams.wrap("shards.piece", wrapper)


def _cut_inside_a_head(seams: Seams) -> None:
    """Value rows are cut where a border of the fused matrix would fall: in the middle of a head."""

    def wrapper(original: Operation) -> Operation:
        def assign(self: Any, parameter: str, tensor: Any) -> Any:
            if parameter.endswith(".attn.v.weight"):
                head = self.spec.layers[0].attention.value_dim
                tensor = tensor.roll(-(head // 2), 0)
            return original(self, parameter, tensor)

        return assign

    seams.wrap("loader.assign", wrapper)


def _vocabulary_border(seams: Seams) -> None:
    """Later ranks count their embedding rows from one row too early."""

    def wrapper(original: Operation) -> Operation:
        def embedding(table: Any, ids: Any) -> Any:
            return original(table, (ids + 1).clamp(max=len(table) - 1) if seams.rank() else ids)

        return embedding

    seams.wrap("embedding", wrapper)


def _logits_joined_backwards(seams: Seams) -> None:
    """Outside the layers the first gather of a step is of embedding rows, the second of logits."""

    count: dict[int, int] = {}

    def counted(comm: Any, turn: int, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if seams.layer() is not None:
            return call()
        count[comm.rank] = count.get(comm.rank, 0) + 1
        return call()[::-1] if count[comm.rank] % 2 == 0 else call()

    _collective(seams, "all_gather", counted)


def _weights_in_bits(seams: Seams) -> None:
    """One side merges with the binary logarithm of the sum, the other expects the natural one."""

    def wrapper(original: Operation) -> Operation:
        def attention_partial(*arguments: Any, **named: Any) -> Any:
            context, weight = original(*arguments, **named)
            return context, weight / math.log(2)

        return attention_partial

    seams.wrap("attention_partial", wrapper)


def _contexts_averaged(seams: Seams) -> None:
    def wrapper(original: Operation) -> Operation:
        def attention_merge(contexts: Any, weights: Any) -> Any:
            return original(contexts, weights * 0 if bool(weights.isfinite().all()) else weights)

        return attention_merge

    seams.wrap("attention_merge", wrapper)


def _first_key_after_a_border(seams: Seams) -> None:
    """A rank that does not hold the beginning of a sequence skips its first key."""

    def wrapper(original: Operation) -> Operation:
        def attention_partial(q: Any, k: Any, v: Any, **named: Any) -> Any:
            positions = named["k_positions"]
            if len(positions) > 1 and int(positions[0]) > 0:
                k, v, named = k[1:], v[1:], {**named, "k_positions": positions[1:]}
            return original(q, k, v, **named)

        return attention_partial

    seams.wrap("attention_partial", wrapper)


def _tail_lost(seams: Seams) -> None:
    """The last of a rank's rows is not gathered."""

    def change(comm: Any, turn: int, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        parts = call()
        if arguments[1].axis != "sp":
            return parts
        parts = [part.clone() for part in parts]
        for part in parts:
            part[-1:] = 0
        return parts

    _collective(seams, "all_gather", change)


def _send_buffer_reused(seams: Seams) -> None:
    """A stage reads what the buffer held before: the rows of the step before, where it had equally many."""

    def wrapper(original: Operation) -> Operation:
        before: dict[tuple[int, tuple[int, ...]], Any] = {}

        def send(self: Any, tensor: Any, group: Any, to: int) -> Any:
            key = self.rank, tuple(tensor.shape)
            stale, before[key] = before.get(key, tensor), tensor.clone()
            return original(self, stale, group, to)

        return send

    seams.wrap("comm.send", wrapper)


def _fault(
    identifier: str,
    title: str,
    report: str,
    requirement: int,
    site: str,
    layout: str,
    models: tuple[str, ...],
    install: Callable[[Seams], None],
    layer: int | None,
    difficulty: str = "medium",
) -> Fault:
    return Fault(
        identifier,
        title,
        report,
        requirement,
        "correctness",
        site,
        models,
        install,
        layer,
        difficulty=difficulty,
        layout=layout,
    )


FAULTS = (
    _fault(
        "EX04", "Shared experts summed once more over tp", "TensorRT-LLM#15922", 34, "moe.shared", "tp2", MLA,
        _shared_reduced(2), 2,
    ),
    _fault(
        "EX91", "Shared experts never summed over tp", "own, after vllm#37856", 34, "moe.shared", "tp2", MLA,
        _shared_reduced(0), 2,
    ),
    _fault(
        "EX06", "Attention output summed twice over the same group", "sglang#37187, #37199", 34, "attn.out", "tp2", GQA,
        _attention_reduced_twice, 0,
    ),
    _fault(
        "EX08", "Expert map shifted on the last rank", "vllm-ascend#4793", 36, "moe.experts.gate", "ep4", GQA,
        _expert_map_shifted, 0,
    ),
    _fault(
        "EX11", "Combine weights of another slot", "vllm#52639", 36, "moe.routed", "ep2", GQA,
        _weights_of_the_wrong_slot, 0,
    ),
    _fault(
        "EX13", "Rows beyond an expert's capacity dropped", "DeepEP#427", 36, "moe.experts.down", "ep2", GQA,
        _rows_beyond_capacity, 0, "hard",
    ),
    _fault(
        "EX92", "Only the first partial sum of a divided expert", "own", 36, "moe.experts.down", "etp2", GQA,
        _one_partial_sum, 0,
    ),
    _fault(
        "AT03", "KV heads dealt in turn where ranks share them", "sglang#32858", 34, "attn.k", "tp4", GQA,
        _kv_heads_in_turn, 0,
    ),
    _fault(
        "AT91", "Fused projection cut inside a head", "own", 34, "attn.v", "tp2", GQA, _cut_inside_a_head, 0,
    ),
    _fault(
        "PL90", "Vocabulary border off by one", "own, after mirage#751", 34, "embed", "tp2", GQA, _vocabulary_border,
        None,
    ),
    _fault(
        "PL91", "Vocabulary parts of the logits in the wrong order", "own", 34, "logits", "tp2", GQA,
        _logits_joined_backwards, None,
    ),
    _fault(
        "AT92", "Partial attention merged by the binary logarithm", "own", 38, "attn.context", "sp2", GQA,
        _weights_in_bits, 0, "hard",
    ),
    _fault(
        "AT93", "Partial contexts averaged", "own", 38, "attn.context", "sp2", MLA, _contexts_averaged, 0,
    ),
    _fault(
        "AT94", "First key after a sequence border not read", "own", 38, "attn.context", "sp2", GQA,
        _first_key_after_a_border, 0, "hard",
    ),
    _fault(
        "PL14", "Last row of each rank not gathered", "VeOmni#1139", 38, "attn.context", "sp2", GQA, _tail_lost, 0,
        "hard",
    ),
    _fault(
        "PL01", "Send buffer of a stage reused too early", "vllm#54962", 35, "attn.norm", "pp2", GQA,
        _send_buffer_reused, 3, "hard",
    ),
)  # fmt: skip
