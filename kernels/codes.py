"""How codes of 2, 3, 4, 8 and 16 bits are packed into bytes and unpacked."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

WIDTHS = (2, 3, 4, 8, 16)
ALIGN = 64  # bytes: a cache line, and the alignment of every tensor and neuron record
CHUNK = 64  # codes that are packed together
THREE_BIT_BLOCK = 256  # 3-bit codes whose lower two bits are stored together: a register of them, then half a register


def check_width(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"no such width: {bits} bit; valid are {', '.join(map(str, WIDTHS))}")


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


def _plane_bytes(n: int, bits: int) -> int:
    full, rest = divmod(n, CHUNK)
    return full * (CHUNK * bits // 8) + -(-rest * bits // 8)


@cache
def packed_bytes(n: int, bits: int) -> int:
    """Bytes that `n` values of `bits` bits take (scales not counted)."""
    check_width(bits)
    if bits == 16:
        return 2 * n
    if bits == 3:
        full, rest = divmod(n, THREE_BIT_BLOCK)
        return full * (3 * THREE_BIT_BLOCK // 8) + _plane_bytes(rest, 2) + _plane_bytes(rest, 1)
    return _plane_bytes(n, bits)


def _spans(n: int, size: int) -> list[tuple[int, int]]:
    """How n values are cut: (number of pieces, values in each), the full pieces first, then the shorter last one."""
    return [(count, each) for count, each in ((n // size, size), (1, n % size)) if count and each]


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    """(N, n) codes below 2**bits -> (N, _plane_bytes(n, bits)) bytes."""
    per_byte = 8 // bits
    parts: list[Tensor] = []
    start = 0
    for chunks, each in _spans(codes.shape[1], CHUNK):
        size = -(-each // per_byte)
        padded = codes.new_zeros(codes.shape[0], chunks, per_byte * size)
        padded[:, :, :each] = codes[:, start : start + chunks * each].view(-1, chunks, each)
        start += chunks * each
        planes = padded.view(codes.shape[0], chunks, per_byte, size)
        packed = planes[:, :, 0].clone()
        for plane in range(1, per_byte):
            packed |= planes[:, :, plane] << (bits * plane)
        parts.append(packed.flatten(1))
    return torch.cat(parts, dim=1)


def _unpack_plane(packed: Tensor, n: int, bits: int) -> Tensor:
    """(N, _plane_bytes(n, bits)) bytes -> (N, n) codes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    parts: list[Tensor] = []
    start = 0
    for chunks, each in _spans(n, CHUNK):
        size = -(-each * bits // 8)
        part = packed[:, start : start + chunks * size].reshape(-1, chunks, 1, size)
        start += chunks * size
        planes = (part >> shifts) & ((1 << bits) - 1)
        parts.append(planes.flatten(2)[:, :, :each].flatten(1))
    return torch.cat(parts, dim=1) if len(parts) != 1 else parts[0]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes.

    Args:
        codes: (N, n) uint8, each below 2**bits.
        bits: 2, 3, 4 or 8.

    Returns:
        (N, packed_bytes(n, bits)) uint8.

    Raises:
        ValueError: another dtype, rank or width, or a code that does not fit.
    """
    if codes.dtype != torch.uint8 or codes.ndim != 2:
        raise ValueError(f"codes must be 2-D uint8, not {codes.ndim}-D {codes.dtype}")
    check_width(bits)
    if bits == 16:
        raise ValueError("16-bit values are stored as they are, not as codes")
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"code {int(codes.max())} does not fit {bits} bit")
    if bits == 8:
        return codes.clone()
    if not codes.numel():
        return codes.new_empty(codes.shape[0], packed_bytes(codes.shape[1], bits))
    if bits != 3:
        return _pack_plane(codes, bits)
    parts: list[Tensor] = []
    start = 0
    for blocks, size in _spans(codes.shape[1], THREE_BIT_BLOCK):
        part = codes[:, start : start + blocks * size].reshape(-1, size)
        start += blocks * size
        planes = torch.cat([_pack_plane(part & 3, 2), _pack_plane(part >> 2, 1)], dim=1)
        parts.append(planes.view(codes.shape[0], -1))
    return torch.cat(parts, dim=1)


def unpack_codes(packed: Tensor, n: int, bits: int) -> Tensor:
    """The inverse of `pack_codes`: (N, packed_bytes(n, bits)) uint8 -> (N, n) uint8.

    Raises:
        ValueError: the last dimension is not `packed_bytes(n, bits)`.
    """
    if bits == 16:
        raise ValueError("16-bit values are stored as they are, not as codes")
    if packed.dtype != torch.uint8 or packed.ndim != 2 or packed.shape[1] != packed_bytes(n, bits):
        raise ValueError(f"expected (N, {packed_bytes(n, bits)}) bytes, not {tuple(packed.shape)} {packed.dtype}")
    if bits == 8:
        return packed
    if not packed.numel():
        return packed.new_empty(packed.shape[0], n)
    if bits != 3:
        return _unpack_plane(packed, n, bits)
    parts: list[Tensor] = []
    start = 0
    for blocks, size in _spans(n, THREE_BIT_BLOCK):
        low, nbytes = _plane_bytes(size, 2), packed_bytes(size, 3)
        part = packed[:, start : start + blocks * nbytes].reshape(-1, nbytes)
        start += blocks * nbytes
        codes = _unpack_plane(part[:, :low], size, 2) | (_unpack_plane(part[:, low:], size, 1) << 2)
        parts.append(codes.view(packed.shape[0], -1))
    return torch.cat(parts, dim=1)


def split_codes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes (N, n) as two of 4 bits, the upper and the lower half of each: both (N, packed_bytes(n, 4))."""
    count, n = packed.shape
    whole = n // CHUNK * CHUNK
    first, second = packed[:, :whole].reshape(count, -1, 2, CHUNK // 2).unbind(2)  # which share a byte
    upper = [((first >> 4) | (second & 0xF0)).flatten(1)]
    lower = [((first & 15) | (second << 4)).flatten(1)]
    if whole < n:
        rest = packed[:, whole:]
        upper.append(pack_codes(rest >> 4, 4))
        lower.append(pack_codes(rest & 15, 4))
    return torch.cat(upper, 1), torch.cat(lower, 1)


def group_size(n: int, wanted: int = 64) -> int:
    """The largest group of at most `wanted` consecutive values that divides a vector of `n`."""
    return next(size for size in range(min(wanted, n), 0, -1) if n % size == 0)


SHORTEST = 4  # bits of the widest codes that may have scales and zeros of 8 bits
_SCALE_SHIFT, _LEAST_SCALE = 6, 0x0800  # of a float16's bits: what a byte leaves out, and those of 2^-13


def byte_below(scale: Tensor) -> Tensor:
    """The bytes, as int16, of the largest scales that a byte can hold and that are not above these; 0 if none is."""
    return ((scale.half().contiguous().view(torch.int16) - _LEAST_SCALE) >> _SCALE_SHIFT).clamp(0, 255)


def scale_of_byte(byte: Tensor) -> Tensor:
    """The scales, float32, that bytes stand for: float16 from 2^-13 to 7.75, with four bits of the exponent and as many
    of the fraction.
    """
    return ((byte.to(torch.int16).clamp_max(255) << _SCALE_SHIFT) + _LEAST_SCALE).view(torch.float16).float()


LARGEST_SCALE = float(scale_of_byte(torch.tensor(255)))  # that a byte can hold


def zero_in_steps(zero: Tensor, bits: int) -> Tensor:
    """The nearest zeros that a byte can hold: places among the codes, from 0 on in steps of 2^bits / 256."""
    return (zero * (256 / 2**bits)).clamp(0, 255).add(0.5).floor() * (2**bits / 256)


def short_scales(scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros that bytes can hold as those bytes."""
    return byte_below(scale).to(torch.uint8), (zero.float() * (256 / 2**bits)).round().to(torch.uint8)


def widened(scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros of either kind as float32."""
    if scale.dtype != torch.uint8:
        return scale.float(), zero.float()
    return scale_of_byte(scale), zero.float() * (2**bits / 256)


def dequantize(packed: Tensor, scale: Tensor, zero: Tensor, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    """w = (q - zero) * scale, computed in float32 as HQQ does, then rounded to `dtype`.

    Args:
        packed: (N, packed_bytes(n, bits)) uint8. scale, zero: (N, n / group) float16, or uint8 (`short_scales`). n:
            values in a vector.
    """
    codes = unpack_codes(packed, n, bits)
    grouped = codes.view(codes.shape[0], scale.shape[1], n // scale.shape[1]).float()
    scale, zero = widened(scale, zero, bits)
    return ((grouped - zero[..., None]) * scale[..., None]).view(-1, n).to(dtype)
