"""How quantized weights lie in memory: bit packing, group scales, and the record of one neuron.

Shared by the packed format on disk (models/packed.py) and by every kernel, so the bytes are never rearranged
between disk, RAM, a transfer buffer and device memory.

Bit packing. A vector of n codes is cut into blocks of 64 * 8 / bits values (256 at 2 bit, 128 at 4 bit, 64 at
8 bit), the last one possibly shorter. Inside a block that takes s bytes, code i lies in byte i % s at bit
position bits * (i // s): shifting a whole vector register by a multiple of `bits` therefore yields 64
*consecutive* values (no shuffles on AVX-512 or AVX2; coalesced words on a GPU). 3-bit codes are a 2-bit plane
followed by a 1-bit plane of the same block of 256.

Group scales. HQQ's affine code: w = (q - zero) * scale, one float16 pair per group of consecutive values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WIDTHS = (2, 3, 4, 8, 16)
ALIGN = 64  # bytes: a cache line, and the alignment of every tensor and neuron record


def _check_width(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"no such width: {bits} bit; valid are {', '.join(map(str, WIDTHS))}")


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


def _plane_bytes(n: int, bits: int) -> int:
    block = ALIGN * 8 // bits
    full, rest = divmod(n, block)
    return full * ALIGN + -(-rest * bits // 8)


def packed_bytes(n: int, bits: int) -> int:
    """Bytes that `n` values of `bits` bits take (scales not counted)."""
    _check_width(bits)
    if bits == 16:
        return 2 * n
    if bits == 3:
        full, rest = divmod(n, 256)
        return full * 96 + _plane_bytes(rest, 2) + _plane_bytes(rest, 1)
    return _plane_bytes(n, bits)


def _spans(n: int, bits: int) -> list[tuple[int, int]]:
    """How n values are cut: (number of blocks, values in each), the full blocks first, then the shorter last one."""
    block = 256 if bits == 3 else ALIGN * 8 // bits
    return [(count, size) for count, size in ((n // block, block), (1, n % block)) if count and size]


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    """(N, blocks, n) codes below 2**bits -> (N, blocks, s) bytes."""
    per_byte = 8 // bits
    size = -(-codes.shape[2] // per_byte)
    padded = codes.new_zeros(*codes.shape[:2], per_byte * size)
    padded[:, :, : codes.shape[2]] = codes
    planes = padded.view(*codes.shape[:2], per_byte, size)
    packed = planes[:, :, 0].clone()
    for plane in range(1, per_byte):
        packed |= planes[:, :, plane] << (bits * plane)
    return packed


def _unpack_plane(packed: Tensor, n: int, bits: int) -> Tensor:
    """(N, blocks, s) bytes -> (N, blocks, n) codes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    planes = (packed.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    return planes.flatten(2)[:, :, :n]


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
    _check_width(bits)
    if bits == 16:
        raise ValueError("16-bit values are stored as they are, not as codes")
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"code {int(codes.max())} does not fit {bits} bit")
    if bits == 8:
        return codes.clone()
    parts: list[Tensor] = []
    start = 0
    for blocks, size in _spans(codes.shape[1], bits):
        part = codes[:, start : start + blocks * size].reshape(-1, blocks, size)
        start += blocks * size
        planes = [_pack_plane(part & 3, 2), _pack_plane(part >> 2, 1)] if bits == 3 else [_pack_plane(part, bits)]
        parts.append(torch.cat(planes, dim=2).flatten(1))
    return torch.cat(parts, dim=1) if parts else codes.clone()


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
    parts: list[Tensor] = []
    start = 0
    for blocks, size in _spans(n, bits):
        nbytes = packed_bytes(size, bits)
        part = packed[:, start : start + blocks * nbytes].reshape(-1, blocks, nbytes)
        start += blocks * nbytes
        if bits == 3:
            split = -(-size // 4)
            codes = _unpack_plane(part[:, :, :split], size, 2) | (_unpack_plane(part[:, :, split:], size, 1) << 2)
        else:
            codes = _unpack_plane(part, size, bits)
        parts.append(codes.flatten(1))
    return torch.cat(parts, dim=1) if len(parts) != 1 else parts[0]


def group_size(n: int, wanted: int = 64) -> int:
    """The largest group of at most `wanted` consecutive values that divides a vector of `n`."""
    return next(size for size in range(min(wanted, n), 0, -1) if n % size == 0)


def dequantize(packed: Tensor, scale: Tensor, zero: Tensor, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    """w = (q - zero) * scale, computed in float32 as HQQ does, then rounded to `dtype`.

    Args:
        packed: (N, packed_bytes(n, bits)) uint8. scale, zero: (N, n / group) float16. n: values in a vector.
    """
    codes = unpack_codes(packed, n, bits)
    grouped = codes.view(codes.shape[0], scale.shape[1], n // scale.shape[1]).float()
    return ((grouped - zero.float()[..., None]) * scale.float()[..., None]).view(-1, n).to(dtype)


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """One stored vector of `n` values: [scales f16 | zeros f16 | codes], or plain 16-bit values.

    Its scales lie in front of its codes, so that a neuron is one contiguous read (DESIGN section 4 keeps them
    apart; a second place to read from would cost one more memory latency per neuron).
    """

    n: int
    bits: int
    group: int

    def __post_init__(self) -> None:
        _check_width(self.bits)
        if self.group < 1 or self.n % self.group:
            raise ValueError(f"a group of {self.group} does not divide {self.n} values")

    @property
    def groups(self) -> int:
        return 0 if self.bits == 16 else self.n // self.group

    @property
    def nbytes(self) -> int:
        return 4 * self.groups + packed_bytes(self.n, self.bits)

    def join(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """(N, n) uint8 codes and (N, groups) float16 scale and zero -> (N, nbytes) uint8."""
        parts = [scale.view(torch.uint8), zero.view(torch.uint8), pack_codes(codes, self.bits)]
        return torch.cat(parts, dim=1)

    def read(self, raw: Tensor, float16: torch.dtype, dtype: torch.dtype) -> Tensor:
        """(N, nbytes) uint8 -> (N, n) values of `dtype`; 16-bit vectors hold `float16` (float16 or bfloat16)."""
        if self.bits == 16:
            return raw.clone(memory_format=torch.contiguous_format).view(float16).to(dtype)
        # A copy, not contiguous(): one row of a record is contiguous already, but may start at an odd byte.
        head = raw[:, : 4 * self.groups].clone(memory_format=torch.contiguous_format).view(torch.float16)
        scale, zero = head[:, : self.groups], head[:, self.groups :]
        return dequantize(raw[:, 4 * self.groups :], scale, zero, self.n, self.bits, dtype)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The record of one neuron: its gate row, then its down column, padded to `ALIGN` bytes.

    Attributes:
        gate, down: the two vectors of H values; their widths may differ.
        float16: what 16-bit vectors hold, float16 or bfloat16.
    """

    gate: VectorLayout
    down: VectorLayout
    float16: torch.dtype

    @property
    def nbytes(self) -> int:
        return align(self.gate.nbytes + self.down.nbytes)

    def join(self, gate: Tensor, down: Tensor) -> Tensor:
        """(N, gate.nbytes) and (N, down.nbytes) uint8 -> (N, nbytes) records."""
        records = torch.zeros(gate.shape[0], self.nbytes, dtype=torch.uint8)
        records[:, : self.gate.nbytes] = gate
        records[:, self.gate.nbytes : self.gate.nbytes + self.down.nbytes] = down
        return records

    def read(self, records: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(N, nbytes) records -> gate rows (N, H) and down columns (N, H) of `dtype`."""
        start = self.gate.nbytes
        return (
            self.gate.read(records[:, :start], self.float16, dtype),
            self.down.read(records[:, start : start + self.down.nbytes], self.float16, dtype),
        )


@dataclass(frozen=True, slots=True)
class UpLayout:
    """The up projection of one expert: F vectors of H values, scales in tensors of their own (they stay in VRAM).

    Attributes:
        vector: one row of the projection. float16: what 16-bit rows hold.
    """

    vector: VectorLayout
    float16: torch.dtype

    @property
    def row_bytes(self) -> int:
        return packed_bytes(self.vector.n, self.vector.bits)


@dataclass(frozen=True, slots=True)
class UpWeights:
    """The up projections of one layer's E experts, as stored.

    Attributes:
        q: (E, F, row_bytes) uint8. scale, zero: (E, F, groups) float16, without groups at 16 bit.
    """

    layout: UpLayout
    q: Tensor
    scale: Tensor
    zero: Tensor

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The (F, H) matrix of `expert`."""
        vector = self.layout.vector
        if vector.bits == 16:
            return self.q[expert].view(self.layout.float16).to(dtype)
        return dequantize(self.q[expert], self.scale[expert], self.zero[expert], vector.n, vector.bits, dtype)

    def bytes_per_expert(self) -> int:
        """Bytes read to multiply one expert's up projection by a vector."""
        return (self.q[0].nbytes + self.scale[0].nbytes + self.zero[0].nbytes) if len(self.q) else 0


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The neuron records of one layer's E experts: `data` is (E, F, layout.nbytes) uint8."""

    layout: RowLayout
    data: Tensor
