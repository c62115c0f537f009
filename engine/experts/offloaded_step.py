"""A few tokens in one layer whose rows are in RAM: locate rows, place absent ones, compute, add up what arrived.

Lists are on the host, in numpy, and go to the device as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.cpu.native_pool import cut
from ...kernels.located import Located, Part
from ...kernels.types import Active, Calls
from ...kernels.weights import ExpertRows
from ..offload import missing_rows
from ..offload.device import Partial, taken
from ..offload.links.transfer import Transfer
from ..offload.offload import Offload
from ..offload.row_pool import Keys
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
class Needed:
    """Which rows a step waits for.

    Attributes:
        coming, absent: of the rows on their way and of the absent rows. without: the skipped ones, likewise; None if
            every row is awaited.
    """

    coming: Part
    absent: Part
    without: tuple[Part, Part] | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of the absent rows that a step needs.

    Attributes:
        copied: the rows that cross the link. keys: their keys, each once. first: the first transfer.
        beside: the CPU's sum over the others.
    """

    copied: Part
    keys: Keys
    first: Transfer | None = None
    beside: Future[Partial] | None = None


class Sum:
    """The running sum of a step.

    Attributes:
        y: (B, H). reached: (P,) neurons that reached the second threshold. None while nothing has arrived.
    """

    def __init__(self) -> None:
        self.y: Tensor | None = None
        self.reached: Tensor | None = None

    def add(self, y: Tensor, reached: Tensor) -> None:
        """Add a part."""
        self.y = y if self.y is None else self.y + y
        self.reached = reached if self.reached is None else self.reached + reached


