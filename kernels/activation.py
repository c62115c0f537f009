"""The functions between an expert's matrices: h = a(gate · x + b_g) b(up · x + b_u), each of one number.

One of the two projections is the *signal*: it is computed for every neuron, its function is applied, and the result v
is compared with the threshold. The other one is computed where |v| reaches it; h is the product of both.

"silu" is SwiGLU (arXiv 2002.05202): a(g) = g sigmoid(g), b(u) = u. "clamped" is gpt-oss's: a(g) = g' sigmoid(1.702 g')
with g' = min(g, 7), b(u) = clamp(u, -7, 7) + 1 (`GptOssExperts` of transformers). "gelu" is Gemma's GeGLU: a(g) =
g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2, b(u) = u. "limited" is DeepSeek-V4's: a(g) = g' sigmoid(g') with
g' = min(g, 10), b(u) = clamp(u, -10, 10) (`DeepseekV4Experts`, `Glm5NextTextExperts` and `HYV4Experts`). "relu2" has no
gate: b(u) = max(u, 0)^2 (`NemotronHExperts`), which is the signal and h; what it is multiplied with is 1.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Projection = Literal["up", "gate"]
Activation = Literal["silu", "clamped", "gelu", "limited", "relu2"]
Function = Literal[
    "plain", "silu", "clamped_gate", "clamped_up", "gelu", "limited_gate", "limited_up", "one", "relu2"
]  # fmt: skip
FUNCTIONS: tuple[Function, ...] = get_args(Function)  # kernels know them by their places: FLOE_PLAIN ... in floe.h
UNGATED: Activation = "relu2"  # the one without a gate
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
    ("relu2", "gate"): "one",
    ("relu2", "up"): "relu2",
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


def gated(activation: Activation) -> bool:
    """Whether experts with it have a gate. The signal of the others is up."""
    return activation != UNGATED


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
    if function == "limited_up":
        return z.clamp(-LIMIT, LIMIT)
    if function == "relu2":
        return F.relu(z).square()
    return torch.ones_like(z) if function == "one" else z


def side(function: Function, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """The function of matrix (F, H) · x + bias: (..., F) of x's type. Where an expert has no such projection: 1."""
    if function == "one":
        return x.new_ones(1)
    return applied(function, F.linear(x, matrix.to(x.dtype), None if bias is None else bias.to(x.dtype)))
