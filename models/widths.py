"""How wide a pack's weights are: bits by matrix, and fewer of them for experts that are rarely used."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.layouts import RowLayout, UpLayout


@dataclass(frozen=True, slots=True)
class Narrow:
    """Fewer bits for the experts of each layer that calibration's text used least (CORM section 4.1).

    Attributes:
        share: of a layer's experts, 0..1. up, gate, down: their bits per weight.
    """

    share: float
    up: int
    gate: int
    down: int

    def count(self, experts: int) -> int:
        """How many of a layer's experts are narrow."""
        return int(self.share * experts + 0.5)

    def describe(self) -> str:
        """In words: "the least used 25 % of experts: up 2, gate and down 3 bits"."""
        return f"the least used {self.share * 100:g} % of experts: {_experts(self.up, self.gate, self.down)} bits"


@dataclass(frozen=True, slots=True)
class Widths:
    """Bits per weight of the three expert matrices and of the dense linear layers (16: as published).

    `float16` says what 16-bit expert values are: "bfloat16" or "float16". `narrow` is for some of the experts; None
    where all are alike.
    """

    up: int
    gate: int
    down: int
    dense: int
    float16: str
    group: int
    narrow: Narrow | None = None

    def describe(self) -> str:
        """In words, for a screen: "up 2, gate and down 4, attention 8 bits"."""
        told = f"{_experts(self.up, self.gate, self.down)}, attention {self.dense} bits"
        return told if self.narrow is None else f"{told}; {self.narrow.describe()}"


def _experts(up: int, gate: int, down: int) -> str:
    rows = f"gate and down {gate}" if gate == down else f"gate {gate}, down {down}"
    return f"up {up}, {rows}"


@dataclass(frozen=True, slots=True)
class Rare:
    """The narrow experts of one layer, ascending, and why: their shares of calibration's expert calls."""

    experts: tuple[int, ...]
    popularity: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """How so many of each layer's experts are stored; names of their tensors begin with `prefix`."""

    prefix: str
    experts: int
    up: UpLayout
    rows: RowLayout

    def nbytes(self, neurons: int) -> int:
        """Bytes of one layer's."""
        return self.experts * neurons * (self.rows.nbytes + self.up.row_bytes + 4 * self.up.vector.groups)
