"""Reads a layer's block from transformers' modules: its router, its experts, and what every token is given besides."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import operations as kernels
from ...kernels.step import Router, Sandwich, Swiglu
from ...kernels.weights import Norm, Projection
from ...models.families import Family
from ..experts.moe_layer import MoELayer
from ..experts.offloaded_layer import OffloadedLayer
from .quantized_linear import PackedLinear, PlanedLinear, Reordered, join, rows_of, through


def norm_weight(family: Family, module: Any) -> Tensor:
    """What a norm multiplies by."""
    return module.weight + 1 if family.centred else module.weight


def read_norm(family: Family, module: Any) -> Norm:
    """A norm's record."""
    kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
    return Norm(norm_weight(family, module), getattr(module, "bias", None), kind)


class Unsupported(Exception):  # noqa: N818 - not an error: something slower runs instead
    """The fused pass cannot compute this model; the text says why."""


def projection(module: nn.Module) -> Projection:
    """As one operation takes it.

    Raises:
        Unsupported: a module of an unknown kind.
    """
    if isinstance(module, PackedLinear):
        return Projection(module.weights, module.bias)
    if isinstance(module, PlanedLinear):
        return Projection(module.planes, module.bias)
    if type(module) is nn.Linear:
        return Projection(module.weight, module.bias)
    raise Unsupported(f"a projection is a {type(module).__name__}")


def joined(what: str, *modules: Any, order: Tensor | None = None) -> nn.Module:
    """Several projections as one; see `join`.

    Raises:
        Unsupported: they are of unlike kinds.
    """
    try:
        return join(*modules, order=order)
    except ValueError as error:
        raise Unsupported(f"the {what} projections cannot be joined: {error}") from error


def in_order(owner: Any, names: Sequence[str], rows: Tensor | None, what: str) -> nn.Module:
    """Projections of a module as one, with its rows in that order; the modules compute as before, by views of it.

    Raises:
        Unsupported: they are of unlike kinds.
    """
    modules = [getattr(owner, name) for name in names]
    parts = [module.inner if isinstance(module, Reordered) else module for module in modules]
    if rows is None or parts != modules:  # an earlier pass has ordered them
        return joined(what, *parts)
    whole, start = joined(what, *parts, order=rows), 0
    for name, part in zip(names, parts, strict=True):
        own = rows[start : start + rows_of(part)]
        start += len(own)
        if not own.equal(own.sort().values):
            setattr(owner, name, Reordered(part, own.argsort()))
    return whole


class Beside:
    """`kernels.step.Swiglu` by a layer's modules.

    Raises:
        Unsupported: modules of an unknown kind.
    """

    def __init__(self, mlp: Any, scale: Tensor | None = None, *, gelu: bool = False) -> None:
        names = ("gate_proj", "up_proj", "down_proj") if hasattr(mlp, "gate_proj") else ("w1", "w3", "w2")
        gate, up, self._down = (getattr(mlp, name) for name in names)
        self._both, self._scale = joined("gate and up", gate, up), scale
        self.swiglu = Swiglu(projection(self._both), projection(self._down), scale, "gelu" if gelu else "silu")

    def __call__(self, hidden: Tensor, stream: Tensor | None = None) -> Tensor:
        """hidden (T, H) -> (T, H), added to the stream if there is one."""
        gate, up = through(self._both, hidden).chunk(2, -1)
        given = self.swiglu.gate(gate) * up
        if self._scale is None:
            return through(self._down, given, added=stream)
        y = through(self._down, given) * torch.sigmoid(kernels.plain(hidden, self._scale))
        return y if stream is None else stream + y


def read_router(family: Family, block: Any) -> Router:
    """A block's router.

    Raises:
        Unsupported: experts with biases that are not a pack's.
    """
    routing, gate, experts = family.routing, family.router(block), block.experts
    if routing.kind == "scaled":
        heard = experts.hears(gate.proj.weight) if isinstance(experts, OffloadedLayer) else None
        own = gate.proj.weight, gate.config.num_experts_per_tok, True, torch.float32, heard
        return Router(*own, factors=gate.per_expert_scale, norm=Norm(gate.scale * gate.scalar_root_size))
    if routing.kind == "own":
        raise Unsupported("its router is transformers' own")
    if family.biased and not isinstance(experts, MoELayer):
        raise Unsupported("its experts have biases that are not a pack's")
    correction = _corrected(block, routing.correction) if routing.correction else None
    bias = getattr(gate, "bias", None)
    groups = routing.groups or (getattr(gate, "num_group", None) or 1, getattr(gate, "topk_group", None) or 1)
    return Router(
        gate.weight,
        routing.top_k or gate.top_k,
        family.normalizes(gate),
        # Mixtral and those that compute logits in float32 keep the weights so.
        torch.float32 if routing.precise or not hasattr(gate, "norm_topk_prob") else gate.weight.dtype,
        experts.hears(gate.weight) if isinstance(experts, OffloadedLayer) else None,
        kind=routing.kind,
        precise=routing.precise,
        bias=bias if isinstance(bias, Tensor) else None,
        correction=None if correction is None else correction.flatten(),
        groups=groups[0],
        top_groups=groups[1],
        scale=float(getattr(gate, "routed_scaling_factor", 1.0) if routing.scale is None else routing.scale),
        down_bias=experts.take_bias() if isinstance(experts, MoELayer) else None,
        jitter=float(getattr(gate, "router_jitter_noise", 0.0)),
    )


def _corrected(block: Any, name: str) -> Tensor | None:
    """The buffer or parameter of that name, if the block has it."""
    try:
        return attrgetter(name)(block)
    except AttributeError:
        return None


def read_beside(family: Family, block: Any, *, has_experts: bool) -> Beside | None:
    """What every token is given besides experts, if anything.

    Raises:
        Unsupported: modules of an unknown kind.
    """
    gelu = family.experts_by == "gelu"
    if not has_experts:
        return Beside(block, gelu=gelu)
    if (shared := family.shared) is None:
        return None
    gate = None if shared.gate is None else getattr(block, shared.gate).weight
    return Beside(getattr(block, shared.module), gate, gelu=gelu)


def read_sandwich(family: Family, layer: Any) -> Sandwich | None:
    """The norms behind a layer's parts, if it has them."""
    if (names := family.sandwich) is None:
        return None
    mixed, both = (read_norm(family, getattr(layer, name)) for name in (names.mixed, names.both))
    rest = (names.before, names.beside, names.experts)
    before, beside, experts = (read_norm(family, getattr(layer, name)) if name else None for name in rest)
    return Sandwich(mixed, before, beside, experts, both, float(getattr(layer, "layer_scalar", 1.0)))
