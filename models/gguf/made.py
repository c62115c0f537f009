"""How a published tensor is made of those in a GGUF file: what its converter did, undone.

The converter's rules: https://github.com/ggml-org/llama.cpp/tree/master/conversion
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .header import GgufTensor
from .values import blocks, values

Undo = Callable[..., Tensor]
"""Tensors of a GGUF file -> the published one."""

UndoOne = Callable[[Tensor], Tensor]
"""The same, of one tensor."""

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
_LOGARITHM_ERROR = 2e-7  # of float32


@dataclass(frozen=True, slots=True)
class Made:
    """A published tensor, not read yet.

    Attributes:
        shape, dtype: of it; safetensors' name of the type. sources: what it is made of. undo: how.
        experts: how many the sources hold side by side, if it holds all of them too; 0: it holds none, or one.
        expert: which of those in the sources it is made of, if it is one.
        coded: whether `undo` gets the sources' bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    sources: tuple[GgufTensor, ...]
    undo: Undo
    experts: int = 0
    expert: int | None = None
    coded: bool = False

    @property
    def nbytes(self) -> int:
        """Of the published tensor."""
        return torch.Size(self.shape).numel() * TORCH[self.dtype].itemsize

    def read(self, index: int | None = None) -> Tensor:
        """The tensor, or that of number `index` of the experts that it holds.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if self.experts and index is None:
            return torch.stack([self.read(expert) for expert in range(self.experts)])
        which = index if self.experts else self.expert
        read = blocks if self.coded else values
        found = self.undo(*(read(source, which) for source in self.sources))
        found = found.to(TORCH[self.dtype]).contiguous()
        return found if self.experts or index is None else found[index]


def made(
    sources: tuple[GgufTensor, ...],
    dtype: str,
    undo: Undo,
    *,
    experts: int = 0,
    expert: int | None = None,
) -> Made:
    """A published tensor of this type, whose shape follows from its sources.

    Raises:
        ValueError: the sources do not have the shapes that `undo` needs.
    """
    one = bool(experts) or expert is not None
    empty = [torch.empty(source.shape[1:] if one else source.shape, device="meta") for source in sources]
    try:
        shape = tuple(undo(*empty).shape)
    except (RuntimeError, IndexError, ZeroDivisionError, TypeError):
        shapes = ", ".join(f"{source.name} {source.shape}" for source in sources)
        raise ValueError(f"shapes that do not fit: {shapes}") from None
    return Made((experts, *shape) if experts else shape, dtype, sources, undo, experts, expert)


def itself(tensor: Tensor) -> Tensor:
    """Nothing was done to it."""
    return tensor


def unpermuted(heads: int) -> UndoOne:
    """Of q or k: rope turns neighbouring dimensions together in the file, and those half a head apart as published."""
    return lambda tensor: (
        tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    )


def shaped(*shape: int) -> UndoOne:
    """Of a tensor that lost dimensions of one."""
    return lambda tensor: tensor.reshape(shape)


def less_one(tensor: Tensor) -> Tensor:
    """Of a norm that adds one to its weights."""
    return tensor.float() - 1


def log_of_negative(tensor: Tensor) -> Tensor:
    """Of a decay: the file has -exp of it."""
    return torch.log(-tensor.float())


def latent_keys_and_values(keys: Tensor, values_: Tensor) -> Tensor:
    """Of keys (heads, R, K) and values (heads, V, R): both of a head one above the other, (heads (K + V), R)."""
    both = torch.cat([keys.transpose(1, 2), values_.to(keys.dtype)], dim=1)
    return both.reshape(-1, both.shape[-1])


def above(*tensors: Tensor) -> Tensor:
    """One above the other: gate and up."""
    return torch.cat([tensor.to(tensors[0].dtype) for tensor in tensors])


def one_by_one(*tensors: Tensor, shape: tuple[int, ...]) -> Tensor:
    """All values of one tensor, then all of the next."""
    return above(*(tensor.flatten() for tensor in tensors)).reshape(shape)


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Rows or values of both, in turn."""
    return torch.stack([gate, up.to(gate.dtype)], dim=1).reshape(2 * gate.shape[0], *gate.shape[1:])


def columns_in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up (F, H) as columns in turn: (H, 2 F)."""
    return in_turn(gate, up).T


def survives(tensor: Tensor, dtype: str, undo: Undo) -> bool:
    """Whether a float32 tensor was of 16 bits before it was converted, so that rounding it restores it."""
    rounded = tensor.to(TORCH[dtype]).float()
    if undo is not log_of_negative:
        return torch.equal(rounded, tensor)
    return bool(((rounded - tensor).abs() <= _LOGARITHM_ERROR * (1 + tensor.abs())).all())
