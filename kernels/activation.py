"""The functions between an expert's matrices: h = a(gate · x + b_g) b(up · x + b_u), each of one number.

One of the two projections is the *signal*: it is computed for every neuron, its function is applied, and the result v
is compared with the threshold. The other one is computed where |v| reaches it; h is the product of both.

"silu" is SwiGLU (arXiv 2002.05202): a(g) = g sigmoid(g), b(u) = u. "clamped" is gpt-oss's: a(g) = g' sigmoid(1.702 g')
with g' = min(g, 7), b(u) = clamp(u, -7, 7) + 1 (`GptOssExperts` of transformers). "gelu" is Gemma's GeGLU: a(g) =
g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2, b(u) = u. "limited" is DeepSeek-V4's: a(g) = g' sigmoid(g') with
g' = min(g, 10), b(u) = clamp(u, -10, 10) (`DeepseekV4Experts`, `Glm5NextTextExperts` and `HYV4Experts`).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Projection = Literal["up", "gate"]
Activation = Literal["silu", "clamped", "gelu", "limited"]
Function = Literal["plain", "silu", "clamped_gate", "clamped_up", "gelu", "limited_gate", "limited_up"]
FUNCTIONS: tuple[Function, ...] = get_args(Function)  # kernels know them by their places: FLOE_PLAIN ... in floe.h
CLAMP, STEEPNESS = 7.0, 1.702  # of "clamped"
LIMIT = 10.0  # of "limited"

_OF: dict[tuple[str, str], Function] = {
    ("silu", "gate"): "silu",
    ("silu", "up"): "plain",
    ("clamped", "gate"): "clamped_gate",
    ("clamped", "up"): "clamped_up",
    ("gelu", "gate"): "gelu",
    ("gelu", "up"): "plain",
    ("limited", "gate"): "limited_gate",
    ("limited", "up"): "limited_up",
}


def function_of(projection: Projection, activation: Activation) -> Function:
    """The function of a projection's output.

    Raises:
        ValueError: no such projection or activation.
    """
    function = _OF.get((activation, projection))
    if function is None:
        kinds = ", ".join(get_args(Activation))
        raise ValueError(f"no function of {projection!r} in {activation!r}: up or gate, in one of {kinds}")
    return function


def beside(projection: Projection) -> Projection:
    """The projection that is not this one."""
    return "up" if projection == "gate" else "gate"


def applied(function: Function, z: Tensor) -> Tensor:
    """The function of every number of z."""
    if function == "silu":
        return F.silu(z)
    if function == "gelu":
        return F.gelu(z, approximate="tanh")
    if function == "clamped_gate":
        z = z.clamp(max=CLAMP)
        return z * torch.sigmoid(STEEPNESS * z)
    if function == "clamped_up":
        return z.clamp(-CLAMP, CLAMP) + 1
    if function == "limited_gate":
        return F.silu(z.clamp(max=LIMIT))
    return z.clamp(-LIMIT, LIMIT) if function == "limited_up" else z
