"""What operations are called with: (token, expert) calls, and the neurons that were found active."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

X_BITS = (22, 15, 8)  # how much of x's precision an operation may be told to keep (kernels/__init__.py)


@dataclass(frozen=True, slots=True)
class Calls:
    """P pairs of a token and an expert that computes it.

    Attributes:
        tokens: (P,) int64, which row of x. experts: (P,) int64. weights: (P,) the router's weight of each call.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Active:
    """The active neurons of P calls, call after call.

    Attributes:
        offsets: (P + 1,) int64 on the CPU; call p owns neurons[offsets[p]:offsets[p + 1]].
        neurons: (N,) int64, no neuron twice within a call. values: (N,) v = up · x of each.
    """

    offsets: Tensor
    neurons: Tensor
    values: Tensor
