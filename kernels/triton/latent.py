# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
"""Attention of one token through a latent vector (DeepSeek-V2, section 2.1): no key and no value is ever made.

A head's query goes through the matrix that makes keys, the other way, before; what it saw goes through the one of
values behind. In between each head meets the same entry, one per token: so many products for each byte that tensor
cores compute them, of a block of heads at a time. As in attention.py, position and address are read from device memory
and positions are cut into splits, which `join_kernel` adds up.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from .attention import gathered, met, weighed
from .jit import device_code


class LatentShape(NamedTuple):
    """How a layer attends; all of it becomes constants of the compiled kernel.

    Attributes:
        heads, rank, still, turned, scale, eps: as in `mixers.latent.Latent`. aligned: bytes that divide each layer's
            address. cores: whether tensor cores multiply, by queries and weights of the entries' 16 bits.
    """

    heads: int
    rank: int
    still: int
    turned: int
    scale: float
    eps: float
    aligned: int
    cores: bool


@device_code()
def rotated(part, rope, r, live, A: tl.constexpr):
    """Numbers r of what rope turns, by its row for the position; part points to them, or to rows of them."""
    across = (r + A.turned // 2) % A.turned
    within = r < A.turned
    cos = tl.load(rope + r, mask=within, other=0.0).to(tl.float32)
    sin = tl.load(rope + A.turned + r, mask=within, other=0.0).to(tl.float32)
    x = tl.load(part + r, mask=live, other=0.0).to(tl.float32)
    return x * cos + tl.load(part + across, mask=live, other=0.0).to(tl.float32) * sin


@device_code("layer")
def latent_kernel(
    queries, asked, given, rope, addresses, position, norm, partial, sums, layer,
    A: tl.constexpr, STORED: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial (heads, SPLITS, R) and sums (heads, SPLITS, 2), as of `attend_kernel`, for a block of heads.

    queries (heads, R): of what rope leaves alone. asked (heads, still + turned): of these, what rope turns. given:
    the new token's vector and key, which the first program of all stores.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    length: tl.constexpr = A.rank + A.turned
    aligned: tl.constexpr = A.aligned
    at = tl.load(position).to(tl.int32)
    entries = tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(STORED)), aligned)
    d = tl.arange(0, COLUMNS)
    r = tl.arange(0, TURNED)
    head = block * GROUP + tl.arange(0, GROUP)
    real = head < A.heads
    live = real[:, None] & (d < A.rank)[None, :]
    q = tl.load(queries + head[:, None] * A.rank + d[None, :], mask=live, other=0.0).to(tl.float32) * A.scale
    part = asked + (head * (A.still + A.turned) + A.still)[:, None]
    moved = rotated(part, rope, r[None, :], real[:, None] & (r < A.turned)[None, :], A) * A.scale
    vector = tl.load(given + d, mask=d < A.rank, other=0.0).to(tl.float32)
    vector /= tl.sqrt(tl.sum(vector * vector, 0) / A.rank + A.eps)
    vector = (vector * tl.load(norm + d, mask=d < A.rank, other=0.0).to(tl.float32)).to(STORED)
    key = rotated(given + A.rank, rope, r, r < A.turned, A).to(STORED)
    place = entries + at.to(tl.int64) * length
    tl.store(place + d, vector, mask=(d < A.rank) & (d * 0 + block + split == 0))
    tl.store(place + A.rank + r, key, mask=(r < A.turned) & (r * 0 + block + split == 0))
    vector = vector.to(tl.float32)
    # The new token is the first split's alone; the others begin with nothing.
    own = tl.sum(q * vector[None, :], 1) + tl.sum(moved * key.to(tl.float32)[None, :], 1)
    top = tl.where(split == 0, own, float("-inf"))
    total = tl.where(split == 0, 1.0, tl.zeros((GROUP,), tl.float32))
    out = tl.where(split == 0, vector[None, :], tl.zeros((GROUP, COLUMNS), tl.float32))
    size = tl.cdiv(tl.cdiv(at, SPLITS), BLOCK) * BLOCK
    begin = split * size
    end = tl.minimum(at, begin + size)
    for start in range(begin, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        seen = n < end
        row = entries + n.to(tl.int64)[:, None] * length
        vectors = tl.load(row + d[None, :], mask=seen[:, None] & (d < A.rank)[None, :], other=0.0)
        keys = tl.load(row + A.rank + r[None, :], mask=seen[:, None] & (r < A.turned)[None, :], other=0.0)
        weights, fade, top = weighed(met(q, vectors, A, STORED) + met(moved, keys, A, STORED), seen, top)
        total = total * fade + tl.sum(weights, 1)
        out = out * fade[:, None] + gathered(weights, vectors, A, STORED)
    place = head * SPLITS + split
    tl.store(partial + place[:, None] * A.rank + d[None, :], out, mask=live)
    tl.store(sums + place * 2, top, mask=real)
    tl.store(sums + place * 2 + 1, total, mask=real)
