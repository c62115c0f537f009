# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Reading stored vectors inside a kernel: 32-bit words of codes in the fast paths, single codes in the general one.

Products with x. A thread has whole chunks of 64 codes of a row, loaded 16 bytes at a time, and x in signed digits of
8 bits, chunk by chunk, exactly as the CPU has them (`spread_kernel`). A mask leaves every second or fourth code of a
word in its byte, and one instruction multiplies four of them by four digits and adds up (dp4a, on every card since
2016). Sums of a chunk are exact integers, so what a card finds active is what a CPU finds. The affine code costs
nothing per code: sum (q - zero) * scale * x = scale * (sum q x - zero * sum x), with one scale for each chunk and
thread. Compiled for 8.6, everything in the loop counted, a code of 2, 3 or 4 bits takes 1.1, 1.6 and 1.1 instructions
with x of 8 bits, 0.3 more with 15 (`tests/kernels/triton/test_processes.py`), that is 22 bytes or more for each
multiprocessor and clock, where the memory of an RTX 3060 gives 7.2.

Sums of down columns (`swiglu.py`): `word & mask | 2**23's bits` (one LOP3) *is* the float 2**23 + q * 2**shift, one
addition takes the 2**23 off exactly, one FMA multiplies it. The factor 2**shift is undone at the end.

Numbers of 16 bits go pair by pair through float32, with x in that order (`spread_pairs_kernel`).
"""

from __future__ import annotations

import triton.language as tl

from ..activation import CLAMP, FUNCTIONS, LIMIT, STEEPNESS
from .jit import device_code

_CLAMP, _STEEPNESS, _LIMIT = tl.constexpr(CLAMP), tl.constexpr(STEEPNESS), tl.constexpr(LIMIT)
UNGATED = tl.constexpr(FUNCTIONS.index("one"))  # of a projection that is not there
TWO_23 = tl.constexpr(8388608.0)


@device_code()
def load_words(data, row, word, live, V: tl.constexpr):
    """Words (R, W) of rows (R, 1): a pair, of which all widths but 3 bit use the first alone.

    3-bit codes lie as a plane of low halves and a plane of high bits; the two are joined here into 4-bit fields, the
    even planes of 16 codes in one word and the odd ones in the other.
    """
    base = data.to(tl.pointer_type(tl.int32)) + row * (V.row // 4) + V.codes // 4
    if V.bits != 3:
        words = tl.load(base + word, mask=live, other=0)
        return words, words
    chunk = word // 4
    block = chunk // 4
    # Words of low halves in this block of 256 codes; the last block may be shorter.
    lows = 4 * tl.minimum(4, V.n // 64 - 4 * block)
    low = tl.load(base + block * 24 + word % 16, mask=live, other=0)
    high = tl.load(base + block * 24 + lows + chunk % 4 * 2 + word % 2, mask=live, other=0)
    high = high >> (word // 2 % 2)
    even = (low & 0x33333333) | ((high & 0x11111111) << 2)
    odd = ((low >> 2) & 0x33333333) | (high & 0x44444444)
    return even, odd


@device_code()
def field(words, magic, INDEX: tl.constexpr, V: tl.constexpr):
    """Field INDEX of every word as float32: its code divided by `undo_field`.

    `magic` is 2**23's bits, loaded from memory (`launch.magic`): LOP3 takes one operand that is no register, the mask,
    and would be issued twice per code if magic were a constant or an argument.
    """
    if V.bits == 16:
        if V.bfloat16:  # by hand: compute capability 7.5 knows no bfloat16
            half = words[0] << 16 if INDEX == 0 else words[0] & -65536
            return half.to(tl.float32, bitcast=True)
        return (words[0] >> (16 * INDEX)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    word = words[INDEX // 4 % 2] if V.bits == 3 else words[0]
    if V.shifts[INDEX] >= 16:
        word = unseen(word >> 16, V)  # else each field of it would be shifted by itself
    mask: tl.constexpr = ((1 << V.bits) - 1) << (V.shifts[INDEX] % 16)
    return ((word & mask) | magic).to(tl.float32, bitcast=True) - TWO_23


@device_code()
def undo_field(INDEX: tl.constexpr, V: tl.constexpr):
    """What a field's value must be multiplied by to be its code."""
    exponent: tl.constexpr = 0 if V.bits == 16 else V.shifts[INDEX] % 16
    return 1.0 / (1 << exponent)


@device_code()
def first_column(word, V: tl.constexpr):
    """The column of a word's first code."""
    return word // V.per_chunk * 64 + word % V.per_chunk * V.lanes


@device_code()
def load_half(data, at, live):
    """float16 at byte offsets `at`, which may be odd, as float32."""
    low = tl.load(data + at, mask=live, other=0).to(tl.int16)
    high = tl.load(data + at + 1, mask=live, other=0).to(tl.int16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@device_code()
def group_of(word, INDEX: tl.constexpr, V: tl.constexpr):
    """The group of field INDEX of every word."""
    return (first_column(word, V) + V.columns[INDEX]) // V.group


@device_code()
def load_scale(scale, zero, row, group, live, V: tl.constexpr):
    """Scale and zero of a group of every row, the zero in steps of `zero_step`."""
    if V.scale_bytes == 1:
        at = row * V.scale_row + group
        s = _scale_of_byte(tl.load(scale + at + V.scales, mask=live, other=0))
        z = tl.load(zero + at + V.zeros, mask=live, other=0)
        return s, z.to(tl.float32)
    if V.fast:
        at = row * (V.scale_row // 2) + group
        s = tl.load(scale.to(tl.pointer_type(tl.float16)) + V.scales // 2 + at, mask=live, other=0.0)
        z = tl.load(zero.to(tl.pointer_type(tl.float16)) + V.zeros // 2 + at, mask=live, other=0.0)
        return s.to(tl.float32), z.to(tl.float32)
    at = row * V.scale_row + group * 2
    return load_half(scale, at + V.scales, live), load_half(zero, at + V.zeros, live)


@device_code()
def zero_step(V: tl.constexpr):
    """What a stored zero counts in, see `codes.widened`."""
    return (1 << V.bits) / 256 if V.scale_bytes == 1 else 1.0


@device_code()
def _scale_of_byte(byte):
    """See `codes.scale_of_byte`."""
    return ((byte.to(tl.int16) << 6) + 0x0800).to(tl.float16, bitcast=True).to(tl.float32)


@device_code()
def load_values(data, scale, zero, row, column, live, V: tl.constexpr):
    """Weights (R, W) of rows (R, 1) and columns (1, W) as float32: the general path, one load per code."""
    base = data + row * V.row + V.codes
    if V.bits == 16:
        low = tl.load(base + 2 * column, mask=live, other=0).to(tl.int32)
        high = tl.load(base + 2 * column + 1, mask=live, other=0).to(tl.int32)
        if V.bfloat16:
            return ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)
        return (low | (high << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if V.bits == 3:
        block = column // 256
        inside = tl.minimum(256, V.n - block * 256)  # codes of this block
        at = column % 256
        low = load_plane(base + block * 96, at, inside, live, 2)
        lows = inside // 64 * 16 + (inside % 64 * 2 + 7) // 8  # bytes of the plane of low halves
        code = low | (load_plane(base + block * 96 + lows, at, inside, live, 1) << 2)
    else:
        code = load_plane(base, column, V.n, live, V.bits)
    s, z = load_scale(scale, zero, row, column // V.group, live, V)
    return (code.to(tl.float32) - z * zero_step(V)) * s


@device_code()
def load_tile(data, scale, zero, row, start, magic, V: tl.constexpr):
    """Weights (R, 64) of rows (R,), from a multiple of 64 on, as float32; 0 past the end."""
    if V.fast:
        tile = _tile_of_words(data, scale, zero, row, start, magic, V)
    else:
        column = start + tl.arange(0, 64)
        tile = load_values(data, scale, zero, row[:, None], column[None, :], (column < V.n)[None, :], V)
    return tile


@device_code()
def _tile_of_words(data, scale, zero, row, start, magic, V: tl.constexpr):
    """The same of words: each field becomes a number, planes are put one behind the other. magic: see `field`."""
    lanes: tl.constexpr = V.lanes
    planes: tl.constexpr = len(V.shifts) // V.lanes
    per_set: tl.constexpr = planes // V.sets
    quads: tl.constexpr = V.per_chunk // 4
    quad = (start // 64 * quads + tl.arange(0, quads))[None, :, None]
    word = quad * 4 + tl.arange(0, 4)[None, None, :]
    scaled = quad * 4 if V.group % 16 == 0 else word  # the first word's scale is that of all four
    rows, there = row[:, None, None], tl.full((1, 1, 1), True, tl.int1)  # so that no load has a mask
    two_23 = tl.load(magic)
    words = load_words(data, rows, word, there, V)
    s = 1.0
    z = 0.0
    found = ()
    for plane in tl.static_range(planes):
        if V.bits != 16 and plane % per_set == 0:
            s, z = load_scale(scale, zero, rows, group_of(scaled, plane * lanes, V), there, V)
            z *= s * zero_step(V)
        of_plane = ()
        for lane in tl.static_range(lanes):
            value = field(words, two_23, plane * lanes + lane, V)
            if V.bits != 16:
                value = value * (s * undo_field(plane * lanes + lane, V)) - z
            of_plane = of_plane + (value,)  # noqa: RUF005 (Triton knows no unpacking)
        found = found + (tl.reshape(joined(of_plane, lanes), (row.shape[0], 64 // planes)),)  # noqa: RUF005
    if planes == 1:
        tile = found[0]
    elif planes == 2:
        tile = tl.permute(joined(found, 2), (0, 2, 1))
    else:
        tile = tl.permute(joined(found, 4), (0, 2, 3, 1))
    return tl.reshape(tile, (row.shape[0], 64))


@device_code()
def joined(parts, COUNT: tl.constexpr):
    """Two tensors along a new last dimension, or four along two."""
    if COUNT == 2:
        together = tl.join(parts[0], parts[1])
    else:
        together = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return together


@device_code()
def load_plane(base, at, n, live, BITS: tl.constexpr):
    """Code `at` of n codes packed in chunks of 64."""
    chunk = at // 64
    size = (tl.minimum(64, n - chunk * 64) * BITS + 7) // 8  # bytes of this chunk
    size = tl.maximum(size, 1)  # columns past the end are masked, but still divide
    code = tl.load(base + chunk * (8 * BITS) + at % 64 % size, mask=live, other=0).to(tl.int32)
    return (code >> (at % 64 // size * BITS)) & ((1 << BITS) - 1)


@device_code()
def spread_kernel(x, out, N: tl.constexpr, DIGITS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """See `spread_chunks`; a program for each token and BLOCK chunks."""
    spread_chunks(x, out, tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK, N, DIGITS, WORDS, BLOCK)


@device_code()
def spread_chunks(
    x, out, token, first, N: tl.constexpr, DIGITS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x (B, N) -> for each token, in WORDS of 32 bits, N * DIGITS bytes, then two float32 for each chunk: what a unit
    of its digits is worth, and the sum of what its digits stand for.

    A chunk's digits lie one digit after the other, the upper one first: x = unit * (hi * 2^7 + lo), as
    `reference.rounded` has it. A chunk with what is not finite has a unit that is not a number.
    """
    chunks: tl.constexpr = N // 64
    chunk = first + tl.arange(0, BLOCK)
    within = chunk < chunks
    column = tl.arange(0, 64)
    at = chunk[:, None] * 64 + column[None, :]
    value = tl.load(x + token * N + at, mask=within[:, None], other=0.0).to(tl.float32)
    _spread_values(value, out + token * WORDS, chunk, N, DIGITS)


@device_code()
def spread_normed_kernel(
    x, weight, out, eps,
    N: tl.constexpr, DIGITS: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`spread_kernel` of x / rms(x) * weight as x's type has it; each program adds up all squares for itself."""
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    x += tl.program_id(0).to(tl.int64) * N
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        one = tl.load(x + i, mask=i < N, other=0.0).to(tl.float32)
        squares += one * one
    at = chunk[:, None] * 64 + tl.arange(0, 64)[None, :]
    within = (chunk < N // 64)[:, None]
    own = tl.load(weight + at, mask=within, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=within, other=0.0).to(tl.float32) / tl.sqrt(tl.sum(squares, 0) / N + eps) * own
    value = value.to(x.dtype.element_ty).to(tl.float32)
    _spread_values(value, out + tl.program_id(0).to(tl.int64) * WORDS, chunk, N, DIGITS)


@device_code()
def _spread_values(value, words, chunk, N: tl.constexpr, DIGITS: tl.constexpr):
    """Store chunks (C,) of a token's x, value (C, 64)."""
    chunks: tl.constexpr = N // 64
    within = chunk < chunks
    top = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as bits: NaN and infinity are the largest
    largest = top.to(tl.float32, bitcast=True)
    nothing = top < 0x0D800000  # below 2^-100
    most: tl.constexpr = 127.0 * (1 << 7 * (DIGITS - 1))
    inverse = tl.where(nothing | (top >= 0x7F800000), 0.0, most / tl.where(nothing, 1.0, largest))
    # Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
    rest = (value * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    rest = tl.where((inverse == 0.0)[:, None], 0, rest)
    total = tl.sum(rest, 1)
    column = tl.arange(0, 64)
    to = words.to(tl.pointer_type(tl.int8)) + (chunk[:, None] * (64 * DIGITS) + column[None, :])
    for digit in tl.static_range(DIGITS - 1, 0, -1):
        low = ((rest + 64) & 127) - 64
        tl.store(to + 64 * digit, low.to(tl.int8), mask=within[:, None])
        rest = (rest - low) >> 7
    tl.store(to, rest.to(tl.int8), mask=within[:, None])
    unit = tl.where(nothing, 0.0, tl.where(top >= 0x7F800000, float("nan"), largest / most))
    units = words.to(tl.pointer_type(tl.float32)) + (chunks * 16 * DIGITS + chunk)
    tl.store(units, unit, mask=within)
    tl.store(units + chunks, total.to(tl.float32), mask=within)


@device_code()
def spread_pairs_kernel(x, out, V: tl.constexpr, BLOCK: tl.constexpr):
    """x (B, n) -> (B, fields, words) float32: the x of each field of a word, word by word."""
    fields: tl.constexpr = len(V.shifts)
    token = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = word < V.words
    x_at = x + token * V.n + first_column(word, V)
    out_at = out + token * (fields * V.words) + word
    for i in tl.static_range(fields):
        xi = tl.load(x_at + V.columns[i], mask=within, other=0.0).to(tl.float32)
        tl.store(out_at + i * V.words, xi, mask=within)


@device_code()
def dot_rows(data, scale, zero, row, x, token, V: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (R,) of a stored matrix times one token of spread x: (R,) float32. All rows are read."""
    if V.digits:
        return _dot_chunks(data, scale, zero, row, x, token, V, BLOCK)
    rows = row[:, None]
    fields: tl.constexpr = len(V.shifts) if V.fast else 1
    x += token * (fields * V.words)
    acc = tl.zeros((row.shape[0], BLOCK), tl.float32)
    for start in range(0, V.words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        within = word < V.words
        if V.fast:
            words = load_words(data, rows, word[None, :], within[None, :], V)
            for i in tl.static_range(fields):
                xi = tl.load(x + i * V.words + word, mask=within, other=0.0)
                acc += field(words, 0, i, V) * xi[None, :]
        else:
            xi = tl.load(x + word, mask=within, other=0.0)
            acc += load_values(data, scale, zero, rows, word[None, :], within[None, :], V) * xi[None, :]
    return tl.sum(acc, 1)


@device_code()
def _dot_chunks(data, scale, zero, row, x, token, V: tl.constexpr, BLOCK: tl.constexpr):
    """The same of codes and digits, BLOCK chunks at a time."""
    chunks: tl.constexpr = V.n // 64
    even: tl.constexpr = chunks % BLOCK == 0
    digits: tl.constexpr = V.digits
    planes: tl.constexpr = 8 // V.bits if V.bits != 3 else 2
    fours: tl.constexpr = V.bits // 2 if V.bits > 2 else 1
    x += token * V.x_words
    units = x.to(tl.pointer_type(tl.float32)) + chunks * 16 * V.digits
    lane = tl.arange(0, 4)[None, None, :]
    words = data.to(tl.pointer_type(tl.int32)) + (row[:, None, None] * (V.row // 4) + V.codes // 4)
    scales = scale + (row[:, None] * V.scale_row + V.scales)
    zeros = zero + (row[:, None] * V.scale_row + V.zeros)
    if V.scale_bytes == 2:
        scales = scales.to(tl.pointer_type(tl.float16))
        zeros = zeros.to(tl.pointer_type(tl.float16))
    acc = tl.zeros((row.shape[0], BLOCK), tl.float32)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        if not even:  # what is past the end is the last one again, times nothing
            chunk = tl.minimum(chunk, chunks - 1)
        # Neighbouring groups must not be loaded as one: each thread has its own chunk's.
        group = unseen((chunk // (V.group // 64))[None, :] + tl.zeros((row.shape[0], BLOCK), tl.int32), V)
        s = tl.load(scales + group)
        s = _scale_of_byte(s) if V.scale_bytes == 1 else s.to(tl.float32)
        z = tl.load(zeros + group).to(tl.float32)
        dots = tl.zeros((row.shape[0], BLOCK), tl.int32)
        x_at = x + (chunk[None, :, None] * (16 * V.digits) + lane)
        upper = tl.zeros((row.shape[0], BLOCK), tl.float32)
        if V.bits == 3:
            # A chunk's planes of low halves, four words, and of high bits, two; then codes of even and of odd planes.
            pair = tl.arange(0, 2)[None, None, :]
            if even and BLOCK % 4 == 0:  # whole blocks, four chunks each
                first = tl.arange(0, BLOCK)
                low_at = start * 6 + (first // 4 * 24 + first % 4 * 4)
                high_at = start * 6 + (first // 4 * 24 + 16 + first % 4 * 2)
            else:
                block = chunk // 4
                low_at = block * 24 + chunk % 4 * 4
                high_at = block * 24 + 4 * tl.minimum(4, chunks - 4 * block) + chunk % 4 * 2
            low = _apart(tl.load(words + (low_at[None, :, None] + lane)))
            high, other = tl.split(tl.load(words + (high_at[None, :, None] + pair)))
            even_codes = (
                _joined(low[0], high << 2), _joined(low[1], other << 2),
                _joined(low[2], high << 1), _joined(low[3], other << 1),
            )  # fmt: skip
            odd_codes = (
                _joined(low[0] >> 2, high), _joined(low[1] >> 2, other),
                _joined(low[2] >> 2, high >> 1), _joined(low[3] >> 2, other >> 1),
            )  # fmt: skip
            for digit in tl.static_range(digits):
                own = x_at + 16 * digit
                dots = _dot_words(odd_codes, _apart(tl.load(own + 12)), dots, 1, V)
                dots = _dot_words(even_codes, _apart(tl.load(own + 8)), dots, 1, V) >> 4
                dots = _dot_words(odd_codes, _apart(tl.load(own + 4)), dots, 0, V)
                dots = _dot_words(even_codes, _apart(tl.load(own)), dots, 0, V)
                if digit == 0 and V.digits == 3:  # all three would not fit 32 bits
                    upper = dots.to(tl.float32) * (1 << 14)
                    dots = tl.zeros((row.shape[0], BLOCK), tl.int32)
                elif digit < V.digits - 1:
                    dots = dots << 11
        else:
            per_chunk: tl.constexpr = 2 * V.bits
            at = words + (chunk[None, :, None] * per_chunk + lane)
            for digit in tl.static_range(digits):
                for plane in tl.static_range(planes - 1, -1, -1):
                    for four in tl.static_range(fours):
                        codes = _apart(tl.load(at + 4 * four))
                        own = _apart(tl.load(x_at + (16 * digit + plane * per_chunk + 4 * four)))
                        dots = _dot_words(codes, own, dots, plane, V)
                    if plane:  # the sums so far are of codes at a higher bit: exact multiples
                        dots = dots >> V.bits
                if digit == 0 and V.digits == 3:  # all three would not fit 32 bits
                    upper = dots.to(tl.float32) * (1 << 14)
                    dots = tl.zeros((row.shape[0], BLOCK), tl.int32)
                elif digit < V.digits - 1:
                    dots = dots << (7 + V.bits * (planes - 1))
        unit = tl.load(units + chunk)
        if not even:
            unit = tl.where(start + tl.arange(0, BLOCK) < chunks, unit, 0.0)
        total = tl.load(units + chunks + chunk) * zero_step(V)
        acc += s * unit[None, :] * (upper + dots.to(tl.float32) - z * total[None, :])
    return tl.sum(acc, 1)


@device_code()
def _apart(words):
    """The four words (R, C, 4) of each thread, one by one."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@device_code()
def _joined(low, high):
    """Codes of 3 bits, with others between them: the lower two bits of each 4, and a bit from elsewhere."""
    return (low & 0x33333333) | (high & ~0x33333333)


@device_code()
def _dot_words(words, x, dots, PLANE: tl.constexpr, V: tl.constexpr):
    """dots plus the codes of one plane of four words times digits of x, as multiples of the plane's lowest bit."""
    dots = _dot_bytes(_plane(words[0], PLANE, V), x[0], dots, V)
    dots = _dot_bytes(_plane(words[1], PLANE, V), x[1], dots, V)
    dots = _dot_bytes(_plane(words[2], PLANE, V), x[2], dots, V)
    return _dot_bytes(_plane(words[3], PLANE, V), x[3], dots, V)


@device_code()
def _plane(word, PLANE: tl.constexpr, V: tl.constexpr):
    """The codes of one plane in the bytes of a word, where they are."""
    if V.bits == 8:
        return word
    field: tl.constexpr = 4 if V.bits == 3 else V.bits
    mask: tl.constexpr = (((1 << V.bits) - 1) << (field * PLANE)) * 0x01010101
    return word & (mask - (1 << 32) if mask >= 1 << 31 else mask)


@device_code()
def _dot_bytes(codes, x, dots, V: tl.constexpr):
    """dots plus four unsigned bytes times four signed ones."""
    if V.ptx:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, dots], tl.int32, True, 1
        )  # fmt: skip
    for i in tl.static_range(4):
        dots += ((codes >> (8 * i)) & 255) * ((x << (24 - 8 * i)) >> 24)
    return dots


@device_code()
def unseen(number, V: tl.constexpr):
    """The number, of which the compiler knows nothing from here on."""
    if V.ptx:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], tl.int32, True, 1)
    return number


@device_code()
def applied(z, FUNCTION: tl.constexpr):
    """The function of a projection's product with x, bias added, by its place among `activation.FUNCTIONS`."""
    if FUNCTION == 1:
        return z / (1.0 + tl.exp(-z))
    if FUNCTION == 2:
        z = tl.where(z > _CLAMP, _CLAMP, z)  # a minimum would lose NaN
        return z / (1.0 + tl.exp(-z * _STEEPNESS))
    if FUNCTION == 3:
        return tl.where(z > _CLAMP, _CLAMP, tl.where(z < -_CLAMP, -_CLAMP, z)) + 1.0
    if FUNCTION == 4:
        return z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    if FUNCTION == 5:
        z = tl.where(z > _LIMIT, _LIMIT, z)
        return z / (1.0 + tl.exp(-z))
    if FUNCTION == 6:
        return tl.where(z > _LIMIT, _LIMIT, tl.where(z < -_LIMIT, -_LIMIT, z))
    if FUNCTION == 8:
        return tl.where(z < 0, 0.0, z * z)
    return z


@device_code()
def load_float(data, at, live):
    """float32 at byte offsets `at`, which may be odd."""
    word = tl.load(data + at, mask=live, other=0).to(tl.int32)
    for i in tl.static_range(1, 4):
        word |= tl.load(data + at + i, mask=live, other=0).to(tl.int32) << (8 * i)
    return word.to(tl.float32, bitcast=True)
