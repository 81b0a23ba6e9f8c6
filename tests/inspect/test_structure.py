"""Structure from config.json: what is reported, what is a gap, and what is refused with the field named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_adapt.inspect import InspectError, analyse, count
from pytest_adapt.inspect.config import from_config, load_config
from pytest_adapt.models import catalogue

QWEN: dict[str, Any] = dict(catalogue()["qwen3-moe-odd"].config)
DEEPSEEK: dict[str, Any] = dict(catalogue()["deepseek-v3-odd-pos"].config)
MIXTRAL: dict[str, Any] = dict(catalogue()["mixtral-odd"].config)


def changed(base: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy with fields set; ... removes one."""
    raw = copy.deepcopy(base)
    for key, value in fields.items():
        if value is ...:
            del raw[key]
        else:
            raw[key] = value
    return raw


@pytest.mark.requirement(1)
def test_the_named_facts_are_reported() -> None:
    found = from_config(QWEN)
    assert (len(found.layers), found.hidden, found.heads, found.kv_heads) == (4, 104, 6, 2)
    assert (found.experts, found.chosen, found.context, found.vocab) == (13, 5, 4352, 331)
    assert found.gaps == ()


@pytest.mark.requirement(4)
def test_each_layer_is_classified() -> None:
    assert [layer.sparse for layer in from_config(QWEN).layers] == [True, False, True, True]
    assert [layer.sparse for layer in from_config(DEEPSEEK).layers] == [False, False, True, True, True]
    assert {layer.long_context for layer in from_config(MIXTRAL).layers} == {"sliding window of 37"}
    assert {layer.kv_layout for layer in from_config(MIXTRAL).layers} == {"K 2 x 12, V 2 x 12"}
    assert from_config(DEEPSEEK).layers[0].kv_layout == "latent 28 + rotary 12"
    mixed = changed(
        QWEN, layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=128, use_sliding_window=True
    )
    assert [layer.long_context for layer in from_config(mixed).layers] == ["full", "sliding window of 128"] * 2


