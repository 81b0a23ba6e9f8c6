"""Sequences that get each other's memory, or lose count of what they have computed."""

from __future__ import annotations

from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

NEEDLE = ("needle-llama",)


def _block_handed_out_again(seams: Seams) -> None:
    """Now and then the block that was handed out last is handed out once more, while its owner still uses it."""

    def wrapper(original: Operation) -> Operation:
        last: dict[int, int] = {}

        def allocate(pool: Any, page: int = 0) -> int:
            block = int(original(pool, page))
            before, last[id(pool)] = last.get(id(pool)), block
            busy = before is not None and before != block and pool.is_used(before)
            if not busy or before is None or before % pool.owners != page % pool.owners or block % 5:
                return block
            pool.free(block)
            pool.share(before)
            return before

        return allocate

    seams.wrap("pool.allocate", wrapper)


def _prompt_taken_for_computed(seams: Seams) -> None:
    """A request that comes back from a preemption is taken for one whose prompt is in the cache."""

    def wrapper(original: Operation) -> Operation:
        def advance(sequence: Any, count: int) -> None:
            original(sequence, count)
            if sequence.preemptions and sequence.computed < len(sequence.request.prompt) <= sequence.reached:
                original(sequence, len(sequence.request.prompt) - sequence.computed)

        return advance

    seams.wrap("sequence.advance", wrapper)


def _prefills_taken_as_first(seams: Seams) -> None:
    """Logits of a mixed step are read as if all sequences that prefill came before those that decode."""

    def wrapper(original: Operation) -> Operation:
        def step(executor: Any, plan: Any) -> Any:
            import torch

            answers = original(executor, plan)
            for dp, sequences in enumerate(plan.replicas):
                rows, start = [], 0
                for one in sequences:
                    rows.append((one.last - one.first == 1, range(start, start + one.last - one.head)))
                    start += one.last - one.head
                order = [row for _, span in sorted(rows, key=lambda item: item[0]) for row in span]
                for answer in answers[dp].batches[:1]:
                    if answer.logits is not None and len(order) == len(answer.logits):
                        answer.logits = answer.logits[torch.tensor(order, dtype=torch.int64)]
            return answers

        return step

    seams.wrap("executor.step", wrapper)


def _late_write_after_abort(seams: Seams) -> None:
    """A transfer into the blocks of an aborted request goes on for a while after they were given to others."""
    stale: list[tuple[Any, int]] = []

    def aborting(original: Operation) -> Operation:
        def abort(scheduler: Any, request_id: str) -> Any:
            for sequence in scheduler.running:
                if sequence.request.id == request_id:
                    stale[:] = [(sequence.slots.clone(), 400)]
            return original(scheduler, request_id)

        return abort

    def writing(original: Operation) -> Operation:
        def write(cache: Any, layer: int, slots: Any, rows: Any) -> None:
            original(cache, layer, slots, rows)
            if stale:
                late, left = stale.pop()
                original(cache, layer, late, tuple(part[-1:].expand(len(late), *part.shape[1:]) for part in rows))
                if left > 1:
                    stale.append((late, left - 1))

        return write

    seams.wrap("scheduler.abort", aborting)
    seams.wrap("kv.write", writing)


def _table_taken_as_contiguous(seams: Seams) -> None:
    """A sequence is read from its first slot on, as if its blocks lay one behind the other."""

    def wrapper(original: Operation) -> Operation:
        def gather(cache: Any, layer: int, slots: Any) -> Any:
            import torch

            return original(cache, layer, (slots[0] + torch.arange(len(slots))) % cache.slots if len(slots) else slots)

        return gather

    seams.wrap("kv.gather", wrapper)


FAULTS = (
    Fault(
        "AT16",
        "A block is handed out while in use",
        "sglang#24226",
        69,
        "stress",
        "",
        NEEDLE,
        _block_handed_out_again,
        observable="text",
        difficulty="hard",
        where="each_of_32",
        says="not its own",
    ),
    Fault(
        "AT19",
        "The block table is taken as contiguous",
        "xLLM#932",
        69,
        "stress",
        "",
        NEEDLE,
        _table_taken_as_contiguous,
        observable="text",
        where="each_of_32",
        says="not its own",
    ),
    Fault(
        "ME06",
        "An aborted request's transfer writes on",
        "vllm#32255",
        77,
        "stress",
        "",
        NEEDLE,
        _late_write_after_abort,
        observable="text",
        difficulty="hard",
        where="aborted_requests",
        says="not its own",
    ),
    Fault(
        "SC06",
        "After a preemption the prompt counts as computed",
        "vllm-ascend#11334",
        85,
        "stress",
        "",
        NEEDLE,
        _prompt_taken_for_computed,
        observable="text",
        difficulty="hard",
        where="each_of_32",
        says="not its own",
    ),
    Fault(
        "SC12",
        "Prefills are taken to come first in a step",
        "own, after vllm-gaudi#642",
        76,
        "stress",
        "",
        NEEDLE,
        _prefills_taken_as_first,
        observable="text",
        where="each_of_32",
        says="not its own",
    ),
)
