"""Safetensors files written in place: space for every tensor is laid out first, values arrive in any order.

Any safetensors reader opens them. Beyond the format, each tensor starts at a multiple of 64 bytes: the header
is padded with spaces, and gaps are filled by byte tensors named `_pad.N`, since the format allows no holes.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ...kernels.codes import align

TensorShapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]

_CODES = {
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}


class Tensors(Protocol):
    """Tensors by name: a file's, or a checkpoint's."""

    def __getitem__(self, name: str) -> Tensor: ...


class TensorFile:
    """A safetensors file being written. Use as a context manager: leaving it flushes the bytes to the disk.

    Args:
        path: replaced if it exists. plan: dtype and shape of every tensor by name.
        resume: continue the existing file instead, some of whose tensors have been written.

    Raises:
        OSError: the disk cannot hold the file; space is claimed at once, so this is known before any work is done.
        ValueError: there is no file to continue, or it has another plan.
    """

    def __init__(self, path: Path, plan: TensorShapes, *, resume: bool = False) -> None:
        header: dict[str, dict[str, object]] = {}
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape) in plan.items():
            nbytes = math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [end, end + nbytes]}
            places[name] = (end, nbytes)
            end += nbytes
            if gap := align(end) - end:
                header[f"_pad.{len(places)}"] = {
                    "dtype": "U8",
                    "shape": [gap],
                    "data_offsets": [end, end + gap],
                }
                end += gap
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (align(8 + len(encoded)) - 8 - len(encoded))
        start = 8 + len(encoded)
        head = len(encoded).to_bytes(8, "little") + encoded
        if resume:
            if not path.is_file() or path.stat().st_size != start + end or not _begins(path, head):
                raise ValueError(f"{path.name} is not what was begun")
        else:
            with path.open("wb") as file:
                file.write(head)
                _claim(file.fileno(), start + end)
        self.path = path
        self._plan = plan
        self._places = {name: (start + offset, nbytes) for name, (offset, nbytes) in places.items()}
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r+")

    def __getitem__(self, name: str) -> Tensor:
        """A view of the tensor `name` in the file: writing to it writes to the file."""
        dtype, shape = self._plan[name]
        offset, nbytes = self._places[name]
        return torch.from_numpy(self._bytes[offset : offset + nbytes]).view(dtype).view(shape)

    def flush(self) -> None:
        """Return when everything written so far is on the disk, also after a power cut."""
        self._bytes.flush()
        fd = os.open(self.path, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.flush()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A whole file at once, as `TensorFile` lays it out."""
    plan: TensorShapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFile(path, plan) as file:
        for name, tensor in tensors.items():
            file[name].copy_(tensor)


def place_of(path: Path, name: str) -> int:
    """Where in a file that safetensors has opened a tensor's bytes begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return 8 + length + int(header[name]["data_offsets"][0])


def _begins(path: Path, head: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(head)) == head


def _claim(fd: int, nbytes: int) -> None:
    """Make the file `nbytes` long with its space taken, where the system can; elsewhere only long."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some file systems cannot
                raise
        else:
            return
    os.ftruncate(fd, nbytes)
