"""A red run against the kill matrix: the true fault, nothing known, and what speaks for either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.faults.matrix import MatrixError
from pytest_adapt.verdict.diagnose import (
    Diagnosis,
    Match,
    _patterns,
    _reasons,
    _tempered,
    of_report,
    one_line,
    read_matrix,
)
from pytest_adapt.verdict.diagnose_cli import _lines, main
from pytest_adapt.verdict.pattern import pattern_of

SITES = "correctness/test_sites.py::test_each_operation"
PREDICTIONS = "correctness/test_predictions.py::test_predictions"
LAYOUTS = "correctness/test_layouts.py::test_each_operation"
CHUNKED = "consistency/test_paths.py::test_chunked"
CROWD = "stress/test_secrets.py::test_each_of_32"

# fault -> (site, layers, error, got / expected, first position)
WHITE_BOX = {
    "RT04": ("moe.router.weights", (2, 3), 1.5, 2.5, 0),
    "RT01": ("moe.router.weights", (2, 3), 0.2, 1.1, 0),
    "RP12": ("attn.q_rope", (0, 1), 1.1, -0.4, 1),
    "RP04": ("attn.q_rope", (0, 1), 2e-3, 1.001, 3),
    "NM05": ("attn.norm", (0, 1), 0.9, 0.1, 0),
    "AT25": ("attn.context", (0, 1), 0.4, 0.7, 2),
    "WL90": ("moe.experts.gate", (2,), 1.4, -1.2, 0),
    "EX04": ("moe.shared", (2, 3), 1.0, 2.0, 0),
}
SAID = {
    "ME03": ("returned.kv_blocks_available", "12 when all is done, 64 expected"),
    "SC10": ("secret", "3 of 24 tokens are not its own"),
    "AT14": ("secret", "24 of 24 tokens are not its own: they are the secret of walk-7, which ran beside it"),
}


def case(name: str, *, model: str, layout: str, precision: str, **given: Any) -> dict[str, Any]:
    found = {
        "case": f"{name}[{model}-{layout}-{precision}]",
        "status": "fail",
        "suite": name.partition("/")[0],
        "rung": "correct",
        "model": model,
        "layout": layout,
        "precision": precision,
        "context": 0,
        "observable": "taps",
        "reason": "beyond its budget",
        "divergence": None,
        "measurements": [],
    }
    return found | given


def measured(metric: str, value: float, site: str = "", detail: str = "") -> dict[str, Any]:
    where = {"observable": "taps" if site else "text", "prompt": "random-37", "position": 1}
    return {"metric": metric, "value": value, "budget": 0.1, "ok": False, "site": site, "detail": detail} | where


def red(fault: str, taps: bool = True, scale: float = 1.0, layout: str = "single", **cell: str) -> list[dict[str, Any]]:
    """The red cases of a fault on one deployment; values a little different by ``scale``."""
    place = {"model": "deepseek-v3-odd-pos", "layout": layout, "precision": "bf16"} | cell
    if fault in SAID:
        metric, detail = SAID[fault]
        return [case(CROWD, **place, measurements=[measured(metric, 3.0 * scale, detail=detail)])]
    site, layers, error, ratio, position = WHITE_BOX[fault]
    error *= scale
    first = {"site": f"layer.{layers[0]}.{site}", "position": position, "error": error, "step": "prefill"}
    first |= {"got": f"{0.8 * ratio * scale:.6g}", "expected": "0.8", "ranks": [], "expert": None}
    values = [measured("logprob.rms", error), measured("kl", error**2)]
    predictions = case(PREDICTIONS, **place, measurements=values, divergence=first if taps else None)
    if not taps:
        return [predictions]
    off = [measured(metric, error, f"layer.{layer}.{site}") for layer in layers for metric in ("site.rms", "site.max")]
    return [predictions, case(SITES if layout == "single" else LAYOUTS, **place, measurements=off, divergence=first)]


def as_kept(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases as a row of the matrix has them: names that say nothing are left out, eight measurements at most."""

    def plain(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value not in (None, "", [], ())}

    return [
        {
            **one,
            "divergence": plain(one["divergence"]) if one["divergence"] else None,
            "measurements": [plain(found) for found in one["measurements"][:8]],
        }
        for one in cases
    ]


