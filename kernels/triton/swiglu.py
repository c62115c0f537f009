# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""The sparse half of an expert (FloE Algorithm 1, lines 4-7) in three kernels; no byte of a record is read twice.

`product_kernel` is a GEMV over the first halves of the active records, which are rows of the projection that is not
the signal: h = o(other · x) v, with that projection's function o. `down_kernel` adds h times the down halves; a neuron
whose h is zero, because it missed the second threshold, is never fetched. `combine_kernel` adds the partial sums in a
fixed order, so results repeat bit for bit.

Why not one kernel: a program would hold y (4096 floats), wait for a first half, reduce it over its threads, and only
then ask for the down half; two latencies in a row for each few neurons and most of the registers for y. Apart, each
half streams: a program of the first owns neurons; one of the second owns 64 words of every record (512 columns at 4
bit), a slice of the neurons, and their part of y in registers. `down_kernel` has each record's place from
`product_kernel` and fetches it one step ahead, so that one memory latency per step remains, with 16 bytes per thread
under way.
"""

from __future__ import annotations

import triton.language as tl

from .codes import (
    applied,
    dot_rows,
    field,
    first_column,
    group_of,
    load_float,
    load_scale,
    load_values,
    load_words,
    undo_field,
)
from .jit import device_code


@device_code("neurons")
def product_kernel(
    x, tokens, experts, weights, begins, ends, found, at, values, limits, data, h, place, reached, neurons,
    V: tl.constexpr, FUNCTION: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr, LISTED: tl.constexpr,
    EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h = weight · o(other_n · x + bias_n) v_n of every active neuron, and the number of its record into place.

    h is zero for what is below its limit; reached[call * EACH] grows by the number of neurons that are not. BIAS: where
    a record's bias is; 0 for none. LISTED: `found` are records, whatever their expert, and `at` says where among
    `values` each one's is.
    """
    call = tl.program_id(0)
    begin = tl.load(begins + call)
    end = tl.load(ends + call)
    token = tl.load(tokens + call)
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(begin + tl.program_id(1) * ROWS, end, tl.num_programs(1) * ROWS):
        i = start + tl.arange(0, ROWS)
        live = i < end
        there = tl.minimum(i, end - 1)  # what is past the end is the last one again
        row = tl.load(found + there).to(tl.int64)
        if LISTED:
            value = tl.load(values + tl.load(at + there))
        else:
            row += tl.load(experts + call) * neurons.to(tl.int64)
            value = tl.load(values + there)
        z = dot_rows(data, data, data, row, x, token, V, BLOCK)
        if BIAS:
            z += load_float(data, row * V.row + BIAS, live)
        product = applied(z, FUNCTION) * value.to(tl.float32)
        kept = live
        if LIMIT:
            kept = live & ((tl.abs(product) < tl.load(limits + call).to(tl.float32)) == 0)
        count += kept.to(tl.int32)
        weight = tl.load(weights + call).to(tl.float32)  # here, since registers are short before
        tl.store(h + i, tl.where(kept, product * weight, 0.0), mask=live)
        tl.store(place + i, row, mask=live)
    tl.atomic_add(reached + call * EACH, tl.sum(count, 0).to(tl.int64))


