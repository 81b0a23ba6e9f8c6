"""A copy of a checkpoint with one planted difference, to see that the judge tells it apart.

    python ci/peers/plant.py experts|rope|norm|layer SOURCE DESTINATION

experts: two experts of the last layer change places; rope: the rotary base x 1.5; norm: the weight of one norm
in the middle x 1.05; layer: the last layer is dropped. Needs numpy alone; floating-point checkpoints only.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("experts", "rope", "norm", "layer")
INDEX = "model.safetensors.index.json"


def read(path: Path) -> tuple[dict[str, Any], bytearray]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])


def write(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def scaled(raw: bytes, dtype: str, factor: float) -> bytes:
    if dtype == "BF16":
        bits = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
        bits = bits.view(np.uint32)
        return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())
    kind = {"F32": "<f4", "F16": "<f2"}[dtype]
    return bytes((np.frombuffer(raw, kind) * factor).astype(kind).tobytes())


def plant_experts(directory: Path, config: dict[str, Any]) -> str:
    last = config["num_hidden_layers"] - 1
    pattern = re.compile(rf"(model\.layers\.{last}\..*experts\.)([01])(\..*)")
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    files = {path: read(path) for path in sorted(directory.glob("*.safetensors"))}
    for path, (header, _) in files.items():
        found.update({name: (path, entry) for name, entry in header.items() if pattern.fullmatch(name)})
    if not found:
        raise SystemExit(f"{directory}: layer {last} has no experts")
    for name, (path, entry) in found.items():
        start, stop = entry["data_offsets"]
        parts = pattern.fullmatch(name)
        assert parts is not None
        if parts[2] != "0":
            continue
        other_path, other = found[f"{parts[1]}1{parts[3]}"]
        first, second = files[path][1], files[other_path][1]
        begin, end = other["data_offsets"]
        first[start:stop], second[begin:end] = second[begin:end], first[start:stop]
    for path, (header, data) in files.items():
        write(path, header, bytes(data))
    return f"experts 0 and 1 of layer {last} changed places"


def plant_rope(directory: Path, config: dict[str, Any]) -> str:
    base = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    for holder in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in holder:
            holder["rope_theta"] = base * 1.5
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return f"rotary base {base} became {base * 1.5}"


def plant_norm(directory: Path, config: dict[str, Any]) -> str:
    name = f"model.layers.{config['num_hidden_layers'] // 2}.input_layernorm.weight"
    for path in sorted(directory.glob("*.safetensors")):
        header, data = read(path)
        if name in header:
            start, stop = header[name]["data_offsets"]
            data[start:stop] = scaled(bytes(data[start:stop]), header[name]["dtype"], 1.05)
            write(path, header, bytes(data))
            return f"{name} x 1.05"
    raise SystemExit(f"{directory}: no tensor {name}")


def plant_layer(directory: Path, config: dict[str, Any]) -> str:
    last = config["num_hidden_layers"] - 1
    prefix = f"model.layers.{last}."
    config["num_hidden_layers"] = last
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    for path in sorted(directory.glob("*.safetensors")):
        header, data = read(path)
        kept, packed = {}, bytearray()
        for name, entry in header.items():
            if name == "__metadata__":
                kept[name] = entry
            elif not name.startswith(prefix):
                start, stop = entry["data_offsets"]
                kept[name] = {**entry, "data_offsets": [len(packed), len(packed) + stop - start]}
                packed += data[start:stop]
        write(path, kept, bytes(packed))
    index = json.loads((directory / INDEX).read_bytes())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.startswith(prefix)}
    (directory / INDEX).write_text(json.dumps(index))
    return f"layer {last} dropped"


def plant(kind: str, source: Path, destination: Path) -> str:
    """Write the copy; what was done to it, in words."""
    shutil.copytree(source, destination)
    config = json.loads((destination / "config.json").read_bytes())
    done = {"experts": plant_experts, "rope": plant_rope, "norm": plant_norm, "layer": plant_layer}[kind]
    return done(destination, config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    print(plant(arguments.kind, arguments.source, arguments.destination))
