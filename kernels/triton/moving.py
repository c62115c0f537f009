# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Copying records, and unpacking blocks of rows for matrix products.

Records are multiples of 64 bytes, so they are moved as 32-bit words, four to a load. A program moves a few records at
once: 16 bytes times several per thread under way is what hides the latency of memory, and even more so that of PCIe for
records in pinned host memory.
"""

from __future__ import annotations

import triton.language as tl

from .codes import load_values
from .jit import device_code


@device_code("count", "first")
def copy_kernel(
    source, target, index, count, first,
    NBYTES: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target[i] = source[first + index[i]] (GATHER), or target[index[i]] = source[i], for `count` records."""
    words: tl.constexpr = NBYTES // 4
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = i < count
    there = tl.load(index + i, mask=live, other=0)
    if GATHER:
        source_row = first + there
        target_row = i
    else:
        source_row = i
        target_row = there
    source_at = source.to(tl.pointer_type(tl.int32)) + source_row[:, None] * words
    target_at = target.to(tl.pointer_type(tl.int32)) + target_row[:, None] * words
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = live[:, None] & (word < words)
    tl.store(target_at + word, tl.load(source_at + word, mask=mask), mask=mask)


@device_code()
def land_kernel(
    lane, CHUNK: tl.constexpr, HEAD: tl.constexpr, NBYTES: tl.constexpr, IN_PLACE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the rows of a link's lane into their slots; the lane's head (floe_lane in floe_offload.h) says how many, and
    where to. Launched for a whole chunk, so that it can be captured once for all of them.
    """
    words: tl.constexpr = NBYTES // 4
    head = lane.to(tl.pointer_type(tl.int64))
    numbers = lane.to(tl.pointer_type(tl.int32)) + 8
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < tl.load(head)
    slot = tl.load(numbers + i, mask=live, other=0).to(tl.int64)
    # All addresses are multiples of 16 at least, which no compiler can see in a number.
    target = tl.multiple_of(tl.load(head + 1).to(tl.pointer_type(tl.int32)), 16)
    if IN_PLACE:
        source = tl.multiple_of(tl.load(head + 2).to(tl.pointer_type(tl.int32)), 16)
        row = tl.load(numbers + CHUNK + i, mask=live, other=0).to(tl.int64)
    else:
        source = lane.to(tl.pointer_type(tl.int32)) + HEAD // 4
        row = i.to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = live[:, None] & (word < words)
    tl.store(target + slot[:, None] * words + word, tl.load(source + row[:, None] * words + word, mask=mask), mask=mask)


@device_code("first", "count")
def unpack_kernel(
    data, scale, zero, out, first, count, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out (count, n) = rows first, first + 1, ... as numbers of out's dtype.

    Code by code: what bounds this kernel is writing 16 bits for each code of 2, in order of columns.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = (i < count) & (column < V.n)
    value = load_values(data, scale, zero, first + i, column, live, V)
    tl.store(out + i * V.n + column, value.to(out.dtype.element_ty), mask=live)
