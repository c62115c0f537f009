"""A few tokens in one layer whose rows are in RAM: place the rows, compute, add up what arrived.

Lists are on the host, in numpy, and go to the device as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.located import Part
from ...kernels.offload.placing import Found, Placed
from ...kernels.types import Active, Calls
from ..offload.device import Device, Partial, taken
from ..offload.links.transfer import Transfer
from ..offload.offload import Offload
from ..telemetry import LayerCounts
from .moe_layer import Choice, Result
from .ruled_layer import RuledLayer


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step, on the device or on the host.

    Attributes:
        hidden: (B, H). limits: (P,) the second thresholds of the calls; None if the preset has none.
    """

    hidden: Tensor
    calls: Calls
    limits: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        """As `of` takes them."""
        limits = () if self.limits is None else (self.limits,)
        return (self.hidden, self.calls.tokens, self.calls.experts, self.calls.weights, *limits)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> StepInputs:
        """The inverse of `tensors`."""
        hidden, tokens, experts, weights, *limits = tensors
        return cls(hidden, Calls(tokens, experts, weights), limits[0] if limits else None)


@dataclass(frozen=True, slots=True)
class Started:
    """A step whose absent rows have been asked for.

    Attributes:
        first: the first transfer; None if nothing is copied. beside: the CPU's sum over its share, if it has one.
    """

    placed: Placed
    first: Transfer | None
    beside: Future[Partial] | None


class Sum:
    """The running sum of a step.

    Attributes:
        y: (B, H). reached: (P,) neurons that reached the second threshold. None while nothing has arrived.
    """

    def __init__(self) -> None:
        self.y: Tensor | None = None
        self.reached: Tensor | None = None

    def rows(self, step: OffloadedStep, part: Part) -> None:
        """Add rows that are on the device."""
        device, there, x_bits = step.shared.device, step.there, step.choice.ruled.preset.x_bits
        rows = step.shared.rows(step.choice.ruled.layer.rows.layout)
        active = device.part(step.values, part.offsets, part.at, part.places)
        self._add(*device.rows(there.hidden, rows, there.calls, active, there.limits, x_bits))

    def beside(self, device: Device, started: Future[Partial]) -> None:
        """Add what the CPU computes, once it has."""
        self._add(*device.joined(started))

    def _add(self, y: Tensor, reached: Tensor) -> None:
        self.y = y if self.y is None else self.y + y
        self.reached = reached if self.reached is None else self.reached + reached


@dataclass(frozen=True, slots=True)
class OffloadedStep:
    """A step whose active neurons are known: its stages, each with the results of those before it.

    Attributes:
        choice: on the host. ram: the layer's rows in RAM under the preset in force. hidden: (B, H) on the host; a
            prompt's on the device. there: the inputs on the device. active: on the host. values: on the device.
        heard: (B, E) the router's scores of all experts, on the host, if known.
    """

    shared: Offload
    index: int
    choice: Choice
    ram: Callable[[], RuledLayer]
    hidden: Tensor
    there: StepInputs
    active: Active
    values: Tensor
    heard: Tensor | None = None

    @property
    def _of_one(self) -> bool:
        """One token names no neuron twice."""
        return self.there.hidden.shape[0] == 1

    @property
    def _neurons(self) -> int:
        return self.choice.ruled.layer.rows.data.shape[1]

    def found(self) -> Found:
        """What the pool has to know."""
        choice, work = self.choice, self.choice.work
        calls = work.calls
        return Found(
            *(self.index, self._neurons, self.active, calls.experts, calls.weights),
            *(choice.experts, choice.weights, work.late, self.heard),
        )

    def start(self, found: Found) -> Started:
        """Place the rows and start absent ones: copied over the link, or computed by the CPU from RAM (Fiddler)."""
        shared, device, parts = self.shared, self.shared.device, self.shared.parts
        queued = device.link.queued_bytes() / device.rates.link_bytes_s
        lanes = device.rates.lanes(shared.memory.row_bytes, queued, device.cpu_share if parts.cpu else 0.0)
        placed = shared.pool.place(found, lanes, parts.whole, shared.scheduler.way(self.index))
        first = beside = None
        if placed.keys.size:
            keys = placed.keys[: placed.slots.size].astype(np.int64)
            first = shared.scheduler.submit(self.index, keys, placed.slots, urgent=True, number=placed.transfer)
        if placed.beside.at.size:
            beside = self._start_beside(placed.beside)
        elif placed.keys.size and parts.cpu:
            device.rates.unused("cpu")
        if placed.whole:
            self._move_whole(placed)
        return Started(placed, first, beside)

    def finish(self, started: Started, total: Sum) -> float:
        """Add what has arrived since; returns the seconds waited."""
        waited, coming = 0.0, started.placed.coming
        if started.first is not None:
            self.shared.pool.spare(started.first.index.size)  # the next layer will need about as many slots
        if coming.at.size:
            waited += self.shared.scheduler.await_rows(self.index, self.shared.pool.keys(self.index, coming.places))
            self.add(coming, total)
        waited += self._add_copied(started, total)
        self.shared.scheduler.look()  # new requests queue behind what is on its way
        if started.beside is not None:
            total.beside(self.shared.device, started.beside)
        return waited

    def result(self, total: Sum) -> Result:
        """The step's result."""
        (counts,) = self.shared.device.sent(self.active.offsets.diff())
        if total.y is None or total.reached is None:
            return Result(
                self.choice, torch.zeros_like(self.there.hidden), torch.stack([counts, torch.zeros_like(counts)], 1)
            )
        return Result(self.choice, total.y, torch.stack([counts, total.reached], 1))

    def add(self, part: Part, total: Sum) -> None:
        """Compute rows that are on the device."""
        if part.at.size:
            total.rows(self, part)

    def _start_beside(self, part: Part) -> Future[Partial]:
        """Start the CPU's share. Its lists are its own: the part's are the next step's as well."""
        device, work = self.shared.device, self.choice.work
        hidden = self.hidden if self.hidden.is_cpu else device.fetched(self.hidden)[0]
        neurons = torch.from_numpy(np.take(self.active.neurons.numpy(), part.at))
        active = Active(torch.from_numpy(part.offsets), neurons, taken(self.active.values, part.at))
        rows, x_bits = self.ram().layer.rows, self.choice.ruled.preset.x_bits
        return device.rows_beside(hidden, rows, work.calls, active, work.products, x_bits)

    def _move_whole(self, placed: Placed) -> None:
        """If an expert is mostly active and partly absent, fetch the rest of it as well (CORM)."""
        neurons, table = self._neurons, self.shared.pool.layers[self.index]
        active = np.diff(self.active.offsets.numpy())
        missing = active - sum(np.diff(part.offsets) for part in (placed.ready, placed.coming, placed.late))
        mostly = active > self.shared.parts.whole * neurons
        for expert in self.choice.work.calls.experts.numpy()[mostly & (missing > 0)].tolist():
            rest = expert * neurons + np.flatnonzero(table[expert * neurons : (expert + 1) * neurons] < 0)
            if rest.size:
                self.shared.scheduler.fetch(self.index, rest, urgent=False, score=np.inf)

    def _add_copied(self, started: Started, total: Sum) -> float:
        """Add rows that were fetched for this step, in several loads if the pool is too small; returns
        seconds waited.
        """
        shared, placed, transfer, done, waited = self.shared, started.placed, started.first, 0, 0.0
        while transfer is not None:
            first, done = done, done + transfer.index.size
            if done > first:
                waited += shared.device.wait(transfer)
                shared.scheduler.collect()
                self.add(self._arrived(placed.copied, transfer, first, done), total)
            if done == placed.keys.size:
                break
            shared.scheduler.settle()  # rows that this step has computed may be evicted now
            transfer = shared.scheduler.fetch(self.index, placed.keys[done:].astype(np.int64), urgent=True)
        return waited

    def _arrived(self, copied: Part, transfer: Transfer, first: int, last: int) -> Part:
        """The part that the copied rows first..last-1 belong to."""
        if first == 0 and last == copied.at.size and self._of_one:
            return Part(copied.offsets, copied.at, transfer.slots)
        if self._of_one:  # both are in the same order
            offsets = np.clip(copied.offsets, first, last) - first
            return Part(offsets, copied.at[first:last], transfer.slots)
        mine = np.isin(copied.places, transfer.index)
        offsets = np.concatenate(([0], np.cumsum(mine)))[copied.offsets]
        return Part(offsets, copied.at[mine], self.shared.pool.layers[self.index][copied.places[mine]])

    def count(self, counts: LayerCounts, placed: Placed, waited: float) -> None:
        """Add to the telemetry where the rows were."""
        counts.ready += placed.ready.at.size
        counts.coming += placed.coming.at.size
        counts.copied += placed.copied.at.size
        counts.on_cpu += placed.beside.at.size
        counts.waited += waited
        if skipped := placed.skipped.at.size + placed.late.at.size:
            counts.left_out += skipped
            # `MoELayer.add_counts` counts them as read; their down halves are not read.
            counts.bytes -= skipped * self.choice.ruled.costs[1]
        counts.looked += placed.looked
        counts.hit += placed.hit
