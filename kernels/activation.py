"""The functions between an expert's matrices: h = a(gate · x) b(up · x), each of one number.

One of the two projections is the *signal*: it is computed for every neuron, its function is applied, and the result v
is compared with the threshold. The other one is computed where |v| reaches it; h is the product of both.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

Projection = Literal["up", "gate"]
Function = Literal["plain", "silu"]
FUNCTIONS: tuple[Function, ...] = get_args(Function)  # kernels know them by their places: FLOE_PLAIN ... in floe.h


def function_of(projection: Projection) -> Function:
    """The function of a projection's output; SwiGLU has one for the gate alone (arXiv 2002.05202).

    Raises:
        ValueError: no such projection.
    """
    if projection not in get_args(Projection):
        raise ValueError(f"the signal is up or gate, not {projection!r}")
    return "silu" if projection == "gate" else "plain"


def beside(projection: Projection) -> Projection:
    """The projection that is not this one."""
    return "up" if projection == "gate" else "gate"


def applied(function: Function, z: Tensor) -> Tensor:
    """The function of every number of z."""
    return F.silu(z) if function == "silu" else z
