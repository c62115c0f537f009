"""transformers' forward pass over calibration text, one decoder layer at a time, so that it can stop at any border."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...kernels.operations import fast_type
from ...kernels.weights import LinearWeights
from ..modules import library_model
from ..pack.tensor_file import Tensors
from .dense_part import DensePart


class LayerPass:
    """The library's model without weights; masks, rope and the order of calls are its own.

    A layer gets its weights out of the dense part when its turn comes and is forgotten afterwards.
    """

    def __init__(self, config: Any, family: Any, bits: int) -> None:
        config = copy.deepcopy(config)  # `run` changes what it says of the layer
        self._config, self._family, self._bits = config, family, bits
        self._kinds: list[str] | None = getattr(config, "layer_types", None)
        self._model = library_model.empty(config, torch.float32).model.eval()
        self._config = self._model.config
        self._layers: dict[int, Any] = dict(enumerate(self._model.layers))
        self._scaled = family.scaled
        own = getattr(self._model.embed_tokens, "scalar_embed_scale", 1.0)  # an embedding may multiply by itself
        self._scale = family.factor(config, self._scaled) if self._scaled else own
        self._model.norm = nn.Identity()  # what counts here is what leaves a layer
        library_model.renew(self._model, config, "cpu")

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
        weights = dense.stored(file, index + 1)
        prefix = f"model.layers.{index}"
        library_model.furnish(layer, prefix, self._family, weights, self._bits, _dequantized, torch.float32, "cpu")
        return layer

    def feel(
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
        layer, prefix = copy.deepcopy(self._layers[index]), f"model.layers.{index}"
        if index in self._family.expert_layers(self._config):
            self._family.block_of(layer).experts = _NoExperts()
        library_model.furnish(layer, prefix, self._family, weights, 16, _dequantized, torch.float32, "cpu")

        hooks: dict[str, RemovableHandle] = {}

        def before(name: str, module: Any, given: tuple[Tensor, ...]) -> None:
            hooks.pop(name).remove()
            found = rounded(name, module.weight, given[0].flatten(0, -2))
            module.weight = nn.Parameter(found, requires_grad=False)

        for name, module in layer.named_modules():
            if self._family.is_linear(full := f"{prefix}.{name}"):
                module.forward = partial(_multiplied, module)
                hooks[full] = module.register_forward_pre_hook(partial(before, full))
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
