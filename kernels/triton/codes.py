# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Reading stored vectors inside a kernel: 32-bit words of codes in the fast path, single codes in the general one.

What bounds the fast path. An RTX 3060 reads 360 GB/s: 7.2 bytes per clock and SM, that is 29 two-bit codes, with 128
lanes to work on them, of which 64 can do integer arithmetic, and only 16 convert integers to floats. So a code must
cost few instructions and no conversion: `word & mask | 2**23's bits` (one LOP3) *is* the float 2**23 + q * 2**shift,
one addition takes the 2**23 off exactly, one FMA multiplies it by x. The factor 2**shift is undone on x (powers of two
are exact), so nothing is shifted. The affine code costs nothing per code either:
sum (q - zero) * scale * x = scale * (sum q x - zero * sum x).

What can be done to x alone is done once, by `spread_kernel`: field by field in the order of words, so that a thread
loads 16 bytes of it at a time, scaled, in float32, with the sums of x that the zeros need. Compiled for 8.6 the loop of
a 2-bit GEMV takes 4.2 instructions per code, everything counted.
"""

from __future__ import annotations

import triton.language as tl

from .jit import device_code

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
        word = word >> 16
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
    """Scale and zero of a group of every row."""
    if V.scale_bytes == 1:
        at = row * V.scale_row + group
        s = (tl.load(scale + at + V.scales, mask=live, other=0).to(tl.int16) << 6) + 0x0800  # codes.scale_of_byte
        z = tl.load(zero + at + V.zeros, mask=live, other=0)
        return s.to(tl.float16, bitcast=True).to(tl.float32), z.to(tl.float32) * ((1 << V.bits) / 256)
    if V.fast:
        at = row * (V.scale_row // 2) + group
        s = tl.load(scale.to(tl.pointer_type(tl.float16)) + V.scales // 2 + at, mask=live, other=0.0)
        z = tl.load(zero.to(tl.pointer_type(tl.float16)) + V.zeros // 2 + at, mask=live, other=0.0)
        return s.to(tl.float32), z.to(tl.float32)
    at = row * V.scale_row + group * 2
    return load_half(scale, at + V.scales, live), load_half(zero, at + V.zeros, live)


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
    return (code.to(tl.float32) - z) * s


@device_code()
def load_plane(base, at, n, live, BITS: tl.constexpr):
    """Code `at` of n codes packed in chunks of 64."""
    chunk = at // 64
    size = (tl.minimum(64, n - chunk * 64) * BITS + 7) // 8  # bytes of this chunk
    size = tl.maximum(size, 1)  # columns past the end are masked, but still divide
    code = tl.load(base + chunk * (8 * BITS) + at % 64 % size, mask=live, other=0).to(tl.int32)
    return (code >> (at % 64 // size * BITS)) & ((1 << BITS) - 1)


@device_code()
def spread_kernel(x, out, V: tl.constexpr, BLOCK: tl.constexpr):
    """x (B, n) -> (B, fields + sets, words) float32: each field's x, then each set's sum of x, word by word."""
    fields: tl.constexpr = len(V.shifts)
    sets: tl.constexpr = V.sets
    token = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = word < V.words
    x_at = x + token * V.n + first_column(word, V)
    out_at = out + token * ((fields + sets) * V.words) + word
    for group in tl.static_range(sets):
        total = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(group * (fields // sets), (group + 1) * (fields // sets)):
            xi = tl.load(x_at + V.columns[i], mask=within, other=0.0).to(tl.float32)
            total += xi
            tl.store(out_at + i * V.words, xi * undo_field(i, V), mask=within)
        tl.store(out_at + (fields + group) * V.words, total, mask=within)


@device_code()
def dot_rows(data, scale, zero, row, live, x, token, magic, V: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (R,) of a stored matrix times one token of spread x: (R,) float32."""
    rows = row[:, None]
    fields: tl.constexpr = len(V.shifts)
    sets: tl.constexpr = V.sets
    x += token * ((fields + sets) * V.words)
    acc = tl.zeros((row.shape[0], BLOCK), tl.float32)
    for start in range(0, V.words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        within = word < V.words
        both = live[:, None] & within[None, :]
        if V.fast:
            words = load_words(data, rows, word[None, :], both, V)
            for group in tl.static_range(sets):
                part = tl.zeros((row.shape[0], BLOCK), tl.float32)
                for i in tl.static_range(group * (fields // sets), (group + 1) * (fields // sets)):
                    xi = tl.load(x + i * V.words + word, mask=within, other=0.0)
                    part += field(words, magic, i, V) * xi[None, :]
                if V.bits == 16:
                    acc += part
                else:
                    at = group_of(word, group * (fields // sets), V)
                    s, z = load_scale(scale, zero, rows, at[None, :], both, V)
                    total = tl.load(x + (fields + group) * V.words + word, mask=within, other=0.0)
                    acc += s * (part - z * total[None, :])
        else:
            xi = tl.load(x + word, mask=within, other=0.0)
            acc += load_values(data, scale, zero, rows, word[None, :], both, V) * xi[None, :]
    return tl.sum(acc, 1)


@device_code()
def applied(z, FUNCTION: tl.constexpr):
    """The function of a projection's product with x, bias added, by its place among `activation.FUNCTIONS`."""
    if FUNCTION == 1:
        return z / (1.0 + tl.exp(-z))
    if FUNCTION == 2:
        z = tl.where(z > 7.0, 7.0, z)  # a minimum would lose NaN
        return z / (1.0 + tl.exp(-1.702 * z))
    if FUNCTION == 3:
        return tl.where(z > 7.0, 7.0, tl.where(z < -7.0, -7.0, z)) + 1.0
    if FUNCTION == 4:
        return z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    return z


@device_code()
def load_float(data, at, live):
    """float32 at byte offsets `at`, which may be odd."""
    word = tl.load(data + at, mask=live, other=0).to(tl.int32)
    for i in tl.static_range(1, 4):
        word |= tl.load(data + at + i, mask=live, other=0).to(tl.int32) << (8 * i)
    return word.to(tl.float32, bitcast=True)
