"""How quantized weights lie in memory: bit packing, group scales, and the record of one neuron.

Shared by the packed format on disk (models/packed.py) and by every kernel, so the bytes are never rearranged
between disk, RAM, a transfer buffer and device memory.

Bit packing. A vector of n codes is cut into chunks of 64, the last one possibly shorter. Inside a chunk that takes
s bytes, code i lies in byte i % s at bit position bits * (i // s). A 64-byte register of 2-bit codes is thus four
chunks of 16 bytes; shifting it by 2k yields 16 consecutive values of each, so that the integer sums of four groups
stand side by side in one register (AVX-512, AVX2) and a 32-bit word on a GPU belongs to one group. Of 3-bit codes,
256 at a time (the rest of a vector likewise) are their lower two bits packed so, then their upper bits packed so.

Group scales. HQQ's affine code: w = (q - zero) * scale, one float16 pair per group of consecutive values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .checks import SCALES, described, require

WIDTHS = (2, 3, 4, 8, 16)
ALIGN = 64  # bytes: a cache line, and the alignment of every tensor and neuron record
CHUNK = 64  # codes that are packed together
THREE_BIT_BLOCK = 256  # 3-bit codes whose lower two bits lie together: a register of them, then half a one


def _check_width(bits: int) -> None:
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
    _check_width(bits)
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
    _check_width(bits)
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
        if self.n < 1 or self.group < 1 or self.n % self.group:
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

    def __post_init__(self) -> None:
        _check_float16(self.float16)
        if self.gate.n != self.down.n:
            raise ValueError(f"a gate row of {self.gate.n} values, but a down column of {self.down.n}")

    @property
    def nbytes(self) -> int:
        """Bytes from one record to the next."""
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

    def __post_init__(self) -> None:
        _check_float16(self.float16)

    @property
    def row_bytes(self) -> int:
        return packed_bytes(self.vector.n, self.vector.bits)


def _check_float16(dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"16-bit values are float16 or bfloat16, not {dtype}")


def _require_rows(name: str, given: Tensor, dimensions: tuple[str, ...], nbytes: int) -> None:
    """Refuse bytes that are not rows of `nbytes`."""
    if given.dtype != torch.uint8 or given.ndim != len(dimensions) + 1 or given.shape[-1] != nbytes:
        raise ValueError(f"{name} must be uint8 of shape ({', '.join(dimensions)}, {nbytes}), not {described(given)}")


def _checked(
    name: str, dimensions: tuple[str, ...], vector: VectorLayout, q: Tensor, scale: Tensor, zero: Tensor
) -> bool:
    """Whether all are contiguous; refuses those that do not fit the layout and each other."""
    _require_rows(f"{name}.q", q, dimensions, packed_bytes(vector.n, vector.bits))
    shape = (*q.shape[:-1], vector.groups)
    require(f"{name}.scale", scale, SCALES, shape, q.device, whole=False)
    require(f"{name}.zero", zero, SCALES, shape, q.device, whole=False)
    return q.is_contiguous() and scale.is_contiguous() and zero.is_contiguous()


def _require_all(device: torch.device, parts: dict[str, Tensor]) -> None:
    for name, part in parts.items():
        require(name, part, (part.dtype,), tuple(part.shape), device)


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A dense linear layer's weight of N rows by K columns, as stored; y = x · Wᵀ.

    Attributes:
        vector: one row. q: (N, packed_bytes(K)) uint8. scale, zero: (N, groups) float16. Never 16 bit: such a layer
            stays the library's. whole: whether all are contiguous. native: what `cpu/weights.py` made of them.

    Raises:
        ValueError: tensors of another type or shape, or on several devices.
    """

    vector: VectorLayout
    q: Tensor
    scale: Tensor
    zero: Tensor
    whole: bool = field(init=False, repr=False, compare=False)
    native: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.vector.bits == 16:
            raise ValueError("a linear layer of 16-bit values is stored as it is, not as codes")
        whole = _checked("weights", ("N",), self.vector, self.q, self.scale, self.zero)
        object.__setattr__(self, "whole", whole)

    def check(self, device: torch.device) -> None:
        """Refuse weights that an operation on `device` cannot read.

        Raises:
            ValueError: not contiguous, or on another device.
        """
        if not self.whole or not (self.q.is_cpu or self.q.device == device):
            _require_all(device, {"weights.q": self.q, "weights.scale": self.scale, "weights.zero": self.zero})

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The (N, K) matrix."""
        return dequantize(self.q, self.scale, self.zero, self.vector.n, self.vector.bits, dtype)


@dataclass(frozen=True, slots=True)
class UpWeights:
    """The up projections of one layer's E experts, as stored.

    Attributes:
        q: (E, F, row_bytes) uint8. scale, zero: (E, F, groups) float16, without groups at 16 bit. whole: whether all
            are contiguous.

    Raises:
        ValueError: tensors of another type or shape, or on several devices.
    """

    layout: UpLayout
    q: Tensor
    scale: Tensor
    zero: Tensor
    whole: bool = field(init=False, repr=False, compare=False)
    native: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        whole = _checked("up", ("E", "F"), self.layout.vector, self.q, self.scale, self.zero)
        object.__setattr__(self, "whole", whole)

    def check(self, device: torch.device) -> None:
        """Refuse weights that an operation on `device` cannot read.

        Raises:
            ValueError: not contiguous, or on another device.
        """
        if not self.whole or not (self.q.is_cpu or self.q.device == device):
            _require_all(device, {"up.q": self.q, "up.scale": self.scale, "up.zero": self.zero})

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The (F, H) matrix of `expert`."""
        vector = self.layout.vector
        if vector.bits == 16:
            return self.q[expert].view(self.layout.float16).to(dtype)
        return dequantize(self.q[expert], self.scale[expert], self.zero[expert], vector.n, vector.bits, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts'."""
        return self.q.nbytes + self.scale.nbytes + self.zero.nbytes

    def bytes_per_expert(self) -> int:
        """Bytes read to multiply one expert's up projection by a vector."""
        return self.nbytes // max(1, self.q.shape[0])


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The neuron records of one layer's E experts.

    Attributes:
        data: (E, F, layout.nbytes) uint8. whole: whether it is contiguous.

    Raises:
        ValueError: data of another type or shape.
    """

    layout: RowLayout
    data: Tensor
    whole: bool = field(init=False, repr=False, compare=False)
    native: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        _require_rows("rows.data", self.data, ("E", "F"), self.layout.nbytes)
        object.__setattr__(self, "whole", self.data.is_contiguous())

    @property
    def experts(self) -> int:
        """E."""
        return self.data.shape[0]

    @property
    def neurons(self) -> int:
        """F."""
        return self.data.shape[1]

    def check(self, device: torch.device) -> None:
        """Refuse records that an operation on `device` cannot read.

        Raises:
            ValueError: not contiguous, or on another device.
        """
        if not self.whole or not (self.data.is_cpu or self.data.device == device):
            _require_all(device, {"rows.data": self.data})
