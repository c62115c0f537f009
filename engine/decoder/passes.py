"""A pass through the layers, one by one: of a token of each of some texts by the compiled step, or of any number of
tokens of one by torch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.cpu.native_step import NativeStep, Place, placed
from ...kernels.step import Stepped
from .attention import GroupedAttention, LatentAttention
from .delta import DeltaRule
from .kv_stores import GrowingStore
from .layers import DecoderLayer
from .quantized_linear import PackedLinear
from .state_store import StatefulStore


class NativePass:
    """The pass of a token of each of some texts through the layers, by the compiled step."""

    def __init__(self, steps: Sequence[NativeStep], layers: Sequence[DecoderLayer], places: Sequence[Place]) -> None:
        self._steps, self._where = steps, placed(steps, places)
        packed = next((part for part in (layers[0].qkv, layers[0].out) if isinstance(part, PackedLinear)), None)
        self._x_bits = 22 if packed is None else packed.control.preset.x_bits

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, see `kernels.step.dense_step`."""
        return self._steps[index].together(index, x, added, self._where, self._x_bits)


class _Mixed:
    """The mixers of layers of which some keep a state, in one pass of a text."""

    def __init__(self, layers: Sequence[DecoderLayer], store: GrowingStore, rope: Tensor, start: int) -> None:
        assert isinstance(store, StatefulStore)
        self.tokens = len(rope)
        attention, rule = GroupedAttention(layers, store, rope, start), DeltaRule(layers, store)
        self._of = [attention if layer.delta is None else rule for layer in layers]

    def __call__(self, index: int, projected: Tensor) -> Tensor:
        """As `GroupedAttention`."""
        return self._of[index](index, projected)


class TorchPass:
    """A pass of any number of tokens of each of some texts through the layers, by torch's operations."""

    def __init__(self, layers: Sequence[DecoderLayer], *texts: GroupedAttention | LatentAttention | _Mixed) -> None:
        self._layers, self._texts, self._tokens = layers, texts, [text.tokens for text in texts]

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], *texts: tuple[GrowingStore, Tensor, int]) -> TorchPass:
        """texts: each one's store, rope (T, 2, D) of its tokens' positions, and the first position."""
        if any(layer.delta is not None for layer in layers):
            return cls(layers, *(_Mixed(layers, *text) for text in texts))
        kind = GroupedAttention if layers[0].latent is None else LatentAttention
        return cls(layers, *(kind(layers, *text) for text in texts))

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, (T, H) each; sets the keys and values of these tokens."""
        layer = self._layers[index]
        stream = x if added is None else x + added
        projected = layer.projected(layer.input_layernorm(stream, layer.eps)).split(self._tokens)
        seen = [text(index, own) for text, own in zip(self._texts, projected, strict=True)]
        stream = stream + layer.out.forward(seen[0] if len(seen) == 1 else torch.cat(seen))
        return layer.stepped(stream)
