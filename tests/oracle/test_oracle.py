"""Whole runs: causality, records, forced sites, replay, rows, and what is refused. No torch needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pytest_adapt.oracle import ModelSpec, Oracle, OracleError, Rounding, blocks
from pytest_adapt.oracle.parameters import expected
from pytest_adapt.oracle.threads import one_blas_thread
from pytest_adapt.sites import CHOICES, LAYER_SITES, UNRECORDED, layer_of, order_key, site

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 3000.0,
    "vocab_size": 71,
}
QWEN: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "attention_bias": True,
    "use_sliding_window": True,
    "sliding_window": 9,
}
DEEPSEEK: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "head_dim")},
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 14,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 18,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 11,
}
CONFIGS = {"llama": LLAMA, "qwen3moe": QWEN, "deepseek": DEEPSEEK}
TOKENS = tuple(int(token) for token in np.random.default_rng(1).integers(0, 71, 40))


def build(directory: Path, config: dict[str, Any]) -> Path:
    source = np.random.default_rng(3)
    weights = {}
    for name, shape in expected(ModelSpec.from_config(config)).items():
        scale = 1.0 if len(shape) == 1 or "embed" in name else shape[-1] ** -0.5
        weights[name] = (source.normal(size=shape) * scale).astype(np.float32)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module", params=CONFIGS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(build(tmp_path_factory.mktemp(request.param) / "model", CONFIGS[request.param]))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(build(tmp_path_factory.mktemp("mixture") / "model", DEEPSEEK))


def test_later_tokens_never_change_earlier_rows(oracle: Oracle) -> None:
    whole = oracle.run(TOKENS).logits
    for length in (1, 9, 10, 39):
        part = oracle.run(TOKENS[:length]).logits
        assert np.abs(part - whole[:length]).max() < 1e-12 * np.abs(whole).max()


def test_every_site_of_the_family_is_recorded_in_dataflow_order(oracle: Oracle) -> None:
    sites = oracle.run(TOKENS, record=("*",)).sites
    assert list(sites) == sorted(sites, key=order_key)
    local = {layer_of(name)[1] for name in sites} - {"embed", "final.norm", "logits"}
    family = {
        "LlamaForCausalLM": "attn.q attn.k attn.v attn.q_rope ffn.gate ffn.up ffn.act",
        "Qwen3MoeForCausalLM": "attn.q_norm attn.k_norm attn.k_rope moe.router.ids moe.experts.down moe.routed",
        "DeepseekV3ForCausalLM": "attn.q_a attn.q_a_norm attn.kv_a attn.kv_a_norm attn.kv_b moe.shared ffn.gate",
    }[oracle.spec.architecture]
    assert set(family.split()) <= local <= set(LAYER_SITES) - UNRECORDED
    assert all(len(value) == len(TOKENS) for value in sites.values())
    for name, value in sites.items():
        assert value.dtype == (np.int64 if layer_of(name)[1] in CHOICES else np.float64)


def test_record_follows_patterns(oracle: Oracle) -> None:
    assert set(oracle.run(TOKENS, record=("layer.1.attn.q", "log*")).sites) == {"layer.1.attn.q", "logits"}


def test_forcing_a_runs_own_values_changes_nothing(oracle: Oracle) -> None:
    free = oracle.run(TOKENS, record=("*",))
    forced = oracle.run(TOKENS, forced=free.sites)
    assert np.array_equal(forced.logits, free.logits)
    assert set(forced.own) == set(free.sites)
    assert all(np.array_equal(forced.own[name], value) for name, value in free.sites.items())


def test_a_forced_error_shows_where_it_was_made_and_nowhere_else(oracle: Oracle) -> None:
    """A target wrong at one site, and carrying that error on: own minus forced is the error of one operation alone."""
    free = oracle.run(TOKENS, record=("*",))
    wrong = site(1, "attn.v") if "layer.1.attn.v" in free.sites else site(1, "attn.kv_a")
    spoilt = {**free.sites, wrong: free.sites[wrong] * 1.01}
    carried = oracle.run(TOKENS, forced={wrong: spoilt[wrong]}, record=("*",)).sites
    judged = oracle.run(TOKENS, forced={**carried, wrong: spoilt[wrong]})
    scale = {name: np.abs(value).max() for name, value in carried.items()}
    apart = {name for name in carried if np.abs(judged.own[name] - carried[name]).max() > 1e-12 * scale[name]}
    assert apart == {wrong}


def test_emulation_under_forcing_is_one_operations_yardstick(oracle: Oracle) -> None:
    """With every site forced to float64 values, an emulation's own value is off by about one rounding, at any depth."""
    free = oracle.run(TOKENS, record=("*",))
    own = oracle.run(TOKENS, forced=free.sites, rounding=Rounding.of("bf16")).own
    for name in (site(0, "attn.out"), site(1, "attn.out"), site(1, "ffn.norm"), site(1, "residual")):
        error = np.sqrt(np.mean((own[name] - free.sites[name]) ** 2) / np.mean(free.sites[name] ** 2))
        assert 2.0**-12 < error < 2.0**-6, name


