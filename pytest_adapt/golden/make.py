"""Making reference records: the oracle's answers, confirmed by a witness that shares no code with it.

The witness is transformers in float32. A record that it contradicts is not written: an error of the oracle, or a
regression that someone wants to record as the new truth, has to pass two implementations.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_adapt.golden.record import Record, RecordKey, make_record
from pytest_adapt.golden.reference import OracleReference, carriers
from pytest_adapt.golden.store import StoreError

__all__ = ["Task", "Witness", "catalogue_tasks", "environment", "provenance"]


@dataclass(frozen=True)
class Task:
    """One record to be made: a prompt of a model, and the shorter prompts that its record serves."""

    live: OracleReference
    key: RecordKey
    tokens: tuple[int, ...]
    inside: tuple[int, ...]
    """Lengths of the prompts that share the record."""

    def make(self) -> Record:
        return make_record(self.live.oracle, self.key, self.tokens, self.live.precisions, self.inside)


def catalogue_tasks(root: Path, names: Sequence[str] = ()) -> tuple[dict[str, Task], dict[str, str]]:
    """(record id -> task, model -> why it cannot be made) for catalogue models (all, or ``names``).

    Checkpoints are written below ``root``. Raises StoreError for an unknown name.
    """
    from pytest_adapt.models import ModelError, catalogue, materialise, prompts, spec_hash

    entries = catalogue()
    unknown = sorted(set(names) - set(entries))
    if unknown:
        raise StoreError(f"unknown model {unknown[0]!r}; the catalogue has {', '.join(entries)}")
    closed = [name for name in entries if entries[name].kind == "needle"]
    if needless := sorted(set(names) & set(closed)):
        raise StoreError(f"model {needless[0]} has a closed form at any length; it needs no record")
    tasks: dict[str, Task] = {}
    absent: dict[str, str] = {}
    for name in names or [name for name in entries if name not in closed]:
        entry = entries[name]
        try:
            directory = materialise(name, root)
        except ModelError as problem:
            absent[name] = str(problem)
            continue
        live = OracleReference(directory, entry.precisions, name)
        every = {prompt: tuple(tokens) for prompt, tokens in prompts(entry, directory).items()}
        served = carriers(every)
        for prompt in sorted(set(served.values())):
            inside = tuple(len(every[one]) for one, carrier in served.items() if carrier == prompt)
            key = live.key(prompt, every[prompt], spec_hash(entry))
            tasks[key.id] = Task(live, key, every[prompt], inside)
    return tasks, absent


class Witness:
    """transformers in float32, asked about the prompts of one model after the other."""

    def __init__(self) -> None:
        """Raises TargetError where transformers is not installed."""
        from pytest_adapt.target.registry import builtin_registry

        self._target: Any = builtin_registry().resolve("hf:").create()
        self._open: tuple[Path, Any] | None = None

    def confirm(self, directory: Path, record: Record) -> dict[str, Any]:
        """Who confirmed the record of the checkpoint in ``directory``, and how far apart they are.

        Raises StoreError when they disagree, and TargetError where the witness cannot run.
        """
        from pytest_adapt.target.protocol import Request
        from pytest_adapt.verdict.judge import Judge

        info = self._opened(directory)
        tokens = tuple(int(token) for token in record.tokens)
        request = Request("witness", tokens, want=frozenset({"logits"}))
        (response,) = self._target.run([request])
        judge = Judge("fp32")
        judge.prompt_tokens(record.key.prompt, response, tokens)
        judge.against_record(record.key.prompt, response, record)
        if judge.failures():
            first = judge.message().partition("\n")[0]
            raise StoreError(f"{record.key.id}: the witness {info.name} {info.version} disagrees: {first}")
        found = {one.metric: one for one in judge.measurements}
        return {
            "name": info.name,
            "version": info.version,
            "max_error": float(f"{found['logprob.max'].value:.2e}"),
            "use_of_budget": round(max(one.use for one in judge.measurements), 2),
            "certified": int(record.certified("fp32").sum()),
        }

    def close(self) -> None:
        self._target.close()

    def _opened(self, directory: Path) -> Any:
        from pytest_adapt.target.protocol import Deployment

        if self._open is None or self._open[0] != directory:
            self._target.close()
            deployment = Deployment(str(directory), precision="fp32", max_context=1 << 13)
            self._open = directory, self._target.open(deployment)
        return self._open[1]


def provenance(reason: str, store: Path) -> dict[str, Any]:
    """Who makes records, when, with what and why. Stands beside the data, outside its digest.

    ``commit`` is that of the repository which keeps the ``store``, ``dirty`` whether it has changes outside the store.
    """
    import pytest_adapt

    store = store.absolute()
    start = next(place for place in (store, *store.parents) if place.is_dir())
    commit = _git(start, "rev-parse", "HEAD")
    changed = _git(start, "status", "--porcelain", "--", ":/", f":(exclude){store.relative_to(start)}")
    return {
        "reason": reason,
        "generator": f"pytest-adapt {pytest_adapt.__version__}",
        "made_by": _git(start, "config", "user.name"),
        "made_at": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "dirty": bool(changed),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """What numbers may depend on here: versions, instruction set, threads. Never a host name."""
    import numpy

    built: Any = numpy.show_config(mode="dicts")
    blas: Mapping[str, Any] = built.get("Build Dependencies", {}).get("blas", {})
    return {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "blas": f"{blas.get('name', '')} {blas.get('version', '')}".strip(),
        "isa": " ".join(built.get("SIMD Extensions", {}).get("found", [])),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
    }


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
