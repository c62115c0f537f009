"""Layers that keep a state, of Qwen3-Next and Qwen3.5: their heads in the published order, from that in a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .made import UndoOne, itself


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads of keys there are, how many of values belong to each, and their sizes."""

    keys: int
    per_key: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(config: Any) -> Heads:
        """Those of a configuration. Raises: ValueError: it has no whole number of heads of values for each of keys."""
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        if values % keys:
            raise ValueError(f"{values} heads of values are not shared out among {keys} of keys")
        return Heads(keys, values // keys, config.linear_key_head_dim, config.linear_value_head_dim)


def grouped(qkv: Tensor, z: Tensor, *, heads: Heads) -> Tensor:
    """Qwen3-Next's `in_proj_qkvz`: q, k, v and z of the first head of keys, then of the second, and so on; the file has
    q, k and v of all heads, and z in another tensor.
    """
    q, k, v = qkv.split([heads.keys * heads.key_dim] * 2 + [heads.keys * heads.per_key * heads.value_dim])
    of_each = [part.reshape(heads.keys, -1, part.shape[-1]) for part in (q, k, v, z.to(qkv.dtype))]
    return torch.cat(of_each, dim=1).reshape(-1, qkv.shape[-1])


def undo(published: str, shape: tuple[int, ...], heads: Heads) -> UndoOne:
    """Qwen3.5's heads of values: as published, those of one head of keys lie side by side; in the file, the first of
    each head of keys come first.
    """
    wide = heads.value_dim
    before = 2 * heads.keys * heads.key_dim  # q and k, before the values
    if published.endswith(".out_proj.weight"):
        return lambda tensor: _grouped(tensor.T, heads, wide).T
    if published.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
        return lambda tensor: torch.cat([tensor[:before], _grouped(tensor[before:], heads, wide)]).reshape(shape)
    if published.endswith(".in_proj_z.weight"):
        return lambda tensor: _grouped(tensor, heads, wide)
    if published.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".dt_bias")):
        return lambda tensor: _grouped(tensor, heads, 1)
    if published.endswith(".A_log"):
        return lambda tensor: _grouped(torch.log(-tensor.float()), heads, 1)
    return itself


def _grouped(tensor: Tensor, heads: Heads, size: int) -> Tensor:
    """(per_key * keys * size, ...) -> (keys * per_key * size, ...)."""
    split = tensor.reshape(heads.per_key, heads.keys, size, *tensor.shape[1:])
    return split.transpose(0, 1).reshape(tensor.shape)
