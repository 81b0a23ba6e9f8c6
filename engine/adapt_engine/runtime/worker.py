"""One rank: its part of the weights, its part of the cache, and the step that it computes with the others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from .. import threads
from ..comm import Communicator
from ..config import ModelSpec
from ..errors import EngineError
from ..kernels import KernelRegistry, native, reference, sdpa
from ..kernels.packed import Parameter, pack_parameters, storages_of
from ..kv.cache import PagedCache
from ..layout import Layout
from ..mesh import Mesh
from ..model.parallel import Parallel
from ..model.step import Rows, Span, Step
from ..model.transformer import Transformer
from ..weights.index import WeightIndex
from ..weights.loader import Loader, LoadReport
from ..weights.parameters import ShardSlice
from ..weights.shards import ShardPlan
from .memory import RankMemory, StepMeter, storage_bytes
from .plan import Answer, Batch, BatchPlan, RankAnswer, StepPlan, owners_of, pack
from .requests import DTYPES, QUANTISED, EngineOptions
from .taps import TapRecorder

__all__ = ["Worker", "kernels_of", "plan_of"]


def kernels_of(options: EngineOptions) -> KernelRegistry:
    """The ops that these options ask for. Raises EngineError where a mode needs what no kernel has."""
    if options.precision in QUANTISED and not (options.native and native.load() is not None):
        why = "the option native is off" if not options.native else "they are not built: install with a C++ compiler"
        raise EngineError(f"precision {options.precision} needs the native kernels, and {why}; or use bf16")
    offers = reference.offers() + (sdpa.offers() + native.offers() if options.native else [])
    # Mode strict gathers the keys of other ranks instead of merging what each of them makes of its own.
    merges = Layout.parse(options.layout).sp > 1 and options.mode != "strict"
    unused = frozenset() if merges else frozenset({"attention_partial", "attention_merge"})
    return KernelRegistry(offers, DTYPES[options.precision], options.mode, unused)


def plan_of(spec: ModelSpec, options: EngineOptions) -> ShardPlan:
    """Who holds what of a model. Raises EngineError for layouts and placements that it cannot take, which in mode
    strict are more."""
    mesh = Mesh(Layout.parse(options.layout))
    return ShardPlan(spec, mesh, options.placement, whole_segments=options.mode == "strict")


class Worker:
    """One rank of a layout. `step` must be called on all ranks of the communicator's world together."""

    def __init__(
        self,
        plan: ShardPlan,
        options: EngineOptions,
        comm: Communicator,
        loader: Loader,
        report: LoadReport,
        kernels: KernelRegistry,
        parameters: Mapping[str, Parameter],
    ) -> None:
        self.plan = plan
        self.options = options
        self.comm = comm
        self.report = report
        self.kernels = kernels
        self.parallel = Parallel(plan, comm)
        self.placed: dict[str, ShardSlice] = loader.placed
        spec = plan.local_spec(comm.rank)
        layers = plan.layers(self.parallel.place.pp)
        sp = self.parallel.sp.size
        blocks = -(-options.cache_tokens // options.page_size)
        self.cache = PagedCache(spec, kernels.dtype, -(-blocks // sp), options.page_size, layers.start)
        self.transformer = Transformer(spec, parameters, kernels, layers.start)
        # Ranks that share a layer meet between ops; memory is measured at the tensors of the single ops.
        alone = self.parallel.tp.size == self.parallel.sp.size == self.parallel.expert.size == 1
        if alone and options.native and not options.measure_memory:
            self.transformer.fuse(self.cache)
        recorder = TapRecorder(plan.spec.sites(), options.taps)
        self._taps = recorder if recorder.wanted else None
        known = [*storages_of(parameters.values()), *self.cache.tensors()]
        self._meter = StepMeter(known) if options.measure_memory else None

    @classmethod
    def open(cls, directory: str | Path, plan: ShardPlan, options: EngineOptions, comm: Communicator) -> Worker:
        """Load this rank's part of a checkpoint. Raises CheckpointError or EngineError as `Engine.open` does."""
        kernels = kernels_of(options)
        quantise, strict = options.precision in QUANTISED, options.mode == "strict"
        loader = Loader(
            WeightIndex.read(directory),
            plan.spec,
            kernels.dtype,
            pieces=plan.pieces(comm.rank),
            whole_rows=quantise and strict,
        )
        report = loader.load()
        parameters: Mapping[str, Parameter] = loader.parameters
        module = native.load() if options.native else None
        if module is not None:
            threads.follow()
            expected = [piece.parameter for piece in plan.pieces(comm.rank)]
            trees = {one.buffer: tree for one in expected if (tree := plan.tree(one)) is not None}
            parameters = pack_parameters(
                module, loader.parameters, expected, plan.spec.tied, quantise, trees, loader.largest_of_rows
            )
        return cls(plan, options, comm, loader, report, kernels, parameters)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> RankAnswer:
        """Compute this rank's part of every micro-batch."""
        self.comm.ledger.step = plan.number
        answers = []
        with self._meter or nullcontext():
            for index in range(plan.micro_batches):
                batch = plan.batch(self.parallel.place.dp, index)
                whole = self.transformer.whole(self.parallel, self._taps)
                logits = whole.step(batch) if whole is not None else self.transformer.forward(self._build(batch))
                answers.append(Answer(logits, self._taps.take() if self._taps is not None else {}))
        return RankAnswer(answers)

    def _build(self, sequences: BatchPlan) -> Step:
        packed = pack(sequences)
        sp, place = self.parallel.sp.size, self.parallel.place.sp
        ids, positions, slots, head = packed.ids, packed.positions, packed.slots, packed.head
        owned: tuple[torch.Tensor, ...] = ()
        if sp > 1:
            owners = owners_of(positions, self.options.page_size, sp)
            owned = tuple((owners == rank).nonzero().flatten() for rank in range(sp))
            own = owned[place]
            ids, positions, head = ids[own], positions[own], head[own]
            slots = self._local(slots[own], positions)
        return Step(
            ops=self.kernels.ops,
            cache=self.cache,
            parallel=self.parallel,
            ids=ids,
            positions=positions,
            slots=slots,
            rows=Rows(packed.positions, owned),
            spans=tuple(self._spans(sequences, packed)),
            head_rows=head.nonzero().flatten(),
            record=self._taps,
        )

    def _spans(self, sequences: BatchPlan, packed: Batch) -> list[Span]:
        sp, place = self.parallel.sp.size, self.parallel.place.sp
        found = []
        for start, sequence in zip(packed.starts, sequences, strict=True):
            positions, slots = torch.arange(sequence.last), sequence.slots
            held: tuple[torch.Tensor, ...] = ()
            if sp > 1:
                owners = owners_of(positions, self.options.page_size, sp)
                held = tuple((owners == rank).nonzero().flatten() for rank in range(sp))
                positions = held[place]
                slots = self._local(slots[positions], positions)
            stop = start + sequence.last - sequence.first
            found.append(Span(start, stop, slots, positions, sequence.last, held))
        return found

    def _local(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of this rank's own cache: of each run of sp blocks of the pool it keeps one."""
        size, sp = self.options.page_size, self.parallel.sp.size
        blocks = slots // size
        if not torch.equal(blocks % sp, owners_of(positions, size, sp)):
            raise EngineError("a page lies in a block of another rank: allocate blocks by page number")
        return blocks // sp * size + slots % size

    def memory(self) -> RankMemory:
        """Bytes of the rank's tensors."""
        weights = storage_bytes(storages_of(self.transformer.parameters.values()))
        temporary = None if self._meter is None else self._meter.peak
        return RankMemory(self.comm.rank, self.comm.name, weights, storage_bytes(self.cache.tensors()), temporary)

    def close(self) -> None:
        """Give weights and cache back; no step may follow."""
        self.transformer.release()
        self.cache.release()
