"""Quantized weights in memory: a linear layer's, and an expert layer's signal projection and rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import described, require
from .codes import dequantize, packed_bytes, split_codes, unpack_codes
from .layouts import RowLayout, SignalLayout, VectorLayout


def require_rows(name: str, given: Tensor, dimensions: tuple[str, ...], nbytes: int) -> None:
    """Refuse bytes that are not rows of `nbytes`."""
    if given.dtype != torch.uint8 or given.ndim != len(dimensions) + 1 or given.shape[-1] != nbytes:
        raise ValueError(f"{name} must be uint8 of shape ({', '.join(dimensions)}, {nbytes}), not {described(given)}")


def _checked(
    name: str, dimensions: tuple[str, ...], vector: VectorLayout, q: Tensor, scale: Tensor, zero: Tensor
) -> bool:
    """Whether all are contiguous; refuses those that do not fit the layout and each other."""
    require_rows(f"{name}.q", q, dimensions, packed_bytes(vector.n, vector.bits))
    shape = (*q.shape[:-1], vector.groups)
    require(f"{name}.scale", scale, (vector.scale_dtype,), shape, q.device, whole=False)
    require(f"{name}.zero", zero, (vector.scale_dtype,), shape, q.device, whole=False)
    return q.is_contiguous() and scale.is_contiguous() and zero.is_contiguous()


def require_all(device: torch.device, parts: dict[str, Tensor]) -> None:
    for name, part in parts.items():
        require(name, part, (part.dtype,), tuple(part.shape), device)


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A dense linear layer's weight of N rows by K columns, as stored; y = x · Wᵀ.

    Attributes:
        vector: one row. q: (N, packed_bytes(K)) uint8. scale, zero: (N, groups) of vector.scale_dtype. Never 16 bit:
            such a layer stays the library's. whole: whether all are contiguous. native: what `cpu/weights.py` made of
            them.

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
            require_all(device, {"weights.q": self.q, "weights.scale": self.scale, "weights.zero": self.zero})

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes + self.zero.nbytes

    def there(self, device: str) -> LinearWeights:
        """The same on a device."""
        return LinearWeights(self.vector, *(part.to(device) for part in (self.q, self.scale, self.zero)))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The (N, K) matrix."""
        return dequantize(self.q, self.scale, self.zero, self.vector.n, self.vector.bits, dtype)


_LOW_BITS, _MIDDLE = 4, 7.5  # of a code: its low bits, and what they are on average
_SAMPLED = 16  # step between the rows whose low bits are looked at


