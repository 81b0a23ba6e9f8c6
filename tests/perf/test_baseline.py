"""Baselines: what the words mean, and sides that lie at paths of equal length."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pytest_adapt.perf.baseline import BaselineError, Builder, resolve_baseline
from pytest_adapt.perf.sides import search_path
from pytest_adapt.target.registry import TargetSpec, builtin_registry

REGISTRY = builtin_registry()
MODULE = """class Target:
    speed = {speed}
    def open(self, deployment): ...
    def run(self, requests): ...
    def close(self): ...
"""


def make_wheel(folder: Path, name: str, speed: int) -> Path:
    """A wheel with one module, as a build backend would write it."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", MODULE.format(speed=speed))
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}-serve = {name}:Target\n")
        names = ["METADATA", "WHEEL", "entry_points.txt", "RECORD"]
        wheel.writestr(
            f"{info}/RECORD", "".join(f"{one},,\n" for one in [f"{name}.py", *(f"{info}/{n}" for n in names)])
        )
    return path


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TargetSpec:
    """A target in the user's folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gate_probe.py").write_text(MODULE.format(speed=2))
    return REGISTRY.resolve("py:gate_probe:Target", rootdir=tmp_path)


def speed_of(paths: tuple[str, ...]) -> str:
    """What a process of a side imports."""
    line = f"import sys; sys.path[:0] = {list(paths)!r}; import gate_probe; print(gate_probe.Target.speed)"
    return subprocess.run([sys.executable, "-c", line], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.requirement(105)
def test_a_wheel_stands_against_what_is_installed(tmp_path: Path, spec: TargetSpec) -> None:
    wheel = make_wheel(tmp_path, "gate_probe", speed=1)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    loose = resolve_baseline(wheel.name, spec, REGISTRY, tmp_path)
    found = resolve_baseline(f"{wheel.name}#sha256={digest}", spec, REGISTRY, tmp_path)
    assert (loose.pinned, found.pinned, found.label) == (False, True, f"{wheel.name} ({digest[:8]})")
    a, b = found.sides(Builder(tmp_path))
    assert (speed_of(a.paths), speed_of(b.paths)) == ("1", "2")
    assert len(a.paths[0]) == len(b.paths[0]) and a.paths[0] != b.paths[0] and a.paths[1:] == b.paths[1:]
    assert found.sides(Builder(tmp_path))[0].paths == a.paths  # built once
    with pytest.raises(BaselineError, match="not the pinned one"):
        resolve_baseline(f"{wheel.name}#sha256={'0' * 64}", spec, REGISTRY, tmp_path)
    other = resolve_baseline(make_wheel(tmp_path, "absent_probe", 1).name, spec, REGISTRY, tmp_path)
    with pytest.raises(BaselineError, match="the module absent_probe, which is not installed here"):
        other.sides(Builder(tmp_path))


def test_a_wheel_that_is_none_leaves_its_log(tmp_path: Path, spec: TargetSpec) -> None:
    (tmp_path / "bad-1.0-py3-none-any.whl").write_text("no")
    found = resolve_baseline("bad-1.0-py3-none-any.whl", spec, REGISTRY, tmp_path)
    with pytest.raises(BaselineError, match="cannot be built") as caught:
        found.sides(Builder(tmp_path))
    assert "ERROR" in str(caught.value)
    assert not [*(tmp_path / ".adapt" / "gate" / "side-a").iterdir()]


@pytest.mark.requirement(105)
def test_a_commit_stands_against_the_working_tree(tmp_path: Path, spec: TargetSpec) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run([*git, "init", "-q", "-b", "trunk"], check=True)
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    (tmp_path / "deleted.py").write_text("")
    (tmp_path / "link.py").symlink_to("gate_probe.py")
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    (tmp_path / "deleted.py").unlink()
    (tmp_path / ".adapt").mkdir()
    (tmp_path / ".adapt" / "large").write_text("")
    (tmp_path / "gate_probe.py").write_text(MODULE.format(speed=3))
    (tmp_path / "untracked.py").write_text("")
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    for words, pinned in ((head[:9], True), (head, True), ("v1", True), ("trunk", False), ("HEAD", False)):
        found = resolve_baseline(words, spec, REGISTRY, tmp_path)
        assert (found.commit, found.pinned) == (head, pinned), words
    a, b = resolve_baseline("v1", spec, REGISTRY, tmp_path).sides(Builder(tmp_path))
    assert (speed_of(a.paths), speed_of(b.paths)) == ("2", "3")
    places = [Path(path) for path in (a.paths[0], b.paths[0])]
    assert len(str(places[0])) == len(str(places[1])) and {one.parent.parent.name for one in places} == {
        "side-a",
        "side-b",
    }
    assert (places[1] / "untracked.py").is_file() and not (places[1] / ".adapt").exists()
    assert (places[0] / "deleted.py").is_file() and not (places[1] / "deleted.py").exists()
    assert all((place / "link.py").readlink() == Path("gate_probe.py") for place in places)
    assert a.spec.settings.rootdir == places[0] and b.spec.settings.rootdir == places[1]
    # Another state of the tree is another side; the baseline stays.
    (tmp_path / "gate_probe.py").write_text(MODULE.format(speed=4))
    again = resolve_baseline("v1", spec, REGISTRY, tmp_path).sides(Builder(tmp_path))
    assert again[0].paths == a.paths and speed_of(again[1].paths) == "4"


@pytest.mark.requirement(105)
def test_a_build_command_installs_into_a_folder_of_its_own(tmp_path: Path, spec: TargetSpec) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org")
    (tmp_path / ".gitignore").write_text(".adapt\n")
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    builder = Builder(tmp_path, "sed s/=.2/=7/ {source}/gate_probe.py > {site}/gate_probe.py")
    found = resolve_baseline("HEAD", spec, REGISTRY, tmp_path)
    a, b = found.sides(builder)
    assert speed_of(a.paths) == speed_of(b.paths) == "7"
    assert found.sides(Builder(tmp_path, "true"))[0].paths != a.paths  # built otherwise is another build
    plain = found.sides(Builder(tmp_path, "true"))[0]
    assert speed_of(plain.paths) == "2"


def test_another_target_is_a_baseline_too(tmp_path: Path, spec: TargetSpec) -> None:
    found = resolve_baseline("openai:http://127.0.0.1:1/v1", spec, REGISTRY, tmp_path)
    a, b = found.sides(Builder(tmp_path))
    assert found.pinned and a.label == "openai:http://127.0.0.1:1/v1" and b.label == "py:gate_probe:Target"
    assert a.paths == b.paths == search_path()
    for words, said in (
        ("v9", r"'v9' is no commit of the repository"),
        ("no.whl", "no.whl does not exist"),
        ("openai:ftp://x", "the URL must read http"),
    ):
        with pytest.raises(BaselineError, match=said):
            resolve_baseline(words, spec, REGISTRY, tmp_path)


@pytest.mark.requirement(105)
def test_the_pinned_commit_is_of_this_history_and_has_a_profile() -> None:
    """Without a profile on both sides nothing tells where the time went."""
    root = Path(__file__).parents[2]
    pin = (root / "ci" / "baseline").read_text(encoding="utf-8").strip()
    assert re.fullmatch(r"[0-9a-f]{40}", pin)

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no repository with its history")
    assert git("merge-base", "--is-ancestor", pin, "HEAD").returncode == 0
    for place in ("builtin", "hf"):
        assert "    def profile(self, " in git("show", f"{pin}:pytest_adapt/target/{place}.py").stdout
