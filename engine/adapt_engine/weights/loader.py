"""Loads what one rank holds of a checkpoint into parameters and audits the load.

Every part of a parameter that the rank holds is written exactly once, from the tensor and file that the index
names, and nothing else is read of that file; every stored tensor belongs to a parameter or has a stated reason not
to; shapes, dtypes and values are checked.

`Loader.read` and `Loader.assign` are the seams that loading faults wrap from outside.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import ModelSpec
from ..errors import CheckpointError
from .index import DTYPE_BYTES, TensorEntry, WeightIndex
from .parameters import ParameterSpec, ShardSlice, expected_parameters, ignored_source
from .shards import Piece

__all__ = ["LoadReport", "Loader"]

_FLOATS: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_FEW_BYTES = 1 << 24
"""Of a checkpoint that is loaded sooner by one thread than by many, which wait for each other's Python."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did. ``seconds`` is wall time of reading, checking and converting."""

    seconds: float
    bytes: int
    bytes_per_second: float
    read: frozenset[str]
    """Names of the tensors of which something was read."""
    files: int
    warnings: tuple[str, ...] = ()
    largest: float = 0.0
    """Largest absolute value of any parameter."""
    io_share: float = 0.0
    """Part of the workers' time that went into bringing file pages into memory; the rest checks and converts."""

    @property
    def tensors(self) -> int:
        """How many tensors were read."""
        return len(self.read)