@dataclass(frozen=True, slots=True)
class Planes:
    """A `LinearWeights` of 8 bits as two of 4, whose products add up to its own.

    The low bits' own zero is their average, so that the high plane alone tells about what the product will be.

    Attributes:
        spread: (groups,) float32, the mean square of the low plane's weights, of no row much more.
    """

    high: LinearWeights
    low: LinearWeights
    spread: Tensor

    @classmethod
    def of(cls, weights: LinearWeights) -> Planes | None:
        """None where a scale of the high plane would be no float16.

        Raises:
            ValueError: weights of another width.
        """
        if weights.vector.bits != 2 * _LOW_BITS:
            raise ValueError(f"only codes of 8 bits have two planes, not those of {weights.vector.bits}")
        vector = replace(weights.vector, bits=_LOW_BITS, short=False)
        scale, zero = weights.scale.float(), weights.zero.float()
        wide = (scale * (1 << _LOW_BITS)).half()
        if not wide.isfinite().all():
            return None
        above = ((zero - _MIDDLE) / (1 << _LOW_BITS)).half().float()
        below = (zero - above * (1 << _LOW_BITS)).half().float()
        # A zero so small that float16 cannot tell it from none beside 7.5, as groups of one value have it.
        small = above * (1 << _LOW_BITS) + below != zero
        above, below = torch.where(small, zero / (1 << _LOW_BITS), above), below.masked_fill(small, 0)
        high, low = split_codes(weights.q)
        sample = unpack_codes(low[::_SAMPLED], vector.n, _LOW_BITS).float().view(-1, vector.groups, vector.group)
        squares = (sample - below[::_SAMPLED, :, None]).square().mean(-1)
        widest = scale.masked_fill(small, 0).square().amax(0)
        spread = torch.maximum(squares.amax(0) * widest, (squares * scale[::_SAMPLED].square()).amax(0))
        above, below = above.half(), below.half()
        return cls(LinearWeights(vector, high, wide, above), LinearWeights(vector, low, weights.scale, below), spread)

    @property
    def vector(self) -> VectorLayout:
        """One row of each plane."""
        return self.high.vector

    @property
    def nbytes(self) -> int:
        return self.high.nbytes + self.low.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The (N, K) matrix."""
        return (self.high.dense(torch.float32) + self.low.dense(torch.float32)).to(dtype)


@dataclass(frozen=True, slots=True)
class SignalWeights:
    """The signal projections of one layer's E experts, as stored.

    Attributes:
        q: (E, F, row_bytes) uint8. scale, zero: (E, F, groups) of the vector's scale_dtype, without groups at 16 bit.
            bias: (E, F) float32, added to the product with x; None for none. whole: whether all are contiguous.

    Raises:
        ValueError: tensors of another type or shape, or on several devices.
    """

    layout: SignalLayout
    q: Tensor
    scale: Tensor
    zero: Tensor
    bias: Tensor | None = None
    whole: bool = field(init=False, repr=False, compare=False)
    native: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        whole = _checked("signal", ("E", "F"), self.layout.vector, self.q, self.scale, self.zero)
        if self.bias is not None:
            require("signal.bias", self.bias, (torch.float32,), tuple(self.q.shape[:2]), self.q.device, whole=False)
            whole = whole and self.bias.is_contiguous()
        object.__setattr__(self, "whole", whole)

    def check(self, device: torch.device) -> None:
        """Refuse weights that an operation on `device` cannot read.

        Raises:
            ValueError: not contiguous, or on another device.
        """
        if not self.whole or not (self.q.is_cpu or self.q.device == device):
            require_all(device, {f"signal.{name}": part for name, part in self.parts().items()})

    def parts(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        held = {"q": self.q, "scale": self.scale, "zero": self.zero}
        return held if self.bias is None else {**held, "bias": self.bias}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> SignalWeights:
        """The same layout with each tensor changed: moved, or other experts or neurons of it."""
        return SignalWeights(self.layout, **{name: change(part) for name, part in self.parts().items()})

    def one(self, expert: int) -> SignalWeights:
        """A view of one expert's, as a layer of one."""
        return self.mapped(lambda part: part[expert, None])

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The (F, H) matrix of `expert`."""
        vector = self.layout.vector
        if vector.bits == 16:
            # Flat in between: of no neurons the last stride may be any, and then nothing is seen as another type.
            return self.q[expert].reshape(-1).view(self.layout.float16).reshape(-1, vector.n).to(dtype)
        return dequantize(self.q[expert], self.scale[expert], self.zero[expert], vector.n, vector.bits, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts'."""
        return sum(part.nbytes for part in self.parts().values())

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
        require_rows("rows.data", self.data, ("E", "F"), self.layout.nbytes)
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
            require_all(device, {"rows.data": self.data})


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x · Wᵀ + bias.

    Attributes:
        weight: (rows, columns) floating point, or codes; of the head, these may be in two planes. bias: (rows,).
    """

    weight: Tensor | LinearWeights | Planes
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight if isinstance(self.weight, Tensor) else self.weight.dense(x.dtype)
        return F.linear(x, weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """What a vector goes through before a part of the model.

    Attributes:
        weight: (H,). bias: (H,), added behind it. kind: "rms": x / rms(x) * weight; "layer": the same of x - mean(x).
    """

    weight: Tensor
    bias: Tensor | None = None
    kind: Literal["rms", "layer"] = "rms"

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """x (..., H) -> (..., H)."""
        if self.kind == "layer":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, eps)
        normed = F.rms_norm(x, self.weight.shape, self.weight, eps)
        return normed if self.bias is None else normed + self.bias
