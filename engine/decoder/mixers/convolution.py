"""The short convolution, of LFM2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.mixers.convolution import Convolution, convolution
from ..kv_stores import GrowingStore
from ..state_store import StatefulStore


def read_convolution(mixer: Any) -> tuple[nn.Module, Convolution]:
    """The first projection of a layer, and its mixer."""
    return mixer.in_proj, Convolution(mixer.conv.weight[:, 0].T.contiguous(), mixer.conv.bias)


class ShortConvolution:
    """Those of one pass. Args: as for `GroupedAttention`."""

    def __init__(self, mixers: Sequence[object], _eps: float, store: GrowingStore, rope: Tensor, _start: int) -> None:
        assert isinstance(store, StatefulStore)
        self._of, self._store, self.tokens = mixers, store, len(rope)

    def __call__(self, index: int, projected: Tensor) -> Tensor:
        """(T, H) by layer `index`'s first projection; the store's next state is the one behind these tokens."""
        mixer, before = self._of[index], self._store.state(index)
        assert isinstance(mixer, Convolution)
        after = torch.empty_like(before)
        out = convolution(projected, before, mixer, after, self._store.along(index))
        self._store.next_state(index, after)
        return out
