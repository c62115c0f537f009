"""Transfers of rows from RAM into slots of device memory.

Who may touch what: from `submit` until it is done a transfer's slots belong to it. A slot may be given to a transfer
once the kernels that read its former row have ended, seen by the host (the pool's `release`). So a link need not wait
for the compute stream, which would delay every copy until after the very kernels that it should overlap with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 50  # rows: FloE's best for 16-bit rows on an RTX 3090 (section 4.1, figure 7); see tuned_link.py
Kind = Literal["staged", "in place"]  # packed by the CPU and copied, or read from RAM by the device
TransferMode = Literal["auto", "staged", "in place"]  # "auto": whichever was measured to be faster here


@dataclass(eq=False, slots=True)
class Transfer:
    """Rows in RAM to copy to slots of device memory.

    Attributes:
        source: (R, nbytes) uint8 in RAM. index: (N,) int64, which of its rows.
        target: (S, nbytes) uint8 on the device. slots: (N,) int32, where they go, each slot once.
        urgent: goes before every prefetch; waiting for a prefetch makes it urgent.
        score: among prefetches the highest goes first. layer: the layer whose rows these are.
        done: the rows are in their slots for the compute that follows.
    """

    source: Tensor
    index: NDArray[np.int64]
    target: Tensor
    slots: NDArray[np.int32]
    urgent: bool
    score: float
    layer: int
    done: bool = False
