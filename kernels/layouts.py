"""The memory layout of quantized weights: bit packing, group scales, and the record of one neuron.

Shared by the packed format on disk (models/pack/packed_model.py) and by every kernel, so the bytes are never rearranged
between disk, RAM, a transfer buffer and device memory.

Bit packing. A vector of n codes is cut into chunks of 64, the last one possibly shorter. Inside a chunk that takes
s bytes, code i is in byte i % s at bit position bits * (i // s). A 64-byte register of 2-bit codes is thus four
chunks of 16 bytes; shifting it by 2k yields 16 consecutive values of each, so that the integer sums of four groups
stand side by side in one register (AVX-512, AVX2) and a 32-bit word on a GPU belongs to one group. 3-bit codes are
packed 256 at a time (the rest of a vector likewise): first their lower two bits in this way, then their upper bits.

Group scales. HQQ's affine code: w = (q - zero) * scale, one pair of float16, or of bytes (`codes.scale_of_byte`), for
each group of consecutive values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .activation import Activation, Function, Projection, beside, function_of, gated
from .codes import (
    SHORTEST,
    align,
    check_width,
    dequantize,
    pack_codes,
    packed_bytes,
    short_scales,
    widened,
    zero_in_steps,
)


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """One stored vector of `n` values: [scales | zeros | codes], or plain 16-bit values.

    Its scales precede its codes, so that a neuron is one contiguous read; its codes begin at a whole word.

    Attributes:
        bits: 0 for a projection that an expert lacks, of which nothing is stored.
        short: whether scales and zeros are bytes, where codes have at most `SHORTEST` bits; else they are float16.
    """

    n: int
    bits: int
    group: int
    short: bool = False

    def __post_init__(self) -> None:
        if self.bits:
            check_width(self.bits)
        if self.n < 1 or self.group < 1 or self.n % self.group:
            raise ValueError(f"a group of {self.group} does not divide {self.n} values")

    @property
    def groups(self) -> int:
        return 0 if self.bits in (0, 16) else self.n // self.group

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of stored scales and zeros."""
        return torch.uint8 if self.short and self.bits <= SHORTEST else torch.float16

    @property
    def scale_bytes(self) -> int:
        """Of one of them."""
        return self.scale_dtype.itemsize

    @property
    def head(self) -> int:
        """Bytes in front of the codes."""
        return -(-2 * self.scale_bytes * self.groups // 4) * 4

    @property
    def nbytes(self) -> int:
        return self.head + packed_bytes(self.n, self.bits) if self.bits else 0

    @property
    def nbytes_apart(self) -> int:
        """Where scales and zeros are in tensors of their own."""
        return 2 * self.scale_bytes * self.groups + packed_bytes(self.n, self.bits)

    def stored(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zeros, float16, as they are stored.

        Raises:
            ValueError: bytes cannot hold them.
        """
        if self.scale_dtype == torch.float16:
            return scale, zero
        stored = short_scales(scale, zero, self.bits)
        if not all(map(torch.equal, widened(*stored, self.bits), (scale.float(), zero.float()))):
            raise ValueError("scales or zeros that bytes cannot hold")
        return stored

    def nearest(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """Any scales and zeros as stored, about as they are."""
        if self.scale_dtype == torch.float16:
            return scale.half(), zero.half()
        return short_scales(scale, zero_in_steps(zero, self.bits), self.bits)

    def join(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """(N, n) uint8 codes and (N, groups) float16 scale and zero -> (N, nbytes) uint8."""
        return self.join_packed(pack_codes(codes, self.bits), *self.stored(scale, zero))

    def join_packed(self, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """(N, packed_bytes) and (N, groups) scale and zero, as stored -> (N, nbytes) uint8."""
        scales = torch.cat([scale.view(torch.uint8), zero.view(torch.uint8)], dim=1)
        gap = scales.new_zeros(len(scales), self.head - scales.shape[1])
        return torch.cat([scales, gap, packed], dim=1)

    def scales(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """(N, nbytes) uint8 -> its scales and zeros as stored, (N, groups) each."""
        # A copy, not contiguous(): one row of a record is contiguous already, but may start at an odd byte.
        head = raw[:, : 2 * self.scale_bytes * self.groups].clone(memory_format=torch.contiguous_format)
        scale, zero = head.view(self.scale_dtype).chunk(2, 1)
        return scale, zero

    def read(self, raw: Tensor, float16: torch.dtype, dtype: torch.dtype) -> Tensor:
        """(N, nbytes) uint8 -> (N, n) values of `dtype`; 16-bit vectors hold `float16` (float16 or bfloat16)."""
        if not self.bits:
            return torch.zeros(len(raw), self.n, dtype=dtype, device=raw.device)
        if self.bits == 16:
            return raw.clone(memory_format=torch.contiguous_format).view(float16).to(dtype)
        return dequantize(raw[:, self.head :], *self.scales(raw), self.n, self.bits, dtype)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The record of one neuron: its row of the projection that is not the signal, its bias if there are any, and its
    down column, padded to `ALIGN` bytes. Without a gate, the down column alone.

    Attributes:
        other, down: the two vectors of H values; their widths may differ. Without a gate, `other` gets 0 bits.
        float16: what 16-bit vectors hold, float16 or bfloat16.
        signal: the projection that is stored apart (`SignalLayout.projection`); the record holds the other one's row.
        activation: of the expert. biased: whether a float32 is added to that row's product with x. function: of that.
    """

    other: VectorLayout
    down: VectorLayout
    float16: torch.dtype
    signal: Projection = "up"
    activation: Activation = "silu"
    biased: bool = False
    function: Function = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_float16(self.float16)
        object.__setattr__(self, "function", function_of(beside(self.signal), self.activation))
        if not self.gated:
            object.__setattr__(self, "other", replace(self.other, bits=0))
        elif not self.other.bits:
            raise ValueError(f"no {beside(self.signal)} in a {self.activation} expert")
        if not self.down.bits:
            raise ValueError("a down column of 0 bits")
        if self.other.n != self.down.n:
            raise ValueError(f"a row of {self.other.n} values, but a down column of {self.down.n}")

    @property
    def gated(self) -> bool:
        """Whether the expert has a gate."""
        return gated(self.activation)

    @property
    def nbytes(self) -> int:
        """Bytes from one record to the next."""
        return align(self.down_at + self.down.nbytes)

    @property
    def bias_at(self) -> int:
        """Where a record's bias is: at a whole word."""
        return self.other.nbytes + -self.other.nbytes % 4

    @property
    def down_at(self) -> int:
        """Where a record's down column is. A bias takes 16 bytes: GPUs load 16 at a time, from a multiple of 16."""
        return self.bias_at + 16 if self.biased else self.other.nbytes

    def join(self, other: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
        """(N, other.nbytes) and (N, down.nbytes) uint8, and float32 (N,) if biased -> (N, nbytes) records.

        Raises:
            ValueError: a bias too many, or none.
        """
        if (bias is not None) != self.biased:
            raise ValueError(f"records {'have' if self.biased else 'have no'} biases")
        records = torch.zeros(other.shape[0], self.nbytes, dtype=torch.uint8)
        records[:, : self.other.nbytes] = other
        if bias is not None:
            records[:, self.bias_at : self.bias_at + 4] = bias[:, None].view(torch.uint8)
        records[:, self.down_at : self.down_at + self.down.nbytes] = down
        return records

    def read(self, records: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(N, nbytes) records -> rows of the other projection (N, H) and down columns (N, H) of `dtype`."""
        return (
            self.other.read(records[:, : self.other.nbytes], self.float16, dtype),
            self.down.read(records[:, self.down_at : self.down_at + self.down.nbytes], self.float16, dtype),
        )

    def read_bias(self, records: Tensor, dtype: torch.dtype) -> Tensor | None:
        """(N, nbytes) records -> their biases (N,) of `dtype`, if there are any."""
        if not self.biased:
            return None
        raw = records[:, self.bias_at : self.bias_at + 4].clone(memory_format=torch.contiguous_format)
        return raw.view(torch.float32).squeeze(1).to(dtype)


@dataclass(frozen=True, slots=True)
class SignalLayout:
    """The signal projection of one expert, which is computed for all of its neurons: F vectors of H values,
    scales in tensors of their own (they stay in VRAM).

    Attributes:
        vector: one row of the projection. float16: what 16-bit rows hold. projection: which one it is. activation: of
            the expert. function: of the product with x, and the bias if there is one; the result is the signal v.
    """

    vector: VectorLayout
    float16: torch.dtype
    projection: Projection = "up"
    activation: Activation = "silu"
    function: Function = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_float16(self.float16)
        object.__setattr__(self, "function", function_of(self.projection, self.activation))
        if self.function == "one":
            raise ValueError(f"a {self.activation} expert has no gate, which cannot be the signal")

    @property
    def row_bytes(self) -> int:
        return packed_bytes(self.vector.n, self.vector.bits)


def check_roles(signal: SignalLayout, rows: RowLayout) -> None:
    """Refuse a signal and rows that do not complete each other.

    Raises:
        ValueError: rows made for another signal.
    """
    if signal.projection != rows.signal:
        raise ValueError(f"the signal is {signal.projection}, but rows are made for {rows.signal} as the signal")
    if signal.activation != rows.activation:
        raise ValueError(f"the signal is of a {signal.activation} expert, but rows are of a {rows.activation} one")


def _check_float16(dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"16-bit values are float16 or bfloat16, not {dtype}")