@dataclass(frozen=True, slots=True)
class OffloadedStep:
    """A step whose active neurons are known: its stages, each with the results of those before it.

    Attributes:
        choice: on the host. ram: the layer's rows in RAM under the preset in force. hidden: (B, H) on the host; a
            prompt's on the device. there: the inputs on the device. active: on the host. values: on the device.
    """

    shared: Offload
    index: int
    choice: Choice
    ram: Callable[[], RuledLayer]
    hidden: Tensor
    there: StepInputs
    active: Active
    values: Tensor

    @property
    def _of_one(self) -> bool:
        """One token names no neuron twice."""
        return self.there.hidden.shape[0] == 1

    @property
    def _neurons(self) -> int:
        return self.choice.ruled.layer.rows.data.shape[1]

    def locate(self) -> Located:
        """Which of the rows are there, on their way, or absent."""
        pool, choice = self.shared.pool, self.choice
        heard = [0.0] * pool.slots.shape[1]
        for expert, score in zip(choice.experts.flatten().tolist(), choice.weights.flatten().tolist(), strict=True):
            heard[expert] += score / len(choice.experts)
        pool.heard(self.index, heard)
        experts, active = choice.work.calls.experts.numpy(), self.active
        return pool.locate(self.index, experts, active.offsets.numpy(), active.neurons.numpy(), self._neurons)

    def needed(self, located: Located) -> Needed:
        """Divide the rows that are not there into those that the step waits for and those that it skips."""
        late, coming, absent = self.choice.work.late, located.coming, located.absent
        if late is None or not (coming.at.size or absent.at.size):
            return Needed(coming, absent)
        limits = np.repeat(late.numpy(), _sizes(self.active.offsets.numpy()))
        # The row of a NaN value is awaited, so that the NaN reaches the result and is noticed.
        weak = self.active.values.float().abs().numpy() < limits
        without = _some(coming, weak[coming.at]), _some(absent, weak[absent.at])
        return Needed(_some(coming, ~weak[coming.at]), _some(absent, ~weak[absent.at]), without)

    def place(self, located: Located, needed: Needed) -> Placed:
        """Start the absent rows: copied over the link, or computed by the CPU from RAM (Fiddler)."""
        absent, missing = needed.absent, _sizes(located.absent.offsets)
        placed = self._placed(absent) if absent.at.size else Placed(absent, absent.places)
        if located.absent.at.size:
            if needed.without is not None:
                self._bring(needed.without[1], placed)
            self._move_whole(missing)
        return placed

    def finish(self, needed: Needed, placed: Placed, total: Sum) -> float:
        """Add what has arrived since; returns the seconds waited."""
        waited, coming = 0.0, needed.coming
        if placed.first is not None:
            self.shared.pool.spare(placed.first.index.size)  # the next layer will need about as many slots
        if coming.at.size:
            waited += self.shared.scheduler.await_rows(self.index, self.shared.pool.keys(self.index, coming.places))
            self.add(coming, total)
        waited += self._add_copied(placed, total)
        self.shared.scheduler.look()  # new requests queue behind what is on its way
        if placed.beside is not None:
            total.add(*self.shared.device.joined(placed.beside))
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
            device, there, x_bits = self.shared.device, self.there, self.choice.ruled.preset.x_bits
            rows = ExpertRows(self.choice.ruled.layer.rows.layout, self.shared.memory.rows[None])
            active = device.part(self.values, part.offsets, part.at, part.places)
            total.add(*device.rows(there.hidden, rows, there.calls, active, there.limits, x_bits))

    def _placed(self, absent: Part) -> Placed:
        copied, beside = absent, None
        if self.shared.parts.cpu:
            copied, beside = self._share_with_cpu(absent)
        keys = copied.places if self._of_one else np.unique(copied.places)
        first = self.shared.scheduler.fetch(self.index, keys, urgent=True) if keys.size else None
        return Placed(copied, keys, first, beside)

    def _share_with_cpu(self, absent: Part) -> tuple[Part, Future[Partial] | None]:
        """Returns the rows to copy, and the CPU's sum over the rest, which has been started."""
        device, calls, missing = self.shared.device, self.choice.work.calls, _sizes(absent.offsets)
        layer = self.ram().layer
        nbytes = [layer.rows.layout.nbytes] * missing.size
        queued = device.link.queued_bytes() / device.rates.link_bytes_s
        shares = missing_rows.share(
            missing.tolist(), nbytes, calls.weights.tolist(), device.rates, queued, device.cpu_share
        )
        if not any(shares):
            device.rates.unused("cpu")
            return absent, None
        # The CPU gets the last of each call: neurons are sorted by falling importance, and copied ones stay in the
        # pool.
        copied, rest = cut(absent, missing - np.array(shares))
        hidden = self.hidden if self.hidden.is_cpu else device.fetched(self.hidden)[0]
        neurons = torch.from_numpy(np.take(self.active.neurons.numpy(), rest.at))
        part = Active(torch.from_numpy(rest.offsets), neurons, taken(self.active.values, rest.at))
        work, x_bits = self.choice.work, self.choice.ruled.preset.x_bits
        return copied, device.rows_beside(hidden, layer.rows, calls, part, work.products, x_bits)

    def _bring(self, without: Part, placed: Placed) -> None:
        """Fetch absent rows that this step skips, with the lowest priority, for later tokens."""
        keys = np.setdiff1d(without.places, placed.keys)
        if keys.size:
            self.shared.scheduler.prefetch(self.index, keys, 0.0)

    def _move_whole(self, missing: NDArray[np.int64]) -> None:
        """If an expert is mostly active and partly absent, fetch the rest of it as well (CORM)."""
        neurons, table = self._neurons, self.shared.pool.layers[self.index]
        mostly = missing_rows.whole(_sizes(self.active.offsets.numpy()), neurons, self.shared.parts.whole)
        for expert in self.choice.work.calls.experts.numpy()[mostly & (missing > 0)].tolist():
            rest = expert * neurons + np.flatnonzero(table[expert * neurons : (expert + 1) * neurons] < 0)
            if rest.size:
                self.shared.scheduler.fetch(self.index, rest, urgent=False, score=np.inf)

    def _add_copied(self, placed: Placed, total: Sum) -> float:
        """Add rows that were fetched for this step, in several loads if the pool is too small; returns
        seconds waited.
        """
        shared, transfer, done, waited = self.shared, placed.first, 0, 0.0
        while transfer is not None:
            first, done = done, done + transfer.index.size
            if done > first:
                waited += shared.device.wait(transfer)
                shared.scheduler.collect()
                self.add(self._arrived(placed.copied, transfer, first, done), total)
            if done == placed.keys.size:
                break
            shared.scheduler.settle()  # rows that this step has computed may be evicted now
            transfer = shared.scheduler.fetch(self.index, placed.keys[done:], urgent=True)
        return waited

    def _arrived(self, copied: Part, transfer: Transfer, first: int, last: int) -> Part:
        """The part that the copied rows first..last-1 belong to."""
        if self._of_one:  # both are in the same order
            offsets = np.clip(copied.offsets, first, last) - first
            return Part(offsets, copied.at[first:last], transfer.slots.astype(np.int64))
        mine = np.isin(copied.places, transfer.index)
        offsets = np.concatenate(([0], np.cumsum(mine)))[copied.offsets]
        slots = self.shared.pool.layers[self.index][copied.places[mine]]
        return Part(offsets, copied.at[mine], slots.astype(np.int64))

    def count(self, counts: LayerCounts, located: Located, needed: Needed, placed: Placed, waited: float) -> None:
        """Add to the telemetry where the rows were."""
        counts.ready += located.ready.at.size
        counts.coming += needed.coming.at.size
        counts.copied += placed.copied.at.size
        counts.on_cpu += needed.absent.at.size - placed.copied.at.size
        counts.waited += waited
        for part in needed.without or ():
            counts.left_out += part.at.size
            # `MoELayer.add_counts` counts them as read; their down halves are not read.
            counts.bytes -= part.at.size * self.choice.ruled.costs[1]
        ends, absent = self.active.offsets.tolist(), located.absent.offsets.tolist()
        for call in range(len(ends) - 1):
            wanted = ends[call + 1] - ends[call]
            missing = absent[call + 1] - absent[call]
            counts.looked += wanted > 0
            counts.hit += wanted > 0 and 2 * (wanted - missing) >= wanted


def _sizes(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    return offsets[1:] - offsets[:-1]


def _some(part: Part, which: NDArray[np.bool_]) -> Part:
    """The neurons `which` (M,) of a part."""
    return Part(np.concatenate(([0], np.cumsum(which)))[part.offsets], part.at[which], part.places[which])
