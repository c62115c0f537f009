"""A model's drafting head where all of the model is on one card: each guess is one CUDA graph.

A guess's graph reads its token and position as a token's does (`card_layers.py`), and from fixed memory what the
model's layers, or the head itself, had come to before. It leaves there what the next guess is made of, and the guess
and its likelihood in pinned memory, for which the host waits. Tokens that the model went through since the last guess
go through the layer together before, by torch's operations: of these, keys and values are enough.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels import operations as kernels
from ....kernels.step import ExpertLayer, capped
from ....kernels.weights import LinearWeights, Projection
from ...events import MOST_TOGETHER, Notice
from ...experts.moe_layer import Control
from ...outcomes import brief
from ..draft_head import DraftHead
from ..graphs import Captured, capture, pinned
from ..kv_cache import KVCache
from ..layers import embedded
from ..passes import TorchPass
from ..quantized_linear import PackedLinear, through
from ..token_pass import in_memory
from .card_layers import TokenRecord, before_experts

_log = logging.getLogger("floe_chat.engine")


class CardDraft(DraftHead):
    """See `DraftHead`.

    Attributes:
        declined: why it guesses nothing; "" where it does. notices: for the user.

    Raises:
        Unsupported: as there; or no memory could be pinned.
    """

    def _prepare(self, control: Control) -> None:
        embedding = self._model.embedding
        self._device, self._x_bits, self.declined = embedding.device, control.preset.x_bits, ""
        self._heads = {rows: _computed(head, control) for rows, head in self._parts.items()}
        (experts,) = in_memory(self._layers)
        self._experts: ExpertLayer | None = None
        if experts is not None:
            ruled = experts.in_force()
            self._experts = replace(ruled.as_one(), limits=ruled.limits_in_place())
        self._record = TokenRecord(self._layers, self._device)
        self._turn = self._rope.tables(0, 1)[0].clone()
        self._before = embedding.new_zeros(1, embedding.shape[1])  # what a guess's token follows, behind its norm
        self._found = pinned(2, dtype=torch.float32, device=self._device)  # the guess, and how likely it is
        self._graphs: dict[int, Captured] = {}
        self.notices = control.notices

    def saw(self, kv: KVCache, ids: Sequence[int], streams: Tensor) -> None:
        """See `DraftHead`."""
        if not self.declined:
            super().saw(kv, ids, streams)

    def guess(self, token: int, kv: KVCache, more: Callable[[list[float]], bool]) -> tuple[list[int], list[float]]:
        """See `DraftHead`; nothing where a guess could not be captured, or its memory ran out."""
        try:
            return super().guess(token, kv, more)
        # Whatever a driver or a compiler of kernels raises: tokens are computed without guesses, too.
        except Exception as error:  # noqa: BLE001
            self.declined = brief(error)
            self._streams, self._graphs = [], {}
            _log.warning("the drafting head guesses nothing any more, because %s", self.declined, exc_info=True)
            self.notices.append(Notice("The drafting head is left out", f"It guesses nothing more: {self.declined}."))
            return [], []

    def _guesses(self, following: Sequence[int], hidden: Tensor) -> Iterator[tuple[int, float]]:
        store, start, end = self._store, self._length, self._length + len(following)
        graph = self._graph(self._nearest())
        store.crop(start)
        store.reserve(end + MOST_TOGETHER)
        if len(following) > 1:
            given = self._given(following[:-1], hidden[:-1])
            TorchPass(self._layers, (store, self._rope.tables(start, end - 1), start)).step(0, given, None)
        store.length = end
        self._before.copy_(hidden[-1:])
        token = following[-1]
        for place in itertools.count(end - 1):
            self._record.write([token], place, store, counting=False)
            self._turn.copy_(self._rope.tables(place, place + 1)[0], non_blocking=True)
            graph.replay()
            graph.wait()
            best, likely = self._found.tolist()
            token = int(best)
            yield token, likely

    def _graph(self, rows: int) -> Captured:
        """A guess among the first `rows` of the vocabulary, captured when it is first needed."""
        if rows not in self._graphs:
            kept = self._record.rehearse(self._layers, self._device)
            self._graphs[rows] = capture(partial(self._work, rows), self._device)
            del kept  # the graph has run on it
        return self._graphs[rows]

    def _work(self, rows: int) -> tuple[Tensor, ...]:
        model, layer = self._model, self._layers[0]
        self._record.read()
        both = embedded(self._record.tokens, model.embedding, model.scale), self._before
        normed = [F.rms_norm(x, own.shape, own, self._eps) for x, own in zip(both, self._norms, strict=True)]
        given = through(self._joined, torch.cat(normed, -1))
        stepped = before_experts(layer, 0, given, [self._turn], self._record.kept)
        stream, added = stepped.stream, None
        if self._experts is not None:
            added_to = stream if layer.sandwich is None else None
            chosen, weights = stepped.routed
            given = stepped.hidden, self._experts, chosen, weights, added_to
            stream, _, _ = kernels.experts_step(*given, x_bits=self._x_bits)
            if added_to is None:
                stream, added = layer.behind(stepped, stream)
        self._before.copy_(self._norm(stream if added is None else stream + added, self._eps))
        logits = capped(self._heads[rows](self._before).float(), model.cap)
        best = logits.max(-1)
        likely = 1 / (logits - best.values[:, None]).exp().sum(-1)
        self._found.copy_(torch.cat([best.indices.float(), likely]), non_blocking=True)
        return ()


def _computed(head: Projection, control: Control) -> Callable[[Tensor], Tensor]:
    """The output layer's part as a function of hidden states (1, H)."""
    weight, bias = head.weight, head.bias
    if isinstance(weight, Tensor):
        return lambda hidden: kernels.plain(hidden, weight, bias)
    assert isinstance(weight, LinearWeights), "two planes"
    return PackedLinear(weight, None if bias is None else nn.Parameter(bias, requires_grad=False), control)
