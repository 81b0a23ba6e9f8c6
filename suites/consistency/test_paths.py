"""Promise: one sequence has one answer, whatever path it takes through the engine. Needs no golden."""

import math

import pytest

from pytest_adapt.target.protocol import Request, Sampling
from pytest_adapt.verdict.result import Status
from pytest_adapt.verdict.status import Verdict

NUMBERS = ("logits", "score", "topk")
"""A prompt that is only scored shows a text-only target's answer to nothing."""
SHOWN = (*NUMBERS, "text")


@pytest.mark.requirement(82)
@pytest.mark.adapt(rung="consistent", needs=NUMBERS)
def test_decode_equals_prefill(target, model, precision, reference, judge):
    """Rows produced while generating equal the rows of one teacher-forced pass over the same tokens."""
    for name, tokens in model.prompts(64).items():
        generated = target.generate(tokens, 16, want=SHOWN)
        whole = tokens + generated.tokens[:-1]
        judge.agree(f"{name}: decode against prefill", generated, target.score(whole), reference.record(name, whole))


@pytest.mark.requirement(75, 114)
@pytest.mark.adapt(rung="consistent", needs=NUMBERS, features={"prefill_chunk": (0, 1, 7, 16)})
def test_chunked_prefill_equals_one_shot(target, model, precision, reference, judge):
    """The same prompt in one piece and in chunks that do not divide it."""
    prompts = model.prompts(96)
    one_shot = {name: target.score(tokens) for name, tokens in prompts.items()}
    for chunk in (1, 7, 16):
        chunked = target.with_features(prefill_chunk=chunk)
        for name, tokens in prompts.items():
            what = f"{name}: chunks of {chunk} against one shot"
            judge.agree(what, chunked.score(tokens), one_shot[name], reference.record(name, tokens))


@pytest.mark.requirement(114)
@pytest.mark.adapt(rung="consistent", needs=NUMBERS)
def test_a_batch_equals_each_request_alone(target, model, precision, reference, judge):
    """Neighbours, batch size and order change no answer."""
    prompts = model.prompts(96)
    alone = {name: target.score(tokens) for name, tokens in prompts.items()}
    for order in (list(prompts), list(reversed(prompts))):
        together = target.score_all({name: prompts[name] for name in order})
        for name in order:
            judge.agree(
                f"{name}: in a batch against alone", together[name], alone[name], reference.record(name, prompts[name])
            )


@pytest.mark.requirement(69)
@pytest.mark.adapt(rung="consistent", needs=NUMBERS, features={"prefix_cache": (0, 1)})
def test_a_prefix_hit_equals_a_cold_start(target, model, precision, reference, judge):
    """Sent four times: a block stored under a wrong key shows at the second or third."""
    prompts = model.prompts(96)
    cold = {name: target.score(tokens) for name, tokens in prompts.items()}
    cached = target.with_features(prefix_cache=1)
    for name, tokens in prompts.items():
        record = reference.record(name, tokens)
        for attempt in range(1, 5):
            judge.agree(f"{name}: prefix hit {attempt} against cold", cached.generate(tokens, 1), cold[name], record)


@pytest.mark.requirement(98)
@pytest.mark.adapt(rung="consistent", needs=NUMBERS)
def test_repeated_requests_agree(target, model, precision, reference, judge):
    for name, tokens in model.prompts(64).items():
        record = reference.record(name, tokens)
        first = target.score(tokens)
        for attempt in range(2, 5):
            judge.agree(f"{name}: attempt {attempt} against the first", target.score(tokens), first, record)


@pytest.mark.requirement(90)
@pytest.mark.adapt(rung="consistent", needs=("text",))
def test_output_ends_with_a_stop_token(target, model, precision, judge):
    """The first one that comes is the end, and part of the output; one that the prompt holds ends nothing."""
    count, found = 16, {}
    # Greedy output may repeat itself; drawn at a high temperature it does not. What is drawn need not be drawn twice.
    for sampling in (Sampling(), Sampling(2.0, seed=1)):
        for name, tokens in model.prompts().items():
            if found and len(tokens) > 64:
                break
            whole = target.generate(tokens, count, want=("text",), sampling=sampling).tokens
            # Not one of the first tokens, which may be out before the engine looks; none that came before; and not the
            # end token, at which a server may stop that knows no others.
            known = model.end_tokens
            places = [at for at in range(2, len(whole) - 1) if whole[at] not in whole[:at] and whole[at] not in known]
            if places:
                stop, before = whole[places[0]], [token for token in tokens if token not in whole]
                again = target.generate(tokens, count, want=("text",), sampling=sampling, stop=(*before[-1:], stop))
                found[name] = stop, again
        if found:
            break
    if not found:
        raise Verdict(Status.UNKNOWN, "every output repeats its first tokens: none can end it anywhere else")
    if target.kind == "endpoint" and all(stop in response.tokens[:-1] for stop, response in found.values()):
        raise Verdict(Status.UNSUPPORTED, f"{target.info.name} shows no token ids, or does not end at them")
    for name, (stop, response) in found.items():
        last = response.tokens[-1:] == (stop,)
        ok = stop not in response.tokens[:-1] and last == (response.finish == "stop")
        ok = ok and (last or len(response.tokens) == count)
        detail = f"stop token {stop}: {len(response.tokens)} of {count} tokens came, {list(response.tokens)}, "
        detail += f"finish {response.finish!r}; the first one that comes must be the last token, and finish 'stop'"
        judge.promise("stop", ok, detail, prompt=name, observable="text", compared=len(response.tokens))


@pytest.mark.requirement(90)
@pytest.mark.adapt(rung="consistent", needs=("text",), profile="day0", models=("qwen3-moe-aligned",))
def test_the_end_token_ends_an_output_that_does_not_ignore_it(target, model, precision, judge):
    """Drawn so hot that each token is as likely as any other, the end token comes in nearly every batch of outputs."""
    count, ends = 32, model.end_tokens
    # None of n outputs would end with a chance of 10^-6.
    outputs = math.ceil(6 * math.log(10) * model.vocab_size / len(ends) / count)
    prompt = next(iter(model.prompts().values()))
    hot = [Sampling(100.0, seed=number) for number in range(outputs)]
    drawn = target.run(
        Request(f"end#{one.seed}", prompt, count, frozenset({"text"}), sampling=one, ignore_eos=False) for one in hot
    )
    refused = [one.error for one in drawn.values() if one.error]
    if len(refused) == outputs:
        raise Verdict(Status.UNSUPPORTED, f"a temperature of {hot[0].temperature:g} is refused: {refused[0]}")
    detail = f"{len(refused)} of {outputs} requests are refused: {refused[:1]}"
    judge.promise("end.answered", not refused, detail, compared=outputs)
    if shown := [one for one in drawn.values() if one.tokens]:
        late = [one for one in shown if ends & set(one.tokens[:-1])]
        detail = f"{len(late)} of {len(shown)} outputs go on after the end token"
        judge.promise("end.last", not late, detail, compared=len(shown))
    ended = sum(one.finish == "stop" for one in drawn.values())
    detail = f"{ended} of {outputs} outputs of at most {count} tokens end by themselves; with draws this hot some must"
    judge.promise("end.met", ended > 0, detail, compared=outputs)
    whole = [one for one in drawn.values() if one.finish == "stop" and len(one.tokens) == count]
    odd = [one for one in whole if one.tokens[-1] not in ends]
    detail = f"{len(odd)} outputs of all {count} tokens say 'stop' without an end token"
    judge.promise("end.finish", not odd, detail, compared=outputs)
