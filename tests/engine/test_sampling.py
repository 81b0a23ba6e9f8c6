"""Drawing tokens: greedy, seeded, filtered; and its random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapt_engine import SequenceRequest, SequenceResult
from adapt_engine.kernels.sampling import philox4x32, sample, uniform

Answer = Callable[..., SequenceResult]


def draw(logits: torch.Tensor, position: int = 0, **settings: Any) -> int:
    return sample(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, **settings}, position=position)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """Known-answer vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    assert philox4x32(counter, key) == expected


def test_uniform_numbers_depend_on_seed_and_position_and_fill_the_interval() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, -1, 1 << 40) for position in range(500)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    # Kolmogorov-Smirnov: above 1.95 / sqrt(n) with probability 0.001; the numbers are fixed, so this cannot flake.
    gaps = [abs((rank + 1) / len(numbers) - number) for rank, number in enumerate(sorted(numbers))]
    assert max(gaps) < 1.95 / len(numbers) ** 0.5


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([0.0, 3.0, -1.0, 3.0, 3.0])
    assert draw(logits, temperature=0.0) == 1


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_top_k_bounds_the_support_and_reaches_all_of_it(top_k: int) -> None:
    """Nearly flat logits, so that 400 draws miss a kept token with probability below 1e-20."""
    logits = torch.linspace(0, 0.2, 20)[torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    drawn = {draw(logits, position=position, top_k=top_k) for position in range(400)}
    assert drawn == set(logits.topk(top_k).indices.tolist())


@pytest.mark.parametrize(("top_p", "size"), [(0.01, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (1.0, 4)])
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(top_p: float, size: int) -> None:
    logits = torch.tensor([0.125, 0.5, 0.125, 0.25]).log()
    drawn = {draw(logits, position=position, top_p=top_p) for position in range(300)}
    assert drawn == set([1, 3, 0, 2][:size])


def test_top_p_that_is_reached_exactly_takes_no_further_token() -> None:
    """Four equal probabilities are exact in binary: half of the mass is two tokens, the lowest ids."""
    assert {draw(torch.zeros(4), position=position, top_p=0.5) for position in range(200)} == {0, 1}


def test_filters_combine_as_top_k_then_top_p() -> None:
    """Of the three kept by top_k, renormalised to 4/7, 2/7, 1/7, top_p = 0.8 keeps two."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert {draw(logits, position=position, top_k=3, top_p=0.8) for position in range(300)} == {0, 1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9])
    expected = (logits.double() / temperature).softmax(-1)
    draws = 4000
    counts = Counter(draw(logits, position=position, temperature=temperature) for position in range(draws))
    chi_square = sum((counts[i] - draws * float(p)) ** 2 / (draws * float(p)) for i, p in enumerate(expected))
    # 4 degrees of freedom: above 18.47 with probability 0.001; draws are fixed by the seed.
    assert chi_square < 18.47


def test_tiny_temperature_is_greedy_and_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([1e4, 1e4 + 1, -1e4])
    assert draw(logits, temperature=1e-6) == 1
    assert draw(logits * 1e30, temperature=0.1) in (0, 1)


@pytest.mark.requirement(90)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_seed_decides_the_text_whatever_runs_beside_it(
    family: str, opened: Any, prompt: tuple[int, ...], answer: Answer
) -> None:
    engine = opened(family)
    settings = {"max_new_tokens": 12, "temperature": 1.5, "top_k": 40}
    first = answer(engine, prompt[:9], seed=5, **settings)
    assert answer(engine, prompt[:9], seed=5, **settings).tokens == first.tokens
    assert answer(engine, prompt[:9], seed=6, **settings).tokens != first.tokens
    crowd = [SequenceRequest(str(seed), prompt[:9], seed=seed, **settings) for seed in range(8)]
    together = {result.id: result.tokens for result in engine.run(crowd)}
    assert together["5"] == first.tokens
    assert len(set(together.values())) == 8


@pytest.mark.requirement(90)
def test_greedy_output_is_the_argmax_of_its_own_logits(opened: Any, prompt: tuple[int, ...], answer: Answer) -> None:
    result = answer(opened("qwen3_moe"), prompt[:9], max_new_tokens=12, want_logits=True)
    assert result.finish == "length"
    assert result.tokens == tuple(result.logits[8:].argmax(-1).tolist())


def test_stop_token_ends_the_output_and_is_part_of_it(opened: Any, prompt: tuple[int, ...], answer: Answer) -> None:
    engine = opened("qwen3_moe")
    free = answer(engine, prompt[:9], max_new_tokens=12, temperature=2.0)
    place = 5
    assert free.tokens[place] not in free.tokens[:place]
    stopped = answer(engine, prompt[:9], max_new_tokens=12, temperature=2.0, stop=(free.tokens[place], 96))
    assert stopped.tokens == free.tokens[: place + 1] and stopped.finish == "stop"
