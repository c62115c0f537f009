"""One token before each layer's experts as one CUDA graph per layer, where experts are partly elsewhere.

Norms, projections, attention and router are some 20 launches, which take longer than the card computes. What differs
between tokens is in a record in pinned memory that the first graph reads; each graph continues from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.step import KeptTokens, Stepped
from .attention import norm
from .graphs import Captured, capture, pinned
from .kv_cache import GrowingStore
from .layers import DecoderLayer, Unsupported

_ID, _POSITION, _COUNTING, _ADDRESSES = range(4)


class TokenRecord:
    """What differs between tokens: in pinned memory, and where a captured copy brings it.

    Attributes:
        token, times, kept: on the device: the id (1,), whether it is counted (1,), and where keys and values are.
    """

    def __init__(self, layers: Sequence[DecoderLayer], device: torch.device) -> None:
        self._pinned = pinned(_ADDRESSES + len(layers), dtype=torch.int64, device=device)
        self._written: Any = self._pinned.numpy()
        self._there = torch.zeros_like(self._pinned, device=device)
        self.token, self.times = self._there[_ID:_POSITION], self._there[_COUNTING:_ADDRESSES]
        self.kept = KeptTokens(self._there[_ADDRESSES:], self._there[_POSITION:_COUNTING])
        self._version = -1, 0  # of the store whose addresses these are

    def write(self, token: int, position: int, store: GrowingStore, *, counting: bool) -> None:
        """For the next token; the device has done the last one."""
        if (version := store.version()) != self._version:
            self._written[_ADDRESSES:] = [layer.data_ptr() for layer in store.layers()]
            self._version = version
        self._written[:_ADDRESSES] = token, position, counting

    def rehearse(self, layers: Sequence[DecoderLayer], device: torch.device) -> Tensor:
        """Write a token that is not counted, with an entry for all layers that no conversation has; returns that."""
        heads = layers[0].heads
        entry = torch.empty(1, *heads.entry, dtype=heads.cache_dtype, device=device)
        self._written[:_ADDRESSES], self._written[_ADDRESSES:], self._version = 0, entry.data_ptr(), (-1, 0)
        return entry

    def read(self) -> None:
        """Bring it to the device: a part of what is captured."""
        self._there.copy_(self._pinned, non_blocking=True)


def before_experts(layer: DecoderLayer, index: int, stream: Tensor, rope: Tensor, kept: KeptTokens) -> Stepped:
    """`kernels.step.dense_step` with nothing that depends on the position but in the device's memory.

    Args:
        stream: (1, H) all that was computed before. rope: (window, 2, D). index: the layer's number.
    """
    qkv = layer.qkv.forward(norm(stream, layer.input_layernorm, layer.eps))
    stream = stream + layer.out.forward(kernels.attend_one(qkv, rope, kept, index, layer.heads, layer.eps))
    hidden = norm(stream, layer.post_attention_layernorm, layer.eps)
    return Stepped(stream, hidden, layer.router(hidden) if layer.router else ())


def need_kernels(device: torch.device) -> None:
    """Raises Unsupported: plain torch computes on the device, and would wait in the middle of a capture."""
    backend = kernels.choose(device)
    if backend.name == "reference":
        raise Unsupported(f"a graph needs the Triton kernels: {backend.reason}")


class CardLayers:
    """A graph for each layer.

    Raises:
        Unsupported: nothing could be captured.
    """

    def __init__(self, layers: Sequence[DecoderLayer], embedding: Tensor, rope: Tensor) -> None:
        self._layers, self._embedding, self._rope, self._device = layers, embedding, rope, embedding.device
        need_kernels(self._device)
        self._record = TokenRecord(layers, self._device)
        self._added = embedding.new_zeros(1, embedding.shape[1])
        self._graphs: list[Captured] = []
        try:
            self._capture()
        # Whatever a driver or a compiler of kernels raises: torch's operations compute the same without them.
        except Exception as error:
            raise Unsupported(f"a layer could not be captured: {type(error).__name__}: {error}") from error

    @torch.inference_mode()
    def _capture(self) -> None:
        entry = self._record.rehearse(self._layers, self._device)
        for index in range(len(self._layers)):
            self._graphs.append(capture(partial(self._work, index), self._device))
        del entry  # the graphs have run on it

    def _work(self, index: int) -> tuple[Tensor, ...]:
        if index == 0:
            self._record.read()
            stream = F.embedding(self._record.token, self._embedding)
        else:
            stream = self._graphs[index - 1].outputs[0] + self._added
        stepped = before_experts(self._layers[index], index, stream, self._rope, self._record.kept)
        return stepped.stream, stepped.hidden, *stepped.routed

    def begin(self, token: int, position: int, store: GrowingStore) -> None:
        """The next steps are of this token. The device has done the last one: its logits were read."""
        self._record.write(token, position, store, counting=False)

    def step(self, index: int, _stream: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, (1, H) each, behind the step of the layer before, whose stream it reads.

        added: that layer's block's output. The results are overwritten by the next step of this layer.
        """
        if index and added is None:
            self._added.zero_()
        elif added is not None:
            self._added.copy_(added)
        self._graphs[index].replay()
        stream, hidden, *routed = self._graphs[index].outputs
        # Experts are counted later, when another token may have been here.
        return Stepped(stream, hidden, (routed[0].clone(), *routed[1:]) if routed else ())
