"""Promise: a target that is asked to be deterministic gives a request the same bits, whatever else changes.

Feature ``deterministic``: 1 where company, order, cuts of a prompt and threads may change, 2 where ranks may too.
"""

from dataclasses import replace

import pytest

SHOWN = ("logits", "score", "topk", "text")
NEW = 8


def ask(target, prompts, together, want=SHOWN):
    """Answers by name, so many requests in flight at a time, in the order of the prompts."""
    names, answers = list(prompts), {}
    for start in range(0, len(names), together):
        some = {name: prompts[name] for name in names[start : start + together]}
        answers |= target.generate_all(some, NEW, want=want)
    return answers


def hold(judge, what, one, other, prompts, together, expected):
    """What ``other`` answers, so many requests ``together``, has the bits of ``expected``, which ``one`` answered to
    each alone. Where it has not, every site that both show is held against each other as well."""
    found = ask(other, prompts, together)
    for name in prompts:
        judge.identical(f"{name}: {what}", found[name], expected[name])
    if judge.failures() and "taps" in other.info.observables:
        alone = ask(one.tapped(), prompts, 1, ("taps",))
        found = ask(other.tapped(), prompts, together, ("taps",))
        for name in prompts:
            judge.identical(f"{name}: {what}", found[name], alone[name])


@pytest.mark.requirement(98, 99, 114)
@pytest.mark.adapt(rung="consistent", needs=SHOWN, features={"deterministic": 1})
def test_company_and_order_change_no_bit(target, model, precision, judge):
    prompts = {**model.prompts(64), **model.load(5, 23)}
    alone = ask(target, prompts, 1)
    for together in (3, 8, len(prompts)):
        for order in (list(prompts), list(reversed(prompts))):
            named = {name: prompts[name] for name in order}
            hold(judge, f"{together} together, {order[0]} first", target, target, named, together, alone)


@pytest.mark.requirement(69, 75, 99)
@pytest.mark.adapt(rung="consistent", needs=SHOWN, features={"deterministic": 1, "prefill_chunk": (0, 1, 7, 64)})
def test_how_a_prompt_is_cut_changes_no_bit(target, model, precision, judge):
    prompts = model.prompts(96)
    whole = ask(target, prompts, 1)
    for chunk in (1, 7, 64):
        hold(judge, f"chunks of {chunk}", target, target.with_features(prefill_chunk=chunk), prompts, 3, whole)
    if target.supports("prefix_cache", 1):
        cached = target.with_features(prefix_cache=1)
        for attempt in (1, 2):
            answers = cached.generate_all(prompts, NEW, want=("logits", "text"))
            for name, answer in answers.items():
                expected = replace(whole[name], scores=None, topk=None)
                if answer.logits is not None:
                    kept = expected.logits[answer.first_row - expected.first_row :]
                    expected = replace(expected, logits=kept, first_row=answer.first_row)
                judge.identical(f"{name}: out of a cache, {attempt}", answer, expected)


@pytest.mark.requirement(99)
@pytest.mark.adapt(rung="consistent", needs=SHOWN, features={"deterministic": 1, "threads": (1, 2)})
def test_threads_change_no_bit(target, model, precision, judge):
    prompts = model.prompts(96)
    single = target.with_features(threads=1)
    hold(judge, "two threads", single, target.with_features(threads=2), prompts, 3, ask(single, prompts, 1))


@pytest.mark.requirement(34, 35, 36, 37, 38, 39, 99)
@pytest.mark.adapt(rung="layouts", needs=SHOWN, features={"deterministic": 2}, tokens=96)
def test_a_layout_changes_no_bit(target, model, layout, precision, judge):
    """One request after the other on one rank, against all of them together, their prompts cut otherwise."""
    prompts = model.prompts(96)
    single = target.variant(replace(target.deployment, layout="single"))
    alone = ask(single, prompts, 1)
    hold(judge, f"{layout} against one rank", single, target, prompts, 8, alone)
    if target.supports("prefill_chunk", 7):
        hold(judge, f"{layout}, chunks of 7", single, target.with_features(prefill_chunk=7), prompts, 3, alone)


@pytest.mark.requirement(44, 99)
@pytest.mark.adapt(
    rung="layouts",
    needs=SHOWN,
    features={"deterministic": 2, "processes": (0, 1)},
    layouts=("tp2", "tp3", "pp2", "ep2", "sp2", "dp2", "tp2.pp2", "tp2.ep2.etp2"),
    tokens=64,
)
def test_ranks_in_processes_change_no_bit(target, model, layout, precision, judge):
    prompts = model.prompts(64)
    one = ask(target, prompts, 3)
    hold(judge, f"{layout} in processes", target, target.with_features(processes=1), prompts, 3, one)
