"""A pass through the layers, one by one: of a token of each of some texts by the compiled step, or of any number of
tokens of one by torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.cpu.native_step import NativeStep, Place, placed
from ...kernels.mixers.convolution import Convolution
from ...kernels.mixers.delta import Delta
from ...kernels.mixers.grouped import Heads
from ...kernels.step import Stepped
from .kv_stores import GrowingStore
from .layers import DecoderLayer
from .mixers.convolution import ShortConvolution
from .mixers.delta import DeltaRule
from .mixers.grouped import GroupedAttention, Part
from .mixers.latent import LatentAttention, LatentParts
from .quantized_linear import PackedLinear
from .state_store import StatefulStore


class NativePass:
    """The pass of a token of each of some texts through the layers, by the compiled step."""

    def __init__(self, steps: Sequence[NativeStep], layers: Sequence[DecoderLayer], places: Sequence[Place]) -> None:
        self._steps, self._where = steps, placed(steps, places)
        packed = next((part for part in (layers[0].first, layers[0].out) if isinstance(part, PackedLinear)), None)
        self._x_bits = 22 if packed is None else packed.control.preset.x_bits

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, see `kernels.step.dense_step`."""
        return self._steps[index].together(index, x, added, self._where, self._x_bits)


class MixerPass(Protocol):
    """The layers with one kind of mixer in a pass of a text."""

    def __call__(self, index: int, projected: Tensor) -> Tensor:
        """What layer `index`'s projection back is given, by what its mixer is given, (T, ...) each."""
        ...


_PASSES: dict[type, Callable[..., MixerPass]] = {
    Heads: GroupedAttention,
    LatentParts: LatentAttention,
    Delta: DeltaRule,
    Convolution: ShortConvolution,
}


class TorchPass:
    """A pass of any number of tokens of each of some texts through the layers, by torch's operations.

    Args:
        texts: each one's store, rope (T, 2, D) of its tokens' positions, and the first position. part: of the only
            text's tokens, where other processes compute the others.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], *texts: tuple[GrowingStore, Tensor, int], part: Part | None = None
    ) -> None:
        mixers, eps = [layer.mixer for layer in layers], layers[0].eps
        self._layers, self._tokens = layers, [len(rope) for _, rope, _ in texts]
        self._texts: list[dict[type, MixerPass]] = []
        for text in texts:
            if isinstance(text[0], StatefulStore):
                text[0].begin(len(text[1]))
            if part is not None:
                self._texts.append({Heads: GroupedAttention(mixers, eps, *text, part)})
            else:
                self._texts.append({kind: _PASSES[kind](mixers, eps, *text) for kind in {*map(type, mixers)}})

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, (T, H) each; sets the keys and values of these tokens."""
        layer = self._layers[index]
        stream = x if added is None else x + added
        projected = layer.projected(layer.input_layernorm(stream, layer.eps)).split(self._tokens)
        seen = [text[type(layer.mixer)](index, own) for text, own in zip(self._texts, projected, strict=True)]
        return layer.stepped(layer.mixed(stream, layer.out.forward(seen[0] if len(seen) == 1 else torch.cat(seen))))
