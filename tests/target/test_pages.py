"""docs/targets.md says what the suites ask for, no more and no less."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from pytest_adapt.shipped import suites_dir

PAGE = Path(__file__).resolve().parents[2] / "docs" / "targets.md"
ROW = re.compile(r"^\| `(\w+)` \| ([^|]*) \| [^|]* \| ([^|]*`test_[^|]*) \|$", re.MULTILINE)


def asked() -> dict[str, dict[str, set[int]]]:
    """Feature -> test -> settings, from the marks of the shipped tests and from what they open and look for."""
    found: dict[str, dict[str, set[int]]] = {}
    for file in sorted(suites_dir().rglob("test_*.py")):
        for test in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(test, ast.FunctionDef):
                continue
            for call in (node for node in ast.walk(test) if isinstance(node, ast.Call)):
                for name, value in features(call):
                    settings = ast.literal_eval(value) if isinstance(value, ast.Constant | ast.Tuple) else ()
                    values = {settings} if isinstance(settings, int) else set(settings)
                    found.setdefault(name, {}).setdefault(test.name, set()).update(values)
    return found


def features(call: ast.Call) -> list[tuple[str, ast.expr]]:
    """(name, setting) that one call asks for."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "with_features":
        return [(word.arg, word.value) for word in call.keywords if word.arg]
    if name == "supports" and len(call.args) == 2:
        return [(ast.literal_eval(call.args[0]), call.args[1])]
    if name == "adapt":
        marked = [word.value for word in call.keywords if word.arg == "features"]
        return [
            (ast.literal_eval(key), value)
            for each in marked
            if isinstance(each, ast.Dict)
            for key, value in zip(each.keys, each.values, strict=True)
            if key is not None
        ]
    return []


def test_every_feature_that_a_shipped_test_asks_for_has_its_row() -> None:
    rows = {name: (settings, tests) for name, settings, tests in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    wanted = asked()
    assert set(rows) == set(wanted)
    assert {"load_audit", "prefill_chunk", "prefix_cache"} <= set(wanted)
    for name, tests in wanted.items():
        settings, named = rows[name]
        assert set(re.findall(r"`(\d+)`", settings)) == {str(one) for values in tests.values() for one in values}, name
        assert set(re.findall(r"`(test_\w+)`", named)) == set(tests), name