class Loader:
    """One load of one checkpoint. ``parameters`` (buffer name -> tensor) is complete once `load` returns, and
    ``placed`` (parameter name -> part) says what was written.

    ``pieces`` is what this rank holds (`adapt_engine.weights.shards.ShardPlan.pieces`); None is the whole model.
    Raises CheckpointError naming file and tensor for everything that does not fit.
    """

    def __init__(
        self,
        index: WeightIndex,
        spec: ModelSpec,
        dtype: torch.dtype,
        workers: int = 4,
        pieces: Iterable[Piece] | None = None,
        whole_rows: bool = False,
    ) -> None:
        self.index = index
        self.spec = spec
        self.dtype = dtype
        self.workers = workers
        self.parameters: dict[str, torch.Tensor] = {}
        self.placed: dict[str, ShardSlice] = {}
        if pieces is None:
            pieces = (
                Piece(one, ShardSlice.whole(one.shape), one.expert, one.experts) for one in expected_parameters(spec)
            )
        self.whole_rows = whole_rows
        self.largest_of_rows: dict[str, torch.Tensor] = {}
        """Buffer -> float32, largest magnitude of each whole row of a matrix of which this rank has a part of the
        columns; filled where ``whole_rows`` asks for it."""
        self._pieces = {piece.parameter.name: piece for piece in pieces}
        self._maps: dict[Path, mmap.mmap] = {}
        self._read: set[str] = set()
        self._largest = 0.0
        self._io_seconds = 0.0
        self._busy_seconds = 0.0
        self._lock = threading.Lock()

    def load(self) -> LoadReport:
        """Read, check and place every parameter, in parallel where that pays, then audit."""
        start = time.perf_counter()
        warnings = list(self.index.warnings)
        self._check_names(warnings)
        self._allocate()
        for path in self.index.files:
            with path.open("rb") as stream:
                # Private copy-on-write mapping: torch wants writable memory, the file stays untouched.
                self._maps[path] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        if self.workers > 1 and sum(len(file) for file in self._maps.values()) > _FEW_BYTES:
            with ThreadPoolExecutor(max_workers=self.workers) as pool:
                for done in [pool.submit(self._transfer, piece) for piece in self._pieces.values()]:
                    done.result()
        else:
            for piece in self._pieces.values():
                self._transfer(piece)
        self._check_tied(warnings)
        self._audit()
        self._maps.clear()
        seconds = time.perf_counter() - start
        size = sum(self._bytes_read())
        return LoadReport(
            seconds=seconds,
            bytes=size,
            bytes_per_second=size / seconds if seconds > 0 else 0.0,
            read=frozenset(self._read),
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
        """Write ``tensor`` into the named parameter: checks shape, values and range, converts the dtype.

        ``tensor`` is the whole parameter; the part that this rank holds is taken from it.
        """
        piece = self._pieces[parameter]
        wanted = piece.parameter
        if tuple(tensor.shape) != wanted.shape:
            raise self._refuse(wanted, f"has shape {list(tensor.shape)}, config.json implies {list(wanted.shape)}")
        target = self.view(parameter)
        own = tensor[piece.part.index()]
        low, high = (float(bound) for bound in torch.aminmax(own))
        largest = max(-low, high)
        if not largest < float("inf"):
            raise self._refuse(wanted, "holds NaN or infinite values")
        if largest > torch.finfo(target.dtype).max:
            raise self._refuse(wanted, f"holds {largest:g}, beyond the range of {target.dtype}; use bf16 or fp32")
        target.copy_(own)
        if wanted.buffer in self.largest_of_rows:
            low_of, high_of = torch.aminmax(tensor, dim=-1)
            rows = self.largest_of_rows[wanted.buffer]
            # Rounding is monotonic: that of the largest is the largest of what is rounded.
            (rows if piece.slot < 0 else rows[piece.slot]).copy_(torch.maximum(-low_of, high_of).to(target.dtype))
        with self._lock:
            if parameter in self.placed:
                raise self._refuse(wanted, "was written twice")
            self.placed[parameter] = piece.part
            self._largest = max(self._largest, largest)

    def view(self, parameter: str) -> torch.Tensor:
        """The part of the named parameter that this rank holds, as a view of its buffer."""
        piece = self._pieces[parameter]
        buffer = self.parameters[piece.parameter.buffer]
        return buffer if piece.slot < 0 else buffer[piece.slot]

    def _bytes_read(self) -> Iterator[int]:
        """Stored bytes of every tensor's part that was read."""
        parts = {
            piece.parameter.source: piece.part
            for piece in self._pieces.values()
            if piece.parameter.buffer not in self.largest_of_rows
        }
        for name in self._read:
            entry = self.index.entries[name]
            if name in parts:
                yield parts[name].numel * DTYPE_BYTES[entry.dtype]
            else:
                yield entry.nbytes

    def _transfer(self, piece: Piece) -> None:
        start = time.perf_counter()
        tensor = self.read(piece.parameter.source)
        # One element of each page: waits for the disk here, so that the share of reading can be told apart.
        rows = tensor[piece.part.index()[:1]]
        rows.reshape(-1)[:: mmap.PAGESIZE // tensor.element_size()].clone()
        read = time.perf_counter()
        self.assign(piece.parameter.name, tensor)
        done = time.perf_counter()
        with self._lock:
            self._io_seconds += read - start
            self._busy_seconds += done - start

    def _allocate(self) -> None:
        for piece in self._pieces.values():
            parameter = piece.parameter
            if parameter.buffer not in self.parameters:
                shape = piece.part.shape if piece.slot < 0 else (piece.stack, *piece.part.shape)
                dtype = torch.float32 if parameter.fp32 else self.dtype
                self.parameters[parameter.buffer] = torch.empty(shape, dtype=dtype)
                cut = len(parameter.shape) == 2 and piece.part.shape[1] < parameter.shape[1]
                if self.whole_rows and cut:
                    self.largest_of_rows[parameter.buffer] = torch.empty(shape[:-1])

    def _check_names(self, warnings: list[str]) -> None:
        """Refuse before allocating anything: missing, surplus, or wrongly shaped tensors."""
        sources = {parameter.source: parameter for parameter in expected_parameters(self.spec)}
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
        for name, piece in self._pieces.items():
            if name not in self.placed:
                raise self._refuse(piece.parameter, f"was never written to parameter {name}")
            if piece.parameter.source not in self._read:
                raise self._refuse(piece.parameter, "was never read")

    def _place(self) -> str:
        return str(self.index.files[0].parent)

    def _refuse(self, parameter: ParameterSpec, rule: str) -> CheckpointError:
        entry: TensorEntry | None = self.index.entries.get(parameter.source)
        place = str(entry.file) if entry is not None else self._place()
        return CheckpointError(f"{place}: tensor {parameter.source!r} {rule}")
