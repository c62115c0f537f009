"""The dense part's linear layers that a pack holds as codes: they replace transformers' nn.Linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import operations as kernels
from ...kernels.weights import LinearWeights, Norm, Planes
from ..experts.moe_layer import Control


class PackedLinear(nn.Module):
    """y = x · Wᵀ + bias from low-bit codes.

    Raises:
        ValueError: weights whose parts do not fit each other.
    """

    def __init__(self, weights: LinearWeights, bias: nn.Parameter | None, control: Control) -> None:
        super().__init__()
        self.weights, self.bias, self.control = weights, bias, control
        # Checked once, with no tokens: at small sizes the checks of each call would take as long as the computation.
        kernels.linear(weights.scale.new_empty(0, weights.vector.n), weights)
        backend = kernels.choose(weights.q.device)
        self._linear, self._joined = backend.linear, backend.linear_joined

    @property
    def weight(self) -> Tensor:
        """(N, K) float32: what the codes stand for, for modules of the library that multiply by it themselves."""
        return self.weights.dense(torch.float32)

    def forward(self, x: Tensor, norm: tuple[Norm, float] | None = None, added: Tensor | None = None) -> Tensor:
        """x (..., K) floating point -> (..., N) of x's dtype.

        Args:
            norm: with its eps, which x goes through before. added: (..., N), to which the result is added.

        Raises:
            ValueError: x of another width.
        """
        weights, width = self.weights, x.shape[-1]
        if width != weights.vector.n:
            raise ValueError(f"x of width {width} for a layer of {weights.vector.n}")
        x_bits = self.control.preset.x_bits
        if x.ndim == 2 and self._joined is not None:
            return self._joined(x, weights, x_bits, norm, self.bias, added)
        if norm is not None:
            x = norm[0](x, norm[1])
        if x.ndim == 2:  # as engine/decoder/decoders.py calls it
            y = self._linear(x, weights, x_bits)
        else:
            y = self._linear(x.flatten(0, -2), weights, x_bits).unflatten(0, x.shape[:-1])
        y = y if self.bias is None else y + self.bias
        return y if added is None else added + y


class PlanedLinear(nn.Module):
    """A `PackedLinear` whose weights are in two planes, for who needs the second one of a few rows alone."""

    def __init__(self, planes: Planes, bias: nn.Parameter | None, control: Control) -> None:
        super().__init__()
        self.planes, self.bias, self.control = planes, bias, control
        self.high, self.low = (PackedLinear(part, None, control) for part in (planes.high, planes.low))

    def forward(self, x: Tensor) -> Tensor:
        """As `PackedLinear.forward`."""
        y = self.high(x) + self.low(x)
        return y if self.bias is None else y + self.bias


def in_planes(layer: nn.Module) -> nn.Module:
    """The layer with its weights in two planes, if there can be two."""
    if not isinstance(layer, PackedLinear) or layer.weights.vector.bits != 8:
        return layer
    planes = Planes.of(layer.weights)
    return layer if planes is None else PlanedLinear(planes, layer.bias, layer.control)


def through(
    module: nn.Module, x: Tensor, *, norm: tuple[Norm, float] | None = None, added: Tensor | None = None
) -> Tensor:
    """x (B, K) through a norm, with its eps, and a linear layer, then added to something (B, N): of codes at once."""
    if isinstance(module, PackedLinear):
        return module.forward(x, norm, added)
    x = x if norm is None else norm[0](x, norm[1])
    y = kernels.plain(x, module.weight, module.bias) if type(module) is nn.Linear else module.forward(x)
    return y if added is None else added + y


class Reordered(nn.Module):
    """A linear layer whose rows are in another order, as if they were not. inverse: (N,) where each row is."""

    def __init__(self, inner: nn.Module, inverse: Tensor) -> None:
        super().__init__()
        self.inner, self.inverse = inner, inverse

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)."""
        return self.inner(x)[..., self.inverse]


def rows_of(layer: Any) -> int:
    """How many rows the weights of a linear layer have."""
    return len(layer.weights.q if isinstance(layer, PackedLinear) else layer.weight)


def join(*layers: Any, order: Tensor | None = None) -> nn.Module:
    """Join several linear layers into one; they keep views of its weights.

    Args:
        order: of the joint rows; the layers' views are in that order too.

    Raises:
        ValueError: layers of unlike kinds; none was changed.
    """
    biases = [layer.bias for layer in layers]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        raise ValueError("only some have a bias")
    first = layers[0]
    packed = all(isinstance(layer, PackedLinear) and layer.weights.vector == first.weights.vector for layer in layers)
    if not packed and not all(type(layer) is nn.Linear for layer in layers):
        raise ValueError("they are stored in different ways")
    sizes = [rows_of(layer) for layer in layers]

    def together(parts: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """All in one, and each one's view of it."""
        whole = torch.cat(list(parts))
        whole = whole if order is None else whole[order]
        return whole, whole.split(sizes)

    bias = None
    if biases[0] is not None:
        whole, views = together(biases)
        bias = nn.Parameter(whole, requires_grad=False)
        for layer, view in zip(layers, views, strict=True):
            layer.bias = nn.Parameter(view, requires_grad=False)
    if packed:
        parts = [together([getattr(layer.weights, name) for layer in layers]) for name in ("q", "scale", "zero")]
        for layer, *views in zip(layers, *(views for _, views in parts), strict=True):
            layer.weights = replace(layer.weights, q=views[0], scale=views[1], zero=views[2])
        q, scale, zero = (whole for whole, _ in parts)
        return PackedLinear(replace(first.weights, q=q, scale=scale, zero=zero), bias, first.control)
    joined = nn.Linear(first.in_features, sum(sizes), bias=bias is not None, device="meta")
    whole, views = together([layer.weight for layer in layers])
    joined.weight = nn.Parameter(whole, requires_grad=False)
    if bias is not None:
        joined.bias = bias
    for layer, view in zip(layers, views, strict=True):
        layer.weight = nn.Parameter(view, requires_grad=False)
    return joined
