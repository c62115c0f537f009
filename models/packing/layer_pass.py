"""transformers' forward pass over calibration text, one decoder layer at a time, so that it can stop at any border."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...kernels.operations import fast_type
from ...kernels.weights import LinearWeights
from ..modules import library_model
from ..pack.table import put
from ..pack.tensor_file import Tensors
from .dense_part import DensePart


class Called(NamedTuple):
    """What a layer is called with."""

    given: tuple[Any, ...]
    named: dict[str, Any]


class LayerPass:
    """The library's model without weights; masks, rope and the order of calls are its own.

    A layer gets its weights out of the dense part when its turn comes and is forgotten afterwards.
    """

    def __init__(self, config: Any, family: Any, bits: int) -> None:
        config = copy.deepcopy(config)  # `run` changes what it says of the layer
        self._config, self._family, self._bits = config, family, bits
        self._kinds: list[str] | None = getattr(config, "layer_types", None)
        whole = library_model.empty(config, torch.float32)
        library_model.renew(whole, family, config, "cpu")
        self._model = whole.model.eval()
        self._config = self._model.config
        self._layers: dict[int, Any] = dict(enumerate(self._model.layers))
        self._scaled = family.scaled
        own = getattr(self._model.embed_tokens, "scalar_embed_scale", 1.0)  # an embedding may multiply by itself
        self._scale = family.factor(config, self._scaled) if self._scaled else own
        self._model.norm = nn.Identity()  # what counts here is what leaves a layer

    def embed(self, dense: DensePart, file: Tensors, tokens: Tensor) -> Tensor:
        """tokens (N, T) int64 -> what enters the first layer, (N, T, H) float32."""
        (embedding,) = (t for name, t in dense.stored(file, 0).items() if name.endswith("embed_tokens.weight"))
        return F.embedding(tokens, embedding).float() * self._scale

    def layer(self, index: int, dense: DensePart, file: Tensors, experts: nn.Module | None) -> Any:
        """Decoder layer `index` with its dense weights and these experts, if it has any."""
        layer = self._layers.pop(index)
        self._about(index)
        if experts is not None:
            self._family.block_of(layer).experts = experts
        _furnish(layer, f"model.layers.{index}", self._family, dense.stored(file, index + 1), self._bits)
        return layer

    def calibrate(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        rounded: Callable[[str, Tensor, Tensor], Tensor],
    ) -> None:
        """Run decoder layer `index` as published on hidden (N, T, H), without its experts, to round its linear layers.

        Args:
            weights: the source's, by published names. rounded: is told a linear layer's name in the model, its matrix
                (n, k) and its inputs (B, k) when these are known, and gives what takes the matrix's place.
        """
        layer = copy.deepcopy(self._layers[index])
        _calibrate(layer, f"model.layers.{index}", self._family, weights, rounded)
        self._about(index)
        self.run(layer, hidden)

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """hidden (N, T, H) -> (N, T, H): through one layer."""
        self._model.layers = nn.ModuleList([layer])
        if self._scaled:  # once, where it was embedded
            setattr(self._model, self._scaled, 1.0)
        with torch.inference_mode():
            return self._model(inputs_embeds=hidden, use_cache=False).last_hidden_state

    def _about(self, index: int) -> None:
        if self._kinds:
            self._config.layer_types = [self._kinds[index]]  # the library looks its only layer's mask up there


class WholePass:
    """The library's own forward pass, from ids to the last layer, of a model of which nothing is known.

    What one layer passes on to the next is the model's own affair, so nothing can be kept at a border: a pass that
    continues goes through finished layers again. A layer gets its weights when the pass comes to it, and loses them
    behind it.

    Args:
        reached: called before each layer with its number and what it is called with, and behind the last one with
            None; says whether to go on.
        lookups: what takes the place of tables, by their modules' names.
    """

    def __init__(
        self,
        config: Any,
        family: Any,
        bits: int,
        reached: Callable[[int, Called | None], bool],
        lookups: Mapping[str, nn.Module],
    ) -> None:
        self._family, self._bits, self._reached = family, bits, reached
        whole = library_model.empty(config, torch.float32)
        put(whole, lookups)
        library_model.renew(whole, family, config, "cpu")
        self._model = whole.model.eval()
        for index, layer in enumerate(self._model.layers):
            layer.register_forward_pre_hook(partial(self._before, index), with_kwargs=True)
            layer.register_forward_hook(partial(self._behind, index))

    def run(self, dense: DensePart, file: Tensors, tokens: Tensor) -> None:
        """tokens (N, T) int64 through all layers."""
        around: Any = copy.copy(self._model)
        around._modules = {name: part for name, part in self._model._modules.items() if name not in ("layers", "norm")}
        _furnish(around, "model", self._family, dense.stored(file, 0), self._bits)
        self._model._modules |= around._modules
        with torch.inference_mode(), suppress(_EnoughError):
            self._model(input_ids=tokens, use_cache=False)

    def _before(self, index: int, _layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._reached(index, Called(given, named)):
            raise _EnoughError

    def _behind(self, index: int, layer: nn.Module, _given: object, _found: object) -> None:
        for module in layer.modules():
            for name, _ in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, None)
        if index + 1 == len(self._model.layers):
            self._reached(index + 1, None)
            raise _EnoughError

    def layer(self, index: int, dense: DensePart, file: Tensors, experts: nn.Module | None) -> Any:
        """See `LayerPass`: the layer itself, which the pass is about to call."""
        layer = self._model.layers[index]
        if experts is not None:
            self._family.block_of(layer).experts = experts
        _furnish(layer, f"model.layers.{index}", self._family, dense.stored(file, index + 1), self._bits)
        return layer

    def calibrate(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        called: Called,
        rounded: Callable[[str, Tensor, Tensor], Tensor],
    ) -> None:
        """See `LayerPass`: with what the layer is called with."""
        own = self._model.layers[index]
        hooks, own._forward_pre_hooks, own._forward_hooks = (own._forward_pre_hooks, own._forward_hooks), {}, {}
        layer = copy.deepcopy(own)
        own._forward_pre_hooks, own._forward_hooks = hooks
        _calibrate(layer, f"model.layers.{index}", self._family, weights, rounded)
        with torch.inference_mode():
            layer(*called.given, **called.named)


class _EnoughError(Exception):
    """Nothing behind this layer is wanted."""


def _furnish(module: nn.Module, prefix: str, family: Any, weights: Mapping[str, Tensor], bits: int) -> None:
    library_model.furnish(module, prefix, family, weights, bits, _dequantized, torch.float32, "cpu")


def _calibrate(
    layer: nn.Module,
    prefix: str,
    family: Any,
    weights: Mapping[str, Tensor],
    rounded: Callable[[str, Tensor, Tensor], Tensor],
) -> None:
    """Prepare a layer to be called as published and without its experts, and its linear layers to be rounded then."""
    if (block := family.block_of(layer)) is not None and hasattr(block, "experts"):
        block.experts = _NoExperts()
    _furnish(layer, prefix, family, weights, 16)
    hooks: dict[str, RemovableHandle] = {}

    def before(name: str, module: Any, given: tuple[Tensor, ...]) -> None:
        hooks.pop(name).remove()
        found = rounded(name, module.weight, given[0].flatten(0, -2))
        module.weight = nn.Parameter(found, requires_grad=False)

    linears: list[tuple[str, Any]] = [
        (n, module) for n, module in layer.named_modules() if isinstance(module, nn.Linear)
    ]
    for name, module in linears:
        if family.is_linear(full := f"{prefix}.{name}"):
            module.forward = partial(_multiplied, module)
            hooks[full] = module.register_forward_pre_hook(partial(before, full))


class _NoExperts(nn.Module):
    """In place of a layer's experts."""

    def forward(self, hidden: Tensor, *_routed: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


def _dequantized(weights: LinearWeights, bias: nn.Parameter | None) -> nn.Module:
    """The layer that calibration sees: the library's, with the values that the codes stand for."""
    layer = nn.Linear(weights.vector.n, weights.q.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weights.dense(fast_type(weights.q.device)), requires_grad=False)
    layer.register_parameter("bias", bias)
    layer.forward = partial(_multiplied, layer)  # pyright: ignore[reportAttributeAccessIssue]
    return layer


def _multiplied(layer: Any, x: Tensor) -> Tensor:
    """A linear layer's forward, in the type of its weights."""
    kind, bias = layer.weight.dtype, layer.bias
    return F.linear(x.to(kind), layer.weight, None if bias is None else bias.to(kind)).to(x.dtype)