def row(fault: str, observable: str = "taps", **given: Any) -> dict[str, Any]:
    cell = {"model": "deepseek-v3-odd-pos", "layout": "tp2" if fault == "EX04" else "single", "precision": "bf16"}
    cell |= {name: given.pop(name) for name in tuple(given) if name in cell}
    cases = as_kept(red(fault, observable == "taps", **cell, **given))
    greens = {CHUNKED: 1} if fault in SAID else {CHUNKED: 1, CROWD: 1}
    found = {"fault": fault, "observable": observable, "differs": True, "killed": True, "owner": True, "located": True}
    return found | cell | {"seconds": 1.0, "red": cases, "green": greens}


def matrix(*left_out: str) -> list[dict[str, Any]]:
    names = [name for name in (*WHITE_BOX, *SAID) if name not in left_out]
    rows = [
        row(name, precision=precision, scale=scale)
        for name in names
        for precision, scale in (("bf16", 1.0), ("fp32", 0.96))
    ]
    return rows + [row(name, "topk") for name in names]


def report(
    cases: list[dict[str, Any]], observables: tuple[str, ...] = ("taps", "logits", "topk", "text")
) -> dict[str, Any]:
    green = [
        {**case(name, model=one["model"], layout=one["layout"], precision=one["precision"]), "status": "pass"}
        for one in cases[:1]
        for name in (CHUNKED, CROWD)
        if not any(other["case"].startswith(name) for other in cases)
    ]
    cluster = {"cause": "a cause", "cases": [one["case"] for one in cases], "first": cases[0]["case"], "sites": []}
    return {
        "schema": 1,
        "target": {"observables": list(observables)},
        "settings": {"observables": []},
        "clusters": [cluster],
        "cases": [*cases, *green],
    }


def places(found: Diagnosis) -> list[str]:
    return [match.fault for match in found.matches]


@pytest.mark.requirement(117)
@pytest.mark.parametrize("fault", [*WHITE_BOX, *SAID])
def test_a_known_fault_is_first_on_another_precision_and_seed(fault: str) -> None:
    layout = "tp2" if fault == "EX04" else "single"
    (found,) = of_report(report(red(fault, precision="fp16", scale=1.06, layout=layout)), matrix())
    assert places(found)[0] == fault
    assert sum(match.likelihood for match in found.matches) == pytest.approx(1.0)
    assert found.matches[0].agrees
    assert found.observable == "taps"


def none_of(found: Diagnosis) -> float:
    return next(match.likelihood for match in found.matches if not match.fault)


@pytest.mark.requirement(117)
@pytest.mark.parametrize("fault", [*WHITE_BOX, *SAID])
def test_without_its_rows_a_fault_is_less_known(fault: str) -> None:
    made = report(red(fault, precision="fp16", scale=1.06))
    (unfamiliar,), (familiar,) = of_report(made, matrix(fault)), of_report(made, matrix())
    assert fault not in places(unfamiliar)
    assert none_of(unfamiliar) > none_of(familiar)


@pytest.mark.requirement(117)
@pytest.mark.parametrize("fault", ["RP12", "NM05", "AT25", "WL90", "ME03"])
def test_a_fault_unlike_every_known_one_is_not_forced_onto_one(fault: str) -> None:
    near = [other for other, (site, *_) in WHITE_BOX.items() if site == WHITE_BOX.get(fault, ("",))[0]]
    (found,) = of_report(report(red(fault, precision="fp16", scale=1.06)), matrix(fault, *near))
    assert one_line(found) == ""