@device_code()
def down_kernel(
    h, place, begins, ends, data, scale, zero, partial, magic,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial (P, slices, H): what one slice of a call's neurons adds to y."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    call = tl.program_id(2)
    begin = tl.load(begins + call)
    end = tl.load(ends + call)
    size = tl.cdiv(tl.cdiv(end - begin, parts), ROWS) * ROWS
    begin += part * size
    end = tl.minimum(end, begin + size)
    out = partial + (call.to(tl.int64) * parts + part) * V.n
    if V.fast:
        _down_words(h, place, begin, end, data, scale, zero, out, block, magic, V, ROWS, BLOCK)
    else:
        _down_columns(h, place, begin, end, data, scale, zero, out, block, V, ROWS, BLOCK)


@device_code()
def _down_words(
    h, place, begin, end, data, scale, zero, out, block, magic,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over records of h times the columns that a block of their words holds."""
    two_23 = tl.load(magic)
    fields: tl.constexpr = len(V.shifts)
    sets: tl.constexpr = V.sets
    word = block * BLOCK + tl.arange(0, BLOCK)
    within = word < V.words
    first = first_column(word, V)
    lane = tl.arange(0, ROWS)
    hn, row = _record(h, place, begin + lane, end)
    # One accumulator per field of a word, so that every thread adds up its own words and nothing is exchanged.
    sums = ()
    for _ in tl.static_range(fields):
        sums = sums + (tl.zeros((ROWS, BLOCK), tl.float32),)  # noqa: RUF005 (Triton knows no unpacking)
    zeros = ()
    for _ in tl.static_range(sets):
        zeros = zeros + (tl.zeros((ROWS, BLOCK), tl.float32),)  # noqa: RUF005
    for start in range(begin, end, ROWS):
        next_h, next_row = _record(h, place, start + ROWS + lane, end)
        both = (hn != 0.0)[:, None] & within[None, :]
        words = load_words(data, row[:, None], word[None, :], both, V)
        new_sums = ()
        new_zeros = ()
        for group in tl.static_range(sets):
            hs = tl.broadcast_to(hn[:, None], (ROWS, BLOCK))
            if V.bits != 16:
                of_word = group_of(word, group * (fields // sets), V)[None, :]
                s, z = load_scale(scale, zero, row[:, None], of_word, both, V)
                hs = hs * s
                new_zeros = new_zeros + (zeros[group] + hs * z,)  # noqa: RUF005
            else:
                new_zeros = new_zeros + (zeros[group],)  # noqa: RUF005
            for i in tl.static_range(group * (fields // sets), (group + 1) * (fields // sets)):
                new_sums = new_sums + (sums[i] + hs * field(words, two_23, i, V),)  # noqa: RUF005
        sums = new_sums
        zeros = new_zeros
        hn = next_h
        row = next_row
    for i in tl.static_range(fields):
        total = sums[i] * undo_field(i, V) - zeros[i * sets // fields]
        tl.store(out + first + V.columns[i], tl.sum(total, 0), mask=within)


@device_code()
def _down_columns(
    h, place, begin, end, data, scale, zero, out, block,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for a block of columns, of codes that do not fill words."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    within = column < V.n
    lane = tl.arange(0, ROWS)
    hn, row = _record(h, place, begin + lane, end)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(begin, end, ROWS):
        both = (hn != 0.0)[:, None] & within[None, :]
        total += hn[:, None] * load_values(data, scale, zero, row[:, None], column[None, :], both, V)
        hn, row = _record(h, place, start + ROWS + lane, end)
    tl.store(out + column, tl.sum(total, 0), mask=within)


@device_code()
def _record(h, place, at, end):
    """h and the number of the record of the neurons `at`, zeros past the `end`."""
    return tl.load(h + at, mask=at < end, other=0.0), tl.load(place + at, mask=at < end, other=0)


@device_code("calls", "hidden")
def combine_kernel(
    tokens, partial, stream, y, calls, hidden,
    ADD: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y (B, H): the partial sums of every token's calls, in their order; zero for a token without one. ADD: to the
    stream (B, H).
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, calls * PARTS, ROWS):  # rows without their calls: nobody waits to know whose a row is
        row = start + tl.arange(0, ROWS)
        there = row < calls * PARTS
        mine = there & (tl.load(tokens + row // PARTS, mask=there, other=-1) == token)
        at = row.to(tl.int64)[:, None] * hidden + column[None, :]
        total += tl.sum(tl.load(partial + at, mask=mine[:, None] & within[None, :], other=0.0), 0)
    if ADD:
        total += tl.load(stream + token.to(tl.int64) * hidden + column, mask=within, other=0.0).to(tl.float32)
    tl.store(y + token.to(tl.int64) * hidden + column, total.to(y.dtype.element_ty), mask=within)
