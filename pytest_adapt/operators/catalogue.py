"""All operators by name, and case strings."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from pytest_adapt.operators.case import Case, CaseError, read_words
from pytest_adapt.operators.definition import Op

__all__ = ["NAMES", "catalogue", "parse_case"]

NAMES: tuple[str, ...] = (
    "linear",
    "grouped_linear",
    "router_logits",
    "rms_norm",
    "add_rms_norm",
    "swiglu",
    "rotary",
    "attention",
    "latent_attention",
    "softmax",
    "route",
    "experts",
    "combine",
    "embedding",
    "head",
    "sample",
)


@functools.cache
def catalogue() -> Mapping[str, Op]:
    """Every operator, in the order of `NAMES`."""
    from pytest_adapt.operators import attention, dense, experts, vocabulary

    modules = (attention, dense, experts, vocabulary)
    classes = [getattr(module, name) for module in modules for name in module.__all__]
    made = {kind.name: kind() for kind in classes if isinstance(kind, type) and issubclass(kind, Op)}
    return {name: made[name] for name in NAMES}


def parse_case(text: str) -> Case:
    """The case that a string names (``rms_norm(dtype=bf16,rows=3,values=huge,seed=7)``); what is left out is the
    simplest. Raises CaseError naming what is allowed."""
    name, words = read_words(text)
    if name not in NAMES:
        raise CaseError(f"no operator {name!r}; operators are {', '.join(NAMES)}")
    given = dict(words)
    return catalogue()[name].case(str(given.pop("dtype", "fp32")), **given)