def test_every_product_tells_the_size_of_its_partial_sums(oracle: Oracle) -> None:
    """Also those that are put together expert by expert: cancellation there is no rarer than elsewhere."""
    free = oracle.run(TOKENS, record=("*",))
    terms = oracle.run(TOKENS, forced=free.sites, sized=True).terms
    products = {"attn.q", "attn.k", "attn.v", "attn.kv_a", "attn.q_b", "moe.experts.gate", "moe.experts.down"}
    products |= {"moe.experts.up", "moe.router.logits", "ffn.gate"}
    there = {name for name in free.sites if layer_of(name)[1] in products}
    assert there <= set(terms)
    for name in there:
        own = free.sites[name]
        assert terms[name].shape == own.shape
        # Of K terms the partial sums end at the sum: their root mean square is no less than 1 / sqrt(3) of it.
        assert ".experts." not in name or (terms[name] >= np.abs(own) / np.sqrt(3.0) * (1 - 1e-12)).all()


def test_rows_select_logits(oracle: Oracle) -> None:
    assert np.array_equal(oracle.run(TOKENS, rows=(3, 39, 3)).logits.shape, (3, 71))
    difference = oracle.run(TOKENS, rows=(3, 39)).logits - oracle.run(TOKENS).logits[[3, 39]]
    assert np.abs(difference).max() < 1e-12
    assert oracle.run(TOKENS, rows=()).logits.shape == (0, 71)


def test_runs_repeat_bit_for_bit(oracle: Oracle) -> None:
    for rounding in (None, Rounding.of("fp32"), Rounding.of("bf16")):
        first, second = (oracle.run(TOKENS, rounding=rounding).logits for _ in range(2))
        assert np.array_equal(first, second)
        assert first.dtype == np.float64


def test_emulations_are_ordered_by_their_grain(oracle: Oracle) -> None:
    """Errors shrink with the unit of the format: bf16 2^-8, fp16 2^-11, fp32 2^-24."""
    free = oracle.run(TOKENS)
    replay = free.ids
    error = {
        precision: float(np.sqrt(np.mean((oracle.run(TOKENS, rounding=Rounding.of(precision), replay=replay).logits
                                          - free.logits) ** 2)))
        for precision in ("bf16", "fp16", "fp32")
    }  # fmt: skip
    assert 4 < error["bf16"] / error["fp16"] < 16
    assert 2.0**11 < error["fp16"] / error["fp32"] < 2.0**15


def test_replay_forces_ids_and_certifies_them(mixture: Oracle) -> None:
    free = mixture.run(TOKENS)
    assert not free.replayed
    given = {layer: ids.copy() for layer, ids in free.ids.items()}
    inside = free.ids[1][7] // 3
    free_experts = [e for e in range(12) if e // 3 in inside and e not in free.ids[1][7]]
    given[1][7, 0] = free_experts[0]
    run = mixture.run(TOKENS, replay=given)
    assert run.ids[1][7].tolist() == sorted(given[1][7].tolist())
    assert np.array_equal(run.own[site(1, "moe.router.ids")], free.ids[1])
    assert len(run.replayed[2]) == 0 or run.replayed[2]["row"].min() >= 7
    assert run.replayed[1]["row"].tolist() == [7]
    assert run.replayed[1]["margin"][0] > 0
    assert not run.replayed[1]["illegal"][0]
    assert np.array_equal(run.logits[:7], free.logits[:7])
    assert np.abs(run.logits[7] - free.logits[7]).max() > 1e-6


def test_margins_and_selection_are_shown_for_every_mixture_layer(mixture: Oracle) -> None:
    run = mixture.run(TOKENS)
    assert set(run.ids) == set(run.margins) == set(run.selection) == {1, 2}
    assert all(margin.shape == (40,) and (margin >= 0).all() for margin in run.margins.values())


def test_dense_layers_and_shared_experts_add_up(mixture: Oracle) -> None:
    sites = mixture.run(TOKENS, record=("*",)).sites
    for layer in (1, 2):
        routed, shared = sites[site(layer, "moe.routed")], sites[site(layer, "moe.shared")]
        assert np.array_equal(sites[site(layer, "ffn.out")], routed + shared)
        weighted = sites[site(layer, "moe.experts.down")] * sites[site(layer, "moe.router.weights")][..., None]
        assert np.abs(weighted.sum(axis=1) - routed).max() < 1e-13 * np.abs(routed).max()


def test_one_expert_for_all_equals_a_dense_model(tmp_path: Path) -> None:
    """Experts that are copies of one feed-forward part, with weights that sum to one, equal the dense model."""
    dense = build(tmp_path / "dense", LLAMA)
    weights = load_file(dense / "model.safetensors")
    config = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2}
    copies = {name: value for name, value in weights.items() if ".mlp." not in name}
    for layer in range(2):
        moe = f"model.layers.{layer}.block_sparse_moe"
        copies[f"{moe}.gate.weight"] = np.random.default_rng(layer).normal(size=(5, 36)).astype(np.float32)
        for expert in range(5):
            for part, dense_part in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
                copies[f"{moe}.experts.{expert}.{part}.weight"] = weights[
                    f"model.layers.{layer}.mlp.{dense_part}.weight"
                ]
    sparse = tmp_path / "sparse"
    sparse.mkdir()
    (sparse / "config.json").write_text(json.dumps(config))
    save_file(copies, sparse / "model.safetensors")
    expected_logits = Oracle(dense).run(TOKENS).logits
    assert np.abs(Oracle(sparse).run(TOKENS).logits - expected_logits).max() < 1e-12


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    directory = build(tmp_path / "tied", {**LLAMA, "tie_word_embeddings": True})
    run = Oracle(directory).run(TOKENS, record=("final.norm",))
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    assert np.abs(run.logits - run.sites["final.norm"] @ embedding.T.astype(np.float64)).max() < 1e-12


