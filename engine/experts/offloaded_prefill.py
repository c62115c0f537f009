"""Prompts where rows are in RAM: whole experts stream through two buffers on the device while others are computed.

A prompt needs nearly all neurons of nearly all experts, so single rows are not worth choosing. While the device
computes one expert the next one is copied, across layers as well. The CPU computes experts with few tokens where that
is faster (Fiddler).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.weights import ExpertRows, UpWeights
from ..offload import missing_rows
from ..offload.device import Partial
from ..offload.links.transfer import Transfer
from ..offload.missing_rows import Lane
from ..offload.offload import Offload
from ..offload.scheduler import Early
from .moe_layer import Cancelled, Control
from .ruled_layer import RuledLayer, Share


@dataclass(slots=True)
class StreamedPrompt:
    """Many tokens in one layer.

    Attributes:
        index: the layer's number in the pool's tables; None if the pool does not serve it: then even its up projections
            are in RAM. ruled, ram: the layer under the preset, on the device as far as it is there, and in RAM.
        hidden: (B, H). out: (B, H), to which the experts add.
    """

    shared: Offload
    index: int | None
    ruled: RuledLayer
    ram: RuledLayer
    hidden: Tensor
    out: Tensor
    control: Control

    def run(self, shares: Sequence[Share]) -> None:
        """Compute these experts.

        Raises:
            Cancelled: the answer was stopped.
        """
        coming = list[Transfer]()
        try:
            self._run(shares, coming)
        except Exception:  # whatever it was, `Cancelled` too: until the transfers end they write to the buffers
            for transfer in coming:
                self.shared.device.wait(transfer)
            raise

    def _run(self, shares: Sequence[Share], coming: list[Transfer]) -> None:
        """`run`; `coming` collects the transfers to the buffers."""
        shared, device = self.shared, self.shared.device
        shared.scheduler.settle()
        early = self._early(shares)
        lanes = self._lanes(shares, early)
        chosen = zip(shares, lanes, strict=True)
        on_cpu = [(share, self._beside(share)) for share, lane in chosen if lane is Lane.CPU]
        staged = [share for share, lane in zip(shares, lanes, strict=True) if lane is not Lane.CPU]
        first = 0
        if early is not None:
            staged.sort(key=lambda share: share.expert != early.expert)
            first = early.place
            coming.append(early.transfer)
        for share in staged[len(coming) : 2]:
            coming.append(self._send_own(share.expert, first + len(coming)))
        if len(staged) == 1:
            self._send_ahead(first + 1)
        for place, share in enumerate(staged, first):
            if self.control.cancelled.is_set():
                raise Cancelled
            device.wait(coming[place - first])
            up = self.ruled.layer.up
            one = UpWeights(up.layout, *(part[share.expert, None] for part in (up.q, up.scale, up.zero)))
            one = device.brought(one) if self.index is None else one
            rows = ExpertRows(self.ruled.layer.rows.layout, self._buffer(place)[None])
            x, x_bits = self.hidden[share.tokens], self.ruled.preset.x_bits
            self._add(share, device.expert(x, one, rows, *share.limits, x_bits))
            if len(coming) < len(staged):
                device.finish()  # this buffer may be overwritten
                coming.append(self._send_own(staged[len(coming)].expert, place + 2))
            elif place - first + 2 == len(staged):
                device.finish()
                self._send_ahead(place + 2)
        for share, started in on_cpu:
            self._add(share, device.joined(started)[0])
        shared.scheduler.collect()

    def _early(self, shares: Sequence[Share]) -> Early | None:
        """The expert that was copied in advance, if it is one of these."""
        scheduler = self.shared.scheduler
        early, scheduler.early = scheduler.early, None
        if early is None:
            return None
        mine = early.layer == self.index and early.neurons == self._neurons
        if mine and any(share.expert == early.expert for share in shares):
            return early
        self.shared.device.wait(early.transfer)  # until then its buffer is being written
        return None

    def _send_ahead(self, place: int) -> None:
        """Copy the next layer's likeliest expert while this layer's last one computes, and its attention."""
        if self.index is None:
            return
        pool, layer = self.shared.pool, self.index + 1
        if layer < len(pool.layers):
            expert = pool.likeliest(layer) * (pool.slots.shape[2] // self._neurons)
            sent = self._send(layer, expert, place)
            self.shared.scheduler.early = Early(layer, expert, self._neurons, place % 2, sent)

    def _lanes(self, shares: Sequence[Share], early: Early | None) -> list[Lane]:
        shared, device, neurons = self.shared, self.shared.device, self._neurons
        resident, each = [0.0] * len(shares), neurons * self.ram.layer.rows.layout.nbytes
        if self.index is None:
            each += self.ram.layer.up.bytes_per_expert()
        else:
            there = shared.pool.slots[self.index].reshape(-1, neurons) >= 0
            resident = [float(there[share.expert].mean()) for share in shares]
        nbytes = [each] * len(shares)
        cap = device.cpu_share if shared.parts.cpu else 0.0
        lanes = missing_rows.prefill([len(share.tokens) for share in shares], resident, nbytes, device.rates, cap=cap)
        ahead = None if early is None else early.expert
        return [Lane.COPY if share.expert == ahead else lane for share, lane in zip(shares, lanes, strict=True)]

    @property
    def _neurons(self) -> int:
        return self.ruled.layer.rows.data.shape[1]

    def _buffer(self, place: int) -> Tensor:
        return self.shared.memory.buffers[place % 2][: self._neurons]

    def _send_own(self, expert: int, place: int) -> Transfer:
        """Copy one of this layer's experts into a buffer."""
        if self.index is not None:
            return self._send(self.index, expert, place)
        rows, neurons = self.ram.layer.rows.data, np.arange(self._neurons)
        slots = neurons.astype(np.int32)
        no_layer = len(self.shared.pool.layers)
        transfer = Transfer(rows[expert], neurons, self._buffer(place), slots, urgent=True, score=0.0, layer=no_layer)
        self.shared.device.link.submit(transfer)
        return transfer

    def _send(self, layer: int, expert: int, place: int) -> Transfer:
        """Copy an expert into a buffer: its absent rows over the link, the others from the pool."""
        shared, target = self.shared, self._buffer(place)
        first = expert * self._neurons
        slots = shared.pool.slots[layer].reshape(-1)[first : first + self._neurons]
        here, absent = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        transfer = shared.scheduler.transfer(layer, first + absent, target, absent.astype(np.int32), urgent=True)
        shared.device.link.submit(transfer)
        if here.size:
            from_pool = torch.from_numpy(slots[here].astype(np.int64))
            shared.device.gathered(shared.memory.rows, from_pool, target, torch.from_numpy(here))
        return transfer

    def _beside(self, share: Share) -> Future[Partial]:
        x, layer = self.hidden[share.tokens].cpu(), self.ram.layer
        first, second = share.limits
        limits = first.cpu(), None if second is None else second.cpu()
        return self.shared.device.expert_beside(x, layer.up, layer.rows, share.expert, limits, self.ruled.preset.x_bits)

    def _add(self, share: Share, y: Tensor) -> None:
        self.out.index_add_(0, share.tokens, y * share.weights.to(y.dtype))
