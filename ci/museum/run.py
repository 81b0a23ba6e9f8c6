"""Run the museum: released packages before and after the fix of a real numerical bug.

    python ci/museum/run.py [ID...] [--keep] [--venvs DIR] [--json FILE]

Each exhibit of `exhibits.toml` is judged twice: the old release must be red with the expected first cause, the new
one green. Each set of pins has a virtual environment of its own, in which whatever is not pinned (torch, numpy, the
judge) comes from the interpreter that runs this script. Exit status: 0 when every exhibit is as expected, 1 when
one is not, 2 when an id is unknown or a place cannot be written.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import pytest_adapt
from pytest_adapt.models import materialise

HERE = Path(__file__).resolve().parent
# The checkout or the site-packages that holds the judge.
HOME = Path(pytest_adapt.__file__).resolve().parents[1]


@dataclass(frozen=True)
class Exhibit:
    """One bug. ``site`` is the local name of the site that the first cause must name."""

    id: str
    project: str
    what: str
    report: str
    """Public report or fix."""
    old: tuple[str, ...]
    """Requirements, as pip reads them; the first names the release."""
    new: tuple[str, ...]
    target: str
    model: str
    """A shipped model."""
    site: str
    words: str
    """How the first cause begins."""
    options: tuple[str, ...] = ()
    select: str = "correctness"
    """Suites, or one test, to run."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that replace those of the shipped model: a copy is then judged by the live oracle."""
    scale: dict[str, list[int]] = field(default_factory=dict)
    """End of a tensor's name -> (rows, exponent): so many first rows of these tensors are multiplied by 2^exponent,
    which takes a first bug out of sight of a second one; also in a copy."""


@dataclass
class Verdict:
    """What one release got: ``exit`` and ``cause`` of its report, and the first divergence in its own words."""

    release: str
    exit: int
    cause: str
    first: str
    cases: dict[str, int]
    seconds: float


def exhibits(path: Path) -> list[Exhibit]:
    """Every exhibit, in the order of the file. Raises TypeError for an unknown or a missing key."""
    return [_exhibit(entry) for entry in tomllib.loads(path.read_text("utf-8"))["exhibit"]]


def _exhibit(entry: dict[str, Any]) -> Exhibit:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Exhibit(**values)


def directory_of(pins: tuple[str, ...], venvs: Path) -> Path:
    digest = hashlib.sha256(" ".join(sorted(pins)).encode()).hexdigest()[:8]
    return venvs / f"{pins[0].replace('==', '-')}-{digest}"


def environment(pins: tuple[str, ...], venvs: Path) -> Path:
    """The interpreter of a virtual environment with ``pins``; made when it is not there yet."""
    directory = directory_of(pins, venvs)
    python = directory / "bin" / "python"
    done = directory / "done"
    if done.is_file():
        return python
    venv.create(directory, with_pip=False, clear=True)
    # Read after its own packages, so that a pin wins over what this interpreter has.
    site = directory / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    shared = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(HOME)])
    (site / "zz_shared.pth").write_text("\n".join(shared) + "\n")
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *pins], check=True)
    done.touch()
    return python