@pytest.mark.requirement(117)
@pytest.mark.parametrize("fault", [name for name in WHITE_BOX if name != "EX04"])
@pytest.mark.parametrize("only", [SITES, PREDICTIONS])
def test_a_run_of_few_tests_is_compared_with_what_these_tests_show(fault: str, only: str) -> None:
    """What was not run speaks against nobody; the rest of a row is no evidence."""
    cases = [one for one in red(fault, precision="fp16", scale=1.06) if one["case"].startswith(only)]
    made = report(cases)
    made["cases"] = cases
    (found,) = of_report(made, matrix())
    assert places(found)[0] == fault
    assert not any("metric" in one or "test" in one for one in found.matches[0].differs)


def test_a_test_that_stays_green_under_a_fault_speaks_against_it() -> None:
    (cases,) = (red("SC10"),)
    made = report(cases)
    made["cases"] = cases
    (found,) = of_report(made, matrix())
    assert places(found)[0] == "SC10" and places(found).index("RT04") > places(found).index("")


def test_where_ranks_add_nothing_the_run_on_one_rank_is_compared() -> None:
    on_one = red("NM05", precision="fp16")
    on_two = [one for layout in ("tp2", "sp2", "pp2") for one in red("NM05", precision="fp16", layout=layout)[1:]]
    (alone,), (both,) = (of_report(report(cases), matrix()) for cases in (on_one, [*on_one, *on_two]))
    assert [match.likelihood for match in alone.matches] == [match.likelihood for match in both.matches]


@pytest.mark.parametrize("status", ["unknown", "inconclusive", "unchecked"])
def test_where_nothing_was_compared_nothing_known_explains_it(status: str) -> None:
    cases = [one | {"status": status} for one in red("AT25")]
    (found,) = of_report(report(cases), matrix())
    assert [(match.fault, match.likelihood) for match in found.matches] == [("", 1.0)]
    assert _lines(1, found, {}, 3)[-1] == "   nothing was compared"


@pytest.mark.requirement(117)
def test_what_nothing_known_resembles_is_none_of_the_known() -> None:
    cell = {"model": "mine", "layout": "single", "precision": "fp32"}
    strange = case(
        "loading/test_loading.py::test_refused",
        **cell,
        measurements=[measured("named", 1.0, detail="colourless green ideas")],
    )
    (found,) = of_report(report([strange]), matrix())
    assert places(found)[0] == ""


@pytest.mark.requirement(117)
def test_a_report_without_taps_is_matched_with_rows_without_taps() -> None:
    cases = red("RT04", taps=False, precision="fp32")
    (found,) = of_report(report(cases, ("topk", "text")), matrix())
    assert found.observable == "topk"
    (masked,) = of_report(report(cases) | {"settings": {"observables": ["topk", "text"]}}, matrix())
    assert masked == found
    assert places(found).index("RT04") < 3
    assert found.matches[0].likelihood < 0.8  # several faults look alike from outside
    # Where no row was made at an observable, the nearest one serves.
    (text,) = of_report(report(cases, ("text",)), matrix())
    assert text.observable == "topk"


@pytest.mark.requirement(117)
def test_a_fault_that_one_rank_shows_is_none_of_the_layout() -> None:
    on_one, on_two = red("EX04"), red("EX04", layout="tp2")
    split = of_report(report(on_two), matrix())[0]
    both = of_report(report([*on_one, *on_two]), matrix())[0]
    assert split.matches[0].fault == "EX04"
    likely = {match.fault: match.likelihood for match in both.matches}
    assert likely["EX04"] < split.matches[0].likelihood


@pytest.mark.requirement(117)
def test_each_of_two_causes_in_one_case_gets_its_own_diagnosis() -> None:
    first, second = red("RP12"), red("WL90")
    both = [
        {**one, "measurements": one["measurements"] + two["measurements"]}
        for one, two in zip(first, second, strict=True)
    ]
    made = report(both)
    made["clusters"] = [
        {**made["clusters"][0], "sites": [f"layer.{layer}.{site}" for layer in layers]}
        for site, layers, *_ in (WHITE_BOX["RP12"], WHITE_BOX["WL90"])
    ]
    one, two = of_report(made, matrix())
    assert (places(one)[0], places(two)[0]) == ("RP12", "WL90")


