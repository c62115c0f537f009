"""GGUF files written byte by byte, so that their headers can lie."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXT, ARRAY, F32 = 8, 9, 0


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str, kind: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def word(name: str, value: str) -> bytes:
    return key(name, TEXT, text(value))


def number(name: str, value: int) -> bytes:
    return key(name, 4, struct.pack("<I", value))


def listed(kind: int, count: int, raw: bytes = b"") -> bytes:
    return key("list", ARRAY, struct.pack("<IQ", kind, count) + raw)


def tensor(name: str, shape: tuple[int, ...] = (2, 3), kind: int = F32, start: int = 0, **lies: Any) -> bytes:
    """Of a shape as torch has it."""
    dimensions = struct.pack("<I", lies.get("dimensions", len(shape)))
    return text(name) + dimensions + struct.pack(f"<{len(shape)}QIQ", *shape[::-1], kind, start)


@dataclass
class Crafted:
    """A file's parts; `write` puts them together."""

    magic: bytes = b"GGUF"
    version: int = 3
    keys: list[bytes] = field(default_factory=lambda: [word("general.architecture", "llama")])
    tensors: list[bytes] = field(default_factory=lambda: [tensor("blk.0.ffn_up_exps.weight")])
    key_count: int | None = None
    tensor_count: int | None = None
    data: int = 64
    padded: bool = True

    def write(self, path: Path) -> Path:
        counts = [
            len(given) if count is None else count
            for given, count in ((self.tensors, self.tensor_count), (self.keys, self.key_count))
        ]
        head = self.magic + struct.pack("<IQQ", self.version, *counts) + b"".join([*self.keys, *self.tensors])
        path.write_bytes(head + bytes(-len(head) % 32) + bytes(self.data) if self.padded else head)
        return path
