"""Device memory through which a prompt's experts stream: while one is computed the next ones are copied, across layers.

The memory is divided into places for one expert each, or for half of one if the preset divides experts. A place is
written again once what was in it has been computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.weights import SignalWeights
from ...models.pack.packed_model import PackedLayer
from .device import Brought, Device, Mark
from .device_memory import DeviceMemory
from .links.transfer import Transfer
from .row_pool import RowPool


@dataclass(frozen=True, slots=True)
class Piece:
    """One expert of a layer of the model, as a preset divides experts; `neurons` are its own."""

    layer: int
    expert: int
    neurons: int


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """A layer whose experts stream.

    Attributes:
        ram: all of it in RAM. rows: (E * F, nbytes) its rows. pooled: its number in the pool's tables; None if the pool
            does not serve it: then even its up projections are in RAM.
    """

    ram: PackedLayer
    rows: Tensor
    pooled: int | None

    def pieces(self, neurons: int) -> int:
        """How many experts of so many neurons it has."""
        return len(self.rows) // neurons

    def up(self, piece: Piece) -> SignalWeights:
        """One expert's up projection, in RAM."""
        first = piece.expert * piece.neurons
        return self.ram.signal.mapped(lambda part: part.flatten(0, 1).narrow(0, first, piece.neurons)[None])


@dataclass(frozen=True, slots=True)
class Coming:
    """A piece on its way to its place: its rows, and its up projection if that is in RAM."""

    piece: Piece
    place: int
    transfer: Transfer
    up: Brought | None


class ExpertRing:
    """Places, and what is on its way to them. Only the engine thread uses it.

    Attributes:
        layers: by the model's numbers. coming: what is on its way or has arrived, in the order in which it is computed.
    """

    def __init__(self, device: Device, pool: RowPool, memory: DeviceMemory) -> None:
        self._device, self._pool, self._memory = device, pool, memory
        self.layers: dict[int, StreamedLayer] = {}
        self.coming: deque[Coming] = deque()
        self._free: deque[tuple[int, Mark]] = deque()  # the longest free first
        self._neurons = 0

    def register(self, index: int, ram: PackedLayer, pooled: int | None = None) -> None:
        """A layer of the model, see `StreamedLayer`."""
        self.layers[index] = StreamedLayer(ram, ram.rows.data.view(-1, ram.rows.layout.nbytes), pooled)

    def begin(self, layer: int, neurons: int, experts: Collection[int]) -> None:
        """A layer's turn, with experts of so many neurons: those on their way are needed or give their place back."""
        if neurons != self._neurons:
            self.clear()
            self._neurons = neurons
            self._free = deque((place, None) for place in range(len(self._memory.ring) // neurons))
        needed = deque[Coming]()
        for one in self.coming:
            if one.piece.layer == layer and one.piece.expert in experts:
                needed.append(one)
            else:
                self._device.wait(one.transfer)  # until then its place is being written
                self._free.appendleft((one.place, None))
        self.coming = needed

    @property
    def most(self) -> int:
        """Pieces that may be on their way. The last but one to be computed gives its place to the next where there are
        enough, so that the device always has work while the host waits for that.
        """
        places = len(self._free) + len(self.coming)
        return places - 1 if places > 2 else places

    def fill(self, wanted: Iterator[Piece]) -> None:
        """Send as many of these as there is room for."""
        while self._free and len(self.coming) < self.most:
            piece = next(wanted, None)
            if piece is None:
                return
            self._send(piece)

    def arrived(self) -> tuple[Piece, SignalWeights | None, Tensor]:
        """The next piece, as soon as the device may compute it: also its up projection, if that was in RAM, and its
        rows (F, nbytes). Its place stays taken until `used`.
        """
        one = self.coming[0]
        self._device.wait(one.transfer)
        up = None if one.up is None else self._device.use(one.up)
        return one.piece, up, self._memory.ring[one.place * self._neurons : (one.place + 1) * self._neurons]

    def used(self) -> None:
        """The device has been given all its work on the piece that arrived last."""
        self._free.append((self.coming.popleft().place, self._device.mark()))

    def clear(self) -> None:
        """Wait for what is on its way, and forget it."""
        for one in self.coming:
            self._device.wait(one.transfer)
            self._free.append((one.place, None))
        self.coming.clear()

    def _send(self, piece: Piece) -> None:
        """Copy an expert to a place: its absent rows over the link, the others from the pool."""
        place, computed = self._free.popleft()
        self._device.reached(computed)
        layer, target = self.layers[piece.layer], self._memory.ring
        first, start = piece.expert * piece.neurons, place * piece.neurons
        up = None if layer.pooled is not None else self._device.bring(layer.up(piece))
        absent, slots = np.arange(piece.neurons), None
        if layer.pooled is not None:
            slots = self._pool.slots[layer.pooled].reshape(-1)[first : first + piece.neurons]
            absent = np.flatnonzero(slots < 0)
        number = len(self._pool.layers) if layer.pooled is None else layer.pooled
        places = (start + absent).astype(np.int32)
        transfer = Transfer(layer.rows, first + absent, target, places, urgent=True, score=0.0, layer=number)
        self.coming.append(Coming(piece, place, transfer, up))
        self._device.link.submit(transfer)
        if slots is not None and absent.size < piece.neurons:
            here = np.flatnonzero(slots >= 0)
            from_pool = torch.from_numpy(slots[here].astype(np.int64))
            self._device.gathered(self._memory.rows, from_pool, target, torch.from_numpy(start + here))
