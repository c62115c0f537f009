"""The linear layers of the dense part that a pack holds as codes: what stands where transformers' nn.Linear stands."""

from __future__ import annotations

from torch import Tensor, nn

from .. import kernels
from ..kernels.layouts import LinearWeights
from .moe import Control


class PackedLinear(nn.Module):
    """y = x · Wᵀ + bias from low-bit codes."""

    def __init__(self, weights: LinearWeights, bias: nn.Parameter | None, control: Control) -> None:
        super().__init__()
        self.weights, self.bias, self.control = weights, bias, control

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N) of x's dtype."""
        exact = self.control.preset.lossless
        y = kernels.linear(x.flatten(0, -2), self.weights, exact=exact).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias
