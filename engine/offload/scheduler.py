"""Which rows move to the device, and when: those a step needs now, and those that the next layer will probably need.

A prefetch goes behind everything urgent, in pieces that are sent or dropped as a whole. `predictor.py` predicts the
next layer's experts and input; the device is asked which neurons follow, their rows are fetched once it has found them,
and pieces that have not begun are dropped when that layer's own choice is known. Nothing waits for a prediction longer
than for what comes behind it. Both
ends of a step are compiled (kernels/cpu/offload_steps.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.cpu.offload_steps import Beside, OffloadSteps, Share, StepLists
from ...kernels.offload.located import Part
from ...kernels.offload.placing import Found, Placed, Way
from ...kernels.types import Active
from .asked import Asked
from .device import Device, Joined, Partial, taken
from .device_memory import DeviceMemory
from .links.transfer import Transfer
from .row_pool import SPARED, Keys, RowPool, Slots

# Rows of a piece of a prefetch, at least: few enough that most of a wrong guess is never sent. Pieces, at most: each
# costs the host some microseconds, and a link that moves more rows at a time a chunk.
PIECE, PIECES = 200, 4
BESIDE = 3  # of `Placed.parts`


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
    """Transfers into the pool of rows, and the two ends of a step. Only the engine thread uses it.

    Attributes:
        sources: layer by layer all rows, (E * F, nbytes) uint8 in RAM.
        ahead: what the next layer will probably need, until it is fetched or that layer's turn comes.
        guessed: by layer, what was predicted, to compare with what its step needs: neurons, each once or once per
            token, experts (B, K), and the neurons whose rows were fetched.
        settled: how often; what `lasting` has made is of no use afterwards.
    """

    def __init__(
        self,
        device: Device,
        pool: RowPool,
        memory: DeviceMemory,
        sources: Sequence[Tensor],
    ) -> None:
        self._device, self._pool, self._memory, self.sources = device, pool, memory, sources
        self.ahead: PendingPrefetch | None = None
        self.guessed: dict[int, tuple[NDArray[np.int32], Tensor, NDArray[np.int32]]] = {}
        self._link, self._rates, self._ways = device.link, device.rates.record(), dict[int, Way]()
        self.settled = 0
        self._steps = OffloadSteps(
            pool.table, self._link.handle, row_bytes=memory.row_bytes, spared=SPARED, rates=self._rates
        )

    def transfer(
        self, layer: int, keys: Keys, target: Tensor, slots: Slots, *, urgent: bool, score: float = 0.0
    ) -> Transfer:
        """A transfer of these neurons' rows, not submitted yet."""
        return Transfer(self.sources[layer], keys, target, slots, urgent, score, layer)

    def fetch(self, layer: int, keys: Keys, *, urgent: bool = False, score: float = 0.0) -> None:
        """Request the rows of these absent neurons, as many as get a slot: behind everything urgent and in pieces,
        or urgently.
        """
        self._steps.fetch(layer, self._way(layer), keys, urgent=urgent, score=score)

    def look(self) -> None:
        """Fetch what the next layer will probably need, if the device has found it by now. Never waits."""
        if self.ahead is not None and self._device.there(self.ahead.asked.copy):
            self._fetch_ahead(self.ahead)
            self.ahead = None

    def look_again(self) -> None:
        """The same, waiting for it: when the device has been given what comes next, which it does behind it."""
        if self.ahead is not None:
            self._device.arrived(self.ahead.asked.copy)
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
        """The step's other end, once the device has been given the rows that were there: rows that have arrived since,
        on the device for what computes next, and the seconds waited for them. In several loads if the pool is too
        small, each to be computed before the next is asked for.
        """
        rates = self._device.rates
        rates.lend(self._rates)
        for arrived in self._steps.finish(self._way(found.layer), self._device.finish):
            rates.take(self._rates)
            yield arrived

    def lasting(self, found: Found, beside: Beside, lists: StepLists) -> tuple[Any, Any]:
        """See `OffloadSteps.lasting`."""
        return self._steps.lasting(found, self._way(found.layer), beside, lists)

    def guessing(self, guess: Found, named: Tensor) -> Any:
        """See `OffloadSteps.guessing`."""
        return self._steps.guessing(guess, self._way(guess.layer), named)

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
        """Drop prefetches for a layer (None: for all) that have not begun."""
        self._steps.forget(layer)

    def collect(self) -> None:
        """Record what has arrived, and how fast."""
        self._device.rates.lend(self._rates)
        self._steps.collect(bool(self._link.finished()))
        self._device.rates.take(self._rates)

    def await_all(self) -> None:
        """Wait until everything on its way has arrived."""
        self._device.rates.lend(self._rates)
        self._steps.await_all()
        self._device.rates.take(self._rates)

    def settle(self) -> None:
        """Wait until nothing is on its way and no row is in use. The memory of rows may be given back then."""
        self.forget(None)
        self.await_all()
        self._device.finish()
        self._pool.release()
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

    def _rows_beside(self, found: Found, part: Part, beside: Beside) -> Joined:
        neurons = torch.from_numpy(np.take(found.active.neurons.numpy(), part.at))
        active = Active(torch.from_numpy(part.offsets), neurons, taken(found.active.values, part.at))
        return self._device.rows_beside(beside, active)

    def _fetch_ahead(self, ahead: PendingPrefetch) -> None:
        """Request the absent rows, those of the likeliest expert first."""
        self._device.fetches()
        active, _, (experts, weights, named) = ahead.asked.answer()
        none = named[:0]
        if not isfinite(sum(weights.tolist())):
            return  # the model has failed, which the session is about to report
        guess = Found(ahead.layer, ahead.width, active, experts, weights, none, none.float())
        found = self._pool.ahead(guess, self._way(ahead.layer))
        self.guessed[ahead.layer] = found.guessed, named, found.keys