@pytest.mark.requirement(4)
def test_presets_show_every_long_context_scheme() -> None:
    schemes = {
        layer.long_context.split(" ")[0]
        for name in ("gpt-oss-20b", "llama4-scout", "kimi-k3", "glm-5.2")
        for layer in analyse(name).layers
    }
    assert schemes == {"full", "sliding", "chunks", "state", "block-sparse,"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing-hidden": (changed(QWEN, hidden_size=...), "field hidden_size is missing"),
    "missing-layers": (changed(QWEN, num_hidden_layers=...), "field num_hidden_layers .* is missing"),
    "missing-heads": (changed(QWEN, num_attention_heads=...), "field num_attention_heads is missing"),
    "missing-vocab": (changed(QWEN, vocab_size=...), "field vocab_size is missing"),
    "missing-context": (changed(QWEN, max_position_embeddings=...), "field max_position_embeddings is missing"),
    "missing-topk": (changed(QWEN, num_experts_per_tok=...), "field num_experts_per_tok .* is missing"),
    "missing-expert-width": (changed(QWEN, moe_intermediate_size=...), "field moe_intermediate_size is missing"),
    "missing-dense-width": (changed(QWEN, intermediate_size=...), "field intermediate_size is missing, and some"),
    "missing-value-width": (changed(DEEPSEEK, v_head_dim=...), "field v_head_dim is missing"),
    "text-number": (changed(QWEN, hidden_size="104"), "field hidden_size is '104', expected a whole number"),
    "fraction": (changed(QWEN, num_hidden_layers=3.5), "field num_hidden_layers is 3.5"),
    "boolean": (changed(QWEN, vocab_size=True), "field vocab_size is True"),
    "negative": (changed(QWEN, hidden_size=-104), "field hidden_size is -104"),
    "kv-heads": (changed(QWEN, num_key_value_heads=4), "num_key_value_heads is 4, which does not divide"),
    "head-dim": (changed(QWEN, head_dim=..., num_attention_heads=10), "hidden_size 104 does not divide"),
    "odd-head": (changed(QWEN, head_dim=21), "head_dim is 21; rotary embedding needs an even one"),
    "topk-above-experts": (changed(QWEN, num_experts_per_tok=14), "num_experts_per_tok is 14, more than the 13"),
    "two-spellings": (changed(QWEN, num_local_experts=12), "num_experts and num_local_experts contradict"),
    "two-dtypes": (changed(QWEN, dtype="float16"), "dtype and torch_dtype contradict"),
    "two-thetas": (changed(QWEN, rope_theta=1e4), "rope_theta and rope_parameters.rope_theta contradict"),
    "dense-layer-number": (changed(QWEN, mlp_only_layers=[9]), r"mlp_only_layers is \[9\], expected a list of layer"),
    "layer-types": (
        changed(QWEN, layer_types=["full_attention"]),
        "layer_types lists 1 layers, num_hidden_layers says 4",
    ),
    "no-window": (changed(QWEN, layer_types=["sliding_attention"] * 4), "layer_types asks for sliding_attention, but"),
    "groups": (changed(DEEPSEEK, n_group=4), "n_group is 4, which does not divide 18"),
    "groups-kept": (changed(DEEPSEEK, topk_group=5), "topk_group is 5, more than n_group 3"),
    "groups-too-small": (changed(DEEPSEEK, num_experts_per_tok=13), "2 groups hold only 12 experts"),
    "dense-prefix": (changed(DEEPSEEK, first_k_dense_replace=6), "first_k_dense_replace is 6, more than"),
    "qk-width": (
        changed(DEEPSEEK, qk_head_dim=30),
        r"qk_head_dim is 30, but qk_nope_head_dim \+ qk_rope_head_dim is 26",
    ),
    "mla-kv-heads": (changed(DEEPSEEK, num_key_value_heads=2), "num_key_value_heads is 2; latent attention"),
    "rope-not-object": (changed(QWEN, rope_scaling="yarn"), "rope_scaling is 'yarn', expected an object"),
    "rope-factor": (
        changed(DEEPSEEK, rope_scaling={"type": "yarn", "factor": -1}, rope_parameters=None),
        "rope_scaling.factor is -1",
    ),
    "two-ropes": (changed(QWEN, rope_scaling={"type": "yarn"}), "rope_scaling and rope_parameters contradict"),
    "two-factors": (
        changed(DEEPSEEK, rope_scaling=changed(DEEPSEEK["rope_scaling"], factor=2.0)),
        "rope_scaling.factor and rope_parameters.factor contradict",
    ),
    "partial": (changed(QWEN, partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
}


@pytest.mark.requirement(1)
@pytest.mark.parametrize("case", REFUSED, ids=list(REFUSED))
def test_a_missing_or_contradicting_field_is_named(case: str) -> None:
    raw, cause = REFUSED[case]
    with pytest.raises(InspectError, match=cause) as refused:
        count(from_config(raw))
    assert "\n" not in str(refused.value)


@pytest.mark.requirement(1)
@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1, 2]", "holds list, expected an object"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "field num_hidden_layers"),
    ],
)
def test_files_that_are_no_configuration(content: bytes, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InspectError, match=cause) as refused:
        analyse(path)
    assert "\n" not in str(refused.value)


def test_absent_files_and_presets() -> None:
    with pytest.raises(InspectError, match="neither a file, a directory nor a preset; presets are mixtral-8x7b"):
        analyse("no-such-model")
    with pytest.raises(InspectError, match="cannot be read"):
        load_config(Path("no/config.json"))
    with pytest.raises(InspectError, match="field vocab is not published"):
        analyse("minimax-m3")
    with pytest.raises(InspectError, match="attention kind 'csa'"):
        analyse("deepseek-v4-pro")


@pytest.mark.requirement(6)
@pytest.mark.parametrize(
    ("fields", "gap"),
    [
        ({"hidden_act": "situ"}, "activation 'situ': no reference"),
        ({"model_type": "nova"}, "model_type 'nova': no reference"),
        ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rotary scaling 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embedding"),
        ({"scoring_func": "sqrtsoftplus"}, "router scoring 'sqrtsoftplus'"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "attention 'linear_attention'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights stored as fp8"),
        ({"attn_logit_softcapping": 30.0}, "option attn_logit_softcapping = 30.0: not known"),
        ({"sinks": True}, "option sinks = true: not known"),
    ],
)
def test_what_has_no_reference_is_listed_as_a_gap(fields: dict[str, Any], gap: str) -> None:
    found = from_config(changed(QWEN, **fields))
    assert any(gap in line for line in found.gaps), found.gaps


def test_every_shipped_model_is_free_of_gaps() -> None:
    for entry in catalogue().values():
        if entry.kind == "procedural":
            assert from_config(entry.config).gaps == (), entry.name


def test_a_vision_wrapper_shows_its_language_model() -> None:
    outer = {"model_type": "wrapper", "text_config": changed(QWEN), "vision_config": {"hidden_size": 9}}
    found = from_config(json.loads(json.dumps(outer)))
    assert found.hidden == 104
    assert "vision_config: only the language model is analysed" in found.gaps
