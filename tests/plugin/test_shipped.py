"""The shipped suites: found from any folder, under the same ids, beside the user's own tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_adapt.items import FIXTURES
from pytest_adapt.shipped import case_id, program, suite_of, suites_dir, with_suites

if TYPE_CHECKING:
    from conftest import Folder

Write = Callable[..., object]
ROOT = Path(__file__).resolve().parents[2]
TARGET = ("--adapt-target=py:targets:Echo", "--adapt-profile=smoke")
MOST_ITEMS = 3000


def collected(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def test_an_empty_folder_runs_the_suites(folder: Folder) -> None:
    found = collected(folder.run_bare(*TARGET, "--co", "-q"))
    assert len(found) > 20
    assert all(f"{suite}/test_" in "".join(found) for suite in ("loading", "correctness", "consistency", "determinism"))


def test_with_options_only_they_run_too(folder: Folder) -> None:
    everything = collected(folder.run_bare(*TARGET, "--co", "-q"))
    some = collected(folder.run_bare(*TARGET, "--co", "-q", "-k", "determinism", "-x"))
    assert 0 < len(some) < len(everything)


def test_they_run_beside_the_users_tests(folder: Folder, write: Write) -> None:
    write(test_mine="def test_it(): pass")
    found = collected(folder.run_bare(*TARGET, "--co", "-q"))
    assert found[0] == "test_mine.py::test_it"
    assert len(found) > 20
    assert collected(folder.run_bare(*TARGET, "--co", "-q", "test_mine.py")) == ["test_mine.py::test_it"]


def test_testpaths_are_respected(folder: Folder, write: Write) -> None:
    write(test_mine="def test_it(): pass", **{"own/test_own": "def test_own(): pass"})
    folder.pytester.makeini("[pytest]\ntestpaths = own\n")
    found = collected(folder.run_bare(*TARGET, "--co", "-q"))
    assert "own/test_own.py::test_own" in found
    assert "test_mine.py::test_it" not in found
    assert len(found) > 20


def test_the_users_naming_conventions_do_not_matter(folder: Folder, write: Write) -> None:
    usual = collected(folder.run_bare(*TARGET, "--co", "-q"))
    write(check_mine="def verify_it(): pass")
    folder.pytester.makeini("[pytest]\npython_files = check_*.py\npython_functions = verify_*\n")
    assert collected(folder.run_bare(*TARGET, "--co", "-q")) == ["check_mine.py::verify_it", *usual]


def test_a_users_file_of_the_same_name_does_not_clash(folder: Folder, write: Write) -> None:
    names = [path.name.removesuffix(".py") for path in suites_dir().rglob("test_*.py")]
    write(**{names[0]: "def test_it(): pass"})
    result = folder.run_bare(*TARGET, "--co", "-q")
    assert result.ret == 0
    assert f"{names[0]}.py::test_it" in collected(result)


def test_a_case_id_is_an_address(folder: Folder) -> None:
    found = collected(folder.run_bare(*TARGET, "--co", "-q"))
    case = next(line for line in found if line.startswith("determinism/"))
    assert collected(folder.run_bare(*TARGET, "--co", "-q", case)) == [case]
    assert len(collected(folder.run_bare(*TARGET, "--co", "-q", "determinism"))) > 1


def test_ids_are_the_same_from_checkout_and_wheel(tmp_path: Path) -> None:
    file = suites_dir() / "loading" / "test_loading.py"
    assert case_id(file, "../../x/suites/loading/test_loading.py::test_a[m]") == "loading/test_loading.py::test_a[m]"
    assert suite_of(file) == "loading"
    assert case_id(tmp_path / "test_a.py", "test_a.py::test_b") == "test_a.py::test_b"
    assert suite_of(tmp_path / "test_a.py") == ""


def test_in_a_checkout_only_the_suites_run() -> None:
    args = ["--adapt-target=x"]
    with_suites(args, [], directory=ROOT, rootdir=ROOT, testpaths=["tests"], pyargs=False)
    assert args == ["--adapt-target=x", str(suites_dir())]


def test_option_values_are_not_taken_for_paths(tmp_path: Path) -> None:
    args = ["-k", "loading", "loading"]
    with_suites(args, ["loading"], directory=tmp_path, rootdir=tmp_path, testpaths=[], pyargs=False)
    assert args == ["-k", "loading", str(suites_dir() / "loading")]
    args = ["-k", "loading"]
    with_suites(args, [], directory=tmp_path, rootdir=tmp_path, testpaths=[], pyargs=False)
    assert args == ["-k", "loading", str(tmp_path), str(suites_dir())]


def test_the_suites_stay_small(folder: Folder) -> None:
    found = collected(folder.run_bare("--adapt-target=py:targets:Echo", "--adapt-profile=full", "--co", "-q"))
    assert 100 < len(found) < MOST_ITEMS


def test_last_failed_works_on_them(folder: Folder, write: Write) -> None:
    write(test_mine="def test_bad(target): assert 0\ndef test_good(target): pass\n")
    args = ("-p", "pytest_adapt.plugin", *TARGET, "--adapt-precisions=fp32", "test_mine.py")
    assert folder.pytester.runpytest_inprocess(*args).parseoutcomes() == {"passed": 1, "failed": 1}
    assert folder.pytester.runpytest_inprocess(*args, "--lf").parseoutcomes() == {"failed": 1, "deselected": 1}
    shutil.rmtree(folder.path / ".pytest_cache")


@pytest.mark.parametrize("path", sorted(suites_dir().rglob("*.py")), ids=lambda path: path.name)
def test_suites_hold_no_helpers(path: Path) -> None:
    assert path.name.startswith("test_")
    text = path.read_text()
    assert "adapt_engine" not in text
    assert "conftest" not in text


@pytest.mark.parametrize("name", FIXTURES)
def test_a_users_fixture_never_replaces_one_of_ours_in_them(folder: Folder, name: str) -> None:
    folder.pytester.makeconftest(f"""
