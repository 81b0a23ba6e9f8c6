"""Promise: the declared length is served and answered rightly, one token more is refused, and costs grow with the
length no faster than they must."""

import itertools

import pytest

SHOWN = ("logits", "topk", "text")


@pytest.mark.requirement(70, 75, 102, 104)
@pytest.mark.adapt(rung="long_context", classes="needle", profile="day0", needs=SHOWN)
def test_the_longest_context_is_served_and_one_token_more_is_refused(target, model, precision, reference, judge):
    """Prompt and output together: up to as many tokens as the deployment asked for, in steps that double; then more
    than the target allows. On the way the peak of memory is watched: scores of all for all others grow fourfold."""
    served = target.with_features(prefill_chunk=512) if target.supports("prefill_chunk", 512) else target
    wanted = target.deployment.max_context
    watched = target.shows_memory
    lengths, peaks = [wanted // 8, wanted // 4, wanted // 2, wanted - 1], []
    rounds = itertools.count(1)

    def measured(whole):
        before = served.peak_memory(reset=True) if watched else 0
        response = served.generate(whole.tokens, 1, first_row=len(whole.tokens))
        return response, served.peak_memory() - before if watched else 0

    def again():
        number = next(rounds)  # other prompts: a cache of what was read would need no memory
        return [measured(model.longest(length, number))[1] for length in lengths]

    served.generate(model.longest(lengths[0]).tokens, 1)  # what is allocated once is there
    for length in lengths:
        whole = model.longest(length)
        response, peak = measured(whole)
        peaks.append(peak)
        if response.error is not None:
            accepted = served.longest(lambda length: model.longest(length).tokens, length + 1)
            judge.promise("accepted", False, f"{accepted} of {wanted} tokens; beyond: {response.error}")
            return
        judge.recalled(whole.name, response, whole, reference.record(whole.name, whole.tokens))
    # One head's scores in 16 bits are two bytes for each pair of tokens; what is less may be the allocator's noise.
    judge.growth("memory.exponent", lengths, peaks, most=1, least=[1.5 * length**2 for length in lengths], again=again)
    limit = target.limit
    edge = model.longest(limit)
    response = served.generate(edge.tokens, 1, first_row=limit)
    if response.error is None:  # the last token is never fed, so there may be room for it; then it must be right
        judge.recalled(edge.name, response, edge, reference.record(edge.name, edge.tokens))
    beyond = served.generate(model.longest(limit + 1).tokens, 1, first_row=limit + 1)
    judge.promise("refused", beyond.error is not None, f"a prompt of {limit + 1} tokens was accepted, {limit} may be")
    judge.promise("named", str(limit) in (beyond.error or ""), f"the refusal does not name {limit}: {beyond.error}")


@pytest.mark.requirement(104, 105)
@pytest.mark.adapt_serial
@pytest.mark.adapt(rung="long_context", classes="needle", profile="full", needs=("text",))
def test_time_grows_no_faster_than_attention(target, model, precision, judge):
    """A prompt may cost the square of its length, a token of output its length; no absolute time is judged."""
    lengths = (1024, 2048, 4096, 8192)
    prefill, decode = [], []
    for length in lengths:
        prompt = model.longest(length).tokens
        target.generate(prompt, 2, ("text",))
        timed = [target.generate(prompt, 16, ("text",), timed=True) for _ in range(3)]
        if any(one.first_token_seconds is None for one in timed):
            judge.promise("first_token_seconds", True, "not shown: the whole answer is timed")
            prefill.append(min(one.seconds for one in timed))
            continue
        prefill.append(min(one.first_token_seconds for one in timed))
        decode.append(min(one.seconds - one.first_token_seconds for one in timed) / 15)
    # Noise is no growth: a cost is judged where it has doubled.
    judge.growth("prefill_seconds.exponent", lengths, prefill, most=2, least=[prefill[0]] * 4)
    if len(decode) == len(lengths):
        judge.growth("decode_seconds.exponent", lengths, decode, most=1, least=[decode[0]] * 4)
