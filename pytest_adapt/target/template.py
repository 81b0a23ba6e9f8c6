"""The shell line of a ``cmd:`` target: its placeholders, and what they say a deployment may ask for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_adapt.layout import AXES, LayoutError, parse
from pytest_adapt.target.protocol import Deployment, TargetError, UnsupportedDeployment

__all__ = ["DTYPES", "PLACEHOLDERS", "Template", "axis_sizes"]

DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PLACEHOLDERS: Mapping[str, str] = {
    "model": "checkpoint directory",
    "port": "free port on 127.0.0.1",
    "host": "127.0.0.1",
    "python": "the interpreter that runs pytest",
    "dtype": "float32, bfloat16 or float16",
    "precision": "fp32, bf16 or fp16",
    "max_context": "tokens of prompt plus output",
    "seed": "seed of the deployment",
    **{axis: f"size of the {axis} axis of the layout" for axis in AXES},
}
# {{name}} is a literal {name}; ${name} belongs to the shell.
_PLACEHOLDER = re.compile(r"\{\{(?P<literal>[A-Za-z_]\w*)\}\}|(?<!\$)\{(?P<name>[A-Za-z_]\w*)\}")


def axis_sizes(layout: str) -> dict[str, int]:
    """Size of every axis of ``layout`` (``tp2`` -> {"tp": 2, "pp": 1, ...}). Raises TargetError for no layout."""
    try:
        parsed = parse(layout)
    except LayoutError as error:
        raise TargetError(str(error)) from None
    return {axis: int(getattr(parsed, axis)) for axis in AXES}


@dataclass(frozen=True)
class Template:
    """A shell line with placeholders. Raises TargetError for an unknown placeholder or one that is missing."""

    line: str

    def __post_init__(self) -> None:
        wrong = sorted(self.names - set(PLACEHOLDERS))
        if wrong:
            raise TargetError(
                f"target cmd: unknown placeholder {{{wrong[0]}}} (write {{{{{wrong[0]}}}}} for a literal one); "
                f"known: {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}"
            )
        missing = [name for name in ("model", "port") if name not in self.names]
        if missing:
            raise TargetError(
                f"target cmd: the line lacks {' and '.join(f'{{{name}}}' for name in missing)}; "
                "it must start a server of {model} on {port}"
            )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(found["name"] for found in _PLACEHOLDER.finditer(self.line) if found["name"])

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in AXES if axis in self.names)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that the line can express; none where it has neither {dtype} nor {precision}."""
        return ("fp32", "bf16") if self.names & {"dtype", "precision"} else ()

    def render(self, deployment: Deployment, *, port: int, python: str) -> str:
        """The line for one deployment, every value quoted for the shell.

        Raises UnsupportedDeployment for a layout axis above 1 that the line has no placeholder for.
        """
        sizes = axis_sizes(deployment.layout)
        for axis, size in sizes.items():
            if size > 1 and axis not in self.names:
                offered = ", ".join(f"{{{name}}}" for name in self.axes) or "none"
                raise UnsupportedDeployment(
                    f"layout {deployment.layout}: the command has no {{{axis}}} (axes that it has: {offered})"
                )
        if deployment.precision not in DTYPES:
            raise UnsupportedDeployment(f"precision {deployment.precision}: a command can have {', '.join(DTYPES)}")
        values = {
            "model": deployment.model,
            "port": port,
            "host": "127.0.0.1",
            "python": python,
            "dtype": DTYPES[deployment.precision],
            "precision": deployment.precision,
            "max_context": deployment.max_context,
            "seed": deployment.seed,
            **sizes,
        }

        def value(found: re.Match[str]) -> str:
            literal = found["literal"]
            return f"{{{literal}}}" if literal else shlex.quote(str(values[found["name"]]))

        return _PLACEHOLDER.sub(value, self.line)
