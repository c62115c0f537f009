"""Cuts an expert's tensors into those of its parts, in each way in which checkpoints store experts.

E experts, F neurons, H hidden size, P parts of F / P neurons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..families.storage import BLOCK, Apart, Interleaved, Mxfp4, Stacked, Storage

_LARGEST_EXPONENT = 254  # of a block; 255 is no number


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a tensor of one expert has its neurons.

    Attributes:
        axis: along which they lie; None where it has none, as down's bias. sides: whether there are two values for each
            neuron, gate's and up's: all of one before the other, or in turns. unit: neurons per entry.
        down: whether these are down's values ("values") or their exponents.
    """

    axis: int | None
    sides: Literal["one", "halves", "turns"] = "one"
    unit: int = 1
    down: Literal["", "values", "exponents"] = ""

    def shape(self, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
        """Of one part, by that of the expert."""
        axis = self.axis
        return shape if axis is None else (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])


_CUTS: dict[type, tuple[Cut, ...]] = {  # in the order of `Storage.names`
    Apart: (Cut(0), Cut(0), Cut(1, down="values")),
    Stacked: (Cut(0, "halves"), Cut(1, down="values")),
    Interleaved: (Cut(1, "turns"), Cut(0, down="values"), Cut(0, "turns"), Cut(None)),
    Mxfp4: (
        *(Cut(0, "turns"),) * 3,
        Cut(1, unit=BLOCK),
        Cut(1, unit=BLOCK, down="exponents"),
        Cut(None),
    ),
}


def cuts(storage: Storage) -> tuple[Cut, ...]:
    """How each tensor of an expert is cut, in the order of `storage.names`."""
    return _CUTS[type(storage)]


def unit(storage: Storage) -> int:
    """How many neurons have to stay together."""
    return max(cut.unit for cut in cuts(storage))


def parts_of(tensor: Tensor, cut: Cut, order: Tensor | None, parts: int, factor: int) -> list[Tensor]:
    """One tensor of an expert -> the same of its parts.

    Args:
        order: (F,) int64, in which the neurons lie before they are cut; None: as they are. Those of a unit follow each
            other.
        factor: what down is multiplied by; 1 or `parts`, both powers of two, so that no digit is lost. A bias of down
            is added by each part, with the expert's weight divided by `factor`: it is multiplied by factor / parts.

    Raises:
        ValueError: a value is not finite, before or afterwards.
    """
    if cut.axis is None:
        return [tensor * (factor / parts)] * parts
    axis = cut.axis + (cut.sides == "halves")
    if cut.sides == "halves":
        tensor = tensor.unflatten(cut.axis, (2, -1))
    elif cut.sides == "turns":
        tensor = tensor.unflatten(cut.axis, (-1, 2))
    if order is not None:
        tensor = tensor.index_select(axis, order[:: cut.unit] // cut.unit)
    if cut.down:
        tensor = _multiplied(tensor, factor, exponents=cut.down == "exponents")
    elif tensor.is_floating_point() and not tensor.isfinite().all():
        raise ValueError("it holds values that are not finite")
    found = tensor.chunk(parts, axis)
    return list(found) if cut.sides == "one" else [part.flatten(cut.axis, cut.axis + 1) for part in found]


def _multiplied(tensor: Tensor, factor: int, *, exponents: bool) -> Tensor:
    if exponents:
        raised = tensor.int() + factor.bit_length() - 1
        if int(raised.max()) > _LARGEST_EXPONENT:
            raise ValueError(f"{factor} times its values are beyond its type")
        return raised.to(torch.uint8)
    if not tensor.isfinite().all():
        raise ValueError("it holds values that are not finite")
    tensor = tensor * factor
    if not tensor.isfinite().all():
        raise ValueError(f"{factor} times its values are beyond its type")
    return tensor
