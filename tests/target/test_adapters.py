"""Adapters that run in this process: the user's class, transformers, the built-in engine, the mask and the probe."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_adapt import sites
from pytest_adapt.models import materialise
from pytest_adapt.target.mask import MaskedTarget
from pytest_adapt.target.probe import probe
from pytest_adapt.target.protocol import (
    OBSERVABLES,
    Deployment,
    Info,
    Request,
    Response,
    Sampling,
    Spoilt,
    Target,
    TargetError,
    TopK,
    UnsupportedDeployment,
)
from pytest_adapt.target.registry import resolve

PROMPTS = [tuple(range(5, 5 + 7 * i)) for i in (1, 2, 3)]
MODELS = ("llama-odd", "mixtral-odd", "qwen3-moe-odd", "deepseek-v3-odd-pos")


def write_adapter(directory: Path, name: str, body: str) -> str:
    """A module of its own for each test: modules stay imported."""
    text = "from pytest_adapt.target.protocol import Info, Response\nimport numpy as np\nclass Target:\n"
    (directory / f"{name}.py").write_text(text + textwrap.indent(textwrap.dedent(body), "    "))
    sys.modules.pop(name, None)
    return f"py:{name}:Target"


GOOD_RUN = """
def open(self, deployment): return Info("mine", "1", observables=frozenset({"logits"}), vocab_size=4)
def run(self, requests):
    for request in requests:
        yield Response(request.id, len(request.prompt), logits=np.zeros((len(request.prompt), 4)))
