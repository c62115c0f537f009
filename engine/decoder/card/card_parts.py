"""One token where several cards have some of the layers each: their graphs one card after the other.

The stream crosses by a copy from where one card leaves it to where the next one's first graph reads it. Both cards
order that themselves: the host waits only where layers do, and for the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...experts.offloaded_layer import OffloadedLayer
from ..divided import DividedStore
from ..kv_stores import GrowingStore, KvPart
from ..layers import DecoderLayer, Unsupported
from .card_ends import CardHead, Ends
from .card_layers import CardLayers


class CardParts:
    """See `CardLayers`, of all layers. ends: on the first card.

    Raises:
        Unsupported: nothing could be captured.
    """

    def __init__(self, layers: Sequence[DecoderLayer], ends: Ends, parts: Sequence[KvPart]) -> None:
        embedding = ends.embedding
        self._rope, self._ropes = ends.rope, list[Tensor]()
        self._parts: list[tuple[CardLayers, Tensor | None]] = []
        for part in parts:
            inbox = None
            if part.layers.start:
                inbox = torch.zeros(1, embedding.shape[1], dtype=embedding.dtype, device=part.device)
            own, there = layers[part.layers.start : part.layers.stop], replace(ends, rope=ends.rope.to(part.device))
            self._ropes.append(there.rope)
            self._parts.append((CardLayers(own, there, inbox, alone=False), inbox))
        self._counts = [len(part.layers) for part in parts]
        self._attending = [block for block in (layer.experts for layer in layers) if isinstance(block, OffloadedLayer)]
        self._last = embedding.new_zeros(1, embedding.shape[1])
        self.head = CardHead(ends)
        self._capture_head()

    @torch.inference_mode()
    def _capture_head(self) -> None:
        self.head.capture(lambda: self._last)

    def prepare(self) -> None:
        """See `CardLayers`.

        Raises:
            Unsupported: as for the class; or a predictor runs a layer of another card before its turn.
        """
        for block in self._attending:
            if any(one.attends for one in block.shared.predictors):
                raise Unsupported("the predictor runs a layer before its turn")
        for part, _ in self._parts:
            part.prepare()

    def begin(self, token: int, position: int, store: GrowingStore) -> None:
        """See `CardLayers`."""
        assert isinstance(store, DividedStore), "not divided"
        for rope in self._ropes:
            if rope is not self._rope:
                rope.copy_(self._rope, non_blocking=True)
        for (part, _), own in zip(self._parts, store.parts, strict=True):
            part.begin(token, position, own)

    def pooled(self) -> bool:
        """`run` is for every token."""
        return True

    def how(self) -> str:
        """See `CardLayers`; where cards differ, of each."""
        said = list(dict.fromkeys(part.how() for part, _ in self._parts))
        how = said[0] if len(said) == 1 else "".join(f", on card {n}{one or ' alone'}" for n, one in enumerate(said, 1))
        if self.head.declined:
            how += f", the last norm and the head one by one, because {self.head.declined}"
        return how

    def run(self, count: int) -> Tensor:
        """See `CardLayers`."""
        stream = self._last
        for (part, inbox), layers in zip(self._parts, self._counts, strict=True):
            if count <= 0:
                break
            if inbox is not None:
                inbox.copy_(stream, non_blocking=True)
            stream = part.through(min(count, layers))
            count -= layers
        self._last.copy_(stream, non_blocking=True)
        return self.head.run()
