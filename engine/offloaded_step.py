"""A few tokens in one layer whose rows lie in RAM: locate rows, place absent ones, compute, add up what has come.

Lists are the host's, in numpy, and go to the device as they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.cpu.native_pool import cut
from ..kernels.layouts import ExpertRows
from ..kernels.pool import Located, Part
from ..kernels.types import Active, Calls
from . import placement
from .cache import Keys
from .devices import Partial, taken
from .transfer import Transfer

if TYPE_CHECKING:
    from .offloaded import OffloadedLayer


@dataclass(frozen=True, slots=True)
class Given:
    """What a step computes with, on the device or on the host.

    Attributes:
        hidden: (B, H). limits: (P,) the second thresholds of the calls; None where the preset has none.
    """

    hidden: Tensor
    calls: Calls
    limits: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        """As `of` takes them."""
        limits = () if self.limits is None else (self.limits,)
        return (self.hidden, self.calls.tokens, self.calls.experts, self.calls.weights, *limits)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Given:
        """From what `tensors` names."""
        hidden, tokens, experts, weights, *limits = tensors
        return cls(hidden, Calls(tokens, experts, weights), limits[0] if limits else None)


class Step:
    """One step.

    Args:
        there, here: what it computes with, on the device and on the host; of a prompt `here` may have hidden states of
            the device. active: on the host. values: on the device.
        late: (P,) on the host, |up · x| below which an absent row is left out; None where every row is awaited.

    Attributes:
        y: (B, H) what is known so far; None for nothing.
    """

    def __init__(
        self, layer: OffloadedLayer, there: Given, here: Given, active: Active, values: Tensor, late: Tensor | None
    ) -> None:
        self.layer, self.shared, self.device = layer, layer.shared, layer.shared.device
        self.ruled, self.there, self.here, self.active, self.values = layer.ruled, there, here, active, values
        self.rows = ExpertRows(self.ruled.layer.rows.layout, self.shared.rows[None])
        self._late = late
        self.y: Tensor | None = None
        self._reached: Tensor | None = None
        self._found: Located
        self._awaited: Part  # of the rows on their way
        self._absent: Part  # those of the absent rows that are needed
        self._left_out: list[Part] = []
        self._copied: Part
        self._left: Keys
        self._beside: list[Future[Partial]] = []
        self._first: Transfer | None = None
        self._waited = 0.0
        self._of_one = there.hidden.shape[0] == 1  # one token names no neuron twice

    def locate(self) -> None:
        """Which of the rows are there, on their way, or absent."""
        pool, layer = self.shared.pool, self.layer
        scores, heard = layer.scores.flatten().tolist(), [0.0] * pool.slots.shape[1]
        for expert, score in zip(layer.chosen.flatten().tolist(), scores, strict=True):
            heard[expert] += score / len(layer.chosen)
        pool.heard(layer.index, heard)
        experts, neurons = self.here.calls.experts.numpy(), self.ruled.layer.rows.data.shape[1]
        self._found = pool.locate(
            layer.index, experts, self.active.offsets.numpy(), self.active.neurons.numpy(), neurons
        )
        self._awaited, self._absent = self._found.coming, self._found.absent
        if self._late is not None and (self._awaited.at.size or self._absent.at.size):
            self._leave_out(self._late)

    def place(self) -> None:
        """Start the absent rows: on their way, or computed by the CPU where they lie (Fiddler)."""
        absent = self._absent
        self._copied, self._left = absent, absent.places
        if absent.at.size:
            if self.shared.parts.cpu:
                self._copied = self._share_with_cpu(_sizes(absent.offsets))
            self._left = self._copied.places if self._of_one else np.unique(self._copied.places)
            if self._left.size:
                self._first = self.shared.fetch(self.layer.index, self._left, urgent=True)
        if self._found.absent.at.size:
            self._bring_left_out()
            self._move_whole(_sizes(self._found.absent.offsets))

    def compute(self) -> None:
        """What is there already."""
        self._add(self._found.ready)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Add what has come since: y (B, H) and counts (P, 2) as `kernels.moe_step` gives them."""
        coming = self._awaited
        if self._first is not None:
            self.shared.pool.spare(self._first.index.size)  # the next layer will need about as many
        if coming.at.size:
            keys = self.shared.pool.keys(self.layer.index, coming.places)
            self._waited += self.shared.await_rows(self.layer.index, keys)
            self._add(coming)
        self._add_copied()
        self.shared.look()  # what is asked for now follows what is on its way
        for started in self._beside:
            self._sum(*self.device.joined(started))
        if self.layer.control.counting:
            self._count()
        (counts,) = self.device.sent(self.active.offsets.diff())
        if self.y is None or self._reached is None:
            return torch.zeros_like(self.there.hidden), torch.stack([counts, torch.zeros_like(counts)], 1)
        return self.y, torch.stack([counts, self._reached], 1)

    def _leave_out(self, late: Tensor) -> None:
        """Divide the rows that are not there into those that the step waits for and those that it does without."""
        limits = np.repeat(late.numpy(), _sizes(self.active.offsets.numpy()))
        # A value that is not a number is awaited, so that it reaches the result and is noticed.
        weak = self.active.values.float().abs().numpy() < limits
        self._left_out = [_some(part, weak[part.at]) for part in (self._awaited, self._absent)]
        self._awaited, self._absent = (_some(part, ~weak[part.at]) for part in (self._awaited, self._absent))

    def _bring_left_out(self) -> None:
        """Fetch absent rows that this step does without, behind all else, for later tokens."""
        if self._left_out:
            keys = np.setdiff1d(self._left_out[1].places, self._left)
            if keys.size:
                self.shared.prefetch(self.layer.index, keys, 0.0)

    def _share_with_cpu(self, missing: NDArray[np.int64]) -> Part:
        """What is copied; the rest is begun."""
        device, absent, calls = self.device, self._absent, self.here.calls
        layer, x_bits = self.layer.in_ram().layer, self.ruled.preset.x_bits
        nbytes = [layer.rows.layout.nbytes] * missing.size
        queued = device.link.queued_bytes() / device.rates.link_bytes_s
        shares = placement.share(
            missing.tolist(), nbytes, calls.weights.tolist(), device.rates, queued, device.cpu_share
        )
        if not any(shares):
            device.rates.unused("cpu")
            return absent
        # The last of each call: neurons lie by falling importance, and those that are copied stay for later tokens.
        copied, rest = cut(absent, missing - np.array(shares))
        hidden = self.here.hidden if self.here.hidden.is_cpu else device.fetched(self.here.hidden)[0]
        neurons = torch.from_numpy(np.take(self.active.neurons.numpy(), rest.at))
        part = Active(torch.from_numpy(rest.offsets), neurons, taken(self.active.values, rest.at))
        self._beside.append(device.rows_beside(hidden, layer.rows, calls, part, self.here.limits, x_bits))
        return copied

    def _move_whole(self, missing: NDArray[np.int64]) -> None:
        """Of an expert that is mostly active and partly absent, bring the rest as well (CORM)."""
        neurons, table = self.ruled.layer.rows.data.shape[1], self.shared.pool.layers[self.layer.index]
        mostly = placement.whole(_sizes(self.active.offsets.numpy()), neurons, self.shared.parts.whole)
        for expert in self.here.calls.experts.numpy()[mostly & (missing > 0)].tolist():
            rest = expert * neurons + np.flatnonzero(table[expert * neurons : (expert + 1) * neurons] < 0)
            if rest.size:
                self.shared.fetch(self.layer.index, rest, urgent=False, score=np.inf)

    def _add_copied(self) -> None:
        """Rows that were fetched for this step; where the pool is smaller than that, load after load."""
        shared, transfer, done = self.shared, self._first, 0
        while transfer is not None:
            first, done = done, done + transfer.index.size
            if done > first:
                self._waited += self.device.wait(transfer)
                shared.collect()
                self._add(self._arrived(transfer, first, done))
            if done == self._left.size:
                return
            shared.settle()  # what this step has computed may go now
            transfer = shared.fetch(self.layer.index, self._left[done:], urgent=True)

    def _arrived(self, transfer: Transfer, first: int, last: int) -> Part:
        """What the rows first..last-1 of those that are copied are for."""
        copied = self._copied
        if self._of_one:  # they are listed in the same order
            offsets = np.clip(copied.offsets, first, last) - first
            return Part(offsets, copied.at[first:last], transfer.slots.astype(np.int64))
        mine = np.isin(copied.places, transfer.index)
        offsets = np.concatenate(([0], np.cumsum(mine)))[copied.offsets]
        slots = self.shared.pool.layers[self.layer.index][copied.places[mine]]
        return Part(offsets, copied.at[mine], slots.astype(np.int64))

    def _add(self, part: Part) -> None:
        if part.at.size:
            there, x_bits = self.there, self.ruled.preset.x_bits
            active = self.device.part(self.values, part.offsets, part.at, part.places)
            self._sum(*self.device.rows(there.hidden, self.rows, there.calls, active, there.limits, x_bits))

    def _sum(self, y: Tensor, reached: Tensor) -> None:
        self.y = y if self.y is None else self.y + y
        self._reached = reached if self._reached is None else self._reached + reached

    def _count(self) -> None:
        counts, found = self.layer.telemetry.layers[self.layer.index], self._found
        counts.ready += found.ready.at.size
        counts.coming += self._awaited.at.size
        counts.copied += self._copied.at.size
        counts.on_cpu += self._absent.at.size - self._copied.at.size
        counts.waited += self._waited
        for part in self._left_out:
            counts.left_out += part.at.size
            # Counted as read where neurons are, by `MoELayer.add_counts`; none of their down halves is.
            counts.bytes -= part.at.size * self.ruled.costs[1]
        ends, absent = self.active.offsets.tolist(), found.absent.offsets.tolist()
        for call in range(len(ends) - 1):
            wanted = ends[call + 1] - ends[call]
            missing = absent[call + 1] - absent[call]
            counts.looked += wanted > 0
            counts.hit += wanted > 0 and 2 * (wanted - missing) >= wanted


def _sizes(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    return offsets[1:] - offsets[:-1]


def _some(part: Part, which: NDArray[np.bool_]) -> Part:
    """Those of a part's neurons, `which` (M,)."""
    return Part(np.concatenate(([0], np.cumsum(which)))[part.offsets], part.at[which], part.places[which])