@pytest.mark.requirement(117)
def test_the_line_of_a_strong_match_names_fault_and_report() -> None:
    (found,) = of_report(report(red("WL90", precision="fp16")), matrix())
    assert found.matches[0].likelihood >= 0.8
    said = one_line(found)
    assert said.endswith("like WL90, two experts exchanged in one layer (own, after vllm-ascend#4793)")


def test_names_of_prompts_and_cases_are_no_words() -> None:
    (one,) = red("AT14")
    said = "walk-12: 3 of 24 tokens are not its own, see stress/test_secrets.py::test_each_of_32[needle-llama]"
    made = pattern_of([{**one, "measurements": [measured("secret", 3.0, detail=said)]}])
    assert {name for name in made.flags if name.startswith("word ")} == {"word stress tokens"}


@pytest.mark.parametrize(("green", "known"), [("single", True), ("tp2", None)])
def test_an_axis_is_suspected_where_one_rank_was_judged_and_is_green(green: str, known: bool | None) -> None:
    cell = {"model": "deepseek-v3-odd-pos", "precision": "bf16"}
    failed = case(LAYOUTS, layout="tp2", **cell)
    passed = case(SITES, layout=green, **cell) | {"status": "pass"}
    ((_, made),) = _patterns([failed], [failed, passed])
    assert made.flag("axis tp") is known


def test_reasons_are_the_mean_over_deployments() -> None:
    evidence = [{"AA01": {"a": 1.0, "b": -1.0, "c": 0.15}}, {"AA01": {"a": 0.5, "b": 0.2, "d": 0.6}}]
    assert _reasons(evidence, "AA01") == (("a", "d"), ("b",))
    assert _reasons(evidence, "") == ((), ())


def test_features_that_tell_one_story_share_their_weight() -> None:
    words = {f"word suite {name}": 2.0 for name in "abcd"}
    told = _tempered({**words, "divergence attn.q": 2.0, "no word suite e": 0.05}, 0.5)
    assert told == pytest.approx({**dict.fromkeys(words, 0.5), "divergence attn.q": 1.0, "no word suite e": 0.0125})


def test_a_pattern_holds_how_many_times_too_large_a_value_is() -> None:
    (one, *_) = red("RT04")
    made = pattern_of([{**one, "divergence": {**one["divergence"], "got": "-20", "expected": "0.2"}}])
    assert made.numbers["ratio"] == pytest.approx(2.0)
    assert made.flags["other sign"] and not made.flags["zero"]
    made = pattern_of([{**one, "divergence": {**one["divergence"], "got": "-0.1", "expected": "0.2"}}])
    assert made.flags["other sign"]


@pytest.mark.parametrize(
    ("position", "border"), [(0, False), (1, True), (14, False), (15, True), (16, True), (17, True), (18, False)]
)
def test_a_pattern_holds_whether_it_is_at_the_border_of_a_page(position: int, border: bool) -> None:
    (one, *_) = red("RT04")
    made = pattern_of([{**one, "divergence": {**one["divergence"], "position": position}}])
    assert made.flags["border"] is border


@pytest.mark.parametrize(("layer", "said"), [(0, "0"), (3, "3"), (4, "4"), (5, "4"), (30, "4")])
def test_a_pattern_holds_the_layer_up_to_the_fourth(layer: int, said: str) -> None:
    (one, *_) = red("RT04")
    made = pattern_of([{**one, "divergence": {**one["divergence"], "site": f"layer.{layer}.attn.q"}}])
    assert made.choices["layer"] == said