import pytest
@pytest.fixture
def {name}():
    class Anything:
        def __getattr__(self, name):
            return lambda *args, **kwargs: None
    return Anything()
""")
    case = "benchmark" if name in ("stopwatch", "gate") else "loading"
    profile = "--adapt-profile=full" if name in ("stopwatch", "context_length") else "--adapt-profile=smoke"
    case = "correctness" if name in ("context_length", "reference") else case
    result = folder.run_bare(*TARGET[:1], profile, case)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"conftest.py:2 redefines fixture '{name}', which the shipped suites use; rename it" in result.stderr.str()


def test_a_value_given_by_a_hook_is_no_judge_either(folder: Folder, write: Write) -> None:
    write(
        hooks_of_mine="""
def pytest_generate_tests(metafunc):
    if "judge" in metafunc.fixturenames:
        metafunc.parametrize("judge", [object()])
"""
    )
    folder.pytester.syspathinsert()
    result = folder.run_bare("-p", "hooks_of_mine", *TARGET, "loading")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "a pytest_generate_tests hook redefines fixture 'judge'" in result.stderr.str()


def test_a_users_own_tests_may_have_such_a_fixture(folder: Folder, write: Write) -> None:
    write(
        test_mine="""
import pytest
@pytest.fixture
def model():
    return 3
def test_it(model):
    assert model == 3
"""
    )
    assert folder.run_bare(*TARGET, "test_mine.py").parseoutcomes() == {"passed": 1}


def test_a_shipped_test_without_a_judge_compared_nothing(folder: Folder, write: Write) -> None:
    write(
        calls_of_mine="""
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    from pytest_adapt.stash import STATE
    item.stash[STATE].judge = None
"""
    )
    only = ("loading", "-k", "loads_and_answers")
    folder.pytester.syspathinsert()
    result = folder.run_bare("-p", "calls_of_mine", *TARGET, "--adapt-precisions=fp32", *only)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "the test compared nothing: it has no judge" in result.stdout.str()


@pytest.mark.parametrize(
    ("started", "python", "words"),
    [
        ("/opt/lib/pytest/__main__.py", "/opt/x/python3", ("/opt/x/python3", "-m", "pytest")),
        ("/opt/lib/pytest/__main__.py", "{here}/.venv/bin/python", (".venv/bin/python", "-m", "pytest")),
        ("{here}/.venv/bin/pytest", "/usr/bin/python", (".venv/bin/pytest",)),
        ("{path}/pytest", "/usr/bin/python", ("pytest",)),
        ("pytest", "/usr/bin/python", ("pytest",)),
        ("/opt/editor/runner.py", "/usr/bin/python", ("pytest",)),
    ],
)
def test_commands_begin_as_this_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, python: str, words: tuple[str, ...]
) -> None:
    place = tmp_path / "bin"
    place.mkdir()
    (place / "pytest").write_text("#!/bin/sh")
    (place / "pytest").chmod(0o755)
    monkeypatch.setenv("PATH", str(place))
    given = [text.format(here=tmp_path, path=place) for text in (started, python)]
    assert program(*given, tmp_path) == words
