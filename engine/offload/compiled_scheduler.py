"""`Scheduler` with both ends of a step compiled (kernels/cpu/native_steps.py): the same rows move in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels.cpu.native_pool import NativeTable
from ...kernels.cpu.native_steps import Beside, NativeSteps, Share, StepLists
from ...kernels.offload.located import Part
from ...kernels.offload.placing import Ahead, Found, Placed, Way
from .device import Device, Joined, Partial
from .device_memory import DeviceMemory
from .links.compiled_link import CompiledLink
from .row_pool import SPARED, Keys, RowPool
from .scheduler import BESIDE, PIECE, PIECES, Scheduler


class CompiledScheduler(Scheduler):
    """See `Scheduler`.

    Attributes:
        settled: how often; what `lasting` has made is of no use afterwards.
    """

    def __init__(
        self,
        device: Device,
        pool: RowPool,
        memory: DeviceMemory,
        sources: Sequence[Tensor],
        table: NativeTable,
        link: CompiledLink,
    ) -> None:
        """`table`: the pool's. `link`: the device's."""
        super().__init__(device, pool, memory, sources)
        self._link, self._rates, self._ways = link, device.rates.record(), dict[int, Way]()
        self.settled = 0
        self._steps = NativeSteps(table, link.handle, row_bytes=memory.row_bytes, spared=SPARED, rates=self._rates)

    def fetch(self, layer: int, keys: Keys, *, urgent: bool = False, score: float = 0.0) -> None:
        """See `Scheduler`."""
        self._steps.fetch(layer, self._way(layer), keys, urgent=urgent, score=score)

    def start(self, found: Found, beside: Beside, cpu_share: float) -> tuple[Placed, Joined | None]:
        """See `Scheduler`."""
        device, self.ahead = self._device, None
        at_once = device.real and beside.hidden.is_cpu
        share = Share(beside) if at_once else None
        device.rates.lend(self._rates)
        placed = self._steps.start(found, self._way(found.layer), cpu_share, share)
        device.rates.take(self._rates)
        if not (count := placed.sizes[BESIDE]):
            return placed, None
        if not device.real:
            return placed, self._rows_beside(found, placed.beside, beside)
        if share is None:
            share = Share(replace(beside, hidden=device.fetched(beside.hidden)[0]))
            self._steps.begin_share(share)
        return placed, partial(self._joined, share, count)

    def finish(self, found: Found, placed: Placed) -> Iterator[tuple[Part, float]]:
        """See `Scheduler`."""
        rates = self._device.rates
        rates.lend(self._rates)
        for arrived in self._steps.finish(self._way(found.layer), self._device.finish):
            rates.take(self._rates)
            yield arrived

    def lasting(self, found: Found, beside: Beside, lists: StepLists) -> tuple[Any, Any]:
        """See `NativeSteps.lasting`."""
        return self._steps.lasting(found, self._way(found.layer), beside, lists)

    def begin_token(self, cpu_share: float) -> Any:
        """What its lasting steps work on."""
        self._device.rates.lend(self._rates)
        return self._steps.of_now(cpu_share)

    def end_token(self) -> None:
        """Its steps have ended, or one has failed."""
        self._device.rates.take(self._rates)

    def failed(self, layer: int, code: int) -> None:
        """Raise what an error of a lasting step means."""
        self._steps.failed(code, self._way(layer))

    def forget(self, layer: int | None) -> None:
        """See `Scheduler`."""
        self._steps.forget(layer)

    def collect(self) -> None:
        """See `Scheduler`."""
        self._device.rates.lend(self._rates)
        self._steps.collect(bool(self._link.finished()))
        self._device.rates.take(self._rates)

    def await_all(self) -> None:
        """See `Scheduler`."""
        self._device.rates.lend(self._rates)
        self._steps.await_all()
        self._device.rates.take(self._rates)

    def settle(self) -> None:
        """See `Scheduler`."""
        super().settle()
        self.settled += 1
        self._ways.clear()
        self._link.forget_ends()

    def _joined(self, share: Share, count: int) -> Partial:
        device, kind = self._device, share.beside.hidden.dtype
        seconds = self._steps.join_share(share)
        device.rates.observed("cpu", count * self._memory.row_bytes, seconds, device.cpu_share)
        y, kept = device.sent(share.y if kind is torch.float32 else share.y.to(kind), share.kept)
        return y, kept

    def _way(self, layer: int) -> Way:
        if layer not in self._ways:
            source, rows = self.sources[layer], self._memory.rows
            ends = self._link.ends(source, rows)
            self._ways[layer] = Way(*ends, len(source), len(rows), PIECE, PIECES, pooled=True)
        return self._ways[layer]

    def _reserved(self, guess: Found) -> Ahead:
        return self._pool.ahead(guess, self._way(guess.layer))
