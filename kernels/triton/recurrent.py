# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
"""One token of the mixers that keep a state: the gated delta rule, and the short convolution.

As in attention.py, the position and the address of the layer's states are read from device memory, so that a captured
launch serves every token. States lie in a ring: the one before the token is at its position modulo their number, the
one behind it goes to the next place, and no program reads what another one writes. One program computes a head with its
whole state in registers, which is read once and written once; heads that share queries and keys compute these each for
themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from .jit import device_code


class DeltaShape(NamedTuple):
    """The sizes of a gated delta rule, as in `mixers.delta.Delta`; all of it becomes constants of the compiled kernel.

    Attributes:
        group: heads of values that share one of queries and keys. channels: of the convolution. ring: of how many
            states a layer has.
    """

    heads: int
    group: int
    key_dim: int
    value_dim: int
    taps: int
    channels: int
    eps: float
    ring: int


@device_code()
def states_of(addresses, position, layer, NUMBERS: tl.constexpr, RING: tl.constexpr):
    """Where a layer's states of NUMBERS numbers before and after the token are."""
    states = tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(tl.float32)), 16)
    place = tl.load(position) % RING
    return states + place * NUMBERS, states + (place + 1) % RING * NUMBERS


@device_code()
def convolved(now, before, after, weights, c, live, mine, TAPS: tl.constexpr, CHANNELS: tl.constexpr):
    """Channels c (N,) behind the convolution, whose newest numbers are `now`. With `mine` also what the next token's
    sees of them.
    """
    total = now * tl.load(weights + (TAPS - 1) * CHANNELS + c, mask=live, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        was = tl.load(before + tap * CHANNELS + c, mask=live, other=0.0)
        total += was * tl.load(weights + tap * CHANNELS + c, mask=live, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(after + (tap - 1) * CHANNELS + c, was, mask=mine)
    tl.store(after + (TAPS - 2) * CHANNELS + c, now, mask=mine)
    return total


@device_code()
def silu(x):
    """x sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@device_code()
def mixed(qkv, before, after, weights, c, live, mine, A: tl.constexpr):
    """Channels c (N,) of queries, keys or values, which the convolution gives."""
    taps: tl.constexpr = A.taps
    channels: tl.constexpr = A.channels
    now = tl.load(qkv + c, mask=live, other=0.0).to(tl.float32)
    return silu(convolved(now, before, after, weights, c, live, mine, taps, channels))


@device_code("layer")
def delta_kernel(
    qkv, gates, addresses, position, conv, decay, bias, norm, y, layer,
    A: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """y (heads * D): one head's output. Writes its state and, where it is the first that shares them, what the next
    token's convolution sees of queries and keys.
    """
    head = tl.program_id(0)
    window: tl.constexpr = (A.taps - 1) * A.channels
    numbers: tl.constexpr = window + A.heads * A.key_dim * A.value_dim
    ring: tl.constexpr = A.ring
    before, after = states_of(addresses, position, layer, numbers, ring)
    k = tl.arange(0, KEYS)
    d = tl.arange(0, VALUES)
    in_key = k < A.key_dim
    in_value = d < A.value_dim
    within = in_key[:, None] & in_value[None, :]
    at = window + (head * A.key_dim + k)[:, None] * A.value_dim + d[None, :]
    state = tl.load(before + at, mask=within, other=0.0)
    shared = head // A.group
    wide: tl.constexpr = A.heads // A.group * A.key_dim
    first = in_key & (tl.zeros((KEYS,), tl.int32) + head % A.group == 0)
    q = mixed(qkv, before, after, conv, shared * A.key_dim + k, in_key, first, A)
    key = mixed(qkv, before, after, conv, wide + shared * A.key_dim + k, in_key, first, A)
    value = mixed(qkv, before, after, conv, 2 * wide + head * A.value_dim + d, in_value, in_value, A)
    q *= 1.0 / tl.sqrt((tl.sum(q * q, 0) + 1e-6) * A.key_dim)
    key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(gates + head).to(tl.float32)))
    step = tl.load(gates + A.heads + head).to(tl.float32) + tl.load(bias + head)
    # log(1 + exp(step)); what is not a number stays so.
    softplus = tl.where(step > 0.0, step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    state *= tl.exp(-tl.load(decay + head) * softplus)
    change = (value - tl.sum(key[:, None] * state, 0)) * beta
    state += key[:, None] * change[None, :]
    tl.store(after + at, state, mask=within)
    out = tl.sum(q[:, None] * state, 0)
    out *= 1.0 / tl.sqrt(tl.sum(out * out, 0) / A.value_dim + A.eps)
    out *= tl.load(norm + d, mask=in_value, other=0.0).to(tl.float32)
    place = head * A.value_dim + d
    gate = tl.load(qkv + A.channels + place, mask=in_value, other=0.0).to(tl.float32)
    tl.store(y + place, (out * silu(gate)).to(y.dtype.element_ty), mask=in_value)


@device_code("layer")
def convolve_kernel(
    given, addresses, position, conv, bias, y, layer,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, BIASED: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y (H): a block of channels of c * conv(b * x), where given (3 H) is b, c and x."""
    numbers: tl.constexpr = (TAPS - 1) * CHANNELS
    before, after = states_of(addresses, position, layer, numbers, RING)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    now = tl.load(given + c, mask=live, other=0.0).to(tl.float32)
    now *= tl.load(given + 2 * CHANNELS + c, mask=live, other=0.0).to(tl.float32)
    out = convolved(now, before, after, conv, c, live, live, TAPS, CHANNELS)
    if BIASED:
        out += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    out *= tl.load(given + CHANNELS + c, mask=live, other=0.0).to(tl.float32)
    tl.store(y + c, out.to(y.dtype.element_ty), mask=live)
