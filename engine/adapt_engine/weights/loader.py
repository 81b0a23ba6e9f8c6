"""Loads a checkpoint into parameters and audits the load.

Every expected parameter is written exactly once, from the tensor and file that the index names; every
stored tensor is consumed or has a stated reason not to be; shapes, dtypes and values are checked.

`Loader.read` and `Loader.assign` are the seams that loading faults wrap from outside.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import ModelSpec
from ..errors import CheckpointError
from .index import TensorEntry, WeightIndex
from .parameters import ParameterSpec, ShardSlice, expected_parameters, ignored_source

__all__ = ["LoadReport", "Loader"]

_FLOATS: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class LoadReport:
    """What a load did. ``seconds`` is wall time of reading, checking and converting."""

    seconds: float
    bytes: int
    bytes_per_second: float
    tensors: int
    files: int
    warnings: tuple[str, ...] = ()
    largest: float = 0.0
    """Largest absolute value of any parameter."""
    io_share: float = 0.0
    """Part of the workers' time that went into bringing file pages into memory; the rest checks and converts."""


class Loader:
    """One load of one checkpoint. ``parameters`` (buffer name -> tensor) is complete once `load` returns.

    Raises CheckpointError naming file and tensor for everything that does not fit.
    """

    def __init__(self, index: WeightIndex, spec: ModelSpec, dtype: torch.dtype, workers: int = 4) -> None:
        self.index = index
        self.spec = spec
        self.dtype = dtype
        self.workers = workers
        self.parameters: dict[str, torch.Tensor] = {}
        self._wanted = {parameter.name: parameter for parameter in expected_parameters(spec)}
        self._maps: dict[Path, mmap.mmap] = {}
        self._read: set[str] = set()
        self._written: set[str] = set()
        self._largest = 0.0
        self._io_seconds = 0.0
        self._busy_seconds = 0.0
        self._lock = threading.Lock()

    def load(self) -> LoadReport:
        """Read, check and place every parameter in parallel, then audit."""
        start = time.perf_counter()
        warnings = list(self.index.warnings)
        self._check_names(warnings)
        self._allocate()
        for path in self.index.files:
            with path.open("rb") as stream:
                # Private copy-on-write mapping: torch wants writable memory, the file stays untouched.
                self._maps[path] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        with ThreadPoolExecutor(max_workers=self.workers) as pool:
            for done in [pool.submit(self._transfer, parameter) for parameter in self._wanted.values()]:
                done.result()
        self._check_tied(warnings)
        self._audit()
        self._maps.clear()
        seconds = time.perf_counter() - start
        size = sum(self.index.entries[name].nbytes for name in self._read)
        return LoadReport(
            seconds=seconds,
            bytes=size,
            bytes_per_second=size / seconds if seconds > 0 else 0.0,
            tensors=len(self._read),
            files=len(self.index.files),
            warnings=tuple(warnings),
            largest=self._largest,
            io_share=self._io_seconds / self._busy_seconds if self._busy_seconds > 0 else 0.0,
        )

    def read(self, name: str) -> torch.Tensor:
        """The stored tensor ``name`` as a view of the mapped file, in its stored dtype and shape."""
        entry = self.index.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._place()}: tensor {name!r} is missing")
        dtype = _FLOATS.get(entry.dtype)
        if dtype is None:
            allowed = ", ".join(_FLOATS)
            raise CheckpointError(
                f"{entry.file}: tensor {name!r}: dtype {entry.dtype} is not a weight; allowed {allowed}"
            )
        with self._lock:
            self._read.add(name)
        count = entry.nbytes // dtype.itemsize
        return torch.frombuffer(self._maps[entry.file], dtype=dtype, count=count, offset=entry.offset).view(entry.shape)

    def assign(self, parameter: str, tensor: torch.Tensor) -> None:
        """Write ``tensor`` into the named parameter: checks shape, values and range, converts the dtype."""
        wanted = self._wanted[parameter]
        if tuple(tensor.shape) != wanted.shape:
            raise self._refuse(wanted, f"has shape {list(tensor.shape)}, config.json implies {list(wanted.shape)}")
        buffer = self.parameters[wanted.buffer]
        target = buffer if wanted.slot < 0 else buffer[wanted.slot]
        part = ShardSlice.whole(wanted.shape)
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        largest = max(-low, high)
        if not largest < float("inf"):
            raise self._refuse(wanted, "holds NaN or infinite values")
        if largest > torch.finfo(target.dtype).max:
            raise self._refuse(wanted, f"holds {largest:g}, beyond the range of {target.dtype}; use bf16 or fp32")
        target.copy_(tensor[part.index()])
        with self._lock:
            if parameter in self._written:
                raise self._refuse(wanted, "was written twice")
            self._written.add(parameter)
            self._largest = max(self._largest, largest)

    def _transfer(self, parameter: ParameterSpec) -> None:
        start = time.perf_counter()
        tensor = self.read(parameter.source)
        # One element of each page: waits for the disk here, so that the share of reading can be told apart.
        tensor.reshape(-1)[:: mmap.PAGESIZE // tensor.element_size()].clone()
        read = time.perf_counter()
        self.assign(parameter.name, tensor)
        done = time.perf_counter()
        with self._lock:
            self._io_seconds += read - start
            self._busy_seconds += done - start

    def _allocate(self) -> None:
        for parameter in self._wanted.values():
            if parameter.buffer not in self.parameters:
                shape = parameter.shape if parameter.slot < 0 else (parameter.stack, *parameter.shape)
                dtype = torch.float32 if parameter.fp32 else self.dtype
                self.parameters[parameter.buffer] = torch.empty(shape, dtype=dtype)

    def _check_names(self, warnings: list[str]) -> None:
        """Refuse before allocating anything: missing, surplus, or wrongly shaped tensors."""
        sources = {parameter.source: parameter for parameter in self._wanted.values()}
        for source, parameter in sources.items():
            entry = self.index.entries.get(source)
            if entry is None:
                raise CheckpointError(f"{self._place()}: tensor {source!r} is missing (parameter {parameter.name})")
            if entry.shape != parameter.shape:
                raise self._refuse(
                    parameter, f"has shape {list(entry.shape)}, config.json implies {list(parameter.shape)}"
                )
            if entry.dtype not in _FLOATS:
                raise self._refuse(parameter, f"has dtype {entry.dtype}; a weight is one of {', '.join(_FLOATS)}")
        skipped: dict[str, int] = {}
        for entry in self.index:
            if entry.name in sources or (self.spec.tied and entry.name == "lm_head.weight"):
                continue
            reason = ignored_source(self.spec, entry.name)
            if reason is None:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name!r} belongs to no parameter of {self.spec.architecture}"
                )
            skipped[reason] = skipped.get(reason, 0) + 1
        warnings.extend(f"{count} tensors not read: {reason}" for reason, count in skipped.items())

    def _check_tied(self, warnings: list[str]) -> None:
        """A stored head beside tied embeddings must be the same matrix: otherwise one of them would be lost."""
        if not self.spec.tied or "lm_head.weight" not in self.index.entries:
            return
        head = self.read("lm_head.weight")
        embedding = self.read("model.embed_tokens.weight")
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            file = self.index.entries["lm_head.weight"].file
            raise CheckpointError(
                f"{file}: tensor 'lm_head.weight' differs from the embedding but config.json says tie_word_embeddings"
            )
        warnings.append("lm_head.weight is stored although tied; it equals the embedding")

    def _audit(self) -> None:
        for name, parameter in self._wanted.items():
            if name not in self._written:
                raise self._refuse(parameter, f"was never written to parameter {name}")
            if parameter.source not in self._read:
                raise self._refuse(parameter, "was never read")

    def _place(self) -> str:
        return str(self.index.files[0].parent)

    def _refuse(self, parameter: ParameterSpec, rule: str) -> CheckpointError:
        entry: TensorEntry | None = self.index.entries.get(parameter.source)
        place = str(entry.file) if entry is not None else self._place()
        return CheckpointError(f"{place}: tensor {parameter.source!r} {rule}")
