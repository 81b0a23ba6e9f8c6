"""``python -m pytest_adapt inspect CONFIG|DIR|PRESET``: one screen about a model, from its configuration alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_adapt.inspect import analyse
from pytest_adapt.inspect.checkpoint import Sharding, sharding, sum_by_layer, tensors_of
from pytest_adapt.inspect.memory import BITS, Budget, Load, Plan, kv_bytes_per_token, plan, weight_bytes
from pytest_adapt.inspect.parameters import Parameters, count
from pytest_adapt.inspect.presets import presets
from pytest_adapt.inspect.quantities import devices_of, gib, tokens_of
from pytest_adapt.inspect.structure import InspectError, Structure

__all__ = ["main"]

_SHOWN = 5


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns 0, or 1 for refused input (one line on stderr) and for tensors that contradict it."""
    options = _parser().parse_args(arguments)
    try:
        if options.model is None:
            print("presets: " + ", ".join(presets()))
            return 0
        structure = analyse(options.model)
        parameters = count(structure)
        found = _checkpoint(Path(options.model), parameters)
        load, devices, budget = _plan(options, structure)
    except InspectError as problem:
        print(problem, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_as_json(structure, parameters, found, load, devices, budget), indent=1))
    else:
        print("\n".join(_as_text(structure, parameters, found, load, devices, budget)))
    return 1 if found and found["differences"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pytest_adapt inspect", description="What a configuration alone says about a model."
    )
    parser.add_argument("model", nargs="?", metavar="CONFIG|DIR|PRESET", help="without it: the names of the presets")
    parser.add_argument("--devices", metavar="NxSIZE", help="cards and their memory, as 16x64GiB")
    parser.add_argument("--context", metavar="TOKENS", help="as 131072, 128K or 1M (default: the model's)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time (default 1)")
    parser.add_argument("--precision", choices=list(BITS), default="bf16", help="of weights (default bf16)")
    parser.add_argument(
        "--kv-precision", choices=[p for p in BITS if p != "int4"], default="bf16", help="of the KV cache"
    )
    parser.add_argument("--json", action="store_true", help="the same facts for programs")
    return parser


def _plan(options: argparse.Namespace, structure: Structure) -> tuple[Load, tuple[int, int] | None, Plan | None]:
    context = tokens_of(options.context) if options.context else structure.context
    if options.batch < 1:
        raise InspectError(f"batch {options.batch}: expected at least 1")
    load = Load(context, options.batch, options.precision, options.kv_precision)
    if not options.devices:
        return load, None, None
    devices = devices_of(options.devices)
    return load, devices, plan(structure, *devices, load)


def _checkpoint(path: Path, parameters: Parameters) -> dict[str, Any] | None:
    """Sharding of a checkpoint directory and its tensors summed up against the configuration."""
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return None
    tensors = tensors_of(path)
    layers, outer = sum_by_layer(tensors)
    differences = [
        f"layer {i}: tensors hold {layers.get(i, 0):,} parameters, config.json makes {expected:,}"
        for i, expected in enumerate(parameters.layers)
        if layers.get(i, 0) != expected
    ]
    extra = sorted(set(layers) - set(range(len(parameters.layers))))
    differences += [f"layer {i}: {layers[i]:,} parameters, config.json has no such layer" for i in extra]
    if outer != parameters.outer:
        differences.append(f"outside layers: tensors hold {outer:,} parameters, config.json makes {parameters.outer:,}")
    total = sum(layers.values()) + outer
    return {"sharding": sharding(path), "tensors": len(tensors), "total": total, "differences": differences}


def _as_text(
    structure: Structure,
    parameters: Parameters,
    found: Mapping[str, Any] | None,
    load: Load,
    devices: tuple[int, int] | None,
    budget: Plan | None,
) -> list[str]:
    lines = [
        f"{structure.name} ({structure.architecture})",
        *_structure_lines(structure),
        *_size_lines(structure, parameters),
    ]
    if found:
        lines += _checkpoint_lines(found)
    lines += [f"  note         {note}" for note in structure.notes]
    for i, gap in enumerate(structure.gaps):
        lines.append(f"  {'gaps' if i == 0 else '':12} {gap}")
    if not structure.gaps:
        lines.append("  gaps         none: every operator has a reference")
    if devices and budget:
        lines += ["", *_plan_lines(load, devices, budget)]
        if load.context > structure.context:
            lines.append(f"  the model is made for {structure.context:,} tokens; more are asked for")
    return lines


def _structure_lines(structure: Structure) -> list[str]:
    experts = f", {structure.experts} experts of which {structure.chosen} per token" if structure.experts else ""
    layer = (structure.softmax_layers or structure.layers)[-1]
    lines = [
        f"  structure    {len(structure.layers)} layers, hidden {structure.hidden}, {structure.heads} heads, "
        f"{structure.kv_heads} KV heads{experts}",
        f"  context      {structure.context:,} tokens; vocabulary {structure.vocab:,}"
        + (", head tied to the embedding" if structure.tied else ""),
        f"  KV layout    {layer.kv_layout}",
    ]
    return lines + [
        f"  {'layers' if i == 0 else '':12} {where}: {what}" for i, (where, what) in enumerate(structure.runs())
    ]


