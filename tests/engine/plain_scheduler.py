"""What the compiled steps of kernels/cpu/offload do, in Python: both ends of a step, one transfer after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np
import torch
from floe_chat.engine.offload.device import Device, Joined, taken
from floe_chat.engine.offload.device_memory import DeviceMemory
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.engine.offload.row_pool import Keys, RowPool, Slots
from floe_chat.engine.offload.scheduler import BESIDE, PIECE, PIECES, PendingPrefetch
from floe_chat.kernels.cpu.offload_steps import Beside
from floe_chat.kernels.offload.located import Part
from floe_chat.kernels.offload.placing import Ahead, Found, Placed
from floe_chat.kernels.offload.pool import ASKED, MOST
from floe_chat.kernels.types import Active
from numpy.typing import NDArray
from torch import Tensor

from .plain_link import PlainLink


class PlainScheduler:
    """Transfers into the pool of rows, and the two ends of a step. Only the engine thread uses it.

    Attributes:
        sources: layer by layer all rows, (E * F, nbytes) uint8 in RAM.
        ahead: what the next layer will probably need, until it is fetched or that layer's turn comes.
        guessed: by layer, what was predicted, to compare with what its step needs: neurons, each once or once per
            token, experts (B, K), and the neurons whose rows were fetched.
    """

    def __init__(
        self, device: Device, pool: RowPool, memory: DeviceMemory, sources: Sequence[Tensor], link: PlainLink
    ) -> None:
        self._device, self._pool, self._memory, self.sources = device, pool, memory, sources
        self._link = link
        self.ahead: PendingPrefetch | None = None
        self.guessed: dict[int, tuple[NDArray[np.int32], Tensor, NDArray[np.int32]]] = {}
        # Transfers into the pool that are not known to have arrived, the oldest first, and the slots of rows that stay.
        self._under_way: dict[Transfer, Slots] = {}
        self._visit: Transfer | None = None  # of the last visitors, unless it is known to have arrived
        self._seen = self._link.bytes_moved, self._link.busy_s

    def transfer(
        self, layer: int, keys: Keys, target: Tensor, slots: Slots, *, urgent: bool, score: float = 0.0
    ) -> Transfer:
        """A transfer of these neurons' rows, not submitted yet."""
        return Transfer(self.sources[layer], keys, target, slots, urgent, score, layer)

    def fetch(self, layer: int, keys: Keys, *, urgent: bool = False, score: float = 0.0) -> None:
        """Request the rows of these absent neurons, as many as get a slot: behind everything urgent and in pieces,
        or urgently.
        """
        slots = self._pool.reserve(layer, keys, urgent=urgent)
        piece = max(1, slots.size) if urgent else max(PIECE, -(-slots.size // PIECES))
        for start in range(0, slots.size, piece):
            part = slice(start, min(start + piece, slots.size))
            self._submit(layer, keys[part], slots[part], slots[part], urgent, score)

    def look(self) -> None:
        """Fetch what the next layer will probably need, if the device has found it by now. Never waits."""
        if self.ahead is not None and self._device.there(self.ahead.asked.copy):
            self._fetch_ahead(self.ahead)
            self.ahead = None

    def start(self, found: Found, beside: Beside, cpu_share: float) -> tuple[Placed, Joined | None]:
        """A layer's turn, when the device has done all earlier work: drop its prefetches that have not begun, place
        the step by its real needs, send for absent rows and start the CPU's share of them.

        Args:
            cpu_share: of the CPU's threads, that may work on rows in RAM.

        Returns:
            how to get the share's result, if there is one.
        """
        rates, self.ahead = self._device.rates, None
        self.release()
        self.collect()
        self._ask_for(self.forget(found.layer))
        queued = self._link.queued_bytes() / rates.link_bytes_s
        lanes = rates.lanes(self._memory.row_bytes, queued, cpu_share)
        placed = self._pool.place(found, lanes)
        if placed.slots.size:
            keys = placed.keys[: placed.slots.size].astype(np.int64)
            self._visit = self._submit(found.layer, keys, placed.slots, placed.slots[:0], True, 0.0)
        if not placed.sizes[BESIDE]:
            if placed.keys.size and cpu_share > 0:
                rates.unused("cpu")
            return placed, None
        return placed, self._rows_beside(found, placed.beside, beside)

    def finish(self, found: Found, placed: Placed) -> Iterator[tuple[Part, float]]:
        """The step's other end, once the device has been given the rows that were there: rows that have arrived since,
        on the device for what computes next, and the seconds waited for them. In several loads if the pool is too
        small, each to be computed before the next is asked for.
        """
        self._pool.note(found)
        waited, done, slots = 0.0, 0, placed.slots
        while True:
            last, transfer = done + slots.size, self._visit
            keys = placed.keys[done:last].astype(np.int64)
            if transfer is not None:
                self._under_way[transfer] = self._pool.keep(found.layer, keys, slots)
            if done == 0:
                waited += self._await_coming(found.layer, placed.coming)
            if transfer is not None:
                waited += self._link.wait(transfer)
                self._visit = None
            self.collect()
            yield self._arrived(found, placed, keys, slots, first=done == 0), waited
            if last == placed.keys.size:
                return
            self._device.finish()
            self.forget(None)
            self.collect()
            self.release()  # rows that this step has computed may be evicted now
            waited, done, keys = 0.0, last, placed.keys[last:].astype(np.int64)
            slots = self._pool.visit(keys.size)
            if slots.size:
                self._visit = self._submit(found.layer, keys[: slots.size], slots, slots[:0], True, 0.0)
            else:
                self.await_all()

    def release(self) -> None:
        """The device has computed this step's rows. Visitors of one that was given up have to arrive before."""
        if self._visit is not None:
            self._link.wait(self._visit)
            self._visit = None
        self._pool.release()

    def forget(self, layer: int | None) -> int:
        """Drop prefetches for a layer (None: for all) that have not begun; returns how many rows."""
        if dropped := self._link.drop(layer):
            self._pool.abandon(np.concatenate([transfer.slots for transfer in dropped]))
            for transfer in dropped:
                del self._under_way[transfer]
        return sum(transfer.slots.size for transfer in dropped)

    def _ask_for(self, dropped: int) -> None:
        """How many rows the next guess may ask for: not many more than arrive."""
        counters, width = self._pool.table.counters, self._pool.table.width
        asked, most = int(counters[ASKED]), int(counters[MOST])
        came = max(0, asked - dropped)
        if dropped:
            counters[MOST] = max(PIECE, came + came // 2)
        elif asked == most:
            counters[MOST] = min(width, most + most // 2 + 1)
        counters[ASKED] = 0

    def collect(self) -> None:
        """Record what has arrived, and how fast."""
        link = self._link
        finished = link.finished()
        if not finished:
            return
        moved, busy = link.bytes_moved, link.busy_s
        self._device.rates.observed("link", moved - self._seen[0], busy - self._seen[1])
        self._seen = moved, busy
        # Others go to a prompt's ring.
        if arrived := [transfer for transfer in finished if transfer in self._under_way]:
            self._pool.filled(np.concatenate([self._under_way[transfer] for transfer in arrived]))
            for transfer in arrived:
                del self._under_way[transfer]

    def await_all(self) -> None:
        """Wait until everything on its way has arrived."""
        for transfer in list(self._under_way):
            self._link.wait(transfer)
        self.collect()

    def settle(self) -> None:
        """Wait until nothing is on its way and no row is in use. The memory of rows may be given back then."""
        self.forget(None)
        self.await_all()
        self._device.finish()
        self.release()

    def _submit(self, layer: int, keys: Keys, slots: Slots, stays: Slots, urgent: bool, score: float) -> Transfer:
        transfer = self.transfer(layer, keys, self._memory.rows, slots, urgent=urgent, score=score)
        self._under_way[transfer] = stays
        self._link.submit(transfer)
        return transfer

    def _rows_beside(self, found: Found, part: Part, beside: Beside) -> Joined:
        neurons = torch.from_numpy(np.take(found.active.neurons.numpy(), part.at))
        active = Active(torch.from_numpy(part.offsets), neurons, taken(found.active.values, part.at))
        return self._device.rows_beside(beside, active)

    def _await_coming(self, layer: int, coming: Part) -> float:
        """Wait until these rows of a layer have arrived; returns the seconds waited."""
        waited = 0.0
        if coming.at.size:
            keys = self._pool.keys(layer, coming.places)
            for transfer in [t for t in self._under_way if t.layer == layer and np.isin(t.index, keys).any()]:
                waited += self._link.wait(transfer)
        return waited

    def _arrived(self, found: Found, placed: Placed, keys: Keys, slots: Slots, *, first: bool) -> Part:
        """The copied rows of these keys, and those that were on their way if it is the first load."""
        copied, coming = placed.copied, placed.coming
        where = np.full(self._pool.layers.shape[1], -1, np.int32)
        where[keys] = slots
        mine = where[copied.places] >= 0
        places = where[copied.places[mine]]
        came = coming.at.size if first else 0
        at = np.concatenate((coming.at[:came], copied.at[mine]))
        order = np.argsort(at, kind="stable")
        offsets = np.concatenate(([0], np.cumsum(mine)))[copied.offsets] + np.minimum(coming.offsets, came)
        return Part(offsets, at[order], np.concatenate((coming.places[:came], places))[order])

    def _fetch_ahead(self, ahead: PendingPrefetch) -> None:
        """Request the absent rows, those of the likeliest expert first."""
        active, _, (experts, weights, named) = ahead.asked.answer()
        worth, none = weights.tolist(), named[:0]
        if not isfinite(sum(worth)):
            return  # the model has failed, which the session is about to report
        guess = Found(ahead.layer, ahead.width, active, experts, weights, none, none.float())
        found = self._reserved(guess)
        self.guessed[ahead.layer] = found.guessed, named, found.keys

    def _reserved(self, guess: Found) -> Ahead:
        found, first = self._pool.ahead(guess), 0
        keys, weights = found.keys.astype(np.int64), guess.weights.tolist()
        for call, count in found.runs:
            last = min(first + count, found.slots.size)
            piece = max(PIECE, -(-(last - first) // PIECES))
            for start in range(first, last, piece):
                part = slice(start, min(start + piece, last))
                self._submit(guess.layer, keys[part], found.slots[part], found.slots[part], False, weights[call])
            first = last
        return found
