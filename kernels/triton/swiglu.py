# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""The sparse half of an expert (FloE Algorithm 1, lines 4-7) in three kernels; no byte of a record is read twice.

`product_kernel` is a GEMV over the first halves of the active records, which are rows of the projection that is not
the signal: h = o(other · x) v, with that projection's function o. `down_kernel` adds h times the down halves; a neuron
whose h is zero, because it missed the second threshold, is never fetched. `combine_kernel` adds the partial sums in a
fixed order, so results repeat bit for bit.

Why not one kernel: a program would hold y (4096 floats), wait for a first half, reduce it over its threads, and only
then ask for the down half; two latencies in a row for each few neurons and most of the registers for y. Apart, each
half streams: a program of the first owns neurons; one of the second, a single warp, owns 64 words of every record (512
columns at 4 bit), a slice of the neurons, and their part of y in registers. `down_kernel` has each record's place from
`product_kernel` and fetches it one step ahead, so that one memory latency per step remains, with 64 bytes per thread
under way. Nothing is exchanged before the end. Compiled for 8.6, everything in the loop counted, a code of 2, 3, 4 or
8 bits takes 3.6, 4.2, 4.2 or 5.3 instructions: 10 bytes or more for each multiprocessor and clock, 16 at 4 bits.
"""

from __future__ import annotations

import triton.language as tl

from .codes import (
    UNGATED,
    applied,
    dot_rows,
    field,
    first_column,
    group_of,
    joined,
    load_float,
    load_scale,
    load_values,
    load_words,
    undo_field,
    unseen,
    zero_step,
)
from .gemv import marked_until, marks_of, nth_marked
from .jit import device_code

UNDER_WAY = tl.constexpr(4)  # records that a thread of `down_kernel` waits for at a time


@device_code("neurons")
def product_kernel(
    x, tokens, experts, weights, begins, ends, found, at, values, limits, data, h, place, counts, reached, neurons,
    V: tl.constexpr, FUNCTION: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr, LISTED: tl.constexpr,
    GROUPS: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h = weight · o(other_n · x + bias_n) v_n of every active neuron, and the number of its record into place.

    h is zero for what is below its limit; reached[call * EACH] grows by the number of neurons that are not. BIAS: where
    a record's bias is; 0 for none. LISTED: `found` are records, whatever their expert, and `at` says where among
    `values` each one's is. GROUPS: so many times `TOGETHER` marks of each call are `found`, values are of all neurons,
    and the interval in h and place and the number in counts (P, 2) are written here; 0 for a list.
    """
    call = tl.program_id(0)
    blocks = tl.cdiv(neurons, ROWS)
    marks = found + call * marks_of(blocks)
    if GROUPS:
        until = marked_until(marks, blocks, GROUPS)
        begin = call * neurons
        end = begin + tl.max(until, 0)
        if tl.program_id(1) == 0:
            tl.store(begins + call, begin.to(tl.int64))
            tl.store(ends + call, end.to(tl.int64))
            tl.store(counts + 2 * call, (end - begin).to(tl.int64))
    else:
        begin = tl.load(begins + call).to(tl.int32)  # of few tokens: registers are short
        end = tl.load(ends + call).to(tl.int32)
    token = tl.load(tokens + call)
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(begin + tl.program_id(1) * ROWS, end, tl.num_programs(1) * ROWS):
        i = start + tl.arange(0, ROWS)
        live = i < end
        there = tl.minimum(i, end - 1)  # what is past the end is the last one again
        if GROUPS:
            row = nth_marked(marks, there - begin, until, GROUPS, ROWS).to(tl.int64)
            there = begin + row
        else:
            row = tl.load(found + there).to(tl.int64)
        if LISTED:
            value = tl.load(values + tl.load(at + there))
        else:
            row += tl.load(experts + call) * neurons.to(tl.int64)
            value = tl.load(values + there)
        product = value.to(tl.float32)
        if FUNCTION != UNGATED:
            z = dot_rows(data, data, data, row, x, token, V, BLOCK)
            if BIAS:
                z += load_float(data, row * V.row + BIAS, live)
            product *= applied(z, FUNCTION)
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
    begin = tl.load(begins + call).to(tl.int32)
    end = tl.load(ends + call).to(tl.int32)
    size = tl.cdiv(tl.cdiv(end - begin, parts), ROWS) * ROWS
    begin += part * size
    end = tl.minimum(end, begin + size)
    out = partial + (call.to(tl.int64) * parts + part) * V.n
    if V.scale_row == V.row:  # in the same record, so that one address serves both
        scale = data
        zero = data
    if V.fast:
        _down_words(h, place, begin, end, data, scale, zero, out, block, magic, V, ROWS, BLOCK)
    else:
        _down_columns(h, place, begin, end, data, scale, zero, out, block, V, ROWS, BLOCK)


