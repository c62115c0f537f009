"""How many bits a pack's weights have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CALIBRATED: Literal["calibrated"] = "calibrated"
HQQ: Literal["hqq"] = "hqq"


@dataclass(frozen=True, slots=True)
class Widths:
    """Bits per weight of the three expert matrices and of the dense linear layers (16: as published).

    `up` is the width of the signal and `gate` that of the other projection, named for what they are in a layer whose
    signal is up; of experts without a gate, that of down. `float16` says what 16-bit expert values are: "bfloat16" or
    "float16". `group` values share a scale. `short`: whether experts' scales are bytes (`VectorLayout.short`).
    `rounding`: how codes were found: for the inputs that a text gives them (models/packing/rounding.py), or by the hqq
    library, which needs none.
    """

    up: int
    gate: int
    down: int
    dense: int
    float16: str
    group: int
    short: bool = False
    rounding: Literal["calibrated", "hqq"] = CALIBRATED

    def describe(self, *, gated: bool = True) -> str:
        """In words, for a screen: "up 2, gate and down 4, attention 8 bits". gated: whether experts have a gate."""
        rows = f"gate and down {self.gate}" if self.gate == self.down else f"gate {self.gate}, down {self.down}"
        rows = rows if gated else f"down {self.down}"
        by = " by HQQ" if self.rounding == HQQ else ""
        return f"up {self.up}, {rows}, attention {self.dense} bits{by}"