def _size_lines(structure: Structure, parameters: Parameters) -> list[str]:
    low, high = min(parameters.layers), max(parameters.layers)
    per_layer = f"{_count(low)} to {_count(high)}" if low != high else _count(low)
    return [
        f"  parameters   {_count(parameters.total)} in all, {_count(parameters.active)} active per token "
        f"({parameters.ratio:.1%}); a layer {per_layer}, outside layers {_count(parameters.outer)}",
        "  weights      "
        + ", ".join(f"{_count(weight_bytes(parameters.total, p), 'KMGT')}B {p}" for p in ("bf16", "fp8", "int4")),
        f"  KV cache     {kv_bytes_per_token(structure):,} B a token in bf16, "
        f"{kv_bytes_per_token(structure, 'fp8'):,} B in fp8",
    ]


def _count(value: int, units: str = "KMBT") -> str:
    """With two decimals and a decimal unit: 671.03 B."""
    for power in range(len(units), 0, -1):
        if value >= 1000**power:
            return f"{value / 1000**power:.2f} {units[power - 1]}"
    return str(value)


def _checkpoint_lines(found: Mapping[str, Any]) -> list[str]:
    how: Sharding = found["sharding"]
    cut = f"cut for {how.presharded}" if how.presharded else "not cut for any layout"
    verdict = "equal to the count from config.json" if not found["differences"] else "NOT what config.json makes:"
    lines = [
        f"  checkpoint   {len(how.shards)} weight files ({how.naming}), {cut}; {found['tensors']} tensors, "
        f"{found['total']:,} parameters, {verdict}"
    ]
    lines += [f"  {'':12} {difference}" for difference in found["differences"][:_SHOWN]]
    if how.ignored:
        lines.append(f"  {'':12} ignored (optimiser or trainer state): {', '.join(how.ignored[:_SHOWN])}")
    return lines


def _plan_lines(load: Load, devices: tuple[int, int], budget: Plan) -> list[str]:
    number, memory = devices
    lines = [
        f"Memory per card in GiB: {number} x {gib(memory)} GiB, context {load.context:,}, batch {load.batch}, "
        f"weights {load.precision}, KV {load.kv_precision}",
        f"  {'layout':24}{'weights':>9}{'KV':>9}{'activ.':>8}{'temp.':>8}{'comm.':>8}{'total':>9}"
        f"  of {gib(budget.capacity)} usable",
    ]
    rows = budget.fitting[:_SHOWN] or (budget.closest,)
    lines += [_row(item, budget.capacity) for item in rows]
    if budget.fitting:
        more = len(budget.fitting) - len(rows)
        others = "1 more layout fits" if more == 1 else f"{more} more layouts fit"
        cards = "card" if number == 1 else "cards"
        lines.append(f"  fits on {budget.partitions} of {number} {cards}" + (f"; {others}" if more > 0 else ""))
        lines += [f"  {advice}" for advice in budget.advice]
    else:
        lines.append(
            f"  does not fit: the closest layout lacks {gib(budget.closest.total - budget.capacity)} GiB a card"
        )
        lines.append("  would fit: " + "; or ".join(budget.advice))
    return lines


def _row(item: Budget, capacity: int) -> str:
    cells = (item.weights, item.kv, item.activations, item.temporary, item.communication, item.total)
    sizes = "".join(f"{gib(cell):>{width}}" for cell, width in zip(cells, (9, 9, 8, 8, 8, 9), strict=True))
    return f"  {item.layout!s:24}{sizes}  {item.total / capacity:.0%}"


def _as_json(
    structure: Structure,
    parameters: Parameters,
    found: Mapping[str, Any] | None,
    load: Load,
    devices: tuple[int, int] | None,
    budget: Plan | None,
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "schema": 1,
        "model": structure.name,
        "architecture": structure.architecture,
        "layers": [
            {
                "kind": "sparse" if layer.sparse else "dense",
                "long_context": layer.long_context,
                "kv_layout": layer.kv_layout,
                "parameters": size,
            }
            for layer, size in zip(structure.layers, parameters.layers, strict=True)
        ],
        "hidden": structure.hidden,
        "heads": structure.heads,
        "kv_heads": structure.kv_heads,
        "experts": structure.experts,
        "experts_per_token": structure.chosen,
        "context": structure.context,
        "vocabulary": structure.vocab,
        "parameters": {"total": parameters.total, "active": parameters.active, "ratio": parameters.ratio},
        "kv_bytes_per_token": kv_bytes_per_token(structure),
        "gaps": list(structure.gaps),
    }
    if found:
        facts["checkpoint"] = {**found, "sharding": vars(found["sharding"])}
    if devices and budget:
        facts["memory"] = {
            "devices": devices[0],
            "bytes_per_device": devices[1],
            "usable": budget.capacity,
            "load": vars(load),
            "partitions": budget.partitions,
            "fits": [_budget_json(item) for item in budget.fitting],
            "closest": _budget_json(budget.closest),
            "advice": list(budget.advice),
        }
    return facts


def _budget_json(item: Budget) -> dict[str, Any]:
    return {**vars(item), "layout": str(item.layout), "total": item.total}
