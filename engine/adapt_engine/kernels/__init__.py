"""Every arithmetic step of the model is an op of this registry; model code only moves views around.

Seams
-----
Whatever an outside party wants to observe or replace has one coarse place to do it, and costs nothing
while it does not. Shapes: T tokens of one step (all sequences packed), h hidden, H query heads, G
key-value heads, d head width, E experts, k chosen experts, V vocabulary; "dtype" is the engine's precision. With native
kernels a weight matrix is a `packed.PackedMatrix`: pass it on, or treat it as the tensor that it stands for.

Ops (``engine.kernels_registry.wrap(op, wrapper)``; ``wrapper(call)`` returns the replacement of ``call``)::

    embedding(table, ids) -> [T, h]                        table [V, h] dtype, ids int64 [T]
    rms_norm(x, weight, eps) -> like x                     over the last axis; float32 inside
    linear(x, weight, bias) -> [T, out]                    weight [out, in] dtype, bias [out] or None
    linear_partial(x, weight, bias) -> float32 [T, out]    linear whose result is one summand of several ranks
    linear_sums(x, weight, ranges, largest) -> float32 [n, T, out]
                                                           linear over the depth elements of ranges int64 [n, 2], from
                                                           one border of a segment to another, before scales and
                                                           rounding; largest float32 [T]: magnitude of each whole row,
                                                           of which x is a part, where weights are int8
    linear_finish(sums, weight, bias, largest, dtype) -> [T, out]
                                                           what linear makes of its whole sums float32 [T, out]
    head_linear(x, weight) -> float32 [T, H, out]          x [T, H, in], weight [H, out, in]: one matrix a head
    rope_tables(spec, positions) -> cos, sin               spec RopeSpec; float32 [T, dim / 2], angles in float64
    rope_apply(x, cos, sin, interleaved) -> [T, H, dim]    output pairs are (i, i + dim / 2) in either case
    attention(q, k, v, *, q_positions, k_positions, scale, window) -> [Tq, H, d_v]
                                                           one sequence; q [Tq, H, d], k [Tk, G, d], v [Tk, G, d_v];
                                                           positions int64, ascending; softmax in float32
    attention_partial(... as attention) -> context, weight over some of the keys: float32 [Tq, H, d_v], and the
                                                           natural log-sum-exp [Tq, H]
    attention_merge(contexts, weights) -> float32 [T, H, d_v]
                                                           contexts [n, T, H, d_v], weights [n, T, H]
    softmax_scale(spec) -> float                           spec AttentionSpec
    swiglu(gate, up) -> like gate                          silu(gate) * up
    router_logits(x, weight) -> float32 [T, E]             weight float32 [E, h]
    route(logits, selection_bias, spec) -> Routing         (scores, selection, ids ascending, weights); spec MoESpec
    experts(x, ids, weights, gate_w, up_w, down_w, tap) -> [T, h]
                                                           gate_w, up_w [E, inter, h], down_w [E, h, inter];
                                                           tap(name, tensor) or None; made of linear, swiglu and combine
    expert_rows(x, ids, gate_w, up_w, down_w, partial, tap) -> [n, h]
                                                           x [n, h], ids int64 [n] into this rank's experts
    combine(down, weights) -> [T, h]                       down [T, k, h], weights float32 [T, k]
    shared_combine(routed, shared) -> [T, h]
    add(residual, x) -> [T, h]                             residual connection
    lm_head(x, weight) -> float32 [T, V]
    sample(logits, *, temperature, top_k, top_p, seed, position) -> int
                                                           logits float32 [V]; position of the token drawn

An op that computes others itself (`Implementation.fuses`), and the native call that computes a whole pass
(`adapt_engine.model.fused`), give way to the single ops as soon as one of these is wrapped or a method below is
replaced.

Every rank has a registry of its own (``engine.executor.registries``); ``engine.executor.running`` is the pair
(rank, layer) being computed, its layer None outside the layers, for wrappers that concern one of them only.

Other seams, methods to be replaced on the class or instance and put back:

    weights.loader.Loader.read(name) -> tensor             name is the checkpoint's; a view of the mapped file
    weights.loader.Loader.assign(parameter, tensor)        parameter is the logical name (layer.3.moe.experts.5.gate)
    weights.shards.ShardPlan.piece(parameter, rank)        what a rank holds of a parameter; None where nothing
    weights.shards.ShardPlan.owners(experts)               ep rank of each expert
    comm.communicator.Communicator.all_gather(tensor, group, counts), all_reduce(partial, group, dtype),
        all_reduce_along(sums, group, tree), all_to_all(parts, group, counts), send(tensor, group, to),
        recv(group, source, shape, dtype)                  of every rank; ``self.rank`` and ``self.name`` say which
    kv.cache.PagedCache.write(layer, slots, rows)          rows: tuple of tensors, one per component of the group
    kv.cache.PagedCache.gather(layer, slots) -> rows
    kv.pool.BlockPool.allocate(page), share(block), free(block)
    kv.prefix.PrefixCache.digests(tokens), lookup(tokens), insert(...)
    runtime.scheduler.Scheduler.schedule(), preempt(sequence), abort(id), finish(sequence), check_integrity()
    runtime.scheduler.Sequence.advance(count), extend(blocks)
    runtime.executor.LocalExecutor.step(plan) -> answers

The engine carries no fault of its own and no switch for one.
"""

from __future__ import annotations

from .registry import Implementation, KernelRegistry, Ops, Routing, WrapHandle

__all__ = ["Implementation", "KernelRegistry", "Ops", "Routing", "WrapHandle"]