def spoil(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (
            lambda w: w.update({"lm_head.weight": np.zeros((71, 35), np.float32)}),
            r"lm_head.weight has shape \(71, 35\)",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(60, np.float32)}),
            "q_proj.bias is read by",
        ),
    ],
    ids=["missing", "shape", "unread"],
)
def test_weights_must_be_those_that_the_configuration_asks_for(
    change: Callable[[dict[str, np.ndarray]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OracleError, match=message):
        Oracle(spoil(build(tmp_path / "model", LLAMA), change))


def test_a_head_that_contradicts_its_tie_is_refused(tmp_path: Path) -> None:
    directory = build(tmp_path / "model", {**LLAMA, "tie_word_embeddings": True})
    spoil(directory, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].copy()}))
    Oracle(directory)
    spoil(directory, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}))
    with pytest.raises(OracleError, match="lm_head.weight differs"):
        Oracle(directory)


def test_a_weight_that_is_not_finite_is_refused_when_it_speaks(tmp_path: Path) -> None:
    directory = spoil(build(tmp_path / "model", LLAMA), lambda w: w["lm_head.weight"].__setitem__((3, 4), np.nan))
    with pytest.raises(OracleError, match="logits of row 0 are not finite"):
        Oracle(directory).run(TOKENS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": ()}, "non-empty"),
        ({"tokens": (0, 71)}, r"0\.\.70"),
        ({"tokens": (0, -1)}, r"0\.\.70"),
        ({"rows": (40,)}, r"0\.\.39"),
        ({"record": ("layer.*.attn.scores",)}, "attn.context"),
        ({"forced": {"layer.0.attn.probs": np.zeros(1)}}, "attn.context"),
        ({"forced": {"layer.9.attn.q": np.zeros(1)}}, "layer.9.attn.q: no such site"),
        ({"forced": {"embed": np.zeros((39, 36))}}, r"embed: shape \(39, 36\).*\(40, 36\)"),
        ({"replay": {0: np.zeros((40, 3), np.int64)}}, "layer.0.moe.router.ids: no such site"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(mixture: Oracle, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OracleError, match=message):
        mixture.run(**{"tokens": TOKENS, **arguments})


def test_imports_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys, pytest_adapt.oracle;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'adapt_engine')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _normless(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, name, x, weight, eps: x if name.endswith("q_a_norm") else original(n, name, x, weight, eps)


def test_a_planted_fault_inside_the_oracle_shows_at_its_site(mixture: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is its own target here: one block is spoilt, and forced sites name that block and nothing else."""
    spoilt_spec = replace(mixture.spec, rope=replace(mixture.spec.rope, interleaved=False))
    clean = mixture.run(TOKENS, record=("*",)).sites
    monkeypatch.setattr(mixture, "spec", spoilt_spec)
    shown = mixture.run(TOKENS, record=("*",)).sites
    monkeypatch.undo()
    own = mixture.run(TOKENS, forced=shown).own
    apart = {name for name in shown if np.abs(own[name] - shown[name]).max() > 1e-12 * np.abs(clean[name]).max()}
    assert apart == {site(layer, name) for layer in range(3) for name in ("attn.q_rope", "attn.k_rope")}

    monkeypatch.setattr(blocks, "rms_norm", _normless(blocks.rms_norm))
    shown = mixture.run(TOKENS, record=("*",)).sites
    monkeypatch.undo()
    own = mixture.run(TOKENS, forced=shown).own
    apart = {name for name in own if np.abs(own[name] - shown[name]).max() > 1e-12 * np.abs(clean[name]).max()}
    assert not any(name.endswith("q_a_norm") for name in shown)
    assert apart == {site(layer, "attn.q") for layer in range(3)}


def test_blas_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread inside, what was before outside, after an error too."""
    threads = [2]
    monkeypatch.setattr("pytest_adapt.oracle.threads._openblas", lambda: (lambda: threads[-1], threads.append))
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        assert threads[-1] == 1
        raise ZeroDivisionError
    assert threads[-1] == 2
