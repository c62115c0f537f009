"""The files themselves: readable by any safetensors reader, every tensor at a multiple of 64 bytes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.models.pack.tensor_file import TensorFile, TensorShapes
from floe_chat.models.packing.pack import PackSpec
from safetensors.torch import load_file

from ..helpers import make_checkpoint, make_pack

ODD: TensorShapes = {
    "bytes": (torch.uint8, (3, 7)),
    "nothing": (torch.float16, (3, 0)),
    "halves": (torch.float16, (5,)),
    "brain": (torch.bfloat16, (2, 3, 5)),
    "floats": (torch.float32, (1,)),
    "aligned": (torch.uint8, (64,)),
    "longs": (torch.int64, (9,)),
}


def places(path: Path) -> Iterator[tuple[str, int]]:
    """Every tensor's name and first byte in the file, read from the header without any library."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__" and not name.startswith("_pad."):
            yield name, 8 + length + entry["data_offsets"][0]


def filled(plan: TensorShapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, 100, shape, generator=generator).to(dtype) for name, (dtype, shape) in plan.items()}


def test_tensors_written_in_any_order_are_read_by_safetensors(tmp_path: Path) -> None:
    values = filled(ODD)
    with TensorFile(tmp_path / "t.safetensors", ODD) as file:
        for name in reversed(values):
            file[name].copy_(values[name])
    read = load_file(tmp_path / "t.safetensors")
    assert {name for name in read if not name.startswith("_pad.")} == set(values)
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in values.items())


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    with TensorFile(tmp_path / "t.safetensors", ODD):
        pass
    assert {name: place % 64 for name, place in places(tmp_path / "t.safetensors")} == dict.fromkeys(ODD, 0)


def test_a_file_that_is_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"\xff" * 10_000)
    with TensorFile(path, {"a": (torch.uint8, (3,))}) as file:
        assert not file["a"].any()
    assert path.stat().st_size < 1000


def test_a_full_disk_is_known_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="space"):
        TensorFile(tmp_path / "t.safetensors", ODD)


def test_a_file_system_that_cannot_claim_space_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    with TensorFile(tmp_path / "t.safetensors", ODD) as file:
        file["longs"].fill_(7)
    assert load_file(tmp_path / "t.safetensors")["longs"].tolist() == [7] * 9


@pytest.mark.parametrize("bits", [2, 3, 16])
def test_packed_files_are_aligned_and_readable(tmp_path: Path, bits: int) -> None:
    checkpoint = make_checkpoint(tmp_path / "source", hidden=40, intermediate=37, experts=3, layers=1)
    make_pack(checkpoint, tmp_path / "packed", PackSpec(up=bits, gate=bits, down=bits))
    files = sorted((tmp_path / "packed").glob("*.safetensors"))
    assert [path.name for path in files] == ["dense.safetensors", "layer_00.safetensors", "profile.safetensors"]
    for path in files:
        assert {name: place % 64 for name, place in places(path) if place % 64} == {}
        assert load_file(path)
