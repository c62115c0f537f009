"""Lists of active neurons by where their rows are, and checks before rows land in a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Slots = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the active neurons of P calls, in their order.

    Attributes:
        offsets: (P + 1,) int64, as in `Active`. at: (M,) int64 or int32, their positions among all active neurons.
        places: (M,) likewise, the slots of their rows, or of absent ones the keys.
    """

    offsets: NDArray[np.int64]
    at: NDArray[np.integer[Any]]
    places: NDArray[np.integer[Any]]


def check_landing(source: NDArray[np.int64], slots: Slots, rows: int, capacity: int) -> None:
    """Refuse arguments of `landing` of other shapes or types.

    Raises:
        ValueError: what an argument must be and what it is.
    """
    require("source", source, np.int64, (source.size,))
    require("slots", slots, np.int32, (source.size,))
    for name, count in (("rows", rows), ("capacity", capacity)):
        if not 0 <= count < 1 << 63:
            raise ValueError(f"{name} must be a number from 0 on, not {count}")


def require(name: str, array: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    """Refuse an array that an operation cannot take.

    Raises:
        ValueError: another type or shape, or not contiguous; names what it must be and what it is.
    """
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(
            f"{name} must be contiguous {np.dtype(dtype)} of shape {shape}, "
            f"not {array.dtype} of shape {array.shape} with strides {array.strides}"
        )
