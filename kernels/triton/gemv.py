# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""v = s(signal · x) for several calls at once, and which neurons reach their threshold: marks, and a list of them.

One program of 128 threads computes 16 rows, 16 chunks of 64 codes of each at a time, two for each thread. A Mixtral
expert makes 896 programs, 32 for each SM of an RTX 3060. Rows are whole: cutting H as well would need a second pass to
add the parts. A call that no v can reach has one store of zeros and reads nothing.
Calls are the fastest grid axis: those of one expert read the same rows at about the same time, the second from L2.

A program marks which of its rows are active in one word: a bit each, and above them how many. A program of
`product_kernel` finds its own neurons by their call's marks (`nth_marked`), so that no launch has to make a list; where
the host reads one, `compact_kernel` makes it. Neurons ascend, and which one stands where follows from the marks
alone, never from which program came first.
"""

from __future__ import annotations

import triton.language as tl

from .codes import applied, dot_rows
from .jit import device_code

COUNT_AT, ONE = tl.constexpr(16), tl.constexpr(1 << 16)  # where a mark counts its rows, of which there are at most 16
PAST_AT, PAST = tl.constexpr(20), tl.constexpr(1 << 20)  # above what `nth_marked` finds with another number: 2**20 of F
TOGETHER = tl.constexpr(32)  # marks that `nth_marked` looks at in one step; every call has a multiple of it


@device_code("neurons")
def gemv_kernel(
    x, tokens, experts, thresholds, data, scale, zero, bias, added, out, kept, neurons,
    V: tl.constexpr, FUNCTION: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, COUNT: tl.constexpr,
    EACH: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (P, F) = s(rows of an expert · x + bias), x spread, s the FUNCTION; with COUNT also the marks of each block's
    rows into kept (P, `marks_of` blocks).

    Without COUNT call p is token p and there is one matrix: a dense linear layer, of which the call's rows begin at
    p * EACH + FIRST. With ADDED, added (P, F) joins what out would be.
    """
    call = tl.program_id(0)
    block = tl.program_id(1)
    token = tl.load(tokens + call) if COUNT else call.to(tl.int64)
    expert = tl.load(experts + call) if COUNT else 0
    n = block * ROWS + tl.arange(0, ROWS)
    live = n < neurons
    if COUNT:
        limit = tl.load(thresholds + call).to(tl.float32)
        if limit == float("inf"):
            _store_mark(kept, call, block, 0)
            return
    # What is past the end is the last row again.
    row = expert * neurons.to(tl.int64) + tl.minimum(n, neurons - 1) + (call.to(tl.int64) * EACH + FIRST)
    z = dot_rows(data, scale, zero, row, x, token, V, BLOCK)
    if BIASED:
        z += tl.load(bias + row)
    v = applied(z, FUNCTION)
    if ADDED:
        other = tl.load(added + call.to(tl.int64) * neurons + n, mask=live, other=0.0)
        v = v.to(out.dtype.element_ty).to(tl.float32) + other.to(tl.float32)
    tl.store(out + call.to(tl.int64) * neurons + n, v.to(out.dtype.element_ty), mask=live)
    if COUNT:
        # What is not a number is active, so that it shows in the result instead of vanishing.
        active = live & ((tl.abs(v) < limit) == 0)
        _store_mark(kept, call, block, tl.sum(tl.where(active, (1 << tl.arange(0, ROWS)) + ONE, 0), 0))


@device_code("rows")
def plain_kernel(
    x, weight, bias, out, rows,
    WIDTH: tl.constexpr, TOKEN: tl.constexpr, MATRIX: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (B, rows): x (B, WIDTH) times rows of numbers, and their bias. TOKEN is from one x to the next, MATRIX from
    the weights of one to those of the next, ROW and COLUMN from one weight to the next.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, rows - 1)
    at = weight + token * MATRIX + row.to(tl.int64)[:, None] * ROW
    x += token * TOKEN
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        within = column < WIDTH
        xi = tl.load(x + column, mask=within, other=0.0).to(tl.float32)
        each = at + column.to(tl.int64)[None, :] * COLUMN
        acc += tl.load(each, mask=within[None, :], other=0.0).to(tl.float32) * xi[None, :]
    y = tl.sum(acc, 1)
    if BIASED:
        y += tl.load(bias + row).to(tl.float32)
    tl.store(out + token * rows + n, y.to(out.dtype.element_ty), mask=n < rows)


