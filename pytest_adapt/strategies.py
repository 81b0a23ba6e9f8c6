"""Named sets of layouts, and which of them a profile judges a model on: data, in strategies.json.

A word is a layout (``tp2.ep4``) or the name of a strategy, which is a list of words. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from pytest_adapt.layout import Layout, LayoutError, check, parse

__all__ = ["expand", "fits", "planned", "strategies"]

_ANY = "*"


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pytest_adapt") / "strategies.json"
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def strategies() -> Mapping[str, tuple[str, ...]]:
    """Strategy -> its words."""
    return {name: tuple(words) for name, words in _data()["strategies"].items()}


def expand(words: Iterable[str]) -> tuple[str, ...]:
    """Canonical layouts that ``words`` name, each once. Raises LayoutError for what is neither strategy nor layout."""
    known = strategies()
    found: dict[str, None] = {}
    for word in words:
        if word in known:
            found.update(dict.fromkeys(expand(known[word])))
        elif word.isalpha() and word != "single":
            raise LayoutError(word, f"neither a layout nor a strategy; strategies are {', '.join(known)}")
        else:
            found[str(parse(word))] = None
    return tuple(found)


def planned(profile: str) -> Mapping[str, tuple[str, ...]]:
    """Model -> layouts on which a profile judges it; ``*`` for models that it does not name."""
    return {model: expand(words) for model, words in _data()["profiles"][profile].items()}


def fits(layout: str, config: Mapping[str, Any]) -> str:
    """Why a model with this config.json cannot take a layout, in one line; "" where it can."""
    heads = int(config.get("num_attention_heads") or 1)
    latent = bool(config.get("kv_lora_rank"))
    named = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    try:
        taken: Layout = parse(layout)
        check(
            taken,
            heads=heads,
            kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
            experts=next((int(count) for count in named if count), 0),
            layers=int(config.get("num_hidden_layers") or 1),
        )
    except LayoutError as error:
        return str(error)
    return ""
