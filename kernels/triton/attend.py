"""Launches the attention of one token."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..entries import CODES
from ..mixers.grouped import Heads, KeptTokens
from . import launch
from .attention import Shape, attend_kernel, join_kernel

# Numbers of a tile of products of queries and keys, per program of 128 threads: more would not fit their registers.
# Codes take some more until they are values.
TILE, MOST_TOKENS, MOST_CODED = 4096, 64, 16
PROGRAMS_PER_PROCESSOR, MOST_SPLITS = 4, 64
_STORED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, CODES: tl.int8}


def attend_one(qkv: Tensor, rope: Tensor, kept: KeptTokens, layer: int, heads: Heads, eps: float) -> Tensor:
    """See `kernels.attend_one`. Reads position and address on the device, so that it can be captured.

    Raises:
        ValueError: tensors that are not on the device.
    """
    device, dim, groups = qkv.device, heads.head_dim, heads.num_heads // heads.num_kv_heads
    launch.check_device(device)
    normed = 0 if heads.q_norm is None else 1 if heads.q_norm.numel() == dim else 2
    shape = Shape(
        *(heads.num_heads, heads.num_kv_heads, dim, heads.scale, eps),
        *(heads.clip or 0.0, heads.window or 0, normed),
        math.gcd(kept.aligned, math.prod(heads.entry) * heads.cache_dtype.itemsize),
        heads.cache_dtype == CODES,
        *(0 if heads.keys_alone else heads.num_kv_heads, heads.v_normed, heads.rope_at),
        heads.num_heads if heads.gated else 0,
    )
    splits, columns, group = splits_of(device, heads), triton.next_power_of_2(dim), triton.next_power_of_2(groups)
    partial = torch.empty(heads.num_heads, splits, dim, dtype=torch.float32, device=device)
    sums = torch.empty(heads.num_heads, splits, 2, dtype=torch.float32, device=device)
    y = torch.empty(1, heads.num_heads * dim, dtype=qkv.dtype, device=device)
    norms = [qkv if weight is None else weight for weight in (heads.q_norm, heads.k_norm)]
    with launch.on(device):
        attend_kernel[(heads.num_kv_heads, splits)](
            *(qkv, rope, kept.addresses, kept.position, *norms, partial, sums, layer),
            *(shape, _STORED[heads.cache_dtype], splits, group, columns),
            *(
                max(1, min(MOST_CODED if shape.coded else MOST_TOKENS, TILE // (group * columns))),
                launch.block_of(heads.num_heads * dim, 1024),
            ),
        )
        sinks = sums if heads.sinks is None else heads.sinks
        gates = qkv[:, heads.num_heads * dim :]
        join_kernel[(heads.num_heads,)](
            *(partial, sums, sinks, gates, y, dim, splits, columns, heads.sinks is not None, heads.gated)
        )
    return y


def splits_of(device: torch.device, heads: Heads) -> int:
    """Into how many splits positions are cut: a power of two. Fixed, since it is part of a captured launch."""
    programs = PROGRAMS_PER_PROCESSOR * launch.processors(device)
    return min(MOST_SPLITS, triton.next_power_of_2(-(-programs // heads.num_kv_heads)))