@device_code()
def marks_of(blocks):
    """Words from one call's marks to the next's."""
    return tl.cdiv(blocks, TOGETHER) * TOGETHER


@device_code()
def _store_mark(kept, call, block, mark):
    """A block's mark, and zeros behind the call's last one, which programs near it write alike."""
    first = kept + call * marks_of(tl.num_programs(1))
    at = block + tl.arange(0, TOGETHER)
    behind = (at >= tl.num_programs(1)) & (at < marks_of(tl.num_programs(1)))
    tl.store(first + at, tl.where(at == block, mark, 0), mask=(at == block) | behind)


@device_code()
def marked_until(marks, blocks, GROUPS: tl.constexpr):
    """How many neurons of a call are marked up to the end of each group of `TOGETHER` blocks, (GROUPS,)."""
    index = tl.arange(0, GROUPS)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    counts = tl.load(marks + index, mask=index < marks_of(blocks), other=0) >> COUNT_AT
    return tl.cumsum(tl.sum(counts, 1), 0)


@device_code()
def nth_marked(marks, i, until, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """The neurons (N,) before which i (N,) others of their call are marked; until: `marked_until`."""
    # The last group that ends before it, in the upper bits, and how many are marked until there.
    past = until | ((tl.arange(0, GROUPS) + 1) << PAST_AT)
    past = tl.max(tl.where(until[None, :] <= i[:, None], past[None, :], 0), 1)
    first = (past >> PAST_AT) * TOGETHER
    mark = tl.load(marks + first[:, None] + tl.arange(0, TOGETHER)[None, :])
    count = mark >> COUNT_AT
    left = (i - (past & (PAST - 1)))[:, None] - tl.cumsum(count, 1) + count
    # Of the block that has it: its bits, how many of them come before, and which one it is, in one sum.
    block = tl.arange(0, TOGETHER)[None, :] << PAST_AT
    found = tl.sum(tl.where((left >= 0) & (left < count), (mark & (ONE - 1)) | (left << COUNT_AT) | block, 0), 1)
    bits = found & (ONE - 1)
    twos = bits - ((bits >> 1) & 0x5555)
    fours = (twos & 0x3333) + ((twos >> 2) & 0x3333)
    left = (found >> COUNT_AT) & 15
    left, row = _passed(fours + (fours >> 4), left, tl.zeros_like(left), 8)
    left, row = _passed(fours, left, row, 4)
    left, row = _passed(twos, left, row, 2)
    left, row = _passed(bits, left, row, 1)
    return (first + (found >> PAST_AT)) * ROWS + row


@device_code()
def _passed(counts, left, row, HALF: tl.constexpr):
    """A step of a search for the bit with `left` others before it: past half of the bits, if they are too few."""
    count = (counts >> row) & (2 * HALF - 1)
    more = left >= count
    return tl.where(more, left - count, left), tl.where(more, row + HALF, row)


@device_code("neurons", "blocks")
def compact_kernel(
    v, kept, begins, ends, found, values, copies, neurons, blocks,
    COPIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The marked neurons of v (P, F) into found and values, one call after another, and each call's interval of them
    into begins and ends (P,).

    With COPIES values go there too: like `found`, that may be memory of the host, which only what is active has to
    cross to.
    """
    call = tl.program_id(0)
    block = tl.program_id(1)
    apart = marks_of(blocks)
    end = call * apart + block * (BLOCK // ROWS)
    before = tl.zeros((STEP,), tl.int32)
    for start in range(0, end, STEP):
        index = start + tl.arange(0, STEP)
        before += tl.load(kept + index, mask=index < end, other=0) >> COUNT_AT
    at = tl.sum(before, 0).to(tl.int64)
    n = block * BLOCK + tl.arange(0, BLOCK)
    mark = tl.load(kept + call * apart + n // ROWS, mask=n < neurons, other=0)
    keep = (mark >> (n % ROWS)) & 1
    value = tl.load(v + call.to(tl.int64) * neurons + n, mask=keep == 1, other=0.0)
    place = at + tl.cumsum(keep, 0) - 1
    tl.store(found + place, n.to(found.dtype.element_ty), mask=keep == 1)
    tl.store(values + place, value.to(values.dtype.element_ty), mask=keep == 1)
    if COPIES:
        tl.store(copies + place, value.to(copies.dtype.element_ty), mask=keep == 1)
    if block == 0:
        tl.store(begins + call, at)
    if block == tl.num_programs(1) - 1:
        tl.store(ends + call, at + tl.sum(keep, 0))
