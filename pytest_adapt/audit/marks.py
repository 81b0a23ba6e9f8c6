"""Which test carries which requirement number, read from the source: nothing is imported, so nothing can hide."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pytest_adapt.shipped import suites_dir

__all__ = ["Claim", "MarkError", "claims", "named_tests", "requirement_titles", "sources"]


class MarkError(Exception):
    """A test file cannot be read, or a requirement mark is not a literal number; one line with the place."""


@dataclass(frozen=True)
class Claim:
    """One test function and the requirement numbers that it carries."""

    test: str
    """``correctness/test_sites.py::test_name`` for shipped suites, ``tests/golden/test_x.py::test_name`` for ours."""
    numbers: tuple[int, ...]
    line: int

    @property
    def suite(self) -> str:
        """The shipped suite; "" for a test of the project itself."""
        return "" if self.test.startswith("tests/") else self.test.partition("/")[0]


def requirement_titles() -> Mapping[int, str]:
    """Requirement number -> its short title, in the order of the numbers."""
    text = (resources.files("pytest_adapt") / "requirements.json").read_text(encoding="utf-8")
    return {int(number): str(title) for number, title in json.loads(text).items()}


def sources() -> list[tuple[str, Path]]:
    """(prefix of test names, folder) of all that carries marks: the shipped suites, and tests/ of the checkout that
    they lie in, or that is the working directory (where the package is installed beside it)."""
    suites = suites_dir()
    found = [("", suites)]
    for root in (suites.parent, Path.cwd()):
        if (root / "pytest_adapt" / "plugin.py").is_file() and (root / "tests").is_dir():
            return [*found, ("tests/", root / "tests")]
    return found


def claims(folders: Iterable[tuple[str, Path]]) -> list[Claim]:
    """Every test function below the folders, with its numbers, in the order of its file.

    A mark counts on the function, on its class, in the module's ``pytestmark`` and in ``pytest.param(marks=...)``.
    Raises MarkError.
    """
    found: list[Claim] = []
    for prefix, folder in folders:
        for path in sorted(folder.rglob("test_*.py")):
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError) as error:
                raise MarkError(f"{path}: cannot be read as Python: {error}") from None
            name = f"{prefix}{path.relative_to(folder).as_posix()}"
            found += _tests(tree.body, name, path, _module_numbers(tree.body, path))
    return found


def named_tests(every: Iterable[Claim]) -> dict[int, list[str]]:
    """Requirement number -> names of the tests that carry it."""
    table: dict[int, list[str]] = {}
    for claim in every:
        for number in claim.numbers:
            table.setdefault(number, []).append(claim.test)
    return table


def _tests(body: Sequence[ast.stmt], name: str, path: Path, inherited: frozenset[int]) -> Iterator[Claim]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _tests(node.body, f"{name}::{node.name}", path, inherited | _numbers(node.decorator_list, path))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            numbers = inherited | _numbers(node.decorator_list, path)
            yield Claim(f"{name}::{node.name}", tuple(sorted(numbers)), node.lineno)


def _module_numbers(body: Sequence[ast.stmt], path: Path) -> frozenset[int]:
    values = [
        node.value
        for node in body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
    ]
    return _numbers(values, path)


def _numbers(expressions: Iterable[ast.expr], path: Path) -> frozenset[int]:
    """Numbers of every ``pytest.mark.requirement(...)`` in some expressions."""
    found: set[int] = set()
    for call in (node for one in expressions for node in ast.walk(one) if isinstance(node, ast.Call)):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "requirement"):
            continue
        for argument in call.args:
            # bool is an int, and no number of a requirement.
            if not isinstance(argument, ast.Constant) or type(argument.value) is not int:
                raise MarkError(
                    f"{path}:{call.lineno}: requirement({ast.unparse(argument)}) is no literal number; write it out"
                )
            found.add(argument.value)
    return frozenset(found)
