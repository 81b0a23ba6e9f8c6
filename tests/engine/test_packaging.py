"""Building: without a compiler the engine installs all the same; an error in its own sources can be made fatal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PIP = (sys.executable, "-m", "pip", "wheel")
ENGINE = Path(__file__).resolve().parents[2] / "engine"


def build_wheel(source: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "-q",
            "-w",
            str(target),
            str(source),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        check=False,
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pytest.importorskip("scikit_build_core")
    ignore = shutil.ignore_patterns("build", "*.so", "__pycache__")
    return Path(shutil.copytree(ENGINE, tmp_path / "engine", ignore=ignore))


@pytest.mark.requirement(57)
def test_without_a_compiler_a_pure_wheel_is_built(source: Path, tmp_path: Path) -> None:
    (source / "adapt_engine" / "_native.so").write_bytes(b"left over from another build")
    built = build_wheel(source, tmp_path / "wheels", CXX="/bin/false", ADAPT_ENGINE_REQUIRE_NATIVE="")
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "adapt_engine/runtime/engine.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_a_failing_build_is_fatal_where_native_kernels_are_required(source: Path, tmp_path: Path) -> None:
    built = build_wheel(source, tmp_path / "wheels", CXX="/bin/false", ADAPT_ENGINE_REQUIRE_NATIVE="1")
    assert built.returncode != 0
