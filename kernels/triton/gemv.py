# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""v = s(signal · x) for several calls at once, and the list of neurons that reach their threshold, in ascending order.

One program of 128 threads computes 16 rows, 16 chunks of 64 codes of each at a time, two for each thread. A Mixtral
expert makes 896 programs, 32 for each SM of an RTX 3060. Rows are whole: cutting H as well would need a second pass to
add the parts. A call that no v can reach has one store of zeros and reads nothing.
Calls are the fastest grid axis: those of one expert read the same rows at about the same time, the second from L2.
Which neuron stands where in the list follows from counts per block alone, never from which program came first.
"""

from __future__ import annotations

import triton.language as tl

from .codes import applied, dot_rows
from .jit import device_code


@device_code("neurons")
def gemv_kernel(
    x, tokens, experts, thresholds, data, scale, zero, bias, added, out, kept, neurons,
    V: tl.constexpr, FUNCTION: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, COUNT: tl.constexpr,
    EACH: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (P, F) = s(rows of an expert · x + bias), x spread, s the FUNCTION; with COUNT also kept (P, blocks), how
    many of each block stay.

    Without COUNT call p is token p and there is one matrix: a dense linear layer, of which the call's rows begin at
    p * EACH + FIRST. With ADDED, added (P, F) joins what out would be.
    """
    call = tl.program_id(0)
    block = tl.program_id(1)
    token = tl.load(tokens + call) if COUNT else call.to(tl.int64)
    expert = tl.load(experts + call) if COUNT else 0
    n = block * ROWS + tl.arange(0, ROWS)
    live = n < neurons
    at = out + call.to(tl.int64) * neurons + n
    if COUNT:
        limit = tl.load(thresholds + call).to(tl.float32)
        if limit == float("inf"):
            tl.store(at, tl.zeros((ROWS,), out.dtype.element_ty), mask=live)
            tl.store(kept + call * tl.num_programs(1) + block, 0)
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
    tl.store(at, v.to(out.dtype.element_ty), mask=live)
    if COUNT:
        count = tl.sum((live & reaches(v, limit)).to(tl.int32), 0)
        tl.store(kept + call * tl.num_programs(1) + block, count)


@device_code()
def reaches(v, threshold):
    """Whether v is active. What is not a number is, so that it shows in the result instead of vanishing."""
    return (tl.abs(v) < threshold.to(tl.float32)) == 0


@device_code("neurons", "blocks")
def compact_kernel(
    v, thresholds, kept, begins, ends, found, values, copies, counts, neurons, blocks,
    COUNTED: tl.constexpr, PACKED: tl.constexpr, COPIES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The active neurons of v (P, F) into found and values, and each call's interval of them into begins and ends (P,).

    PACKED puts the calls one after another; else call p begins at p * F, so that nobody needs to know how many
    there are. With COPIES values go there too: like `found`, that may be memory of the host, which only what is active
    has to cross to. With COUNTED, which is not for PACKED, also counts (P, 2): how many there are, and 0.
    """
    call = tl.program_id(0)
    block = tl.program_id(1)
    begin = 0 if PACKED else call * blocks
    end = call * blocks + block * (BLOCK // ROWS)
    before = tl.zeros((STEP,), tl.int32)
    for start in range(begin, end, STEP):
        index = start + tl.arange(0, STEP)
        before += tl.load(kept + index, mask=index < end, other=0)
    at = tl.sum(before, 0).to(tl.int64)
    if not PACKED:
        at += call.to(tl.int64) * neurons
    n = block * BLOCK + tl.arange(0, BLOCK)
    live = n < neurons
    value = tl.load(v + call.to(tl.int64) * neurons + n, mask=live, other=0.0)
    keep = live & reaches(value, tl.load(thresholds + call))
    place = at + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(found + place, n.to(found.dtype.element_ty), mask=keep)
    tl.store(values + place, value.to(values.dtype.element_ty), mask=keep)
    if COPIES:
        tl.store(copies + place, value.to(copies.dtype.element_ty), mask=keep)
    if block == 0:
        tl.store(begins + call, at)
    if block == tl.num_programs(1) - 1:
        end_at = at + tl.sum(keep.to(tl.int32), 0)
        tl.store(ends + call, end_at)
        if COUNTED:
            tl.store(counts + 2 * call, end_at - call.to(tl.int64) * neurons)
            tl.store(counts + 2 * call + 1, tl.zeros((), tl.int64))
