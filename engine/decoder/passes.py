"""A pass through the layers, one by one: of one token by the compiled step, or of any number by torch's operations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...kernels.cpu.native_step import NativeStep
from ...kernels.step import Stepped
from .attention import GroupedAttention, LatentAttention
from .kv_stores import GrowingStore
from .layers import DecoderLayer, norm
from .quantized_linear import PackedLinear


class NativePass:
    """One token's pass through the layers by the compiled step. rope: (2, D) of its position."""

    def __init__(
        self,
        steps: Sequence[NativeStep],
        layers: Sequence[DecoderLayer],
        store: GrowingStore,
        rope: Tensor,
        position: int,
    ) -> None:
        self._steps, self._kept, self._rope, self._position = steps, store.layers(), rope, position
        packed = next((part for part in (layers[0].qkv, layers[0].out) if isinstance(part, PackedLinear)), None)
        self._x_bits = 22 if packed is None else packed.control.preset.x_bits

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, see `kernels.step.dense_step`."""
        return self._steps[index](x, added, self._rope, self._kept[index], self._position, self._x_bits)


class TorchPass:
    """A pass of any number of tokens through the layers, by torch's operations."""

    def __init__(self, layers: Sequence[DecoderLayer], attention: GroupedAttention | LatentAttention) -> None:
        self._layers, self._attention = layers, attention

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], store: GrowingStore, rope: Tensor, start: int) -> TorchPass:
        """rope: (T, 2, D) of their positions, from `start` on."""
        kind = GroupedAttention if layers[0].latent is None else LatentAttention
        return cls(layers, kind(layers, store, rope, start))

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, (T, H) each; sets the keys and values of these tokens."""
        layer = self._layers[index]
        stream = x if added is None else x + added
        stream = stream + self._attention(index, norm(stream, layer.input_layernorm, layer.eps))
        return layer.stepped(stream)
