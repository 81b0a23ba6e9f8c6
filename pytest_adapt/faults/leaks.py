"""What goes wrong between requests: another's cache, blocks that do not come back, input that is not checked."""

from __future__ import annotations

from typing import Any

from pytest_adapt.faults.registry import Fault, Operation, Seams

BOTH = ("needle-llama", "needle-mixtral")


def _anothers_cache(seams: Seams) -> None:
    """Attention reads the cache of the sequence that was computed before, where that one is long enough."""

    def wrapper(original: Operation) -> Operation:
        held: dict[int, Any] = {}

        def gather(cache: Any, layer: int, slots: Any) -> Any:
            before, held[layer] = held.get(layer), slots
            if before is not None and len(before) >= len(slots) > 1:
                slots = before[: len(slots)]
            return original(cache, layer, slots)

        return gather

    seams.wrap("kv.gather", wrapper)


def _half_hashed(seams: Seams) -> None:
    """A page is found again by its first half."""

    def wrapper(original: Operation) -> Operation:
        def digests(cache: Any, tokens: Any) -> Any:
            size = cache._page
            halves = [token if place % size < size // 2 else 0 for place, token in enumerate(tokens)]
            return original(cache, halves)

        return digests

    seams.wrap("prefix.digests", wrapper)


def _kept_blocks(seams: Seams) -> None:
    """Every fortieth block is not given back."""

    def wrapper(original: Operation) -> Operation:
        count = 0

        def free(pool: Any, block: int) -> Any:
            nonlocal count
            count += 1
            return None if count % 40 == 0 else original(pool, block)

        return free

    seams.wrap("pool.free", wrapper)


def _repeated_token(seams: Seams) -> None:
    """A preempted sequence comes back with its last token twice."""

    def wrapper(original: Operation) -> Operation:
        def preempt(scheduler: Any, sequence: Any) -> Any:
            result = original(scheduler, sequence)
            if 0 < sequence.generated < sequence.request.max_new_tokens:
                sequence.known.append(sequence.known[-1])
            return result

        return preempt

    seams.wrap("scheduler.preempt", wrapper)


def _unchecked(seams: Seams, words: tuple[str, ...]) -> None:
    """Requests whose fault is described with one of ``words`` pass."""

    def wrapper(original: Operation) -> Operation:
        def problem(request: Any, *arguments: Any) -> Any:
            found = original(request, *arguments)
            return None if found and any(word in found for word in words) else found

        return problem

    seams.wrap("request.problem", wrapper)


def _unchecked_ids(seams: Seams) -> None:
    """Nobody asks whether an id exists, and the table is read at what it comes to, as a gather without bounds does."""
    _unchecked(seams, ("prompt token",))

    def wrapper(original: Operation) -> Operation:
        def embedding(table: Any, ids: Any) -> Any:
            return original(table, ids % len(table))

        return embedding

    seams.wrap("embedding", wrapper)


def _unchecked_sampling(seams: Seams) -> None:
    _unchecked(seams, ("temperature", "top_p"))


def _drifting_values(seams: Seams) -> None:
    """Values are read a tenth too large once many steps have been run."""

    def wrapper(original: Operation) -> Operation:
        count = 0

        def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            return original(q, k, v * 1.1 if count > 600 else v, **named)

        return attention

    seams.wrap("attention", wrapper)


def _recent_keys(seams: Seams) -> None:
    """Decode looks at the newest 256 keys alone, and is quicker for it."""

    def wrapper(original: Operation) -> Operation:
        def attention(q: Any, k: Any, v: Any, **named: Any) -> Any:
            if len(q) == 1 and len(k) > 256:
                k, v, named = k[-256:], v[-256:], {**named, "k_positions": named["k_positions"][-256:]}
            return original(q, k, v, **named)

        return attention

    seams.wrap("attention", wrapper)


def _entry(
    identifier: str,
    title: str,
    report: str,
    install: Any,
    where: str,
    says: str,
    suite: str = "stress",
    requirement: int = 102,
    precisions: tuple[str, ...] = ("fp32", "bf16"),
) -> Fault:
    return Fault(
        identifier,
        title,
        report,
        requirement,
        suite,
        "",
        BOTH,
        install,
        observable="text",
        precisions=precisions,
        where=where,
        says=says,
    )


FAULTS = (
    _entry(
        "AT14",
        "Another request's cache is read",
        "LMCache#4385",
        _anothers_cache,
        "each_of_32",
        "are the secret of",
        requirement=77,
    ),
    _entry(
        "AT23",
        "Pages found by half a hash",
        "kvcached#446",
        _half_hashed,
        "shared_beginning",
        "are not its own",
        requirement=77,
    ),
    _entry("ME03", "Blocks that do not come back", "vllm-ascend#16662", _kept_blocks, "each_of_32", "KV block"),
    _entry(
        "SC10",
        "A resumed request repeats its last token",
        "tenstorrent/vllm#395",
        _repeated_token,
        "each_of_32",
        "are not its own",
    ),
    _entry("SV09", "Unknown ids reach the model", "vllm#16529", _unchecked_ids, "abnormal", "was accepted"),
    _entry("SV90", "Sampling values are not checked", "own", _unchecked_sampling, "abnormal", "was accepted"),
    _entry(
        "SC91",
        "Values drift with use",
        "own, after kekzl/imp#89",
        _drifting_values,
        "before_and_after",
        "after against before",
    ),
    _entry(
        "PF90",
        "Quick decode that looks at few keys",
        "own",
        _recent_keys,
        "thousand",
        "are not its own",
        suite="benchmark",
        requirement=105,
    ),
)
