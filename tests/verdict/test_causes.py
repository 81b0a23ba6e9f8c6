"""One cause makes one cluster; a second one is not hidden by the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_adapt.report.operators import alone
from pytest_adapt.verdict.causes import dataflow, worst
from pytest_adapt.verdict.ladder import Cluster, clusters
from pytest_adapt.verdict.result import CaseResult, Divergence, Measurement, Status

SUITES = {"correct": "correctness", "consistent": "consistency", "layouts": "correctness", "stress": "stress"}


def over(site: str = "", metric: str = "site.rms", value: float = 2.0) -> Measurement:
    return Measurement(metric, value, 1.0, False, "taps" if site else "logits", "random-37", 3, site, 10)


def red(rung: str, name: str, *measured: Measurement, at: str = "", **given: Any) -> CaseResult:
    divergence = Divergence(at, 3, "1", "2", 2.0, 1.0, "random-37") if at else None
    given = {"model": "qwen3-moe-odd", "layout": "single", "precision": "fp32", **given}
    return CaseResult(
        f"{SUITES[rung]}/{name}",
        Status.FAIL,
        SUITES[rung],
        rung,
        measurements=[*measured],
        divergence=divergence,
        **given,
    )


def causes(*cases: CaseResult) -> list[tuple[str, int]]:
    return [(cluster.cause, len(cluster.cases)) for cluster in clusters(cases)]


@pytest.mark.requirement(116)
def test_numbers_make_no_cause_of_their_own() -> None:
    """An engine that is stuck counts its blocks; two runs that are stuck alike have one cause."""
    cases = [
        replace(red("stress", name), reason=f"builtin: 1 sequences run, 0 wait: 0 of {blocks} blocks are in use")
        for name, blocks in (("a", 64), ("b", 128))
    ]
    codes = [replace(red("stress", str(code)), reason=f"HTTPError: HTTP {code}") for code in (404, 500)]
    assert len(clusters(codes)) == 2, "a status is no count"
    (cluster,) = clusters([*cases, replace(red("stress", "c"), reason="the server is gone")])[:1]
    assert [case.case for case in cluster.cases] == ["stress/a", "stress/b"] and "0 of 64 blocks" in cluster.cause


def test_a_lost_needle_says_more_than_the_token_in_its_place() -> None:
    token = replace(over(metric="token_match"), budget=0.0)
    needle = replace(token, metric="needles", value=1.0)
    assert worst([token, needle]) is needle and worst([needle, token]) is needle
    assert worst([needle, over(metric="logprob.rms")]) is needle  # what has no budget is beyond every one


@pytest.mark.requirement(50, 116)
def test_an_operator_alone_clears_or_convicts_the_kernel() -> None:
    def operator(name: str, status: Status) -> CaseResult:
        return CaseResult(
            f"operators/test_operators.py::test_it[m-fp32-{name}]", status, "operators", "correct", precision="fp32"
        )

    cases = [operator("rms_norm", Status.PASS), operator("rotary", Status.FAIL), operator("attention", Status.PASS)]
    assert alone(cases, "norm", "fp32").startswith("operator rms_norm alone is green: what it is given is wrong")
    assert alone(cases, "rotation", "fp32").startswith(
        "operator rotary alone is red as well: the kernel itself is wrong"
    )
    assert alone(cases, "rotation", "bf16") == alone(cases, "no such kind", "fp32") == alone([], "norm", "fp32") == ""
    # One of several that are behind a site is enough to convict; only all of them clear.
    latent = operator("latent_attention", Status.FAIL)
    assert alone([*cases, latent], "attention", "fp32").startswith("operator latent_attention alone is red")
    assert alone([*cases, replace(latent, status=Status.ERROR)], "attention", "fp32") == ""
    assert alone([operator("rms_norm", Status.UNSUPPORTED)], "norm", "fp32") == ""


@pytest.mark.requirement(50, 116)
def test_an_operator_that_is_red_by_itself_is_the_cause_of_its_sites() -> None:
    def operator(name: str) -> CaseResult:
        given = {"suite": "operators", "case": f"operators/test_operators.py::test_it[m-fp32-{name}]"}
        return replace(red("correct", name, over(metric="op.rms out")), **given)

    norms = red("correct", "sites", *sites("attn.norm", "ffn.norm"), at="layer.0.attn.norm")
    assert causes(operator("add_rms_norm"), operator("rms_norm"), norms, operator("rotary")) == [
        ("first divergence in attn.norm", 3),
        ("op.rms out beyond its budget (operators)", 1),
    ]
    assert causes(operator("rms_norm")) == [("op.rms out beyond its budget (operators)", 1)]


def test_the_case_that_names_a_lost_needle_is_shown_first() -> None:
    mean = over(metric="kl")
    lost = Measurement(
        "needles", 2.0, 0.0, False, "logits", "kept-4096", 4116, "", 32, "2 of 32 needles are not recalled"
    )
    (cluster,) = clusters([red("stress", "a", mean), red("stress", "b", mean, lost)])
    assert cluster.first.case == "stress/b"


def sites(*names: str, layers: tuple[int, ...] = (0, 1)) -> list[Measurement]:
    return [over(f"layer.{layer}.{name}") for layer in layers for name in names]


@pytest.mark.requirement(116)
def test_operations_of_one_kind_have_one_cause() -> None:
    norms = sites("attn.norm", "attn.q_norm", "attn.k_norm", "ffn.norm") + [over("final.norm")]
    # In another precision only a part of them is beyond its budget; a third case knows the first divergence alone.
    assert causes(
        red("correct", "a", *norms, at="layer.0.attn.norm"),
        red("correct", "b", *sites("attn.k_norm"), at="layer.0.attn.k_norm"),
        red("consistent", "c", over(metric="agree.rms"), at="layer.1.ffn.norm"),
    ) == [("first divergence in attn.norm", 3)]
    assert causes(
        red(
            "correct",
            "a",
            *sites("moe.experts.gate", "moe.experts.up", "moe.experts.down"),
            at="layer.0.moe.experts.gate",
        )
    ) == [("first divergence in moe.experts.gate", 1)]


@pytest.mark.requirement(116)
def test_matrix_products_that_are_off_together_have_the_product_in_common() -> None:
    everywhere = sites("attn.q", "attn.v", "attn.out", "moe.experts.up", "moe.experts.down")
    assert causes(
        red("correct", "a", *everywhere, at="layer.0.attn.q"),
        red("correct", "b", over(metric="logprob.rms"), at="layer.0.attn.q"),
        red("consistent", "c", over(metric="agree.rms"), at="layer.0.moe.experts.up"),
    ) == [("first divergence in attn.q", 3)]


@pytest.mark.requirement(116)
def test_a_residual_stream_that_comes_wrong_to_a_layer_is_one_cause() -> None:
    border = sites("attn.norm", "attn.residual", layers=(3,))
    assert causes(red("layouts", "a", *border, at="layer.3.attn.norm", layout="pp2")) == [
        ("first divergence in attn.norm", 1)
    ]


@pytest.mark.requirement(116)
def test_where_copies_drift_apart_all_that_follows_is_one_cause() -> None:
    wrong = sites("moe.shared", layers=(2,)) + sites("attn.q", "attn.context", layers=(3,))
    together = red("layouts", "a", over(metric="replicas"), *wrong, at="layer.2.moe.shared", layout="tp2")
    assert causes(together) == [("first divergence in moe.shared", 1)]
    apart = red("layouts", "b", *wrong, at="layer.2.moe.shared", layout="tp2")
    assert len(clusters([together, apart])) == 3


@pytest.mark.requirement(116)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("attn.q_rope", "moe.router.weights"),
        ("attn.k", "moe.experts.gate"),
        ("attn.norm", "attn.residual"),
        ("attn.out", "logits"),
        ("moe.routed", "moe.shared"),
    ],
)
def test_two_causes_in_one_case_are_two(one: str, other: str) -> None:
    second = over("logits") if other == "logits" else over(f"layer.2.{other}")
    both = red("correct", "a", *sites(one), second, at=f"layer.0.{one}")
    downstream = red("correct", "b", over(metric="logprob.rms"), at=f"layer.0.{one}")
    found = clusters([both, downstream])
    assert [cluster.cause for cluster in found] == [f"first divergence in {one}", f"first divergence in {other}"]
    assert [len(cluster.cases) for cluster in found] == [2, 1]
    assert found[1].sites == (second.site,)
    assert found[1].cause_of(both).sites == (second.site,)


def answers(rung: str, name: str, metric: str, **given: Any) -> CaseResult:
    return red(rung, name, over(metric=metric), **given)


@pytest.mark.requirement(116)
def test_without_sites_wrong_answers_above_the_lowest_red_rung_follow_from_it() -> None:
    assert causes(
        answers("correct", "predictions", "logprob.rms"),
        answers("correct", "greedy", "token_match"),
        answers("consistent", "batch", "agree.rms"),
        answers("layouts", "predictions", "kl", layout="tp2"),
    ) == [("logprob.rms beyond its budget (correctness)", 4)]


@pytest.mark.requirement(116)
def test_without_sites_what_says_something_else_is_a_cause_of_its_own() -> None:
    wrong = answers("correct", "predictions", "logprob.rms")
    assert len(clusters([wrong, answers("consistent", "repeat", "identical")])) == 2
    assert len(clusters([wrong, answers("stress", "storm", "returned.kv_blocks_available")])) == 2
    assert len(clusters([wrong, answers("stress", "crowd", "secret", model="needle-llama")])) == 2
    # The model that is wrong on one rank is wrong on many; one that is right there has a fault of the layout.
    assert len(clusters([wrong, answers("layouts", "predictions", "kl", layout="tp2", model="mixtral-odd")])) == 2
    assert (
        len(clusters([answers("consistent", "chunks", "agree.rms"), answers("stress", "crowd", "returned.running")]))
        == 2
    )


def test_an_exception_has_one_cause_wherever_it_was_raised() -> None:
    def broken(layout: str, reason: str) -> CaseResult:
        return replace(red("layouts", layout, layout=layout), reason=reason)

    text = "RuntimeError: cannot reshape tensor of 0 elements"
    one, two = (
        broken("ep2", f"cannot open m ep2 bf16: rank 1 (ep1): {text}"),
        broken("pp2", f"cannot open m pp2: {text}"),
    )
    assert causes(one, two) == [(one.reason, 2)]
    assert len(clusters([one, broken("sp2", "cannot open m sp2: KeyError: 'scores'")])) == 2
    assert len(clusters([one, broken("sp2", "no answer within 600 s")])) == 2


def test_a_site_that_the_vocabulary_does_not_know_comes_last() -> None:
    assert sorted(["mine", "logits", "embed"], key=dataflow) == ["embed", "logits", "mine"]
    assert isinstance(clusters([red("correct", "a", over("mine"))])[0], Cluster)


@pytest.mark.requirement(116)
def test_what_was_compared_and_failed_leads_before_what_could_not_be_judged() -> None:
    """Hidden observables on a lower rung are no reason to look for the cause there."""
    hidden = replace(red("correct", "a"), status=Status.UNKNOWN, reason="needs taps; the target shows text")
    measured = red("consistent", "b", over(metric="agree.rms"))
    for cases in ([hidden, measured], [measured, hidden]):
        assert [cluster.first.case for cluster in clusters(cases)] == ["consistency/b", "correctness/a"]
    lower = red("correct", "c", over(metric="kl"), model="llama-odd")
    assert clusters([hidden, measured, lower])[0].first.case == "correctness/c"