@pytest.mark.parametrize(("ranks", "said"), [(["a"], "1"), (["a", "b"], "2"), (["a", "b", "c"], "3"), (["a"] * 9, "3")])
def test_a_pattern_holds_on_how_many_ranks_it_is(ranks: list[str], said: str) -> None:
    (one, *_) = red("RT04")
    made = pattern_of([{**one, "divergence": {**one["divergence"], "ranks": ranks}}])
    assert made.choices["ranks"] == said


def test_a_pattern_holds_how_far_the_largest_error_stands_out() -> None:
    """As read from a file, where equal texts are different objects; of the first divergent operation alone."""
    (_, sites) = red("RT04")
    place, other = sites["divergence"]["site"], "layer.1.attn.q"
    values = [measured("site.rms", 0.5, place), measured("site.max", 50.0, place)]
    values += [measured("site.rms", 0.5, other), measured("site.max", 0.6, other)]
    made = pattern_of(json.loads(json.dumps([{**sites, "measurements": values}])))
    assert made.numbers["peak"] == pytest.approx(2.0)
    for alone in ([values[1]], [values[0], measured("site.other", 9.0, place)]):
        assert "peak" not in pattern_of([{**sites, "measurements": alone}]).numbers, "of one of the two nothing follows"


def test_one_operation_off_in_many_layers_is_one_measurement_as_in_a_row() -> None:
    """A row of the matrix keeps the first of each kind; so does what is compared with it."""
    (_, sites) = red("AT25")
    many = [measured("site.rms", 0.4, f"layer.{layer}.attn.context") for layer in range(12)]
    many += [measured("site.max", 0.4, "layer.0.attn.out")]
    made = pattern_of([{**sites, "measurements": many}])
    assert made.flags["metric correctness site.max"] and made.flags["site attn.out"]


def test_a_test_that_was_not_run_is_no_evidence_within_its_file() -> None:
    """A profile runs some tests of a file; what the others say is not known."""
    other = PREDICTIONS.replace("test_predictions", "test_others")
    rows = matrix()
    for one in rows:
        one["red"] = [
            *one["red"],
            case(
                f"correctness/{other.partition('/')[2]}",
                model="m",
                layout="single",
                precision="bf16",
                measurements=[measured("far", 3.0, detail="something strange")],
            ),
        ]
    made = report(red("AT25", precision="fp16", scale=1.06))
    (found,) = of_report(made, rows)
    assert places(found)[0] == "AT25" and not any("far" in one or "strange" in one for one in found.matches[0].differs)
    assert found.matches[0].likelihood == of_report(made, matrix())[0].matches[0].likelihood


def test_numbers_that_json_cannot_hold_are_left_out() -> None:
    (one,) = red("SC10")
    made = pattern_of([{**one, "measurements": [measured("secret", "inf")]}])  # type: ignore[arg-type]
    assert not made.numbers
    assert made.flags["metric stress secret"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    folder, file = tmp_path / "report", tmp_path / "kill_matrix.json"
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report(red("RT04", precision="fp16"))))
    file.write_text(json.dumps({"schema": 1, "made": {}, "rows": matrix(), "mutants": []}))
    return folder, file


