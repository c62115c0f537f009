"""The numbers of a tensor in a GGUF file, by the gguf library's own rules, some rows at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .header import GgufTensor, unreadable

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AT_ONCE = 1 << 22  # values that are made of blocks together: the library needs several times their room


def values(tensor: GgufTensor, index: int | None = None) -> Tensor:
    """A tensor, or number `index` of those that it consists of: in its own type, or float32 if that has blocks.

    Raises:
        CheckpointError: the file ends too early, or cannot be read.
    """
    shape = tensor.shape if index is None else tensor.shape[1:]
    raw = blocks(tensor, index)
    if tensor.kind in _PLAIN:
        return raw.view(_PLAIN[tensor.kind]).view(shape)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = raw.view(math.prod(shape[:-1]), -1)
    found = torch.empty(len(rows), shape[-1])
    step = max(1, _AT_ONCE // shape[-1])
    for first in range(0, len(rows), step):
        part = dequantize(rows[first : first + step].numpy(), GGMLQuantizationType[tensor.kind])
        found[first : first + step] = torch.from_numpy(part)
    return found.view(shape)


def blocks(tensor: GgufTensor, index: int | None = None) -> Tensor:
    """The bytes of a tensor, or of number `index` of those that it consists of: (n,) uint8.

    Raises:
        CheckpointError: the file ends too early, or cannot be read.
    """
    count = tensor.nbytes if index is None else tensor.nbytes // tensor.shape[0]
    raw = torch.empty(count, dtype=torch.uint8)
    _fill(tensor, (index or 0) * count, memoryview(raw.numpy()))  # pyright: ignore[reportArgumentType]
    return raw


def sample(tensor: GgufTensor, most: int, index: int | None = None) -> bytes:
    """The first bytes of a tensor, or of number `index` of those that it consists of.

    Raises:
        CheckpointError: the file cannot be read.
    """
    count = tensor.nbytes if index is None else tensor.nbytes // tensor.shape[0]
    raw = bytearray(min(most, count))
    _fill(tensor, (index or 0) * count, memoryview(raw))
    return bytes(raw)


def _fill(tensor: GgufTensor, start: int, into: memoryview) -> None:
    try:
        read = tensor.file.fill(tensor.start + start, into)
    except OSError as error:
        raise unreadable(tensor.file, f"{error.strerror or error}.") from error
    if read != len(into):
        raise unreadable(tensor.file, f"It ends inside {tensor.name}.")
