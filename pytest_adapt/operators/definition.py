"""What an operator is: parameters, inputs, float64 reference, emulation; all checks follow from one definition."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from pytest_adapt.operators.case import KINDS, MEMORIES, PRECISIONS, Case, CaseError
from pytest_adapt.operators.draw import Draw, Operand
from pytest_adapt.oracle.numerics import Numerics
from pytest_adapt.oracle.rounding import Rounding
from pytest_adapt.oracle.threads import one_blas_thread
from pytest_adapt.verdict.result import Measurement

__all__ = ["EXACT", "Op", "Values"]

Values = Mapping[str, np.ndarray]
EXACT = "exact"
"""Of an output that is copied or chosen: no rounding excuses a difference."""


class Op(ABC):
    """One operator. A subclass says what it is; `check`, `explore`, `gradient` and the suite do the rest.

    The reference is written in the arithmetic of `pytest_adapt.oracle`: run exactly it is what is right, run with
    an emulation's rounding it is the yardstick.
    """

    name: ClassVar[str]
    space: ClassVar[Mapping[str, range | tuple[Any, ...]]]
    """Parameter -> what exploration draws from, the simplest first (it is what a failure shrinks to)."""
    base: ClassVar[Mapping[str, Any]] = {}
    """Parameters of the cases that vary the values and the memory; those left out are the simplest."""
    edges: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Cases that are always run: borders, empty inputs. May name ``values`` and ``memory``."""
    kinds: ClassVar[tuple[str, ...]] = KINDS
    memories: ClassVar[tuple[str, ...]] = MEMORIES
    outputs: ClassVar[Mapping[str, str]] = {"out": ""}
    """Output -> how it is held: "" in the precision of the deployment, "fp32", or `EXACT`."""
    wrt: ClassVar[tuple[str, ...]] = ()
    """Inputs that have a gradient; () where the operator has none."""
    gradient: ClassVar[Mapping[str, Any]] = {}
    """Parameters of a case small enough to be differentiated number by number."""
    follows: ClassVar[tuple[str, ...]] = ()
    """Choices among the outputs that the rest is computed from: the reference goes on with the target's own."""
    independent: ClassVar[bool] = False
    """Whether the elements of a row err independently (else they share a norm or a sum)."""
    relative: ClassVar[bool] = False
    """Whether the error of each element is proportional to that element alone."""
    sums: ClassVar[bool] = False
    """Whether each output is one sum of products of the inputs (`terms`)."""
    unseen: ClassVar[int] = 0
    """Values inside that nobody shows and that engines form in other ways than eager code: one rounding more each."""
    architecture: ClassVar[str] = "LlamaForCausalLM"
    """Family whose eager code the emulation follows."""

    @abstractmethod
    def inputs(self, draw: Draw) -> dict[str, Operand]:
        """The operands of ``draw.case``."""

    @abstractmethod
    def reference(self, n: Numerics, x: Values, case: Case) -> dict[str, np.ndarray]:
        """Outputs, their first axis the rows; ``x`` holds inputs in the dtype of ``n``, weights come from it too."""

    def stored(self, name: str, operands: Mapping[str, Operand]) -> np.ndarray:
        """The weight that the reference asks for by ``name``."""
        return operands[name].values

    def attributes(self, case: Case) -> dict[str, Any]:
        """What a target is told besides the arrays: numbers, words and truth values."""
        return {}

    def terms(self, case: Case, operands: Mapping[str, Operand]) -> dict[str, np.ndarray]:
        """Output -> sums of the magnitudes of the terms that it is made of, float64: where they cancel, its error is
        theirs. Empty where outputs are no sums."""
        if not self.sums:
            return {}
        return self.evaluate(case, {name: one.magnitude() for name, one in operands.items()}, None)

    @property
    def widen(self) -> float:
        """By how much the yardstick grows for what is `unseen`: independent errors add in square."""
        return math.sqrt(1.0 + self.unseen)

    def rounding(self, precision: str) -> Rounding:
        """The emulation at a precision; what is held in float32 throughout is emulated in that."""
        return Rounding.of("fp32" if set(self.outputs.values()) == {"fp32"} else precision)

    def published(self) -> Sequence[Mapping[str, Any]]:
        """Parameters that real models have, as far as a CPU can afford them."""
        return ()

    def legal(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The nearest parameters that fit together; any combination of the space may come in."""
        return parameters

    def judge(self, case: Case, x: Values, got: Values, exact: Values, yard: Values) -> Iterator[Measurement]:
        """Verdicts besides the numeric comparison of `outputs`."""
        yield from ()

    def case(self, precision: str, **words: Any) -> Case:
        """A case from parameters and ``values``, ``memory``, ``seed``. Raises CaseError for what is unknown."""
        given: dict[str, Any] = {"values": "normal", "memory": "dense", "seed": 0} | words
        values, memory, seed = (given.pop(name) for name in ("values", "memory", "seed"))
        unknown = sorted(set(given) - set(self.space))
        if unknown:
            allowed = ", ".join(("dtype", *self.space, "values", "memory", "seed"))
            raise CaseError(f"operator {self.name} has no parameter {unknown[0]}; it has {allowed}")
        for what, value, allowed_values in (
            ("dtype", precision, PRECISIONS),
            ("values", values, self.kinds),
            ("memory", memory, self.memories),
        ):
            if value not in allowed_values:
                raise CaseError(f"operator {self.name}: {what} {value!r} is none of {', '.join(allowed_values)}")
        if type(seed) is not int or seed < 0:
            raise CaseError(f"operator {self.name}: seed {seed!r} is no number from 0 on")
        parameters = {name: given.get(name, choices[0]) for name, choices in self.space.items()}
        for name, value in parameters.items():
            self._check(name, value)
        return Case(self.name, precision, tuple(self.legal(parameters).items()), values, memory, seed)

    def grid(self, precision: str) -> list[Case]:
        """Cases that are always run: published shapes, borders, every kind of values, every memory."""
        found = [self.case(precision, **shape) for shape in self.published()]
        found += [self.case(precision, **{**self.base, **edge}) for edge in self.edges]
        found += [
            self.case(precision, **{**self.base, "values": kind, "seed": seed})
            for kind in self.kinds
            for seed in (1, 2)
        ]
        found += [self.case(precision, **{**self.base, "memory": memory}) for memory in self.memories]
        return list(dict.fromkeys(found))

    def evaluate(
        self,
        case: Case,
        operands: Mapping[str, Operand],
        rounding: Rounding | None,
        given: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """The reference in float64 (``rounding`` None) or under an emulation; outputs as float64 or int64.

        ``given`` are another's choices (`follows`) to go on with.
        """
        n = Numerics(lambda name: self.stored(name, operands), self.architecture, rounding)
        x = {
            name: operand.values if operand.format == "int" else operand.values.astype(n.dtype)
            for name, operand in operands.items()
        }
        x |= given or {}
        with np.errstate(all="ignore"), one_blas_thread():
            found = self.reference(n, x, case)
        return {name: value if value.dtype.kind in "iu" else value.astype(np.float64) for name, value in found.items()}

    def _check(self, name: str, value: Any) -> None:
        choices = self.space[name]
        if isinstance(choices, range):
            if type(value) is not int or value < choices.start:
                raise CaseError(f"operator {self.name}: {name} {value!r} is no number from {choices.start} on")
        elif type(value) not in {type(choice) for choice in choices} or (
            isinstance(value, str | bool) and value not in choices
        ):
            raise CaseError(f"operator {self.name}: {name} {value!r} is none of {', '.join(map(str, choices))}")