def close(self): pass
"""
SPOILED = [
    (
        "raises_in_init",
        "def __init__(self): raise RuntimeError('no card')",
        "its constructor raised RuntimeError: no card",
    ),
    ("raises_in_open", "def open(self, deployment): raise KeyError('x')", "open raised KeyError: 'x'"),
    ("exits_in_open", "def open(self, deployment): raise SystemExit(0)", "open raised SystemExit: 0"),
    ("exits_in_run", "def run(self, requests): raise SystemExit(0)", "run raised SystemExit: 0"),
    ("returns_no_info", "def open(self, deployment): return {}", "open returned dict, expected"),
    (
        "has_a_worded_vocabulary",
        "def open(self, deployment): return Info('mine', '1', vocab_size='many')",
        "info: vocab_size is 'many', expected an integer",
    ),
    (
        "boasts",
        "def open(self, deployment): return Info('mine', '1', max_context=10**12)",
        "info: max_context is 1000000000000, expected 1 to 16777216 tokens",
    ),
    (
        "owes_a_context",
        "def open(self, deployment): return Info('mine', '1', max_context=-1)",
        "info: max_context is -1, expected 1 to 16777216 tokens",
    ),
    (
        "shows_one_word",
        "def open(self, deployment): return Info('mine', '1', observables='text')",
        "info: observables is 'text', expected some of taps, logits",
    ),
    ("has_no_tokens", "def run(self, requests): yield Response('a', 2, tokens=None)", "tokens is None, expected Seq"),
    ("raises_in_run", "def run(self, requests): raise ValueError('bad')", "run raised ValueError: bad"),
    ("yields_dicts", "def run(self, requests): yield {}", "run yielded dict, expected a Response"),
    ("answers_nothing", "def run(self, requests): return iter(())", r"1 of 1 requests were never answered \(a\)"),
    (
        "has_too_few_rows",
        "def run(self, requests): yield Response('a', 2, logits=np.zeros((1, 4)))",
        "logits has 1 rows from token 0, but 2 tokens were fed",
    ),
    (
        "has_flat_logits",
        "def run(self, requests): yield Response('a', 2, logits=np.zeros(4))",
        r"logits has shape \(4,\), expected 2 dimensions",
    ),
]


@pytest.mark.requirement(102)
@pytest.mark.parametrize(("name", "spoiled", "message"), SPOILED, ids=[case[0] for case in SPOILED])
def test_what_a_users_class_does_wrong_is_named(name: str, spoiled: str, message: str, tmp_path: Path) -> None:
    spec = resolve(write_adapter(tmp_path, name, GOOD_RUN + spoiled), rootdir=tmp_path)
    with pytest.raises(TargetError, match=message):
        target = spec.create()
        target.open(Deployment("model"))
        list(target.run([Request("a", (1, 2))]))


def test_a_users_class_may_answer_in_float64_and_is_given_the_settings_it_asks_for(tmp_path: Path) -> None:
    body = GOOD_RUN + "def __init__(self, settings): self.root = settings.rootdir\ndef tokenize(self, text): return [1]"
    target: Any = resolve(write_adapter(tmp_path, "asks_for_settings", body), rootdir=tmp_path).create()
    target.open(Deployment("model"))
    (response,) = target.run([Request("a", (1, 2))])
    assert response.logits.dtype == np.float32
    assert target.tokenize("x") == [1]
    assert not hasattr(target, "stats")


# In process engines ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def answers(spec: str, deployment: Deployment, requests: Iterable[Request]) -> dict[str, Response]:
    target = resolve(spec).create()
    try:
        target.open(deployment)
        return {response.id: response for response in target.run(requests)}
    finally:
        target.close()


def requests_of(**changes: Any) -> list[Request]:
    base = Request("", (), max_new_tokens=3, want=frozenset(OBSERVABLES), topk=5)
    return [replace(base, id=str(i), prompt=prompt, **changes) for i, prompt in enumerate(PROMPTS)]


def needs(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)


@pytest.mark.parametrize("name", MODELS)
def test_two_engines_show_the_same_values_at_the_same_sites(name: str, models: Path) -> None:
    needs("torch", "transformers", "adapt_engine")
    deployment = Deployment(str(materialise(name, models)), taps=("*",))
    theirs, ours = (answers(spec, deployment, requests_of()) for spec in ("hf:", "builtin"))
    for key, response in theirs.items():
        other = ours[key]
        assert response.tokens == other.tokens and response.finish == other.finish
        np.testing.assert_allclose(response.logits, other.logits, atol=2e-4)
        np.testing.assert_allclose(response.scores, other.scores, atol=2e-4)
        shared = response.taps.keys() & other.taps.keys()
        assert {"embed", "layer.0.attn.q", "layer.0.attn.k_rope", "layer.1.residual", "logits"} <= shared or (
            name.startswith("deepseek") and {"embed", "layer.0.attn.kv_a", "layer.0.attn.k_rope", "logits"} <= shared
        )
        for site in sorted(shared, key=sites.order_key):
            np.testing.assert_allclose(response.taps[site], other.taps[site], atol=2e-3, err_msg=site)


@pytest.mark.parametrize("name", ["mixtral-odd", "deepseek-v3-odd-neg"])
def test_transformers_batched_and_chunked_equals_alone(name: str, models: Path) -> None:
    needs("torch", "transformers")
    alone = Deployment(str(materialise(name, models)), taps=("layer.*.residual", "layer.*.moe.router.ids"))
    plain = answers("hf:", alone, requests_of())
    together = replace(alone, features=(("batch", 4), ("prefill_chunk", 7)))
    for key, response in answers("hf:", together, requests_of()).items():
        assert response.tokens == plain[key].tokens
        np.testing.assert_allclose(response.logits, plain[key].logits, atol=2e-4)
        for site, value in plain[key].taps.items():
            np.testing.assert_allclose(response.taps[site], value, atol=2e-3, err_msg=site)


@pytest.mark.parametrize("spec", ["hf:", "builtin"])
def test_rows_scores_and_top_k_belong_to_the_logits(spec: str, models: Path) -> None:
    needs("torch", *(["transformers"] if spec == "hf:" else ["adapt_engine"]))
    deployment = Deployment(str(materialise("qwen3-moe-odd", models)))
    whole = answers(spec, deployment, requests_of())
    for key, cut in answers(spec, deployment, requests_of(first_row=4)).items():
        full = whole[key]
        request = requests_of()[int(key)]
        sequence = np.array([*request.prompt, *full.tokens])
        logits = full.logits.astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert len(logits) == len(sequence) - 1
        expected = logprobs[np.arange(len(logits) - 1), sequence[1:-1]]
        np.testing.assert_allclose(full.scores[:-1], expected, atol=1e-6)
        assert np.isnan(full.scores[-1])
        np.testing.assert_allclose(full.topk.logprobs, -np.sort(-logprobs, axis=1)[:, :5], atol=1e-6)
        assert (cut.first_row, len(cut.logits)) == (4, len(logits) - 4)
        np.testing.assert_allclose(cut.logits, full.logits[4:], atol=1e-5)


def test_transformers_draws_through_one_filter_after_the_other() -> None:
    """Of 4/8, 2/8, 1/8, 1/8 top_k 3 leaves 4/7, 2/7, 1/7, of which top_p 0.8 keeps two."""
    needs("torch")
    import torch

    from pytest_adapt.target.hf import choose_token, generator_of

    row = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()

    def drawn(**setting: Any) -> set[int]:
        settings = (Sampling(1.0, seed=seed, **setting) for seed in range(200))
        return {choose_token(row, one, generator_of(one)) for one in settings}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=3) == {0, 1, 2}
    assert drawn(top_p=0.8) == {0, 1, 2}
    assert drawn(top_k=3, top_p=0.8) == {0, 1}


@pytest.mark.requirement(102)
@pytest.mark.parametrize("spec", ["hf:", "builtin"])
def test_abnormal_requests_are_refused_and_the_next_one_is_served(spec: str, models: Path) -> None:
    needs("torch", *(["transformers"] if spec == "hf:" else ["adapt_engine"]))
    good = Request("good", PROMPTS[0], max_new_tokens=1)
    wrong = [
        Request("empty", ()),
        Request("outside", (10**6,)),
        Request("negative", (-1,)),
        Request("long", (5,) * 65),
        Request("hot", PROMPTS[0], 1, sampling=replace(good.sampling, temperature=-1.0)),
    ]
    deployment = Deployment(str(materialise("llama-odd", models)), max_context=64)
    got = answers(spec, deployment, [*wrong, good])
    assert all(got[request.id].error for request in wrong)
    assert got["good"].error is None and len(got["good"].tokens) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "tp2"}, "layout tp2"),
        ({"kv_precision": "fp8"}, "KV precision fp8"),
        ({"features": (("graphs", 1),)}, "feature graphs"),
    ],
)
@pytest.mark.parametrize("spec", ["hf:", "builtin"])
def test_what_an_engine_cannot_do_is_unsupported(spec: str, change: dict[str, Any], message: str, models: Path) -> None:
    needs("torch", *(["transformers"] if spec == "hf:" else ["adapt_engine"]))
    deployment = replace(Deployment(str(materialise("llama-odd", models))), **change)
    with pytest.raises(UnsupportedDeployment, match=message):
        resolve(spec).create().open(deployment)


@pytest.mark.requirement(15)
@pytest.mark.parametrize("spec", ["hf:", "builtin"])
def test_a_broken_checkpoint_is_refused_in_one_line(spec: str, models: Path, tmp_path: Path) -> None:
    needs("torch", *(["transformers"] if spec == "hf:" else ["adapt_engine"]))
    source = materialise("llama-odd", models)
    shards = sorted(source.glob("*.safetensors"))
    for number, spoil in enumerate((lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: b"\xff" * 64)):
        broken = tmp_path / str(number)
        broken.mkdir()
        for path in source.iterdir():
            (broken / path.name).write_bytes(spoil(path.read_bytes()) if path == shards[0] else path.read_bytes())
        with pytest.raises(TargetError) as caught:
            resolve(spec).create().open(Deployment(str(broken)))
        assert "\n" not in str(caught.value) and str(broken / shards[0].name) in str(caught.value)
    with pytest.raises(TargetError, match="config.json"):
        resolve(spec).create().open(Deployment(str(tmp_path / "nowhere")))


# Mask and probe --------------------------------------------------------------------------------------------------


class Canned:
    """A target that answers what a test wants."""

    def __init__(self, observables: Iterable[str], **shown: Any) -> None:
        self.info = Info("canned", "1", observables=frozenset(observables), vocab_size=8)
        self.shown, self.asked, self.deployment = shown, [], Deployment("")  # type: ignore[var-annotated]

    def open(self, deployment: Deployment) -> Info:
        self.deployment = deployment
        return self.info

    def run(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in requests:
            self.asked.append(request)
            yield Response(request.id, len(request.prompt), tokens=(1, 2)[: request.max_new_tokens], **self.shown)

    def close(self) -> None:
        pass


ROWS = 13
GOOD: dict[str, Any] = {
    "logits": np.zeros((ROWS, 8), np.float32),
    "scores": np.append(np.full(ROWS - 1, -2.0), np.nan),
    "topk": TopK(np.tile(np.arange(5), (ROWS, 1)), np.full((ROWS, 5), -2.0)),
    "taps": {"embed": np.zeros((ROWS, 4), np.float32)},
}
LIES = [
    ({**GOOD, "logits": None}, "logits", "absent from the answer"),
    ({**GOOD, "logits": np.zeros((ROWS, 7))}, "logits", "7 columns, vocabulary of 8"),
    ({**GOOD, "logits": np.zeros((5, 8))}, "logits", "5 rows where 13 were computed"),
    ({**GOOD, "logits": np.full((ROWS, 8), np.nan)}, "logits", "not finite"),
    ({**GOOD, "scores": np.full(ROWS, 3.0)}, "score", "no log-probabilities"),
    ({**GOOD, "topk": TopK(GOOD["topk"].ids, np.full((ROWS, 5), -0.1))}, "topk", "sum to more than 1"),
    ({**GOOD, "topk": TopK(GOOD["topk"].ids, np.full((ROWS, 5), np.nan))}, "topk", "no row has a value"),
    ({**GOOD, "taps": {}}, "taps", "absent from the answer"),
    ({**GOOD, "taps": {"final.norm": np.zeros((ROWS, 4))}}, "taps", "final.norm was not asked for"),
]


@pytest.mark.requirement(63)
@pytest.mark.parametrize(("shown", "name", "reason"), LIES, ids=[f"{name}-{reason}" for _, name, reason in LIES])
def test_a_declared_observable_counts_only_when_it_was_seen(shown: dict[str, Any], name: str, reason: str) -> None:
    target: Target = Canned(OBSERVABLES, **shown)
    deployment = Deployment("model", taps=("embed",))
    result = probe(target, deployment, target.open(deployment))
    assert result.shown == set(OBSERVABLES) - {name}
    assert reason in result.missing[name]
    there = "absent" not in reason and "has a value" not in reason
    assert isinstance(result.missing[name], Spoilt) is there, "not to show is no lie; to show what cannot be is one"


def test_an_honest_target_is_believed() -> None:
    target = Canned(OBSERVABLES, **GOOD)
    deployment = Deployment("model", taps=("embed",))
    assert probe(target, deployment, target.open(deployment)).shown == set(OBSERVABLES)


def test_a_feature_is_probed_where_it_can_be_seen() -> None:
    target = Canned({"text"})
    deployment = Deployment("model", features=(("graphs", 1), ("prefix_cache", 1)))
    info = replace(target.open(deployment), features={"prefix_cache": (0, 1)})
    missing = probe(target, deployment, info).missing
    assert missing == {
        "graphs": "asked for, but not declared",
        "prefix_cache": "the target does not report cached_tokens",
    }


@pytest.mark.parametrize("name", OBSERVABLES)
def test_a_mask_shows_one_observable_and_asks_for_no_other(name: str) -> None:
    inner = Canned(OBSERVABLES, text="x", **GOOD)
    target = MaskedTarget(inner, [name])
    info = target.open(Deployment("model", taps=("embed",)))
    assert info.observables == {name}
    assert inner.deployment.taps == (("embed",) if name == "taps" else ())
    (response,) = target.run([Request("a", tuple(range(12)), max_new_tokens=2, want=frozenset(OBSERVABLES))])
    assert inner.asked[0].want == {name}
    values = {
        "taps": bool(response.taps),
        "logits": response.logits is not None,
        "score": response.scores is not None,
        "topk": response.topk is not None,
        "text": response.text is not None or bool(response.tokens),
    }
    assert [observable for observable, shown in values.items() if shown] == [name]


def test_a_mask_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from taps"):
        MaskedTarget(Canned({"text"}), ["soul"])
