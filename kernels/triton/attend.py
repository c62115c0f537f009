"""Launches the attention of one token."""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import maker
from ..activation import FUNCTIONS
from ..entries import CODES
from ..mixers.grouped import Heads, KeptTokens
from ..mixers.latent import Latent
from ..weights import LinearWeights
from . import launch
from .attention import Shape, attend_kernel, join_kernel
from .dense import plain
from .gemv import gemv_kernel
from .latent import LatentShape, latent_kernel
from .swiglu import down_kernel
from .vectors import linear_vector

# Numbers of a tile of products of queries and keys, per program of 128 threads: more would not fit their registers.
# Codes take some more until they are values.
TILE, MOST_TOKENS, MOST_CODED = 4096, 64, 16
# By tensor cores, numbers of a tile of keys, and of queries, by four warps: eight take two of them, or four of codes.
CORES_TILE, FOUR_WARPS = 8192, 4096
PROGRAMS_PER_PROCESSOR, MOST_SPLITS = 4, 64
# Of a latent vector. By tensor cores: heads, tokens and warps of a program; 74 KB of shared memory for 32 heads of
# rank 512, and 165 registers. Else, heads that a tile has room for.
CORES, MORE_CORES, MOST_HEADS = (16, 32, 4), (32, 32, 8), 4
WIDEST, LEAST = (512, 64), 16  # numbers of a vector and of a key for which they are used; of a side of a product
ABSORBED = 8, 64  # words and rows of keys' matrix at a time: some 160 programs for 20 heads of 4 bits
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
        launch.cores(device, qkv.dtype) and heads.cache_dtype in (qkv.dtype, CODES),
    )
    splits = splits_of(device, heads.num_kv_heads)
    least = LEAST if shape.cores else 1
    columns, group = (max(least, triton.next_power_of_2(size)) for size in (dim, groups))
    warps = 8 if shape.cores and group * columns > FOUR_WARPS else 4
    if shape.cores:
        tiles = 1 if warps == 4 else 4 // heads.cache_dtype.itemsize
        block = max(LEAST, min(MOST_TOKENS, CORES_TILE * tiles // columns))
    else:
        block = max(1, min(MOST_CODED if shape.coded else MOST_TOKENS, TILE // (group * columns)))
    partial = torch.empty(heads.num_heads, splits, dim, dtype=torch.float32, device=device)
    sums = torch.empty(heads.num_heads, splits, 2, dtype=torch.float32, device=device)
    y = torch.empty(1, heads.num_heads * dim, dtype=qkv.dtype, device=device)
    norms = [qkv if weight is None else weight for weight in (heads.q_norm, heads.k_norm)]
    with launch.on(device):
        attend_kernel[(heads.num_kv_heads, splits)](
            *(qkv, rope, kept.addresses, kept.position, *norms, partial, sums, layer),
            *(shape, _STORED[heads.cache_dtype], _STORED[qkv.dtype], splits, group, columns),
            *(block, launch.block_of(heads.num_heads * dim, 1024)),
            num_warps=warps,
            num_stages=1 if shape.coded else 2,  # codes become numbers on their way: copied ahead they cost more
        )
        sinks = sums if heads.sinks is None else heads.sinks
        gates = qkv[:, heads.num_heads * dim :]
        _join((partial, sums, sinks, gates, y), dim, splits, sinks=heads.sinks is not None, gated=heads.gated)
    return y


def latent_one(asked: Tensor, given: Tensor, rope: Tensor, kept: KeptTokens, layer: int, latent: Latent) -> Tensor:
    """See `kernels.latent_one`. Reads position and address on the device, so that it can be captured.

    Where computation and entries have 16 bits, so have queries and weights, which tensor cores then multiply.

    Raises:
        ValueError: tensors that are not on the device.
    """
    device, heads, rank, dtype = asked.device, latent.heads, latent.rank, latent.heads.cache_dtype
    launch.check_device(device)
    count = heads.num_heads
    columns, turned = (max(LEAST, triton.next_power_of_2(size)) for size in (rank, latent.turned))
    fits = columns <= WIDEST[0] and turned <= WIDEST[1]
    cores = fits and asked.dtype == dtype and launch.cores(device, dtype)
    if cores:
        group, block, warps = CORES if count <= CORES[0] else MORE_CORES
    else:
        group = min(MOST_HEADS, triton.next_power_of_2(count))
        block, warps = max(1, min(MOST_TOKENS, TILE // (group * columns))), 4
    shape = LatentShape(
        *(count, rank, latent.still, latent.turned, heads.scale, latent.eps),
        *(math.gcd(kept.aligned, heads.head_dim * dtype.itemsize), cores),
    )
    blocks = triton.cdiv(count, group)
    splits = splits_of(device, blocks)
    partial = torch.empty(count, splits, rank, dtype=torch.float32, device=device)
    sums = torch.empty(count, splits, 2, dtype=torch.float32, device=device)
    made = latent.made.weight
    seen = torch.empty(count, rank, dtype=made.dtype if isinstance(made, Tensor) else torch.float32, device=device)
    with launch.on(device):
        latent_kernel[(blocks, splits)](
            *(_absorbed(asked, latent), asked, given, rope, kept.addresses, kept.position, latent.norm),
            *(partial, sums, layer, shape, _STORED[dtype], splits, group, columns, turned, block),
            num_warps=warps,
            num_stages=2,
        )
        _join((partial, sums, sums, sums, seen), rank, splits)
        return _valued(seen, latent, asked.dtype)


def _absorbed(asked: Tensor, latent: Latent) -> Tensor:
    """What rope leaves alone of queries (1, heads * (still + turned)), through the matrix of keys: (heads, R)."""
    made, count, still = latent.made.weight, latent.heads.num_heads, latent.still
    if isinstance(made, Tensor):
        return plain(asked.view(count, -1)[:, :still], made.view(count, -1, latent.rank)[:, :still].mT)
    assert isinstance(made, LinearWeights), "two planes"
    out = torch.empty(count, latent.rank, dtype=torch.float32, device=asked.device)
    vector = linear_vector(made)
    width = launch.block_of(vector.words, ABSORBED[0])
    rows = _rows(asked.device, count, still, latent.turned, latent.value)
    down_kernel[(triton.cdiv(vector.words, width), 1, count)](
        *(asked, *rows, made.q, made.scale.view(torch.uint8), made.zero.view(torch.uint8), out),
        *(launch.magic(asked.device), vector, ABSORBED[1], width),
        num_warps=1,
    )
    return out


def _valued(seen: Tensor, latent: Latent, dtype: torch.dtype) -> Tensor:
    """What each head saw, (heads, R), through its matrix of values: (1, heads * value)."""
    made, count, each = latent.made.weight, len(seen), latent.still + latent.value
    if isinstance(made, Tensor):
        return plain(seen, made.view(count, each, -1)[:, latent.still :], dtype=dtype).view(1, -1)
    assert isinstance(made, LinearWeights), "two planes"
    y = torch.empty(1, count * latent.value, dtype=dtype, device=seen.device)
    vector = linear_vector(made)
    scales = made.scale.view(torch.uint8), made.zero.view(torch.uint8)
    spread, vector, width = launch.spread(seen, vector, 22)
    gemv_kernel[(count, triton.cdiv(latent.value, launch.GEMV_ROWS))](
        *(spread, y, y, y, made.q, *scales, y, y, y, y, latent.value),
        *(vector, FUNCTIONS.index("plain"), False, False, False, each, latent.still, launch.GEMV_ROWS, width),
    )
    return y


@cache
def _rows(device: torch.device, heads: int, still: int, turned: int, value: int) -> tuple[Tensor, Tensor, Tensor]:
    """For `down_kernel`: the row of keys' matrix of each number of the queries, and where those of a head, which rope
    leaves alone, begin and end.
    """
    head = torch.arange(heads, device=device)
    rows = head[:, None] * (still + value) + torch.arange(still + turned, device=device)
    begins = head * (still + turned)
    return rows.flatten(), begins, begins + still


def _join(parts: tuple[Tensor, ...], dim: int, splits: int, *, sinks: bool = False, gated: bool = False) -> None:
    """Add up the splits of all heads: parts are partial, sums, sinks, gates and y, see `join_kernel`."""
    columns = triton.next_power_of_2(dim)
    warps = max(4, min(16, splits * columns // TILE))
    join_kernel[(len(parts[0]),)](*parts, dim, splits, columns, sinks, gated, num_warps=warps)


def splits_of(device: torch.device, programs: int) -> int:
    """Into how many splits positions are cut, of so many programs each: a power of two. Fixed, since it is part of a
    captured launch.
    """
    wanted = PROGRAMS_PER_PROCESSOR * maker.processors(device)
    return min(MOST_SPLITS, triton.next_power_of_2(-(-wanted // programs)))
