"""Active neurons that a device was asked to find, on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.types import Active
from ..host_copies import Copy

# Where each call's neurons end (P,), the neurons and their values; after the last end both may hold anything.
Listed = tuple[Tensor, Tensor, Tensor]


_FIRST = torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Asked:
    """Active neurons that a device was asked to find.

    Attributes:
        values: on the device. copy: ends, neurons and values on their way to the host, and everything else requested.
    """

    values: Tensor
    copy: Copy

    def answer(self) -> tuple[Active, Tensor, list[Tensor]]:
        """Once the copy is there: the neurons and their values on the host, the values on the device, all else."""
        ends, neurons, values, *others = self.copy.tensors
        total = int(ends[-1]) if ends.numel() else 0
        offsets = torch.cat([_FIRST, ends])
        neurons = neurons if neurons.dtype is torch.int32 else neurons.int()
        if total == neurons.numel():  # a slice takes microseconds
            return Active(offsets, neurons, values), self.values, others
        return Active(offsets, neurons[:total], values[:total]), self.values[:total], others
