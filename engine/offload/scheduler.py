"""Which rows move to the device, and when: those a step needs now, and those that the next layer will probably need.

A prefetch goes behind everything urgent, in pieces that are sent or dropped as a whole. `predictor.py` predicts the
next layer's experts and input; the device is asked which neurons follow, their rows are fetched once it has found them,
and pieces that have not begun are dropped when that layer's own choice is known. Nothing waits for a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.offload.placing import Found, Way
from .asked import Asked
from .device import Device
from .device_memory import DeviceMemory
from .links.compiled_link import CompiledLink
from .links.transfer import Transfer
from .row_pool import Keys, RowPool, Slots

# Rows of a piece of a prefetch, at least: few enough that most of a wrong guess is never sent. Pieces, at most: each
# costs the host some microseconds, and a link that moves more rows at a time a chunk.
PIECE, PIECES = 200, 4


@dataclass(frozen=True, slots=True)
class PendingPrefetch:
    """What a layer will probably need, available once the device has found it.

    Attributes:
        layer: its index. width: neurons of one of the requested experts, as the preset divides them.
        asked: its neurons; also experts and scores of the calls, and all predicted experts, (B, K).
    """

    layer: int
    width: int
    asked: Asked


class Scheduler:
    """Transfers into the pool of rows. Only the engine thread uses it.

    Attributes:
        sources: layer by layer all rows, (E * F, nbytes) uint8 in RAM.
        under_way: transfers into the pool that are not known to have arrived, the oldest first.
        ahead: what the next layer will probably need, until it is fetched or that layer's turn comes.
        guessed: by layer, what was predicted, to compare with what its step needs: neurons, each once or once per
            token, and experts (B, K).
    """

    def __init__(self, device: Device, pool: RowPool, memory: DeviceMemory, sources: Sequence[Tensor]) -> None:
        self._device, self._pool, self._memory, self.sources = device, pool, memory, sources
        self.under_way: dict[Transfer, None] = {}
        self.ahead: PendingPrefetch | None = None
        self.guessed: dict[int, tuple[NDArray[np.int32], Tensor]] = {}
        self._marks = np.zeros(pool.layers.shape[1], np.bool_)  # all False, but inside of `await_rows`
        self._ways: dict[int, Way] = {}
        self._seen = device.link.bytes_moved, device.link.busy_s

    def transfer(
        self, layer: int, keys: Keys, target: Tensor, slots: Slots, *, urgent: bool, score: float = 0.0
    ) -> Transfer:
        """A transfer of these neurons' rows, not submitted yet."""
        return Transfer(self.sources[layer], keys, target, slots, urgent, score, layer)

    def fetch(self, layer: int, keys: Keys, *, urgent: bool, score: float = 0.0) -> Transfer:
        """Request the rows of these absent neurons, as many as get a slot; `transfer.index` names them."""
        slots = self._pool.reserve(layer, keys, urgent=urgent)
        return self.submit(layer, keys[: slots.size], slots, urgent=urgent, score=score)

    def submit(
        self, layer: int, keys: Keys, slots: Slots, *, urgent: bool, score: float = 0.0, number: int = 0
    ) -> Transfer:
        """Request rows that have their slots. `number`: the compiled link's, if it has been asked already."""
        transfer = self.transfer(layer, keys, self._memory.rows, slots, urgent=urgent, score=score)
        link = self._device.link
        if slots.size:
            self.under_way[transfer] = None
        if number and isinstance(link, CompiledLink):
            link.adopt(transfer, number)
        elif slots.size:
            link.submit(transfer)
        return transfer

    def way(self, layer: int) -> Way | None:
        """How compiled calls request a layer's rows by themselves; None over a link that is not compiled."""
        link = self._device.link
        if not isinstance(link, CompiledLink):
            return None
        if layer not in self._ways:
            source, rows = self.sources[layer], self._memory.rows
            self._ways[layer] = Way(*link.ends(source, rows), len(source), len(rows), PIECE, PIECES)
        return self._ways[layer]

    def look(self) -> None:
        """Fetch what the next layer will probably need, if the device has found it by now. Never waits."""
        if self.ahead is not None and self._device.there(self.ahead.asked.copy):
            self._fetch_ahead(self.ahead)
            self.ahead = None

    def begin(self, layer: int) -> None:
        """A layer's turn: drop its prefetches that have not begun, since its real needs are known now."""
        self.collect()
        self.forget(layer)
        self.ahead = None

    def forget(self, layer: int | None) -> None:
        """Drop prefetches for a layer (None: for all) that have not begun."""
        if dropped := self._device.link.drop(layer):
            self._pool.abandon(np.concatenate([transfer.slots for transfer in dropped]))
            for transfer in dropped:
                del self.under_way[transfer]

    def collect(self) -> None:
        """Record what has arrived, and how fast."""
        link = self._device.link
        finished = link.finished()
        if not finished:
            return
        moved, busy = link.bytes_moved, link.busy_s
        self._device.rates.observed("link", moved - self._seen[0], busy - self._seen[1])
        self._seen = moved, busy
        # Others go to a prompt's ring.
        if arrived := [transfer for transfer in finished if transfer in self.under_way]:
            self._pool.filled(np.concatenate([transfer.slots for transfer in arrived]))
            for transfer in arrived:
                del self.under_way[transfer]

    def await_rows(self, layer: int, keys: Keys) -> float:
        """Wait until these rows of a layer, all on their way, have arrived; returns the seconds waited."""
        waited, marks = 0.0, self._marks
        marks[keys] = True
        wanted = [t for t in self.under_way if t.layer == layer and marks[t.index].any()]
        marks[keys] = False
        for transfer in wanted:
            waited += self._device.wait(transfer)
        self.collect()
        return waited

    def await_all(self) -> None:
        """Wait until everything on its way has arrived."""
        for transfer in list(self.under_way):
            self._device.wait(transfer)
        self.collect()

    def settle(self) -> None:
        """Wait until nothing is on its way and no row is in use. The memory of rows may be given back then."""
        self._ways.clear()
        self.forget(None)
        self.await_all()
        self._device.finish()
        self._pool.release()

    def _submit_pieces(self, layer: int, keys: Keys, slots: Slots, score: float) -> None:
        piece = max(PIECE, -(-slots.size // PIECES))
        for start in range(0, slots.size, piece):
            part = slice(start, min(start + piece, slots.size))
            self.submit(layer, keys[part], slots[part], urgent=False, score=score)

    def _fetch_ahead(self, ahead: PendingPrefetch) -> None:
        """Request the absent rows, those of the likeliest expert first."""
        active, _, (experts, weights, named) = ahead.asked.answer()
        worth, none = weights.tolist(), named[:0]
        if not isfinite(sum(worth)):
            return  # the model has failed, which the session is about to report
        guess = Found(ahead.layer, ahead.width, active, experts, weights, none, none.float())
        found, first = self._pool.ahead(guess, self.way(ahead.layer)), 0
        self.guessed[ahead.layer] = found.guessed, named
        keys = found.keys.astype(np.int64)
        for number, end in found.sent:
            part, first = slice(first, end), end
            self.submit(ahead.layer, keys[part], found.slots[part], urgent=False, number=number)
        if found.sent:
            return
        for call, count in found.runs:
            part = slice(first, first + count)
            self._submit_pieces(ahead.layer, keys[part], found.slots[part], worth[call])
            first += count
