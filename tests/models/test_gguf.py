"""The GGUF reader: what it reads is right, and what is not a GGUF file is refused in one line."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pytest_adapt.models import ModelError
from pytest_adapt.models.gguf import Gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def build(
    pairs: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensors: int | None = None,
    count: int | None = None,
) -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors if tensors is not None else len(infos), count or len(pairs))
    head += b"".join(pairs) + b"".join(infos)
    return head + b"\0" * (-len(head) % 32) + data


ONE = info("a", (1, 32), 3, 0)


def test_q4_1_and_q8_0_blocks_follow_ggml(tmp_path: Path) -> None:
    nibbles = bytes((i % 16) | ((15 - i % 16) << 4) for i in range(16))
    q4 = struct.pack("<ee", 0.5, -3.0) + nibbles
    q8 = struct.pack("<e", 0.25) + bytes(range(250, 256)) + bytes(range(26))
    path = tmp_path / "x.gguf"
    path.write_bytes(build((), (ONE, info("b", (2, 16), 8, 32)), q4 + bytes(12) + q8))
    with pytest.raises(ModelError, match=r"rows of shape \[2, 16\] are not whole Q8_0 blocks of 32"), Gguf(path):
        pass
    path.write_bytes(build((), (ONE, info("b", (1, 32), 8, 32)), q4 + bytes(12) + q8))
    with Gguf(path) as gguf:
        low_then_high = [i * 0.5 - 3 for i in range(16)] + [(15 - i) * 0.5 - 3 for i in range(16)]
        assert gguf.read("a").tolist() == [low_then_high]
        assert gguf.read("b")[0, :8].tolist() == [-1.5, -1.25, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25]


def test_plain_types_and_metadata(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 0.375], [4.0, 0.0, -0.5]], np.float32)
    path = tmp_path / "x.gguf"
    data = values.tobytes() + bytes(8) + values.astype("<f2").tobytes() + bytes(20)
    data += (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    pairs = (
        pair("name", 8, text("tiny")),
        pair("sizes", 9, struct.pack("<IQ", 4, 3) + struct.pack("<3I", 1, 2, 3)),
        pair("flag", 7, b"\1"),
    )
    infos = tuple(info(name, (2, 3), kind, at) for name, kind, at in (("f", 0, 0), ("h", 1, 32), ("b", 30, 64)))
    path.write_bytes(build(pairs, infos, data))
    with Gguf(path) as gguf:
        assert dict(gguf.metadata) == {"name": "tiny", "sizes": [1, 2, 3], "flag": True}
        for name in "fhb":
            assert np.array_equal(gguf.read(name), values)
        with pytest.raises(ModelError, match="metadata key 'flag' holds bool, not int"):
            gguf.need("flag", int)
        with pytest.raises(ModelError, match="tensor 'c' is missing"):
            gguf.read("c")


BLOCK = bytes(20)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read as GGUF"),
    "not-gguf": (b"PK\3\4" + bytes(60), r"starts with b'PK\\x03\\x04'"),
    "version": (build(version=1), "version 1; known: 2, 3"),
    "big-endian": (build(version=3 << 24), "version 50331648"),
    "header-cut": (build()[:14], "ends at byte 14"),
    "huge-count": (build(tensors=1 << 40), "claims 1099511627776 tensors"),
    "huge-string": (build((struct.pack("<Q", 1 << 62),)), "ends at byte"),
    "huge-array": (build((pair("k", 9, struct.pack("<IQ", 0, 1 << 50)),)), "claims .* array elements"),
    "nested-array": (build((pair("k", 9, struct.pack("<IQI", 9, 1, 0)),)), "unknown metadata type 9"),
    "bad-type": (build((pair("k", 99, b""),)), "unknown metadata type 99"),
    "not-utf8": (build((struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", 7) + b"\0",)), "not UTF-8"),
    "twice": (build((pair("k", 7, b"\0"), pair("k", 7, b"\0"))), "'k' appears twice"),
    "alignment": (build((pair("general.alignment", 4, struct.pack("<I", 7)),)), "not a power of two"),
    "no-dimension": (build((), (text("a") + struct.pack("<IIQ", 0, 0, 0),)), "'a' has 0 dimensions"),
    "tensor-type": (build((), (info("a", (1, 32), 17, 0),), BLOCK), "'a' has type 17; known: F32"),
    "zero-size": (build((), (info("a", (0, 32), 3, 0),), BLOCK), "not whole Q4_1 blocks"),
    "truncated": (build((), (ONE,), BLOCK[:-1]), "truncated"),
    "misaligned": (build((), (info("a", (1, 32), 3, 8),), bytes(64)), "starts at 8, not a multiple of 32"),
    "overlap": (build((), (ONE, info("b", (1, 32), 3, 0)), bytes(64)), "'a' and 'b' overlap"),
    "same-tensor": (build((), (ONE, info("a", (1, 32), 3, 32)), bytes(64)), "tensor 'a' appears twice"),
}


@pytest.mark.parametrize("case", MALFORMED, ids=list(MALFORMED))
def test_malformed_files_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    raw, cause = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=cause) as refused:
        Gguf(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_no_prefix_of_a_file_is_accepted(cut: int, tmp_path: Path) -> None:
    whole = build((pair("k", 8, text("value")),), (ONE,), BLOCK)
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-cut])
    with pytest.raises(ModelError):
        Gguf(path)
