"""What must not change an answer: page size, chunking, batching, decode instead of prefill, prefix hits, eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapt_engine import Engine, SequenceRequest, SequenceResult

from .conftest import FAMILIES, VOCAB

Answer = Callable[..., SequenceResult]


def prompts(count: int) -> list[tuple[int, ...]]:
    """Unequal lengths around page and chunk borders."""
    torch.manual_seed(count)
    lengths = [1, 15, 16, 17, 31, 5, 48, 2][:count]
    return [tuple(torch.randint(0, VOCAB, (length,)).tolist()) for length in lengths]


@pytest.mark.requirement(69)
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_cache_equals_contiguous(family: str, opened: Any, prompt: tuple[int, ...], answer: Answer) -> None:
    """One page holds everything, or pages are one token long: the same numbers, bit for bit."""
    contiguous = answer(opened(family, page_size=256), prompt, want_logits=True, max_new_tokens=5)
    for page in (1, 7, 16):
        paged = answer(opened(family, page_size=page), prompt, want_logits=True, max_new_tokens=5)
        assert paged.tokens == contiguous.tokens
        assert torch.equal(paged.logits, contiguous.logits)


@pytest.mark.requirement(75)
@pytest.mark.parametrize("chunk", [1, 7, 16, 69])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_one_shot(
    family: str, chunk: int, opened: Any, prompt: tuple[int, ...], answer: Answer, rounding: Callable[[str], float]
) -> None:
    whole = answer(opened(family), prompt, want_logits=True).logits
    engine = opened(family, prefill_chunk=chunk)
    pieces = answer(engine, prompt, want_logits=True).logits
    assert engine.stats()["steps"] == -(-len(prompt) // chunk)
    assert float((whole - pieces).abs().max()) <= rounding(family)


@pytest.mark.requirement(82)
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_equals_prefill(
    family: str, opened: Any, prompt: tuple[int, ...], answer: Answer, rounding: Callable[[str], float]
) -> None:
    """Logits of generated tokens, one by one, equal those of the same tokens scored as a prompt."""
    engine = opened(family)
    decoded = answer(engine, prompt[:40], max_new_tokens=30, want_logits=True)
    assert len(decoded.tokens) == 30 and decoded.logits.shape[0] == 69
    scored = answer(engine, prompt[:40] + decoded.tokens[:-1], want_logits=True)
    assert float((decoded.logits - scored.logits).abs().max()) <= rounding(family)


@pytest.mark.requirement(104)
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_of_many_equals_alone(family: str, opened: Any, answer: Answer, rounding: Callable[[str], float]) -> None:
    """Unequal prompts and output lengths together, in either order, more of them than fit a batch."""
    engine = opened(family, max_batch=3)
    requests = [
        SequenceRequest(str(index), tokens, max_new_tokens=2 + index, want_logits=True)
        for index, tokens in enumerate(prompts(8))
    ]
    alone = {request.id: next(iter(engine.run([request]))) for request in requests}
    for order in (requests, requests[::-1]):
        together = {result.id: result for result in engine.run(order)}
        assert set(together) == set(alone)
        for name, result in together.items():
            assert result.tokens == alone[name].tokens
            assert float((result.logits - alone[name].logits).abs().max()) <= rounding(family)
    assert engine.stats()["largest_batch"] == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hit_equals_cold(
    family: str, opened: Any, prompt: tuple[int, ...], answer: Answer, rounding: Callable[[str], float]
) -> None:
    engine = opened(family, prefix_cache=True)
    cold = answer(engine, prompt, want_logits=True, max_new_tokens=6)
    assert cold.cached_tokens == 0
    warm = answer(engine, prompt, want_logits=True, max_new_tokens=6, first_row=64)
    assert warm.cached_tokens == 64
    assert warm.tokens == cold.tokens
    assert float((warm.logits - cold.logits[64:]).abs().max()) <= rounding(family)
    # Rows that the caller wants to see are computed, not taken from the cache.
    assert answer(engine, prompt, want_logits=True, first_row=20).cached_tokens == 16
    assert answer(engine, prompt, want_logits=True).cached_tokens == 0
    # A common beginning is enough; the page in which prompts part is not shared.
    other = (*prompt[:40], (prompt[40] + 1) % VOCAB, *prompt[41:])
    assert answer(engine, other).cached_tokens == 32
    assert answer(engine, (*prompt[:3], (prompt[3] + 1) % VOCAB, *prompt[4:])).cached_tokens == 0


def test_generated_tokens_are_found_by_the_next_turn(opened: Any, prompt: tuple[int, ...], answer: Answer) -> None:
    engine = opened("qwen3_moe", prefix_cache=True)
    first = answer(engine, prompt[:20], max_new_tokens=30)
    turn = (*prompt[:20], *first.tokens, 5, 6)
    assert answer(engine, turn).cached_tokens == 48
    # The last token drawn was never computed: a page that it completes is not there.
    second = answer(engine, prompt[20:40], max_new_tokens=28)
    assert answer(engine, (*prompt[20:40], *second.tokens, 5)).cached_tokens == 32


@pytest.mark.requirement(69)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_eviction_keeps_answers_and_accounts(family: str, opened: Any, answer: Answer) -> None:
    """A pool of 8 pages serves many different prompts with the prefix cache on, and evicts old ones for it."""
    engine = opened(family, prefix_cache=True, kv_tokens=128)
    fresh = opened(family)
    torch.manual_seed(3)
    seen = [tuple(torch.randint(0, VOCAB, (60,)).tolist()) for _ in range(6)]
    for tokens in (*seen, *seen[::-1]):
        expected = answer(fresh, tokens, max_new_tokens=4)
        assert answer(engine, tokens, max_new_tokens=4).tokens == expected.tokens
        engine.check_integrity()
        assert engine.stats()["kv_blocks_available"] == 8
    assert engine.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_run_gives_the_same_bits(family: str, opened: Any, prompt: tuple[int, ...]) -> None:
    requests = [
        SequenceRequest(str(index), tokens, max_new_tokens=4, want_logits=True)
        for index, tokens in enumerate(prompts(5))
    ]
    runs: list[dict[str, SequenceResult]] = []
    for _ in range(2):
        engine: Engine = opened(family)
        runs.extend({result.id: result for result in engine.run(requests)} for _ in range(2))
    for run in runs[1:]:
        for name, result in run.items():
            assert result.tokens == runs[0][name].tokens
            assert torch.equal(result.logits, runs[0][name].logits)


def test_attention_never_holds_a_square_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row blocks of any size give the same result, so a block, not the sequence, bounds the memory."""
    from adapt_engine.kernels import reference

    torch.manual_seed(0)
    q, k, v = torch.randn(50, 6, 8), torch.randn(50, 2, 8), torch.randn(50, 2, 9)
    where = torch.arange(50)
    settings = {"q_positions": where, "k_positions": where, "scale": 8**-0.5, "window": 13}
    truth = naive_attention(q, k, v, 13)
    eps = torch.finfo(torch.float32).eps
    # A convex mixture of at most 13 values: relative to the largest value, one rounding for each of its terms,
    # and for each of the 8 products in a score, whose error acts through the exponential.
    bound = (13 + 8 * float(q.abs().max() * k.abs().max())) * eps * float(v.abs().max())
    for block in (1, 6 * 50 * 3, 1 << 30):
        monkeypatch.setattr(reference, "_SCORE_BLOCK", block)
        assert float((reference.attention(q, k, v, **settings).double() - truth).abs().max()) <= bound


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Textbook attention in float64 with an explicit mask."""
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * q.shape[-1] ** -0.5
    at = torch.arange(q.shape[0])
    hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - window)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