@device_code()
def _down_words(
    h, place, begin, end, data, scale, zero, out, block, magic,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over records of h times the columns that a block of their words holds.

    A thread has four neighbouring words, of one record after the other, and adds up every field of theirs by itself.
    """
    two_23 = tl.load(magic)
    fields: tl.constexpr = len(V.shifts)
    sets: tl.constexpr = V.sets
    lanes: tl.constexpr = V.lanes
    planes: tl.constexpr = fields // lanes
    quads: tl.constexpr = BLOCK // 4
    side: tl.constexpr = ROWS // UNDER_WAY  # records side by side in a warp
    quad = (block * quads + tl.arange(0, quads))[None, :, None]
    word = quad * 4 + tl.arange(0, 4)[None, None, :]
    within = quad * 4 < V.words
    # The first word's scale is that of all four, unless groups are as small as that. Neighbouring groups must not be
    # loaded as one: each thread has those of its own words.
    scaled = quad * 4 if V.group % 16 == 0 else word
    groups = ()
    for group in tl.static_range(sets):
        of_set = group_of(scaled, group * (fields // sets), V) if V.bits < 16 else scaled
        groups = groups + (unseen(of_set + tl.zeros((side, 1, 1), tl.int32), V),)  # noqa: RUF005
    at = begin + tl.arange(0, side)
    records = ()
    for i in tl.static_range(UNDER_WAY):
        records = records + (_record(h, place, at + i * side, end),)  # noqa: RUF005 (Triton knows no unpacking)
    sums = ()
    for _ in tl.static_range(fields):
        sums = sums + (tl.zeros((side, quads, 4), tl.float32),)  # noqa: RUF005
    zeros = ()
    for _ in tl.static_range(sets):
        zeros = zeros + (tl.zeros((side, quads, scaled.shape[2]), tl.float32),)  # noqa: RUF005
    for _ in range(begin, end, ROWS):
        asked = ()
        for i in tl.static_range(UNDER_WAY):
            asked = asked + (_asked(data, scale, zero, records[i], word, groups, within, V),)  # noqa: RUF005
        hs = (records[0][0], records[1][0], records[2][0], records[3][0])
        at += ROWS
        records = ()
        for i in tl.static_range(UNDER_WAY):
            records = records + (_record(h, place, at + i * side, end),)  # noqa: RUF005
        for i in tl.static_range(UNDER_WAY):
            sums, zeros = _added(sums, zeros, hs[i][:, None, None], asked[i], two_23, V)
    first = tl.reshape(first_column(quad * 4, V), (quads, 1)) + tl.arange(0, 4 * V.lanes)[None, :]
    for plane in tl.static_range(planes):
        of_plane = ()
        for lane in tl.static_range(lanes):
            exact = sums[plane * lanes + lane] * undo_field(plane * lanes + lane, V)
            of_plane = of_plane + (exact - zeros[plane * sets // planes] * zero_step(V),)  # noqa: RUF005
        total = tl.sum(tl.reshape(joined(of_plane, V.lanes), (side, quads, 4 * V.lanes)), 0)
        tl.store(out + first + plane * (64 // planes), total, mask=tl.reshape(within, (quads, 1)))


@device_code()
def _asked(data, scale, zero, record, word, groups, within, V: tl.constexpr):
    """Words of records, and each set's scales and zeros; of those with an h alone."""
    live = (record[0] != 0.0)[:, None, None] & within
    rows = record[1][:, None, None]
    words = load_words(data, rows, word, live, V)
    sets: tl.constexpr = V.sets
    found = ()
    if V.bits != 16:
        for group in tl.static_range(sets):
            found = found + (load_scale(scale, zero, rows, groups[group], live, V),)  # noqa: RUF005
    return words, found


@device_code()
def _added(sums, zeros, hs, asked, magic, V: tl.constexpr):
    """Sums of fields and of zeros with those of more records, by their h."""
    fields: tl.constexpr = len(V.shifts)
    sets: tl.constexpr = V.sets
    new_sums = ()
    new_zeros = ()
    for group in tl.static_range(sets):
        factor = hs
        if V.bits != 16:
            factor = hs * asked[1][group][0]
            new_zeros = new_zeros + (zeros[group] + factor * asked[1][group][1],)  # noqa: RUF005
        else:
            new_zeros = new_zeros + (zeros[group],)  # noqa: RUF005
        for i in tl.static_range(group * (fields // sets), (group + 1) * (fields // sets)):
            new_sums = new_sums + (sums[i] + factor * field(asked[0], magic, i, V),)  # noqa: RUF005
    return new_sums, new_zeros


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
    row = tl.load(place + at, mask=at < end, other=0)
    return tl.load(h + at, mask=at < end, other=0.0), row.to(tl.uint32).to(tl.int64)  # one multiplication fewer


@device_code("calls", "hidden")
def combine_kernel(
    tokens, partial, stream, y, calls, hidden,
    ADD: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y (B, H): the partial sums of every token's calls, in their order; zero for a token without one. ADD: to the
    stream (B, H). EACH: `calls` are those of each token, one token's behind another's; else of all tokens.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    begin = token * calls * PARTS if EACH else 0
    end = begin + calls * PARTS
    for start in range(begin, end, ROWS):  # rows without their calls: nobody waits to know whose a row is
        row = start + tl.arange(0, ROWS)
        there = row < end
        mine = there & (tl.load(tokens + row // PARTS, mask=there, other=-1) == token)
        at = row.to(tl.int64)[:, None] * hidden + column[None, :]
        total += tl.sum(tl.load(partial + at, mask=mine[:, None] & within[None, :], other=0.0), 0)
    if ADD:
        total += tl.load(stream + token.to(tl.int64) * hidden + column, mask=within, other=0.0).to(tl.float32)
    tl.store(y + token.to(tl.int64) * hidden + column, total.to(y.dtype.element_ty), mask=within)