def checkpoint(exhibit: Exhibit, work: Path) -> str:
    """What ``--adapt-models`` is told: a shipped name, or the directory of a copy with another config.json."""
    if not exhibit.config and not exhibit.scale:
        return exhibit.model
    source, copy = materialise(exhibit.model, work / ".adapt" / "models"), work / "models" / exhibit.id
    copy.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = copy / file.name
        link.unlink(missing_ok=True)
        if file.name != "config.json":
            link.symlink_to(file.resolve())
    config = json.loads((source / "config.json").read_text("utf-8")) | exhibit.config
    (copy / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file in source.glob("*.safetensors") if exhibit.scale else ():
        (copy / file.name).unlink()
        (copy / file.name).write_bytes(scaled(file.read_bytes(), exhibit.scale))
    return str(copy)


def scaled(data: bytes, scale: dict[str, list[int]]) -> bytes:
    """A safetensors file with the first rows of some bfloat16 matrices multiplied by powers of two, exactly."""
    length = int.from_bytes(data[:8], "little")
    header, content = json.loads(data[8 : 8 + length]), bytearray(data)
    for name, entry in header.items():
        for end, (rows, exponent) in scale.items():
            if not name.endswith(end):
                continue
            if entry["dtype"] != "BF16" or rows > entry["shape"][0]:
                raise ValueError(f"{name}: {entry['dtype']} {entry['shape']}; expected BF16 and {rows} rows at least")
            start = 8 + length + entry["data_offsets"][0]
            bits = np.frombuffer(content, "<u2", rows * entry["shape"][1], start)
            bits[bits & 0x7F80 != 0] += np.uint16(exponent << 7)
    return bytes(content)


def judge(exhibit: Exhibit, pins: tuple[str, ...], venvs: Path, work: Path) -> Verdict:
    """Judge one release, in a process and a folder of its own."""
    python = environment(pins, venvs)
    report = work / "reports" / exhibit.id / pins[0]
    (work / "pytest.ini").write_text("[pytest]\n")
    command = [
        *(str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(work)),
        *(() if _registered() else ("-p", "pytest_adapt.plugin")),
        *(f"--adapt-target={exhibit.target}", f"--adapt-models={checkpoint(exhibit, work)}"),
        *(f"--adapt-report={report}", *exhibit.options, exhibit.select),
    ]
    started = time.monotonic()
    ran = subprocess.run(command, cwd=work, env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True, text=True)
    seconds = time.monotonic() - started
    path = report / "report.json"
    if not path.is_file():
        last = (ran.stderr.strip() or ran.stdout.strip() or "no output").splitlines()[-1]
        return Verdict(pins[0], ran.returncode, f"no report: {last}", "", {}, seconds)
    content = json.loads(path.read_bytes())
    path.rename(report / "judged.json")  # a run that dies before its report must not find this one
    counts: dict[str, int] = {}
    for case in content["cases"]:
        counts[case["status"]] = counts.get(case["status"], 0) + 1
    cluster = next(iter(content["clusters"]), None)
    cause = cluster["cause"] if cluster else content["fatal"]
    return Verdict(pins[0], ran.returncode, cause, _first(content, cluster), counts, round(seconds, 1))


def _registered() -> bool:
    """Whether an installed distribution registers the plugin."""
    try:
        found = importlib.metadata.distribution("pytest-adapt")
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(entry.group == "pytest11" for entry in found.entry_points)


def _first(content: dict[str, Any], cluster: dict[str, Any] | None) -> str:
    """The first divergence of the first cluster, on one line."""
    cases = {case["case"]: case for case in content["cases"]}
    found = cases[cluster["first"]]["divergence"] if cluster else None
    if not found:
        return ""
    return (
        f"{found['site']}, position {found['position']}, {found['step']}: got {found['got']}, "
        f"expected {found['expected']} (error {found['error']:.3g}, budget {found['budget']:.3g})"
    )


def wrong(exhibit: Exhibit, old: Verdict, new: Verdict) -> str:
    """Why an exhibit is not as expected; empty where it is."""
    if old.exit != 1:
        return f"{old.release} ended with {old.exit}, expected 1 ({old.cause or 'nothing red'})"
    site = old.first.partition(",")[0]
    if not old.cause.startswith(exhibit.words) or not f".{site}".endswith(f".{exhibit.site}"):
        return f"{old.release} is red for another cause: {old.cause} ({old.first})"
    if new.exit != 0:
        return f"{new.release} ended with {new.exit}, expected 0 ({new.cause}; {new.first})"
    if not new.cases.get("pass"):
        return f"{new.release} passed no case"
    return ""


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--keep", action="store_true", help="keep the virtual environments")
    parser.add_argument("--venvs", type=Path, default=Path(".adapt/museum"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(None if arguments is None else list(arguments))
    known = exhibits(HERE / "exhibits.toml")
    chosen = [exhibit for exhibit in known if exhibit.id in options.ids or not options.ids]
    unknown = set(options.ids) - {exhibit.id for exhibit in known}
    if unknown:
        print(f"no exhibit {min(unknown)}; there are {', '.join(exhibit.id for exhibit in known)}", file=sys.stderr)
        return 2
    venvs, output = options.venvs.resolve(), options.json and options.json.resolve()
    # Before ten minutes of judging, not after them.
    if output and not (output.parent.is_dir() and os.access(output.parent, os.W_OK) and not output.is_dir()):
        print(f"--json={options.json}: no file can be written there", file=sys.stderr)
        return 2
    work = venvs / "work"
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--venvs={options.venvs}: no folder can be made there ({error.strerror})", file=sys.stderr)
        return 2
    results: list[dict[str, Any]] = []
    for exhibit in chosen:
        old, new = (judge(exhibit, pins, venvs, work) for pins in (exhibit.old, exhibit.new))
        problem = wrong(exhibit, old, new)
        results.append({"exhibit": asdict(exhibit), "old": asdict(old), "new": asdict(new), "wrong": problem})
        print(f"{exhibit.id:36} {'WRONG' if problem else 'as expected':12} {old.release} red, {new.release} green")
        print(f"    {problem or f'{old.cause}: {old.first}'}", flush=True)
    if output:
        made = {"python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d", time.gmtime())}
        output.write_text(json.dumps({"made": made, "results": results}, indent=1) + "\n")
    if not options.keep:
        for exhibit in chosen:
            for pins in (exhibit.old, exhibit.new):
                shutil.rmtree(directory_of(pins, venvs), ignore_errors=True)
    failed = sum(bool(result["wrong"]) for result in results)
    print(f"{len(results) - failed} of {len(results)} exhibits as expected")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
