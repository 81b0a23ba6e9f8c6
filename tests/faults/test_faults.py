"""Every fault of the registry is in contract, is caught by the owning suite's comparison, and is named where it is."""

from pathlib import Path

import pytest

from pytest_adapt.faults import Fault, UnknownFault, catalogue, get
from pytest_adapt.models import catalogue as models
from pytest_adapt.models import materialise, prompts
from pytest_adapt.oracle import Oracle
from pytest_adapt.sites import LAYER_SITES, layer_of
from pytest_adapt.target.protocol import Deployment, Request, Response
from pytest_adapt.target.registry import resolve
from pytest_adapt.verdict.judge import Judge

FAULTS = tuple(fault for fault in catalogue().values() if fault.white_box)
CASES = [(fault, precision) for fault in FAULTS for precision in fault.precisions]
LENGTH = 80
# Where one rank is at fault, it is named; of a sum over ranks all are.
NAMED = {
    "AT03": {"rank 2 (tp2)", "rank 3 (tp3)"},
    "AT92": {"rank 1 (sp1)"},
    "AT93": {"rank 1 (sp1)"},
    "AT94": {"rank 1 (sp1)"},
    "EX04": {"rank 0 (tp0)", "rank 1 (tp1)"},
    "EX08": {"rank 3 (dp3 ep3)"},
    "EX92": {"rank 0 (dp0 etp0)", "rank 1 (dp1 etp1)"},
    "PL01": {"rank 1 (pp1)"},
}


class Bench:
    """The models on disk, their oracles, and one white-box run of the built-in engine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._oracles: dict[str, Oracle] = {}

    def oracle(self, model: str) -> Oracle:
        if model not in self._oracles:
            self._oracles[model] = Oracle(materialise(model, self._root))
        return self._oracles[model]

    def judge(self, fault: Fault | None, model: str, precision: str, layout: str = "single") -> tuple[Judge, Response]:
        directory = materialise(model, self._root)
        tokens = prompts(models()[model], directory)["random-150"][:LENGTH]
        target = resolve("builtin").create()
        if fault is not None:
            fault.install(target.seams)
        # A chunk border inside the prompt: some faults live there.
        chunked = (("prefill_chunk", 64),)
        deployment = Deployment(str(directory), layout, precision, taps=("*",), features=chunked)
        try:
            info = target.open(deployment)
            (response,) = target.run([Request("0", tokens, max_new_tokens=4, want=frozenset({"taps", "logits"}))])
        finally:
            target.close()
        judge = Judge(precision, rounds=info.rounds, router=info.router)
        judge.against_sites("random", response, self.oracle(model), tokens + response.tokens[:-1])
        return judge, response


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("models"))


@pytest.mark.requirement(53, 54, 56, 62, 116)
@pytest.mark.parametrize(("fault", "precision"), CASES, ids=lambda value: getattr(value, "id", value))
def test_a_fault_is_caught_and_located(bench, fault, precision):
    judge, _ = bench.judge(fault, fault.models[0], precision, fault.layout)
    assert judge.failures(), f"{fault.id} ({fault.title}) passed in {precision}"
    assert judge.divergence is not None
    assert layer_of(judge.divergence.site) == (fault.layer, fault.site)
    assert judge.divergence.site in judge.message()
    assert bool(judge.divergence.ranks) == (fault.layout != "single")
    assert NAMED.get(fault.id, set()) <= set(judge.divergence.ranks)
    assert all(rank in judge.message() for rank in judge.divergence.ranks)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("model", "layout"), sorted({(fault.models[0], fault.layout) for fault in FAULTS}))
def test_without_a_fault_nothing_is_red(bench, model, layout, precision):
    judge, _ = bench.judge(None, model, precision, layout)
    assert not judge.failures(), judge.message()
    assert judge.measurements


def test_entries_are_well_formed():
    known = models()
    kinds = ("WL", "RT", "AT", "RP", "NM", "PR", "EX", "PL", "SC", "ME", "LC", "SA", "SV", "PF", "DT")
    for fault in catalogue().values():
        assert fault.site in (*LAYER_SITES, "embed", "logits", ""), fault.id
        assert set(fault.models) <= set(known), fault.id
        assert fault.title and fault.report and fault.kind in kinds, fault.id


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("rt04", r"no fault 'rt04'; did you mean RT04 or .*\? python -m pytest_adapt faults list names all \d+$"),
        ("??????", r"no fault '\?+'; python -m pytest_adapt faults list names all"),
        (
            "AT02",
            r"fault AT02 waits for KV transfer between engines: it cannot be put in yet \(.* faults list --waiting",
        ),
    ],
)
def test_an_unknown_id_says_what_to_do(given, says):
    with pytest.raises(UnknownFault, match=says) as found:
        get(given)
    assert len(str(found.value)) < 200


def test_restoring_the_seams_puts_every_original_back(bench):
    from adapt_engine.weights.loader import Loader

    original = Loader.read
    target = resolve("builtin").create()
    get("WL15").install(target.seams)
    target.open(Deployment(str(materialise("llama-odd", bench._root))))
    assert Loader.read is not original
    target.close()
    assert Loader.read is original


def test_a_seam_that_does_not_exist_is_named(bench):
    target = resolve("builtin").create()
    with pytest.raises(KeyError, match="no seam 'rope'; seams are .*rope_tables"):
        target.seams.wrap("rope", lambda original: original)
