"""Prompts where rows lie in RAM: whole experts stream through two buffers on the device while others compute.

A prompt wants nearly all neurons of nearly all experts, so that rows are not worth choosing. While the device computes
one expert the next one comes. Experts with few tokens are computed by the CPU where that ends sooner (Fiddler).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.layouts import ExpertRows, UpWeights
from . import placement
from .devices import Partial
from .moe import Cancelled, Control, Plan, Share
from .offload import Offload
from .placement import Lane
from .transfer import Transfer


@dataclass(slots=True)
class Prompt:
    """Many tokens in one layer.

    Attributes:
        index: the layer. plan, ram: what the preset makes of it on the device, and in RAM.
        hidden: (B, H). out: (B, H), to which the experts add.
    """

    shared: Offload
    index: int
    plan: Plan
    ram: Plan
    hidden: Tensor
    out: Tensor
    control: Control

    def run(self, shares: Sequence[Share]) -> None:
        """Compute these experts.

        Raises:
            Cancelled: the answer was stopped.
        """
        shared, device = self.shared, self.shared.device
        shared.settle()
        lanes = self._lanes(shares)
        chosen = zip(shares, lanes, strict=True)
        on_cpu = [(share, self._beside(share)) for share, lane in chosen if lane is Lane.CPU]
        staged = [share for share, lane in zip(shares, lanes, strict=True) if lane is not Lane.CPU]
        coming = [self._send(share, place) for place, share in enumerate(staged[:2])]
        for place, share in enumerate(staged):
            if self.control.cancelled.is_set():
                for transfer in coming[place:]:
                    device.wait(transfer)  # the buffers are written until then
                raise Cancelled
            device.wait(coming[place])
            rows = ExpertRows(self.plan.layer.rows.layout, self._buffer(place)[None])
            one = UpWeights(
                self.plan.layer.up.layout, *(part[share.expert, None] for part in _parts(self.plan.layer.up))
            )
            limits = self.plan.limits(share.expert)
            self._add(share, device.expert(self.hidden[share.tokens], one, rows, *limits, self.plan.preset.x_bits))
            if place + 2 < len(staged):
                device.finish()  # this buffer has been read
                coming.append(self._send(staged[place + 2], place + 2))
        for share, started in on_cpu:
            self._add(share, device.joined(started)[0])
        shared.collect()

    def _lanes(self, shares: Sequence[Share]) -> list[Lane]:
        shared, device, neurons = self.shared, self.shared.device, self._neurons
        there = shared.pool.slots[self.index].reshape(-1, neurons) >= 0
        resident = [float(there[share.expert].mean()) for share in shares]
        nbytes = neurons * shared.rows.shape[1]
        cap = device.cpu_share if shared.parts.cpu else 0.0
        return placement.prefill([len(share.tokens) for share in shares], resident, nbytes, device.rates, cap=cap)

    @property
    def _neurons(self) -> int:
        return self.plan.layer.rows.data.shape[1]

    def _buffer(self, place: int) -> Tensor:
        return self.shared.buffers[place % 2][: self._neurons]

    def _send(self, share: Share, place: int) -> Transfer:
        """Bring an expert into a buffer: its absent rows over the link, the others from the pool."""
        shared, target = self.shared, self._buffer(place)
        first = share.expert * self._neurons
        slots = shared.pool.slots[self.index].reshape(-1)[first : first + self._neurons]
        here, absent = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        transfer = Transfer(
            shared.sources[self.index], first + absent, target, absent.astype(np.int32), True, 0.0, self.index
        )
        shared.device.link.submit(transfer)
        if here.size:
            from_pool = torch.from_numpy(slots[here].astype(np.int64))
            shared.device.gathered(shared.rows, from_pool, target, torch.from_numpy(here))
        return transfer

    def _beside(self, share: Share) -> Future[Partial]:
        layer, x = self.ram.layer, self.hidden[share.tokens].cpu()
        limits, x_bits = self.plan.limits(share.expert), self.plan.preset.x_bits
        return self.shared.device.expert_beside(x, layer.up, layer.rows, share.expert, limits, x_bits)

    def _add(self, share: Share, y: Tensor) -> None:
        self.out.index_add_(0, share.tokens, y * share.weights.to(y.dtype))


def _parts(up: UpWeights) -> tuple[Tensor, Tensor, Tensor]:
    return up.q, up.scale, up.zero