@pytest.mark.requirement(117)
def test_the_command_prints_likelihoods_titles_and_reports(files: tuple[Path, Path], capsys: Any) -> None:
    folder, file = files
    assert main([str(folder), "--matrix", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"1. a cause: 2 cases, first {PREDICTIONS}[deepseek-v3-odd-pos-single-fp16]"
    assert lines[1].endswith("%  RT04  Routed scale applied twice (vllm#24119)")
    assert any(line.startswith("         like it: ") and "moe.router.weights" in line for line in lines)
    assert any("none of the known" in line for line in lines)
    assert lines[-1] == "   by rows of the kill matrix on taps"
    assert len(lines) <= 24


def test_what_the_command_does_not_show_is_summed() -> None:
    chances = {"AA01": 0.5, "AA02": 0.2, "AA03": 0.15, "AA04": 0.1, "": 0.05}
    found = Diagnosis("a cause", 1, "a case", tuple(Match(name, share) for name, share in chances.items()), "taps")
    assert "     5%  none of the known; 25% others" in _lines(1, found, {}, 2)


def test_the_command_gives_json(files: tuple[Path, Path], capsys: Any) -> None:
    folder, file = files
    assert main([str(folder / "report.json"), "--matrix", str(file), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    best = found["matches"][0]
    assert (best["fault"], best["title"], best["report"]) == ("RT04", "Routed scale applied twice", "vllm#24119")
    assert sum(match["likelihood"] for match in found["matches"]) == pytest.approx(1.0)


def test_a_green_report_needs_no_matrix(files: tuple[Path, Path], capsys: Any) -> None:
    folder, _ = files
    made = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**made, "clusters": []}))
    assert main([str(folder), "--matrix", "nowhere.json"]) == 0
    assert capsys.readouterr().out == "nothing is red: there is nothing to explain\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no report at"),
        ("{", "cannot be read as JSON"),
        ("[]", "schema None, this version reads 1"),
        ('{"schema": 7}', "schema 7, this version reads 1"),
        ('{"schema": true}', "schema True, this version reads 1"),
        ('{"schema": 1}', "has no 'target'"),
        ("[" * 200_000, "nested too deeply"),
        ('{"schema": 1, "seconds": 1' + "0" * 5000 + "}", "4300 digits"),
        ('{"schema": 1, "seconds": Infinity}', "Infinity is no number of JSON"),
        ('{"schema": 1, "seconds": 1e400}', "1e400 is no number of JSON"),
        ("\udcff", "utf-8"),
    ],
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, capsys: Any, content: str | None, said: str) -> None:
    file = tmp_path / "report.json"
    if content is not None:
        file.write_text(content, errors="surrogateescape")
    assert main([str(file)]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert str(file) in message
    assert message.count("\n") == 1


def put(made: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set what lies at a path, or take it away."""
    for name in path[:-1]:
        made = made[name]
    if value is ...:
        del made[path[-1]]
    else:
        made[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("settings",), ..., "has no 'settings'"),
        (("clusters",), None, "clusters is null; it must be a list"),
        (("clusters",), {}, "clusters is {}; it must be a list"),
        (("clusters", 0), 7, "clusters[0] is 7; it must be an object"),
        (("clusters", 0, "cases"), [], "clusters[0] has no cases"),
        (("clusters", 0, "cases"), ["no such"], "clusters[0] names no such, which is no case"),
        (("clusters", 0, "first"), "\x1b[2J", r"clusters[0] names \x1b[2J, which is no case"),
        (("cases",), {}, "cases is {}; it must be a list"),
        (("cases", 0, "model"), ..., "cases[0] has no 'model'"),
        (("cases", 0, "rung"), ..., "cases[0] has no 'rung'"),
        (("cases", 0, "measurements"), ..., "cases[0] has no 'measurements'"),
        (("cases", 0, "status"), ["fail"], 'cases[0].status is ["fail"]; it must be one of pass, fail'),
        (
            ("cases", 0, "measurements", 0, "value"),
            True,
            "cases[0].measurements[0].value is true; it must be a finite",
        ),
        (("cases", 0, "measurements", 0, "value"), 10**400, "it must be a finite number"),
        (("cases", 0, "divergence", "position"), 1.5, "divergence.position is 1.5; it must be a whole number"),
        (("cases", 0, "divergence", "got"), None, "divergence.got is null; it must be a text"),
        (("cases", 0, "divergence", "error"), "many", 'divergence.error is "many"; it must be a finite number'),
        (("target",), "builtin", 'target is "builtin"; it must be an object'),
        (("target", "observables"), 7, "target.observables is 7; it must be a list"),
    ],
)
def test_the_first_thing_that_is_wrong_with_a_report_is_said(
    tmp_path: Path, capsys: Any, path: tuple[Any, ...], value: Any, said: str
) -> None:
    file, made = tmp_path / "report.json", json.loads(json.dumps(report(red("RT04"))))
    put(made, path, value)
    file.write_text(json.dumps(made))
    assert main([str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"{file}: ") and said in message and message.count("\n") == 1


@pytest.mark.parametrize("reason", ["the server died", ""])
def test_a_run_that_judged_nothing_looks_like_no_fault(files: tuple[Path, Path], capsys: Any, reason: str) -> None:
    folder, matrix_file = files
    file = folder / "report.json"
    died = [
        one | {"status": "error", "measurements": [], "divergence": None, "reason": reason}
        for one in red("RT04", precision="fp16")
    ]
    made = report(died)
    made["cases"] = died
    file.write_text(json.dumps(made))
    assert main([str(file), "--matrix", str(matrix_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"nothing was judged, so that nothing can be explained: {reason or 'no case says why'}"
    assert lines[2] == "   100%  none of the known" and lines[-1] == "   nothing was compared"
    file.write_text(json.dumps(made | {"clusters": [], "cases": [], "fatal": "it never opened"}))
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == "nothing was judged, so that nothing can be explained: it never opened\n"


def test_causes_are_printed_short_and_cannot_steer_the_terminal(files: tuple[Path, Path], capsys: Any) -> None:
    folder, file = files
    made = json.loads((folder / "report.json").read_text())
    made["clusters"][0]["cause"] = "\x1b[31mred\u202e\n" + "x" * 2_000_000
    (folder / "report.json").write_text(json.dumps(made))
    assert main([str(folder), "--matrix", str(file)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(r"1. \x1b[31mred\u202e xxx") and len(first) < 600


@pytest.mark.parametrize(("got", "expected"), [("1e-300", "1e300"), ("1" * 400, "1"), ("nan", "1"), ("1", "1e-320")])
def test_a_ratio_that_has_no_logarithm_is_left_out(got: str, expected: str) -> None:
    (one, *_) = red("RT04")
    made = pattern_of([{**one, "divergence": {**one["divergence"], "got": got, "expected": expected}}])
    assert "ratio" not in made.numbers


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read .*; make one with --adapt-selftest"),
        ("{", "cannot be read"),
        ("[" * 200_000, "nested too deeply"),
        ('{"rows": []}', "schema None, this version reads 1"),
        ('{"schema": 1}', "has no 'rows'"),
        ('{"schema": 1, "rows": [1]}', r"rows\[0\] is 1; it must be an object"),
        ('{"schema": 1, "rows": "x"}', 'rows is "x"; it must be a list'),
        ('{"schema": 1, "rows": null}', "rows is null; it must be a list"),
        ('{"schema": 1, "rows": [], "limits": [{"value": 1}]}', r"limits\[0\].value is 1; it must be a text"),
        ('{"schema": 1, "rows": [], "made": {"seconds": NaN}}', "NaN is no number of JSON"),
        ('{"schema": 1, "rows": []}', "no rows; make one with .*, or name one with --matrix"),
    ],
)
def test_a_file_that_is_no_matrix_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "kill_matrix.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(MatrixError, match=said):
        read_matrix(file)


@pytest.mark.parametrize("name", ["fault", "observable", "layout", "killed", "red", "green"])
@pytest.mark.parametrize("value", [..., 7, [7], {"a": "b"}, "\x1b[2J"])
def test_a_row_of_another_shape_is_named(tmp_path: Path, name: str, value: Any) -> None:
    file, rows = tmp_path / "kill_matrix.json", matrix()
    put(rows, (1, name), value)
    file.write_text(json.dumps({"schema": 1, "rows": rows}))
    with pytest.raises(MatrixError, match=rf"kill matrix {file}: rows\[1\].*{name}"):
        read_matrix(file)


def test_a_matrix_in_which_nothing_was_caught_explains_nothing() -> None:
    rows = [{**one, "killed": False} for one in matrix()]
    with pytest.raises(MatrixError, match="no row of a fault that was caught"):
        of_report(report(red("RT04")), rows)
